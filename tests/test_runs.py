"""Runs that are stopped, killed or out of disk space: nothing is lost, and what goes on is exact.

Processes are forked from this one, where all is imported, and run train.py as a script does; one is
a real subprocess.
"""

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, WORLD, adamw, log_of, trainable
from processes import in_child, limit_files, needs_fork, outcome

import train
from plumbing import figures, files, logs, models, options, runs
from plumbing.files import DataError
from train import TrainSettings

pytestmark = needs_fork
STEPS = 4
SETTINGS = "--corpus c.jsonl --questions q.jsonl --eval_corpus c.jsonl --eval_questions q.jsonl "
SETTINGS += f"--steps {STEPS} --save_every 1 --num_questions 2 --num_generations 3 "
SETTINGS += "--eval_limit 2 --eval_sample 2 --max_searches 1 --max_turn_tokens 24 "
SETTINGS += "--max_self_answer_tokens 8 --learning_rate 0.02 --temperature 1.5 "
SETTINGS += "--sample_every 2 --name a"
SETTINGS = SETTINGS.split()
WITHOUT_EVALUATION = [*SETTINGS, "--eval_questions", ""]  # sooner, and the same weights
RESUME = ["--resume", "runs/a"]
HOW_TO_GO_ON = "go on with: python train.py --resume runs/a"
WEIGHTS = "adapter_model.safetensors"


def small_world(folder):
    """A folder to start runs in: passages, and questions the tiny model answers from memory."""
    folder.mkdir()
    for name, source, part in (
        ("q.jsonl", "train.jsonl", '"hops": 0'),
        ("c.jsonl", "train_corpus.jsonl", ""),
    ):
        lines = (WORLD / source).read_text(encoding="utf-8").splitlines(keepends=True)
        chosen = [line for line in lines if part in line][:30]
        (folder / name).write_text("".join(chosen), encoding="utf-8")
    return folder


def start(folder, *arguments, first=lambda: None):
    """`python train.py ...` in a folder, in a forked process that prints to the file `output`."""

    def script():
        output = open(folder / "output", "w", encoding="utf-8")
        sys.stdout = sys.stderr = output
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.chdir(folder)
        figures.plot_curves = lambda *_: None  # seconds each, and not what is tested here
        sys.argv = ["train.py", *arguments]
        first()
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    return in_child(script)


def wait_for(condition, *arguments, seconds=60):
    end = time.monotonic() + seconds
    while not condition(*arguments):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def state_of(run):
    """What must be equal in two runs: metrics without times, trajectories, weights, optimizer."""
    lines = (run / logs.SAMPLES).read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    saved = []
    for folder in ("adapter", "adapter.old", "best"):
        saved += [(run / folder / name).read_bytes() for name in (WEIGHTS, "state.json")]
    optimizer = torch.load(run / "adapter" / "optimizer.pt", weights_only=True)["state"]
    moments = []
    for of_parameter in optimizer.values():
        moments += [value.tolist() for value in of_parameter.values()]
    return log_of(run), turns, saved, moments


def steps_done(run):
    return files.read_json(run / "adapter" / "state.json")["step"]


# Exactly the same run


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing disturbed."""
    models.load_trainable(TrainSettings())  # imports what the children need
    folder = small_world(tmp_path_factory.mktemp("reference") / "w")
    assert outcome(start(folder, *SETTINGS)) == 0, (folder / "output").read_text()
    return folder / "runs" / "a"


def test_the_same_seed_gives_the_same_run(reference, tmp_path):
    folder = small_world(tmp_path / "w")
    assert outcome(start(folder, *SETTINGS)) == 0
    state = state_of(folder / "runs" / "a")
    assert state == state_of(reference) and all(state)
    rows = log_of(reference)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {row["seed"] for row in rows} == {0}
    config = files.read_json(reference / "config.json")
    assert {"torch", "transformers", "peft", "python"} <= config["versions"].keys()
    assert "commit" in config


def steps_logged(run):
    path = run / logs.METRICS
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def has_logged(run, steps):
    return steps_logged(run) >= steps


def test_killed_at_fifty_random_instants(reference, tmp_path):
    """SIGKILL and resume, again and again: every folder can be resumed, to the same end."""
    folder, rng = small_world(tmp_path / "w"), random.Random(0)
    run, output, kills, finished, resumed = folder / "runs" / "a", folder / "output", 0, 0, 0
    times = [row["wall_time"] for row in files.read_log(reference / logs.METRICS)]
    step_and_save = (times[-1] - times[0]) / (len(times) - 1)  # seconds
    while kills < 50 or not finished:
        output.unlink(missing_ok=True)
        resumed += runs.find_checkpoint(run) is not None
        last = steps_logged(run) + rng.randint(0, 1)  # the step in whose wake it dies
        pid = start(folder, *(RESUME if run.exists() else SETTINGS))
        if kills < 50 and last <= STEPS:
            wait_for(output.exists)
            if kills % 5:  # some die while they start, most in a step or in a save
                wait_for(lambda: "trainable parameters" in output.read_text(errors="replace"))
                wait_for(has_logged, run, last)
            time.sleep(rng.uniform(0, 1.5 * step_and_save))
            os.kill(pid, signal.SIGKILL)
        code = outcome(pid)
        assert code in (0, -signal.SIGKILL), output.read_text()
        kills += code != 0
        if code == 0:
            finished += 1
            assert state_of(run) == state_of(reference)
            shutil.rmtree(folder / "runs")
    assert resumed > 20, "kills before the first checkpoint show little"


# Checkpoints and folders


@pytest.fixture(scope="module")
def trained():
    """(model, optimizer) after a step, as a checkpoint needs them."""
    model = models.load_trainable(TrainSettings()).model
    optimizer = adamw(model)
    for parameter in trainable(model):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def step_of(run):
    """The step that a run would go on from; everything is read as on resuming."""
    checkpoint = runs.find_checkpoint(run)
    model = models.load_trainable(TrainSettings(), checkpoint).model
    return runs.load_optimizer(adamw(model), checkpoint)


def test_killed_at_every_file_operation_of_a_save(trained, tmp_path):
    """A save opens, removes and renames files; before any of them a kill leaves a checkpoint."""
    run, steps = tmp_path / "run", []
    for step in (1, 2):
        runs.save_checkpoint(*trained, step, run / "adapter")
    shutil.copytree(run, tmp_path / "before")

    def save(operations_left):
        def kill(event, arguments):
            nonlocal operations_left
            is_change = event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename")
            if is_change or (event == "open" and str(tmp_path) in str(arguments[0])):
                operations_left -= 1
                if operations_left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        runs.save_checkpoint(*trained, 3, run / "adapter")

    killed = True
    while killed:
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "before", run)
        code = outcome(in_child(lambda: save(len(steps))))
        assert code in (0, -signal.SIGKILL)
        killed = code != 0
        steps.append(step_of(run))
    assert len(steps) > 15 and set(steps) == {2, 3} and steps[-1] == 3


@pytest.mark.parametrize("size", [0, 100, 10_000, 700_000, 1_000_000])
def test_a_save_without_space_leaves_the_checkpoint_and_no_rubbish(trained, tmp_path, size):
    """The limits fall into the card, the configuration, the weights and the optimizer's state."""
    for step in (1, 2):
        runs.save_checkpoint(*trained, step, tmp_path / "adapter")

    def save():
        limit_files(size)
        try:
            runs.save_checkpoint(*trained, 3, tmp_path / "adapter")
        except DataError as error:
            line = str(error)
            says_why = "adapter: not written (is the disk full?): " in line and "\n" not in line
            return 7 if says_why else 8

    assert outcome(in_child(save)) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "adapter.old"}
    assert step_of(tmp_path) == 2


def test_a_run_folder_appears_complete(monkeypatch, tmp_path):
    """A run that dies between the folder and its settings would have nothing to resume from."""
    monkeypatch.chdir(tmp_path)

    def die_before_the_settings():
        files.write_text = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        runs.new_run(TrainSettings(name="a"))

    assert outcome(in_child(die_before_the_settings)) == -signal.SIGKILL
    assert not Path("runs/a").exists()
    run = runs.new_run(TrainSettings(name="a"))
    assert run == Path("runs/a") and options.read_config(TrainSettings, run).name == "a"
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


# Signals


def at_step_1(act):
    """Something that happens inside the second step: when its seed is set."""
    seed = torch.manual_seed

    def seed_and_act(number):
        if number == runs.seed_of(0, 1):
            act()
        return seed(number)

    torch.manual_seed = seed_and_act


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(reference, tmp_path, number):
    folder = small_world(tmp_path / "w")
    run = folder / "runs" / "a"

    def signalled():
        at_step_1(lambda: os.kill(os.getpid(), number))

    arguments = [*WITHOUT_EVALUATION, "--save_every", "100"]
    assert outcome(start(folder, *arguments, first=signalled)) == 1
    output = (folder / "output").read_text()
    assert "finishing this step" in output and "Traceback" not in output
    assert output.endswith(f"stopped; {HOW_TO_GO_ON}\n")
    assert steps_done(run) == len(log_of(run)) == 2
    assert outcome(start(folder, *RESUME)) == 0
    undisturbed = (reference / "adapter" / WEIGHTS).read_bytes()
    assert (run / "adapter" / WEIGHTS).read_bytes() == undisturbed


def test_a_second_signal_stops_at_once(tmp_path):
    folder = small_world(tmp_path / "w")

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def signalled():
        at_step_1(twice)

    assert outcome(start(folder, *WITHOUT_EVALUATION, first=signalled)) == 1
    assert (folder / "output").read_text().endswith(f"{HOW_TO_GO_ON}\n")
    assert steps_done(folder / "runs" / "a") == 1


def test_a_real_process_obeys_sigterm(tmp_path):
    folder = small_world(tmp_path / "w")
    run = folder / "runs" / "a"
    command = [sys.executable, str(ROOT / "train.py"), *WITHOUT_EVALUATION]
    command += ["--steps", "1000", "--save_every", "1000"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    try:
        wait_for((run / logs.METRICS).exists)
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1 and errors.endswith(f"{HOW_TO_GO_ON}\n")
    assert steps_done(run) == len(log_of(run)) < 1000


# No space left


def test_a_run_without_space_ends_in_one_line(tmp_path):
    folder = small_world(tmp_path / "w")

    def limited():
        at_step_1(lambda: limit_files(300_000))

    assert outcome(start(folder, *WITHOUT_EVALUATION, first=limited)) == 2
    output = (folder / "output").read_text()
    line = output.splitlines()[-1]
    assert line.startswith("train.py: runs/a/") and line.endswith(f"; {HOW_TO_GO_ON}")
    assert "Traceback" not in output
    assert not list(folder.rglob("*.tmp"))
    assert outcome(start(folder, *RESUME)) == 0


# Going on from elsewhere, and with nothing left to do


def stop_after_a_step():
    at_step_1(lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_a_run_finds_its_files_from_any_folder(tmp_path, monkeypatch, capsys):
    folder = small_world(tmp_path / "w")
    assert outcome(start(folder, *WITHOUT_EVALUATION, first=stop_after_a_step)) == 1
    (tmp_path / "else" / "where").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "else" / "where")
    train.main(["--resume", "../../w/runs/a"])
    assert steps_done(folder / "runs" / "a") == STEPS
    capsys.readouterr()
    train.main(["--resume", "../../w/runs/a"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("../../w/runs/a: ") and first.endswith("; finished, 4 of 4 steps")
    assert len(log_of(folder / "runs" / "a")) == STEPS


def test_out_of_memory_is_one_line_and_the_last_checkpoint_stays(run_train, tmp_path, monkeypatch):
    update, steps = train.update, []

    def too_large(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return update(*arguments)

    monkeypatch.setattr(train, "update", too_large)
    options = ["--steps", "4", "--save_every", "1", "--name", "a", "--eval_questions", ""]
    with pytest.raises(DataError, match=f"^out of memory: lower --micro_.*; {HOW_TO_GO_ON}$"):
        run_train(tmp_path, *options)
    assert files.read_json(tmp_path / "runs" / "a" / "adapter" / "state.json") == {"step": 2}
