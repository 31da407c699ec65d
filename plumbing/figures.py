"""The figures: training curves, forced depth, runs side by side."""

from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from textwrap import fill

import numpy as np

from plumbing import compare
from plumbing.files import check, read_log, replacing
from plumbing.tables import groups_of, label

# Okabe and Ito's colours, told apart by colour-blind readers; dashes and markers say the same. In
# turns they make 35 lines and 56 points. A marker can be seen under smaller ones that follow it.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("s", "D", "o", "v", "^", "<", ">", "p")
SHADE = "#f3efe6"
CURVES = """reward reward/format reward/outcome reward/efficiency reward/quality em search_depth
over_search_ratio eval/reward valid_action_ratio kl entropy frac_reward_zero_std tokens
sampling_logp_difference/max seconds/rollout seconds/self_answer seconds/update""".split()


@contextmanager
def figure_of(path, panels, size, title, ylabel="", columns=6, sharey=True):
    """The axes of so many panels, each of a size in inches, at most `columns` in a row. At the end
    of the block a legend of all in them comes below, and the figure is written to `path`."""
    from matplotlib import artist, rc_context
    from matplotlib.figure import Figure

    # Lines are broken by characters an inch: 12 in the title, 10 and 14 in the legend, 8 a panel.
    ending, columns = Path(path).suffix[1:], min(columns, panels)
    rows, width, entries = -(-panels // columns), max(size[0] * columns, 6), {}
    with rc_context(fname=Path(__file__).with_name("figures.mplstyle")):
        figure = Figure(layout="constrained")
        figure.suptitle(fill(title, int(12 * width)), x=0.01, ha="left")
        axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).flatten()
        for ax in axes[panels:]:
            ax.remove()
        yield axes[:panels]
        for ax in axes[:panels]:
            ax.xaxis.get_major_locator().set_params(nbins=6, integer=True, min_n_ticks=1)
            ax.tick_params(labelbottom=True)
            ax.set_title(fill(ax.get_title("left"), int(8 * width / columns)))
            for entry, text in zip(*ax.get_legend_handles_labels()):
                entries.setdefault(fill(text, int(10 * width)), entry)
        artist.setp(axes[:panels:columns], ylabel=ylabel)
        ncols = max(1, int(14 * width) // (max(map(len, entries), default=0) + 8))
        legend = figure.legend(entries.values(), entries, loc="outside lower left", ncols=ncols)
        artist.setp(legend.get_lines(), markersize=7)
        figure.set_size_inches(width, size[1] * rows + 0.5 + 0.2 * -(-len(entries) // ncols))
        with replacing(path) as temporary:
            metadata = {"Date": None} if ending == "svg" else None
            figure.savefig(temporary, format=ending, metadata=metadata)


def shade(ax, group):
    """Shade the searches that a group of questions does not need, where that is known."""
    if group[0] == "hops" and group[1].isdecimal():
        ax.axvspan(int(group[1]), 99, color=SHADE, label="more than needed", zorder=0)


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
    title = "Training curves by step (thin: as logged, bold: running mean, dots: seldom logged)"
    with figure_of(path, len(keys), (3.6, 2.3), title, columns=4, sharey=False) as axes:
        for ax, key in zip(axes, keys):
            ax.set_title(key)
            for (name, rows), colour, dashes in zip(runs.items(), cycle(COLOURS), cycle(DASHES)):
                plot_curve(ax, rows, key, name, colour, dashes)


def plot_curve(ax, rows, key, name, colour, dashes):
    """One metric of one run; the first step is 1, as in the terminal. What is logged at no more
    than every other step is drawn as it is, a dot a point: a line of one could not be seen."""
    points = [(row["step"] + 1, row[key]) for row in rows if row.get(key) is not None]
    if points:
        x, y = np.array(points, float).T
        seldom = len(y) <= max(1, len(rows) // 2)
        near = 0 if seldom else max(1, len(y) // 12)
        smooth = [y[max(0, j - near) : j + near + 1].mean() for j in range(len(y))]
        style = {"linestyle": dashes, "linewidth": 1.8, "marker": "o" if seldom else ""}
        ax.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
        ax.plot(x, smooth, color=colour, label=name, markersize=4, **style)


def plot_forced(forced, path, name):
    """The paper's Figure 2 from {depth: R}: EM and OSR by forced depth, a panel per group."""
    groups = list(groups_of(next(iter(forced.values()))))
    depths = [int(depth) for depth in forced]
    title = f"{name}, made to search exactly so often: exact match and over-search ratio"
    metrics = {"em": "exact match", "osr": "over-search ratio"}
    with figure_of(path, len(groups), (2.2, 2.6), title, "share of questions") as axes:
        for ax, group in zip(axes, groups):
            for i, (key, text) in enumerate(metrics.items()):
                values = [groups_of(report)[group][key] for report in forced.values()]
                style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
                ax.plot(depths, values, markersize=9 - 4 * i, label=text, clip_on=False, **style)
            shade(ax, group)
            ax.set(title=label(*group), xlabel="searches forced", ylim=(-0.05, 1.05))
            ax.set_xlim(depths[0] - 0.3, depths[-1] + 0.3)


def plot_compare(arms, path, forced=None):
    """EM against SD at temperature 1, a panel per group; forced, {depth: R}: one depth for all."""
    groups, deepest = compare.groups_of_arms(arms), 0.0
    what = "sampled (mean and standard deviation over seeds): up and to the left is better"
    title = f"Exact match against searches made, {what}"
    with figure_of(path, len(groups), (2.3, 3.1), title, "exact match (EM)") as axes:
        for ax, group in zip(axes, groups):
            if forced and group in groups_of(next(iter(forced.values()))):
                reports = [groups_of(report)[group] for report in forced.values()]
                depths, values = [r["sd"] for r in reports], [r["em"] for r in reports]
                text = f"{', '.join(forced)} searches forced on all"
                style = {"color": "#999999", "linewidth": 1, "marker": ".", "zorder": 1}
                ax.plot(depths, values, label=text, clip_on=False, **style)
                deepest = max(deepest, *depths)
            for i, (name, results) in enumerate(arms.items()):
                deepest = max(deepest, plot_arm(ax, results, group, name, i, len(arms)))
            shade(ax, group)
            ax.set(title=label(*group), xlabel="searches per question (SD)")
        axes[0].set(ylim=(-0.1, 1.1), xlim=(-0.4, deepest + 0.4))


def plot_arm(ax, results, group, name, i, count):
    """The point of setting `i` of `count`, 0 being what was before training; returns its depth.
    Each is smaller than the one before, and on top of it; number 0 is a ring around them. At the
    same place, all up to number 8 are seen; later ones are as small as it, and can hide it."""
    x, dx = compare.over_seeds(results, "sampled", group, "sd")
    y, dy = compare.over_seeds(results, "sampled", group, "em")
    if x is None:
        return 0.0
    colour, marker = COLOURS[(i - 1) % len(COLOURS)], MARKERS[(i - 1) % len(MARKERS)]
    size, order = 6 + 2.8 * max(min(count - 1, len(MARKERS)) - i, 0), 4 + i / count
    style = {"markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.8}
    if i == 0:
        colour, marker, order = "#555555", "o", 5
        style |= {"markersize": size + 2, "markeredgecolor": colour, "fillstyle": "none"}
    ax.errorbar(x, y, dy, dx, color=colour, elinewidth=1, zorder=3)
    ax.plot(x, y, marker, color=colour, label=name, zorder=order, clip_on=False, **style)
    return x
