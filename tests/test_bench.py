"""The speed table can still be made: tiny sizes, no number is judged."""

import re

import bench
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rollout import RolloutSettings, rollout
from train import TrainSettings, inference_weights, update


def test_the_table_can_be_made(capsys):
    bench.main(["--quick"])
    out = capsys.readouterr().out
    numbers = dict(re.findall(r"^\| (.+?) \| ([\d.,]+) ", out, flags=re.MULTILINE))
    assert all(float(number.replace(",", "")) > 0 for number in numbers.values())
    assert {"4 rollouts: ours", "BM25, 100 passages: rank-bm25", "step of 6 rollouts", "- self_answer", "- update",
            "update's share of the matrix product's rate", "step, 3 passages a search"} < set(numbers)  # fmt: skip
    assert "same top 3: 3 of 3" in out and out.count("same ids") == 3
    for package, name in (("trl", "TRL"), ("bm25s", "bm25s")):
        assert f": {name} |" in out or f"pip install {package} |" in out


def test_the_operations_of_an_update_are_those_that_pytorch_counts(world):
    model, tokenizer, optimizer = bench.load_trainable()
    retriever, questions = world
    with inference_weights(model):
        trajectories = rollout(
            model, tokenizer, questions[:2], retriever, RolloutSettings(), self_answers=False
        )
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        update(
            model, optimizer, trajectories, torch.ones(2), 0.0, TrainSettings(micro_batch_size=1)
        )
    products = counter.get_flop_counts()["Global"]
    unmasked = (
        products[torch.ops.aten.bmm] / 2
    )  # it counts the half of attention that the causal mask hides
    expected = counter.get_total_flops() - unmasked
    assert bench.update_flops(model, trajectories) == pytest.approx(expected, rel=0.03)
