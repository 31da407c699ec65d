"""Statistics: bootstrap intervals and rank correlation."""

import numpy as np


def mean(values):
    """The mean of numbers, as a float."""
    return float(np.mean(list(values)))


def bootstrap(questions, values, seed, draws=1000):
    """95% interval [low, high] of the mean of `values`; a question's samples are drawn together."""
    numbers = {}
    index = [numbers.setdefault(question, len(numbers)) for question in questions]
    sums, sizes = np.bincount(index, values), np.bincount(index)
    rng, means = np.random.default_rng(seed), []
    for _ in range(draws):
        pick = rng.integers(len(sizes), size=len(sizes))
        means.append(sums[pick].sum() / sizes[pick].sum())
    return np.quantile(means, (0.025, 0.975)).tolist()


def spearman(x, y):
    """Rank correlation of two lists of numbers; None where one of them does not vary."""
    if min(len(set(x)), len(set(y))) < 2:
        return None
    ranks = []
    for values in (x, y):  # ties get their mean rank
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])
