"""Generation on one cache: nothing is computed twice, and what is fused to a tag stays with it."""

import re

import pytest
import torch
from conftest import CountingRetriever, play
from test_rollout import sampled_ids

import rollout as ro
from plumbing import generation
from plumbing.files import DataError
from rollout import RolloutSettings, Sampling, rollout


def test_no_token_goes_through_the_model_twice(tiny, world, monkeypatch):
    """Counted are the tokens that calls add to the cache, those masked at once not included."""
    seen, answers, branch = [], [], generation.CachedBatch.branch

    def counting(method):
        def counted(batch, *arguments):
            before = int(batch.mask.sum())
            result = method(batch, *arguments)
            seen.append(int(batch.mask.sum()) - before)
            return result

        return counted

    def noting(batch, rows, *arguments):
        written = branch(batch, rows, *arguments)
        answers.extend(zip(rows, written))
        return written

    for name in ("append", "write"):
        method = getattr(generation.CachedBatch, name)
        monkeypatch.setattr(generation.CachedBatch, name, counting(method))
    monkeypatch.setattr(generation.CachedBatch, "branch", noting)
    sampling = Sampling(num_generations=3)
    done = rollout(tiny, world.questions[:4], world.retriever, RolloutSettings(), sampling)
    prompts = sum(len(t.prompt_ids) for t in done[::3])  # once for a group
    completions = sum(len(t.completion_ids) - 1 for t in done)  # nothing follows the last token
    assert len(answers) >= sum(t.search_depth for t in done) > 0
    branches = sum(len(probe) + len(answer.ids) - 1 for probe, answer in answers)
    assert sum(seen) == prompts + completions + branches


def test_a_token_costs_one_wait_for_the_device(tiny, world, monkeypatch):
    """Whatever the number of rows, the sampled ids come back once a token. (`__bool__` is the
    library's: it looks once a forward pass whether the mask has a hole.)"""
    waits = []
    for name in ("tolist", "item", "__bool__", "__int__", "cpu", "numpy"):
        method = getattr(torch.Tensor, name)

        def counted(tensor, *arguments, method=method):
            waits.append(method.__name__)
            return method(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)
    prompt = tiny.tokenizer(world.questions[0]["question"])["input_ids"]
    per_token = []
    for rows in (2, 16):
        batch, logits = generation.CachedBatch.start(tiny, [prompt], rows)
        waits.clear()
        batch.write(logits, 12, re.compile("never"), generation.Sampler(1.0, 0, "cpu"))
        per_token.append({name: waits.count(name) for name in set(waits)})
    assert per_token == [{"tolist": 12 + 1, "__bool__": 11 + 1}] * 2


def fused_to_the_tag(tokenizer):
    """A token that closes a tag and goes on behind it."""
    texts = (">\n\n", ">\n", ">\n\n<")
    return next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) in texts)


def test_what_is_fused_to_the_tag_stays_and_is_trained(bpe, script):
    tokenizer, fused = bpe.tokenizer, fused_to_the_tag(bpe.tokenizer)
    head = tokenizer("<think>a</think><search>Lune</search")["input_ids"] + [fused]
    script(tokenizer, [head, "<think>b</think><answer>x</answer>"])
    trajectory = play(bpe)
    assert trajectory.completion_ids[: len(head)] == head
    assert all(trajectory.completion_mask[: len(head)])
    first = trajectory.turns[0]
    assert first.query == "Lune" and first.text.endswith("</search" + tokenizer.decode([fused]))


def test_forced_search_replaces_what_is_fused_to_the_tags(bpe, script):
    tokenizer, fused = bpe.tokenizer, fused_to_the_tag(bpe.tokenizer)
    mark = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "?</")
    thought = tokenizer("<think>done</think")["input_ids"] + [fused]
    query = tokenizer("lune")["input_ids"] + [mark]
    answer = "<think>b</think><answer>Nile</answer>"
    script(tokenizer, [thought, query, answer])
    retriever = CountingRetriever()
    trajectory = play(bpe, retriever, force_depth=1)
    assert trajectory.steps == ["<think>done</think> <search>lune?</search>", answer]
    assert retriever.asked == ["lune?"] and trajectory.stop == "answer"
    sampled = tokenizer.decode(sampled_ids(trajectory))
    assert sampled.startswith("<think>done</thinklune<think>b")
    assert ro.FORCED.format(depth=1) in tokenizer.decode(trajectory.prompt_ids)


def test_logits_that_are_not_finite_are_one_line(bpe, monkeypatch):
    def spoiled(states):
        return states[..., :1].expand(-1, -1, len(bpe.tokenizer)) * float("nan")

    monkeypatch.setattr(bpe.model.lm_head, "forward", spoiled)
    with pytest.raises(DataError, match="logits are not finite"):
        play(bpe)
