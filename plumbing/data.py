"""Corpora and questions: reading them from JSONL, drawing a step's questions, grouping them."""

import json
import random
from pathlib import Path
from typing import NamedTuple

import reward
from plumbing.files import check, locate, read_jsonl

SETS = ("hotpotqa", "2wiki", "musique", "flashrag")  # folders that data/convert.py fills


class Task(NamedTuple):
    """Questions and where to search for their answers: to train on, or held out."""

    questions: list  # of {"id", "question", "golden_answers", "metadata"}
    retriever: object  # anything with `search(queries, k)`


def text_of(record, key, where, may_be_blank=False):
    """The string under `key`; an error where it is missing, no string, or blank."""
    check(key in record, where, f'"{key}" is missing')
    value = record[key]
    check(isinstance(value, str), where, f'"{key}" must be a string, not {type(value).__name__}')
    check(may_be_blank or value.strip(), where, f'"{key}" is empty')
    return value


def new_id(record, where, seen):
    """The id as a string (a whole number will do), noted in `seen`; an error if it is there."""
    number = record.get("id")
    name = str(number) if type(number) is int else text_of(record, "id", where)
    check(name not in seen, where, f"id {name[:60]!r} was used before ({seen.get(name)})")
    seen[name] = where
    return name


def split_contents(contents):
    """Title and text of `contents`: the first line is the title; a single line is all text."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents
    title = title.strip()
    quoted = len(title) > 1 and title[0] == title[-1] == '"'
    return title[1:-1] if quoted else title, text


def load_corpus(path):
    r"""Passages of a JSONL corpus in file order: list of {"id", "title", "text"}, as they stand.
    A line is {"id", "contents": "\"Title\"\ntext"} (as FlashRAG has it) or {"id", "title", "text"}.
    Raises DataError (file and line) for what is malformed, missing, blank or double."""
    passages, seen = [], {}
    for where, record in read_jsonl(path):
        is_corpus = "text" in record or "contents" in record
        check(is_corpus or "question" not in record, where, "this is a questions file, no corpus")
        check(is_corpus, where, 'neither "contents" nor "title" and "text"')
        name = new_id(record, where, seen)
        if "text" in record:
            title = text_of(record, "title", where, may_be_blank=True)
            text = text_of(record, "text", where)
        else:
            title, text = split_contents(text_of(record, "contents", where))
            check(text.strip(), where, '"contents" has a title but no text')
        passages.append({"id": name, "title": title, "text": text})
    check(passages, path, "the corpus is empty")
    return passages


def are_strings(value):
    """True for a list of nothing but strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def load_questions(path, limit=None, needs_titles=False):
    """The first `limit` questions of a JSONL file, as in `Task`. `golden_answers` (one string will
    do) needs one that is not blank; `metadata` may be absent. Raises DataError as `load_corpus`."""
    questions, seen, path = [], {}, Path(locate(path))
    how = f"python data/convert.py {path.parent.name} --download train dev --limit 20000"
    check(path.exists() or path.parent.name not in SETS, path, f"is not there yet: {how}")
    for where, record in read_jsonl(path):
        is_corpus = "question" not in record and ("contents" in record or "text" in record)
        check(not is_corpus, where, "this is a corpus, not a questions file")
        name, question = new_id(record, where, seen), text_of(record, "question", where)
        check("golden_answers" in record, where, '"golden_answers" is missing')
        golds = record["golden_answers"]
        golds = [golds] if isinstance(golds, str) else golds
        check(are_strings(golds), where, '"golden_answers" must be a string or a list of strings')
        problem = '"golden_answers" holds no answer, or only blank ones'
        check(reward.normalized_golds(golds), where, problem)
        metadata = {} if record.get("metadata") is None else record["metadata"]
        check(isinstance(metadata, dict), where, '"metadata" must be an object')
        titles = metadata.get("supporting_titles", [])
        check(are_strings(titles), where, '"supporting_titles" must be a list of strings')
        has_titles = "supporting_titles" in metadata or not needs_titles
        check(has_titles, where, '"supporting_titles" is missing: --reward stepsearch needs it')
        row = {"id": name, "question": question, "golden_answers": golds}
        known = {key: value for key, value in metadata.items() if value is not None}
        questions.append(row | {"metadata": known})
    check(questions, path, "there are no questions in it")
    return questions[:limit]


def check_queries(queries, k):
    """Raise TypeError where `queries` is no list of strings (one would be searched by letters)."""
    if not isinstance(queries, (list, tuple)) or not are_strings(list(queries)):
        raise TypeError(f"queries must be a list of strings, got {type(queries).__name__}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def draw_questions(questions, number, step, seed):
    """A step's questions: a slice of the epoch's shuffled order, without repeats in it."""
    drawn = []
    for position in range(step * number, (step + 1) * number):
        epoch, index = divmod(position, len(questions))
        if index == 0 or not drawn:
            order = list(questions)
            random.Random(f"{seed} {epoch}").shuffle(order)
        drawn.append(order[index])
    return drawn


def group_of(question, key):
    """A question's group under a metadata key, as text; under "hops", hard ones stand apart."""
    if key == "hops" and question["metadata"].get("hard"):
        return "hard"
    value = question["metadata"].get(key, "unknown")
    return value if isinstance(value, str) else json.dumps(value)


def sorted_groups(names):
    """Different group names in order: 2 before 10, "hard" and "unknown" last."""
    return sorted(set(names), key=lambda name: (name in ("hard", "unknown"), name.rjust(20)))
