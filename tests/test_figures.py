"""plumbing/figures.py: what is drawn, from runs in every state."""

import json

import pytest
from builders import make_run, reports

from plumbing import compare, figures, files


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


def test_a_curve_takes_the_last_line_of_a_step_and_a_running_mean():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    rows = [{"step": step, "em": float(step)} for step in range(24)] + [{"step": 24, "em": None}]
    figures.plot_curve(ax, rows, "em", "name", "red", "-")
    thin, bold = (line.get_ydata() for line in ax.lines)
    assert thin.tolist() == list(range(24))
    assert (bold[0], bold[10], bold[23]) == (1.0, 10.0, 22.0)  # of 2 neighbours on each side


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
