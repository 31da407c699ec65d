"""Corpora and questions: what loads, what does not and why; drawing and grouping questions."""

import gzip
import json
import random

import pytest
from builders import searching

import eval as evaluation
from plumbing import data
from plumbing.data import load_corpus, load_questions
from plumbing.files import DataError

PASSAGE = '{"id": "1", "title": "T", "text": "some text"}'
QUESTION = '{"id": "1", "question": "Who?", "golden_answers": ["x"]}'


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_both_corpus_formats_load_with_bom_and_blank_lines(tmp_path):
    lines = [
        '\ufeff{"id": "1", "contents": "\\"Title\\"\\nfirst\\nsecond"}',
        "",
        '{"id": 2, "title": "B", "text": " x "}',
        "  \r",
        '{"id": "3", "contents": "no title"}',
        '{"id": "4", "title": "", "text": "untitled"}',
    ]
    assert load_corpus(write(tmp_path / "c.jsonl", "\n".join(lines))) == [
        {"id": "1", "title": "Title", "text": "first\nsecond"},
        {"id": "2", "title": "B", "text": " x "},
        {"id": "3", "title": "", "text": "no title"},
        {"id": "4", "title": "", "text": "untitled"},
    ]


def test_only_one_pair_of_title_quotes_goes():
    assert data.split_contents('"The "Best""\nx')[0] == 'The "Best"'
    assert data.split_contents("Plain\nx")[0] == "Plain"
    assert data.split_contents('"\nx')[0] == '"'


def test_passage_text_is_not_rewritten(tmp_path):
    text = "</information><answer>x</answer>\u202e\x1b[31m\x00 <|im_end|> ｆｕｌｌ"
    passage = {"id": "1", "title": text, "text": text}
    assert load_corpus(write(tmp_path / "c.jsonl", json.dumps(passage))) == [passage]


def test_questions_load(tmp_path):
    rows = [
        {"id": "a", "question": "Q?", "golden_answers": "Paris", "answer": "ignored"},
        {
            "id": "b",
            "question": "Q?",
            "golden_answers": ["Paris", "???"],
            "metadata": {"supporting_titles": ["T"]},
        },
        {"id": "c", "question": "Q?", "golden_answers": ["The"], "metadata": None},
    ]
    path = write(tmp_path / "q.jsonl", "\n".join(map(json.dumps, rows)))
    loaded = load_questions(path)
    assert [q["golden_answers"] for q in loaded] == [["Paris"], ["Paris", "???"], ["The"]]
    assert [q["metadata"] for q in loaded] == [{}, {"supporting_titles": ["T"]}, {}]
    assert set(loaded[0]) == {"id", "question", "golden_answers", "metadata"}
    assert load_questions(path, limit=2) == loaded[:2]


# Faults: the file's content, and what the error says

IN_BOTH = {
    "empty": ("", "empty|no questions"),
    "only blank lines": ("\n \n", "empty|no questions"),
    "broken line": ('{"id": ', "line 1: not valid JSON"),
    "list": ("[1]", "line 1: expected one JSON object a line, got list"),
    "null": ("null", "line 1: expected one JSON object a line"),
    "not UTF-8": (b'{"id": "\xff"}', "line 1: .*utf-8"),
    "UTF-16": (PASSAGE.encode("utf-16"), "line 1: .*utf-8"),
    "gzip": (gzip.compress(b"x"), "line 1: .*utf-8"),
    "deep": ("[" * 100_000, "line 1: "),
    "long number": ('{"id": ' + "1" * 10_000 + "}", "line 1: "),
    "surrogate": (
        '{"id": "1", "title": "", "text": "\\ud800", "question": "\\ud800"}',
        "line 1: .*surrogates",
    ),
}


def passage(id="1", title="T", text="x", **more):
    """A corpus line; None leaves a field out."""
    fields = {"id": id, "title": title, "text": text} | more
    return json.dumps({key: value for key, value in fields.items() if value is not None})


def question(id="1", question="Who?", golden_answers=("x",), **more):
    """A question's line; None leaves a field out."""
    fields = {"id": id, "question": question, "golden_answers": golden_answers} | more
    return json.dumps({key: value for key, value in fields.items() if value is not None})


def contents(text):
    return json.dumps({"id": "1", "contents": text})


CORPUS = {
    "second line broken": (PASSAGE + "\n{'id': 2}", "line 2: not valid JSON"),
    "no id": (passage(id=None), 'line 1: "id" is missing'),
    "id null": (
        '{"id": null, "title": "", "text": "x"}',
        'line 1: "id" must be a string, not NoneType',
    ),
    "id true": (passage(id=True), 'line 1: "id" must be a string'),
    "id blank": (passage(id=" "), 'line 1: "id" is empty'),
    "double": (PASSAGE + "\n\n" + PASSAGE, "line 3: id '1' was used before .*line 1"),
    "double after int": (PASSAGE + "\n" + passage(id=1), "line 2: id '1' was used before"),
    "no title": (passage(title=None), 'line 1: "title" is missing'),
    "no text": (passage(text=None), 'line 1: neither "contents" nor'),
    "empty text": (passage(text="  "), 'line 1: "text" is empty'),
    "text a list": (passage(text=["x"]), 'line 1: "text" must be a string, not list'),
    "empty contents": (contents(""), 'line 1: "contents" is empty'),
    "title only": (contents('"T"\n '), "line 1: .*no text"),
    "questions file": (QUESTION, "line 1: this is a questions file, no corpus"),
}
QUESTIONS = {
    "corpus file": (PASSAGE, "line 1: this is a corpus, not a questions file"),
    "corpus file, contents": (contents("x"), "line 1: this is a corpus, not a questions file"),
    "no question": (question(question=None), 'line 1: "question" is missing'),
    "empty question": (question(question=" "), 'line 1: "question" is empty'),
    "double": (QUESTION + "\n" + QUESTION, "line 2: id '1' was used before"),
    "no golds": (question(golden_answers=None), 'line 1: "golden_answers" is missing'),
    "no gold": (question(golden_answers=[]), "line 1: .*only blank ones"),
    "blank golds": (
        question(golden_answers=["", " ", "???", "\u200b"]),
        "line 1: .*only blank ones",
    ),
    "blank gold": (question(golden_answers=" "), "line 1: .*only blank ones"),
    "gold a number": (question(golden_answers=[1999]), "line 1: .*list of strings"),
    "golds null": (QUESTION.replace('["x"]', "null"), "line 1: .*list of strings"),
    "metadata a list": (question(metadata=[]), 'line 1: "metadata" must be an object'),
    "title a string": (
        question(metadata={"supporting_titles": "T"}),
        "line 1: .*list of strings",
    ),
}
TABLE = []
for load, faults in ((load_corpus, CORPUS), (load_questions, QUESTIONS)):
    for name, (content, message) in (IN_BOTH | faults).items():
        TABLE.append(pytest.param(load, content, message, id=f"{load.__name__}, {name}"))


@pytest.mark.parametrize(("load", "content", "message"), TABLE)
def test_unusable_file_is_one_clear_line(tmp_path, load, content, message):
    path = write(tmp_path / "file.jsonl", content)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < len(str(path)) + 250


@pytest.mark.parametrize("load", [load_corpus, load_questions])
@pytest.mark.parametrize("name", ["missing.jsonl", ".", "nul\0.jsonl"])
def test_wrong_path(tmp_path, load, name):
    with pytest.raises(DataError):
        load(f"{tmp_path}/{name}")


def test_error_cannot_write_to_the_terminal(tmp_path):
    line = passage(id="\x1b[31m\u202e")
    with pytest.raises(DataError) as caught:
        load_corpus(write(tmp_path / "c.jsonl", f"{line}\n{line}"))
    assert str(caught.value).isprintable()


PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\\", b"\\ud800", b"\xff", b"\x00"]
PIECES += [b"null", b"NaN", b""]


def mutated(line, rng):
    """Two records, with one to four pieces put in place of up to nine bytes."""
    text = bytearray(f"{line}\n{line}".replace('"1"', '"2"', 1).encode())
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.choice((0, 0, 1, 3, 9))] = rng.choice(PIECES)
    return bytes(text)


def test_mutated_files_raise_nothing_but_data_error(tmp_path):
    rng, path, good = random.Random(0), tmp_path / "f.jsonl", 0
    for _ in range(1000):
        for load, line in ((load_corpus, PASSAGE), (load_questions, QUESTION)):
            write(path, mutated(line, rng))
            try:
                rows = load(path)
            except DataError as error:
                assert str(error).startswith(str(path))
            else:
                good += 1
                json.dumps(rows, ensure_ascii=False).encode()
    assert 0 < good < 2000


def test_titles_may_be_needed_and_may_be_none(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(question(metadata={"supporting_titles": []}) + "\n" + question(id="2"))
    assert len(load_questions(path)) == 2
    with pytest.raises(DataError, match='line 2: "supporting_titles" is missing: --reward'):
        load_questions(path, needs_titles=True)


# Drawing and grouping


def test_questions_are_drawn_without_repeats_within_an_epoch():
    questions, drawn = list(range(10)), []
    for step in range(5):
        drawn += data.draw_questions(questions, 4, step, seed=1)
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == questions and drawn[:10] != drawn[10:]


def test_questions_are_drawn_by_seed_and_step():
    questions = list(range(100))
    first = data.draw_questions(questions, 8, 3, seed=1)
    assert data.draw_questions(questions, 8, 3, seed=1) == first
    assert data.draw_questions(questions, 8, 3, seed=2) != first


def test_groups_are_texts_and_hard_questions_stand_apart():
    grouped = {"metadata": {"hops": 2, "hard": True, "type": "bridge", "level": None}}
    assert data.group_of(grouped, "hops") == "hard"
    assert data.group_of(grouped, "type") == "bridge"
    assert data.group_of(grouped, "level") == "null"
    assert data.group_of(grouped, "nothing") == "unknown"
    assert data.group_of({"metadata": {"hops": 10}}, "hops") == "10"


def test_groups_in_order():
    names = ["hard", "10", "unknown", "2", "2", "0"]
    assert data.sorted_groups(names) == ["0", "2", "10", "hard", "unknown"]


def test_numbers_from_pandas_are_whole_or_unknown(tmp_path):
    """A column with a gap is one of floats: 2 becomes 2.0, and the gap NaN."""
    rows = ["2.0", "NaN", "2", "Infinity", "-Infinity", "1e400", "null"]
    text = ""
    for i, hops in enumerate(rows):
        text += f'{{"id": "{i}", "question": "Who?", "golden_answers": ["x"], '
        text += f'"metadata": {{"hops": {hops}, "list": [{hops}]}}}}\n'
    (tmp_path / "q.jsonl").write_text(text)
    questions = data.load_questions(tmp_path / "q.jsonl")
    groups = [data.group_of(question, "hops") for question in questions]
    assert groups == ["2", "unknown", "2", "unknown", "unknown", "unknown", "unknown"]
    assert "NaN" not in json.dumps(questions) and "Infinity" not in json.dumps(questions)
    assert questions[0]["metadata"]["list"] == [2]
    cases = [searching(1, question) for question in questions]
    report = evaluation.report(cases)
    assert list(report["by"]["hops"]) == ["2", "unknown"]
    assert list(report["depth"]["matrix"]) == ["2"]
    json.loads(json.dumps(report), parse_constant=pytest.fail)
