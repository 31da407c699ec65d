"""The cold start's demonstrations: in the tiny model's words, valid, packed without leaking."""

import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

import reward
from plumbing.files import DataError
from plumbing.models import encode

sys.path.insert(0, str(ROOT / "data"))
import make_tiny_model as tm  # noqa: E402


@pytest.fixture(scope="module")
def demonstrations():
    return tm.make_demonstrations(7, tm.STAGES[-1]) + tm.make_demonstrations(8, tm.STAGES[0])


def test_the_script_makes_the_shipped_tokenizer(tiny):
    assert tm.TOKENIZER.get_vocab() == tiny.tokenizer.get_vocab()


def test_every_word_is_known_and_fits(demonstrations):
    for ids, *_ in demonstrations:
        assert tm.TOKENIZER.unk_token_id not in ids and len(ids) < 768


LAST = tm.STAGES[-1]
STAGES = [(group, LAST) for group in ("0", "1", "2", "3", "hard")]
STAGES += [("0", replace(LAST, knows_famous=False)), ("4", replace(LAST, **tm.DEEP))]


@pytest.mark.parametrize("group, stage", STAGES)
def test_demonstrations_are_valid_and_worth_what_they_should(group, stage):
    rng, world, retriever = tm.small_world(3)
    searches = []
    while len(searches) < 20:
        demo = tm.demonstrate(rng, world, retriever, group, stage)
        if demo is None:
            continue
        turns = [turn.text for turn in demo.trajectory.turns if turn.action]
        assert all(reward.valid_steps(turns))
        assert len(turns) == demo.trajectory.search_depth + 1 <= stage.max_searches + 1
        written = zip(demo.trajectory.completion_ids, demo.weights)
        trained = [token for token, weight in written if weight == 1.0]
        assert trained == [i for text in turns for i in encode(tm.TOKENIZER, text)]
        searches.append(demo.trajectory.search_depth)
    assert len(set(searches)) > 1, "some search more than others"
    if not stage.knows_famous:
        assert min(searches) == 1
    if group == "4":
        assert max(searches) == 6 and min(searches) < 4, "some give up"


def test_a_branch_sees_the_trajectory_so_far_and_itself(tiny, demonstrations):
    """Packed behind the trajectory, a self-answer gets the logits that it gets right after it."""
    ids, weights, branches, starts = max(demonstrations, key=lambda demo: max(demo[2]))
    assert max(branches) >= 2
    batch = tm.collate([(ids, weights, branches, starts)])
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    with torch.no_grad():
        packed = tiny.model(**inputs).logits[0]
        for branch in range(1, max(branches) + 1):
            at = [i for i, b in enumerate(branches) if b == branch]
            row = ids[: starts[at[0]]] + [ids[i] for i in at]
            alone = tiny.model(torch.tensor([row])).logits[0, -len(at) :]
            torch.testing.assert_close(packed[at], alone, atol=1e-3, rtol=1e-3)


def test_what_would_fail_after_the_training_fails_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tm, "train_stage", lambda *_: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="--batch_size 0: must be above 0"):
        tm.main(["--batch_size", "0", "--out", str(tmp_path / "new")])
    with pytest.raises(DataError, match="--start_from nowhere: there is no model"):
        tm.main(["--start_from", "nowhere", "--out", str(tmp_path / "new")])
    with pytest.raises(OSError, match="file"):
        tm.main(["--out", str(tmp_path / "file")])
