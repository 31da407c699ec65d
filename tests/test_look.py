"""plumbing/look.py: what is shown and written where, options that do not go together, damage."""

import json
from pathlib import Path

import pytest
from builders import finished_run, question, reports, scored, searching
from conftest import ROOT

import eval as evaluation
from plumbing import files, logs, runs


@pytest.fixture
def run_eval(capsys, tmp_path, monkeypatch):
    """run_eval(options) -> (exit code, what went to stdout, what went to stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(options):
        code = 0
        try:
            files.run_script("eval.py", lambda: evaluation.main(options))
        except SystemExit as leave:
            code = leave.code
        return code, *capsys.readouterr()

    return run


def is_one_line(error):
    return error.count("\n") == 1 and error.startswith("eval.py: ")


# What is shown


def test_show_saved_trajectories(tmp_path, run_eval):
    cases = []
    for depth in range(4):
        final = "Ada Lovelace" if depth else "x"
        cases.append(searching(depth, question(f"q{depth}", hops=2), final))
    evaluation.save_trajectories(tmp_path / logs.SAMPLES, scored(cases))
    (tmp_path / "config.json").write_text("{}")
    args = ["--run", str(tmp_path), "--show", "2", "--where"]
    code, printed, _ = run_eval([*args, "em == 1"])
    assert code == 0 and "(q2)" in printed and "(q3)" in printed, "the end of training"
    assert "(q0)" not in printed and "(q1)" not in printed
    code, _, error = run_eval([*args, "hops == 7"])
    assert code == 2 and is_one_line(error)


def test_held_out_trajectories_are_shown_rather_than_samples(tmp_path, run_eval):
    (tmp_path / "config.json").write_text("{}")
    for name, path in (("sample", logs.SAMPLES), ("own", runs.HELD_OUT)):
        cases = scored([searching(1, question(f"{name}{i}")) for i in range(4)])
        evaluation.save_trajectories(tmp_path / path, cases)
    _, printed, _ = run_eval(["--run", str(tmp_path), "--show", "2"])
    assert [f"own{i}" in printed for i in range(4)] == [True, False, True, False]
    assert "sample" not in printed


def test_runs_side_by_side(tmp_path, run_eval):
    folders = [finished_run(tmp_path / name, depth) for name, depth in (("short", 1), ("long", 3))]
    forced = {depth: reports(int(depth))["greedy"] for depth in ("0", "2")}
    results = {"before": reports(3), "after": reports(3), "forced": forced}
    files.write_json(tmp_path / "long" / "eval.json", results)
    args = ["--compare", *folders]
    code, printed, _ = run_eval(args)
    assert code == 0 and printed.endswith("compare.png\n")
    assert (tmp_path / "compare.png").exists()
    figure = tmp_path / "other.svg"
    reference = [*args, "--figure", str(figure), "--reference"]
    assert run_eval([*reference, str(tmp_path / "long" / "eval.json")])[0] == 0
    assert b"0, 2 searches forced on all" in figure.read_bytes()
    code, _, error = run_eval([*reference, str(tmp_path / "short" / "eval.json")])
    assert code == 2 and is_one_line(error) and "no report of --force_depth" in error
    evaluation.save_trajectories(tmp_path / "short" / runs.HELD_OUT, [])
    code, _, error = run_eval([*args, "--show", "1"])
    assert code == 2 and is_one_line(error) and runs.HELD_OUT in error
    assert run_eval(args)[0] == 0, "the table and the figure need no trajectories"


def test_figures_are_drawn_beside_runs_of_ones_own_and_nowhere_else(tmp_path, run_eval):
    for folder, option, figure in (
        ("runs", "--curves", "runs/curves.png"),
        ("runs/more", "--compare", "runs/more/compare.png"),
        ("shipped", "--curves", "curves.png"),
        ("shipped/runs", "--compare", "compare.png"),
    ):
        Path(folder).mkdir(exist_ok=True)
        finished_run(Path(folder, "a"), 1)
        code, printed, _ = run_eval([option, f"{folder}/a"])
        assert code == 0 and printed.endswith(f"{figure}\n")
        Path(figure).unlink()
    assert not list(tmp_path.rglob("*.png"))


def test_no_default_output_is_tracked():
    """What the commands of the README write goes beside runs, or is ignored by git."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    written = ["page.html", "compare.png", "curves.png", "eval.json", "forced_depth.png"]
    assert {"runs/", *(f"/{name}" for name in written)} <= set(ignored)


# Damage and nonsense

SCORE = {"parts": [], "t_c": "x", "em": 0, "f1": 0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval.json", '{"before": 3, "after": 4}'),
        ("eval.json", '{"before": {"greedy": {"em": 1}}, "after": {}}'),
        ("config.json", '{"seed": [1]}'),
        ("metrics.jsonl", "[1, 2]"),
        ("metrics.jsonl", '{"reward": 1}'),
        ("eval_trajectories.jsonl", json.dumps({"id": "q", "score": SCORE})),
    ],
)
def test_a_damaged_run_is_one_line(tmp_path, run_eval, name, text):
    run = finished_run(tmp_path / "run", 1)
    (tmp_path / "run" / name).write_text(text)
    page = str(tmp_path / "p.html")
    results = [
        run_eval(["--compare", run, "--show", "1"]),
        run_eval(["--curves", run]),
        run_eval(["--run", run, "--show", "1", "--html", page]),
    ]
    codes = [code for code, _, _ in results]
    assert 2 in codes and set(codes) <= {0, 2}
    for code, _, error in results:
        assert is_one_line(error) if code else error == ""


MEANINGLESS = [
    "--compare a --run b",
    "--compare a --curves b",
    "--curves a --html p.html",
    "--trajectories t --out x.json",
    "--ask Who? --show 1",
    "--ask Who? --trajectories t",
    "--run r --figure x.png",
    "--reference x",
    "--run r --show -1",
    "--run r --seed -1",
    "--run r --temperature inf",
    "--run r --temperature hot",
    "--run r --samples many",
    "--run r --samples 0",
    "--run r --limit 0",
    "--run r --batch_size 0",
    "--run r --limit 1.5",
    "--run r --topk",
    "--run r --self_answer never",
    "--compare",
    "--where em==1",
    "--gold x",
    "--force_depth -1",
    "--force_depth two",
    "--html no/such/folder/p.html",
    "--trajectories no.jsonl",
    "--ask Who?",
    "",
    "--run no/such/run",
    "--compare no/such/run",
    "--curves no/such/run",
    "--model m",
    "--model m --questions none.jsonl --corpus none.jsonl",
    "--show 1 --run no/such/run",
    "--model m --questions q --corpus c --samples 2",
]


@pytest.mark.parametrize("options", MEANINGLESS)
def test_bad_input_is_one_line_and_exit_code_2(run_eval, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_eval(options.split())
    assert code == 2 and is_one_line(error)
    assert not list(tmp_path.iterdir())


def test_a_blank_question_is_none(run_eval):
    code, _, error = run_eval(["--ask", "  "])
    assert code == 2 and is_one_line(error) and "blank" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--run r --seed -1", "--seed -1: must be 0 or more"),
        ("--run r --temperature inf", "--temperature inf: must be a number"),
        ("--run r --temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("--run r --samples many", "argument --samples: invalid int value: 'many'"),
        ("--run r --topk", "argument --topk: expected one argument"),
        (
            "--run r --self_answer never",
            "argument --self_answer/--self-answer: invalid choice: 'never'",
        ),
        ("--run r --samples 2", "--samples 2: needs a --temperature above 0"),
        ("--run r --figure x.jpg", "--figure x.jpg: the name of a figure ends in .png or .svg"),
        ("--curves r --figure x.jpeg", "--figure x.jpeg: the name of a figure ends in .png"),
        ("--run r --out no/x.json", "--out no/x.json: no is no writable folder"),
        ("--run r --html .", "--html .: is a folder"),
        ("--compare a --curves b", "--compare --curves: one way of looking at a time"),
        ("--force_depth 1 -1", "--force_depth -1: must be 0 or more"),
        ("--run no/such/run", "no/such/run/config.json"),
        ("--curves no/such/run", "no/such/run/metrics.jsonl"),
        ("--compare no/such/run", "no/such/run/config.json"),
        ("--trajectories no.jsonl", "no.jsonl"),
        ("--model m", "nothing to evaluate: give --run, or --questions"),
    ],
)
def test_a_message_names_the_option_or_the_file(run_eval, options, message):
    code, _, error = run_eval(options.split())
    assert code == 2 and is_one_line(error) and message in error
