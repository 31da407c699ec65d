"""The page: tables, figures and trajectories in one file without script or network (page.html)."""

import base64
import tempfile
from pathlib import Path

from plumbing import figures, show, tables
from plumbing.files import read_json, write_text


def table(rows, heading, line=None):
    """Rows as a section, with a line of text below."""
    return {"heading": heading, "rows": rows, "line": line}


def figure(heading, draw, *arguments):
    """A figure as a section: `draw(arguments[0], path, arguments[1:])` writes it as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(arguments[0], path, *arguments[1:])
        return {"heading": heading, "figure": base64.b64encode(path.read_bytes()).decode()}


def report(result, heading):
    """A report as sections: the metrics, depth against need, what they depend on."""
    sections, depth = [table(tables.report_rows(result), heading)], result["depth"]
    if depth:
        heading, line = "Searches made against searches needed", tables.depth_line(depth)
        sections.append(table(tables.depth_rows(depth), heading, line))
    return [*sections, {"settings": result["settings"]}]


def forced(reports, name):
    """{depth: R} as sections, none where nothing was forced."""
    if not reports:
        return []
    rows, heading = tables.forced_rows(reports), "Accuracy and over-search ratio by forced depth"
    return [figure("Forced depth", figures.plot_forced, reports, name), table(rows, heading)]


def run(folder):
    """What a run has saved, as sections: tables of its eval.json, its curves, its forced depths."""
    folder, sections = Path(folder), []
    result = read_json(folder / "eval.json") if (folder / "eval.json").exists() else {}
    if "before" in result:
        sections.append(table(tables.before_after_rows(result), "Held-out questions"))
    for decoding, after in result.get("eval", result.get("after", {})).items():
        sections += report(after, f"Held-out questions after training, {decoding}")
    if (folder / "metrics.jsonl").exists():
        sections.append(figure("Training curves", figures.plot_curves, [folder]))
    return sections + forced(result.get("forced"), folder.name)


def article(trajectory, score, name=""):
    """A scored Trajectory, folded away under its question."""
    searches = f"{trajectory.search_depth} search{'es' * (trajectory.search_depth != 1)}"
    verdict = f"{show.verdict(trajectory, score)}, {searches}, reward {score.total:+.3f}"
    blocks = []
    for block in show.describe(trajectory, score):
        blocks.append([(title, show.printable(text), kind) for title, text, kind in block])
    question = show.printable(trajectory.question["question"])
    return {"question": question, "head": f"{name} {verdict}".strip(), "blocks": blocks}


def trajectories(pairs):
    """[(Trajectory, Score)] as a section."""
    return {"heading": "Trajectories", "rows_of_articles": [[article(*pair)] for pair in pairs]}


def cases(runs):
    """`compare.side_by_side` as a section: a column a run."""
    rows = []
    for pairs in zip(*runs.values()):
        rows.append([article(*pair, name=f"{name}:") for name, pair in zip(runs, pairs)])
    return {"heading": "The same questions, side by side", "rows_of_articles": rows}


def write(path, title, sections):
    """Fill in page.html; everything in it is escaped. Raises OSError."""
    from jinja2 import Environment

    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    write_text(path, template.render(title=title, sections=sections))
    print(f"page: {path}")
