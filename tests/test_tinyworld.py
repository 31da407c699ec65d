"""The tiny world: the shipped bytes are what the script makes, and the questions need what they say."""

import hashlib
import re
import sys

import pytest
from conftest import ROOT, WORLD

from eval import group_of
from retriever import BM25, load_corpus, load_questions

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


def test_the_shipped_world_is_what_the_script_makes(tmp_path):
    tw.main(["--out", str(tmp_path)])
    card = (WORLD / "README.md").read_text()
    for split in SPLITS:
        for name in (f"{split}_corpus.jsonl", f"{split}.jsonl"):
            shipped = (WORLD / name).read_bytes()
            assert (tmp_path / name).read_bytes() == shipped
            assert hashlib.sha256(shipped).hexdigest() in card


@pytest.mark.parametrize("split", SPLITS)
def test_sizes(split):
    passages, questions = load(WORLD, split)
    groups = [group_of(question, "hops") for question in questions]
    counts = {group: groups.count(group) for group in ("0", "1", "2", "3", "hard")}
    assert len(passages) >= 2000 and min(counts.values()) >= 100
    assert len(questions) >= (2000 if split == "train" else 400) and sum(counts.values()) == len(questions)
    assert all(len(answer.split()) >= 2 for question in questions for answer in question["golden_answers"])


def read_by_oracle(retriever, question):
    """Search for each supporting title in turn. Returns the passages shown after each search.

    The oracle may only use names that it has read: each title after the first must stand in a passage shown before.
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
def test_an_oracle_needs_exactly_the_hops(split, made, request):
    passages, questions = load(WORLD if made == "shipped" else request.getfixturevalue("other_world"), split)
    retriever = BM25(passages)
    for question in questions:
        hops, titles = question["metadata"]["hops"], question["metadata"]["supporting_titles"]
        (answer,) = question["golden_answers"]
        shown = read_by_oracle(retriever, question)
        assert len(shown) == max(hops, 1)  # a famous fact has its passage too, but needs no search
        assert any(p["title"] == titles[-1] and answer in p["text"] for p in shown[-1])
        for i, found in enumerate(shown):
            assert not {p["title"] for p in found} & set(titles[i + 1 :]), f"{question['id']}: answerable earlier"


def test_famous_facts_are_the_known_ones():
    scratch = tw.World()
    tw.add_famous(scratch)
    for split in SPLITS:
        for question in load(WORLD, split)[1]:
            if group_of(question, "hops") == "0":
                (name,) = question["metadata"]["supporting_titles"]
                assert question["golden_answers"][0] in scratch.facts[name].values()


def test_dev_names_and_questions_are_new():
    dev_names, train_names = set(tw.name_pairs("dev")), set(tw.name_pairs("train"))
    assert not dev_names & train_names
    words = re.findall(r"\w+", "".join((WORLD / name).read_text() for name in ("train.jsonl", "train_corpus.jsonl")))
    train_pairs = {" ".join(pair) for pair in zip(words, words[1:])}
    passages, questions = load(WORLD, "dev")
    scratch = tw.World()
    tw.add_famous(scratch)
    famous = {passage["title"] for passage in scratch.passages}
    names = {passage["title"].split(" of ")[-1] for passage in passages} - famous
    assert names <= dev_names and not names & train_pairs
    assert not {q["question"] for q in questions} & {q["question"] for q in load(WORLD, "train")[1]}


def test_there_are_near_namesakes():
    titles = [passage["title"] for passage in load(WORLD, "dev")[0] if " of " not in passage["title"]]
    firsts, seconds = zip(*(title.split() for title in titles))
    shared = [firsts.count(first) > 5 and seconds.count(second) > 5 for first, second in zip(firsts, seconds)]
    assert sum(shared) / len(shared) > 0.9
