"""Models: 4-bit weights, adapters that are loaded, merged for rollouts, and written for good."""

import json
import math

import pytest
import torch
from conftest import adamw, log_of, trainable

import rollout as ro
import train as tr
from plumbing import models, options, runs
from plumbing.files import DataError
from plumbing.prompts import encode_prompt
from train import TrainSettings


def load_moved(scale):
    """The tiny Policy with an adapter that is not zero."""
    policy = models.load_trainable(TrainSettings())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
    return policy


def test_one_step_in_4bit(run_train, tmp_path, played):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    small = ["--steps", "1", "--eval_questions", "", "--name", "q"]
    folder = run_train(tmp_path, "--load_in_4bit", "true", *small)
    assert math.isfinite(log_of(folder)[0]["loss"])
    assert json.loads((folder / "config.json").read_text())["load_in_4bit"]
    model, _ = models.load_trainable(TrainSettings(load_in_4bit=True), folder / "adapter")
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(bitsandbytes.nn.Linear4bit) == 28
    advantages = torch.linspace(-1, 1, len(played))
    tr.update(model, adamw(model), played, advantages, 1e-3, TrainSettings())
    assert all(p.norm() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_4bit_without_bitsandbytes_is_one_line(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="bitsandbytes, which is not installed"):
        options.parse_training(TrainSettings, ["--load_in_4bit", "true"], "")
    assert options.parse_training(TrainSettings, [], "")[0].load_in_4bit is False


def test_a_loaded_adapter_stays_trainable(lora, tmp_path):
    runs.save_checkpoint(lora.model, adamw(lora.model), 3, tmp_path / "adapter")
    again, _ = models.load_trainable(TrainSettings(), runs.find_checkpoint(tmp_path))
    sizes = [p.numel() for p in trainable(again)]
    assert sizes == [p.numel() for p in trainable(lora.model)] and sum(sizes) > 0


def test_rollouts_use_the_adapter_and_leave_the_weights_as_they_were(played):
    model, _ = load_moved(0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([played[0].prompt_ids])
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(ids).logits, atol=0.1)
        model.train()
        with models.inference_weights(model):
            assert not model.training
            torch.testing.assert_close(model(ids).logits, adapted, atol=1e-3, rtol=1e-3)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_merging_writes_an_ordinary_model(tmp_path):
    model, tokenizer = load_moved(0.05)
    model.eval()
    runs.save_checkpoint(model, adamw(model), 1, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.json").write_text("{}")
    arguments = ["--resume", str(tmp_path / "run"), "--merge", str(tmp_path / "merged")]
    tr.main(arguments)
    merged, again = models.load_policy(tmp_path / "merged")
    prompt = "Who is the author of Amber Ivy?", ro.SYSTEM_PROMPT
    ids = encode_prompt(tokenizer, *prompt)
    assert encode_prompt(again, *prompt) == ids
    ids = torch.tensor([ids])
    with torch.no_grad():
        difference = (merged(ids).logits - model(ids).logits).abs().max()
        with model.disable_adapter():
            without = (merged(ids).logits - model(ids).logits).abs().max()
    assert difference < 0.2 * without, "bfloat16 rounds, but the adapter must be there"
    with pytest.raises(DataError, match="exists already"):
        tr.main(arguments)
    with pytest.raises(DataError, match="--merge: needs --resume"):
        tr.main(["--merge", "x"])
