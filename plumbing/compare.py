"""Runs side by side: their reports over seeds, and their trajectories on the same questions."""

from collections import Counter
from pathlib import Path

import numpy as np

from plumbing import show
from plumbing.files import check, read_json
from plumbing.runs import HELD_OUT, read_config
from plumbing.tables import AVERAGE, METRICS, groups_of, label, number

# Entries of config.json that do not make another setting.
NO_SETTING = {"seed", "name", "resume", "commit", "versions", "eval_sample", "eval_batch_size"}
NO_SETTING |= {"sample_every", "save_every"}


def load_arms(run_dirs):
    """{setting: [{"sampled": R, "greedy": R} a seed]} of runs, "before training" first; those that
    differ in the seed alone are one setting. Raises DataError or OSError for a file."""
    before, after, loaded = {}, {}, load_runs(run_dirs)
    configs = [config for config, _ in loaded.values()]
    starts = [before_training(*run) for run in loaded.values()]
    names = [(setting_of(config, configs), config.get("seed")) for config in configs]
    doubles = Counter(names)
    for (folder, (_, result)), start, (name, seed) in zip(loaded.items(), starts, names):
        if doubles[name, seed] > 1:  # equal settings and seed: not to be averaged
            name += f" {folder}"
        after.setdefault(name, []).append(result["after"])
        before.setdefault(setting_of(start, starts), {}).setdefault(seed, result["before"])
    return {start: list(seeds.values()) for start, seeds in before.items()} | after


def load_runs(run_dirs):
    """{folder: (config.json, eval.json)} of runs; all were measured on the same questions."""
    loaded, first = {}, None
    for folder in dict.fromkeys(map(Path, run_dirs)):
        config, path = read_config(folder, locate=False), folder / "eval.json"
        config, result = {"reward": folder.name} | config, read_json(path)
        is_done = "before" in result and "after" in result
        check(is_done, path, 'no "before" and "after" in it: has this run ended?')
        for report in [*result["before"].values(), *result["after"].values()]:
            measured = report["n"], report["settings"].get("questions_sha256")
            first = first or (path, measured)
            problem = f"measured on {measured[0]} questions, {first[0]} on {first[1][0]} others"
            check(measured == first[1], path, f"{problem}: not to be compared")
        loaded[folder] = config, result
    return loaded


def before_training(config, result):
    """The part of a run's settings that its reports before training depend on."""
    names = {"model", "eval_corpus"}
    for report in result["before"].values():
        names |= report["settings"].keys() - {"questions", "corpus"}  # in a config: to train on
    return {"reward": "before training"} | {key: config[key] for key in names & config.keys()}


def setting_of(config, configs):
    """The name of a run's setting: its reward, and what tells it from others with that reward."""
    rivals = [other for other in configs if other["reward"] == config["reward"]]
    words = [config["reward"]]
    for key in sorted(config.keys() - NO_SETTING):
        differs = any(rival.get(key, config[key]) != config[key] for rival in rivals)
        if differs and config[key] is not None:
            words.append(f"{key}={config[key]}")
    return " ".join(words)


def over_seeds(results, decoding, group, metric):
    """(mean, standard deviation or None) over seeds; that of AVERAGE is over the groups, and (None,
    None) for SE, which has no bound where a group hardly searches."""
    (key, name), values = group, []
    if name == AVERAGE and metric == "se":
        return None, None
    for result in results:
        reports = [groups_of(result[decoding]).get(group, {})] if decoding in result else []
        if reports and name == AVERAGE:
            reports = result[decoding]["by"].get(key, {}).values()
        known = [report[metric] for report in reports if report.get(metric) is not None]
        if known:
            values.append(float(np.mean(known)))
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else None


def groups_of_arms(arms):
    """The groups of the first report: [("", "all"), (key, group), ...]."""
    first = next(iter(arms.values()))[0]
    return list(groups_of(next(iter(first.values()))))


def compare_rows(arms):
    """`load_arms` as rows, laid out as the paper's Table 1: mean and deviation over seeds."""
    rows = [["", *(title for title, _ in METRICS.values()), "runs"]]
    groups, first = groups_of_arms(arms), next(iter(arms.values()))[0]
    groups += [(groups[1][0], AVERAGE)] if len(groups) > 1 else []
    for decoding in ("sampled", "greedy"):
        for group in groups:
            n = groups_of(first[decoding]).get(group, {}).get("n") if decoding in first else None
            rows.append(f"{decoding}: {label(*group)}" + (f", n = {n}" if n else ""))
            for name, results in arms.items():
                row = ["  " + name]
                for metric, (_, digits) in METRICS.items():
                    mean, deviation = over_seeds(results, decoding, group, metric)
                    spread = "" if deviation is None else f" ±{deviation:.{digits}f}"
                    row.append(number(mean, digits) + spread)
                rows.append([*row, str(len(results))])
    return rows


def side_by_side(run_dirs, read_trajectories, count, where=None):
    """The paper's case study: {run: [(Trajectory, Score)]} of questions that all runs answered,
    those with different depths first. `where` speaks of the first run. Raises DataError."""
    runs, names = {}, [Path(folder).name for folder in run_dirs]
    for folder in map(Path, run_dirs):
        path = folder / HELD_OUT
        check(path.exists(), path, f"not there yet: python eval.py --run {folder} writes it")
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        runs[name] = {pair[0].question["id"]: pair for pair in read_trajectories(path)}
    same, different = [], []
    for trajectory, _ in show.choose(list(next(iter(runs.values())).values()), where):
        question = trajectory.question["id"]
        if all(question in pairs for pairs in runs.values()):
            depths = {pairs[question][0].search_depth for pairs in runs.values()}
            (different if len(depths) > 1 else same).append(question)
    check(same or different, ", ".join(runs), "no question in common")
    chosen = (show.spread(different, count) + same)[:count]
    return {name: [pairs[question] for question in chosen] for name, pairs in runs.items()}
