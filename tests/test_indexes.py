"""Index files: what is saved comes back; what is damaged is an error; nothing is executed."""

import random

import numpy as np
import pytest
from test_retriever import passages, random_passages

from plumbing.files import DataError
from retriever import BM25


def test_round_trip(tmp_path):
    odd = {"id": "é", "title": "Łódź 東京", "text": "\x00\u202e \U0001f600 w1"}
    corpus = [*random_passages(random.Random(4)), odd]
    built, path = BM25(corpus), tmp_path / "index"
    built.save(path)
    loaded = BM25.load(path)
    queries = ["w1 w2", "lodz łodz", "w59 w0 w0", "zzz"]
    assert loaded.search(queries, 7) == built.search(queries, 7) and loaded.passages == corpus
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_an_index_is_not_pickle(tmp_path):
    np.savez(tmp_path / "evil.npz", meta=np.array([{"x": 1}], dtype=object))
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "evil.npz")


@pytest.mark.parametrize("name", ["missing.npz", ".", "nul\0.npz"])
def test_wrong_path(tmp_path, name):
    with pytest.raises(DataError, match="cannot be read"):
        BM25.load(f"{tmp_path}/{name}")


@pytest.fixture
def whole(tmp_path):
    """The bytes of an index."""
    BM25(random_passages(random.Random(5), count=20)).save(tmp_path / "whole.npz")
    return (tmp_path / "whole.npz").read_bytes()


def test_an_index_cut_short_is_a_named_error(tmp_path, whole):
    path = tmp_path / "index.npz"
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=f"^{path}: damaged"):
            BM25.load(path)


def test_changed_bytes_raise_nothing_but_data_error(tmp_path, whole):
    path, rng, bad = tmp_path / "index.npz", random.Random(6), 0
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(3):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            BM25.load(path).search(["w0 w1 w2"])
        except DataError:
            bad += 1
    assert bad > 0


CHANGES = [
    {"where": [0, 9]},
    {"where": [0, -1]},
    {"starts": [0, 5]},
    {"weight": [1.0]},
    {"starts": [0.0, 2]},
]


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_do_not_fit(tmp_path, change):
    bm25 = BM25(passages("a", "a"))
    arrays = {name: np.array(value) for name, value in change.items()}
    bm25.index = bm25.index._replace(**arrays)
    bm25.save(tmp_path / "i.npz")
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "i.npz")


def test_failed_save_leaves_the_old_index(tmp_path, monkeypatch):
    bm25, path = BM25(passages("a b")), tmp_path / "i.npz"
    bm25.save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError):
        bm25.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
