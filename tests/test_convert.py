"""Converting question sets: a hand-written file of each shape, and every fault of one."""

import json
import random
import re
import sys

import pytest
from conftest import ROOT

from plumbing.data import load_corpus, load_questions
from plumbing.files import DataError
from retriever import BM25, recall

sys.path.insert(0, str(ROOT / "data"))
import convert  # noqa: E402

SAMPLE = ROOT.parent / "shared" / "data" / "hotpotqa" / "hotpot_distractor_sample60.json"

EIFFEL = ["Eiffel Tower", ["The Eiffel Tower is in Paris.", " Gustave Eiffel built it."]]
EIFFEL_MAN = ["Gustave Eiffel", ["Gustave Eiffel was born in Dijon."]]
BRIDGE = {
    "_id": "h1",
    "question": "Where was the builder of the Eiffel Tower born?",
    "answer": "Dijon",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Eiffel Tower", 1], ["Gustave Eiffel", 0], ["Eiffel Tower", 0]],
    "context": [EIFFEL, ['The "Louvre"', ["A museum."]], EIFFEL_MAN],
}
COMPARISON = {
    "_id": "h2",
    "question": "Is Dijon larger than Paris?",
    "answer": "no",
    "type": "comparison",
    "level": "medium",
    "supporting_facts": [["Dijon", 0], ["Paris", 0]],
    "context": [
        ["Dijon", ["A city."]],
        EIFFEL,
        ["Paris", ["A larger city."]],
        ["Blank", [" "]],
        ["Paris", ["Another Paris, in Texas."]],
    ],
}
HOTPOTQA = [BRIDGE, COMPARISON]

FOUR_HOPS = {
    "_id": "w1",
    "type": "bridge_comparison",
    "question": "Whose director died first, A or B?",
    "answer": "A",
    "supporting_facts": [["A", 0], ["B", 0], ["C", 1], ["C", 0]],
    "evidences": [["A", "director", "C"]],
    "context": [[title, [f"{title} is it.", "It is."]] for title in "ABCD"],
}
TWO_HOPS = {
    "_id": "w2",
    "type": "comparison",
    "question": "Which is older?",
    "answer": "E",
    "supporting_facts": [["E", 0], ["F", 0]],
    "evidences": [],
    "context": [["E", ["Old."]], ["F", ["New."]]],
}
TWO_WIKI = [FOUR_HOPS, TWO_HOPS]


def hop(number, idx):
    return {"id": number, "question": "q", "answer": "a", "paragraph_support_idx": idx}


def paragraph(idx, title, text, is_supporting=True):
    part = {"idx": idx, "title": title, "paragraph_text": text}
    return part | {"is_supporting": is_supporting}


THREE_HOPS = {
    "id": "3hop1__1_2_3",
    "question": "Q?",
    "answer": "Paris",
    "answer_aliases": ["Paris, France", "Paris"],
    "answerable": True,
    "question_decomposition": [hop(1, 2), hop(2, 0), hop(3, 3)],
    "paragraphs": [
        paragraph(0, "Second", "two"),
        paragraph(1, "None", "no", False),
        paragraph(2, "First", "one"),
        paragraph(3, "Second", "three"),
    ],
}
UNANSWERABLE = {
    "id": "3hop1__1_2_3",
    "question": "Q?",
    "answer": "Paris",
    "answer_aliases": [],
    "answerable": False,
    "question_decomposition": [],
    "paragraphs": [paragraph(0, "Other", "four", False)],
}
MUSIQUE = [THREE_HOPS, UNANSWERABLE]

NOBEL = {
    "id": "test_0",
    "question": "who got the first nobel prize?",
    "golden_answers": ["Röntgen", "W. C. Röntgen"],
}
WHAT_THEN = {
    "id": "test_1",
    "question": "what then?",
    "golden_answers": ["x"],
    "metadata": {"prop": "P1", "pop": 0},
}
FLASHRAG = [NOBEL, WHAT_THEN]
SHAPES = {"hotpotqa": HOTPOTQA, "2wiki": TWO_WIKI, "musique": MUSIQUE, "flashrag": FLASHRAG}


def text_of(name, items):
    if name in ("hotpotqa", "2wiki"):
        return json.dumps(items)
    return "".join(json.dumps(item) + "\n" for item in items)


def run(tmp_path, name, content, *options):
    """Convert one file with this content. Returns the exit code."""
    file = tmp_path / "in.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return convert.main([name, str(file), "--out", str(tmp_path / "out"), *map(str, options)])


def converted(tmp_path, name, items, *options):
    """(questions, passages) after conversion, as the project loads them."""
    assert run(tmp_path, name, text_of(name, items), *options) == 0
    corpus = tmp_path / "out_corpus.jsonl"
    return load_questions(tmp_path / "out.jsonl"), load_corpus(corpus) if corpus.exists() else None


def written(tmp_path):
    """The bytes of questions and corpus."""
    return [(tmp_path / f"out{end}.jsonl").read_bytes() for end in ("", "_corpus")]


# Shapes


def test_hotpotqa(tmp_path, capsys):
    questions, passages = converted(tmp_path, "hotpotqa", HOTPOTQA)
    metadata = {
        "hops": 2,
        "supporting_titles": ["Eiffel Tower", "Gustave Eiffel"],
        "type": "bridge",
        "level": "hard",
    }
    text = BRIDGE["question"]
    expected = {"id": "h1", "question": text, "golden_answers": ["Dijon"], "metadata": metadata}
    assert questions[0] == expected
    assert [q["id"] for q in questions] == ["h1", "h2"]
    assert questions[1]["metadata"]["hops"] == 2
    titles = ["Eiffel Tower", 'The "Louvre"', "Gustave Eiffel", "Dijon", "Paris", "Paris"]
    assert [p["title"] for p in passages] == titles
    assert [p["id"] for p in passages] == list("012345")
    assert passages[0]["text"] == "The Eiffel Tower is in Paris. Gustave Eiffel built it."
    assert "8 paragraphs: 1 repeated, 1 without text" in capsys.readouterr().out


def test_2wiki_hops_by_type_and_sentences_without_blanks(tmp_path):
    questions, passages = converted(tmp_path, "2wiki", TWO_WIKI)
    assert [q["metadata"]["hops"] for q in questions] == [4, 2]
    assert passages[0]["text"] == "A is it. It is."


def test_musique_titles_in_the_order_of_the_hops(tmp_path, capsys):
    (question,), passages = converted(tmp_path, "musique", MUSIQUE)
    assert question["golden_answers"] == ["Paris", "Paris, France"]
    metadata = {"hops": 3, "supporting_titles": ["First", "Second"], "type": "3hop1"}
    assert question["metadata"] == metadata
    assert [p["text"] for p in passages] == ["two", "no", "one", "three", "four"]
    out = capsys.readouterr().out
    assert "1 questions left out, unanswerable: " in out and "line 2" in out


def test_musique_hops_from_the_id(tmp_path):
    (question,), _ = converted(tmp_path, "musique", [without(THREE_HOPS, "question_decomposition")])
    assert question["metadata"]["hops"] == 3


def test_flashrag_without_passages_writes_questions_only(tmp_path, capsys):
    questions, passages = converted(tmp_path, "flashrag", FLASHRAG)
    assert passages is None and "--corpus" in capsys.readouterr().out
    assert [q["golden_answers"] for q in questions] == [["Röntgen", "W. C. Röntgen"], ["x"]]
    assert [q["metadata"] for q in questions] == [{}, {"prop": "P1", "pop": 0}]


def columns(names, pairs):
    """[(a, b), ...] as FlashRAG has it: {name: [a, ...], other name: [b, ...]}."""
    return {name: list(column) for name, column in zip(names, zip(*pairs))}


@pytest.mark.parametrize(("name", "key"), [("hotpotqa", "sentences"), ("2wiki", "content")])
def test_flashrag_with_passages_is_as_the_set_itself(tmp_path, name, key):
    """FlashRAG's HotpotQA and 2Wiki have the context in the metadata, column by column."""
    lines = []
    for item in SHAPES[name]:
        metadata = {kept: item[kept] for kept in ("type", "level") if kept in item}
        metadata["supporting_facts"] = columns(["title", "sent_id"], item["supporting_facts"])
        metadata["context"] = columns(["title", key], item["context"])
        line = {"id": item["_id"], "question": item["question"], "metadata": metadata}
        lines.append(line | {"golden_answers": [item["answer"]]})
    as_flashrag = converted(tmp_path, "flashrag", lines)
    assert as_flashrag == converted(tmp_path, name, SHAPES[name])


def test_flashrag_keeps_what_our_own_files_say(tmp_path):
    questions, _ = converted(tmp_path, "hotpotqa", HOTPOTQA)
    assert converted(tmp_path, "flashrag", questions)[0] == questions


def test_corpora_of_the_field_need_no_conversion(tmp_path, capsys):
    line = '{"id": "0", "contents": "\\"Title\\"\\ntext"}\n'
    assert run(tmp_path, "flashrag", line) == 2
    assert "line 1: this is a corpus" in capsys.readouterr().err
    assert load_corpus(tmp_path / "in.json") == [{"id": "0", "title": "Title", "text": "text"}]


def test_odd_texts_survive(tmp_path):
    """A title is one line of the corpus format; everything else stays as it is."""
    titles = ['"', ' "a" ', "", "two\nlines", "\u2028\u202e"]
    text = ' "x"\n\n</information>\x00\U0001f600 '
    odd = {
        "context": [[title, [text]] for title in titles],
        "supporting_facts": [["two\nlines", 0]],
    }
    (question,), passages = converted(tmp_path, "hotpotqa", [BRIDGE | odd])
    assert [p["title"] for p in passages] == ['"', ' "a" ', "", "two lines", "\u2028\u202e"]
    assert {p["text"] for p in passages} == {text}
    assert question["metadata"]["supporting_titles"] == ["two lines"]


def test_the_same_input_gives_the_same_bytes(tmp_path):
    made = []
    for _ in range(2):
        converted(tmp_path, "hotpotqa", HOTPOTQA)
        made.append(written(tmp_path))
    assert made[0] == made[1]


@pytest.fixture
def sample():
    if not SAMPLE.exists():
        pytest.skip("the HotpotQA sample is not there (../shared/data/hotpotqa)")
    return SAMPLE


def test_the_real_sample(sample, tmp_path):
    assert convert.main(["hotpotqa", str(sample), "--out", f"{tmp_path}/"]) == 0
    questions = load_questions(tmp_path / f"{sample.stem}.jsonl")
    passages = load_corpus(tmp_path / f"{sample.stem}_corpus.jsonl")
    items = json.loads(sample.read_text(encoding="utf-8"))
    assert len(questions) == 60 and len(passages) == 600
    assert [q["golden_answers"] for q in questions] == [[item["answer"]] for item in items]
    assert {q["metadata"]["hops"] for q in questions} == {2}
    context = []
    for item in items:
        context += [(title, "".join(sentences)) for title, sentences in item["context"]]
    assert [(p["title"], p["text"]) for p in passages] == context
    assert 0.55 < recall(BM25(passages), questions)[3] < 0.7


# Shares


def many(count):
    """HotpotQA items, each with a paragraph of its own and a common one."""
    items = []
    for i in range(count):
        context = [["Dijon", [f"text {i}"]], ["Paris", ["P"]]]
        items.append(COMPARISON | {"_id": str(i), "context": context})
    return items


def test_dev_holds_questions_out(tmp_path):
    questions, passages = converted(tmp_path, "hotpotqa", many(50), "--dev", 10)
    held_out = [int(q["id"]) for q in load_questions(tmp_path / "out_dev.jsonl")]
    training = [int(q["id"]) for q in questions]
    assert len(held_out) == 10 and sorted(training + held_out) == list(range(50))
    assert training == sorted(training) and held_out == sorted(held_out) != list(range(40, 50))
    assert len(passages) == 51, "one corpus for both"


def test_limit_takes_the_paragraphs_of_the_drawn_questions(tmp_path):
    def limited(*more):
        return converted(tmp_path, "hotpotqa", many(50), "--limit", 12, "--dev", 4, *more)

    questions, passages = limited()
    drawn = [q["id"] for q in questions + load_questions(tmp_path / "out_dev.jsonl")]
    assert len(questions) == 8 and len(drawn) == 12
    assert {p["text"] for p in passages} == {f"text {i}" for i in drawn} | {"P"}
    assert limited()[0] == questions
    assert limited("--seed", 1)[0] != questions


def test_several_files_become_one(tmp_path):
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, item in zip(paths, HOTPOTQA):
        path.write_text(json.dumps([item]))
    assert convert.main(["hotpotqa", *map(str, paths), "--out", f"{tmp_path}/out"]) == 0
    from_two = written(tmp_path)
    converted(tmp_path, "hotpotqa", HOTPOTQA)
    assert from_two == written(tmp_path)


# Faults


def without(item, key):
    return {name: value for name, value in item.items() if name != key}


ARRAY, LINES = text_of("hotpotqa", HOTPOTQA), text_of("musique", MUSIQUE)
NO_ANSWER = text_of("flashrag", [NOBEL | {"golden_answers": ["", "?"]}])
NO_ANSWER_LINE = "no questions in it; 1 questions left out, without an answer that .*: .*line 1"
BAD_FILES = {
    "empty": ("hotpotqa", "", ": .*not valid JSON"),
    "no questions": ("hotpotqa", "[]", "no questions"),
    "no lines": ("musique", "\n\n", "no questions"),
    "cut short": ("hotpotqa", ARRAY[:-9], "line 1: not valid JSON"),
    "line cut short": ("musique", LINES[:-9], "line 2: not valid JSON"),
    "not JSON": ("hotpotqa", "<html>", "line 1: not valid JSON"),
    "JSONL as JSON": ("hotpotqa", LINES, "JSON array of questions is expected here, not objects"),
    "JSON as JSONL": ("musique", ARRAY, "one JSON object a line"),
    "indented JSON": ("flashrag", json.dumps(FLASHRAG, indent=1), "one JSON object a line"),
    "a string": ("2wiki", '"x"', "JSON array of questions is expected, got str"),
    "item a list": ("2wiki", "[[]]", "item 1: an object is expected, got list"),
    "UTF-16": ("hotpotqa", ARRAY.encode("utf-16"), "utf-8"),
    "deep": ("hotpotqa", "[" * 100_000, "in.json"),
    "surrogate": ("hotpotqa", ARRAY.replace("Dijon", "\\ud800"), "item 1: .*surrogates"),
    "MuSiQue as FlashRAG": ("flashrag", LINES, 'line 1: "golden_answers" is missing'),
    "id twice": (
        "flashrag",
        text_of("flashrag", FLASHRAG * 2),
        "line 3: id 'test_0' was used before .*line 1",
    ),
    "no answer at all": ("flashrag", NO_ANSWER, f"there are {NO_ANSWER_LINE}"),
}
MISSING = [
    ("2wiki", "_id", 'item 1: "_id" is missing'),
    ("2wiki", "answer", 'item 1: "answer" is missing'),  # the public test set
    ("musique", "question", 'line 1: "question" is missing'),
]
BAD_FIELDS = [
    ("flashrag", "question", " ", 'line 1: "question" is empty'),
    ("flashrag", "id", None, 'line 1: "id" must be a string'),
    ("flashrag", "golden_answers", [1], 'line 1: "golden_answers" must be a'),
    ("flashrag", "metadata", [], 'line 1: "metadata" must be an object'),
    ("hotpotqa", "answer", 5, 'item 1: "answer" must be a string, not int'),
    ("hotpotqa", "context", "x", 'item 1: "context" must be a list'),
    ("hotpotqa", "context", ["x"], 'item 1: "context" must be a list of'),
    ("2wiki", "context", [["A", "x"]], 'item 1: "context" must be a list of'),
    ("2wiki", "context", [["A", [None]]], 'item 1: "context" must be a list of'),
    ("hotpotqa", "supporting_facts", ["ab"], 'item 1: "supporting_facts" must be'),
    ("musique", "answer_aliases", "x", 'line 1: "answer_aliases" must be a list'),
    ("musique", "answerable", "yes", 'line 1: "answerable" must be true or'),
    ("musique", "paragraphs", None, 'line 1: "paragraphs" must be a list'),
    ("musique", "paragraphs", [{}], 'line 1: "title" is missing'),
]


def check_refusal(tmp_path, capsys, name, content, message):
    """One line that names the file and says what is wrong; nothing is written."""
    assert run(tmp_path, name, content) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"convert.py: {tmp_path / 'in.json'}")
    assert captured.err.count("\n") == 1 and not captured.out
    assert len(captured.err) < len(str(tmp_path)) * 2 + 300
    assert re.search(message, captured.err)
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_unusable_file(tmp_path, capsys, name, content, message):
    check_refusal(tmp_path, capsys, name, content, message)


@pytest.mark.parametrize(("name", "key", "message"), MISSING)
def test_missing_field(tmp_path, capsys, name, key, message):
    content = text_of(name, [without(SHAPES[name][0], key)])
    check_refusal(tmp_path, capsys, name, content, message)


@pytest.mark.parametrize(("name", "key", "value", "message"), BAD_FIELDS)
def test_unusable_field(tmp_path, capsys, name, key, value, message):
    first, *rest = SHAPES[name]
    content = text_of(name, [first | {key: value}, *rest])
    check_refusal(tmp_path, capsys, name, content, message)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_wrong_path(tmp_path, capsys, name):
    for set_name in ("hotpotqa", "musique"):
        assert convert.main([set_name, str(tmp_path / name), "--out", f"{tmp_path}/out"]) == 2
        assert "cannot be read" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHAPES)
def test_bom_is_fine(tmp_path, name):
    assert run(tmp_path, name, b"\xef\xbb\xbf" + text_of(name, SHAPES[name]).encode()) == 0


def test_question_that_cannot_be_scored_is_left_out_and_named(tmp_path, capsys):
    items = [BRIDGE | {"answer": "!!!"}, COMPARISON]
    questions, passages = converted(tmp_path, "hotpotqa", items)
    assert [q["id"] for q in questions] == ["h2"]
    assert 'The "Louvre"' in {p["title"] for p in passages}
    out = capsys.readouterr().out
    assert "1 questions left out, without an answer that could be scored: " in out
    assert "in.json, item 1" in out


def test_supporting_titles_without_a_paragraph_are_counted(tmp_path, capsys):
    converted(tmp_path, "hotpotqa", [BRIDGE | {"context": [EIFFEL]}, COMPARISON])
    assert "1 questions have a supporting title that no paragraph has" in capsys.readouterr().out


def test_id_in_two_files(tmp_path, capsys):
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    for name in "ab":
        (tmp_path / name).write_text(text_of("flashrag", FLASHRAG))
    assert convert.main(["flashrag", *paths, "--out", f"{tmp_path}/out"]) == 2
    err = capsys.readouterr().err
    assert "b, line 1: id 'test_0' was used before" in err and "one by one" in err


SCALARS = [None, 0, True, 1.5, "", "x"]
CONTAINERS = [[], ["x"], {}, {"title": ["x"]}, [[]], [["x", ["y"]]], [{}]]


def mutate(value, rng):
    """Put anything in a random place of a value, often deep inside."""
    if isinstance(value, (list, dict)) and value and rng.random() < 0.8:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value[key] = mutate(value[key], rng)
        return value
    return rng.choice(SCALARS + CONTAINERS)


def test_mutated_files_raise_nothing_but_data_error(tmp_path):
    rng, path, good = random.Random(0), tmp_path / "f", 0
    for i in range(500):
        name = list(SHAPES)[i % 4]
        items = json.loads(json.dumps(SHAPES[name]))
        if rng.random() < 0.9:
            if rng.random() < 0.5:
                mutate(items[0], rng)
            else:
                items.append(rng.choice(SCALARS + CONTAINERS))
        path.write_text(text_of(name, items), encoding="utf-8")
        try:
            questions, _, passages, _ = convert.convert(name, [path])
        except DataError as error:
            assert str(error).startswith(str(path))
            continue
        good += 1
        convert.write_all({tmp_path / "q": questions, tmp_path / "c": passages})
        load_questions(tmp_path / "q")
        assert not passages or load_corpus(tmp_path / "c")
    assert 50 < good < 450


def test_failed_write_leaves_the_old_files(tmp_path, monkeypatch, capsys):
    def contents():
        return {path.name: path.read_bytes() for path in tmp_path.glob("out*")}

    def full(*args):
        raise OSError(28, "No space left on device")

    converted(tmp_path, "hotpotqa", HOTPOTQA)
    before = contents()
    monkeypatch.setattr(convert.os, "replace", full)
    assert run(tmp_path, "hotpotqa", text_of("hotpotqa", HOTPOTQA[1:])) == 2
    assert contents() == before and len(list(tmp_path.iterdir())) == len(before) + 1
    assert "No space left" in capsys.readouterr().err


def test_the_input_is_never_overwritten(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text(text_of("flashrag", FLASHRAG))
    before = file.read_bytes()
    assert convert.main(["flashrag", str(file), "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err and file.read_bytes() == before


WRONG_OPTIONS = [
    "hotpotqa",
    "squad f",
    "2wiki f --download",
    "musique --download test",
    "2wiki f --limit 0",
    "2wiki f --dev -1",
    "2wiki f --dev x",
]


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_options(options, capsys):
    with pytest.raises(SystemExit) as caught:
        convert.main(options.split())
    assert caught.value.code == 2 and "error: " in capsys.readouterr().err


def test_dev_must_leave_something(tmp_path, capsys):
    assert run(tmp_path, "hotpotqa", ARRAY, "--dev", 2) == 2
    assert "--dev 2: there are 2 questions" in capsys.readouterr().err
