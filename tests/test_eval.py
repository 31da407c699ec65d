"""eval.py on trajectories made by hand, with every number known beforehand; no model is loaded."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest

import eval as evaluation
import reward
import rollout
from retriever import DataError
from rollout import Trajectory, Turn


def question(name="q0", **metadata):
    return {"id": name, "question": f"Who ({name})?", "golden_answers": ["Ada Lovelace"], "metadata": metadata}


def search(query, self_answer="<answer>unknown</answer>", passages=()):
    return Turn(f"<think>look</think> <search>{query}</search>", "search", query, list(passages), self_answer)


def answer(text="Ada Lovelace"):
    return Turn(f"<think>done</think> <answer>{text}</answer>", "answer")


def trajectory(*turns, q=None, tokens=10, seconds=0.5, **more):
    stop = "answer" if turns and turns[-1].action == "answer" else "turns"
    return Trajectory(q or question(), list(turns), completion_mask=[1] * tokens, stop=stop, seconds=seconds, **more)


RIGHT = "<think>I see</think> <answer>Ada Lovelace</answer>"
QUERIES = ("birthplace of Ada", "river Thames length", "mathematics engine notes", "poet father")


def searching(depth, q, final="Ada Lovelace"):
    return trajectory(*map(search, QUERIES[:depth]), answer(final), q=q)


def test_report_by_hand():
    cases = [
        trajectory(search("one thing", RIGHT), search("another matter"), answer(), q=question("a", hops=1), tokens=30),
        trajectory(search("one thing"), answer("Ada Byron"), q=question("b", hops=1), tokens=20),
        trajectory(answer("nobody"), q=question("c", hops=0), seconds=2.0),
        trajectory(search("one thing"), search("one thing"), q=question("d", hops=2, hard=True), tokens=20),
    ]
    r = evaluation.report(cases, settings={"k": 3})
    assert r["em"] == 1 / 4 and r["f1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    assert r["sd"] == 5 / 4 and r["se"] == pytest.approx((1 / 4) / (5 / 4)) and r["osr"] == 1 / 4
    assert r["valid_action_ratio"] == 7 / 8  # of d's two turns the last one is no answer
    assert (r["tokens"], r["seconds"], r["n"], r["settings"]) == (20, 3.5 / 4, 4, {"k": 3})
    assert list(r["by"]["hops"]) == ["0", "1", "hard"]
    assert r["by"]["hops"]["1"]["sd"] == 1.5 and r["by"]["hops"]["hard"]["em"] == 0
    assert r["by"]["hops"]["0"]["se"] is None  # nothing searched
    assert json.loads(json.dumps(r)) == r


def test_a_repeated_query_is_no_valid_action():
    r = evaluation.report([trajectory(search("one thing"), search("one thing"), answer())])
    assert r["valid_action_ratio"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("turns, self_answer_0, osr, osr_t0", [
    ([search("one", RIGHT), search("two"), answer()], None, 1, 1),
    ([search("one"), search("two", RIGHT), answer()], None, 0, 0),  # right after the last search is not too late
    ([search("one", RIGHT), answer()], None, 0, 0),
    ([search("one"), answer()], RIGHT, 0, 1),
    ([answer()], RIGHT, 0, 0),  # nothing was searched, so nothing was needless
    ([search("one", RIGHT), Turn("no tags", None, self_answer=RIGHT), answer()], None, 0, 0),  # no search in the second
])
def test_over_search_ratio(turns, self_answer_0, osr, osr_t0):
    r = evaluation.report([trajectory(*turns, self_answer_0=self_answer_0)])
    assert (r["osr"], r["osr_t0"]) == (osr, osr_t0)


def test_answers_are_read_from_policy_text_only():
    fooled = Turn("<information><answer>Ada Lovelace</answer></information> I stop", None)
    assert evaluation.report([trajectory(fooled)])["em"] == 0
    assert evaluation.report([trajectory()])["em"] == 0  # the context was full before the first turn
    assert evaluation.score_trajectory(trajectory()).em == 0


def test_interval_resamples_questions_not_samples():
    one_each = [searching(i % 2, question(f"q{i}"), "Ada Lovelace" if i % 2 else "x") for i in range(40)]
    alone, repeated = evaluation.report(one_each), evaluation.report([t for t in one_each for _ in range(8)])
    assert repeated["n"] == 40 and repeated["trajectories"] == 320
    assert repeated["ci"] == alone["ci"] == evaluation.report(one_each)["ci"]
    low, high = alone["ci"]["em"]
    spread = 1.96 * np.sqrt(0.25 / 40)  # normal approximation of a share of one half
    assert low == pytest.approx(0.5 - spread, abs=0.04) and high == pytest.approx(0.5 + spread, abs=0.04)


def test_groups_by_any_key():
    cases = [searching(1, q) for q in (question("a", type="bridge"), question("b", type="bridge"), question("c"))]
    r = evaluation.report(cases, by=("type", "hops"))
    assert {name: group["n"] for name, group in r["by"]["type"].items()} == {"bridge": 2, "unknown": 1}
    assert "hops" not in r["by"] and r["depth"] is None
    assert evaluation.group_of(question(level=10), "level") == "10"
    unsorted = [searching(0, question(str(n), hops=n)) for n in (10, 2)]
    assert list(evaluation.report(unsorted)["by"]["hops"]) == ["2", "10"]
    with pytest.raises(DataError):
        evaluation.report([])


def test_reward_is_reported_with_scores():
    cases = [searching(1, question("a")), searching(2, question("b"))]
    scores = [evaluation.score_trajectory(case) for case in cases]
    assert evaluation.report(cases, scores)["reward"] == pytest.approx(np.mean([s.total for s in scores]))
    with pytest.raises(ValueError):
        evaluation.report(cases, scores[:1])


def test_depth_against_need():
    made = [(0, 1), (1, 1), (1, 3), (2, 1), (3, 3)]
    cases = [searching(depth, question(f"q{i}", hops=hops)) for i, (hops, depth) in enumerate(made)]
    d = evaluation.depth_against_need([*cases, searching(4, question("h", hops=1, hard=True))])
    assert d["matrix"]["1"] == {"0": 0, "1": 1, "2": 0, "3": 1, "4": 0} and d["matrix"]["hard"]["4"] == 1
    assert (d["under"], d["exact"], d["over"], d["needless"], d["n"]) == (1 / 5, 2 / 5, 2 / 5, 3 / 5, 5)
    ranks = np.array([[1, 2.5, 2.5, 4, 5], [2, 2, 4.5, 2, 4.5]])  # by hand: ties share their mean rank
    assert d["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert evaluation.spearman([1, 2, 3], [5, 5, 5]) is None


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
def test_evaluate_keeps_every_question_in_order(monkeypatch, batch_size):
    seeds = []

    def scripted(model, tokenizer, batch, retriever, settings, *, num_generations, temperature, seed, **more):
        assert 0 < len(batch) <= batch_size and temperature == 0.0
        assert more == {"ask_before_search": True, "force_depth": None}
        seeds.append(seed)
        return [searching(q["metadata"]["hops"], q) for q in batch for _ in range(num_generations)]

    monkeypatch.setattr(rollout, "rollout", scripted, raising=False)
    questions = [question(f"q{i}", hops=i % 4) for i in range(10)]
    done = evaluation.evaluate(None, None, questions, None, None, batch_size=batch_size, samples=2)
    assert len(set(seeds)) == len(seeds)  # no two batches draw the same numbers
    assert [t.question["id"] for t in done] == [f"q{i}" for i in range(10) for _ in range(2)]
    r = evaluation.report(done)
    assert r["n"] == 10 and r["sd"] == 1.3 and r["depth"]["exact"] == 1 and r["depth"]["spearman"] == pytest.approx(1)


def test_the_table_does_not_depend_on_the_batch_size(tiny, world):
    retriever, questions = world
    results = []
    for batch_size in (1, 7, 64):
        done = evaluation.evaluate(*tiny, questions[::60], retriever, rollout.RolloutSettings(), batch_size=batch_size)
        for case in done:
            case.seconds = 0.0
        results.append(evaluation.report(done))
    assert results[0] == results[1] == results[2] and results[0]["n"] == 10 and results[0]["sd"] > 1


def reports(depth, em=1.0):
    """A report on 4 + 4 + 4 questions (needing 1, 2 and "hard") with `depth` searches each, `em` of them right."""
    groups = [{"hops": 1}, {"hops": 2}, {"hops": 1, "hard": True}]
    cases = [searching(depth, question(f"{g}-{i}", **metadata), "Ada Lovelace" if i < 4 * em else "x")
             for g, metadata in enumerate(groups) for i in range(4)]
    r = evaluation.report(cases)
    return {"sampled": r, "greedy": r}


def test_tables_fit_a_terminal():
    text = evaluation.before_after_table({"before": reports(3), "after": reports(1, 0.75)})
    assert max(map(len, text.splitlines())) <= 100
    rows = [line for line in text.splitlines() if line.strip().startswith("needs 2")]
    assert len(rows) == 2 and "1.000 -> 0.750" in rows[0] and "3.00 -> 1.00" in rows[0] and rows[0].endswith(" 4")
    assert "3.00 -> -" in evaluation.before_after_table({"before": reports(3)})  # killed before the end
    text = evaluation.report_table(reports(2)["greedy"])
    assert max(map(len, text.splitlines())) <= 100 and "needless searches 0.50" in text


def make_run(folder, reward_name="autosearch", seed=0, depth=1, em=1.0, **config):
    folder.mkdir()
    config = {"model": "m", "reward": reward_name, "search_cost": None, "seed": seed, "commit": str(folder), **config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "eval.json").write_text(json.dumps({"before": reports(3), "after": reports(depth, em)}))
    return str(folder)


def test_compare_averages_seeds_and_keeps_settings_apart(tmp_path):
    runs = [make_run(tmp_path / "a0", depth=1), make_run(tmp_path / "a1", seed=1, depth=2),
            make_run(tmp_path / "o", "outcome", depth=3),
            make_run(tmp_path / "p1", "search-penalty", em=0.5),
            make_run(tmp_path / "p3", "search-penalty", search_cost=0.3, name="other")]
    arms = evaluation.load_arms(runs)
    text = evaluation.as_text(evaluation.compare_rows(arms))
    evaluation.plot_compare(arms, "sampled", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG" and not list(tmp_path.glob("*.tmp"))
    table = text[text.index("sampled: needs 2"):].splitlines()[1:6]
    assert [line[:34].strip() for line in table] == [
        "before training", "autosearch", "outcome", "search-penalty", "search-penalty search_cost=0.3"]
    assert "1.50 ±0.71" in table[1] and table[1].endswith(" 2") and "±" not in table[2]
    assert "0.500" in table[3] and "sampled: average" in text and "greedy: hard" in text


def test_compare_average_is_over_groups():
    uneven = {"by": {"hops": {"1": {"em": 1.0, "se": None}, "2": {"em": 0.5, "se": 0.25}}}, "em": 0.9}
    def over(metric):
        return evaluation._over_seeds([{"greedy": uneven}], "greedy", "hops", "average", metric)
    assert over("em") == (0.75, None) and over("se") == (0.25, None) and over("f1") == (None, None)


def test_curves_of_a_killed_run(tmp_path):
    for name, steps in (("long", 30), ("short", 1)):
        (tmp_path / name).mkdir()
        rows = [{"step": s, "reward": s / 10, "em": 0.5, "kl": None, "entropy": float("nan")} for s in range(steps)]
        lines = [json.dumps(row) for row in [*rows, rows[-1]]] + ['{"step": 31, "rew']
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert len(evaluation.read_lines(tmp_path / "long" / "metrics.jsonl")) == 31
    for ending in ("png", "svg"):
        path = tmp_path / f"curves.{ending}"
        evaluation.plot_curves([tmp_path / "long", tmp_path / "short"], path)
        assert path.stat().st_size > 10_000
    assert b"<svg" in path.read_bytes()
    with pytest.raises(DataError, match="png"):
        evaluation.plot_curves([tmp_path / "long"], tmp_path / "curves.jpeg")


@pytest.mark.parametrize("turns, expected", [
    ([search("one", RIGHT), search("two"), answer()], "over"),
    ([search("one"), search("two", RIGHT), answer()], "exact"),
    ([search("one"), answer("x")], "under"),
    ([answer()], "exact"),
    ([search("one", RIGHT), Turn("no tags", None, self_answer=RIGHT), answer()], "exact"),
])
def test_verdict(turns, expected):
    case = trajectory(*turns)
    assert evaluation.verdict(case, evaluation.score_trajectory(case)) == expected


def test_rendered_trajectory_shows_everything_and_obeys_nothing(monkeypatch):
    evil = [{"title": "Ada\x1b[2J", "text": "\x9b31mred \u202etxet \x07" + "long words " * 60}]
    case = trajectory(search("who\x1b]0;owned\x07", "<answer>Ada Byron</answer>", evil), Turn("<b>hm\x1b[31m", None),
                      answer(), q=question("q", hops=1), self_answer_0="dunno")
    score = evaluation.score_trajectory(case)
    text = evaluation.render_trajectory(case, score)  # pytest's stdout is no terminal
    assert not any(ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160 or c == "\u202e" for c in text)
    for part in ("Who (q)?", "Ada Lovelace", "dunno", "who<U+001B>]0;owned", "Ada<U+001B>[2J: ", "(EM 0, F1 0.50)",
                 "2 invalid", "quality +0.500", "outcome +1.000", "exact search", "t_c -1", "needed: 1",
                 f"reward {score.total:+.3f}", " ..."):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b[36mwho<U+001B>" in evaluation.render_trajectory(case, score, colour=True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in evaluation.render_trajectory(case, score)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in evaluation.render_trajectory(case, score)


@pytest.mark.parametrize("condition, expected", [
    ("hops==2 and em==0", True), ("hops == 2 and em", False), ("not em or hops > 9", True), ("1 <= hops < 3", True),
    ("t_c > -2", True), ("verdict != 'over'", True), ("hard", False), ("hard > 1", False), ("  em == 0", True),
])
def test_where(condition, expected):
    assert evaluation.holds(condition, {"hops": 2, "em": 0.0, "t_c": -1, "verdict": "under", "hard": None}) is expected


@pytest.mark.parametrize("condition", [
    "__import__('os').system('true')", "hops.__class__", "depth == 2", "hops ==", "[x for x in hops]", "hops in (1, 2)",
    "lambda: 0", "", "hops = 2", "(" * 500, "f'{hops}'", "hops + 1", "\0",
])
def test_where_refuses_anything_else(condition):
    with pytest.raises(DataError, match="--where"):
        evaluation.holds(condition, {"hops": 2})


def test_show_saved_trajectories(tmp_path, capsys):
    cases = [searching(depth, question(f"q{depth}", hops=2), "Ada Lovelace" if depth else "x") for depth in range(4)]
    rows = [json.dumps({"step": 1, **t.to_dict(), "score": vars(evaluation.score_trajectory(t))}) for t in cases]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "config.json").write_text("{}")
    assert evaluation.main(["--run", str(tmp_path), "--show", "2", "--where", "em == 1"]) == 0
    printed = capsys.readouterr().out
    assert "(q2)" in printed and "(q3)" in printed and "(q0)" not in printed and "(q1)" not in printed
    assert evaluation.main(["--run", str(tmp_path), "--show", "2", "--where", "hops == 7"]) == 2


def test_command_line_evaluates_a_run(tmp_path, capsys, monkeypatch):
    questions = [question(f"q{i}", hops=i % 3) for i in range(9)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "Ada", "text": "A mathematician."}', encoding="utf-8")
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).touch()
    (tmp_path / "config.json").write_text(json.dumps({
        "model": "data/tiny_model", "questions": "train.jsonl", "corpus": "train_corpus.jsonl", "max_searches": 2,
        "eval_questions": str(tmp_path / "q.jsonl"), "eval_corpus": str(tmp_path / "c.jsonl")}))
    seen = {}

    def load_policy(model, adapter=None, in_4bit=False):
        seen.update(model=model, adapter=adapter)
        return None, None

    def scripted(model, tokenizer, questions, retriever, settings, **more):
        seen.update(max_searches=settings.max_searches, topk=settings.topk)
        return [searching(min(q["metadata"]["hops"], settings.max_searches), q) for q in questions]

    monkeypatch.setattr(rollout, "load_policy", load_policy)
    monkeypatch.setattr(rollout, "rollout", scripted, raising=False)
    out = tmp_path / "out.json"
    args = ["--run", str(tmp_path), "--limit", "6", "--out", str(out), "--topk", "1"]
    assert evaluation.main([*args, "--show", "1", "--where", "hops == 2"]) == 0
    assert seen == {"model": rollout.locate("data/tiny_model"), "adapter": f"{tmp_path}/adapter", "max_searches": 2,
                    "topk": 1}
    result = json.loads(out.read_text())["greedy"]
    assert result["n"] == 6 and result["settings"]["topk"] == 1 and len(result["settings"]["corpus_sha256"]) == 64
    printed = capsys.readouterr().out
    assert "needs 2" in printed and "Who (q2)?" in printed


def test_forced_depth_from_the_command_line(tmp_path, capsys, monkeypatch):
    cases = [question(f"q{i}", hops=i % 3) for i in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, cases)), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "Ada", "text": "A mathematician."}', encoding="utf-8")

    def scripted(model, tokenizer, questions, retriever, settings, force_depth, **more):
        """Right, also as a self-answer, as soon as the need is met."""
        done = []
        for q in questions:
            need = q["metadata"]["hops"]
            turns = [search(query, RIGHT if t >= need else "?") for t, query in enumerate(QUERIES[:force_depth], 1)]
            done.append(trajectory(*turns, answer("Ada Lovelace" if force_depth >= need else "x"), q=q))
        return done

    monkeypatch.setattr(rollout, "load_policy", lambda *_: (None, None))
    monkeypatch.setattr(rollout, "rollout", scripted)
    out = tmp_path / "out.json"
    assert evaluation.main(["--model", "data/tiny_model", "--questions", str(tmp_path / "q.jsonl"), "--corpus",
                            str(tmp_path / "c.jsonl"), "--force_depth", "2", "0", "1", "--out", str(out), "--format",
                            "svg", "--html", str(tmp_path / "page.html")]) == 0
    forced = json.loads(out.read_text())["forced"]
    assert list(forced) == ["0", "1", "2"] and forced["2"]["settings"]["force_depth"] == 2
    assert [forced[depth]["em"] for depth in forced] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [forced[depth]["osr"] for depth in forced] == pytest.approx([0, 0, 2 / 3])  # right before the last search
    printed = capsys.readouterr().out
    assert [line.split()[2:] for line in printed.splitlines() if line.startswith("  needs 1")] == [
        ["0.000", "1.000", "1.000"], ["0.000", "0.000", "1.000"]]
    assert b"<svg" in (tmp_path / "forced_depth.svg").read_bytes()
    assert "Forced depth" in (tmp_path / "page.html").read_text()


class PageReader(HTMLParser):
    """Tags that are open, and everything that a page would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.sources, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [tag] if tag not in ("meta", "img") else []
        self.sources += [v for k, v in attributes if k in ("src", "href") or k.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def finished_run(folder, depth, **more):
    """A run with all that training leaves: reports, metrics, held-out trajectories."""
    make_run(folder, depth=depth, **more)
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n{"step": 1, "reward": 1.5}\n')
    evil = [{"title": "</dd><script>alert(1)</script>", "text": "\u202e<img src=x onerror=alert(2)> ${title} $body"}]
    cases = [trajectory(*(search(q, RIGHT, evil) for q in QUERIES[:depth]), answer(), q=question(f"q{i}", hops=i % 2))
             for i in range(4)]
    evaluation.save_trajectories(folder / evaluation.HELD_OUT, [(t, evaluation.score_trajectory(t)) for t in cases])
    return str(folder)


def test_the_page_of_a_run_is_self_contained_and_runs_nothing(tmp_path, capsys):
    run, page = finished_run(tmp_path / "run", 2), tmp_path / "page.html"
    assert evaluation.main(["--run", run, "--html", str(page), "--show", "2", "--where", "hops == 1"]) == 0
    reader = PageReader(page.read_text(encoding="utf-8"))
    assert reader.open == [] and "script" not in reader.tags and reader.tags.count("img") == 1
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.sources)
    for part in ("Who (q3)?", "<script>alert(1)</script>", "<U+202E>", "${title} $body", "3.00 → 2.00", "needs 2",
                 "Training curves", "searches made", "over search: t_c 1", "quality +1.000", "EM 1, F1 1.00"):
        assert part in reader.text
    assert "Who (q0)?" not in reader.text and "Who (q3)?" in capsys.readouterr().out


def test_two_runs_on_the_same_questions(tmp_path, capsys):
    runs = [finished_run(tmp_path / name, depth) for name, depth in (("short", 1), ("long", 3))]
    page = tmp_path / "page.html"
    (tmp_path / "long" / "eval.json").write_text(json.dumps(
        {"before": reports(3), "after": reports(3), "forced": {"0": reports(0)["greedy"], "2": reports(2)["greedy"]}}))
    assert evaluation.main(["--compare", *runs, "--html", str(page), "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("short\n\n    question  Who (q0)?") < printed.index("long\n\n    question  Who (q0)?")
    reader = PageReader(page.read_text(encoding="utf-8"))
    assert reader.open == [] and "short: exact, 1 search," in reader.text and "long: over, 3 searches" in reader.text
    assert reader.text.count("Who (q0)?") == 4  # as heading and as first line, for each run
    evaluation.save_trajectories(tmp_path / "short" / evaluation.HELD_OUT, [])
    assert evaluation.main(["--compare", *runs, "--show", "1"]) == 2
    assert evaluation.main(["--compare", *runs, "--reference", str(tmp_path / "short" / "eval.json")]) == 2
    assert evaluation.main(["--compare", *runs, "--reference", str(tmp_path / "long" / "eval.json")]) == 0


def test_questions_with_different_depths_come_first(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, depths in zip(runs, ([1, 1, 1], [1, 1, 2])):
        run.mkdir()
        cases = [searching(depth, question(f"q{i}")) for i, depth in enumerate(depths)]
        evaluation.save_trajectories(run / evaluation.HELD_OUT, [(t, evaluation.score_trajectory(t)) for t in cases])
    chosen = evaluation.side_by_side(runs, 2)
    assert [[t.question["id"] for t, _ in pairs] for pairs in chosen.values()] == [["q2", "q0"]] * 2


def test_measure_saved_trajectories(tmp_path, capsys):
    path = tmp_path / "saved.jsonl"
    cases = [searching(i % 2, question(f"q{i}", hops=1)) for i in range(4)]
    evaluation.save_trajectories(path, [(t, evaluation.score_trajectory(t)) for t in cases])
    assert evaluation.main(["--trajectories", str(path)]) == 0
    assert evaluation.report_table(evaluation.report(cases)) in capsys.readouterr().out
    path.write_text('{"id": 3}\n')
    assert evaluation.main(["--trajectories", str(path)]) == 2
    assert "record 1 is no trajectory" in capsys.readouterr().err


def test_ask_prints_what_happens_and_the_scores(tiny, world, capsys):
    retriever, questions = world
    asked = next(q for q in questions if q["metadata"]["hops"] == 2)
    evaluation.ask(tiny, retriever, rollout.RolloutSettings(), asked["question"], asked["golden_answers"])
    printed = capsys.readouterr().out
    assert printed.index("<search>") < printed.index("<information>Doc 1(Title:") < printed.index("[self-answer]")
    assert f"answer: {asked['golden_answers'][0]}" in printed and "step 1 reward: format +0.025" in printed
    assert printed.count("<information>") == printed.count("[self-answer]") and "verdict: " in printed
    evaluation.ask(tiny, retriever, rollout.RolloutSettings(), asked["question"])
    assert "self-answer" not in capsys.readouterr().out


def test_a_run_keeps_what_was_measured_on_its_own_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    finished_run(run, 1, eval_questions="q.jsonl", eval_corpus="c.jsonl")
    (run / "adapter").mkdir()
    rows = [question(f"q{i}", hops=i % 2) for i in range(4)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "Ada", "text": "A mathematician."}', encoding="utf-8")
    monkeypatch.setattr(rollout, "check_model", lambda *args: None)
    monkeypatch.setattr(rollout, "load_policy", lambda *args: (None, None))
    played = []
    monkeypatch.setattr(rollout, "rollout", lambda model, tokenizer, questions, *args, num_generations, **more: (
        played.append(1) or [searching(1, q) for q in questions for _ in range(num_generations)]))
    saved = (run / evaluation.HELD_OUT).read_bytes()
    assert evaluation.main(["--run", str(run), "--temperature", "1", "--samples", "2"]) == 0
    assert evaluation.main(["--run", str(run), "--limit", "2"]) == 0
    assert (run / evaluation.HELD_OUT).read_bytes() == saved, "neither was greedy on all questions"
    assert json.loads((tmp_path / "eval.json").read_text())["greedy"]["n"] == 2
    assert evaluation.main(["--run", str(run)]) == 0
    kept = json.loads((run / "eval.json").read_text())
    assert {how: r["n"] for how, r in kept["eval"].items()} == {"sampled": 4, "greedy": 4} and "before" in kept
    assert (run / evaluation.HELD_OUT).read_bytes() != saved
    played.clear()
    (tmp_path / "broken.json").write_text("[1]")
    for late in (["--out", "broken.json"], ["--out", "."], ["--force_depth", "1", "--figure", "x.jpg"],
                 ["--show", "1", "--where", "depht == 1"], ["--by", "nonsense"], ["--topk", "0"]):
        assert evaluation.main(["--run", str(run), *late]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("eval.py: ")
    assert not played, "refused before the rollouts"


@pytest.mark.parametrize("name, text", [
    ("eval.json", '{"before": 3, "after": 4}'), ("eval.json", '{"before": {"greedy": {"em": 1}}, "after": {}}'),
    ("config.json", '{"seed": [1]}'), ("metrics.jsonl", "[1, 2]"), ("metrics.jsonl", '{"reward": 1}'),
    ("eval_trajectories.jsonl", '{"id": "q", "score": {"parts": [], "t_c": "x", "em": 0, "f1": 0}}'),
])
def test_a_damaged_run_is_one_line(tmp_path, capsys, name, text):
    run = finished_run(tmp_path / "run", 1)
    (tmp_path / "run" / name).write_text(text)
    codes = [evaluation.main(arguments) for arguments in (
        ["--compare", run, "--show", "1"], ["--curves", run],
        ["--run", run, "--show", "1", "--html", str(tmp_path / "p.html")])]
    assert 2 in codes and set(codes) <= {0, 2}
    assert capsys.readouterr().err.count("\n") == codes.count(2)


@pytest.mark.parametrize("args", [
    ["--compare", "a", "--run", "b"], ["--curves", "a", "--html", "p.html"], ["--trajectories", "t", "--out", "x.json"],
    ["--ask", "Who?", "--show", "1"], ["--ask", "  "], ["--run", "r", "--figure", "x.png"], ["--reference", "x"],
    ["--run", "r", "--show", "-1"], ["--run", "r", "--seed", "-1"], ["--run", "r", "--temperature", "inf"],
    ["--where", "em == 1"], ["--gold", "x"], ["--force_depth", "-1"], ["--html", "no/such/folder/p.html"],
    ["--trajectories", "no.jsonl"], ["--ask", "Who?"],
    [], ["--run", "no/such/run"], ["--compare", "no/such/run"], ["--curves", "no/such/run"], ["--model", "m"],
    ["--model", "m", "--questions", "none.jsonl", "--corpus", "none.jsonl"], ["--show", "1", "--run", "no/such/run"],
    ["--model", "m", "--questions", "q", "--corpus", "c", "--samples", "2"],
])
def test_bad_input_is_one_line_and_exit_code_2(args, capsys):
    assert evaluation.main(args) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("eval.py: ")


def test_scores_follow_the_weights():
    case = searching(2, question())
    plain, costly = (evaluation.score_trajectory(case, reward.REWARDS[name]) for name in ("outcome", "search-penalty"))
    assert plain.total - costly.total == pytest.approx(2 * reward.REWARDS["search-penalty"].search_cost)
