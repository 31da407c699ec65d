"""eval.py on trajectories made by hand, with every number known beforehand."""

import json
import re

import numpy as np
import pytest
from builders import (
    QUERIES,
    RIGHT,
    answer,
    finished_run,
    question,
    scored,
    search,
    searching,
    small_task,
    trajectory,
)

import eval as evaluation
import reward
from eval import EvalSettings
from plumbing import data, files, models, runs, tables
from rollout import RolloutSettings, Sampling, Turn

GREEDY = Sampling(temperature=0.0)


# Metrics


def test_report_by_hand():
    first, second = search("one thing", RIGHT), search("another matter")
    cases = [
        trajectory(first, second, answer(), q=question("a", hops=1), tokens=30),
        trajectory(search("one thing"), answer("Ada Byron"), q=question("b", hops=1), tokens=20),
        trajectory(answer("nobody"), q=question("c", hops=0), seconds=2.0),
        trajectory(
            search("one thing"),
            search("one thing"),
            q=question("d", hops=2, hard=True),
            tokens=20,
        ),
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


NO_SEARCH = Turn("no tags", None, self_answer=RIGHT)


@pytest.mark.parametrize(
    ("turns", "self_answer_0", "osr", "osr_t0"),
    [
        ([search("one", RIGHT), search("two"), answer()], None, 1, 1),
        # right after the last search is not too late
        ([search("one"), search("two", RIGHT), answer()], None, 0, 0),
        ([search("one", RIGHT), answer()], None, 0, 0),
        ([search("one"), answer()], RIGHT, 0, 1),
        ([answer()], RIGHT, 0, 0),  # nothing was searched, so nothing was needless
        ([search("one", RIGHT), NO_SEARCH, answer()], None, 0, 0),  # one search only
    ],
)
def test_over_search_ratio(turns, self_answer_0, osr, osr_t0):
    r = evaluation.report([trajectory(*turns, self_answer_0=self_answer_0)])
    assert (r["osr"], r["osr_t0"]) == (osr, osr_t0)


def test_search_efficiency():
    assert evaluation.search_efficiency(0.5, 2.0) == 0.25
    assert evaluation.search_efficiency(0.5, 0.0) is None


def test_answers_are_read_from_policy_text_only():
    fooled = Turn("<information><answer>Ada Lovelace</answer></information> I stop", None)
    assert evaluation.report([trajectory(fooled)])["em"] == 0
    empty = trajectory()  # the context was full before the first turn
    assert evaluation.report([empty])["em"] == 0
    assert empty.score().em == 0


def test_scores_follow_the_weights():
    case, costly = searching(2, question()), reward.REWARDS["search-penalty"]
    difference = case.score(reward.REWARDS["outcome"]).total - case.score(costly).total
    assert difference == pytest.approx(2 * costly.search_cost)


def test_groups_by_any_key():
    rows = question("a", type="bridge"), question("b", type="bridge"), question("c")
    r = evaluation.report([searching(1, q) for q in rows], by=("type", "hops"))
    sizes = {name: group["n"] for name, group in r["by"]["type"].items()}
    assert sizes == {"bridge": 2, "unknown": 1}
    assert "hops" not in r["by"] and r["depth"] is None
    unsorted = [searching(0, question(str(n), hops=n)) for n in (10, 2)]
    assert list(evaluation.report(unsorted)["by"]["hops"]) == ["2", "10"]
    assert data.group_of(question(level=10), "level") == "10"
    with pytest.raises(files.DataError, match="no trajectory"):
        evaluation.report([])


def test_interval_resamples_questions_not_samples():
    one_each = []
    for i in range(40):
        one_each.append(searching(i % 2, question(f"q{i}"), "Ada Lovelace" if i % 2 else "x"))
    alone = evaluation.report(one_each)
    repeated = evaluation.report([t for t in one_each for _ in range(8)])
    assert repeated["n"] == 40 and repeated["trajectories"] == 320
    assert repeated["ci"] == alone["ci"] == evaluation.report(one_each)["ci"]
    low, high = alone["ci"]["em"]
    spread = 1.96 * np.sqrt(0.25 / 40)  # normal approximation of a share of one half
    assert low == pytest.approx(0.5 - spread, abs=0.04)
    assert high == pytest.approx(0.5 + spread, abs=0.04)


def test_depth_against_need():
    made = [(0, 1), (1, 1), (1, 3), (2, 1), (3, 3)]
    cases = [searching(depth, question(f"q{i}", hops=n)) for i, (n, depth) in enumerate(made)]
    hard = searching(4, question("h", hops=1, hard=True))
    d = evaluation.depth_against_need([*cases, hard])
    assert d["matrix"]["1"] == {"0": 0, "1": 1, "2": 0, "3": 1, "4": 0}
    assert d["matrix"]["hard"]["4"] == 1
    assert (d["under"], d["exact"], d["over"]) == (1 / 5, 2 / 5, 2 / 5)
    assert (d["needless"], d["n"]) == (3 / 5, 5)
    # By hand: ties share their mean rank.
    ranks = np.array([[1, 2.5, 2.5, 4, 5], [2, 2, 4.5, 2, 4.5]])
    assert d["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


# Evaluating


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
def test_evaluate_keeps_every_question_in_order(monkeypatch, batch_size):
    seeds = []

    def scripted(policy, batch, retriever, settings, sampling):
        assert 0 < len(batch) <= batch_size and sampling.temperature == 0.0
        assert sampling.ask_before_search and sampling.force_depth is None
        seeds.append(sampling.seed)
        played = []
        for q in batch:
            played += [searching(q["metadata"]["hops"], q)] * sampling.num_generations
        return played

    monkeypatch.setattr(evaluation, "rollout", scripted)
    task = data.Task([question(f"q{i}", hops=i % 4) for i in range(10)], None)
    sampling = Sampling(num_generations=2, temperature=0.0)
    done = evaluation.evaluate(None, task, None, sampling, batch_size)
    assert len(set(seeds)) == len(seeds)  # no two batches draw the same numbers
    assert [t.question["id"] for t in done] == [f"q{i}" for i in range(10) for _ in range(2)]
    r = evaluation.report(done)
    assert r["n"] == 10 and r["sd"] == 1.3
    assert r["depth"]["exact"] == 1 and r["depth"]["spearman"] == pytest.approx(1)


def test_the_table_does_not_depend_on_the_batch_size(tiny, world):
    task, results = world._replace(questions=world.questions[::60]), []
    for batch_size in (1, 7, 64):
        done = evaluation.evaluate(tiny, task, RolloutSettings(), GREEDY, batch_size)
        for case in done:
            case.seconds = 0.0
        results.append(evaluation.report(done))
    assert results[0] == results[1] == results[2]
    assert results[0]["n"] == 10 and results[0]["sd"] > 1


# The command line


@pytest.fixture
def no_weights(monkeypatch):
    """Loads no policy; returns what was asked for."""
    seen = {}

    def load_policy(model, adapter=None, in_4bit=False, max_context=0):
        seen.update(model=model, adapter=adapter)
        return models.Policy(None, None)

    monkeypatch.setattr(models, "load_policy", load_policy)
    return seen


def test_command_line_evaluates_a_run(tmp_path, capsys, monkeypatch, no_weights):
    questions, corpus = small_task(tmp_path, [question(f"q{i}", hops=i % 3) for i in range(9)])
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).touch()
    config = {"model": "data/tiny_model", "max_searches": 2}
    config |= {"questions": "train.jsonl", "corpus": "train_corpus.jsonl"}
    config |= {"eval_questions": questions, "eval_corpus": corpus}
    files.write_json(tmp_path / "config.json", config)
    seen = no_weights

    def scripted(policy, questions, retriever, settings, sampling):
        seen.update(max_searches=settings.max_searches, topk=settings.topk)
        return [searching(min(q["metadata"]["hops"], settings.max_searches), q) for q in questions]

    monkeypatch.setattr(evaluation, "rollout", scripted)
    out = tmp_path / "out.json"
    args = ["--run", str(tmp_path), "--limit", "6", "--out", str(out), "--topk", "1"]
    evaluation.main([*args, "--show", "1", "--where", "hops == 2"])
    assert seen == {
        "model": files.locate("data/tiny_model"),
        "adapter": f"{tmp_path}/adapter",
        "max_searches": 2,
        "topk": 1,
    }
    result = files.read_json(out)["greedy"]
    assert result["n"] == 6 and result["settings"]["topk"] == 1
    assert len(result["settings"]["corpus_sha256"]) == 64
    printed = capsys.readouterr().out
    assert "needs 2" in printed and "Who (q2)?" in printed


def test_forced_depth_from_the_command_line(tmp_path, capsys, monkeypatch, no_weights):
    questions, corpus = small_task(tmp_path, [question(f"q{i}", hops=i % 3) for i in range(6)])

    def scripted(policy, questions, retriever, settings, sampling):
        """Right, also as a self-answer, as soon as the need is met."""
        done, depth = [], sampling.force_depth
        for q in questions:
            need, turns = q["metadata"]["hops"], []
            for t, query in enumerate(QUERIES[:depth], start=1):
                turns.append(search(query, RIGHT if t >= need else "?"))
            turns.append(answer("Ada Lovelace" if depth >= need else "x"))
            done.append(trajectory(*turns, q=q))
        return done

    monkeypatch.setattr(evaluation, "rollout", scripted)
    out, figure, page = (tmp_path / name for name in ("out.json", "forced.svg", "page.html"))
    args = ["--model", "data/tiny_model", "--questions", questions, "--corpus", corpus]
    args += ["--force_depth", "2", "0", "1", "--out", str(out)]
    evaluation.main([*args, "--figure", str(figure), "--html", str(page)])
    forced = files.read_json(out)["forced"]
    assert list(forced) == ["0", "1", "2"] and forced["2"]["settings"]["force_depth"] == 2
    assert [forced[depth]["em"] for depth in forced] == pytest.approx([1 / 3, 2 / 3, 1])
    osr = [forced[depth]["osr"] for depth in forced]
    assert osr == pytest.approx([0, 0, 2 / 3])  # right before the last search
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  needs 1")]
    cells = [line.split()[2:] for line in lines]
    assert cells == [["0.000", "1.000", "1.000"], ["0.000", "0.000", "1.000"]]
    assert b"<svg" in figure.read_bytes()
    assert "Forced depth" in page.read_text()
    evaluation.main(args)
    assert (tmp_path / "forced_depth.png").read_bytes()[:4] == b"\x89PNG"


def test_measure_saved_trajectories(tmp_path, capsys):
    path = tmp_path / "saved.jsonl"
    cases = [searching(i % 2, question(f"q{i}", hops=1)) for i in range(4)]
    evaluation.save_trajectories(path, scored(cases))
    evaluation.main(["--trajectories", str(path)])
    assert tables.report_table(evaluation.report(cases)) in capsys.readouterr().out
    path.write_text('{"id": 3}\n')
    with pytest.raises(files.DataError, match="record 1 is no trajectory"):
        evaluation.main(["--trajectories", str(path)])


def test_ask_prints_what_happens_and_the_scores(tiny, world, capsys):
    asked = next(q for q in world.questions if q["metadata"]["hops"] == 2)
    text, golds = asked["question"], asked["golden_answers"]
    evaluation.ask(tiny, world.retriever, EvalSettings(ask=text, gold=golds))
    printed = capsys.readouterr().out
    order = ["question  ", "1 think  ", "search  ", "self-answer  ", "reward  format +0.025"]
    order += ["2 think  ", " answer  " + golds[0], "verdict  ", "total  reward +"]
    places = [printed.index(part) for part in order]
    assert places == sorted(places)
    assert printed.count(" search  ") == printed.count("self-answer  ") > 0
    evaluation.ask(tiny, world.retriever, EvalSettings(ask=text))
    printed = capsys.readouterr().out
    assert "self-answer" not in printed and golds[0] in printed
    assert "gold  not given" in printed and "(EM" not in printed


def test_a_run_keeps_what_was_measured_on_its_own_questions(
    tmp_path, monkeypatch, capsys, no_weights
):
    monkeypatch.chdir(tmp_path)
    questions, corpus = small_task(tmp_path, [question(f"q{i}", hops=i % 2) for i in range(4)])
    run, played = tmp_path / "run", []
    own = {"eval_questions": questions, "eval_corpus": corpus}
    finished_run(run, 1, model="data/tiny_model", **own)
    (run / "adapter").mkdir()
    monkeypatch.setattr(models, "check_model", lambda *args: None)

    def scripted(policy, questions, retriever, settings, sampling):
        played.append(1)
        return [searching(1, q) for q in questions for _ in range(sampling.num_generations)]

    monkeypatch.setattr(evaluation, "rollout", scripted)
    saved = (run / runs.HELD_OUT).read_bytes()
    evaluation.main(["--run", str(run), "--temperature", "1", "--samples", "2"])
    evaluation.main(["--run", str(run), "--limit", "2"])
    assert (run / runs.HELD_OUT).read_bytes() == saved, "neither was greedy on all questions"
    assert files.read_json(tmp_path / "eval.json")["greedy"]["n"] == 2
    evaluation.main(["--run", str(run)])
    kept = files.read_json(run / "eval.json")
    sizes = {decoding: r["n"] for decoding, r in kept["eval"].items()}
    assert sizes == {"sampled": 4, "greedy": 4} and "before" in kept
    assert (run / runs.HELD_OUT).read_bytes() != saved
    played.clear()
    (tmp_path / "broken.json").write_text("[1]")
    for late, message in {
        "--out broken.json": "broken.json: expected a JSON object, got list",
        "--out .": "--out .: is a folder",
        "--force_depth 1 --figure x.jpg": "--figure x.jpg: ",
        "--show 1 --where depht==1": "--where 'depht==1': ",
        "--by nonsense": "--by nonsense: ",
        "--topk 0": "--topk 0: must be 1 or more",
    }.items():
        with pytest.raises(files.DataError, match=f"^{re.escape(message)}"):
            evaluation.main(["--run", str(run), *late.split()])
    assert not played, "refused before the rollouts"


# A run's own questions, and what is shown of a run that is not whole


@pytest.fixture
def own_run(tmp_path, monkeypatch, no_weights):
    """A run that was measured on the first two of four questions; the folder is the current one."""
    monkeypatch.chdir(tmp_path)
    questions, corpus = small_task(tmp_path, [question(f"q{i}", hops=i % 2) for i in range(4)])
    own = {"eval_questions": questions, "eval_corpus": corpus, "eval_limit": 2}
    finished_run(tmp_path / "run", 1, model="data/tiny_model", **own)
    (tmp_path / "run" / "adapter").mkdir()
    monkeypatch.setattr(models, "check_model", lambda *args: None)

    def scripted(policy, questions, retriever, settings, sampling):
        return [searching(1, q, "Lovelace") for q in questions]

    monkeypatch.setattr(evaluation, "rollout", scripted)
    return tmp_path / "run"


def test_a_run_is_measured_on_its_own_questions_unless_told_otherwise(own_run):
    evaluation.main(["--run", "run"])
    report = files.read_json(own_run / "eval.json")["eval"]["greedy"]
    assert report["n"] == report["settings"]["limit"] == 2
    before = (own_run / "eval.json").read_bytes(), (own_run / runs.HELD_OUT).read_bytes()
    for other in (
        "--limit 3",
        "--questions q.jsonl",
        "--corpus c.jsonl",
        "--limit 1 --html p.html",
    ):
        evaluation.main(["--run", "run", *other.split()])
        assert (
            files.read_json("eval.json")["greedy"]["n"]
            == {"3": 3, "q": 4, "c": 2, "1": 1}[other.split()[1][0]]
        )
    after = (own_run / "eval.json").read_bytes(), (own_run / runs.HELD_OUT).read_bytes()
    assert before == after, "what was measured on others never lands in the run's tables"
    evaluation.main(["--run", "run", "--limit", "2", "--temperature", "1"])
    assert files.read_json(own_run / "eval.json")["eval"]["sampled"]["n"] == 2


def test_f1_by_hotpotqas_rules_is_said_in_the_report(own_run, capsys):
    cases = [searching(1, question() | {"golden_answers": ["yes"]}, "yes, both")]
    evaluation.save_trajectories("saved.jsonl", scored(cases))
    for rules, f1 in ((False, 2 / 3), (True, 0)):
        report = evaluation.report(cases, hotpot_rules=rules)
        assert report["f1"] == pytest.approx(f1)
        evaluation.main(["--trajectories", "saved.jsonl", "--hotpot_rules", str(rules)])
        assert f"  {f1:.3f}  " in capsys.readouterr().out
        evaluation.main(["--run", "run", "--hotpot_rules", str(rules), "--out", "o.json"])
        assert files.read_json("o.json")["greedy"]["settings"]["hotpot_rules"] is rules
        assert ("HotpotQA's rules" in capsys.readouterr().out) is rules


def test_a_run_shows_what_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = finished_run(tmp_path / "run", 1)
    (tmp_path / "run" / runs.HELD_OUT).unlink()
    evaluation.main(["--run", run, "--html", "p.html"])
    page = (tmp_path / "p.html").read_text()
    assert "Training curves" in page and "1.000" in page and "Trajectories" not in page
    assert page.index("search depth") < page.index("<table>")
    with pytest.raises(files.DataError, match="nothing to evaluate"):
        evaluation.main(["--run", run, "--show", "1"])
    for name in ("eval.json", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(files.DataError, match="there is nothing to show yet"):
        evaluation.main(["--run", run, "--html", "p.html"])


def test_a_shipped_run_is_left_as_it_is(own_run, monkeypatch):
    before = {path: path.read_bytes() for path in own_run.iterdir() if path.is_file()}
    monkeypatch.setattr(runs, "ROOT", own_run.parent)
    assert not runs.is_shipped(own_run)
    (own_run.parent / "data").mkdir()
    shipped = own_run.rename(own_run.parent / "data" / "run")
    evaluation.main(["--run", "data/run"])
    assert files.read_json("eval.json")["greedy"]["n"] == 2
    evaluation.main(["--run", "data/run", "--force_depth", "1"])
    assert (own_run.parent / "forced_depth.png").exists()
    after = {path.name: path.read_bytes() for path in shipped.iterdir() if path.is_file()}
    assert after == {path.name: text for path, text in before.items()}


# Records that contradict themselves


def test_records_that_contradict_themselves_are_one_line(tmp_path, capsys):
    path = str(tmp_path / "saved.jsonl")
    for spoil in (
        lambda row: row["score"]["parts"].pop(),
        lambda row: row["turns"].pop(),
        lambda row: row["turns"][0].pop("text"),
        lambda row: row["score"].pop("parts"),
        lambda row: row["turns"][0].update(text=3),
        lambda row: row["turns"][0].update(passages=["x"]),
        lambda row: row.update(question=None),
        lambda row: row.update(metadata=None),
        lambda row: row["score"]["parts"][0].update(format="x"),
    ):
        evaluation.save_trajectories(path, scored([searching(2, question(hops=1))]))
        row = json.loads((tmp_path / "saved.jsonl").read_text())
        spoil(row)
        files.write_jsonl(path, [row])
        with pytest.raises(SystemExit) as stopped:
            show = ["--trajectories", path, "--show", "1"]
            files.run_script("eval.py", lambda show=show: evaluation.main(show))
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and path in error


def test_a_gold_answer_given_as_a_string_is_one_answer(tmp_path, capsys):
    path = tmp_path / "saved.jsonl"
    case = searching(1, question() | {"golden_answers": "Gold"}, "Gold")
    evaluation.save_trajectories(path, scored([case]))
    evaluation.main(["--trajectories", str(path), "--show", "1"])
    printed = capsys.readouterr().out
    assert "gold  Gold\n" in printed and "answer  Gold (EM 1, F1 1.00)" in printed


def test_a_level_called_hard_is_not_the_hard_group(capsys):
    cases = [searching(1, question(f"q{i}", hops=1, hard=i == 0, level="hard")) for i in range(2)]
    result = evaluation.report(cases, by=["hops", "level"])
    rows = [row[0] for row in tables.report_rows(result)]
    assert rows == ["", "all", "needs 1", "hard", "level hard"]


def test_reports_name_the_class_of_a_retriever_that_has_no_passages(own_run, monkeypatch):
    class Mine:
        def search(self, queries, k):
            return [[] for _ in queries]

    monkeypatch.setattr(evaluation, "open_retriever", lambda *_: Mine())
    evaluation.main(["--run", "run"])
    report = files.read_json(own_run / "eval.json")["eval"]["greedy"]
    assert report["settings"]["retriever"] == "Mine"
