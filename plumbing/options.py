"""Command lines: settings are dataclass fields with a default, a range and a help text."""

import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from transformers import HfArgumentParser

from plumbing import models, runs
from plumbing.files import ROOT, DataError, check, on_failure, read_json

NEEDLESS = "shares of demonstrations with 0, 1, 2, ... searches after everything is known"


def setting(default, text, **more):
    """A dataclass field with its help text; `low` and `high` are the least and the greatest number
    allowed, `above` is a bound to exceed, anything else goes to `add_argument`."""
    metadata = {"help": text, **more}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Parser(HfArgumentParser):
    """`HfArgumentParser` that leaves ranges to `check_ranges`, and whose errors are one line."""

    def add_argument(self, *names, low=None, high=None, above=None, **more):
        return super().add_argument(*names, **more)

    def error(self, message):
        raise DataError(message)


def check_ranges(settings):
    """Raise DataError for a number that is none, or not in the range that stands at its field."""
    for option in fields(settings):
        low, high, above = (option.metadata.get(bound) for bound in ("low", "high", "above"))
        value = getattr(settings, option.name)
        if value is None or (low is None and above is None):
            continue
        for number in value if isinstance(value, list) else [value]:
            where, whole = f"--{option.name} {number}", option.type in (int, int | None)
            is_number = isinstance(number, int if whole else (int, float)) and math.isfinite(number)
            check(is_number, where, "must be a whole number" if whole else "must be a number")
            check(low is None or number >= low, where, f"must be {low} or more")
            check(high is None or number <= high, where, f"must be {high} or less")
            check(above is None or number > above, where, f"must be above {above}")


def parse(kind, arguments, description, defaults=None):
    """The settings object, of dataclass `kind`, of a command line. Raises DataError."""
    with on_failure("the command line is no UTF-8"):
        " ".join(sys.argv[1:] if arguments is None else arguments).encode()
    parser = Parser(kind, description=description)
    parser.set_defaults(**(defaults or {}))
    settings, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    check(not unknown, " ".join(unknown[:1]), "no such option; --help lists all of them")
    check_ranges(settings)
    return settings


def read_config(kind, run):
    """The settings object, of dataclass `kind`, in a run's config.json. Raises DataError."""
    config = runs.read_config(run)
    known = [option.name for option in fields(kind) if option.name in config]
    settings = kind(**{name: config[name] for name in known})
    check_ranges(settings)
    return settings


@dataclass
class RunSettings:
    """The part of a training run that is not the method: where things come from and go to."""

    preset: str | None = setting(None, "settings for a real model, from data/presets/")
    model: str = setting("data/tiny_model", "folder or hub name of a causal LM")
    corpus: str = setting("data/tinyworld/train_corpus.jsonl", "passages, or an index of them")
    questions: str = setting("data/tinyworld/train.jsonl", "questions to train on")
    eval_corpus: str = setting("data/tinyworld/dev_corpus.jsonl", "passages for held-out questions")
    eval_questions: str = setting("data/tinyworld/dev.jsonl", "held-out questions; '' for none")
    eval_limit: int | None = setting(200, "use only the first so many of them", low=1)
    eval_sample: int = setting(64, "of them, those by whose greedy reward `best` is kept", low=0)
    eval_batch_size: int = setting(128, "held-out questions rolled out together", low=1)
    retriever_url: str | None = setting(None, "search server to use instead of the corpora")
    name: str | None = setting(None, "written to runs/NAME; default: reward and seed")
    resume: str | None = setting(None, "run folder to go on with; its settings are used")
    merge: str | None = setting(None, "with --resume: write base model plus adapter to this folder")
    dry_run: bool = setting(False, "do not train: print memory and time of one step at its deepest")
    report_to: Literal["none", "wandb", "tensorboard"] = setting("none", "where metrics go too")
    sample_every: int = setting(10, "print a scored trajectory every so many steps; 0: none", low=0)
    save_every: int = setting(10, "steps between checkpoints and looks for the best", low=1)
    seed: int = setting(0, "the same seed gives the same run", low=0, high=2**32 - 1)
    lora_r: int = setting(16, "rank of the LoRA adapter", low=1)
    lora_alpha: int = setting(32, "scale of the LoRA adapter: alpha / r", low=1)
    lora_targets: str = setting("all-linear", "layers with one, or a regular expression of names")
    adapter: str | None = setting(None, "LoRA adapter to start from, such as runs/NAME/cold_start")
    cold_start: int = setting(0, "demonstrations to fine-tune on before step 0", low=0)
    cold_start_rate: float = setting(5e-4, "learning rate of that, falling linearly to 0", low=0)
    needless_searches: list[float] = setting([0.4, 0.35, 0.25], NEEDLESS, low=0)
    early_stops: float = setting(
        0.0, "rate at which they give up where evidence is missing", low=0, high=1
    )
    load_in_4bit: bool | None = setting(None, "4-bit NF4 base weights; default: with CUDA only")
    gradient_checkpointing: bool = setting(False, "recompute activations, to save memory")


def parse_training(kind, arguments, description):
    """(settings, of dataclass `kind`; the run to go on with, or None) of train.py's command line.
    Raises DataError for options that do not go together."""
    settings = parse(kind, arguments, description)
    if settings.resume:
        words = [word.split("=")[0] for word in (sys.argv[1:] if arguments is None else arguments)]
        given = [word for word in words if word[:2] == "--" and word not in ("--resume", "--merge")]
        where = f"--resume takes all settings from {settings.resume}"
        longer = "a longer run is a new one, since the learning rate falls to 0 at the last step; "
        problem = (longer if "--steps" in given else "") + f"leave out {', '.join(given)}"
        check(not given, where, problem)
        is_ones_own = settings.merge or not runs.is_shipped(settings.resume)
        check(is_ones_own, settings.resume, "ships with the project, finished; start your own")
        resumed = read_config(kind, settings.resume)
        resumed.merge = settings.merge
        return resumed, Path(settings.resume)
    check(not settings.merge, "--merge", "needs --resume runs/NAME, the run whose model to write")
    if settings.preset:
        paths = {path.stem: path for path in sorted((ROOT / "data" / "presets").glob("*.json"))}
        known = settings.preset in paths
        check(known, f"--preset {settings.preset}", f"choose one of {', '.join(paths)}")
        settings = parse(kind, arguments, description, read_json(paths[settings.preset]))
    settings.load_in_4bit = models.check_4bit(settings.load_in_4bit)
    if settings.name:
        where, run = f"--name {settings.name}", Path("runs") / settings.name
        is_plain = run.parent == Path("runs") and run.name != ".." and run.name.isprintable()
        check(is_plain, where, "must name a folder in runs/, without a path")
        check(not run.exists(), where, f"{run} exists; go on with it by --resume {run}")
    return settings, None
