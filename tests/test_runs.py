"""Runs that are stopped, killed or out of disk space: nothing is lost, and what goes on is what would have been.

Processes are forked from this one, where all is imported, and run train.py as a script does; one is a real subprocess.
"""

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import tqdm.auto
from conftest import ROOT, WORLD

import eval as evaluation
import train as tr
from retriever import DataError
from rollout import RolloutSettings

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these tests fork")
STEPS = 4
SETTINGS = ["--corpus", "c.jsonl", "--questions", "q.jsonl", "--eval_corpus", "c.jsonl", "--eval_questions", "q.jsonl",
            "--steps", str(STEPS), "--save_every", "1", "--num_questions", "2", "--num_generations", "3",
            "--eval_limit", "2", "--eval_sample", "2", "--max_searches", "1", "--max_turn_tokens", "24",
            "--max_self_answer_tokens", "8", "--learning_rate", "0.02", "--temperature", "1.5",
            "--sample_every", "2", "--name", "a"]  # fmt: skip
WITHOUT_EVALUATION = [*SETTINGS, "--eval_questions", ""]  # sooner, and the same weights


def world(folder):
    """A folder with a few questions, which the tiny model can answer from memory, and passages: runs start there."""
    folder.mkdir()
    for name, source, part in (("q.jsonl", "train.jsonl", '"hops": 0'), ("c.jsonl", "train_corpus.jsonl", "")):
        lines = (WORLD / source).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join([line for line in lines if part in line][:30]), encoding="utf-8")
    return folder


def in_child(function):
    """Run a function in a forked process; returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)  # other threads did not survive the fork
            for bar in (tqdm.std.tqdm, tqdm.auto.tqdm):
                bar.set_lock(threading.RLock())  # the usual one is shared with this process; killed, a child keeps it
            code = function() or 0
        except SystemExit as leave:
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
            code = leave.code if isinstance(leave.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    return pid


def start(folder, *arguments, first=lambda: None):
    """`python train.py ...` in a folder, as a forked process; what it prints goes to the file `output`."""

    def script():
        output = open(folder / "output", "w", encoding="utf-8")
        sys.stdout = sys.stderr = output
        os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
        os.chdir(folder)
        evaluation.plot_curves = lambda *_: None  # seconds each, and not what is tested here
        sys.argv = ["train.py", *arguments]
        first()
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    return in_child(script)


def outcome(pid):
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def state_of(run):
    """What must be equal in two runs: metrics without times, trajectories, weights, optimizer."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if "seconds" not in k and k != "wall_time"} for line in lines]
    texts = [json.loads(line)["turns"] for line in (run / "trajectories.jsonl").read_text("utf-8").splitlines()]
    files = [(run / name / file).read_bytes() for name in ("adapter", "adapter.old", "best")
             for file in ("adapter_model.safetensors", "state.json")]  # fmt: skip
    moments = torch.load(run / "adapter" / "optimizer.pt", weights_only=True)["state"]
    return rows, texts, files, [value.tolist() for moment in moments.values() for value in moment.values()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing disturbed."""
    tr.load_model(tr.TrainSettings())  # imports what the children need
    folder = world(tmp_path_factory.mktemp("reference") / "w")
    assert outcome(start(folder, *SETTINGS)) == 0, (folder / "output").read_text()
    return folder / "runs" / "a"


def test_the_same_seed_gives_the_same_run(reference, tmp_path):
    folder = world(tmp_path / "w")
    assert outcome(start(folder, *SETTINGS)) == 0
    assert state_of(folder / "runs" / "a") == state_of(reference)
    rows = state_of(reference)[0]
    assert [row["step"] for row in rows] == list(range(STEPS)) and {row["seed"] for row in rows} == {0}
    config = json.loads((reference / "config.json").read_text())
    assert {"torch", "transformers", "peft", "python"} <= config["versions"].keys() and "commit" in config


def test_killed_at_fifty_random_instants(reference, tmp_path):
    """SIGKILL and resume, again and again: no folder that cannot be resumed, and in the end the undisturbed run."""
    folder, kills, finished, rng = world(tmp_path / "w"), 0, 0, random.Random(0)
    run, times = folder / "runs" / "a", [row["wall_time"] for row in evaluation.read_lines(reference / "metrics.jsonl")]
    step_and_save = (times[-1] - times[0]) / (len(times) - 1)  # seconds
    while kills < 50 or not finished:
        pid = start(folder, *(["--resume", "runs/a"] if run.exists() else SETTINGS))
        if kills < 50:
            if kills % 5:  # some die while they start, most later
                wait_for(lambda: "trainable parameters" in (folder / "output").read_text(errors="replace"))
            time.sleep(rng.uniform(0, 1.5 * step_and_save))
            os.kill(pid, signal.SIGKILL)
        code = outcome(pid)
        assert code in (0, -signal.SIGKILL), (folder / "output").read_text()
        kills += code != 0
        if code == 0:
            finished += 1
            assert state_of(run) == state_of(reference)
            shutil.rmtree(folder / "runs")


@pytest.fixture(scope="module")
def trained():
    """(model, optimizer) after a step, as a checkpoint needs them."""
    model, _ = tr.load_model(tr.TrainSettings())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def step_of(run, optimizer):
    """The step that a run would go on from; everything is read as on resuming."""
    checkpoint = tr.find_checkpoint(run)
    tr.load_model(tr.TrainSettings(), checkpoint)
    return tr.load_optimizer(torch.optim.AdamW(optimizer.param_groups[0]["params"]), checkpoint)


def test_killed_at_every_file_operation_of_a_save(trained, tmp_path):
    """A save opens, removes and renames files; killed before any of these, the last or the new checkpoint is there."""
    run, steps = tmp_path / "run", []
    for step in (1, 2):
        tr.save_checkpoint(*trained, step, run / "adapter")
    shutil.copytree(run, tmp_path / "before")

    def save(operations_left):
        def kill(event, arguments):
            nonlocal operations_left
            if event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename") or (
                event == "open" and str(tmp_path) in str(arguments[0])
            ):
                operations_left -= 1
                if operations_left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        tr.save_checkpoint(*trained, 3, run / "adapter")

    killed = True
    while killed:
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "before", run)
        killed = outcome(in_child(lambda: save(len(steps)))) == -signal.SIGKILL
        steps.append(step_of(run, trained[1]))
    assert len(steps) > 15 and set(steps) == {2, 3} and steps[-1] == 3


def test_a_run_folder_appears_complete(monkeypatch, tmp_path):
    """A run that dies between the folder and its settings would have nothing to resume from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tr, "write_text", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert outcome(in_child(lambda: tr.new_run(tr.TrainSettings(name="a"), RolloutSettings()) and None)) < 0
    assert not Path("runs/a").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert tr.settings_of(tr.new_run(tr.TrainSettings(name="a"), RolloutSettings()))[0].name == "a"
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def at_step_1(act):
    """Something that happens inside the second step: when its seed is set."""
    seed = torch.manual_seed

    def seed_and_act(number):
        if number == 1:
            act()
        return seed(number)

    torch.manual_seed = seed_and_act


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(reference, tmp_path, number):
    folder = world(tmp_path / "w")
    run = folder / "runs" / "a"
    arguments = [*WITHOUT_EVALUATION, "--save_every", "100"]
    assert outcome(start(folder, *arguments, first=lambda: at_step_1(lambda: os.kill(os.getpid(), number)))) == 1
    output = (folder / "output").read_text()
    assert "finishing this step" in output and "Traceback" not in output
    assert output.endswith("stopped; go on with: python train.py --resume runs/a\n")
    assert json.loads((run / "adapter" / "state.json").read_text()) == {"step": 2}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert outcome(start(folder, "--resume", "runs/a")) == 0
    weights = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in (run, reference)]
    assert weights[0] == weights[1], "the same as without the stop"


def test_a_second_signal_stops_at_once(tmp_path):
    folder = world(tmp_path / "w")

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    assert outcome(start(folder, *WITHOUT_EVALUATION, first=lambda: at_step_1(twice))) == 1
    assert (folder / "output").read_text().endswith("go on with: python train.py --resume runs/a\n")
    assert json.loads((folder / "runs" / "a" / "adapter" / "state.json").read_text()) == {"step": 1}


def test_a_real_process_obeys_sigterm(tmp_path):
    folder = world(tmp_path / "w")
    command = [sys.executable, str(ROOT / "train.py"), *WITHOUT_EVALUATION, "--steps", "1000", "--save_every", "1000"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    try:
        wait_for((folder / "runs" / "a" / "metrics.jsonl").exists)
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1 and errors.endswith("go on with: python train.py --resume runs/a\n")
    done = json.loads((folder / "runs" / "a" / "adapter" / "state.json").read_text())["step"]
    assert done == len((folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()) < 1000


def limit_files(size):
    """In this process no file can grow beyond so many bytes: as on a full disk, the errors come from the libraries."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [0, 100, 10_000, 700_000, 1_000_000])
def test_a_save_without_space_leaves_the_checkpoint_and_no_rubbish(trained, tmp_path, size):
    """The limits fall into the card, the configuration, the weights and the optimizer's state."""
    for step in (1, 2):
        tr.save_checkpoint(*trained, step, tmp_path / "adapter")

    def save():
        limit_files(size)
        try:
            tr.save_checkpoint(*trained, 3, tmp_path / "adapter")
        except DataError as error:
            return 7 if "adapter: not written (is the disk full?): " in str(error) and "\n" not in str(error) else 8

    assert outcome(in_child(save)) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "adapter.old"}
    assert step_of(tmp_path, trained[1]) == 2


def test_a_run_without_space_ends_in_one_line(tmp_path):
    folder = world(tmp_path / "w")
    assert outcome(start(folder, *WITHOUT_EVALUATION, first=lambda: at_step_1(lambda: limit_files(300_000)))) == 2
    line = (folder / "output").read_text().splitlines()[-1]
    assert line.startswith("train.py: runs/a/") and line.endswith("; go on with: python train.py --resume runs/a")
    assert not list(folder.rglob("*.tmp"))
    assert outcome(start(folder, "--resume", "runs/a")) == 0


def test_a_file_without_space_leaves_the_old_one(tmp_path):
    evaluation.write_text(tmp_path / "f", "old")

    def write():
        limit_files(5)
        try:
            evaluation.write_text(tmp_path / "f", "much longer")
        except OSError:
            return 7

    assert outcome(in_child(write)) == 7
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]
