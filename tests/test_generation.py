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
    """Every token of prompts, trajectories and branches is forwarded once, but for those that end
    a trajectory or a branch at its very last position: nothing needs them. What rows that have
    ended go on to say, until the others have ended too, is masked."""
    cached, waiting, answers = [], [], []  # tokens that a call adds to the cache, or leaves
    append, write = generation.CachedBatch.append, generation.CachedBatch.write
    branch = generation.CachedBatch.branch

    def counting_append(batch, rows):
        new, columns = batch.pending, batch.mask.shape[1]
        new = [pending + row for pending, row in zip(new, rows)]
        logits = append(batch, rows)
        assert batch.mask[:, columns:].sum(1).tolist() == list(map(len, new))
        cached.append(sum(map(len, new)))
        waiting.append(-sum(len(pending) - len(row) for pending, row in zip(new, rows)))
        return logits

    def counting_write(batch, *arguments):
        before = batch.lengths.clone()
        written = write(batch, *arguments)
        longest = max(len(piece.ids) for piece in written)
        for piece, pending, grown in zip(written, batch.pending, batch.lengths - before):
            was_last = len(piece.ids) == longest  # then, and only then, it was not forwarded
            assert pending == (piece.ids[-1:] if was_last else [])
            assert grown == len(piece.ids) - was_last
        assert batch.mask.sum(1).tolist() == batch.lengths.tolist()
        cached.append(int((batch.lengths - before).sum()))
        waiting.append(sum(map(len, batch.pending)))
        return written

    def noting_branch(batch, rows, *arguments):
        written = branch(batch, rows, *arguments)
        answers.extend(zip(rows, written))
        return written

    for method in (counting_append, counting_write, noting_branch):
        monkeypatch.setattr(generation.CachedBatch, method.__name__.split("_")[1], method)
    sampling = Sampling(num_generations=3)
    done = rollout(tiny, world.questions[:4], world.retriever, RolloutSettings(), sampling)
    assert len(answers) >= sum(t.search_depth for t in done) > 0
    prompts = sum(len(t.prompt_ids) for t in done[::3])  # once for a group
    completions = sum(len(t.completion_ids) for t in done)
    branches = sum(len(probe) + len(answer.ids) for probe, answer in answers)
    assert sum(cached) + sum(waiting) == prompts + completions + branches


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


def test_the_cache_is_allocated_once_for_a_rollout(tiny, world, monkeypatch):
    """Blocks that grow turn by turn would never fit what was freed before: on a GPU the memory
    reserved would be a multiple of the memory in use. Rows that end give up no memory and cost
    none, since those that go on move up in the same buffers."""
    buffers, move, extend = {}, generation.moved, generation.extended

    def noting(step):
        def noted(cached, *arguments):
            result = step(cached, *arguments)
            buffers.setdefault(step.__name__, set()).add(result.untyped_storage().data_ptr())
            return result

        return noted

    starts = []
    monkeypatch.setattr(generation, "extended", noting(extend))
    monkeypatch.setattr(generation, "moved", noting(move))
    repeat = generation.DynamicCache.batch_repeat_interleave

    def started(cache, repeats):
        repeat(cache, repeats)
        buffers.clear()
        starts.append(repeats)

    monkeypatch.setattr(generation.DynamicCache, "batch_repeat_interleave", started)
    done = rollout(tiny, world.questions[:6], world.retriever, RolloutSettings(), Sampling(4))
    assert starts == [4] and len({t.search_depth for t in done}) > 2  # some end before others
    per_layer = 2  # keys and values
    assert len(buffers["extended"]) == per_layer * tiny.model.config.num_hidden_layers
    assert buffers["moved"] <= buffers["extended"]


def test_moving_rows_up_keeps_what_they_hold(tiny):
    torch.manual_seed(0)
    new, more = torch.randn(5, 2, 7, 3), torch.randn(3, 2, 1, 3)
    cached = generation.extended(new[:, :, :0], new, 20)
    rows, columns = torch.tensor([0, 2, 4]), torch.tensor([[1, 2, 6], [0, 3, 4], [4, 5, 6]])
    kept = generation.moved(cached, rows, columns)
    for i, (row, at) in enumerate(zip(rows, columns)):
        assert torch.equal(kept[i], new[row][:, at])
    again = generation.extended(kept, more, 20)
    assert torch.equal(again[:, :, :3], kept) and torch.equal(again[:, :, 3:], more)
    assert again.untyped_storage().data_ptr() == cached.untyped_storage().data_ptr()


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
