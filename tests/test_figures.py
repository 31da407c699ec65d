"""plumbing/figures.py: what is drawn, from runs in every state."""

import json
import math

import numpy as np
import pytest
from builders import make_run, reports

from plumbing import compare, figures, files

GROUPS = ["hard", "very hard", "harder than all that were seen", *map(str, range(9))]


@pytest.fixture
def killed(tmp_path):
    """Two runs that were killed while they wrote a line."""
    for name, steps in (("long", 30), ("short", 1)):
        (tmp_path / name).mkdir()
        rows = []
        for step in range(steps):
            row = {"step": step, "reward": step / 10, "em": 0.5}
            rows.append(row | {"kl": None, "entropy": float("nan")})
        lines = [json.dumps(row) for row in [*rows, rows[-1]]] + ['{"step": 31, "rew']
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [tmp_path / "long", tmp_path / "short"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    from matplotlib.figure import Figure

    found, save = [], Figure.savefig

    def savefig(figure, *args, **options):
        found.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def forced_to(*depths, groups=None):
    """{depth: R} of a policy made to search; groups: their names, not by hops but by "level"."""
    forced = {}
    for depth in depths:
        report = reports(depth)["greedy"]
        by = report["by"] if groups is None else {"level": dict.fromkeys(groups, report)}
        forced[str(depth)] = report | {"by": by}
    return forced


def ticks(figure):
    """Where the axis of steps or searches has a number, in the panels of a figure."""
    found = []
    for ax in figure.axes:
        low, high = ax.get_xlim()
        found.append([tick for tick in ax.get_xticks() if low <= tick <= high])
    return found


def test_curves_of_a_killed_run(tmp_path, killed):
    assert len(files.read_log(killed[0] / "metrics.jsonl")) == 31
    for ending in ("png", "svg"):
        path = tmp_path / f"curves.{ending}"
        figures.plot_curves(killed, path)
        assert path.stat().st_size > 10_000
    assert b"<svg" in path.read_bytes()


def test_a_run_without_a_complete_line_has_no_curves(tmp_path, killed):
    (killed[1] / "metrics.jsonl").write_text('{"step": 0, "rew')
    with pytest.raises(files.DataError, match="short/metrics.jsonl: there is no complete line"):
        figures.plot_curves(killed, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def curve(values):
    """The lines of a curve, thin and bold, of these values at steps 0, 1, 2 ..."""
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    rows = [{"step": step, "em": value} for step, value in enumerate(values)]
    figures.plot_curve(ax, rows, "em", "name", "red", "-")
    return ax.lines


def test_a_curve_counts_steps_from_1_and_has_a_running_mean():
    thin, bold = curve([float(step) for step in range(24)] + [None])
    assert thin.get_xdata().tolist() == list(range(1, 25))
    assert thin.get_ydata().tolist() == list(range(24))
    mean = bold.get_ydata()
    assert (mean[0], mean[10], mean[23]) == (1.0, 10.0, 22.0)  # of 2 neighbours on each side


def test_what_is_seldom_logged_is_seen():
    for values in ([0.5], [None, None, 0.5], [0.1, *[None] * 9, 0.7, *[None] * 9, 0.2]):
        known = [value for value in values if value is not None]
        _, bold = curve(values)
        assert bold.get_marker() == "o" and bold.get_ydata().tolist() == known
    _, bold = curve([0.1, 0.7, 0.2])
    assert bold.get_marker() in ("", "None")


def test_steps_are_whole_numbers_and_the_same_in_all_panels(tmp_path, killed, drawn):
    figures.plot_curves([killed[1]], tmp_path / "short.svg")
    figures.plot_curves(killed, tmp_path / "both.svg")
    assert ticks(drawn[0]) == [[1]] * 3
    reward, em, _ = ticks(drawn[1])
    assert reward == em and all(tick == int(tick) for tick in em) and len(em) > 2


def test_the_figure_of_compare(tmp_path):
    folders = [
        make_run(tmp_path / "a0", depth=1),
        make_run(tmp_path / "a1", seed=1, depth=2),
        make_run(tmp_path / "o", "outcome", depth=2, em=0.5),
    ]
    forced = {str(depth): reports(depth)["greedy"] for depth in (0, 2)}
    path = tmp_path / "c.png"
    figures.plot_compare(compare.load_arms(folders), path, forced)
    assert path.read_bytes()[:4] == b"\x89PNG" and not list(tmp_path.glob("*.tmp"))


def test_the_figure_of_forced_depth_is_the_same_file_every_time(tmp_path):
    forced = {str(depth): reports(depth)["greedy"] for depth in (0, 2)}
    for name in ("a.svg", "b.svg"):
        figures.plot_forced(forced, tmp_path / name, "model $x_1$")
    text = (tmp_path / "a.svg").read_bytes()
    assert b"<svg" in text and text == (tmp_path / "b.svg").read_bytes()


def test_searches_are_whole_numbers(tmp_path, drawn):
    for depths in ((2,), (0, 1), (1, 4), range(5)):
        figures.plot_forced(forced_to(*depths), tmp_path / "f.svg", "model")
        for panel in ticks(drawn[-1]):
            assert panel == list(range(depths[0], depths[-1] + 1))
    runs = [make_run(tmp_path / "a", depth=0)]
    for forced in (None, forced_to(0, 4)):
        figures.plot_compare(compare.load_arms(runs), tmp_path / "c.svg", forced)
        for panel in ticks(drawn[-1]):
            assert panel == list(range(5 if forced else 4))  # 3 before training


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1], []])
def test_a_figure_is_readable_with_many_groups_and_with_none(tmp_path, drawn, groups):
    report = forced_to(1, groups=groups)["1"]
    arms = {f"setting {'x' * 5 * i}": [{"sampled": report}] for i in range(9)}
    figures.plot_compare(arms, tmp_path / "c.svg")
    figures.plot_forced({"0": report, "1": report}, tmp_path / "f.svg", "a-long-name-of-a-model")
    for figure in drawn:
        width, height = figure.bbox.size
        rows = {}
        for ax in figure.axes:
            rows.setdefault(round(ax.get_position().y0, 3), []).append(ax)
            assert ax.xaxis.get_ticklabels()[0].get_visible() and not ax.texts
            assert ax.bbox.height > 80
        for row in rows.values():
            boxes = [ax.get_tightbbox() for ax in row]
            assert len(row) <= 6 and boxes[-1].x1 < width
            for left, right in zip(boxes, boxes[1:]):
                assert left.x1 < right.x0
        for text in (figure._suptitle, figure.legends[0]):
            box = text.get_window_extent()
            assert 0 <= box.x0 and box.x1 < width and 0 <= box.y0 and box.y1 < height


@pytest.mark.parametrize("count", range(1, 9))
def test_settings_at_the_same_place_are_all_seen(monkeypatch, count):
    """In pixels of each colour; those at the edge of a panel are whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    colours = ("#ff0000", "#00ff00", "#0000ff", "#ffff00", "#00ffff", "#ff00ff", "#800000")
    monkeypatch.setattr(figures, "COLOURS", (*colours, "#008000"))
    canvas = FigureCanvasAgg(Figure((2.3, 3.1), dpi=160))
    ax, results = canvas.figure.subplots(), [reports(2)]
    for i in range(count + 1):
        figures.plot_arm(ax, results, ("", "all"), f"setting {i}", i, count + 1)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    for colour in ("#555555", *figures.COLOURS[:count]):
        seen = (pixels == np.round(255 * np.array(to_rgb(colour)))).all(axis=1)
        assert seen.sum() > 30, colour
    assert not any(line.get_clip_on() for line in ax.lines if line.get_marker() != "None")


def test_runs_and_settings_have_a_look_of_their_own():
    assert math.gcd(len(figures.COLOURS), len(figures.DASHES)) == 1
    assert math.gcd(len(figures.COLOURS), len(figures.MARKERS)) == 1


def test_exact_match_is_seen_where_the_over_search_ratio_is_the_same(tmp_path, drawn):
    figures.plot_forced(forced_to(0, 2), tmp_path / "f.svg", "model")
    for ax in drawn[0].axes:
        under, over = ax.lines
        assert under.get_markersize() > over.get_markersize() + 3
