"""Turn public question sets into the project's two JSONL files: questions, a corpus of paragraphs.

    # -> data/hotpotqa/hotpot_dev_distractor_v1.jsonl and ..._corpus.jsonl; --out: elsewhere
    python data/convert.py hotpotqa hotpot_dev_distractor_v1.json
    python data/convert.py 2wiki dev.json
    python data/convert.py musique musique_ans_v1.0_dev.jsonl --out data/musique/dev
    # NQ, TriviaQA, PopQA, Bamboogle: questions alone
    python data/convert.py flashrag nq_test.jsonl
    # Fetch the public files, then convert each
    python data/convert.py hotpotqa --download train dev
    # Of one file 4,500 to train on and 500 held out
    python data/convert.py hotpotqa my.json --dev 500 --limit 5000

A question keeps what its set says of it, as metadata: `supporting_titles`, `type`, `level` and
`hops` (HotpotQA: the number of supporting titles, 2; 2WikiMultiHopQA: by type, bridge_comparison 4,
else 2; MuSiQue: the length of the decomposition). The corpus holds each paragraph once (same title
and text), numbered in order of appearance, texts as they stand (HotpotQA writes "&amp;" in titles).
FlashRAG's and Search-R1's corpora need no conversion.
"""

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from download import PUBLIC, download  # noqa: E402

from plumbing.data import is_blank  # noqa: E402
from plumbing.files import DataError, error_line, read_jsonl  # noqa: E402

# Reading: yield (where, item) for every item of a file


def first_byte(path):
    try:
        with open(path, "rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_array(path):
    """Yield ("file, item n", item) of a file with one JSON array of objects. Raises DataError."""
    if first_byte(path) == b"{":
        raise DataError(
            f"{path}: one JSON array of questions is expected here, not objects (JSONL)"
        )
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        # No UTF-8, thousands of digits or brackets
        raise DataError(f"{path}: {error}") from None
    if not isinstance(items, list):
        raise DataError(
            f"{path}: one JSON array of questions is expected, got {type(items).__name__}"
        )
    may_be_broken = re.search(r"\\u[dD][89a-fA-F]", text) is not None
    del text
    for i, item in enumerate(items):
        where = f"{path}, item {i + 1}"
        items[i] = None  # what has been read can be freed: train sets are large
        if not isinstance(item, dict):
            raise DataError(f"{where}: an object is expected, got {type(item).__name__}")
        if may_be_broken:
            try:
                json.dumps(item, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:  # half a surrogate pair is no text
                raise DataError(f"{where}: {error}") from None
        yield where, item


def read_lines(path):
    """Yield ("file, line n", item) of a JSONL file. Raises DataError."""
    if first_byte(path) == b"[":
        raise DataError(f"{path}: one JSON object a line (JSONL) is expected here, not an array")
    yield from read_jsonl(path)


# Converting: an item becomes (question, [(title, text), ...]), the question None where the set
# calls it unanswerable

KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
# By type
HOPS_2WIKI = {"comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}


def field(item, key, kind, where, may_be_blank=False):
    """item[key], which must be of a type; a string must not be blank. Raises DataError."""
    if key not in item:
        raise DataError(f'{where}: "{key}" is missing')
    value = item[key]
    if not isinstance(value, kind):
        raise DataError(f'{where}: "{key}" must be {KINDS[kind]}, not {type(value).__name__}')
    if kind is str and not may_be_blank and not value.strip():
        raise DataError(f'{where}: "{key}" is empty')
    return value


def strings(item, key, where):
    """item[key], which must be a list of strings. Raises DataError."""
    if not all(isinstance(value, str) for value in field(item, key, list, where)):
        raise DataError(f'{where}: "{key}" must be a list of strings')
    return item[key]


def one_line(title):
    """A title is the first line of a passage's `contents`, so it can have but one."""
    return title.replace("\n", " ")


def paragraphs_of(context, where, glue):
    """[(title, text)] of [[title, [sentence, ...]], ...], the sentences joined by `glue`.
    Raises DataError.
    """
    for pair in context:
        good = (
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], list)
        )
        if not good or not all(isinstance(sentence, str) for sentence in pair[1]):
            raise DataError(f'{where}: "context" must be a list of [title, [sentence, ...]]')
    return [(one_line(title), glue.join(sentences)) for title, sentences in context]


def titles_of(facts, where):
    """The different titles of [[title, sentence number], ...] in order. Raises DataError."""
    if not all(
        isinstance(fact, list) and len(fact) == 2 and isinstance(fact[0], str) for fact in facts
    ):
        raise DataError(f'{where}: "supporting_facts" must be a list of [title, sentence number]')
    return list(dict.fromkeys(one_line(title) for title, _ in facts))


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
    """HotpotQA's sentences bring their own blanks; a question needs as many hops as it has
    supporting titles.
    """
    titles, kind = titles_of(field(item, "supporting_facts", list, where), where), item.get("type")
    hops = (hops_by_type or {}).get(str(kind), len(titles)) or None
    metadata = {"hops": hops, "supporting_titles": titles, "type": kind, "level": item.get("level")}
    question = make_question(
        item, "_id", [field(item, "answer", str, where, may_be_blank=True)], where, metadata
    )
    return question, paragraphs_of(field(item, "context", list, where), where, glue)


def from_2wiki(item, where):
    return from_hotpotqa(item, where, glue=" ", hops_by_type=HOPS_2WIKI)


def from_musique(item, where):
    """`supporting_titles` are in the order of the hops; two paragraphs of an item may have the same
    title.
    """
    item = {"answerable": True, "answer_aliases": [], "question_decomposition": []} | item
    paragraphs, supporting = [], {}  # supporting: idx -> title
    for part in field(item, "paragraphs", list, where):
        if not isinstance(part, dict):
            raise DataError(f'{where}: "paragraphs" must be a list of objects')
        title, text = (
            field(part, key, str, where, may_be_blank=True) for key in ("title", "paragraph_text")
        )
        paragraphs.append((one_line(title), text))
        if field(part, "is_supporting", bool, where):
            supporting[str(part.get("idx"))] = one_line(title)
    if not field(item, "answerable", bool, where):
        return None, paragraphs
    answers = [
        field(item, "answer", str, where, may_be_blank=True),
        *strings(item, "answer_aliases", where),
    ]
    steps = field(item, "question_decomposition", list, where)
    hops_order = [
        str(step.get("paragraph_support_idx")) for step in steps if isinstance(step, dict)
    ]
    titles = [
        supporting[idx] for idx in dict.fromkeys([*hops_order, *supporting]) if idx in supporting
    ]
    # 3hop1__... : three hops, in the first of two shapes
    prefix = re.match(r"(\d)hop\d?(?=__)", str(item.get("id")))
    hops, kind = (int(prefix[1]), prefix[0]) if prefix else (None, None)
    metadata = {
        "hops": len(steps) or hops,
        "supporting_titles": list(dict.fromkeys(titles)),
        "type": kind,
    }
    return make_question(item, "id", list(dict.fromkeys(answers)), where, metadata), paragraphs


def rows_of(table):
    """FlashRAG's {"title": [...], "sentences": [...]} as a list of pairs; None where the value is
    no such table.
    """
    for key in ("sentences", "content", "sent_id"):
        columns = [table.get("title"), table.get(key)] if isinstance(table, dict) else [None]
        if all(isinstance(column, list) for column in columns):
            return [list(pair) for pair in zip(*columns)]
    return None


def from_flashrag(item, where):
    """Any of its sets. HotpotQA and 2Wiki bring paragraphs in the metadata, MuSiQue its
    decomposition, most nothing.
    """
    if "contents" in item and "question" not in item:
        raise DataError(
            f"{where}: this is a corpus, not questions; it is used as it is, with --corpus"
        )
    single = isinstance(item.get("golden_answers"), str)
    answers = [item["golden_answers"]] if single else strings(item, "golden_answers", where)
    metadata = {} if item.get("metadata") is None else dict(field(item, "metadata", dict, where))
    context, facts = rows_of(metadata.get("context")), rows_of(metadata.get("supporting_facts"))
    glue = ""
    if context is not None:
        # 2Wiki's sentences have no blanks.
        glue = " " if "content" in metadata.pop("context") else ""
    if facts is not None:
        del metadata["supporting_facts"]
        metadata.setdefault("supporting_titles", titles_of(facts, where))
    titles = (
        strings(metadata, "supporting_titles", where) if "supporting_titles" in metadata else []
    )
    steps = metadata.get("question_decomposition")
    hops = (
        len(steps)
        if isinstance(steps, list)
        else HOPS_2WIKI.get(str(metadata.get("type")), len(titles))
    )
    question = make_question(item, "id", answers, where, {"hops": hops or None} | metadata)
    return question, paragraphs_of(context or [], where, glue)


SETS = {
    "hotpotqa": (read_array, from_hotpotqa),
    "2wiki": (read_array, from_2wiki),
    "musique": (read_lines, from_musique),
    "flashrag": (read_lines, from_flashrag),
}


def load(name, files):
    """All items of a set's files: ([(question or None, paragraphs)], remarks on those left out).
    Raises DataError.
    """
    read, convert = SETS[name]
    items, seen, left_out, known = [], {}, {}, {}
    for path in files:
        for where, item in read(path):
            question, paragraphs = convert(item, where)
            if question is None:
                left_out.setdefault("unanswerable", []).append(where)
            elif all(map(is_blank, question["golden_answers"])):
                left_out.setdefault("without an answer that could be scored", []).append(where)
                question = None
            elif question["id"] in seen:
                hint = "; convert the files one by one" if len(files) > 1 else ""
                raise DataError(
                    f"{where}: id {question['id'][:60]!r} was used before "
                    f"({seen[question['id']]}){hint}"
                )
            else:
                seen[question["id"]] = where
            # Repeats take no room.
            items.append((question, [known.setdefault(pair, pair) for pair in paragraphs]))
    remarks = [
        f"{len(places)} questions left out, {why}: {places[0]}" + ", ..." * (len(places) > 1)
        for why, places in left_out.items()
    ]
    if not seen:
        raise DataError("; ".join([f"{files[0]}: there are no questions in it", *remarks]))
    return items, remarks


def draw(items, limit, dev, seed):
    """Which items to train on and which to hold out: two lists of indices, in the files' order.
    Raises DataError.

    They are drawn at random, because files may be sorted (MuSiQue's are, by hops).
    """
    order = [i for i, (question, _) in enumerate(items) if question]
    random.Random(seed).shuffle(order)
    order = order[:limit]
    if dev >= len(order):
        raise DataError(
            f"--dev {dev}: there are {len(order)} questions to draw from, and some must be left"
        )
    return sorted(order[dev:]), sorted(order[:dev])


def make_corpus(pairs):
    """The passages of (title, text) pairs, each once and without those that have no text."""
    texts = [(title, text) for title, text in dict.fromkeys(pairs) if text.strip()]
    return [
        {"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(texts)
    ]


def convert(name, files, limit=None, dev=0, seed=0):
    """(training questions, held-out questions, passages, remarks) of a set's files.
    Raises DataError.

    The corpus holds all paragraphs of the files or, with a limit, those of the drawn questions.
    """
    items, remarks = load(name, files)
    training, held_out = draw(items, limit, dev, seed)
    pairs = [
        pair
        for i in (sorted(training + held_out) if limit else range(len(items)))
        for pair in items[i][1]
    ]
    passages = make_corpus(pairs)
    questions, dev_questions = ([items[i][0] for i in part] for part in (training, held_out))
    if not pairs:
        remarks.append(
            "no paragraphs here: search in a corpus of your own (--corpus) or on a server "
            "(--retriever_url)"
        )
        return questions, dev_questions, passages, remarks
    empty = sum(not text.strip() for _, text in pairs)
    remarks.append(
        f"{len(pairs)} paragraphs: {len(pairs) - empty - len(passages)} repeated, "
        f"{empty} without text"
    )
    titles = {title for title, _ in pairs}
    lost = sum(
        not titles.issuperset(q["metadata"].get("supporting_titles", []))
        for q in questions + dev_questions
    )
    if lost:
        remarks.append(f"{lost} questions have a supporting title that no paragraph has")
    return questions, dev_questions, passages, remarks


# Writing and the command line


def write_all(files):
    """Write {path: rows} as JSONL. All are complete under a temporary name before the first gets
    its own.
    """
    try:
        for path, rows in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{path}.tmp", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for path in files:
            os.replace(f"{path}.tmp", path)
    finally:
        for path in files:
            with suppress(OSError):
                os.remove(f"{path}.tmp")


def convert_and_write(name, files, out, *options):
    """Write OUT.jsonl and, where there are any, OUT_dev.jsonl and OUT_corpus.jsonl;
    print the counts.
    """
    *parts, remarks = convert(name, files, *options)
    outputs = {
        out.with_name(out.name + end): rows
        for end, rows in zip((".jsonl", "_dev.jsonl", "_corpus.jsonl"), parts)
        if rows
    }
    for path in outputs:
        if any(path.exists() and path.samefile(file) for file in files):
            raise DataError(f"{path}: this is the file to convert; choose another --out")
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
    add(
        "files", nargs="*", metavar="FILE", help="files as the set is published; several become one"
    )
    add(
        "--download",
        nargs="*",
        metavar="SPLIT",
        help="in place of FILE: fetch these splits (none named: all of the "
        "set) to the folder OUT/raw and convert each to OUT/SPLIT.jsonl",
    )
    add(
        "--out",
        metavar="OUT",
        help="write OUT.jsonl and OUT_corpus.jsonl or, where OUT is a folder, into it under "
        "the name of the first file (default: the folder data/SET)",
    )
    add(
        "--dev",
        type=positive,
        default=0,
        metavar="N",
        help="hold N questions out, as OUT_dev.jsonl; the corpus is of both",
    )
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="take only N questions (held-out ones included) and the paragraphs "
        "of these: an index of a whole train set takes minutes and gigabytes",
    )
    add("--seed", type=int, default=0, help="which questions --dev and --limit draw (default 0)")
    args = parser.parse_args(arguments)
    if bool(args.files) == (args.download is not None):
        parser.error("give either FILE... or --download")
    for split in args.download or []:
        if split not in PUBLIC[args.set]:
            parser.error(f"--download {split}: {args.set} has {', '.join(PUBLIC[args.set])}")
    return args


def main(arguments=None):
    """Returns the exit code: 2, after one line, where input cannot be used."""
    args = parse(arguments)
    out = Path(args.out or Path(__file__).resolve().parent / args.set)
    options = (args.limit, args.dev, args.seed)
    try:
        if args.files:
            is_folder = not args.out or out.is_dir() or args.out.endswith(("/", os.sep))
            convert_and_write(
                args.set, args.files, out / Path(args.files[0]).stem if is_folder else out, *options
            )
        else:
            for split in args.download or PUBLIC[args.set]:
                (url, sha256), name = PUBLIC[args.set][split], split.replace("/", "_")
                raw = out / "raw" / f"{name}{Path(url).suffix}"
                download(url, raw, sha256, SETS[args.set][0])
                convert_and_write(args.set, [raw], out / name, *options)
    except (DataError, OSError) as error:
        print(f"convert.py: {error_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nconvert.py: stopped; a download goes on when the same command is run again",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
