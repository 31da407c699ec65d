"""Converting question sets: a hand-written file of each shape, and every fault of one."""

import json
import os
import random
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from plumbing import files
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


TEXT = "paragraph_text"


def paragraph(idx, title, text, is_supporting=True):
    part = {"idx": idx, "title": title, TEXT: text}
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


def supported(number, idx, title, text, **more):
    """A step of FlashRAG's MuSiQue: the hop with its paragraph."""
    return hop(number, idx) | {"support_paragraph": paragraph(idx, title, text) | more}


GREEN_STEPS = [
    supported(460946, 10, "Green", "Green is an album by Steve Hillage."),
    supported(294723, 5, "Miquette", "Miquette is married to Steve Hillage."),
]
GREEN = {
    "id": "dev_0",
    "question": "Who is the spouse of the Green performer?",
    "golden_answers": ["Miquette Giraudy", "Miquette"],
    "metadata": {"answerable": True, "question_decomposition": GREEN_STEPS},
}


def with_steps(steps, **metadata):
    return GREEN | {"metadata": {"question_decomposition": steps} | metadata}


def main(arguments):
    """The exit code of `python data/convert.py` with these arguments."""
    try:
        files.run_script("convert.py", lambda: convert.main(arguments))
    except SystemExit as leave:
        return leave.code
    return 0


def text_of(name, items):
    if name in ("hotpotqa", "2wiki"):
        return json.dumps(items)
    return "".join(json.dumps(item) + "\n" for item in items)


def run(tmp_path, name, content, *options):
    """Convert one file with this content. Returns the exit code."""
    file = tmp_path / "in.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return main([name, str(file), "--out", str(tmp_path / "out"), *map(str, options)])


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


def test_flashrag_musique_brings_its_supporting_paragraphs(tmp_path, capsys):
    (question,), passages = converted(tmp_path, "flashrag", [GREEN])
    assert question["metadata"]["supporting_titles"] == ["Green", "Miquette"]
    assert question["metadata"]["hops"] == 2
    assert question["golden_answers"] == GREEN["golden_answers"]
    texts = [step["support_paragraph"]["paragraph_text"] for step in GREEN_STEPS]
    assert [(p["title"], p["text"]) for p in passages] == list(zip(["Green", "Miquette"], texts))
    out = capsys.readouterr().out
    assert "2 paragraphs: 0 repeated, 0 without text" in out and "supporting title" not in out


def test_flashrag_musique_keeps_all_metadata_but_the_paragraphs(tmp_path):
    (question,), _ = converted(tmp_path, "flashrag", [GREEN])
    kept = []
    for step in GREEN_STEPS:
        kept.append(step | {"support_paragraph": without(step["support_paragraph"], TEXT)})
    expected = {"answerable": True, "question_decomposition": kept}
    expected |= {"hops": 2, "supporting_titles": ["Green", "Miquette"]}
    assert question["metadata"] == expected
    assert converted(tmp_path, "flashrag", [question])[0] == [question], "a second time"


def test_flashrag_musique_titles(tmp_path):
    """In the order of the hops, each once, on one line, without a paragraph that supports none."""
    steps = [
        supported(1, 7, "Two\nlines", "a"),
        supported(2, 3, "B", "b", is_supporting=False),
        supported(3, 2.0, "A", "c"),
        supported(4, 1, "Two lines", "d"),
        supported(5, 7, "Two\nlines", "a"),
    ]
    (question,), passages = converted(tmp_path, "flashrag", [with_steps(steps)])
    assert question["metadata"]["supporting_titles"] == ["Two lines", "A"]
    assert question["metadata"]["hops"] == 5
    titles = [(p["title"], p["text"]) for p in passages]
    assert titles == [("Two lines", "a"), ("B", "b"), ("A", "c"), ("Two lines", "d")]


def test_flashrag_musique_titles_that_are_given_stay(tmp_path):
    item = with_steps(GREEN_STEPS, supporting_titles=["Other\none", "Green"], hops=4)
    (question,), passages = converted(tmp_path, "flashrag", [item])
    assert question["metadata"]["supporting_titles"] == ["Other one", "Green"]
    assert question["metadata"]["hops"] == 4 and len(passages) == 2
    for nothing in ([], None):
        item = with_steps(GREEN_STEPS, supporting_titles=nothing, hops=None)
        (question,), _ = converted(tmp_path, "flashrag", [item])
        assert question["metadata"]["supporting_titles"] == ["Green", "Miquette"]
        assert question["metadata"]["hops"] == 2


NO_PARAGRAPH = [
    None,
    "x",
    [],
    {},
    hop(1, 2),
    hop(1, None) | {"support_paragraph": None},
    hop(1, 2) | {"support_paragraph": "Green"},
    hop(1, 2) | {"support_paragraph": [paragraph(2, "Green", "text")]},
    hop(1, 2) | {"support_paragraph": {}},
    hop(1, 2) | {"support_paragraph": paragraph(2, None, "text")},
    hop(1, 2) | {"support_paragraph": paragraph(2, 1984, "text")},
]


@pytest.mark.parametrize("step", NO_PARAGRAPH)
def test_flashrag_musique_step_without_a_paragraph_brings_none(tmp_path, step):
    item = with_steps([step, GREEN_STEPS[0]])
    (question,), passages = converted(tmp_path, "flashrag", [item])
    assert question["metadata"]["supporting_titles"] == ["Green"]
    assert question["metadata"]["hops"] == 2 and len(passages) == 1
    assert question["metadata"]["question_decomposition"][0] == step


@pytest.mark.parametrize("text", [None, 5, ["text"]])
def test_flashrag_musique_paragraph_without_text_still_has_a_title(tmp_path, capsys, text):
    steps = [supported(1, 2, "Green", text), GREEN_STEPS[1]]
    (question,), passages = converted(tmp_path, "flashrag", [with_steps(steps)])
    assert question["metadata"]["supporting_titles"] == ["Green", "Miquette"]
    assert [p["title"] for p in passages] == ["Miquette"]
    assert "1 questions have a supporting title that no paragraph has" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["x", 2, True, {"support_paragraph": [GREEN_STEPS[0]]}])
def test_flashrag_decomposition_that_is_no_list_is_only_kept(tmp_path, steps):
    (question,), passages = converted(tmp_path, "flashrag", [with_steps(steps)])
    assert question["metadata"] == {"question_decomposition": steps} and passages is None


def test_flashrag_unanswerable_is_left_out(tmp_path, capsys):
    in_metadata = GREEN | {"id": "dev_1", "metadata": {"answerable": False}}
    nobody = {"id": 2, "question": "Who?", "golden_answers": None, "answerable": False}
    unknown = with_steps(GREEN_STEPS, answerable=None)
    questions, passages = converted(tmp_path, "flashrag", [in_metadata, nobody, unknown])
    assert [q["id"] for q in questions] == ["dev_0"] and len(passages) == 2
    out = capsys.readouterr().out
    assert "2 questions left out, unanswerable: " in out and "in.json, line 1, ..." in out
    # As in `convert.py musique`, its paragraphs are part of the corpus
    unanswerable = with_steps(GREEN_STEPS, answerable=False)
    _, passages = converted(tmp_path, "flashrag", [NOBEL, unanswerable])
    assert len(passages) == 2


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
    assert main(["hotpotqa", str(sample), "--out", f"{tmp_path}/"]) == 0
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
    assert main(["hotpotqa", *map(str, paths), "--out", f"{tmp_path}/out"]) == 0
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
        assert main([set_name, str(tmp_path / name), "--out", f"{tmp_path}/out"]) == 2
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


@pytest.mark.parametrize("name", ["hotpotqa", "flashrag"])
def test_supporting_title_whose_only_paragraph_is_blank_is_counted(tmp_path, capsys, name):
    blank = BRIDGE | {"context": [EIFFEL, ["Gustave Eiffel", [" ", "\n"]]]}
    if name == "flashrag":
        blank = with_steps([supported(1, 2, "Green", " \n"), GREEN_STEPS[1]])
    converted(tmp_path, name, [blank])
    out = capsys.readouterr().out
    assert "2 paragraphs: 0 repeated, 1 without text" in out
    assert "1 questions have a supporting title that no paragraph has" in out


def test_supporting_title_with_a_second_paragraph_that_is_not_blank(tmp_path, capsys):
    context = [*BRIDGE["context"], ["Gustave Eiffel", [" "]]]
    converted(tmp_path, "hotpotqa", [BRIDGE | {"context": context}])
    assert "supporting title" not in capsys.readouterr().out


# What pandas writes

NUMBERS = '"pop": 12.0, "score": NaN, "low": -Infinity, "huge": 1e999, "share": 0.5, "list": [NaN]'


def metadata_of(tmp_path):
    """The metadata of the one question. No file may have NaN, Infinity, or 2.0 for 2."""
    for content in map(bytes.decode, written(tmp_path)):
        assert not re.search(r"NaN|Infinity|\d\.0\b", content)
    (question,) = load_questions(tmp_path / "out.jsonl")
    return question["metadata"]


def test_pandas_numbers_in_lines(tmp_path):
    text = text_of("flashrag", [GREEN]).replace('"answerable": true', NUMBERS)
    assert run(tmp_path, "flashrag", text.replace('_idx": 10,', '_idx": 10.0,')) == 0
    metadata = metadata_of(tmp_path)
    numbers = {"pop": 12, "share": 0.5, "list": [None], "hops": 2}
    assert metadata.keys() == {"question_decomposition", "supporting_titles", *numbers}
    assert metadata == metadata | numbers


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki"])
def test_pandas_numbers_in_an_array(tmp_path, name):
    text = text_of(name, [SHAPES[name][0] | {"_id": "ID", "type": "TYPE", "level": "LEVEL"}])
    text = text.replace('"ID"', "7.0").replace('"TYPE"', "NaN").replace('"LEVEL"', "2.0")
    assert run(tmp_path, name, text) == 0
    metadata = metadata_of(tmp_path)
    assert metadata["level"] == 2 and "type" not in metadata


def test_pandas_numbers_as_paragraph_ids(tmp_path):
    """A column of whole numbers, one of them missing, becomes one of floats."""
    text = re.sub(r'("paragraph_support_idx": \d+)', r"\1.0", json.dumps(THREE_HOPS))
    assert run(tmp_path, "musique", text) == 0
    (question,) = load_questions(tmp_path / "out.jsonl")
    assert question["metadata"]["supporting_titles"] == ["First", "Second"]


def test_number_that_is_none_cannot_be_an_answer(tmp_path, capsys):
    content = json.dumps([BRIDGE]).replace('"Dijon"', "NaN")
    message = 'item 1: "answer" must be a string, not NoneType'
    check_refusal(tmp_path, capsys, "hotpotqa", content, message)


def test_id_in_two_files(tmp_path, capsys):
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    for name in "ab":
        (tmp_path / name).write_text(text_of("flashrag", FLASHRAG))
    assert main(["flashrag", *paths, "--out", f"{tmp_path}/out"]) == 2
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
    shapes = [*SHAPES.items(), ("flashrag", [GREEN])]
    for i in range(600):
        name, items = json.loads(json.dumps(shapes[i % len(shapes)]))
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
    assert 50 < good < 550


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
    assert main(["flashrag", str(file), "--out", str(tmp_path)]) == 2
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
    assert main(options.split()) == 2 and "error: " in capsys.readouterr().err


def test_dev_must_leave_something(tmp_path, capsys):
    assert run(tmp_path, "hotpotqa", ARRAY, "--dev", 2) == 2
    assert "--dev 2: there are 2 questions" in capsys.readouterr().err


# The command line


def start(*command, cwd=None, **environment):
    """Run `python`, as in a shell; returns the completed process."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    given |= {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=given, capture_output=True, timeout=60
    )


DATA = ROOT / "data"
RUN = "import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({!r}, run_name='__main__')"


@pytest.mark.parametrize("name", ["convert", "download"])
def test_help_needs_no_package_and_no_folder(tmp_path, name):
    script = DATA / f"{name}.py"
    without_packages = ["-S"]
    calls = [
        start(*without_packages, script, "--help", cwd=tmp_path, PYTHONIOENCODING="ascii"),
        start(*without_packages, script.name, "--help", cwd=DATA),
        start(*without_packages, "-c", RUN.format(str(script)), cwd=tmp_path),
    ]
    for call in calls:
        assert call.returncode == 0 and call.stderr == b"" and b"convert.py" in call.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_lacks_a_letter(tmp_path, encoding):
    """What cannot be printed is a question mark; in the files all is as it was."""
    folder = tmp_path / "\u6771"
    folder.mkdir()
    file = folder / "\u6771.jsonl"
    items = [NOBEL | {"question": "\u6771?"}, WHAT_THEN | {"golden_answers": ["?"]}]
    file.write_text(text_of("flashrag", items), encoding="utf-8")
    command = [DATA / "convert.py", "flashrag", file, "--out", f"{folder}/out/"]
    call = start(*command, PYTHONIOENCODING=encoding)
    assert call.returncode == 0 and call.stderr == b""
    assert b"1 questions (hops: 1 of ?)" in call.stdout and b"?.jsonl, line 2" in call.stdout
    (question,) = load_questions(folder / "out" / "\u6771.jsonl")
    assert question["question"] == "\u6771?"
    file.write_text(text_of("flashrag", items[:1] * 2), encoding="utf-8")
    call = start(*command, PYTHONIOENCODING=encoding)
    assert call.returncode == 2 and call.stderr.count(b"\n") == 1
    assert call.stderr.startswith(b"convert.py: ") and b"was used before" in call.stderr


@pytest.mark.parametrize("options", [["f"], ["--download"]])
def test_stopped(tmp_path, monkeypatch, capsys, options):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "download", stop)
    monkeypatch.setattr(convert, "load", stop)
    assert main(["hotpotqa", *options, "--out", str(tmp_path)]) == 130
    err = capsys.readouterr().err
    assert err == "\nconvert.py: stopped; a download goes on when the same command is run again\n"
