"""The figures: training curves, forced depth, runs side by side."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from plumbing import compare
from plumbing.files import check, read_log, replacing
from plumbing.tables import groups_of, label

# Okabe and Ito's colours, told apart by colour-blind readers; dashes and markers say the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), "-", "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "p")
CURVES = """reward reward/format reward/outcome reward/efficiency reward/quality em search_depth
over_search_ratio eval/reward valid_action_ratio kl entropy frac_reward_zero_std tokens
seconds/rollout seconds/self_answer seconds/update""".split()


@contextmanager
def figure_of(path, panels, columns, size, title, **shared):
    """A figure with a grid of `panels`, written to `path` at the end of the block."""
    import matplotlib
    from matplotlib.figure import Figure

    ending, rows = Path(path).suffix[1:], -(-panels // columns)
    with matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle")):
        size = (size[0] * columns, size[1] * rows + 0.8)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(rows, columns, squeeze=False, **shared).flatten()
        for ax in axes[panels:]:
            ax.remove()
        yield figure, axes[:panels]
        with replacing(path) as temporary:
            metadata = {"Date": None} if ending == "svg" else None
            figure.savefig(temporary, format=ending, metadata=metadata)


def plot_curves(run_dirs, path):
    """Training curves of runs (finished, going on or killed), a panel per metric. Of a step logged
    twice, after a resume, the last line counts. Raises DataError, OSError."""
    runs, known = {}, set()
    for folder in map(Path, run_dirs):
        by_step = {row["step"]: row for row in read_log(folder / "metrics.jsonl")}
        check(by_step, folder / "metrics.jsonl", "there is no complete line in it yet")
        runs[folder.name] = list(by_step.values())
        for row in by_step.values():
            known.update(key for key, value in row.items() if value is not None)
    keys = [key for key in CURVES if key in known]
    title = "Training curves by step (thin: as logged, bold: running mean)"
    with figure_of(path, len(keys), 4, (3.6, 2.3), title) as (figure, axes):
        for ax, key in zip(axes, keys):
            ax.set_title(key)
            for i, (name, rows) in enumerate(runs.items()):
                plot_curve(ax, rows, key, name, COLOURS[i % 7], DASHES[i % 7])
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=4, frameon=False)


def plot_curve(ax, rows, key, name, colour, dashes):
    """One metric of one run."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    if points:
        x, y = np.array(points, float).T
        near = max(1, len(y) // 12)
        smooth = [y[max(0, j - near) : j + near + 1].mean() for j in range(len(y))]
        ax.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
        ax.plot(x, smooth, color=colour, linestyle=dashes, linewidth=1.8, label=name)


def plot_forced(forced, path, name):
    """The paper's Figure 2 from {depth: R}: EM and OSR by forced depth, a panel per group."""
    groups = list(groups_of(next(iter(forced.values()))))
    depths = [int(depth) for depth in forced]
    what = "exact match and over-search ratio (shaded: more than needed)"
    title = f"{name}, made to search exactly so often: {what}"
    with figure_of(path, len(groups), len(groups), (2.2, 2.6), title, sharey=True) as (_, axes):
        for ax, group in zip(axes, groups):
            for i, key in enumerate(("em", "osr")):
                values = [groups_of(report)[group][key] for report in forced.values()]
                style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
                text = ("exact match", "over-search ratio")[i]
                ax.plot(depths, values, clip_on=False, label=text, **style)
            ax.set(title=label(*group), xlabel="searches forced", xticks=depths, ylim=(0, 1.05))
            ax.set_xlim(depths[0] - 0.3, depths[-1] + 0.3)
            if group[0] == "hops" and group[1].isdecimal():
                ax.axvspan(int(group[1]), depths[-1] + 1, color="#f3efe6", zorder=0)
        axes[0].set_ylabel("share of questions")
        axes[0].legend(frameon=False, fontsize=8)


def plot_compare(arms, path, forced=None):
    """EM against SD at temperature 1, a panel per group; forced, {depth: R}: one depth for all."""
    groups, deepest = compare.groups_of_arms(arms), 0.0
    what = "sampled (mean and standard deviation over seeds): up and to the left is better"
    title, shared = f"Exact match against searches made, {what}", {"sharex": True, "sharey": True}
    with figure_of(path, len(groups), len(groups), (2.3, 3.1), title, **shared) as (figure, axes):
        for ax, group in zip(axes, groups):
            if forced and group in groups_of(next(iter(forced.values()))):
                reports = [groups_of(report)[group] for report in forced.values()]
                depths, values = [r["sd"] for r in reports], [r["em"] for r in reports]
                text = f"{', '.join(forced)} searches forced on all"
                style = {"color": "#999999", "linewidth": 1, "marker": ".", "zorder": 1}
                ax.plot(depths, values, label=text, clip_on=False, **style)
            for i, (name, results) in enumerate(arms.items()):
                deepest = max(deepest, plot_arm(ax, results, group, name, i))
            ax.set(title=label(*group), xlabel="searches per question (SD)")
            key, name = group
            if key == "hops" and name.isdecimal():
                ax.set_title(f"{name} search{'es' * (name != '1')} needed")
                ax.axvspan(int(name), 99, color="#f3efe6", zorder=0)
                style = {"color": "#7d6e48", "fontsize": 7.5, "rotation": 90}
                ax.annotate("more than needed", (int(name) + 0.06, 0.02), **style)
        axes[0].set(ylabel="exact match (EM)", ylim=(0, 1.05), xlim=(-0.2, deepest + 0.4))
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=5, frameon=False)


def plot_arm(ax, results, group, name, i):
    """The point of setting number `i`, 0 being what was before training; returns its depth.
    None is hidden: later ones are smaller and on top, number 0 is a ring around them."""
    x, dx = compare.over_seeds(results, "sampled", group, "sd")
    y, dy = compare.over_seeds(results, "sampled", group, "em")
    if x is None:
        return 0.0
    colour, marker = COLOURS[(i - 1) % 7], MARKERS[(i - 1) % 7]
    style = {"markersize": max(14 - 3 * i, 5), "markeredgecolor": "white"}
    if i == 0:
        colour, marker = "#555555", "o"
        style = {"markersize": 15, "markeredgecolor": colour, "fillstyle": "none"}
    ax.errorbar(x, y, dy, dx, color=colour, elinewidth=1, zorder=3)
    ax.plot(x, y, marker, color=colour, label=name, zorder=4 + i / 9, clip_on=False, **style)
    return x
