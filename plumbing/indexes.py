"""BM25's index in a file: arrays, and JSON for words and passages. Nothing in it is executed."""

import json
from typing import NamedTuple

import numpy as np

from plumbing.files import check, on_failure, replacing

FORMAT = 2  # goes up when tokenise or the arrays change: an older index would silently find less


class Index(NamedTuple):
    """The postings of word number w are [starts[w]:starts[w + 1]] of where and weight."""

    passages: list  # of {"id", "title", "text"}
    words: dict  # word -> w
    starts: np.ndarray  # (V + 1,)
    where: np.ndarray  # (P,) passage of a posting
    weight: np.ndarray  # (P,) its score


def save(path, index):
    """Write an index to one .npz file. Raises OSError."""
    meta = {"format": FORMAT, "words": list(index.words), "passages": index.passages}
    arrays = {name: getattr(index, name) for name in ("starts", "where", "weight")}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


def load(path):
    """The index that `save` wrote. Raises DataError where it is damaged or missing."""
    with on_failure(f"{path}: cannot be read"):
        raw = open(path, "rb")
    # Damaged zip, array and JSON data fail in a dozen ways, and all mean the same.
    problem = f"{path}: damaged, or no index of this version: build it again"
    with on_failure(problem), raw, np.load(raw, allow_pickle=False) as file:
        meta = json.loads(file["meta"].tobytes())
        passages, words = meta["passages"], {word: w for w, word in enumerate(meta["words"])}
        starts, where, weight = file["starts"], file["where"], file["weight"]
        good = all(isinstance(p[key], str) for p in passages for key in ("id", "title", "text"))
        good &= starts.dtype == where.dtype == np.int64 and weight.dtype == np.float64
        good &= meta["format"] == FORMAT and starts[-1] == len(where) == len(weight)
        good &= len(words) == len(starts) - 1 and starts[0] == 0 and (np.diff(starts) > 0).all()
        check(good and 0 <= where.min() <= where.max() < len(passages), problem, "it does not fit")
    return Index(passages, words, starts, where, weight)
