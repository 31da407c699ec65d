"""Index files: what is saved comes back; what is damaged is an error; nothing is executed."""

import random
import tracemalloc

import numpy as np
import pytest
from test_retriever import passages, random_passages

from plumbing import indexes
from plumbing.files import DataError
from retriever import BM25


def test_round_trip(tmp_path):
    odd = {"id": "é", "title": "Łódź 東京", "text": "\x00\u202e \U0001f600 w1"}
    corpus = [*random_passages(random.Random(4)), odd]
    built, path = BM25(corpus), tmp_path / "index"
    built.save(path)
    loaded = BM25.load(path)
    queries = ["w1 w2", "lodz łodz", "w59 w0 w0", "zzz"]
    assert loaded.search(queries, 7) == built.search(queries, 7) and list(loaded.passages) == corpus
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_an_index_is_mapped_and_a_passage_is_read_when_asked_for(tmp_path):
    """Loading takes no memory for postings and passages: they stay in the file."""
    corpus = random_passages(random.Random(7), count=4000)
    BM25(corpus).save(tmp_path / "index")
    tracemalloc.start()
    loaded = BM25.load(tmp_path / "index")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = (tmp_path / "index").stat().st_size
    assert peak < size / 4, (peak, size)
    assert loaded.passages[3999] == corpus[3999] and len(loaded.passages) == 4000


def test_an_index_is_not_pickle(tmp_path):
    with open(tmp_path / "evil.safetensors", "wb") as file:
        np.savez(file, meta=np.array([{"x": 1}], dtype=object))
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "evil.safetensors")


@pytest.mark.parametrize("name", ["missing.safetensors", ".", "nul\0.safetensors"])
def test_wrong_path(tmp_path, name):
    with pytest.raises(DataError, match="cannot be read"):
        BM25.load(f"{tmp_path}/{name}")


@pytest.fixture
def whole(tmp_path):
    """The bytes of an index."""
    BM25(random_passages(random.Random(5), count=20)).save(tmp_path / "whole.safetensors")
    return (tmp_path / "whole.safetensors").read_bytes()


def test_an_index_cut_short_is_a_named_error(tmp_path, whole):
    path = tmp_path / "index.safetensors"
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=f"^{path}: damaged"):
            BM25.load(path)


def test_changed_bytes_raise_nothing_but_data_error(tmp_path, whole):
    path, rng, bad = tmp_path / "index.safetensors", random.Random(6), 0
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
    bm25.save(tmp_path / "i.safetensors")
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "i.safetensors")


def test_failed_save_leaves_the_old_index(tmp_path, monkeypatch):
    bm25, path = BM25(passages("a b")), tmp_path / "i.safetensors"
    bm25.save(path)
    before = path.read_bytes()

    def full(arrays, file, metadata):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexes, "save_file", full)
    with pytest.raises(OSError):
        bm25.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
