"""The paper's claims on the tiny world, each with a verdict, from runs over three seeds.

    python data/claims.py                        # from the shipped reports, in a second
    python data/claims.py --reports runs --train # trains what is missing in runs/ first: hours

Writes claims.md and two figures beside the reports. What is trained is what `RUNS` lists; runs that
were stopped go on. EM / SD are means over seeds, with the lowest and the highest seed behind them;
`hard` questions hide the answer in one of seven papers.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from plumbing import figures, files, tables  # noqa: E402
from plumbing.stats import mean  # noqa: E402

PRICES = (0.05, 0.1, 0.2, 0.3, 0.5)
GROUPS = {"all": ("", "all")} | {name: ("hops", name) for name in ("0", "1", "2", "3", "hard")}
RUNS = {"autosearch": "", "outcome": "--reward outcome"}
for price in PRICES:
    RUNS[f"search-penalty-{price}"] = f"--reward search-penalty --search_cost {price}"
for name in ("no-base", "no-efficiency", "no-quality", "autosearch-released", "autosearch-t0"):
    RUNS[name] = f"--reward {name}"
RUNS["group-shortest"] = "--reward group-shortest"
for G in (4, 16):
    size = f"--num_generations {G} --num_questions {96 // G}"
    RUNS[f"group-shortest-G{G}"] = f"--reward group-shortest {size}"
    RUNS[f"autosearch-G{G}"] = size
# Other cold starts, made from the shipped one: options of make_tiny_model.py, then of the runs
COLD_STARTS = {"rarely": ("--early_stop 0.03", ""), "no-famous": ("--no_famous", "")}
DEEP = "--max_searches 6 --max_context 1000"
COLD_STARTS["deep"] = ("--deep", DEEP)
for start, (_, options) in COLD_STARTS.items():
    for name in ("autosearch", "outcome", "search-penalty-0.1", "search-penalty-0.3"):
        model = f"--model runs/model-{start}"
        world = "runs/world-deep" if start == "deep" else "data/tinyworld"
        paths = f"--questions {world}/train.jsonl --corpus {world}/train_corpus.jsonl"
        paths += f" --eval_questions {world}/dev.jsonl --eval_corpus {world}/dev_corpus.jsonl"
        RUNS[f"{start}-{name}"] = f"{RUNS[name]} {model} {paths} {options}"


# Training what is missing


def train_missing(names, seeds, jobs):
    """Train the runs that have no reports yet in runs/, so many at a time."""
    for start, (options, _) in COLD_STARTS.items():
        model = Path(f"runs/model-{start}")
        if any(name.startswith(start) for name in names) and not (model / "config.json").exists():
            script(f"data/make_tiny_model.py --start_from data/tiny_model {options} --out {model}")
    if not Path("runs/world-deep").exists():
        script("data/make_tinyworld.py --deep --out runs/world-deep")
    wanted = [(name, seed) for name in names for seed in range(seeds)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(train_one, threads=max(1, os.cpu_count() // jobs)), wanted))


def train_one(run, threads):
    """Train a run of (name, seed), or go on with it."""
    name, seed = run
    folder = Path(f"runs/{name}-seed{seed}")
    report = folder / "eval.json"
    if report.exists() and "after" in files.read_json(report):
        return
    options = f"{RUNS[name]} --seed {seed} --name {folder.name} --eval_limit 1000 --sample_every 0"
    script(f"train.py --resume {folder}" if folder.exists() else f"train.py {options}", threads)
    print(f"{folder} done", flush=True)


def script(command, threads=None):
    """Run one of the project's scripts; its output goes to runs/claims.log."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    path, *options = command.split()
    Path("runs").mkdir(exist_ok=True)
    with open("runs/claims.log", "a") as log:
        words = [sys.executable, str(ROOT / path), *options]
        code = subprocess.run(words, env=environment, stdout=log, stderr=log).returncode
    files.check(code == 0, command, "failed; see runs/claims.log")


# Reading reports


class Reports:
    """The reports of runs that are there: {name: [{"before", "after"} a seed]}."""

    def __init__(self, folder, seeds):
        self.runs = {}
        for name in RUNS:
            paths = [Path(folder) / f"{name}-seed{seed}" / "eval.json" for seed in range(seeds)]
            results = [files.read_json(path) for path in paths if path.exists()]
            results = [result for result in results if "after" in result]
            if results:
                self.runs[name] = results

    def values(self, name, group, metric, decoding, moment):
        """A number of a run for each seed."""
        reports = [result[moment][decoding] for result in self.runs[name]]
        return [tables.groups_of(report)[GROUPS[group]][metric] for report in reports]

    def mean(self, name, group="all", metric="em", decoding="sampled", moment="after"):
        return mean(self.values(name, group, metric, decoding, moment))

    def text(self, name, group="all", decoding="sampled", moment="after"):
        """EM / SD, each with the lowest and the highest seed: 0.853 (0.846-0.862) / 2.15 (...)."""
        cells = []
        for metric, digits in (("em", 3), ("sd", 2)):
            found = self.values(name, group, metric, decoding, moment)
            spread = f"{min(found):.{digits}f}-{max(found):.{digits}f}"
            cells.append(f"{mean(found):.{digits}f} ({spread})")
        return " / ".join(cells)
