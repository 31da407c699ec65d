"""plumbing/compare.py: runs over seeds, and on the same questions."""

import pytest
from builders import make_run, question, scored, searching

import eval as evaluation
from plumbing import compare, files, runs, tables


def test_compare_averages_seeds_and_keeps_settings_apart(tmp_path):
    folders = [
        make_run(tmp_path / "a0", depth=1),
        make_run(tmp_path / "a1", seed=1, depth=2),
        make_run(tmp_path / "o", "outcome", depth=3),
        make_run(tmp_path / "p1", "search-penalty", em=0.5),
        make_run(tmp_path / "p3", "search-penalty", search_cost=0.3, name="other"),
    ]
    text = tables.as_text(compare.compare_rows(compare.load_arms(folders)))
    table = text[text.index("sampled: needs 2") :].splitlines()[1:6]
    penalty = ["search-penalty", "search-penalty search_cost=0.3"]
    names = ["before training", "autosearch", "outcome", *penalty]
    assert [line[:34].strip() for line in table] == names
    assert "1.50 ±0.71" in table[1] and table[1].endswith(" 2") and "±" not in table[2]
    assert "0.500" in table[3] and "sampled: average" in text and "greedy: hard" in text


def test_runs_of_different_models_were_different_before_training(tmp_path):
    folders = [make_run(tmp_path / name, model=name) for name in ("small", "large")]
    arms = compare.load_arms([*folders, folders[0]])  # named twice, counted once
    before = ["before training small", "before training large"]
    assert list(arms) == [*before, "autosearch model=small", "autosearch model=large"]
    assert [len(results) for results in arms.values()] == [1] * 4


def test_a_run_that_has_not_ended_is_not_compared(tmp_path):
    make_run(tmp_path / "run")
    files.write_json(tmp_path / "run" / "eval.json", {"before": {}})
    with pytest.raises(files.DataError, match="run/eval.json: .* has this run ended"):
        compare.load_arms([tmp_path / "run"])


def test_compare_average_is_over_groups():
    groups = {"1": {"em": 1.0, "se": None}, "2": {"em": 0.5, "se": 0.25}}
    uneven = {"by": {"hops": groups}, "em": 0.9}

    def over(metric):
        return compare.over_seeds([{"greedy": uneven}], "greedy", ("hops", "average"), metric)

    assert over("em") == (0.75, None)
    assert over("se") == (0.25, None)
    assert over("f1") == (None, None)


def test_questions_with_different_depths_come_first(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for run, depths in zip(folders, ([1, 1, 1], [1, 1, 2])):
        run.mkdir()
        cases = [searching(depth, question(f"q{i}")) for i, depth in enumerate(depths)]
        evaluation.save_trajectories(run / runs.HELD_OUT, scored(cases))
    chosen = compare.side_by_side(folders, evaluation.read_trajectories, 2)
    for pairs in chosen.values():
        assert [t.question["id"] for t, _ in pairs] == ["q2", "q0"]
    assert list(chosen) == ["a", "b"]


def test_runs_without_a_question_in_common(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        cases = scored([searching(1, question(f"only in {name}"))])
        evaluation.save_trajectories(tmp_path / name / runs.HELD_OUT, cases)
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(files.DataError, match="a, b: no question in common"):
        compare.side_by_side(folders, evaluation.read_trajectories, 2)
    (tmp_path / "b" / runs.HELD_OUT).unlink()
    with pytest.raises(files.DataError, match="python eval.py --run .*b writes it"):
        compare.side_by_side(folders, evaluation.read_trajectories, 2)
