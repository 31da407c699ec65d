"""Trajectories to look at: in a terminal and as parts of a page; choosing them."""

import operator
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from ast import literal_eval
from contextlib import suppress

import reward
from plumbing.data import group_of
from plumbing.files import check, on_failure

# What a line is: its colour in a terminal (an ANSI code) and the most lines it takes there.
KINDS = {"question": ("1", 3), "gold": ("1", 1), "think": ("2", 3), "invalid": ("31", 3)}
KINDS |= {"search": ("36", 1), "passage": ("90", 1), "right": ("32", 2), "wrong": ("33", 2)}
KINDS |= {"reward": ("35", 1), "verdict": ("1", 1)}
VERDICTS = """Verdicts: over, it searched on after t_c, the first search with a right self-answer;
under, no answer was ever right; exact, neither."""
RULE = "\n\n" + "-" * 60 + "\n\n"
NAMES = "hops hard id em f1 t_c reward search_depth stop tokens verdict".split()
OPERATORS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
OPERATORS |= {">": operator.gt, ">=": operator.ge}
VALUE = r"""-?(?:0|[1-9]\d*)(?:\.\d+)?|'[^'\\]*'|"[^"\\]*"|True|False|None"""
COMPARISON = rf"\s*(\w+)\s*(==|!=|<=|>=|<|>)\s*({VALUE})\s*"


def verdict(trajectory, score):
    """What a search after t_c is, "over"; "under": no answer was ever right; otherwise "exact"."""
    if score.t_c < 0:
        return "exact" if score.em else "under"
    return "over" if any(turn.searched for turn in trajectory.turns[score.t_c :]) else "exact"


def answer_line(name, raw, golds):
    """(name, text, kind) of the answer in a text, with EM and F1; all of it where there is none."""
    answer = reward.extract_self_answer(raw)
    em, f1 = reward.exact_match(answer, golds), reward.f1(answer, golds)
    text = raw if answer is None else answer
    scores = f"  (EM {em:.0f}, F1 {f1:.2f})" if golds else ""
    return name, text + scores, "right" if em else "wrong"


def why_invalid(text, last):
    """What makes a turn's format invalid, in a few words."""
    kind, _ = reward.parse_action(text)
    if reward.is_valid_step(text, last):
        return "a query much like an earlier one"
    if kind is None:
        return "no search and no answer"
    if last and kind == "search":
        return "a search where only an answer was left"
    is_open = re.match(r"\s*<think>", text)
    return "text outside the tags, or a tag inside others" if is_open else "no thought first"


def turn_lines(number, turn, problem, golds):
    """A turn as lines (name, text, kind), without its reward. problem: why it is invalid, if so."""
    lines = [(f"{number} invalid", f"{problem}: {turn.text}", "invalid")]
    if not problem:
        lines = [(f"{number} think", re.split("</?think>", turn.text)[1], "think")]
    if turn.action == "answer":
        lines.append(answer_line("answer", turn.text, golds))
    if turn.searched:
        lines.append(("search", turn.query, "search"))
    if turn.searched and not turn.passages:
        lines.append(("", "nothing found", "passage"))
    for passage in turn.passages:
        lines.append(("", f"{passage['title']}: {passage['text']}", "passage"))
    if turn.self_answer is not None:
        lines.append(answer_line("self-answer", turn.self_answer, golds))
    return lines


def describe(trajectory, score):
    """A scored Trajectory as blocks of lines (name, text, kind): question, each turn, verdict."""
    question, golds = trajectory.question, trajectory.question["golden_answers"]
    head = [("question", question["question"], "question")]
    head.append(("gold", " | ".join(golds) or "not given", "gold"))
    if trajectory.self_answer_0 is not None:
        head.append(answer_line("self-answer", trajectory.self_answer_0, golds))
    blocks = [head]
    valid = reward.valid_steps(trajectory.steps)
    for i, turn in enumerate(trajectory.turns):
        parts = [f"{name} {value:+.3f}" for name, value in score.parts[i].items() if value]
        text = f"{'  '.join(parts)}  = {score.steps[i]:+.3f}"
        problem = None if valid[i] else why_invalid(turn.text, i + 1 == len(valid))
        blocks.append([*turn_lines(i + 1, turn, problem, golds), ("reward", text, "reward")])
    depth = f"t_c {score.t_c}, searches made {trajectory.search_depth}"
    text = f"{verdict(trajectory, score)} search: {depth}, needed: {group_of(question, 'hops')}"
    total = f"reward {score.total:+.3f}, EM {score.em:.0f}, F1 {score.f1:.2f}"
    total += f", ended by: {trajectory.stop}"
    return [*blocks, [("verdict", text, "verdict"), ("total", total, "verdict")]]


def printable(text):
    """Untrusted text, with what a terminal or browser obeys (controls, marks) spelled out."""
    shown = ""
    for char in " ".join(text.split()):
        obeyed = unicodedata.category(char) in ("Cc", "Cf", "Cs")
        shown += f"<U+{ord(char):04X}>" if obeyed else char
    return shown


def render_trajectory(trajectory, score):
    """A scored Trajectory for the terminal: shortened to its width, in colour unless NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colour = sys.stdout.isatty() and not plain
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 120) - 14
    blocks = []
    for block in describe(trajectory, score):
        lines = []
        for name, text, kind in block:
            code, most = KINDS[kind]
            wrapped = textwrap.wrap(printable(text), width, max_lines=most, placeholder=" ...")
            for i, line in enumerate(wrapped or [""]):
                line = f"\x1b[{code}m{line}\x1b[0m" if colour else line
                lines.append(f"{'' if i else name:>12}  {line}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def holds(condition, names):
    """Whether comparisons joined by `and`, such as "hops==2 and em==0", hold for {name: value}.
    What cannot be compared is no match. Raises DataError for anything else.
    >>> holds("hops == 2 and em < 1", {"hops": 2, "em": 0.0}), holds("t_c > 0", {"t_c": None})
    (True, False)
    """
    where, matches = f"--where {condition!r}", []
    problem = f"not comparisons, joined by and, of {', '.join(sorted(names))}"
    check(re.fullmatch(rf"{COMPARISON}(and\b{COMPARISON})*", condition), where, problem)
    for name, compare, text in re.findall(COMPARISON, condition):
        check(name in names, where, problem)
        matches.append(False)
        with on_failure(where):  # an endless number, a line break in quotes
            value = literal_eval(text)
        with suppress(TypeError):
            matches[-1] = OPERATORS[compare](names[name], value)
    return all(matches)


def choose(pairs, where=None):
    """The [(Trajectory, Score)] for which the condition `where` holds. DataError for none."""
    chosen, unknown = [], dict.fromkeys(NAMES)
    for trajectory, _ in pairs:
        unknown |= dict.fromkeys(trajectory.question["metadata"])
    for t, score in pairs:
        names = unknown | t.question["metadata"] | {"id": t.question["id"], "em": score.em}
        names |= {"f1": score.f1, "t_c": score.t_c, "reward": score.total, "stop": t.stop}
        names |= {"search_depth": t.search_depth, "tokens": t.tokens, "verdict": verdict(t, score)}
        if where is None or holds(where, names):
            chosen.append((t, score))
    check(chosen, "no trajectory", f"none with {where}" if where else "there is none to show")
    return chosen


def spread(items, count):
    """At most `count` of the items, from all over the list."""
    return items[:: max(1, len(items) // count)][:count]
