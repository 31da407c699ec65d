"""plumbing/compare.py: runs over seeds, and on the same questions."""

from pathlib import Path

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
    before = ["before training model=small", "before training model=large"]
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
        return compare.over_seeds([{"greedy": uneven}], "greedy", ("hops", compare.AVERAGE), metric)

    assert over("em") == (0.75, None)
    assert over("se") == (None, None), "a group that hardly searches would rule the mean"
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


def remeasured(run, n=None, **settings):
    """The run's reports as if they had been made on other questions."""
    path = Path(run) / "eval.json"
    results = files.read_json(path)
    for moment in ("before", "after"):
        for report in results[moment].values():
            report["n"] = n or report["n"]
            report["settings"] |= settings
    files.write_json(path, results)
    return run


def test_runs_on_other_questions_are_refused(tmp_path):
    a, b = (make_run(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    assert len(compare.load_arms([a, b])) == 2
    for other in ({"n": 6}, {"questions_sha256": "0"}):
        remeasured(b, **other)
        with pytest.raises(files.DataError, match=f"{b}/eval.json: measured on .* not to be comp"):
            compare.load_arms([a, b])
        assert len(compare.load_arms([b])) == 2


def test_equal_settings_and_seeds_stand_side_by_side(tmp_path):
    """A planted bug beside the right code: an average would hide it."""
    right = make_run(tmp_path / "right")
    bug = make_run(tmp_path / "bug", depth=3)
    third = make_run(tmp_path / "third", seed=1)
    arms = compare.load_arms([right, bug, third])
    names = ["before training", f"autosearch {right}", f"autosearch {bug}", "autosearch"]
    assert list(arms) == names
    assert [len(results) for results in arms.values()] == [2, 1, 1, 1]


def test_what_was_measured_otherwise_before_training_stands_apart(tmp_path):
    a, b = (make_run(tmp_path / name, topk=topk) for name, topk in (("a", 3), ("b", 5)))
    for run, topk in ((a, 3), (b, 5)):
        remeasured(run, topk=topk)
    names = list(compare.load_arms([a, b]))
    assert names[:2] == ["before training topk=3", "before training topk=5"]


def test_the_comparison_says_n(tmp_path):
    rows = compare.compare_rows(compare.load_arms([make_run(tmp_path / "a")]))
    heads = [row for row in rows if isinstance(row, str)]
    assert heads[:2] == ["sampled: all, n = 12", "sampled: needs 1, n = 4"]
    assert "sampled: average of the groups" in heads


def test_a_group_called_average_is_a_group_like_others():
    assert tables.label("level", "average") == "level average"
