"""A group to play with: what the page computes is what reward.py and train.py compute."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from conftest import ROOT

import eval as evaluation
import reward
import train
from plumbing import files, group, page

RUN = ROOT / "data" / "results" / "autosearch-seed0"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def played():
    """The group that the page shows, as Trajectory objects."""
    (section,) = group.section(files.read_log(RUN / "trajectories.jsonl"))
    pairs = evaluation.read_trajectories(RUN / "trajectories.jsonl")
    question = section["about"].split(" (gold")[0]
    shown = [pair[0] for pair in pairs if pair[0].question["question"] == question]
    return section, shown[: len(section["rollouts"])]


def test_the_group_with_the_most_to_compare_is_shown():
    section, trajectories = played()
    assert len(section["rollouts"]) == 8 and len({t.search_depth for t in trajectories}) > 1
    for shown, trajectory in zip(section["data"]["rollouts"], trajectories):
        assert shown["t_c"] == trajectory.score().t_c and shown["em"] == trajectory.score().em
    assert group.section([]) == []


def test_every_slider_is_a_weight_of_the_paper_within_its_range():
    (section,) = group.section(files.read_log(RUN / "trajectories.jsonl"))
    for name, _, low, high, value in section["sliders"]:
        assert low <= getattr(reward.PAPER, name) == value <= high


def test_text_of_a_group_cannot_leave_its_place(tmp_path, monkeypatch):
    """Neither the table nor the data for the script can be closed by what a policy wrote."""
    monkeypatch.chdir(tmp_path)
    rows = files.read_log(RUN / "trajectories.jsonl")[:2]
    for row in rows:
        row["question"] = row["turns"][0]["text"] = "</script><script>alert(1)</script>"
    page.write("page.html", "t", group.section(rows))
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text and text.count("<script") == 2
    (data,) = re.findall(r'id="group-data">(.*?)</script>', text, re.DOTALL)
    assert len(json.loads(data)["rollouts"]) == 2


WEIGHTS = [
    {},
    {"over_search": -0.3, "quality": 0.5},
    {"explore": 0.2, "effective_budget": 1.0, "outcome": 0.0},
    {"search_cost": 0.6, "format": 4.0},
]


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_page_computes_what_python_computes(tmp_path, monkeypatch, weights):
    monkeypatch.chdir(tmp_path)
    section, trajectories = played()
    page.write("page.html", "t", [section])
    address = (tmp_path / "page.html").as_uri() + "#"
    address += "&".join(f"{name}={value}" for name, value in weights.items())
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", address]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    shown = dict(re.findall(r'id="([a-z]+-[0-9-]+)"[^>]*>([^<]*)<', dom))
    scores = [trajectory.score(replace(reward.PAPER, **weights)) for trajectory in trajectories]
    totals = train.total_rewards(scores, trajectories)
    advantages = train.group_advantages(totals, len(trajectories)).tolist()
    for i, (score, total, advantage) in enumerate(zip(scores, totals.tolist(), advantages)):
        assert float(shown[f"total-{i}"]) == pytest.approx(total, abs=1e-4)
        assert float(shown[f"advantage-{i}"]) == pytest.approx(advantage, abs=1e-3)
        push = "likelier" if advantage > 0 else "less likely" if advantage < 0 else "no push"
        assert push in shown[f"push-{i}"]
        for t, (step, parts) in enumerate(zip(score.steps, score.parts)):
            assert float(shown[f"step-{i}-{t}"]) == pytest.approx(step, abs=1e-3)
            named = shown[f"parts-{i}-{t}"]
            for name in ("format", "outcome", "efficiency", "quality"):
                value = re.search(rf"{name} (-?[0-9.]+)", named)
                assert float(value[1] if value else 0) == pytest.approx(parts[name], abs=1e-3)
