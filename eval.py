"""Measure a policy like the paper (EM, F1, search depth, SE, over-search ratio), and look at what it does.

    python eval.py --run runs/NAME                                   # its held-out questions, greedy
    python eval.py --model M [--adapter A] --questions Q.jsonl --corpus C.jsonl --temperature 1 --samples 4
    python eval.py --run runs/NAME --force_depth 0 1 2 3 4           # the paper's Figure 2: so many searches, no more
    python eval.py --show 3 --run runs/NAME --where "hops==2 and em==0"
    python eval.py --run runs/NAME --html page.html                  # tables, figures, trajectories in one file
    python eval.py --compare runs/A runs/B runs/C [--html page.html] # side by side, from what the runs have saved
    python eval.py --curves runs/A runs/B                            # training curves, from their metrics.jsonl
    python eval.py --run runs/NAME --ask "Which river ...?"          # watch it; without a text it waits for one

SD is the mean number of executed searches, SE = EM / SD, OSR the share of questions with a right self-answer after a
search before the last one (section 5 of the paper). Ours: `osr_t0` also counts the self-answer before the first search,
and depth against need compares the searches made with those needed. All are fractions, not percent, and every number
in `train.py`, here and in the figures comes from `report`.
"""

import ast
import base64
import hashlib
import html
import json
import operator
import os
import re
import shutil
import string
import sys
import tempfile
import textwrap
import unicodedata
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm
from transformers import HfArgumentParser

import reward
import rollout
from retriever import DataError, SearchClient, SearchError, error_line, load_questions, open_corpus
from rollout import setting


@dataclass
class EvalSettings:
    run: str | None = setting(None, "run folder: its model, adapter, held-out questions, corpus and rollout settings")
    model: str | None = setting(None, "model folder or name, instead of a run")
    adapter: str | None = setting(None, "LoRA adapter folder; none given: the run's, or none with --model")
    questions: str | None = setting(None, "questions, JSONL")
    corpus: str | None = setting(None, "corpus, JSONL, or an index of it, .npz")
    retriever_url: str | None = setting(None, "search server to use instead of the corpus")
    trajectories: str | None = setting(None, "saved trajectories, JSONL, to measure and show instead of a policy")
    temperature: float = setting(0.0, "0 is greedy")
    samples: int = setting(1, "trajectories per question, with a temperature above 0")
    batch_size: int = setting(32, "questions rolled out together")
    limit: int | None = setting(None, "only the first so many questions")
    seed: int = setting(0, "of sampling and of the bootstrap")
    by: list[str] | None = setting(None, "metadata keys to group by; none given: hops")
    force_depth: list[int] | None = setting(None, "make the policy search exactly so often, for each of these numbers")
    out: str | None = setting(None, "JSON file for the report; none given: eval.json of the run or the current folder")
    show: int = setting(0, "print so many trajectories, scored by the paper's rewards: with --run alone saved ones")
    where: str | None = setting(None, "which of them, for example \"hops==2 and em==0\"")
    html: str | None = setting(None, "write tables, figures and --show trajectories (10) to this page")
    compare: list[str] | None = setting(None, "run folders to put side by side: a table, a figure of EM against SD")
    reference: str | None = setting(None, "report of --force_depth for --compare to draw; none given: a run's own")
    curves: list[str] | None = setting(None, "run folders whose training curves to draw")
    ask: str | None = setting(None, "a question to answer before your eyes; without a text: wait for questions",
                              nargs="?", const="")
    gold: list[str] | None = setting(None, "the right answers to --ask, for the scores")
    decoding: Literal["sampled", "greedy"] = setting("sampled", "which of the two the figure of --compare shows")
    figure: str | None = setting(None, "figure file, .png or .svg; none given: beside the runs, or in the run")
    format: Literal["png", "svg"] = setting("png", "of the figure, where --figure does not name a file")


# Metrics


def score_trajectory(trajectory, weights=reward.PAPER):
    """`reward.score` of a Trajectory: its policy-written steps and the self-answers asked after them."""
    metadata, whole = trajectory.question["metadata"], weights.whole_text_self_answer
    answers = [reward.extract_self_answer(turn.self_answer, whole) for turn in trajectory.turns[:-1]]
    return reward.score(trajectory.steps or [""], trajectory.question["golden_answers"], answers, weights,
                        self_answer_0=reward.extract_self_answer(trajectory.self_answer_0, whole),
                        passages=[turn.passages for turn in trajectory.turns],
                        supporting_titles=metadata.get("supporting_titles"))


def _measure(trajectory):
    """The raw numbers of one trajectory, taken from policy-written text only."""
    golds, steps = trajectory.question["golden_answers"], trajectory.steps

    def right(self_answer):
        return reward.exact_match(reward.extract_self_answer(self_answer), golds) == 1

    kind, answer = reward.parse_action(steps[-1]) if steps else (None, None)
    answer = answer if kind == "answer" else None
    early = any([right(turn.self_answer) for turn in trajectory.turns if turn.query is not None][:-1])
    return {"question": (trajectory.question["id"], trajectory.question["question"]),
            "em": reward.exact_match(answer, golds), "f1": reward.f1(answer, golds), "sd": trajectory.search_depth,
            "osr": early, "osr_t0": early or (trajectory.search_depth > 0 and right(trajectory.self_answer_0)),
            "valid": sum(reward.valid_steps(steps)), "turns": len(steps),
            "tokens": trajectory.tokens, "seconds": trajectory.seconds}


def report(trajectories, scores=None, settings=None, by=("hops",), seed=0):
    """All metrics of a list of Trajectory, overall and per group: the R of `eval.json`.

    Means over trajectories (valid_action_ratio: over turns), `se` = EM / SD, None when nothing was searched; `n` counts
    questions, `trajectories` their samples. `ci`: 95% bootstrap intervals over questions, the samples of one question
    drawn together. `scores`, a reward.Score each, add `reward`, the mean total. `by` names metadata keys; under "hops"
    the questions with metadata.hard stand apart as "hard". Raises DataError when there is no trajectory.
    """
    if not trajectories:
        raise DataError("there is no trajectory to report on")
    rows = [_measure(trajectory) for trajectory in trajectories]
    for row, score in zip(rows, scores, strict=True) if scores is not None else ():
        row["reward"] = score.total
    result = _summary(rows, seed) | {"by": {}}
    for key in by:
        names = [group_of(trajectory.question, key) for trajectory in trajectories]
        if set(names) != {"unknown"}:
            result["by"][key] = {name: _summary([r for r, its in zip(rows, names, strict=True) if its == name], seed)
                                 for name in _sorted(names)}
    return result | {"depth": depth_against_need(trajectories), "settings": settings or {}}


def group_of(question, key):
    """The group of a question under a metadata key, as text; "unknown" where it lacks the key."""
    value = "hard" if key == "hops" and question["metadata"].get("hard") else question["metadata"].get(key, "unknown")
    return value if isinstance(value, str) else json.dumps(value)


def _sorted(groups):
    return sorted(set(groups), key=lambda name: (name in ("hard", "unknown"), name.rjust(20)))  # 2 before 10


def _summary(rows, seed, draws=1000):
    """Means and bootstrap intervals of the rows that `_measure` gave."""
    numbers = {}
    index = np.array([numbers.setdefault(row["question"], len(numbers)) for row in rows])  # (trajectories,)
    sums = np.stack([np.bincount(index, [row[key] for row in rows]) for key in ("em", "sd")])  # (2, questions)
    size, rng = np.bincount(index), np.random.default_rng(seed)
    picks = (rng.integers(len(size), size=len(size)) for _ in range(draws))
    intervals = np.quantile([sums[:, pick].sum(1) / size[pick].sum() for pick in picks], (0.025, 0.975), axis=0)
    keys = [key for key in ("em", "f1", "sd", "osr", "osr_t0", "tokens", "seconds", "reward") if key in rows[0]]
    means = {key: float(np.mean([row[key] for row in rows])) for key in keys}
    return means | {"se": means["em"] / means["sd"] if means["sd"] else None,
                    "valid_action_ratio": sum(row["valid"] for row in rows) / max(1, sum(row["turns"] for row in rows)),
                    "n": len(numbers), "trajectories": len(rows),
                    "ci": dict(zip(("em", "sd"), intervals.T.tolist(), strict=True))}


def spearman(x, y):
    """Rank correlation of two lists of numbers, ties at their mean rank; None where one of them does not vary."""
    def ranks(values):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1]) if min(len(set(x)), len(set(y))) > 1 else None


def depth_against_need(trajectories):
    """Searches made against searches needed (metadata.hops): what "adaptive" means; the paper does not measure it.

    {"matrix": {needed: {made: count}}, "spearman", "under", "exact", "over" (shares), "needless" (mean searches beyond
    the need), "n"}, or None where no hops are known. Hard questions need an unknown number: a row "hard" in the matrix.
    """
    pairs = [(group_of(t.question, "hops"), t.search_depth) for t in trajectories]
    known = [(int(need), made) for need, made in pairs if need.isdecimal()]
    if not known:
        return None
    extra = np.array([made - need for need, made in known])
    made = range(max(depth for _, depth in pairs) + 1)
    shares = {"under": extra < 0, "exact": extra == 0, "over": extra > 0, "needless": extra.clip(min=0)}
    return {"matrix": {need: {str(depth): pairs.count((need, depth)) for depth in made}
                       for need in _sorted(need for need, _ in pairs) if need != "unknown"},
            "spearman": spearman(*zip(*known, strict=True)), "n": len(known),
            **{key: float(values.mean()) for key, values in shares.items()}}


def evaluate(model, tokenizer, questions, retriever, settings, temperature=0.0, seed=0, batch_size=32, samples=1,
             force_depth=None):
    """Roll out all questions in order: a list of len(questions) * samples Trajectory, those of a question side by side.

    Self-answers are asked for the metrics alone. Greedy results do not depend on `batch_size`; sampled ones do, as on
    the seed, because the rows of a batch draw from one random stream. `force_depth`: see `rollout.rollout`.
    """
    trajectories = []
    for start in tqdm(range(0, len(questions), batch_size), "evaluation", leave=False, disable=None):
        trajectories += rollout.rollout(
            model, tokenizer, questions[start : start + batch_size], retriever, settings, num_generations=samples,
            temperature=temperature, ask_before_search=True, seed=rollout.seed_of(seed, start), force_depth=force_depth)
    return trajectories


# Tables: lists of rows, each a list of cells, or a string that heads the rows after it

METRICS = {"em": ("EM", 3), "f1": ("F1", 3), "sd": ("SD", 2), "se": ("SE", 3), "osr": ("OSR", 3)}  # name, digits


def _number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def as_text(rows):
    """Rows as lines, the first column left, the others right."""
    columns = zip(*(row for row in rows if not isinstance(row, str)), strict=True)
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(row if isinstance(row, str) else row[0].ljust(widths[0]) + "".join(
        f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows)


def _label(key, name):
    return name if name in ("all", "hard", "average") else f"needs {name}" if key == "hops" else f"{key} {name}"


def _groups(result):
    """{(key, group): report} of the whole, as ("", "all"), and of every group."""
    return {("", "all"): result, **{(key, name): r for key, group in result["by"].items() for name, r in group.items()}}


def report_rows(result):
    """A report as rows: all questions, then every group."""
    rows = [["", "EM", "95%", "F1", "SD", "95%", "SE", "OSR", "OSR_t0", "valid", "tokens", "sec", "n"]]
    for group, r in _groups(result).items():
        em, sd = (f"{r['ci'][key][0]:.{d}f}-{r['ci'][key][1]:.{d}f}" for key, d in (("em", 3), ("sd", 2)))
        rows.append([_label(*group), _number(r["em"]), em, _number(r["f1"]), _number(r["sd"], 2), sd, *(
            _number(r[key]) for key in ("se", "osr", "osr_t0", "valid_action_ratio")), _number(r["tokens"], 0),
            _number(r["seconds"], 2), str(r["n"])])
    return rows


def depth_rows(depth):
    """Depth against need as rows, and its summary as a line."""
    rows = [["searches made", *next(iter(depth["matrix"].values()))]]
    rows += [["  " + _label("hops", need), *map(str, row.values())] for need, row in depth["matrix"].items()]
    shares = "".join(f"{key} {depth[key]:.3f}   " for key in ("under", "exact", "over"))
    return rows, (f"{shares}needless searches {depth['needless']:.2f}   "
                  f"rank correlation {_number(depth['spearman'], 2)}")


def report_table(result):
    """A report as text: all questions, every group, then depth against need where it is known."""
    text = as_text(report_rows(result))
    if result["depth"]:
        rows, line = depth_rows(result["depth"])
        text += f"\n\n{as_text(rows)}\n{line}"
    return text


def before_after_rows(result):
    """{"before": {"sampled": R, "greedy": R}, "after": the same} as rows of before -> after."""
    rows = [["", *(title for title, _ in METRICS.values()), "n"]]
    for decoding in ("sampled", "greedy"):
        sides = [result.get(side, {}).get(decoding) for side in ("before", "after")]
        before, after = (_groups(side) if side else {} for side in sides)
        rows += [f"{decoding}, before -> after training"] * bool(before or after)
        for group, r in (after or before).items():
            pair = before.get(group, {}), after.get(group, {})
            cells = [" -> ".join(_number(side.get(key), d) for side in pair) for key, (_, d) in METRICS.items()]
            rows.append(["  " + _label(*group), *cells, str(r["n"])])
    return rows


def before_after_table(result):
    """`before_after_rows` as text of at most 100 columns."""
    return as_text(before_after_rows(result))


def forced_rows(forced):
    """{depth: R}, R with the policy made to search so often, as rows: EM, then OSR, by depth and group."""
    rows = [["searches forced", *forced]]
    for key in ("em", "osr"):
        rows.append(METRICS[key][0])
        for group in _groups(next(iter(forced.values()))):
            rows.append(["  " + _label(*group), *(_number(_groups(r)[group][key]) for r in forced.values())])
    return rows


# Files


def write_text(path, text):
    """Write to a temporary name and rename, so that no reader ever sees half a file. Raises OSError."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file must not go on filling a full disk


def read_json(path):
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(record).__name__}")
    return record


def read_lines(path):
    """The records of a run's JSONL file; lines that a kill cut short are left out. Raises DataError, OSError."""
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            records.append(json.loads(line))
    if not records:
        raise DataError(f"{path}: there is no complete line in it yet")
    return records


def save_trajectories(path, pairs):
    """Write [(Trajectory, Score)] as JSONL."""
    rows = ({**trajectory.to_dict(), "score": asdict(score)} for trajectory, score in pairs)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_trajectories(path):
    """[(Trajectory, Score)] of a file that `save_trajectories` or `train.py` wrote. Raises DataError, OSError."""
    pairs = []
    for number, row in enumerate(read_lines(path), start=1):
        try:
            score = reward.Score(*(row["score"][key] for key in ("parts", "t_c", "em", "f1")))
            pairs.append((rollout.Trajectory.from_dict(row), score))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: record {number} is no trajectory: {error!r}") from None
    return pairs


def update_json(path, **entries):
    """Set top-level entries of a JSON file, which need not exist yet."""
    content = read_json(path) if Path(path).exists() else {}
    write_text(path, json.dumps(content | entries, indent=1))


# Figures

# Okabe and Ito's colours, told apart by colour-blind readers; dashes and markers say the same where it is printed grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
FIGURES = (".png", ".svg")
MARKERS = ("o", "s", "^", "D", "v", "P", "p")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#777777",
         "axes.grid": True, "grid.color": "#e8e8e8", "axes.axisbelow": True, "axes.titlesize": 10, "savefig.dpi": 160,
         "axes.titleweight": "bold", "axes.titlelocation": "left", "text.parse_math": False, "svg.hashsalt": "eval"}
CURVES = {"reward": "reward", "reward/format": "format reward", "reward/outcome": "outcome reward",
          "reward/efficiency": "efficiency reward", "reward/quality": "quality reward", "em": "exact match (EM)",
          "search_depth": "searches per question", "over_search_ratio": "over-search ratio",
          "eval/reward": "held-out reward", "valid_action_ratio": "valid-action ratio",
          "kl": "KL to the reference (nats)", "entropy": "entropy (nats)",
          "frac_reward_zero_std": "groups of equal rewards", "tokens": "tokens per trajectory",
          "seconds/rollout": "rollout (seconds)", "seconds/self_answer": "self-answers (seconds)",
          "seconds/update": "update (seconds)"}


@contextmanager
def _figure(path, panels, columns, size, title, **shared):
    """A figure with a grid of `panels`, written to `path` at the end of the block. Raises DataError for its ending."""
    import matplotlib
    from matplotlib.figure import Figure

    temporary, ending = Path(f"{path}.tmp"), Path(path).suffix
    if ending not in FIGURES:
        raise DataError(f"{path}: the name of a figure ends in {' or '.join(FIGURES)}")
    rows = -(-panels // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.8), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(rows, columns, squeeze=False, **shared).flatten()
        for ax in axes[panels:]:
            ax.remove()
        yield figure, axes[:panels]
        figure.savefig(temporary, format=ending[1:], metadata={"Date": None} if ending == ".svg" else None)
    temporary.replace(path)


def plot_curves(run_dirs, out_path):
    """Training curves of runs (finished, going on or killed) from their metrics.jsonl, a panel per metric.

    Thin: as logged, bold: running mean. Of a step logged twice, after a resume, the last line counts.
    """
    runs = {folder: list({r["step"]: r for r in read_lines(folder / "metrics.jsonl")}.values())
            for folder in map(Path, run_dirs)}
    shown = [key for key in CURVES if any(r.get(key) is not None for rows in runs.values() for r in rows)]
    title = f"Training curves of {', '.join(run.name for run in runs)} (thin: every step, bold: running mean)"
    with _figure(out_path, len(shown), 4, (3.6, 2.3), title) as (_, axes):
        for ax, key in zip(axes, shown, strict=True):
            ends = []
            for i, (run, rows) in enumerate(runs.items()):
                points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
                x, y = np.array(points, float).reshape(-1, 2).T
                near = max(1, len(y) // 12)
                smooth = [y[max(0, j - near) : j + near + 1].mean() for j in range(len(y))]
                ax.plot(x, y, color=COLOURS[i % 7], alpha=0.3, linewidth=0.7)
                ax.plot(x, smooth, color=COLOURS[i % 7], linestyle=DASHES[i % 5], linewidth=1.8)
                ends += [(smooth[-1], run.name, COLOURS[i % 7])] if smooth else []
            ax.set_title(CURVES[key])
            ax.set_xlabel("step")
            (low, high), last = ax.get_ylim(), -1.0
            for value, name, colour in sorted(ends) if len(runs) > 1 else []:
                last = max((value - low) / (high - low), last + 0.11)  # moved up where two names would overlap
                ax.annotate(name[:24], (1.02, last), xycoords="axes fraction", color=colour, va="center", fontsize=7.5)


def plot_forced(forced, path, name):
    """The paper's Figure 2 from {depth: R}: accuracy and over-search ratio by forced depth, a panel per group."""
    groups = list(_groups(next(iter(forced.values()))))
    depths = [int(depth) for depth in forced]
    title = f"{name}, made to search exactly so often: exact match and over-search ratio (shaded: more than needed)"
    with _figure(path, len(groups), len(groups), (2.2, 2.6), title, sharey=True) as (_, axes):
        for ax, group in zip(axes, groups, strict=True):
            for i, (key, label) in enumerate({"em": "exact match", "osr": "over-search ratio"}.items()):
                ax.plot(depths, [_groups(r)[group][key] for r in forced.values()], color=COLOURS[i], marker=MARKERS[i],
                        linestyle=DASHES[i], clip_on=False, label=label)
            ax.set(title=_label(*group), xlabel="searches forced", xticks=depths, ylim=(0, 1.05))
            ax.set_xlim(depths[0] - 0.3, depths[-1] + 0.3)
            if group[0] == "hops" and group[1].isdecimal():
                ax.axvspan(int(group[1]), depths[-1] + 1, color="#f3efe6", zorder=0)
        axes[0].set_ylabel("share of questions")
        axes[0].legend(frameon=False, fontsize=8)


NO_SETTING = {"seed", "name", "resume", "commit", "versions", "eval_sample", "eval_batch_size", "sample_every",
              "save_every"}
BEFORE = "before training"


def load_arms(run_dirs):
    """Runs side by side, from their eval.json and config.json: {setting: [{"sampled": R, "greedy": R} of each seed]}.

    Runs that differ in the seed alone are one setting; what was measured before training comes first. Raises DataError
    or OSError where a file is missing or broken.
    """
    found, before, after = [], {}, {}
    for folder in dict.fromkeys(map(Path, run_dirs)):
        result, config = read_json(folder / "eval.json"), read_json(folder / "config.json")
        if not {"before", "after"} <= result.keys():
            raise DataError(f"{folder / 'eval.json'}: no \"before\" and \"after\" in it: has this run ended?")
        found.append((config.get("reward", folder.name), config, result))
    for label, config, result in found:
        rivals = [other for reward_name, other, _ in found if reward_name == label]
        differ = sorted(key for key in {key for rival in rivals for key in rival} - NO_SETTING
                        if any(rival.get(key) != config.get(key) for rival in rivals) and config.get(key) is not None)
        after.setdefault(" ".join([label, *(f"{key}={config.get(key)}" for key in differ)]), []).append(result["after"])
        before.setdefault(config.get("model"), {})[config.get("seed")] = result["before"]
    names = {model: BEFORE if len(before) == 1 else f"{BEFORE} {model}" for model in before}
    return {names[model]: list(seeds.values()) for model, seeds in before.items()} | after


def _over_seeds(results, decoding, key, name, metric):
    """(mean, standard deviation or None) of a metric over seeds; the group "average" is the mean over the groups."""
    values = []
    for result in (result[decoding] for result in results if decoding in result):
        groups = result["by"].get(key, {}).values() if name == "average" else [_groups(result).get((key, name), {})]
        known = [group[metric] for group in groups if group.get(metric) is not None]
        values += [float(np.mean(known))] if known else []
    return float(np.mean(values)) if values else None, float(np.std(values, ddof=1)) if len(values) > 1 else None


def _groups_of_arms(arms):
    """The groups of the first report: [("", "all"), (key, group), ...]."""
    return list(_groups(next(r for results in arms.values() for result in results for r in result.values())))


def compare_rows(arms):
    """`load_arms` as rows, laid out as the paper's Table 1: mean and standard deviation over seeds, per group."""
    rows = [["", *(title for title, _ in METRICS.values()), "runs"]]
    groups = _groups_of_arms(arms)
    groups += [(groups[1][0], "average")] if len(groups) > 1 else []
    for how in ("sampled", "greedy"):
        for group in groups:
            rows.append(f"{how}: {_label(*group)}")
            for label, results in arms.items():
                cells = [_over_seeds(results, how, *group, metric) + (d,) for metric, (_, d) in METRICS.items()]
                cells = [_number(mean, d) + (f" ±{std:.{d}f}" if std is not None else "") for mean, std, d in cells]
                rows.append(["  " + label, *cells, str(len(results))])
    return rows


def plot_compare(arms, decoding, path, forced=None):
    """EM against SD, a panel per group; `forced`, {depth: R}, is the curve of one depth for all questions."""
    groups = _groups_of_arms(arms)
    title = (f"Exact match against searches made, {decoding} (mean and standard deviation over seeds): "
             "up and to the left is better")
    with _figure(path, len(groups), len(groups), (2.3, 3.1), title, sharex=True, sharey=True) as (figure, axes):
        deepest = 0
        for ax, (key, name) in zip(axes, groups, strict=True):
            if forced and (key, name) in _groups(next(iter(forced.values()))):
                points = [(_groups(r)[key, name]["sd"], _groups(r)[key, name]["em"]) for r in forced.values()]
                ax.plot(*zip(*points, strict=True), color="#999999", linewidth=1, marker=".", zorder=1,
                        label=f"{', '.join(forced)} searches forced on all", clip_on=False)
            for i, (label, results) in enumerate(arms.items()):
                (x, dx), (y, dy) = (_over_seeds(results, decoding, key, name, metric) for metric in ("sd", "em"))
                if x is not None:
                    # None is hidden: later ones are smaller and on top, what was before training is a ring around them.
                    colour, marker = (COLOURS[(i - 1) % 7], MARKERS[(i - 1) % 7]) if i else ("#555555", "o")
                    ax.errorbar(x, y, dy, dx, color=colour, elinewidth=1, zorder=3)
                    ax.plot(x, y, marker, color=colour, label=label, markersize=max(14 - 3 * i, 5) if i else 15,
                            fillstyle="full" if i else "none", markeredgecolor="white" if i else colour,
                            zorder=4 + i / 9, clip_on=False)
                    deepest = max(deepest, x)
            ax.set_title(_label(key, name))
            if key == "hops" and name.isdecimal():
                ax.set_title(f"{name} search{'es' * (name != '1')} needed")
                ax.axvspan(int(name), 99, color="#f3efe6", zorder=0)
                ax.annotate("more than needed", (int(name) + 0.06, 0.02), color="#7d6e48", fontsize=7.5, rotation=90)
            ax.set_xlabel("searches per question (SD)")
        axes[0].set(ylabel="exact match (EM)", ylim=(0, 1.05), xlim=(-0.2, deepest + 0.4))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=5, frameon=False)


# Trajectories


def verdict(trajectory, score):
    """"over": a search after t_c; "under": no answer of it was ever right; otherwise "exact"."""
    searched = [t for t, turn in enumerate(trajectory.turns, start=1) if turn.query is not None]
    if score.t_c < 0:
        return "exact" if score.em else "under"
    return "over" if searched and searched[-1] > score.t_c else "exact"


# What a line of a trajectory is: its colour in a terminal (an ANSI code) and the most lines it takes there.
KINDS = {"question": ("1", 3), "gold": ("1", 1), "think": ("2", 3), "invalid": ("31", 3), "search": ("36", 1),
         "passage": ("90", 1), "right": ("32", 2), "wrong": ("33", 2), "reward": ("35", 1), "verdict": ("1", 1)}


def describe(trajectory, score):
    """A scored Trajectory as blocks of lines (name, text, kind of KINDS): the question, each turn, the verdict."""
    question, golds = trajectory.question, trajectory.question["golden_answers"]

    def answer_line(name, raw, answer):
        em, f1 = reward.exact_match(answer, golds), reward.f1(answer, golds)
        return name, f"{raw if answer is None else answer}  (EM {em:.0f}, F1 {f1:.2f})", "right" if em else "wrong"

    def self_answer_lines(raw):
        return [answer_line("self-answer", raw, reward.extract_self_answer(raw))] if raw is not None else []

    blocks = [[("question", question["question"], "question"), ("gold", " | ".join(golds), "gold"),
               *self_answer_lines(trajectory.self_answer_0)]]
    valid = reward.valid_steps(trajectory.steps)
    for t, (turn, ok, part) in enumerate(zip(trajectory.turns, valid, score.parts, strict=True), start=1):
        kind, content = reward.parse_action(turn.text)
        lines = [(f"{t} think", re.split("</?think>", turn.text)[1], "think") if ok else
                 (f"{t} invalid", turn.text, "invalid")]
        lines += [answer_line("answer", content, content)] if kind == "answer" else []
        lines += [("search", turn.query, "search")] if turn.query is not None else []
        lines += [("", f"{passage['title']}: {passage['text']}", "passage") for passage in turn.passages]
        lines += self_answer_lines(turn.self_answer)
        parts = "  ".join(f"{name} {value:+.3f}" for name, value in part.items() if value)
        blocks.append([*lines, ("reward", f"{parts}  = {score.steps[t - 1]:+.3f}", "reward")])
    blocks.append([
        ("verdict", f"{verdict(trajectory, score)} search: t_c {score.t_c}, searches made {trajectory.search_depth}, "
                    f"needed: {group_of(question, 'hops')}", "verdict"),
        ("total", f"reward {score.total:+.3f}, EM {score.em:.0f}, F1 {score.f1:.2f}, ended by: {trajectory.stop}",
         "verdict")])
    return blocks


def printable(text):
    """Untrusted text without what a terminal or a browser obeys: controls, escapes, direction marks are spelled out."""
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs") else f"<U+{ord(c):04X}>"
                   for c in " ".join(text.split()))


def in_colour():
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render_trajectory(trajectory, score, colour=None):
    """A scored Trajectory for the terminal: every turn with its passages, self-answer and rewards, then the verdict.

    `colour` None: where stdout is a terminal and NO_COLOR is not set. Texts are shortened to the terminal's width.
    """
    colour = in_colour() if colour is None else colour
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 120) - 14
    blocks = []
    for block in describe(trajectory, score):
        lines = []
        for name, text, kind in block:
            code, most = KINDS[kind]
            wrapped = textwrap.wrap(printable(text), width, max_lines=most, placeholder=" ...") or [""]
            for i, line in enumerate(wrapped):
                lines.append(f"{'' if i else name:>12}  " + (f"\x1b[{code}m{line}\x1b[0m" if colour else line))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


OPERATORS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
             ast.Gt: operator.gt, ast.GtE: operator.ge}


def holds(condition, names):
    """Whether a condition such as "hops==2 and em==0" holds for {name: value}; nothing in it is executed.

    Comparisons of names and literals, and, or, not; what cannot be compared is no match. Raises DataError.

    >>> holds("hops == 2 and not em", {"hops": 2, "em": 0.0}), holds("0 < t_c < 3", {"t_c": None})
    (True, False)
    """
    def value(node):
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)(value(part) for part in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not value(node.operand)
        if isinstance(node, ast.Compare):
            items = [value(part) for part in (node.left, *node.comparators)]
            with suppress(TypeError):
                return all(OPERATORS[type(op)](*items[i : i + 2]) for i, op in enumerate(node.ops))
            return False
        return names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    try:
        return bool(value(ast.parse(condition.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        raise DataError(f"--where {condition!r}: not a comparison of {', '.join(sorted(names))}") from None


def names_of(questions):
    """What a `--where` may speak of, without values."""
    own = ("hops", "hard", "id", "em", "f1", "t_c", "reward", "search_depth", "tokens", "stop", "verdict")
    return dict.fromkeys({*own}.union(*(question["metadata"] for question in questions)))


def choose(pairs, where=None):
    """The [(Trajectory, Score)] for which the condition `where` holds. Raises DataError if there is none."""
    unknown, chosen = names_of([trajectory.question for trajectory, _ in pairs]), []
    for t, score in pairs:
        names = {**unknown, **t.question["metadata"], "id": t.question["id"], "em": score.em, "f1": score.f1,
                 "t_c": score.t_c, "reward": score.total, "search_depth": t.search_depth, "tokens": t.tokens,
                 "stop": t.stop, "verdict": verdict(t, score)}
        chosen += [(t, score)] if where is None or holds(where, names) else []
    if not chosen:
        raise DataError(f"no trajectory with {where}")
    return chosen


def side_by_side(run_dirs, count, where=None):
    """The paper's case study: {run: [(Trajectory, Score)]} of held-out questions that all runs were evaluated on.

    Questions on which the runs made different numbers of searches come first. `where` speaks of the first run.
    """
    runs, names = {}, [Path(folder).name for folder in run_dirs]
    for folder in map(Path, run_dirs):
        if not (folder / HELD_OUT).exists():
            raise DataError(f"{folder / HELD_OUT}: not there yet: python eval.py --run {folder} writes it")
        label = folder.name if names.count(folder.name) == 1 else str(folder)
        runs[label] = {t.question["id"]: (t, score) for t, score in read_trajectories(folder / HELD_OUT)}
    first = choose(list(next(iter(runs.values())).values()), where)
    shared = [t.question["id"] for t, _ in first if all(t.question["id"] in by_id for by_id in runs.values())]
    if not shared:
        raise DataError(f"{', '.join(runs)}: no question in common")
    differ = [name for name in shared if len({by_id[name][0].search_depth for by_id in runs.values()}) > 1]
    chosen = (spread(differ, count) + [name for name in shared if name not in differ])[:count]
    return {run: [by_id[name] for name in chosen] for run, by_id in runs.items()}


def spread(items, count):
    """At most `count` of the items, from all over the list."""
    return items[:: max(1, len(items) // count)][:count]


RULE = "\n\n" + "-" * 60 + "\n\n"
HELD_OUT = "eval_trajectories.jsonl"  # of a run: greedy, after training
SAMPLES = "trajectories.jsonl"  # of a run: sampled while it trained


class Watcher:
    """Prints a trajectory as it grows: the `on_text` of `rollout.rollout`, which gives each piece's text so far."""

    def __init__(self):
        self.kind, self.shown = None, ""

    def __call__(self, kind, text):
        text = text.strip().rstrip("\ufffd")  # half a character: the next token completes it
        text = "\n".join(map(printable, text.split("\n")))
        if (kind, text[: len(self.shown)]) != (self.kind, self.shown):
            code = {"turn": "0", "observation": KINDS["passage"][0], "self_answer": KINDS["right"][0]}[kind]
            print((f"\x1b[0m\n\x1b[{code}m" if in_colour() else "\n") + "  [self-answer] " * (kind == "self_answer"),
                  end="")
            self.kind, self.shown = kind, ""
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = text

    def end(self):
        print("\x1b[0m" * in_colour())


def ask(policy, retriever, settings, question, golds=None, temperature=0.0, seed=0):
    """Answer one question before the reader's eyes, token by token; with `golds`, the rewards follow."""
    row = {"id": "asked", "question": question, "golden_answers": golds or [], "metadata": {}}
    watcher = Watcher()
    trajectory = rollout.rollout(*policy, [row], retriever, settings, temperature=temperature, seed=seed,
                                 self_answers=bool(golds), on_text=watcher)[0]
    watcher.end()
    kind, answer = reward.parse_action(trajectory.steps[-1]) if trajectory.turns else (None, None)
    print(f"\nanswer: {printable(answer) if kind == 'answer' else f'none ({trajectory.stop})'}"
          f"   searches: {trajectory.search_depth}   tokens: {trajectory.tokens}")
    if golds:
        blocks = describe(trajectory, score_trajectory(trajectory))
        for t, block in enumerate(blocks[1:-1], start=1):
            print(f"step {t} {block[-1][0]}: {block[-1][1]}")
        print("\n".join(f"{name}: {text}" for name, text, _ in blocks[-1]))


# The page: one file without script or network; its looks are in data/page.html


def html_table(rows, heading):
    """Rows as an HTML table under a heading."""
    lines = []
    for i, row in enumerate(rows):
        first, *cells = (html.escape(cell).replace("-&gt;", "→") for cell in ([row] if isinstance(row, str) else row))
        if isinstance(row, str):
            lines.append(f'<tr class="group"><th colspan="{len(rows[0])}">{first}</th></tr>')
        else:
            tag = "td" if i else "th"
            lines.append(f"<tr><th>{first}</th>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>")
    return f"<h2>{html.escape(heading)}</h2>\n<div class=\"wide\"><table>\n" + "\n".join(lines) + "\n</table></div>"


def html_figure(draw, heading):
    """A figure inside the page: `draw(path)` writes it as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(heading)
    return f'<h2>{text}</h2>\n<div class="wide"><img alt="{text}" src="data:image/svg+xml;base64,{data}"></div>'


def html_trajectory(trajectory, score, name=""):
    """A scored Trajectory as an article whose first line folds it away."""
    searches = f"{trajectory.search_depth} search{'es' * (trajectory.search_depth != 1)}"
    head = f"{name} {verdict(trajectory, score)}, {searches}, reward {score.total:+.3f}"
    blocks = ["".join(f'<dt>{html.escape(name)}</dt><dd class="{kind}">{html.escape(printable(text))}</dd>\n'
                      for name, text, kind in block) for block in describe(trajectory, score)]
    question = html.escape(printable(trajectory.question["question"]))
    return (f'<details open><summary>{question} <span>{html.escape(head.strip())}</span></summary>\n'
            + "".join(f"<dl>\n{block}</dl>\n" for block in blocks) + "</details>")


def html_trajectories(pairs, heading="Trajectories"):
    return f"<h2>{html.escape(heading)}</h2>\n" + "\n".join(html_trajectory(*pair) for pair in pairs)


def html_cases(runs):
    """`side_by_side` as rows of articles, a column a run."""
    rows = []
    for pairs in zip(*runs.values(), strict=True):
        articles = "\n".join(html_trajectory(*pair, name=f"{run}:") for run, pair in zip(runs, pairs, strict=True))
        rows.append(f'<div class="pair">\n{articles}\n</div>')
    return "<h2>The same questions, side by side</h2>\n" + "\n".join(rows)


def html_report(result, heading):
    """A report as tables: the metrics, depth against need, what they depend on."""
    parts = [html_table(report_rows(result), heading)]
    if result["depth"]:
        rows, line = depth_rows(result["depth"])
        parts += [html_table(rows, "Searches made against searches needed"),
                  f'<p class="line">{html.escape(line)}</p>']
    settings = "".join(f"<dt>{html.escape(str(key))}</dt><dd>{html.escape(str(value))}</dd>\n"
                       for key, value in result["settings"].items())
    return "\n".join([*parts, f"<details><summary>What these numbers depend on</summary><dl>{settings}</dl></details>"])


def html_run(folder):
    """What a run has saved, as sections: tables of its eval.json, its curves, its forced depths."""
    folder = Path(folder)
    result = read_json(folder / "eval.json") if (folder / "eval.json").exists() else {}
    parts = [html_table(before_after_rows(result), "Held-out questions")] if "before" in result else []
    report_of = result.get("eval", result.get("after", {}))
    parts += [html_report(r, f"Held-out questions after training, {how}") for how, r in report_of.items()]
    if (folder / "metrics.jsonl").exists():
        parts.append(html_figure(lambda path: plot_curves([folder], path), "Training curves"))
    return parts + html_forced(result.get("forced"), folder.name)


def html_forced(forced, name):
    """{depth: R} as sections, none where nothing was forced."""
    if not forced:
        return []
    return [html_figure(lambda path: plot_forced(forced, path, name), "Forced depth"),
            html_table(forced_rows(forced), "Accuracy and over-search ratio by forced depth")]


def write_page(path, title, sections):
    """Fill in data/page.html."""
    template = string.Template((Path(__file__).parent / "data" / "page.html").read_text(encoding="utf-8"))
    write_text(path, template.substitute(title=html.escape(title), body="\n".join(sections)))


# The command line


def provenance(model, adapter, files, rollout_settings, **more):
    """What a report depends on, for its `settings`: also the SHA-256 of files ({name: path}), the prompt, versions."""
    hashes = {f"{name}_sha256": hashlib.sha256(Path(rollout.locate(path)).read_bytes()).hexdigest()
              for name, path in files.items()}
    versions = {name: version(name) for name in ("torch", "transformers", "numpy", "rank-bm25")}
    return {"model": model, "adapter": adapter, **files, **hashes, **asdict(rollout_settings), **more,
            "prompt": rollout.system_prompt_of(rollout_settings), "normaliser": "reward.normalize_answer",
            "versions": {"python": sys.version.split()[0], **versions}}


# What each way of looking understands besides its own option; without one of these, a policy is evaluated.
ONLY_WITH = {
    "compare": {"reference", "decoding", "figure", "format", "html", "show", "where"},
    "curves": {"figure", "format"},
    "ask": {"gold", "run", "model", "adapter", "corpus", "retriever_url", "temperature", "seed"},
    "trajectories": {"run", "show", "where", "html", "by", "seed"},
}


def check(args):
    """Refuse options that cannot work or do not go together. Raises DataError."""
    given = {field.name for field in fields(args) if getattr(args, field.name) != field.default}
    mode = next((name for name in ONLY_WITH if name in given), None)
    for name in sorted(given - {mode} - ONLY_WITH[mode] if mode else given & {"gold", "reference", "decoding"}):
        raise DataError(f"--{name} has no meaning {f'with --{mode}' if mode else 'here: see --help'}")
    if args.figure and not (mode or args.force_depth):
        raise DataError("--figure is for --compare, --curves and --force_depth")
    if args.where and not (args.show or args.html):
        raise DataError("--where chooses what --show N or --html shows: give one of them too")
    if min(args.samples, args.batch_size, args.limit or 1) < 1 or (args.samples > 1 and args.temperature <= 0):
        raise DataError("--samples, --batch_size and --limit start at 1; several samples need a --temperature above 0")
    if min(args.show, args.seed, *(args.force_depth or [0])) < 0 or not 0 <= args.temperature < float("inf"):
        raise DataError("--temperature, --seed, --show and --force_depth are numbers from 0 on")
    if args.ask is not None and args.ask and not args.ask.strip():
        raise DataError("--ask: the question is blank")
    if args.figure and Path(args.figure).suffix not in FIGURES:
        raise DataError(f"--figure {args.figure}: the name of a figure ends in {' or '.join(FIGURES)}")
    for name in ("out", "html", "figure"):
        path = getattr(args, name)
        if path and not os.access(Path(path).parent, os.W_OK):
            raise DataError(f"--{name} {path}: {Path(path).parent} is no folder that can be written to")
        if path and Path(path).is_dir():
            raise DataError(f"--{name} {path}: is a folder")


def where_report_goes(args):
    """(file, whether it is the run's own): a run's eval.json holds what was measured on its own held-out questions."""
    changed = (args.model, args.adapter, args.questions, args.corpus, args.retriever_url, args.limit)
    own = bool(args.run) and not args.out and not any(changed)
    path = args.out or str(Path(args.run if own else ".") / "eval.json")
    if Path(path).exists() and not isinstance(read_json(path), dict):
        raise DataError(f"{path}: not a report, and not overwritten")
    return path, own


@contextmanager
def damaged(*folders):
    """Whatever goes wrong in files that hold something else than they should becomes one DataError."""
    try:
        yield
    except DataError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{', '.join(map(str, folders))}: a damaged file ({error_line(error)})") from None


def load(args, config, settings):
    """(policy, questions, retriever, what they were loaded from) for the command line. Raises DataError, OSError."""
    url = args.retriever_url or config.get("retriever_url")
    wanted = ["model"] + ["questions"] * (args.ask is None) + ["corpus"] * (not url)
    given = {name: getattr(args, name) or config.get(f"eval_{name}") or config.get(name) for name in wanted}
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise DataError(f"nothing to evaluate: give --run, or --{' --'.join(missing)}")
    adapter = args.adapter
    if args.run and not (args.model or adapter):  # a run killed while it wrote a checkpoint has the one before
        adapter = next((path for path in (f"{args.run}/adapter", f"{args.run}/adapter.old") if Path(path).exists()), "")
    if adapter is not None and not Path(adapter or "?").is_dir():
        raise DataError(f"{adapter or args.run}: there is no adapter")
    questions = load_questions(rollout.locate(given["questions"]))[: args.limit] if "questions" in given else []
    rollout.check_model(rollout.locate(given["model"]), settings, [(given.get("questions"), questions)], adapter)
    retriever = SearchClient(url) if url else open_corpus(rollout.locate(given["corpus"]))
    in_4bit = bool(config.get("load_in_4bit") and not args.model)
    policy = rollout.load_policy(rollout.locate(given["model"]), adapter, in_4bit)
    origin = {"model": given.pop("model"), "adapter": adapter, "files": given, "retriever": url or "BM25",
              "load_in_4bit": in_4bit}
    return policy, questions, retriever, origin


def evaluate_and_save(args, config, settings):
    """The command line's evaluation: load, roll out, print, write. Returns the page's sections and the trajectories."""
    out, own = where_report_goes(args)
    policy, questions, retriever, origin = load(args, config, settings)
    if args.where:
        holds(args.where, names_of(questions))
    for key in args.by or []:
        if not any(key in question["metadata"] for question in questions):
            raise DataError(f"--by {key}: no question has it in its metadata")
    name = Path(args.run).name if args.run else origin["model"]
    how = "sampled" if args.temperature > 0 else "greedy"

    def roll_out(force_depth=None):
        trajectories = evaluate(*policy, questions, retriever, settings, args.temperature, args.seed, args.batch_size,
                                args.samples, force_depth)
        made_with = {key: getattr(args, key) for key in ("temperature", "samples", "seed", "limit")}
        depends_on = provenance(**origin, rollout_settings=settings, force_depth=force_depth, **made_with)
        return trajectories, report(trajectories, None, depends_on, args.by or ["hops"], args.seed)

    if args.force_depth:
        forced, pairs = {}, []
        for depth in sorted(set(args.force_depth)):
            trajectories, forced[str(depth)] = roll_out(depth)
            pairs += [(t, score_trajectory(t)) for t in trajectories]
        print(as_text(forced_rows(forced)))
        update_json(out, forced=forced)
        figure = args.figure or str(Path(out).with_name(f"forced_depth.{args.format}"))
        plot_forced(forced, figure, name)
        print(f"report: {out}   figure: {figure}")
        return html_forced(forced, name), pairs
    trajectories, result = roll_out()
    pairs = [(t, score_trajectory(t)) for t in trajectories]
    print(report_table(result))
    if own:
        before = read_json(out).get("eval", {}) if Path(out).exists() else {}
        update_json(out, eval=before | {how: result})
    else:
        update_json(out, **{how: result})
    if own and how == "greedy":
        save_trajectories(Path(args.run) / HELD_OUT, pairs)
    print(f"report: {out}")
    return [html_report(result, f"{len(questions)} questions, {how}")], pairs


def look(args, config, settings):
    """Show a policy's trajectories, saved ones where nothing asks for new ones; the page with --html."""
    fresh = ("model", "adapter", "questions", "corpus", "out", "force_depth", "limit", "temperature")
    saved = args.trajectories
    if not saved and args.run and (args.show or args.html) and not any(getattr(args, name) for name in fresh):
        saved = next((path for path in (Path(args.run) / HELD_OUT, Path(args.run) / SAMPLES) if path.exists()), None)
    title = Path(args.run).name if args.run else args.trajectories or args.model or "evaluation"
    if saved:
        with damaged(args.run or saved):
            pairs = read_trajectories(saved)
            result = report([t for t, _ in pairs], [score for _, score in pairs], {"trajectories": str(saved)},
                            args.by or ["hops"], args.seed)
            sections = [html_report(result, f"{result['n']} questions")]
            if args.run:
                sections = html_run(args.run) if args.html else []
        if not args.run:
            print(report_table(result))
    else:
        sections, pairs = evaluate_and_save(args, config, settings)
    chosen, count = choose(pairs, args.where), args.show or 10
    if saved and Path(saved).name == SAMPLES:
        chosen = chosen[-count:]  # the end of training
    else:
        chosen = spread(chosen, count)
    if args.show:
        print("\n" + RULE.join(render_trajectory(*pair) for pair in chosen))
    if args.html:
        write_page(args.html, title, [*sections, html_trajectories(chosen)])
        print(f"page: {args.html}")


def compare(args):
    """`--compare`: the table, the figure, and the case study where it is asked for."""
    arms = load_arms(args.compare)
    reports = [args.reference] if args.reference else [Path(run) / "eval.json" for run in args.compare]
    forced = next((r["forced"] for r in map(read_json, reports) if "forced" in r), None)
    if args.reference and not forced:
        raise DataError(f"--reference {args.reference}: no report of --force_depth")
    rows = compare_rows(arms)
    print(as_text(rows))
    figure = args.figure or str(Path(args.compare[0]).parent / f"compare.{args.format}")
    plot_compare(arms, args.decoding, figure, forced)
    print(figure)
    if args.show:
        runs = side_by_side(args.compare, args.show, args.where)
        for pairs in zip(*runs.values(), strict=True):
            print(RULE.join(["", *(f"{run}\n\n{render_trajectory(*pair)}" for run, pair in zip(runs, pairs))]))
    if args.html:
        sections = [html_figure(lambda path: plot_compare(arms, args.decoding, path, forced), "Accuracy against depth"),
                    html_table(rows, "Mean and standard deviation over seeds")]
        if all((Path(run) / HELD_OUT).exists() for run in args.compare):
            sections.append(html_cases(side_by_side(args.compare, args.show or 3, args.where)))
        write_page(args.html, "Comparison", sections)
        print(f"page: {args.html}")


def interactive(args, config, settings):
    """`--ask`: one question, or as many as are typed until an empty line."""
    policy, _, retriever, _ = load(args, config, settings)
    how = args.gold, args.temperature, args.seed
    if args.ask:
        return ask(policy, retriever, settings, args.ask, *how)
    with suppress(EOFError, KeyboardInterrupt):
        while question := input("question (empty: stop)> ").strip():
            try:
                ask(policy, retriever, settings, question.encode("utf-8", "replace").decode(), *how)
            except (DataError, SearchError) as error:
                print(error_line(error))


def main(argv=None):
    """The command line; returns the exit code (2, after one line, where input cannot be used)."""
    parser = HfArgumentParser((EvalSettings, rollout.RolloutSettings), description=__doc__.splitlines()[0])
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to stop
    try:
        args, settings = rollout.parse_options(parser, argv)
        check(args)
        if args.compare:
            with damaged(*args.compare):
                compare(args)
        elif args.curves:
            figure = args.figure or str(Path(args.curves[0]).parent / f"curves.{args.format}")
            with damaged(*args.curves):
                plot_curves(args.curves, figure)
            print(figure)
        else:
            config = read_json(Path(args.run) / "config.json") if args.run else {}
            with damaged(args.run):
                own = rollout.RolloutSettings(**{f.name: config[f.name] for f in fields(settings) if f.name in config})
                rollout.check_limits(own)
            parser.set_defaults(**asdict(own))
            args, settings = rollout.parse_options(parser, argv)
            rollout.check_limits(settings)
            (look if args.ask is None else interactive)(args, config, settings)
    except (DataError, SearchError, OSError) as error:
        print(f"eval.py: {error_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\neval.py: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
