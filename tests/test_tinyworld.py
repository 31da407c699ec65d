"""The tiny world: the shipped bytes are what the script makes; questions need what they say."""

import hashlib
import random
import re
import sys

import pytest
from conftest import ROOT, WORLD

from plumbing.data import group_of, load_corpus, load_questions
from retriever import BM25

sys.path.insert(0, str(ROOT / "data"))
import make_tinyworld as tw  # noqa: E402

SPLITS = ("train", "dev")


def load(folder, split):
    return load_corpus(folder / f"{split}_corpus.jsonl"), load_questions(folder / f"{split}.jsonl")


@pytest.fixture(scope="module")
def other_world(tmp_path_factory):
    """A world of another seed."""
    folder = tmp_path_factory.mktemp("world")
    tw.main(["--seed", "7", "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def famous():
    """A `World` of the famous facts alone."""
    scratch = tw.World()
    tw.add_famous(scratch)
    return scratch


def test_the_shipped_world_is_what_the_script_makes(tmp_path):
    tw.main(["--out", str(tmp_path)])
    card = (WORLD / "README.md").read_text()
    for split in SPLITS:
        for name in (f"{split}_corpus.jsonl", f"{split}.jsonl"):
            shipped = (WORLD / name).read_bytes()
            assert (tmp_path / name).read_bytes() == shipped
            assert hashlib.sha256(shipped).hexdigest() in card


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        tw.main(["--out", str(tmp_path / "file")])


@pytest.mark.parametrize("split", SPLITS)
def test_sizes(split):
    passages, questions = load(WORLD, split)
    groups = [group_of(question, "hops") for question in questions]
    counts = [groups.count(group) for group in ("0", "1", "2", "3", "hard")]
    assert len(passages) >= 2000 and min(counts) >= 100
    assert len(questions) >= (2000 if split == "train" else 400)
    assert sum(counts) == len(questions)
    for question in questions:
        assert all(len(answer.split()) >= 2 for answer in question["golden_answers"])


def read_by_oracle(retriever, question):
    """Search for each supporting title in turn. Returns the passages shown after each search.

    The oracle may only use names that it has read: each title after the first must stand in a
    passage shown before.
    """
    shown, read = [], question["question"]
    for title in question["metadata"]["supporting_titles"]:
        name = title.split(" of ")[-1]
        assert name in read, f"{question['id']}: {name} cannot be known yet"
        found = retriever.search([title], 3)[0]
        shown.append(found)
        read += " ".join(passage["text"] for passage in found)
    return shown


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("made", ["shipped", "another seed"])
def test_an_oracle_needs_exactly_the_hops(split, made, other_world):
    passages, questions = load(WORLD if made == "shipped" else other_world, split)
    retriever = BM25(passages)
    for question in questions:
        hops, titles = question["metadata"]["hops"], question["metadata"]["supporting_titles"]
        (answer,) = question["golden_answers"]
        shown = read_by_oracle(retriever, question)
        assert len(shown) == max(hops, 1)  # a famous fact has its passage too, but needs no search
        assert any(p["title"] == titles[-1] and answer in p["text"] for p in shown[-1])
        for i, found in enumerate(shown):
            later = {p["title"] for p in found} & set(titles[i + 1 :])
            assert not later, f"{question['id']}: answerable earlier"


def test_famous_facts_are_the_known_ones(famous):
    for split in SPLITS:
        for question in load(WORLD, split)[1]:
            if group_of(question, "hops") == "0":
                (name,) = question["metadata"]["supporting_titles"]
                assert question["golden_answers"][0] in famous.facts[name].values()


def test_dev_names_and_questions_are_new(famous):
    dev_names, train_names = set(tw.name_pairs("dev")), set(tw.name_pairs("train"))
    assert not dev_names & train_names
    words = []
    for name in ("train.jsonl", "train_corpus.jsonl"):
        words += re.findall(r"\w+", (WORLD / name).read_text())
    train_pairs = {" ".join(pair) for pair in zip(words, words[1:])}
    passages, questions = load(WORLD, "dev")
    names = {passage["title"].split(" of ")[-1] for passage in passages}
    names -= {passage["title"] for passage in famous.passages}
    assert names <= dev_names and not names & train_pairs
    trained = {question["question"] for question in load(WORLD, "train")[1]}
    assert not trained & {question["question"] for question in questions}


def test_there_are_near_namesakes():
    titles = [passage["title"] for passage in load(WORLD, "dev")[0]]
    names = [title.split() for title in titles if " of " not in title]
    firsts, seconds = zip(*names)
    shared = [firsts.count(name[0]) > 5 and seconds.count(name[1]) > 5 for name in names]
    assert sum(shared) / len(shared) > 0.9


def test_a_deeper_world_has_chains_of_four():
    rng = random.Random(0)
    world = tw.make_world(rng, tw.name_pairs("dev"), num_hard=1)
    questions = tw.make_questions(rng, world, "dev", {"0": 1, "4": 5})
    deep = [question for question in questions if question["metadata"]["hops"] == 4]
    assert len(deep) == 5
    assert all(len(question["metadata"]["supporting_titles"]) == 4 for question in deep)
