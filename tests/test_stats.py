"""plumbing/stats.py: intervals and rank correlation against slow or known ones."""

import numpy as np
import pytest

from plumbing import stats


def test_bootstrap_draws_questions_with_all_their_samples():
    """Beside a loop that joins the samples of the drawn questions."""
    questions = ["a", "b", "b", "c", "c", "c"]
    values = [1.0, 0.0, 2.0, 5.0, 3.0, 4.0]
    samples = {q: [v for v, its in zip(values, questions) if its == q] for q in questions}
    rng, means = np.random.default_rng(3), []
    for _ in range(200):
        drawn = []
        for i in rng.integers(3, size=3):
            drawn += samples["abc"[i]]
        means.append(np.mean(drawn))
    expected = np.quantile(means, (0.025, 0.975))
    assert stats.bootstrap(questions, values, seed=3, draws=200) == pytest.approx(expected)


def test_bootstrap_of_equal_values_has_no_width():
    assert stats.bootstrap("abc", [0.5] * 3, seed=0) == [0.5, 0.5]


def test_spearman():
    assert stats.spearman([1, 2, 3, 4], [10, 20, 30, 31]) == pytest.approx(1)
    assert stats.spearman([1, 2, 3, 4], [4, 3, 2, -9]) == pytest.approx(-1)
    assert stats.spearman([1, 2, 3], [5, 5, 5]) is None
    expected = np.corrcoef([2.5, 1, 2.5, 4], [1, 2, 3, 4])[0, 1]  # ties at their mean rank
    assert stats.spearman([7, 3, 7, 9], [1, 2, 3, 4]) == pytest.approx(expected)


def test_mean_is_a_float():
    assert stats.mean([True, False]) == 0.5 and type(stats.mean([1, 1])) is float
