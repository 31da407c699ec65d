"""The speed table can still be made: tiny sizes, no number is judged."""

import re

import bench
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from plumbing import adapters
from rollout import RolloutSettings, Sampling, rollout
from train import TrainSettings, update

LINES = {"4 rollouts: ours", "BM25, 100 passages: rank-bm25", "step of 6 rollouts"}
LINES |= {"- self_answer", "- update", "update's share of the matrix product's rate"}
LINES |= {"step, 3 passages a search"}


def test_the_table_can_be_made(capsys):
    bench.main(["--quick"])
    out = capsys.readouterr().out
    numbers = dict(re.findall(r"^\| (.+?) \| ([\d.,]+) ", out, flags=re.MULTILINE))
    assert all(float(number.replace(",", "")) > 0 for number in numbers.values())
    assert LINES < set(numbers)
    assert "same top 3: 3 of 3" in out and out.count("same ids") == 3
    for package, name in (("trl", "TRL"), ("bm25s", "bm25s")):
        assert f": {name} |" in out or f"pip install {package} |" in out


def test_the_operations_of_an_update_are_those_that_pytorch_counts(world):
    policy, optimizer = bench.load_trainable()
    settings, sampling = RolloutSettings(), Sampling(self_answers=False)
    with adapters.inference_weights(policy.model):
        played = rollout(policy, world.questions[:2], world.retriever, settings, sampling)
    settings = TrainSettings(micro_batch_tokens=1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        update(policy.model, optimizer, played, torch.ones(2), 0.0, settings)
    products = counter.get_flop_counts()["Global"]
    unmasked = products[torch.ops.aten.bmm] / 2  # it counts what the causal mask hides
    expected = counter.get_total_flops() - unmasked
    assert bench.update_flops(policy.model, played) == pytest.approx(expected, rel=0.03)
