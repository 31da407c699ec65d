"""A run's folder: making it, checkpoints, going on after a stop, what its numbers depend on."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from plumbing import files, models
from plumbing.files import ROOT, DataError, check, new_folder, on_failure

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "rank-bm25", "numpy")
FILES = {
    "model",
    "corpus",
    "questions",
    "eval_corpus",
    "eval_questions",
    "system_prompt",
    "adapter",
}
HELD_OUT = "eval_trajectories.jsonl"  # of a run: greedy, after training


def seed_of(seed, number):
    """The seed of training step or evaluation batch `number`: far from those of other seeds."""
    return (seed * 1_000_003 + number) % 2**32


def new_run(settings):
    """Make the run's folder and its config.json. A default name that is taken gets a number."""
    cost = f"-{settings.search_cost:g}" if settings.search_cost is not None else ""
    name = settings.name or f"{settings.reward}{cost}-seed{settings.seed}"
    run, number = Path("runs") / name, 2
    while run.exists():
        run, number = Path("runs") / f"{name}-{number}", number + 1
    config = asdict(settings) | {"versions": versions(), "commit": git_commit()}
    with new_folder(run) as folder:
        files.write_json(folder / "config.json", config)
    return run


def read_config(run, locate=True):
    """A run's config.json. locate: look for the files it names also where it was started."""
    path = Path(run) / "config.json"
    check(path.is_file(), path, "is not there: no such run")
    config = files.read_json(path)
    for name in FILES & config.keys() if locate else ():
        config[name] = config[name] and files.locate(config[name], run)
    return config


def is_shipped(run):
    """Whether a run is one of those that come with the project, which nothing may change."""
    return ROOT / "data" in Path(run).resolve().parents


def versions():
    """The versions of Python and of the packages that numbers depend on, as far as installed."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_commit():
    """The commit of the code, "-dirty" where files differ from it; None outside a repository."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def sha256(path):
    """The SHA-256 of a file, in hexadecimal. Raises OSError."""
    return hashlib.sha256(Path(files.locate(path)).read_bytes()).hexdigest()


def save_checkpoint(model, optimizer, step, place):
    """Write adapter, optimizer and the number of steps done to `place`. Raises DataError.
    Nothing else is needed to go on exactly: questions, random numbers and learning rate follow from
    the seed and the step, held-out scores stand in metrics.jsonl."""
    with on_failure(f"{place}: not written (is the disk full?)"), new_folder(place) as folder:
        # The default, "auto", would ask the hub about the base model.
        model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=["default"])
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        files.write_json(folder / "state.json", {"step": step})


def save_step(model, optimizer, log, step, stop):
    """The best and the last checkpoint of a run, where they are due.
    Raises KeyboardInterrupt once a run that was asked to stop is saved."""
    is_due = log.is_due(step)
    if is_due and log.is_best():
        save_checkpoint(model, optimizer, step + 1, log.run / "best")
        shutil.rmtree(log.run / "best.old", ignore_errors=True)
    if is_due or stop.is_set():
        save_checkpoint(model, optimizer, step + 1, log.run / "adapter")
    if stop.is_set():
        raise KeyboardInterrupt


def find_checkpoint(run, name="adapter"):
    """The folder of the last complete checkpoint, or None."""
    for last in (name, f"{name}.old"):  # a run killed while it wrote one has the one before
        if run and (Path(run) / last).exists():
            return Path(run) / last


def load_optimizer(optimizer, checkpoint):
    """Put the optimizer's state back; returns the number of steps done. Raises DataError."""
    how = "without this folder, the run goes on from the checkpoint before it"
    with on_failure(f"{checkpoint}: damaged ({how})"):
        path = checkpoint / "optimizer.pt"
        optimizer.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        for parameter, moments in optimizer.state.items():
            if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == parameter.shape:
                raise ValueError("optimizer.pt belongs to another adapter")
        return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["step"]


def write_merged(settings, run):
    """Write base model plus adapter, in 16 bits, as an ordinary model folder. Raises DataError.
    The adapter is added to the unquantised weights: into 4-bit ones it would vanish in rounding."""
    adapter, out, path = find_checkpoint(run), settings.merge, files.locate(settings.model)
    check(adapter, run, "there is no adapter yet")
    check(not Path(out).exists(), f"--merge {out}", "exists already")
    base = models.load_base_model(path, dtype=torch.bfloat16)
    model = models.load_adapter(base, adapter).merge_and_unload()
    with on_failure(f"{out}: not written"), new_folder(out) as folder:
        model.save_pretrained(folder)
        models.load_tokenizer(path).save_pretrained(folder)
    print(f"{settings.model} with {adapter}: {out}")


@contextmanager
def stop_signals():
    """Ctrl-C and SIGTERM set the event that this yields, to end the step; a second interrupts."""
    stop = threading.Event()

    def ask(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        os.write(2, b"\nfinishing this step; once more stops at once\n")  # print is not safe here

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def resumable(run):
    """Whatever ends a run says how to go on with it."""
    how = f"go on with: python train.py --resume {run}"
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(f"\nstopped; {how}") from None
    except (*files.UNUSABLE, RuntimeError) as error:
        raise DataError(f"{files.one_line(error)}; {how}") from None
