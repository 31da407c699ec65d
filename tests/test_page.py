"""plumbing/page.py and page.html: one file that runs nothing and needs nothing else."""

from html.parser import HTMLParser

import pytest
from builders import finished_run, reports

import eval as evaluation
from plumbing import files, page


class PageReader(HTMLParser):
    """Tags that are open, and everything that a page would fetch or run."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.sources, self.text = [], [], [], ""
        self.boxes = []  # the classes of what tables and figures lie in
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("table", "img"):
            self.boxes.append(self.last.get("class"))
        self.last = dict(attributes)
        self.open += [tag] if tag not in ("meta", "img") else []
        for name, value in attributes:
            if name in ("src", "href") or name.startswith("on"):
                self.sources.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_page_of_a_run_is_self_contained_and_runs_nothing(tmp_path, capsys):
    run, path = finished_run(tmp_path / "run", 2), tmp_path / "page.html"
    evaluation.main(["--run", run, "--html", str(path), "--show", "2", "--where", "hops == 1"])
    reader = PageReader(path)
    assert reader.open == [] and "script" not in reader.tags and reader.tags.count("img") == 1
    assert len(reader.sources) == 1
    assert reader.sources[0].startswith("data:image/svg+xml;base64,")
    parts = ["Who (q3)?", "<script>alert(1)</script>", "<U+202E>", "${title} $body"]
    parts += ["{{ title }} {% raw %}", "3.00 → 2.00", "needs 2", "Training curves"]
    parts += ["searches made", "over search: t_c 1", "quality +1.000", "EM 1, F1 1.00"]
    for part in parts:
        assert part in reader.text
    assert "Who (q0)?" not in reader.text and "Who (q3)?" in capsys.readouterr().out
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    assert f'http-equiv="Content-Security-Policy" content="{policy}' in path.read_text()


def test_everything_in_a_page_is_escaped(tmp_path):
    evil, path = "</title></table><script>alert(1)</script>\"'", tmp_path / "page.html"
    rows = [["", evil], evil, [evil, evil]]
    figure = {"heading": evil, "figure": evil}
    table = {"heading": evil, "rows": rows, "depth": rows, "line": evil}
    article = {"question": evil, "head": evil, "blocks": [[(evil, evil, "think")]]}
    articles = {"articles": [[article]]}
    page.write(path, evil, [table, figure, {"settings": {evil: evil}}, articles])
    reader = PageReader(path)
    assert reader.open == [] and "script" not in reader.tags
    # title, h1; the heading and cells of a report, then those of depth against need, the line;
    # the figure's heading; settings; the article
    assert reader.text.count(evil) == 2 + 5 + 4 + 1 + 1 + 2 + 4
    assert reader.sources == ["data:image/svg+xml;base64," + evil]


def test_what_is_wide_does_not_make_the_page_wide(tmp_path):
    """It scrolls in a box; no column or figure is wider than a screen of any width."""
    run, path = finished_run(tmp_path / "run", 2), tmp_path / "page.html"
    page.write(path, "run", page.run(run))
    reader = PageReader(path)
    assert len(reader.boxes) > 3 and set(reader.boxes) == {"wide"}
    assert ".wide { overflow-x: auto; }" in reader.text and "min-width:" not in reader.text
    assert "minmax(min(22rem, 100%), 1fr)" in reader.text


def test_two_runs_on_the_same_questions(tmp_path, capsys):
    folders = [finished_run(tmp_path / "short", 1), finished_run(tmp_path / "long", 3)]
    path = tmp_path / "page.html"
    forced = {depth: reports(int(depth))["greedy"] for depth in ("0", "2")}
    results = {"before": reports(3), "after": reports(3), "forced": forced}
    files.write_json(tmp_path / "long" / "eval.json", results)
    evaluation.main(["--compare", *folders, "--html", str(path), "--show", "1"])
    printed = capsys.readouterr().out
    first, second = (f"{name}\n\n    question  Who (q0)?" for name in ("short", "long"))
    assert printed.index(first) < printed.index(second)
    reader = PageReader(path)
    assert reader.open == []
    assert "short: exact, 1 search," in reader.text and "long: over, 3 searches" in reader.text
    assert reader.text.count("Who (q0)?") == 4  # as heading and as first line, for each run


def test_a_page_without_shown_trajectories_has_three_cases_where_it_can(tmp_path, capsys):
    folders = [finished_run(tmp_path / "short", 1), finished_run(tmp_path / "long", 3)]
    path = tmp_path / "page.html"
    evaluation.main(["--compare", *folders, "--html", str(path)])
    assert PageReader(path).tags.count("details") == 6  # three questions, two runs
    assert "question  " not in capsys.readouterr().out
    (tmp_path / "long" / "eval_trajectories.jsonl").unlink()
    evaluation.main(["--compare", *folders, "--html", str(path)])
    assert "details" not in PageReader(path).tags
