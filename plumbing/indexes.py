"""BM25's index in a safetensors file, read by memory map. Nothing in it is executed."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from plumbing.files import check, on_failure, replacing

FORMAT = "3"  # goes up when tokenise or the arrays change: an older index would silently find less


class Index(NamedTuple):
    """The postings of word number w are [starts[w]:starts[w + 1]] of where and weight."""

    passages: Sequence  # of {"id", "title", "text"}
    words: dict  # word -> w
    starts: np.ndarray  # (V + 1,)
    where: np.ndarray  # (P,) passage of a posting
    weight: np.ndarray  # (P,) its score


class Passages(Sequence):
    """Passages in a file that is mapped into memory: each is read when it is asked for."""

    def __init__(self, text, ends, problem):
        self.text, self.ends, self.problem = text, ends, problem  # bytes of JSON; where each ends

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, i):
        start, end = self.ends[i - 1] if i else 0, self.ends[i]  # IndexError ends an iteration
        with on_failure(self.problem):
            passage = json.loads(self.text[start:end].tobytes())
            good = all(isinstance(passage[key], str) for key in ("id", "title", "text"))
            check(good, self.problem, f"passage {i}")
        return passage


def save(path, index):
    """Write an index to one file. Raises OSError."""
    lines = [json.dumps(passage).encode() for passage in index.passages]
    arrays = {name: getattr(index, name) for name in ("starts", "where", "weight")}
    arrays["words"] = np.frombuffer(json.dumps(list(index.words)).encode(), np.uint8)
    arrays["text"] = np.frombuffer(b"".join(lines), np.uint8)
    arrays["ends"] = np.cumsum([len(line) for line in lines])
    with replacing(path) as temporary:
        save_file(arrays, temporary, {"format": FORMAT})


def load(path):
    """The index that `save` wrote. Raises DataError where it is damaged or missing."""
    with on_failure(f"{path}: cannot be read"):
        open(path, "rb").close()
    problem = f"{path}: damaged, or no index of this version: build it again"
    with on_failure(problem), safe_open(path, "pt") as file:  # "np" would read it whole
        check(file.metadata()["format"] == FORMAT, problem, "another version")
        mapped = {name: file.get_tensor(name).numpy() for name in file.keys()}
        starts, where, weight = (mapped[name] for name in ("starts", "where", "weight"))
        words = {word: w for w, word in enumerate(json.loads(mapped["words"].tobytes()))}
        passages = Passages(mapped["text"], mapped["ends"], problem)
        good = starts.dtype == where.dtype == np.int64 and weight.dtype == np.float64
        good &= starts[-1] == len(where) == len(weight)
        good &= len(words) == len(starts) - 1 and starts[0] == 0 and (np.diff(starts) > 0).all()
        good &= 0 <= where.min() <= where.max() < len(passages)
        good &= passages.ends.dtype == np.int64 and (np.diff(passages.ends, prepend=0) > 0).all()
        check(good, problem, "it does not fit")
    return Index(passages, words, starts, where, weight)
