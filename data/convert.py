"""Turn public question sets into the project's two JSONL files: questions, a corpus of paragraphs.

    # -> data/hotpotqa/hotpot_dev_distractor_v1.jsonl and ..._corpus.jsonl; --out: elsewhere
    python data/convert.py hotpotqa hotpot_dev_distractor_v1.json
    python data/convert.py 2wiki dev.json
    python data/convert.py musique musique_ans_v1.0_dev.jsonl --out data/musique/dev
    python data/convert.py flashrag nq_test.jsonl  # NQ, TriviaQA, PopQA, Bamboogle: questions alone
    python data/convert.py hotpotqa --download train dev  # fetch the public files, convert each
    python data/convert.py hotpotqa my.json --dev 500 --limit 5000  # 4,500 to train on, 500 for dev

A question keeps what its set says of it, as metadata: `supporting_titles`, `type`, `level` and
`hops` (HotpotQA: the number of supporting titles, 2; 2WikiMultiHopQA: by type, bridge_comparison 4,
else 2; MuSiQue: the length of the decomposition). The corpus holds each paragraph once (same title
and text), numbered in order of appearance, texts as they stand (HotpotQA writes "&amp;" in titles).
FlashRAG's MuSiQue brings its supporting paragraphs only: search is easier without the others.
FlashRAG's and Search-R1's corpora need no conversion.
"""

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from download import PUBLIC, download  # noqa: E402

import reward  # noqa: E402
from plumbing import files  # noqa: E402
from plumbing.files import DataError, check, on_failure  # noqa: E402

# Reading: yield (where, item) for every item of a file


def first_byte(path):
    with on_failure(f"{path}: cannot be read"), open(path, "rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def read_array(path):
    """Yield ("file, item n", item) of a file with one JSON array of objects. Raises DataError."""
    expected = "one JSON array of questions is expected"
    check(first_byte(path) != b"{", path, f"{expected} here, not objects (JSONL)")
    try:
        with on_failure(path, but=[json.JSONDecodeError]):  # no UTF-8, thousands of brackets
            text = files.read_text(path)
            items = files.parse_json(text)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} (column {error.colno})"
        raise DataError(f"{path}, line {error.lineno}: {problem}") from None
    check(isinstance(items, list), path, f"{expected}, got {type(items).__name__}")
    may_be_broken = re.search(r"\\u[dD][89a-fA-F]", text) is not None
    del text
    for i, item in enumerate(items):
        where = f"{path}, item {i + 1}"
        items[i] = None  # what has been read can be freed: train sets are large
        check(isinstance(item, dict), where, f"an object is expected, got {type(item).__name__}")
        if may_be_broken:
            with on_failure(where):  # half a surrogate pair is no text
                json.dumps(item, ensure_ascii=False).encode("utf-8")
        yield where, item


def read_lines(path):
    """Yield ("file, line n", item) of a JSONL file. Raises DataError."""
    expected = "one JSON object a line (JSONL) is expected here, not an array"
    check(first_byte(path) != b"[", path, expected)
    yield from files.read_jsonl(path)


# Converting: an item becomes (question or None where it is unanswerable, [(title, text), ...])

KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
HOPS_2WIKI = {"comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}


def field(item, key, kind, where, may_be_blank=False):
    """item[key], which must be of a type; a string must not be blank. Raises DataError."""
    check(key in item, where, f'"{key}" is missing')
    value, given = item[key], type(item[key]).__name__
    check(isinstance(value, kind), where, f'"{key}" must be {KINDS[kind]}, not {given}')
    check(kind is not str or may_be_blank or value.strip(), where, f'"{key}" is empty')
    return value


def strings(item, key, where):
    """item[key], which must be a list of strings. Raises DataError."""
    values = field(item, key, list, where)
    are_strings = all(isinstance(value, str) for value in values)
    check(are_strings, where, f'"{key}" must be a list of strings')
    return values


def one_line(title):
    """A title is the first line of a passage's `contents`, so it can have but one."""
    return title.replace("\n", " ")


def each_once(titles):
    """Different titles in order, as the corpus has them."""
    return list(dict.fromkeys(map(one_line, titles)))


def paragraphs_of(context, where, glue):
    """[(title, text)] of [[title, [sentence, ...]], ...], or DataError."""
    expected = '"context" must be a list of [title, [sentence, ...]]'
    for pair in context:
        check(isinstance(pair, list) and len(pair) == 2, where, expected)
        check(isinstance(pair[0], str) and isinstance(pair[1], list), where, expected)
        check(all(isinstance(sentence, str) for sentence in pair[1]), where, expected)
    return [(one_line(title), glue.join(sentences)) for title, sentences in context]


def titles_of(facts, where):
    """The different titles of [[title, sentence number], ...] in order, or DataError."""
    expected = '"supporting_facts" must be a list of [title, sentence number]'
    for fact in facts:
        check(isinstance(fact, list) and len(fact) == 2, where, expected)
        check(isinstance(fact[0], str), where, expected)
    return each_once(title for title, _ in facts)


def make_question(item, id_key, golden_answers, where, metadata):
    """A question as in the project's files; metadata that is None or an empty list is left out."""
    name = str(item[id_key]) if type(item.get(id_key)) is int else field(item, id_key, str, where)
    return {
        "id": name,
        "question": field(item, "question", str, where),
        "golden_answers": golden_answers,
        "metadata": {key: value for key, value in metadata.items() if value not in (None, [])},
    }


def from_hotpotqa(item, where, glue="", hops_by_type=None):
    """Its sentences bring their own blanks; a question needs a hop a supporting title."""
    titles, kind = titles_of(field(item, "supporting_facts", list, where), where), item.get("type")
    hops = (hops_by_type or {}).get(str(kind), len(titles)) or None
    metadata = {"hops": hops, "supporting_titles": titles, "type": kind, "level": item.get("level")}
    answers = [field(item, "answer", str, where, may_be_blank=True)]
    question = make_question(item, "_id", answers, where, metadata)
    return question, paragraphs_of(field(item, "context", list, where), where, glue)


def from_2wiki(item, where):
    return from_hotpotqa(item, where, glue=" ", hops_by_type=HOPS_2WIKI)


def from_musique(item, where):
    """The titles are in the order of the hops; two paragraphs of an item may have the same."""
    item = {"answerable": True, "answer_aliases": [], "question_decomposition": []} | item
    paragraphs, supporting = [], {}  # supporting: idx -> title
    for number, part in enumerate(field(item, "paragraphs", list, where)):
        check(isinstance(part, dict), where, '"paragraphs" must be a list of objects')
        title = one_line(field(part, "title", str, where, may_be_blank=True))
        paragraphs.append((title, field(part, "paragraph_text", str, where, may_be_blank=True)))
        if field(part, "is_supporting", bool, where):
            supporting[str(part.get("idx", number))] = title
    if not field(item, "answerable", bool, where):
        return None, paragraphs
    answer = field(item, "answer", str, where, may_be_blank=True)
    answers = list(dict.fromkeys([answer, *strings(item, "answer_aliases", where)]))
    steps = field(item, "question_decomposition", list, where)
    order = [str(step.get("paragraph_support_idx")) for step in steps if isinstance(step, dict)]
    titles = each_once(supporting[idx] for idx in [*order, *supporting] if idx in supporting)
    # 3hop1__... : three hops, in the first of two shapes
    prefix = re.match(r"(\d)hop\d?(?=__)", str(item.get("id")))
    hops, kind = (int(prefix[1]), prefix[0]) if prefix else (None, None)
    metadata = {"hops": len(steps) or hops, "supporting_titles": titles, "type": kind}
    return make_question(item, "id", answers, where, metadata), paragraphs


def rows_of(table):
    """FlashRAG's {"title": [...], "sentences": [...]} as a list of pairs, or None."""
    for key in ("sentences", "content", "sent_id"):
        columns = [table.get("title"), table.get(key)] if isinstance(table, dict) else [None]
        if all(isinstance(column, list) for column in columns):
            return [list(pair) for pair in zip(*columns)]
    return None


def support_paragraphs(steps):
    """The titled paragraphs in the steps of FlashRAG's MuSiQue; a step may be without."""
    parts = [step.get("support_paragraph") for step in steps if isinstance(step, dict)]
    return [part for part in parts if isinstance(part, dict) and isinstance(part.get("title"), str)]


def from_flashrag(item, where):
    """Any of its sets. HotpotQA and 2Wiki bring paragraphs in the metadata, MuSiQue the supporting
    ones in its decomposition, most none. A text that becomes a passage leaves the metadata."""
    is_corpus = "contents" in item and "question" not in item
    hint = "this is a corpus, not questions; it is used as it is, with --corpus"
    check(not is_corpus, where, hint)
    metadata = {} if item.get("metadata") is None else field(item, "metadata", dict, where)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    context, facts = rows_of(metadata.get("context")), rows_of(metadata.get("supporting_facts"))
    paragraphs, titles = [], []
    if context is not None:
        glue = " " if "content" in metadata.pop("context") else ""  # 2Wiki's have no blanks
        paragraphs = paragraphs_of(context, where, glue)
    if facts is not None:
        del metadata["supporting_facts"]
        titles = titles_of(facts, where)
    steps = metadata.get("question_decomposition")
    steps = steps if isinstance(steps, list) else []
    for part in support_paragraphs(steps):
        if isinstance(part.get("paragraph_text"), str):
            paragraphs.append((one_line(part["title"]), part.pop("paragraph_text")))
        if part.get("is_supporting") is not False:
            titles.append(part["title"])
    if False in (item.get("answerable"), metadata.get("answerable")):
        return None, paragraphs
    if "supporting_titles" in metadata:
        titles = strings(metadata, "supporting_titles", where) or titles
    metadata["supporting_titles"] = titles = each_once(titles)
    hops = len(steps) or HOPS_2WIKI.get(str(metadata.get("type")), len(titles)) or None
    single = isinstance(item.get("golden_answers"), str)
    answers = [item["golden_answers"]] if single else strings(item, "golden_answers", where)
    return make_question(item, "id", answers, where, {"hops": hops} | metadata), paragraphs


SETS = {
    "hotpotqa": (read_array, from_hotpotqa),
    "2wiki": (read_array, from_2wiki),
    "musique": (read_lines, from_musique),
    "flashrag": (read_lines, from_flashrag),
}


def load(name, paths):
    """All items of a set: ([(question or None, paragraphs)], remarks on what was left out)."""
    read, convert = SETS[name]
    items, seen, left_out = [], {}, {}
    known = {}  # paragraphs: repeats take no room
    hint = "; convert the files one by one" if len(paths) > 1 else ""
    for path in paths:
        for where, item in read(path):
            question, pairs = convert(item, where)
            if question is None:
                left_out.setdefault("unanswerable", []).append(where)
            elif not reward.normalized_golds(question["golden_answers"]):
                left_out.setdefault("without an answer that could be scored", []).append(where)
                question = None
            else:
                used = f"id {question['id'][:60]!r} was used before ({seen.get(question['id'])})"
                check(question["id"] not in seen, where, used + hint)
                seen[question["id"]] = where
            items.append((question, [known.setdefault(pair, pair) for pair in pairs]))
    remarks = []
    for why, places in left_out.items():
        more = ", ..." if len(places) > 1 else ""
        remarks.append(f"{len(places)} questions left out, {why}: {places[0]}{more}")
    check(seen, paths[0], "; ".join(["there are no questions in it", *remarks]))
    return items, remarks


def draw(items, limit, dev, seed):
    """Which items to train on and which to hold out: two lists of indices, in the files' order.
    They are drawn at random, because files may be sorted (MuSiQue's are, by hops)."""
    order = [i for i, (question, _) in enumerate(items) if question]
    random.Random(seed).shuffle(order)
    order = order[:limit]
    problem = f"there are {len(order)} questions to draw from, and some must be left"
    check(dev < len(order), f"--dev {dev}", problem)
    return sorted(order[dev:]), sorted(order[:dev])


def make_corpus(pairs):
    """The passages of (title, text) pairs, each once and without those that have no text."""
    numbered = enumerate(pair for pair in dict.fromkeys(pairs) if pair[1].strip())
    return [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in numbered]


def remarks_on(pairs, passages, questions):
    """What to say of the (title, text) pairs and of what they became for these questions."""
    if not pairs:
        where = "in a corpus of your own (--corpus) or on a server (--retriever_url)"
        return [f"no paragraphs here: search {where}"]
    titles = [title for title, text in pairs if text.strip()]
    empty, repeated = len(pairs) - len(titles), len(titles) - len(passages)
    remarks = [f"{len(pairs)} paragraphs: {repeated} repeated, {empty} without text"]
    found = set(titles)
    supporting = [question["metadata"].get("supporting_titles", []) for question in questions]
    lost = sum(not found.issuperset(needed) for needed in supporting)
    if lost:
        remarks.append(f"{lost} questions have a supporting title that no paragraph has")
    return remarks


def convert(name, paths, limit=None, dev=0, seed=0):
    """(training questions, held-out questions, passages, remarks) of a set's files. The passages
    are all paragraphs of the files or, with a limit, those of the drawn questions."""
    items, remarks = load(name, paths)
    training, held_out = draw(items, limit, dev, seed)
    used = sorted(training + held_out) if limit else range(len(items))
    pairs = [pair for i in used for pair in items[i][1]]
    passages = make_corpus(pairs)
    questions, dev_questions = ([items[i][0] for i in part] for part in (training, held_out))
    remarks += remarks_on(pairs, passages, questions + dev_questions)
    return questions, dev_questions, passages, remarks


# Writing and the command line


def write_all(outputs):
    """Write {path: rows}, all complete under temporary names before the first gets its own."""
    with ExitStack() as stack:
        for path, rows in outputs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(files.replacing(path))
            with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def convert_and_write(name, paths, out, *options):
    """Write OUT.jsonl and, where not empty, OUT_dev.jsonl and OUT_corpus.jsonl; print counts."""
    *parts, remarks = convert(name, paths, *options)
    ends = (".jsonl", "_dev.jsonl", "_corpus.jsonl")
    outputs = {out.with_name(out.name + end): rows for end, rows in zip(ends, parts) if rows}
    for path in outputs:
        is_input = any(path.exists() and path.samefile(given) for given in paths)
        check(not is_input, path, "this is the file to convert; choose another --out")
    write_all(outputs)
    for path, rows in outputs.items():
        hops = Counter(str(row["metadata"].get("hops", "?")) for row in rows if "metadata" in row)
        counts = ", ".join(f"{count} of {number}" for number, count in sorted(hops.items()))
        print(f"{path}: {len(rows)} " + (f"questions (hops: {counts})" if hops else "passages"))
    print("\n".join(remarks))


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse(arguments):
    splits = "\n".join(f"  {name:<9} {' '.join(PUBLIC[name])}" for name in PUBLIC)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"what --download can fetch:\n{splits}",
        usage="%(prog)s SET FILE... [options], or SET --download [SPLIT...] [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("set", choices=SETS, metavar="SET", help=f"the shape of the files: {', '.join(SETS)}")
    add("files", nargs="*", metavar="FILE", help="the set's files as published; several become one")
    text = """in place of FILE: fetch these splits (none named: all of the set) to the folder
    OUT/raw and convert each to OUT/SPLIT.jsonl"""
    add("--download", nargs="*", metavar="SPLIT", help=text)
    text = """write OUT.jsonl and OUT_corpus.jsonl or, where OUT is a folder, into it under the name
    of the first file (default: the folder data/SET)"""
    add("--out", metavar="OUT", help=text)
    text = "hold N questions out, as OUT_dev.jsonl; the corpus is of both"
    add("--dev", type=positive, default=0, metavar="N", help=text)
    text = """take only N questions (held-out ones included) and the paragraphs of these: an index
    of a whole train set takes minutes and gigabytes"""
    add("--limit", type=positive, metavar="N", help=text)
    add("--seed", type=int, default=0, help="which questions --dev and --limit draw (default 0)")
    args = parser.parse_args(arguments)
    if bool(args.files) == (args.download is not None):
        parser.error("give either FILE... or --download")
    for split in args.download or []:
        if split not in PUBLIC[args.set]:
            parser.error(f"--download {split}: {args.set} has {', '.join(PUBLIC[args.set])}")
    return args


def convert_all(args):
    out = Path(args.out or HERE / args.set)
    options = (args.limit, args.dev, args.seed)
    if args.files:
        is_folder = not args.out or out.is_dir() or args.out.endswith(("/", os.sep))
        out = out / Path(args.files[0]).stem if is_folder else out
        convert_and_write(args.set, args.files, out, *options)
        return
    for split in args.download or PUBLIC[args.set]:
        (url, sha256), name = PUBLIC[args.set][split], split.replace("/", "_")
        raw = out / "raw" / f"{name}{Path(url).suffix}"
        download(url, raw, sha256, SETS[args.set][0])
        convert_and_write(args.set, [raw], out / name, *options)


def main(arguments=None):
    try:
        convert_all(parse(arguments))
    except KeyboardInterrupt:
        hint = "stopped; a download goes on when the same command is run again"
        print(f"\nconvert.py: {hint}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    files.run_script("convert.py", main)
