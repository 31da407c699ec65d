"""A group to play with: rollouts of one question side by side, rewarded in the page (group.js)."""

from dataclasses import asdict
from statistics import pstdev

import reward
from plumbing.show import printable

SLIDERS = [  # weight, what it pays for, least, most
    ("format", "format, a coefficient", 0, 4),
    ("outcome", "a right answer", 0, 2),
    ("explore", "a search where nothing was ever right", -0.1, 0.2),
    ("effective_budget", "searching up to t_c, shared by its steps", 0, 1),
    ("over_search", "each search beyond t_c", -0.5, 0.1),
    ("search_cost", "flat cost of a search", 0, 0.6),
    ("quality", "a self-answer better than those before", 0, 2),
]


def section(samples):
    """A list of one section of a page, or none: of the groups in a run's samples (rows of its
    file) the one whose rewards differ most."""
    groups = {}
    for row in samples:
        groups.setdefault((row["step"], row["id"]), []).append(row)
    if not groups:
        return []
    rows = max(groups.values(), key=lambda rows: pstdev(map(total, rows)))
    weights = {name: value for name, value in asdict(reward.PAPER).items() if name != "about"}
    sliders = [(name, about, low, high, weights[name]) for name, about, low, high in SLIDERS]
    golds = ", ".join(rows[0]["golden_answers"])
    about = f"{printable(rows[0]['question'])} (gold: {printable(golds)})"
    found = {"heading": "A group to play with", "about": about, "sliders": sliders}
    texts = [[printable(text) for text in texts_of(row)] for row in rows]
    data = {"rollouts": [facts(row) for row in rows], "weights": weights}
    return [found | {"rollouts": texts, "longest": max(map(len, texts)), "data": data}]


def total(row):
    return sum(sum(part.values()) for part in row["score"]["parts"])


def texts_of(row):
    """What the policy wrote in each turn."""
    return [turn["text"] for turn in row["turns"]] or [""]


def facts(row):
    """What the rewards of a trajectory follow from, a list a step; see reward.score."""
    texts, golds = texts_of(row), row["golden_answers"]
    answers = [reward.extract_self_answer(turn["self_answer"]) for turn in row["turns"][:-1]]
    return {
        "valid": reward.valid_steps(texts),
        "searched": [reward.parse_action(text)[0] == "search" for text in texts],
        "quality": reward.quality_rewards(answers, golds),
        "t_c": reward.sufficient_depth(answers, golds),
        "em": row["score"]["em"],
    }
