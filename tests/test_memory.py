"""Memory: logits computed a piece at a time are the same and take less; what `measured` says."""

import itertools
import json
import re
import sys

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from plumbing import memory
from train import make_micro_batches, per_token_logps


def test_logits_in_pieces_are_the_same(lora, played, monkeypatch):
    batch = make_micro_batches(played, torch.ones(len(played)), 4096, "cpu")[0]
    results = []
    for size in (memory.LOGITS_AT_ONCE, 7 * lora.model.config.vocab_size):
        monkeypatch.setattr(memory, "LOGITS_AT_ONCE", size)
        lora.model.zero_grad()
        logps, entropy = per_token_logps(lora.model, batch, 0.7)
        logps.sum().backward()
        gradients = [p.grad.clone() for p in lora.model.parameters() if p.grad is not None]
        results.append((logps.detach(), entropy, *gradients))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
    lora.model.zero_grad()


def allocated_peak(work, folder):
    """Most bytes that torch had allocated while `work()` ran, by the profiler's log."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = sorted(events, key=lambda event: event["ts"])
    changes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return max(itertools.accumulate(changes))


def test_the_logits_of_one_piece_at_a_time_are_in_memory(monkeypatch, tmp_path):
    rows, width, vocab_size = 1000, 4, 5000
    states = torch.randn(rows, width, requires_grad=True)
    head, sampled = torch.randn(width, vocab_size), torch.zeros(rows, 1, dtype=torch.long)

    def work():
        def score(states, sampled):
            logps = (states @ head).log_softmax(-1)
            return logps.gather(1, sampled)[:, 0], logps.detach().sum(-1)

        logps, _ = memory.in_pieces(score, states, sampled, vocab_size)
        logps.sum().backward()

    logits = 4 * rows * vocab_size  # bytes
    assert allocated_peak(work, tmp_path) > 2 * logits
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", 100 * vocab_size)
    assert allocated_peak(work, tmp_path) < logits / 2


def test_without_a_way_to_tell_the_peak_is_nan(monkeypatch, capsys):
    """`resource` is not there on Windows."""
    monkeypatch.setitem(sys.modules, "resource", None)
    with memory.measured("rollout"):
        pass
    assert capsys.readouterr().out.endswith("peak    nan GiB\n")


def test_seconds_and_peak_are_printed(capsys):
    with memory.measured("rollout"):
        pass
    line = capsys.readouterr().out
    peak = re.fullmatch(r"     rollout       0\.0 s   peak +(\d+\.\d\d) GiB\n", line)[1]
    now, most = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    assert 0.9 * now < 2**30 * float(peak) < most
