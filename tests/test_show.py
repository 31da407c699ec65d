"""plumbing/show.py: trajectories in a terminal, and choosing them."""

import pytest
from builders import RIGHT, answer, question, scored, search, searching, trajectory

from plumbing import files, show
from rollout import Turn

# Verdict and rendering


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([search("one", RIGHT), search("two"), answer()], "over"),
        ([search("one"), search("two", RIGHT), answer()], "exact"),
        ([search("one"), answer("x")], "under"),
        ([answer()], "exact"),
        ([search("one", RIGHT), Turn("no tags", None, self_answer=RIGHT), answer()], "exact"),
    ],
)
def test_verdict(turns, expected):
    case = trajectory(*turns)
    assert show.verdict(case, case.score()) == expected


def test_printable():
    text = show.printable("a\x1b[2J\u202e  b\n\ud83d\x85é")
    assert text == "a<U+001B>[2J<U+202E> b <U+D83D> é"


@pytest.fixture
def odd():
    """A trajectory full of what a terminal would obey."""
    text = "\x9b31mred \u202etxet \x07" + "long words " * 60
    evil = [{"title": "Ada\x1b[2J", "text": text}]
    return trajectory(
        search("who\x1b]0;owned\x07", "<answer>Ada Byron</answer>", evil),
        Turn("<b>hm\x1b[31m", None),
        answer(),
        q=question("q", hops=1),
        self_answer_0="dunno",
    )


def test_rendered_trajectory_shows_everything_and_obeys_nothing(odd):
    score = odd.score()
    text = show.render_trajectory(odd, score)  # pytest's stdout is no terminal
    assert text.replace("\n", "").isprintable()
    parts = ["Who (q)?", "Ada Lovelace", "dunno", "who<U+001B>]0;owned", "Ada<U+001B>[2J: "]
    parts += ["(EM 0, F1 0.50)", "2 invalid", "quality +0.500", "outcome +1.000", "exact search"]
    parts += ["t_c -1", "needed: 1", f"reward {score.total:+.3f}", " ..."]
    for part in parts:
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_colour_is_for_terminals_that_want_it(odd, monkeypatch):
    score = odd.score()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36mwho<U+001B>" in show.render_trajectory(odd, score)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in show.render_trajectory(odd, score)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in show.render_trajectory(odd, score)


def test_a_trajectory_without_a_gold_answer_or_a_turn_can_be_shown():
    case = trajectory(search("one"), answer("x"), q=question() | {"golden_answers": []})
    text = show.render_trajectory(case, case.score())
    assert "not given" in text and "(EM" not in text
    empty = trajectory()  # the context was full before the first turn
    assert "under search" in show.render_trajectory(empty, empty.score())


# Choosing

NAMES = {"hops": 2, "em": 0.0, "t_c": -1, "verdict": "under", "hard": None, "title": "a and b"}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("hops==2 and em==0", True),
        ("hops == 2 and em == 1", False),
        ("em == 1 and hops == 2", False),
        ("hops >= 1 and hops < 3 and em <= 0.5", True),
        ("hops > 2", False),
        ("t_c > -2", True),
        ("verdict != 'over'", True),
        ('verdict == "under"', True),
        ("hard > 1", False),
        ("hard == None", True),
        ("hard == True", False),
        ("  em == 0", True),
        ("title == 'a and b' and hops == 2", True),
        ("title == 'hops == 2 and em == 0'", False),
        ('title != "it\'s" and hops == 2', True),
        ("hops == 2.0 and em >= -1.5", True),
    ],
)
def test_where(condition, expected):
    assert show.holds(condition, NAMES) is expected


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('true')",
        "hops.__class__",
        "depth == 2",
        "hops ==",
        "[x for x in hops]",
        "hops in (1, 2)",
        "lambda: 0",
        "",
        "hops = 2",
        "(" * 500,
        "f'{hops}'",
        "hops + 1",
        "\0",
        "hops == 2 and",
        "hops == 2 and em",
        "not em == 0",
        "hops == 2 or em == 0",
        "1 <= hops < 3",
        "hops == em",
        "em == 1 and depth == 2",  # also behind a comparison that fails
        "verdict == 'it's'",
        "verdict == under",
        "hops == 1e3",
        "hops == 002",
        "hops < " + "1" * 5000,
        "verdict == '\\N{nothing}'",
        "verdict == 'a\nb'",
        "verdict == '\udc80'",
    ],
)
def test_where_refuses_anything_else(condition):
    with pytest.raises(files.DataError, match="--where"):
        show.holds(condition, NAMES)


def test_choose():
    rows = [question("a", type="bridge"), question("b", type="other"), question("c")]
    pairs = scored([searching(depth, q) for depth, q in enumerate(rows)])

    def chosen(where):
        return [t.question["id"] for t, _ in show.choose(pairs, where)]

    assert chosen(None) == ["a", "b", "c"]
    assert chosen("type != 'bridge'") == ["b", "c"]  # c has no type
    assert chosen("search_depth >= 1 and id != 'b'") == ["c"]
    assert chosen("stop == 'answer' and verdict == 'exact' and em == 1") == ["a", "b", "c"]
    assert chosen("reward > 0 and tokens == 10 and f1 == 1.0 and t_c == -1") == ["a", "b", "c"]
    with pytest.raises(files.DataError, match="none with id == 'x'"):
        chosen("id == 'x'")
    with pytest.raises(files.DataError, match="none to show"):
        show.choose([])


def test_spread():
    assert show.spread(list(range(10)), 3) == [0, 3, 6]
    assert show.spread([1, 2], 5) == [1, 2]


# Why a turn is invalid

INVALID = [
    ("<search>q</search>", "no thought first"),
    ("<think>a</think> hm <search>q</search>", "text outside the tags, or a tag inside others"),
    ("<think>a<search></think><search>q</search>", "text outside the tags, or a tag inside"),
    ("<think>a</think>", "no search and no answer"),
    ("<think>a</think><search> </search>", "no search and no answer"),
    ("<think>a</think><search>birthplace of Ada</search>", "a query much like an earlier one"),
]


@pytest.mark.parametrize("text, problem", INVALID)
def test_an_invalid_turn_says_why(text, problem):
    case = trajectory(search("birthplace of Ada"), Turn(text, None), answer())
    shown = show.render_trajectory(case, case.score())
    assert f"2 invalid  {problem}" in shown and shown.count("invalid") == 1


def test_a_search_in_the_last_turn_says_why_it_is_invalid():
    case = trajectory(search("one"), search("other words"))
    shown = show.render_trajectory(case, case.score())
    assert "2 invalid  a search where only an answer was left: <think>" in shown


def test_a_search_without_a_hit_says_so():
    case = trajectory(search("one"), answer())
    found = [{"title": "Ada", "text": "x"}]
    assert "\n              nothing found\n" in show.render_trajectory(case, case.score())
    case = trajectory(search("one", passages=found), answer())
    assert "nothing found" not in show.render_trajectory(case, case.score())
