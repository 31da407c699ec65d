"""The released rules against the released code's own rewards, which stand outside the project in ../shared."""

import json
from pathlib import Path

import pytest

from reward import RELEASED, extract_self_answer, score

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "official_rewards.jsonl"
WHOLE_TEXT = RELEASED.whole_text_self_answer


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases/official_rewards.jsonl is not there")
def test_released_rewards_are_the_released_codes():
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 280
    wrong = []
    for case in cases:
        answers = [extract_self_answer(raw, WHOLE_TEXT) for raw in case["self_answers"]]
        scored = score([turn["text"] for turn in case["turns"]], case["golden_answers"], answers, RELEASED)
        if scored.steps != pytest.approx(case["official_turn_rewards"], rel=0, abs=1e-4):
            wrong.append((case["id"], scored.steps, case["official_turn_rewards"]))
    assert not wrong
