"""The claims: what is measured gets a verdict, what is not is named, and runs go on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from plumbing.files import DataError

sys.path.insert(0, str(ROOT / "data"))
import claims  # noqa: E402

RESULTS = ROOT / "data" / "results"


def copy_run(folder, source, name):
    """A run's reports under another name."""
    (folder / name).mkdir(parents=True)
    shutil.copy(RESULTS / source / "eval.json", folder / name)


def test_the_shipped_page_is_what_the_shipped_reports_say(tmp_path):
    reports = claims.Reports(RESULTS, 3)
    assert (RESULTS / "claims.md").read_text(encoding="utf-8") == claims.markdown(reports)


def test_what_is_not_measured_is_named_and_moves_no_verdict(tmp_path):
    copy_run(tmp_path, "autosearch-seed0", "autosearch-seed0")
    copy_run(tmp_path, "outcome-seed0", "outcome-seed0")
    copy_run(tmp_path, "outcome-seed0", "no-efficiency-seed0")
    claims.main(["--reports", str(tmp_path)])
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "| **not measured** | autosearch-t0" in page and (tmp_path / "prices.png").exists()
    line = next(row for row in page.splitlines() if "efficiency reward depth drifts up" in row)
    assert "| **holds** |" in line, "outcome's reports, which search more"


def test_what_was_measured_in_another_world_stands_in_tables_of_its_own(tmp_path):
    """Stand-ins: the reports of the shipped world."""
    for name in claims.ELSEWHERE:
        copy_run(tmp_path, f"{name}-seed1", f"{name}-seed1")
        shutil.copy(RESULTS / f"{name}-seed1" / "eval.json", tmp_path / "all.json")
        after = json.loads((tmp_path / "all.json").read_text())["after"]
        (tmp_path / f"{name}-seed1" / "other_world.json").write_text(json.dumps(after))
    reports = claims.Reports(tmp_path, 3)
    assert reports.mean("outcome", "2") == reports.mean("outcome", "2", moment="elsewhere")
    page = claims.markdown(reports)
    _, table = page.split("| EM / searches, temperature 1, in another world |")
    assert table.count("| 1 | ") >= 4 and "needs 4" not in table
    line = next(row for row in page.splitlines() if "in another world than" in row)
    assert "| **holds** |" in line
    (tmp_path / "outcome-seed1" / "other_world.json").unlink()
    page = claims.markdown(claims.Reports(tmp_path, 3))
    assert "in another world than the one trained and measured in | **not measured** |" in page


def test_break_even_prices_by_hand():
    """Three searches win 1 and 3 x 0.025; a paper is the right one of seven with 4 tries, 4 / 7."""
    rows = dict(claims.break_even_rows())
    assert rows["needs 3"] == pytest.approx([1 / 3 + 0.025, 1 / 2 + 0.025, 1.025])
    tries = 1 + 6 / 7 + 5 / 7 + 4 / 7
    assert rows["hard, one fact"][0] == pytest.approx(4 / 7 / tries + 0.025)
    assert rows["hard, two facts"][0] == pytest.approx(3 / 7 / (1 + tries - 4 / 7) + 0.025)


def test_verdicts():
    assert claims.verdict(True, True) == "holds" and claims.verdict(False) == "not here"
    assert claims.verdict(True, False) == "partly"


def test_no_reports_are_one_line(tmp_path):
    with pytest.raises(DataError, match="no reports of autosearch; --train makes them"):
        claims.main(["--reports", str(tmp_path)])
    with pytest.raises(DataError, match="--train needs"):
        claims.main(["--reports", str(tmp_path), "--train"])


def test_runs_that_are_there_are_kept_and_stopped_ones_go_on(tmp_path, monkeypatch):
    """The scripts are stand-ins here: a training writes its report, one of them fails."""
    commands = []

    def pretend(words, **_):
        commands.append(" ".join([Path(words[1]).name, *words[2:]]))
        failed = "no-base" in commands[-1]
        return SimpleNamespace(returncode=int(failed))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", pretend)
    done = {"before": {}, "after": {}}
    for name, report in (("autosearch-seed0", done), ("autosearch-seed1", {"before": {}})):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "eval.json").write_text(json.dumps(report))
    claims.train_missing(["autosearch"], seeds=3, jobs=1)
    resumed, fresh, *measured = commands
    assert resumed == "train.py --resume runs/autosearch-seed1"
    assert "--seed 2 --name autosearch-seed2" in fresh
    elsewhere = [words for words in measured if words.startswith("eval.py")]
    for policy in [
        *(f"--run runs/autosearch-seed{i} " for i in range(3)),
        "--model data/tiny_model",
    ]:
        temperatures = [words.split()[-3] for words in elsewhere if policy in words]
        assert temperatures == ["1", "0"]
    with pytest.raises(DataError, match="failed; see runs/claims.log"):
        claims.train_missing(["no-base"], seeds=1, jobs=1)
    commands.clear()
    claims.train_missing(["deep-outcome"], seeds=1, jobs=1)
    assert "--deep --out runs/model-deep" in commands[0] and "--deep" in commands[1]
    assert "--model runs/model-deep" in commands[2] and "--max_searches 6" in commands[2]


def test_every_run_has_options_that_train_knows():
    from plumbing import options
    from train import TrainSettings, reward_weights

    for name, words in claims.RUNS.items():
        settings = options.parse(TrainSettings, words.split(), name)
        reward_weights(settings)
        assert settings.num_questions * settings.num_generations == 96, "a step is as large for all"
