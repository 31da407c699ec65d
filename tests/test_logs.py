"""Logs: symptoms of a sick run, the best checkpoint, trackers, updates that were skipped."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import log_of

import train as tr
from plumbing import logs
from plumbing.files import DataError
from train import TrainSettings

HEALTHY = {
    "frac_reward_zero_std": 0.5,
    "valid_action_ratio": 0.9,
    "search_depth": 1.5,
    "entropy": 0.2,
}
SYMPTOMS = [  # what differs from healthy rows, and how the message begins
    ([{}] * 9, None),
    ([{"frac_reward_zero_std": 1.0}] * 4, None),
    ([{}] + [{"frac_reward_zero_std": 1.0}] * 5, "no group had a signal for 5 steps"),
    ([{"frac_reward_zero_std": 1.0}] * 5 + [{}], None),
    ([{}, {"valid_action_ratio": 0.49}], "under half of the actions are valid"),
    ([{}, {"search_depth": 0.0}], "nobody searches any more"),
    ([{}, {"search_depth": 0.01}, {"search_depth": 3.99}], None),
    ([{}, {"search_depth": 4.0}], "everybody searches to the limit"),
    ([{}] + [{"entropy": 0.0019}] * 5, "entropy was under 1%"),
    ([{}] + [{"entropy": 0.0019}] * 4, None),
    ([{"entropy": 0.0019}] * 6, None),  # it started there
    ([{}] + [{"entropy": None}] * 5, None),
]


@pytest.mark.parametrize("rows, message", SYMPTOMS)
def test_symptoms_of_a_collapse(rows, message):
    found = logs.symptoms([HEALTHY | row for row in rows], max_searches=4)
    if message is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(message)


def test_a_symptom_is_told_once(run_train, monkeypatch, tmp_path, capsys):
    def always_from_step_1(rows, max_searches):
        return ["it hurts"] if rows[-1]["step"] else []

    monkeypatch.setattr(logs, "symptoms", always_from_step_1)
    run_train(tmp_path, "--steps", "3", "--eval_questions", "", "--name", "a")
    error = capsys.readouterr().err
    assert error.count("it hurts") == error.count("warning, step 2: it hurts\n") == 1


def test_the_best_is_the_first_with_the_highest_held_out_reward(tmp_path):
    log, found = logs.Logbook(tmp_path, TrainSettings(), 0), []
    for value in (None, 1.0, None, 1.5, 1.5, 2.0, None):
        log.rows.append({} if value is None else {"eval/reward": value})
        found.append(log.is_best())
    assert found == [False, True, False, True, False, True, False]


def test_three_steps_of_skipped_updates_stop_the_run(run_train, monkeypatch, tmp_path):
    def no_advantages(rewards, num_generations):
        return torch.full((len(rewards),), math.nan)

    monkeypatch.setattr(tr, "group_advantages", no_advantages)
    message = "not finite in 3 steps in a row: .*; go on with: python train.py --resume"
    small = ["--steps", "9", "--save_every", "2", "--eval_questions", "", "--name", "a"]
    with pytest.raises(DataError, match=message):
        run_train(tmp_path, *small)
    run = tmp_path / "runs" / "a"
    seen = [(row["skipped_updates"], row["loss"]) for row in log_of(run)]
    assert seen == [(1, None)] * 3
    assert json.loads((run / "adapter" / "state.json").read_text()) == {"step": 2}
    skipped = [{"skipped_updates": number} for number in (1, 1, 0, 1, 1)]
    logs.check_updates(skipped)
    logs.check_updates(skipped[:2])


def test_metrics_go_to_a_tracker(monkeypatch, tmp_path):
    logged, asked = [], []

    def init(**arguments):
        asked.append(arguments)
        return SimpleNamespace(log=lambda row, step: logged.append((row, step)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "a").mkdir()
    report = logs.open_tracker(tmp_path / "a", TrainSettings(report_to="wandb"))
    report({"step": 3, "reward": 1.5})
    assert asked[0]["name"] == "a" and asked[0]["config"]["reward"] == "autosearch"
    assert logged == [({"step": 3, "reward": 1.5}, 3)]
    logs.open_tracker(tmp_path, TrainSettings())({"step": 0})
    logs.open_tracker(tmp_path / "a", TrainSettings(report_to="wandb", topk=2), 4)
    (tmp_path / "b").mkdir()
    logs.open_tracker(tmp_path / "b", TrainSettings(report_to="wandb"))
    ids = [arguments["id"] for arguments in asked]
    assert ids[0] == ids[1] != ids[2], "a run that goes on is the same run"
    assert {arguments["resume"] for arguments in asked} == {"allow"}
    assert asked[1]["config"]["topk"] == 2 and asked[0]["config"]["max_searches"] == 4


def test_tensorboard_forgets_the_steps_that_come_again(monkeypatch, tmp_path):
    opened, logged = [], []

    def writer(folder, purge_step=None):
        opened.append((folder, purge_step))
        return SimpleNamespace(add_scalar=lambda *scalar: logged.append(scalar))

    module = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    for first_step in (0, 2):
        report = logs.open_tracker(tmp_path, TrainSettings(report_to="tensorboard"), first_step)
        report({"step": first_step, "em": 0.5, "kl": None})
    assert opened == [(tmp_path / "tensorboard", None), (tmp_path / "tensorboard", 2)]
    assert logged == [("step", 0, 0), ("em", 0.5, 0), ("step", 2, 2), ("em", 0.5, 2)]
