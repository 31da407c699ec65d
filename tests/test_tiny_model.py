"""The cold start's demonstrations: in the tiny model's words, within the rules, and packed without leaking."""

import sys

import pytest
import torch
from conftest import ROOT

import reward

sys.path.insert(0, str(ROOT / "data"))
import make_tiny_model as tm  # noqa: E402


@pytest.fixture(scope="module")
def demonstrations():
    return tm.make_demonstrations(7, tm.STAGES[-1]) + tm.make_demonstrations(8, tm.STAGES[0])


def test_the_script_makes_the_shipped_tokenizer(tiny):
    assert tm.TOKENIZER.get_vocab() == tiny[1].get_vocab()


def test_every_word_is_known_and_fits(demonstrations):
    for ids, *_ in demonstrations:
        assert tm.TOKENIZER.unk_token_id not in ids and len(ids) < 768


@pytest.mark.parametrize("group", ["0", "1", "2", "3", "hard"])
def test_demonstrations_are_valid_and_worth_what_they_should(group):
    rng, world, retriever = tm.small_world(3)
    totals = []
    while len(totals) < 20:
        demo = tm.demonstrate(rng, world, retriever, group, tm.STAGES[-1])
        if demo is None:
            continue
        turns = [text for text, weight, branch in demo.segments if weight == 1.0 and branch == 0]
        assert all(reward.valid_steps(turns)) and len(turns) == demo.searches + 1 <= tm.MAX_SEARCHES + 1
        totals.append(demo.searches)
    assert len(set(totals)) > 1, "some search more than others"


def test_a_branch_sees_the_trajectory_so_far_and_itself(tiny, demonstrations):
    """Packed behind the trajectory, a self-answer gets the logits that it gets when it follows directly."""
    model, _ = tiny
    ids, weights, branches, starts = max(demonstrations, key=lambda demo: max(demo[2]))
    assert max(branches) >= 2
    batch_ids, _, positions, bias = tm.collate([(ids, weights, branches, starts)])
    with torch.no_grad():
        packed = model(input_ids=batch_ids, position_ids=positions, attention_mask=bias).logits[0]
        for branch in range(1, max(branches) + 1):
            at = [i for i, b in enumerate(branches) if b == branch]
            alone = model(torch.tensor([ids[: starts[at[0]]] + [ids[i] for i in at]])).logits[0, -len(at) :]
            torch.testing.assert_close(packed[at], alone, atol=1e-3, rtol=1e-3)
