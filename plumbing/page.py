"""The page: tables, figures and trajectories in one file without network (page.html, group.js)."""

import base64
import hashlib
import tempfile
from pathlib import Path

from plumbing import figures, group, show, tables
from plumbing.files import read_json, read_log, read_text, write_text
from plumbing.logs import SAMPLES

HERE = Path(__file__).parent


def figure(heading, draw, what, *more):
    """A figure as a section: `draw(what, path, *more)` writes it as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(what, path, *more)
        return {"heading": heading, "figure": base64.b64encode(path.read_bytes()).decode()}


def report(result, heading):
    """A report as a section: the metrics, depth against need, what they depend on."""
    section = {"heading": heading, "rows": tables.report_rows(result)}
    if result["depth"]:
        section |= {"depth": tables.depth_rows(result["depth"])}
        section |= {"line": tables.depth_line(result["depth"])}
    return section | {"settings": result["settings"]}


def forced(reports, name):
    """{depth: R} as sections, none where nothing was forced."""
    if not reports:
        return []
    table = {"heading": "Accuracy and over-search ratio", "rows": tables.forced_rows(reports)}
    return [figure("Forced depth", figures.plot_forced, reports, name), table]


def run(folder):
    """What a run has saved, as sections: tables of its eval.json, its curves, its forced depths."""
    folder, sections = Path(folder), []
    result = read_json(folder / "eval.json") if (folder / "eval.json").exists() else {}
    if "before" in result:
        rows = tables.before_after_rows(result)
        sections.append({"heading": "Held-out questions", "rows": rows})
    for decoding, after in result.get("eval", result.get("after", {})).items():
        sections.append(report(after, f"Held-out questions after training, {decoding}"))
    if (folder / "metrics.jsonl").exists():
        sections.append(figure("Training curves", figures.plot_curves, [folder]))
    if (folder / SAMPLES).exists():
        sections += group.section(read_log(folder / SAMPLES))
    return sections + forced(result.get("forced"), folder.name)


def article(trajectory, score, name=""):
    """A scored Trajectory, folded away under its question."""
    searches = f"{trajectory.search_depth} search{'es' * (trajectory.search_depth != 1)}"
    verdict = f"{show.verdict(trajectory, score)}, {searches}, reward {score.total:+.3f}"
    blocks = []
    for block in show.describe(trajectory, score):
        blocks.append([(title, show.printable(text), kind) for title, text, kind in block])
    head, question = f"{name}: {verdict}" if name else verdict, trajectory.question["question"]
    return {"question": show.printable(question), "head": head, "blocks": blocks}


def cases(runs):
    """{run: [(Trajectory, Score)]} as rows of articles, a column a run."""
    rows = []
    for pairs in zip(*runs.values()):
        rows.append([article(*pair, name=name) for name, pair in zip(runs, pairs)])
    return rows


def write(path, title, sections):
    """Fill in page.html; everything in it is escaped. Raises OSError."""
    from jinja2 import Environment
    from markupsafe import Markup

    for section in [section for section in sections if "rows" in section][:1]:
        section["note"] = tables.LEGEND
    source, script = (read_text(HERE / name) for name in ("page.html", "group.js"))
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pages = {"title": title, "sections": sections, "script": Markup(script), "digest": digest}
    write_text(path, template.render(pages))
    print(f"page: {path}")
