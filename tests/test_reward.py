"""The rewards by hand: tables of trajectories with worked values; scoring, parsing, repeats."""

import json
import random
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from builders import answer, search, trajectory

import retriever
import reward
import rollout
from reward import (
    HELP,
    PAPER,
    RELEASED,
    REWARDS,
    TAGS,
    cosine,
    efficiency_rewards,
    exact_match,
    extract_self_answer,
    f1,
    is_repeat,
    is_valid_step,
    normalize_answer,
    parse_action,
    quality_rewards,
    released_self_answer,
    score,
    sufficient_depth,
    tfidf,
    valid_steps,
)

GOLDS = ["Blue Nile Delta", "Al Jazirah"]
QUERIES = ["mouth of the river", "capital of France", "author of Dune", "height of Everest"]

# One letter per turn. s is a well-formed search for something new.
TURNS = {
    # well formed, repeats the first s
    "r": f"<think>again</think><search>{QUERIES[0]}</search>",
    # text outside the tags; the search still runs
    "x": "<think>a</think> then <search>who built it</search>",
    "n": "<think>still thinking",  # no action
    "e": "<think>a</think><search> </search>",  # empty query
    "A": "<think>a</think>\n<answer> the Blue Nile delta </answer>",  # right
    "W": "<think>a</think><answer>Rome</answer>",  # wrong
    "B": "<think>a</think><answer>Blue Nile Delta</answer> done",  # right, badly formed
    "V": "<answer>Rome</answer>",  # wrong, badly formed
}
# One sign per self-answer, with its F1 against the first alias (three words).
ANSWERS = {
    "+": "Blue Nile Delta",  # EM 1, F1 1
    "l": "Al Jazirah",  # the second alias: EM 1, against the first alias 0
    "t": "Blue Nile",  # two words of three: F1 = 2 * 2 / (2 + 3) = 0.8
    "d": "Blue Nile River",  # two common words, three and three: F1 = 2 * 2 / (3 + 3) = 0.6667
    "h": "Nile",  # one word of three: F1 = 2 * 1 / (1 + 3) = 0.5
    "-": "Rome",  # 0
    ".": None,  # not asked
}


def build(letters):
    """The texts of a row; the k-th s searches for the k-th query."""
    queries, texts = iter(QUERIES), []
    for letter in letters:
        is_new = letter == "s"
        text = f"<think>a</think> <search> {next(queries)} </search>" if is_new else TURNS[letter]
        texts.append(text)
    return texts


def ok(efficiency, quality):
    """(format, outcome, efficiency, quality) of a valid search step."""
    return 0.025, 0, efficiency, quality


def bad(efficiency, quality):
    """Of an invalid one."""
    return -0.025, 0, efficiency, quality


# Efficiency by hand: 0.2 / t_c - 0.025 = 0.175, 0.075, THIRD, 0.025 for t_c = 1, 2, 3, 4.
THIRD = 0.2 / 3 - 0.025
RIGHT, WRONG = (0.1, 1, 0, 0), (0.1, 0, 0, 0)  # a well-formed answer step under the paper's rules
ERASED = (0, 0, -0.05, 0)  # a step after t_c under the released rules

# reward, turns, self-answers, t_c, (format, outcome, efficiency, quality) of each step
TABLE = [
    # No search: no self-answer, so neither efficiency nor quality.
    ("autosearch", "A", "", -1, [RIGHT]),
    ("autosearch", "W", "", -1, [WRONG]),
    ("autosearch", "B", "", -1, [(-0.5, 1, 0, 0)]),
    ("autosearch", "V", "", -1, [(-0.5, 0, 0, 0)]),
    ("autosearch", "n", "", -1, [(-0.5, 0, 0, 0)]),
    # The last search is the first sufficient one.
    ("autosearch", "sA", "+", 1, [ok(0.175, 1), RIGHT]),
    ("autosearch", "ssA", "-+", 2, [ok(0.075, 0), ok(0.075, 1), RIGHT]),
    ("autosearch", "sssA", "--+", 3, [ok(THIRD, 0), ok(THIRD, 0), ok(THIRD, 1), RIGHT]),
    ("autosearch", "ssssA", "---+", 4, [ok(0.025, 0)] * 3 + [ok(0.025, 1), RIGHT]),
    # Never right before the answer: keep exploring, whether the answer is right or not.
    ("autosearch", "sA", "-", -1, [ok(0.0125, 0), RIGHT]),
    ("autosearch", "sW", "-", -1, [ok(0.0125, 0), WRONG]),
    ("autosearch", "ssssW", "----", -1, [ok(0.0125, 0)] * 4 + [WRONG]),
    # Over-search costs 0.05 a step and nothing else.
    ("autosearch", "ssA", "++", 1, [ok(0.175, 1), ok(-0.05, 0), RIGHT]),
    ("autosearch", "ssssA", "+---", 1, [ok(0.175, 1)] + [ok(-0.05, 0)] * 3 + [RIGHT]),
    ("autosearch", "sssW", "-+-", 2, [ok(0.075, 0), ok(0.075, 1), ok(-0.05, 0), WRONG]),
    # t_c comes from the intermediate answers, not from the final one.
    ("autosearch", "sW", "+", 1, [ok(0.175, 1), WRONG]),
    ("autosearch", "sB", "+", 1, [ok(0.175, 1), (-0.5, 1, 0, 0)]),
    ("autosearch", "sn", "+", 1, [ok(0.175, 1), (-0.5, 0, 0, 0)]),
    # The last turn is the answer step.
    ("autosearch", "ss", "+", 1, [ok(0.175, 1), (-0.5, 0, 0, 0)]),
    # Invalid steps: no bonus, but the penalty and the quality reward stay.
    ("autosearch", "xA", "+", 1, [bad(0, 1), RIGHT]),
    ("autosearch", "xsA", "-+", 2, [bad(0, 0), ok(0.075, 1), RIGHT]),
    ("autosearch", "srA", "-+", 2, [ok(0.075, 0), bad(0, 1), RIGHT]),
    ("autosearch", "sxA", "+-", 1, [ok(0.175, 1), bad(-0.05, 0), RIGHT]),
    ("autosearch", "neA", "..", -1, [bad(0, 0), bad(0, 0), RIGHT]),
    # Quality: only what is gained over the best so far.
    ("autosearch", "ssA", "h+", 2, [ok(0.075, 0.5), ok(0.075, 0.5), RIGHT]),
    ("autosearch", "sssA", "th+", 3, [ok(THIRD, 0.8), ok(THIRD, 0), ok(THIRD, 0.2), RIGHT]),
    ("autosearch", "sssW", "hth", -1, [ok(0.0125, 0.5), ok(0.0125, 0.3), ok(0.0125, 0), WRONG]),
    ("autosearch", "sW", "d", -1, [ok(0.0125, 2 / 3), WRONG]),
    # Not asked; any alias counts.
    ("autosearch", "ssA", ".+", 2, [ok(0.075, 0), ok(0.075, 1), RIGHT]),
    ("autosearch", "ssA", "+.", 1, [ok(0.175, 1), ok(-0.05, 0), RIGHT]),
    ("autosearch", "sA", "l", 1, [ok(0.175, 1), RIGHT]),
    # Released code: as before without a search.
    ("autosearch-released", "A", "", -1, [RIGHT]),
    ("autosearch-released", "V", "", -1, [(-0.5, 0, 0, 0)]),
    # Final answer right, not over-searched: 0.2 / n - 0.025 on every valid step, the answer too.
    ("autosearch-released", "sA", "+", 1, [ok(0.175, 1), (0.1, 1, 0.175, 0)]),
    ("autosearch-released", "sA", "-", -1, [ok(0.175, 0), (0.1, 1, 0.175, 0)]),
    ("autosearch-released", "ssA", "-+", 2, [ok(0.075, 0), ok(0.075, 1), (0.1, 1, 0.075, 0)]),
    ("autosearch-released", "xsA", "-+", 2, [bad(0, 0), ok(0.075, 1), (0.1, 1, 0.075, 0)]),
    ("autosearch-released", "sB", "+", 1, [ok(0.175, 1), (-0.5, 1, 0, 0)]),
    # Final answer wrong: 0.0125 on every valid step, even where an intermediate answer was right.
    ("autosearch-released", "sW", "+", 1, [ok(0.0125, 1), (0.1, 0, 0.0125, 0)]),
    ("autosearch-released", "srW", "--", -1, [ok(0.0125, 0), bad(0, 0), (0.1, 0, 0.0125, 0)]),
    ("autosearch-released", "sV", "-", -1, [ok(0.0125, 0), (-0.5, 0, 0, 0)]),
    # Right before the last search: all later steps are replaced, the answer's +1.1 too.
    ("autosearch-released", "ssA", "++", 1, [ok(0.175, 1), ERASED, ERASED]),
    ("autosearch-released", "ssW", "+-", 1, [ok(0.0125, 1), ERASED, ERASED]),
    ("autosearch-released", "sssA", "t++", 2, [ok(0.075, 0.8), ok(0.075, 0.2), ERASED, ERASED]),
    # Its walk ends at the first invalid step.
    ("autosearch-released", "xssA", "-+-", 2, [bad(0, 0), ok(0, 1), ERASED, ERASED]),
    # First alias only, four digits, empty query.
    ("autosearch-released", "sA", "l", -1, [ok(0.175, 0), (0.1, 1, 0.175, 0)]),
    ("autosearch-released", "sA", "d", -1, [ok(0.175, 0.6667), (0.1, 1, 0.175, 0)]),
    ("autosearch-released", "eA", "+", 1, [ok(0.175, 1), (0.1, 1, 0.175, 0)]),
    ("autosearch-released", "seA", "--", -1, [ok(0.075, 0), bad(0, 0), (0.1, 1, 0.075, 0)]),
    # Ablations and baselines.
    ("no-base", "sA", "+", 1, [(0, 0, 0.175, 1), (0, 0, 0, 0)]),
    ("no-base", "xV", "-", -1, [(0, 0, 0, 0), (0, 0, 0, 0)]),
    ("no-efficiency", "ssA", "++", 1, [ok(0, 1), ok(0, 0), RIGHT]),
    ("no-quality", "ssA", "h+", 2, [ok(0.075, 0), ok(0.075, 0), RIGHT]),
    ("outcome", "ssA", "++", 1, [ok(0, 0), ok(0, 0), RIGHT]),
    ("outcome", "xV", "+", 1, [bad(0, 0), (-0.5, 0, 0, 0)]),
    ("outcome-no-format", "sB", "+", 1, [(0, 0, 0, 0), (0, 1, 0, 0)]),
    ("outcome-no-format", "xV", "-", -1, [(0, 0, 0, 0), (0, 0, 0, 0)]),
    ("search-penalty", "A", "", -1, [RIGHT]),
    ("search-penalty", "ssA", "++", 1, [ok(-0.1, 0), ok(-0.1, 0), RIGHT]),
    ("search-penalty", "xneW", "-..", -1, [bad(-0.1, 0), bad(0, 0), bad(0, 0), WRONG]),
]


def check(scored, parts, t_c):
    """A `Score` against its worked parts."""
    names = ["format", "outcome", "efficiency", "quality"]
    assert [list(part) for part in scored.parts] == [names] * len(parts)
    worked = [pytest.approx(row, abs=1e-9) for row in parts]
    assert [tuple(part.values()) for part in scored.parts] == worked
    assert scored.steps == pytest.approx([sum(row) for row in parts], abs=1e-9)
    assert scored.total == pytest.approx(sum(map(sum, parts)), abs=1e-9)
    assert scored.t_c == t_c


@pytest.mark.parametrize(("name", "turns", "asked", "t_c", "parts"), TABLE)
def test_by_hand(name, turns, asked, t_c, parts):
    scored = score(build(turns), GOLDS, [ANSWERS[sign] for sign in asked], REWARDS[name])
    check(scored, parts, t_c)
    assert scored.em == (turns[-1] in "AB")


# For the reward that is also asked before the first search:
# turns, self-answer at t = 0, self-answers, t_c, parts
T0_TABLE = [
    ("A", "+", "", 0, [(0.1, 1, 0.2, 1)]),  # 2.3, no more than one useful search gives
    ("W", "+", "", 0, [(0.1, 0, 0.2, 1)]),
    ("A", "-", "", -1, [RIGHT]),
    ("A", "h", "", -1, [(0.1, 1, 0, 0.5)]),
    ("sA", "+", "+", 0, [ok(0.2 - 0.05, 1), RIGHT]),  # 2.275: the search is an over-search
    ("ssA", "+", "--", 0, [ok(0.2 - 0.05, 1), ok(-0.05, 0), RIGHT]),
    ("xA", "+", "+", 0, [bad(0.2 - 0.05, 1), RIGHT]),
    ("sA", "h", "+", 1, [ok(0.175, 0.5 + 0.5), RIGHT]),
    ("ssA", "-", "-+", 2, [ok(0.075, 0), ok(0.075, 1), RIGHT]),
    ("sA", ".", "+", 1, [ok(0.175, 1), RIGHT]),
]


@pytest.mark.parametrize(("turns", "before", "asked", "t_c", "parts"), T0_TABLE)
def test_by_hand_with_a_self_answer_before_the_first_search(turns, before, asked, t_c, parts):
    inputs = build(turns), GOLDS, [ANSWERS[sign] for sign in asked]
    check(score(*inputs, REWARDS["autosearch-t0"], self_answer_0=ANSWERS[before]), parts, t_c)
    off_by_default = score(*inputs, PAPER, self_answer_0=ANSWERS[before])
    assert off_by_default == score(*inputs, PAPER)


def passages(*titles):
    return [{"title": title, "text": f"About {title}."} for title in titles]


def test_stepsearch_by_hand():
    found = [
        passages("Nile", "Rome", "Oslo"),  # one of two supporting passages
        passages("Nile", "The Delta", "Lima"),  # the other; one of these three was seen
        passages("Nile", "Rome"),  # only seen ones
        [],
    ]
    evidence = {"passages": found, "supporting_titles": ["Nile", "Delta"]}
    scored = score(build("sssA"), GOLDS, [None] * 3, REWARDS["stepsearch"], **evidence)
    check(scored, [ok(0, 0.5), ok(-1 / 3, 0.5), ok(-1, 0), RIGHT], t_c=-1)


def test_stepsearch_without_a_supporting_passage_to_find():
    evidence = {"passages": [passages("Nile")], "supporting_titles": []}
    scored = score(build("sA"), GOLDS, [None], REWARDS["stepsearch"], **evidence)
    assert scored.total == pytest.approx(0.025 + 0.1 + 1)


LACKING = [
    {},
    {"passages": [[]]},
    {"supporting_titles": ["Nile"]},
    {"passages": [[]] * 3, "supporting_titles": ["Nile"]},
]


@pytest.mark.parametrize("given", LACKING)
def test_stepsearch_says_what_it_lacks(given):
    with pytest.raises(ValueError, match="stepsearch needs supporting_titles"):
        score(build("sA"), GOLDS, [None], REWARDS["stepsearch"], **given)


@pytest.mark.parametrize(
    ("turns", "answers"), [("sA", []), ("sA", ["a", "b"]), ("A", ["a"]), ("", [])]
)
def test_wrong_lengths_are_refused(turns, answers):
    with pytest.raises(ValueError, match="self_answers"):
        score(build(turns), GOLDS, answers)


def test_every_named_reward_has_one_line_about_itself():
    ablations = ["no-base", "no-efficiency", "no-quality"]
    baselines = ["outcome", "outcome-no-format", "search-penalty", "group-shortest", "stepsearch"]
    ours = ["autosearch", "autosearch-released", "autosearch-t0"]
    assert {*ours, *ablations, *baselines} <= REWARDS.keys(), "a fork may add its own"
    lines = [weights.about for weights in REWARDS.values()]
    assert len(set(lines)) == len(lines) and not any("\n" in line for line in lines)
    assert (REWARDS["autosearch"], REWARDS["autosearch-released"]) == (PAPER, RELEASED)
    assert all(f"{name}: {weights.about}" in HELP for name, weights in REWARDS.items())


def test_the_flat_cost_is_a_field():
    dear = replace(REWARDS["search-penalty"], search_cost=0.3)
    assert REWARDS["search-penalty"].search_cost == 0.1
    total = score(build("ssA"), GOLDS, [None, None], dear).total
    assert total == pytest.approx(2 * (0.025 - 0.3) + 1.1)


@pytest.mark.parametrize("t_c", [1, 2, 3, 4])
def test_efficiency_of_a_trajectory_peaks_at_t_c(t_c):
    sums = [sum(efficiency_rewards([True] * (n + 1), t_c)) for n in range(7)]
    assert max(sums) == sums[t_c] == pytest.approx(0.2 - 0.025 * t_c)


def test_sufficient_depth_is_the_first_right_self_answer():
    assert sufficient_depth([None, "Rome", "Al Jazirah", "Blue Nile Delta"], GOLDS) == 3
    assert sufficient_depth([], GOLDS) == sufficient_depth([None, "Nile"], GOLDS) == -1


def test_quality_pays_what_is_gained_over_the_best_so_far():
    assert quality_rewards(["Nile", "Rome", None], "Nile") == [1, 0, 0, 0]
    assert quality_rewards(["Nile river", "Nile"], "Nile") == pytest.approx([2 / 3, 1 / 3, 0])
    by_length = quality_rewards(["abc", "a"], "Nile", measure=lambda answer, golds: len(answer))
    assert by_length == [3, 0, 0]


def test_str_is_a_table_of_the_parts():
    scored = score(build("ssA"), GOLDS, ["Rome", "Blue Nile Delta"], REWARDS["no-efficiency"])
    assert str(scored).splitlines() == [
        "step       format    outcome efficiency    quality      total",
        "1          0.0250     0.0000     0.0000     0.0000     0.0250",
        "2          0.0250     0.0000     0.0000     1.0000     1.0250",
        "answer     0.1000     1.0000     0.0000     0.0000     1.1000",
        "sum        0.1500     1.0000     0.0000     1.0000     2.1500",
        "t_c = 2   EM = 1   F1 = 1.000",
    ]


# The released rules against the released code's own rewards, which stand outside the project

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "official_rewards.jsonl"


@pytest.mark.skipif(
    not CASES.exists(), reason="../shared/cases/official_rewards.jsonl is not there"
)
def test_released_rewards_are_the_released_codes():
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 280
    wrong = []
    for case in cases:
        steps = [turn["text"] for turn in case["turns"]]
        answers = [released_self_answer(raw) for raw in case["self_answers"]]
        found = score(steps, case["golden_answers"], answers, RELEASED).steps
        if found != pytest.approx(case["official_turn_rewards"], rel=0, abs=1e-4):
            wrong.append((case["id"], found, case["official_turn_rewards"]))
    assert not wrong


# Scoring answers

ANSWERED = [
    ("", "The", 0, 0),
    ("", [""], 0, 0),
    ("the", "The", 1, 1),
    ("A", "A", 1, 1),
    ("a", ["A Tale"], 0, 0),
    (None, "Paris", 0, 0),
    ("Paris", None, 0, 0),
    ("Paris", ["Paris", "???"], 1, 1),
    ("Paris", "Paris", 1, 1),
    ("Paris", ["Rome", "Paris"], 1, 1),
    # only blank aliases: an error where questions are loaded, nothing to match here
    ("?!", ["???"], 0, 0),
    ("x", [], 0, 0),
    ("Beyonc\u00e9", "Beyonce\u0301", 1, 1),
    ("BEYONC\u00c9", "beyonce\u0301", 1, 1),
    ("1939\u20131945", "1939-1945", 1, 1),
    ("Rock \u2019n\u2019 Roll", "Rock 'n' Roll", 1, 1),
    ("\u201cParis\u201d\u2026", "Paris", 1, 1),
    ("New\u00a0York", "new  york", 1, 1),
    ("3,000", "3000", 1, 1),
    ("The Beatles.", "beatles", 1, 1),
    ("Paris, France", "Paris", 0, 2 / 3),
    ("Nile Nile Nile", "Nile", 0, 0.5),  # a repeated word counts once: P = 1/3, R = 1
    ("yes it is", "yes", 0, 0.5),
    ("yes", "no", 0, 0),
]


@pytest.mark.parametrize(("prediction", "golds", "em", "f1_"), ANSWERED)
def test_exact_match_and_f1(prediction, golds, em, f1_):
    assert exact_match(prediction, golds) == em
    assert f1(prediction, golds) == pytest.approx(f1_)


def test_hotpot_rules_make_yes_and_no_all_or_nothing():
    assert f1("yes it is", "yes", hotpot_rules=True) == f1("yes", "yes sir", hotpot_rules=True) == 0
    assert f1("yes", ["no", "Yes."], hotpot_rules=True) == 1
    assert f1("Paris, France", "Paris", hotpot_rules=True) == pytest.approx(2 / 3)


def test_normalising():
    assert normalize_answer("3,000") == "3000"
    for text in [
        "The A, an",
        "a.n",
        "The The",
        "\u0130stanbul",
        "x\u0301\u0327",
        "\u2014",
        "Dr. No\u2019s",
    ]:
        assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


# Parsing

BLOCK = "<think>a</think><information>b <answer>Rome</answer>"
PARSED = [
    ("<think>a</think><search>q</search>", ("search", "q"), "search"),
    ("<think> a </think> <search> q </search>", ("search", "q"), "search"),
    ("\n<think>a\nb</think>\n<answer>x\ny</answer>\n\n", ("answer", "x\ny"), "answer"),
    (
        "<think>1 < 2 </b> <i></think><search>a < b & c > d</search>",
        ("search", "a < b & c > d"),
        "search",
    ),
    ("<think></think><answer></answer>", ("answer", ""), "answer"),
    # The answer counts, no search runs.
    ("<answer>X</answer><search>q</search>", ("answer", "X"), None),
    ("<think>a</think><answer>X</answer><search>q</search>", ("answer", "X"), None),
    ("<think>a</think><search>q</search><search>r</search>", ("search", "q"), None),
    ("<think>a</think><answer>X</answer><answer>Y</answer>", ("answer", "X"), None),
    ("<search>q</search>", ("search", "q"), None),
    ("<think>a</think><think>b</think><search>q</search>", ("search", "q"), None),
    ("<think>a<search>q</search>", ("search", "q"), None),
    ("<think>a</think> so <search>q</search>", ("search", "q"), None),
    ("<think>a</think><search>q</search> done", ("search", "q"), None),
    ("<search>q</search><think>a</think>", ("search", "q"), None),
    ("<think>a</think><search> \n </search>", (None, None), None),
    ("<think>a</think><search></search>", (None, None), None),
    ("<think>a</think><answer>foo <answer>Paris</answer>", ("answer", "Paris"), None),
    ("<think>a</think><search>foo <think>b</think></search>", (None, None), None),
    ("<think>a</think><answer>X</search>", (None, None), None),
    ("<think>a</think><answer>X", (None, None), None),
    ("<think>a</think><sea", (None, None), None),
    ("query: who? <Answer>X</Answer>", (None, None), None),
    ("", (None, None), None),
    # What the policy writes as a passage is no answer, closed or not, and never well formed.
    (BLOCK + "</information><answer>Paris</answer>", ("answer", "Paris"), None),
    (BLOCK + "</information><answer>Paris", (None, None), None),
    (BLOCK, (None, None), None),
    (
        "<think>a</think><search>q</search><information>b</information>",
        ("search", "q"),
        None,
    ),
    (
        "<think>the <information> says so</think><answer>Paris</answer>",
        ("answer", "Paris"),
        None,
    ),
    ("<sea<information>b</information>rch>q</search>", (None, None), None),
]


@pytest.mark.parametrize(("text", "action", "valid_as"), PARSED)
def test_parsing_a_turn(text, action, valid_as):
    assert parse_action(text) == action
    assert is_valid_step(text, last=False) is (valid_as == "search")
    assert is_valid_step(text, last=True) is (valid_as == "answer")


SELF_ANSWERS = [
    ("<think>t</think><answer> Paris </answer> trailing", "Paris", "Paris"),
    ("<answer></answer>", "", ""),
    (" Paris ", None, "Paris"),
    ("<answer>foo <answer>Paris</answer>", "Paris", "Paris"),
    ("<information><answer>Rome</answer></information><answer>Paris</answer>", "Paris", "Paris"),
    ("", None, ""),
    (None, None, None),
]


@pytest.mark.parametrize(("raw", "tagged", "whole"), SELF_ANSWERS)
def test_self_answers(raw, tagged, whole):
    assert extract_self_answer(raw) == tagged
    assert released_self_answer(raw) == whole


def test_an_unclosed_self_answer_as_a_whole_counts_as_the_released_code_counts_it():
    text = "<think>t</think> Paris"
    whole = released_self_answer(text)
    assert "<" not in whole and f1(whole, "Paris") == f1(text, "Paris") == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["autosearch", "autosearch-released", "search-penalty"])
def test_no_text_gets_a_tag_through(name):
    extract = released_self_answer if REWARDS[name].released else extract_self_answer
    others = ["a", " ", "\n", "<", ">", "</", "\u0301", "\ud83d", "Paris"]
    pieces, rng = [*TAGS, *others], random.Random(0)
    for _ in range(3000):
        length = rng.randrange(1, 5)
        steps = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(length)]
        answers = [extract("".join(rng.choices(pieces, k=6))) for _ in steps[1:]]
        found = [parse_action(step)[1] for step in steps] + answers
        assert not any(tag in text for text in found if text for tag in TAGS)
        assert len(score(steps, "Paris", answers, REWARDS[name]).steps) == len(steps)


# Cases from the field: see ../shared/cases/field_cases.md, whose numbers these are


def test_1_no_answer_scores_nothing_and_picks_up_no_example():
    scored = score(["<think>For example <answer> Beijing"], "Beijing", [])
    assert (scored.em, scored.f1, scored.parts[0]["outcome"]) == (0, 0, 0)


def test_2_an_answer_inside_information_is_none():
    block = BLOCK + "</information>"
    assert score([block + "<answer>Paris</answer>"], "Paris", []).em == 1
    for gold in ("Paris", "Rome"):
        assert score([block + "<answer>Paris"], gold, []).em == 0


def test_a_gold_answer_that_stands_only_in_a_passage_scores_nothing():
    passage = {"title": "Ada Lovelace", "text": "Ada Lovelace was a mathematician."}
    scored = trajectory(search("mathematician", passages=[passage]), answer("Rome")).score()
    assert (scored.em, scored.f1, scored.t_c) == (0, 0, -1)


def test_6_any_alias_makes_a_self_answer_right():
    golds = ["NYC", "New York City"]
    scored = score(build("sssA"), golds, ["New York City", "NYC", "NYC"])
    assert scored.t_c == 1
    assert [round(part["efficiency"], 4) for part in scored.parts] == [0.175, -0.05, -0.05, 0]


def test_9_answer_and_search_in_one_turn_is_an_answer():
    turn = "<think>a</think><answer>X</answer><search>q</search>"
    scored = score([turn], "X", [], REWARDS["search-penalty"])
    assert (scored.em, scored.parts[0]["format"], scored.parts[0]["efficiency"]) == (1, -0.5, 0)


def test_10_a_policy_written_information_block_is_invalid():
    block = "<information>b</information>"
    assert not is_valid_step(f"<think>a</think><search>q</search>{block}", last=False)
    assert not is_valid_step(f"<think>{block}</think><answer>q</answer>", last=True)


def test_12_a_blank_query_is_one_invalid_action_and_no_search():
    scored = score(build("eA"), GOLDS, [None], REWARDS["search-penalty"])
    assert (scored.parts[0]["format"], scored.parts[0]["efficiency"]) == (-0.025, 0)


def test_13_without_the_tag_nothing_is_searched():
    text = "I write my query between the tags: who built it?"
    assert parse_action(text) == (None, None)


# Repeats


def test_tfidf_and_cosine_by_hand():
    # "nile" in both, "river" and "delta" in one each: idf ln(3 / 3) + 1 = 1 and ln(3 / 2) + 1.
    vectors = tfidf(["nile river nile", "nile delta"])
    assert vectors[0] == pytest.approx({"nile": 2, "river": 1.405465})
    assert vectors[1] == pytest.approx({"nile": 1, "delta": 1.405465})
    assert cosine({"x": 3.0, "y": 4.0}, {"x": 1.0, "z": 0.0}) == pytest.approx(3 / 5)
    assert cosine({}, {"x": 1.0}) == cosine({"x": 1.0}, {}) == 0


def test_cosine_of_queries_by_hand():
    # idf 1 and 1.4055, as above, so the cosine is 1 / (1 + 1.4055 ** 2) = 0.3361.
    assert is_repeat("nile river", ["nile delta"], threshold=0.336)
    assert not is_repeat("nile river", ["nile delta"], threshold=0.337)
    # A third query without "nile" makes the word rarer: idf ln(4 / 3) + 1 = 1.2877, the others
    # ln(4 / 2) + 1 = 1.6931: 1.2877 ** 2 / (1.2877 ** 2 + 1.6931 ** 2) = 0.3665.
    assert is_repeat("nile river", ["nile delta", "rome"], threshold=0.366)
    assert not is_repeat("nile river", ["nile delta", "rome"], threshold=0.367)


@pytest.mark.parametrize(("k", "repeat"), [(8, True), (7, False)])  # 0.802, 0.780
def test_the_threshold_by_hand(k, repeat):
    # k common words (idf 1), one of its own in each query (idf 1.4055): cosine k / (k + 1.9754).
    common = "one two three four five six seven eight".split()[:k]
    assert is_repeat(" ".join([*common, "nile"]), [" ".join([*common, "rome"])]) is repeat


REPEATS = [
    ("capital of France", [], False),
    ("The capital of France?", ["author of Dune", "capital of france"], True),
    ("France of capital", ["capital of France"], True),  # a bag of words
    ("capital of Spain", ["capital of France"], False),
    ("", [], False),
    ("the", [], False),  # nothing repeats without earlier queries
    ("the", ["capital of France"], True),  # normalises to nothing
    ("x", ["y"], True),  # no usable token anywhere
    ("x", ["capital of France"], False),
    ("x", ["the"], False),  # the earlier one stands as "none"
    ("none", [""], True),
    ("capital of France", ["", "the"], False),
]


@pytest.mark.parametrize(("query", "earlier", "repeat"), REPEATS)
def test_repeats(query, earlier, repeat):
    assert is_repeat(query, earlier) is repeat


def test_a_query_of_an_invalid_step_can_be_repeated():
    first, again = (
        "<search>author of Dune</search>",
        "<think>a</think><search>Dune author of</search>",
    )
    assert valid_steps([first, again, TURNS["A"]]) == [False, False, True]
    assert valid_steps([TURNS["r"], TURNS["r"], TURNS["A"]]) == [True, False, True]


# Characters without a glyph: one rule for scoring, showing and searching

HIDDEN = (
    "\u00ad\u034f\u061c\u115f\u180e\u200b\u200c\u200d\u200e\u202e\u2060\u3164\ufe0f\ufeff\U000e0041"
)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_no_eye_sees_makes_no_answer_wrong(hidden):
    gold, copied = f"Donau{hidden}dampf{hidden}", "Donaudampf"
    assert reward.exact_match(copied, gold) == reward.exact_match(gold, copied) == 1
    assert reward.f1(gold, copied) == 1 and rollout.clean(gold) == copied
    assert retriever.tokenise(gold) == retriever.tokenise(copied) == ["donaudampf"]
    assert rollout.clean(f"<sea{hidden}rch>") == "(search)"


def test_persian_words_match_with_and_without_their_joiner():
    gold = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    shown = rollout.clean(gold)
    assert "\u200c" not in shown and reward.exact_match(shown, gold) == 1
    assert retriever.tokenise(shown) == retriever.tokenise(gold)


def test_every_format_character_is_dropped_and_every_control_is_a_blank():
    for code in range(0x110000):
        kind = unicodedata.category(chr(code))
        if kind == "Cf":
            assert reward.visible(f"a{chr(code)}b") == "ab"
        if kind in ("Cc", "Zl", "Zp"):
            assert reward.exact_match("a b", f"a{chr(code)}b") == 1


def test_a_gold_of_hidden_characters_alone_is_blank():
    assert reward.normalized_golds(["\u200e", "\ufe0f\u00ad", "?\u200b!", "\x07"]) == []
