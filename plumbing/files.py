"""Files and errors: what cannot be used is one line; what is written is whole or not there."""

import json
import math
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the project's folder


class DataError(ValueError):
    """Input cannot be used: one line that names the file, the line or the option."""


OUT_OF_MEMORY = """out of memory: lower --micro_batch_tokens, --num_questions, --max_context or \
--eval_batch_size, or take --load_in_4bit true; --dry_run tells what fits"""
UNUSABLE = (DataError, OSError, OverflowError)  # the last: a port that is none


def run_script(name, main):
    """Run a command line; what cannot be used is one line, with exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to stop
    try:
        main()
    except (*UNUSABLE, RuntimeError) as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        sys.exit(130)


def one_line(error):
    """What is said of an error that is no mistake of the code; others are raised again."""
    if isinstance(error, UNUSABLE):
        return error_line(error)
    if re.search("out of memory|can't allocate memory", str(error)):  # of a GPU, of a CPU
        return OUT_OF_MEMORY
    raise error


def error_line(error):
    """The first line of an error's message; what a terminal might obey (escapes, marks) goes."""
    first = str(error).partition("\n")[0] or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in first)


def check(ok, where, problem):
    """Raise DataError unless `ok`."""
    if not ok:
        raise DataError(f"{where}: {problem}")


@contextmanager
def on_failure(problem, but=()):
    """Whatever a library raises over a file, `but` these, becomes a DataError about `problem`."""
    try:
        yield
    except (DataError, *but):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{problem}: {error_line(reason)}") from None


def locate(path, run=None):
    """A path as given or, where nothing is there, from beside the `run` that names it (it may have
    been started in another folder) or from the project, of which a part ships with it."""
    beside = Path(run).resolve().parents[:2] if run else []
    for folder in (Path(), *beside, ROOT):
        if (folder / path).exists():
            return str(folder / path)
    return str(path)


def finite(number):
    """A JSON number as Python's: 2.0 is the whole number 2, and NaN or Infinity is no number."""
    value = float(number)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def parse_json(text):
    """What a JSON text holds, its numbers as `finite` has them (pandas writes 2.0 and NaN)."""
    return json.loads(text, parse_float=finite, parse_constant=finite)


def read_text(path):
    """The text of a whole file, UTF-8, less its BOM. Raises OSError, ValueError."""
    return Path(path).read_text(encoding="utf-8-sig")


def read_jsonl(path):
    """Yield ("file, line n", object) of a JSONL file, less BOM and blank lines; or DataError."""
    with on_failure(f"{path}: cannot be read"), open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            with on_failure(f"{where}: not valid JSON"):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                record = parse_json(line) if line else {}
                if re.search(r"\\u[dD][89a-fA-F]", line):  # half a surrogate pair is no text
                    json.dumps(record, ensure_ascii=False).encode("utf-8")
            kind = type(record).__name__
            check(kind == "dict", where, f"expected one JSON object a line, got {kind}")
            if line:
                yield where, record


def read_json(path):
    """The object in a JSON file. Raises DataError, OSError."""
    with on_failure(f"{path}: not valid JSON", but=[OSError]):
        record = json.loads(read_text(path))
    check(isinstance(record, dict), path, f"expected a JSON object, got {type(record).__name__}")
    return record


def read_log(path):
    """The records of a run's JSONL file, less lines that a kill cut short. Raises OSError."""
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


@contextmanager
def replacing(path):
    """A temporary name to write to; it becomes `path`, or goes where writing fails."""
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file must not go on filling a full disk


def write_text(path, text):
    """Write a whole file, so that no reader ever sees half of it. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path, record):
    """Write a whole JSON file. Raises OSError."""
    write_text(path, json.dumps(record, indent=1))


def write_jsonl(path, records):
    """Write a whole JSONL file. Raises OSError."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def append_line(path, record):
    """Add a record to a JSONL file. Raises OSError."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


@contextmanager
def new_folder(place):
    """A folder to write into that becomes `place` once complete, or goes if it cannot be.
    What `place` held is kept as `place`.old: a kill at any moment leaves one of the two, whole."""
    place, beside, old = Path(place), Path(f"{place}.tmp"), Path(f"{place}.old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(place, old)
        os.rename(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_writable(option, path):
    """Raise DataError where the file of an option, if it is given, could not be written."""
    if path:
        folder, is_folder = Path(path).parent, Path(path).is_dir()
        check(os.access(folder, os.W_OK), f"{option} {path}", f"{folder} is no writable folder")
        check(not is_folder, f"{option} {path}", "is a folder")
