"""What a run says: a line of metrics a step, a progress bar, trackers, samples, warnings."""

import math
import secrets
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec

import torch
from tqdm import tqdm

from plumbing import files, show

SAMPLES = "trajectories.jsonl"  # of a run: sampled while it trained
METRICS = "metrics.jsonl"
NO_SIGNAL = "the questions are too easy or too hard for this policy, or --temperature is too low"
INVALID = "the policy needs a cold start, or forgets the format and --learning_rate is too high"
DISAGREE = "cache, mask, merged adapter or precision is broken: what is trained is not what sampled"
COLLAPSED = "the policy has collapsed to one text; lower --learning_rate, raise --beta"


class Clock:
    """Adds up the seconds of named phases: `with clock("search"): ...`."""

    def __init__(self):
        self.seconds, self.start = {}, time.perf_counter()

    @contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():  # a GPU works on after a call has returned
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def row(self):
        """The time, seconds in all and by phase, for a line of metrics."""
        row = {"wall_time": time.time(), "seconds": time.perf_counter() - self.start}
        return row | {f"seconds/{phase}": value for phase, value in self.seconds.items()}


class Logbook:
    """The log of a training run, in its folder; a resumed one goes on where it was stopped."""

    def __init__(self, run, settings, first_step):
        self.run, self.settings, self.warned = run, settings, set()
        drop_later_lines(run / SAMPLES, first_step)
        self.rows = drop_later_lines(run / METRICS, first_step)  # all metrics until now
        self.report = open_tracker(run, settings, first_step)
        steps = range(first_step, settings.steps)
        self.bar = tqdm(steps, run.name, settings.steps, initial=first_step, disable=None)

    def is_due(self, step):
        """Whether this step ends with a checkpoint and a look at held-out questions."""
        return (step + 1) % self.settings.save_every == 0 or step + 1 == self.settings.steps

    def add(self, row, trajectories, scores):
        """Write and show a step: metrics (6 digits, None if not finite), a sample, warnings.
        Raises DataError when training cannot go on."""
        for key, value in row.items():
            if isinstance(value, float):
                row[key] = round(value, 6) if math.isfinite(value) else None
        self.rows.append(row)
        files.append_line(self.run / METRICS, row)
        self.report(row)
        text = f"reward {row['reward']:.2f}, EM {row['em']:.2f}, depth {row['search_depth']:.2f}"
        text += f", over-search {row['over_search_ratio']:.2f}"
        self.bar.set_postfix_str(text)
        if self.bar.disable and self.is_due(row["step"]):  # in a log file there is no bar
            print(f"step {row['step'] + 1} of {self.bar.total}: {text}", flush=True)
        if self.settings.sample_every and row["step"] % self.settings.sample_every == 0:
            self.show_sample(row["step"], trajectories, scores)
        for symptom in symptoms(self.rows, self.settings.max_searches):
            if symptom not in self.warned:
                self.warned.add(symptom)
                tqdm.write(f"warning, step {row['step'] + 1}: {symptom}", file=sys.stderr)
        check_updates(self.rows)

    def show_sample(self, step, trajectories, scores):
        """Print one scored trajectory and keep it, with the rest of its group."""
        tqdm.write(show.render_trajectory(trajectories[0], scores[0]) + "\n")
        for i in range(self.settings.num_generations):
            record = {"step": step, **trajectories[i].to_dict(), "score": asdict(scores[i])}
            files.append_line(self.run / SAMPLES, record)

    def is_best(self):
        """Whether the last step has a held-out reward, and a higher one than all before it."""
        rewards = [row["eval/reward"] for row in self.rows if "eval/reward" in row]
        highest = max(rewards[:-1], default=-math.inf)
        return "eval/reward" in self.rows[-1] and rewards[-1] > highest


def drop_later_lines(path, first_step):
    """After a resume, forget logged steps that come again and lines cut short. Returns the rest."""
    if not path.exists():
        return []
    rows = [row for row in files.read_log(path) if row["step"] < first_step]
    files.write_jsonl(path, rows)
    return rows


def check_updates(rows):
    """Raise DataError once each of the last three steps had an update skipped."""
    if len(rows) >= 3 and all(row["skipped_updates"] for row in rows[-3:]):
        cause = "--learning_rate may be too high, or the model overflows in its precision"
        where = "loss or gradient was not finite in 3 steps in a row"
        raise files.DataError(f"{where}: {cause}; the last checkpoint is kept")


def symptoms(rows, max_searches):
    """What is wrong with the last of these metric rows: messages with the likely cause."""
    row, last = rows[-1], rows[-5:]
    no_signal = all(r["frac_reward_zero_std"] == 1 for r in last)
    floor = 0.01 * (rows[0]["entropy"] or 0.0)
    collapsed = all(r["entropy"] is not None and r["entropy"] < floor for r in last)
    found = []
    if len(last) == 5 and no_signal:
        found.append("no group had a signal for 5 steps (all its rewards equal): " + NO_SIGNAL)
    if row["valid_action_ratio"] < 0.5:
        found.append("under half of the actions are valid: " + INVALID)
    if row["search_depth"] == 0:
        found.append("nobody searches any more: searches cost too much, or none is needed")
    if row["search_depth"] == max_searches:
        found.append("everybody searches to the limit: stopping pays too little, or it is too low")
    if (row.get("sampling_logp_difference/mean") or 0.0) > 0.1:
        found.append("log-probabilities when sampled and when trained differ: " + DISAGREE)
    if len(last) == 5 and collapsed:
        found.append("entropy was under 1% of its start for 5 steps: " + COLLAPSED)
    return found


def batch_metrics(batches, trajectories, trained_tokens):
    """What an update says of its micro-batches: `padding`, the share of positions computed in vain;
    `sampling_logp_difference`, how far log-probabilities when sampled (cached, merged or in 4 bits)
    are from those of the update's first forward pass, over the trained tokens: TRL's name."""
    computed, total, largest = 0, 0.0, 0.0
    for batch in batches:
        computed += batch["input_ids"].numel()
        # Both are 0 where nothing was sampled.
        difference = (batch["old_per_token_logps"] - batch["sampling_logps"]).abs()
        total += difference.sum().item()
        largest = max(largest, difference.max().item())
    row = {"padding": 1 - sum(map(len, trajectories)) / computed}
    row["sampling_logp_difference/mean"] = total / trained_tokens
    return row | {"sampling_logp_difference/max": largest}


def check_tracker(name):
    """Refuse a --report_to whose package is not there (DataError)."""
    is_there = name == "none" or find_spec(name)
    files.check(is_there, f"--report_to {name}", f"the package {name} is not installed")


def open_tracker(run, settings, first_step=0):
    """A function that sends a row of metrics to where --report_to says. A run that goes on from
    `first_step` goes on there too: wandb knows it by an id, TensorBoard forgets the later steps."""
    if settings.report_to == "wandb":
        import wandb

        path = run / "wandb_id"
        if not path.exists():
            files.write_text(path, secrets.token_hex(8))
        where = {"project": "autosearch", "name": run.name, "dir": run}
        where |= {"id": files.read_text(path), "resume": "allow"}
        tracker = wandb.init(**where, config=asdict(settings))
        return lambda row: tracker.log(row, step=row["step"])
    if settings.report_to == "none":
        return lambda row: None

    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run / "tensorboard", purge_step=first_step or None)

    def report(row):
        for key, value in row.items():
            if value is not None:
                writer.add_scalar(key, value, row["step"])

    return report
