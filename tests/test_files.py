"""Files: read line by line or not at all, written whole or not at all; an error is one line."""

import errno
import json
import os
import re

import pytest
from processes import in_child, limit_files, needs_fork, outcome

from plumbing import files
from plumbing.files import DataError

# Errors


def test_an_error_line_is_one_line_that_a_terminal_does_not_obey():
    assert files.error_line(DataError("a\x1b[2Jb\u202e\x07: damaged\nmore")) == "a?[2Jb??: damaged"
    assert files.error_line(ValueError()) == files.error_line(ValueError("\nmore")) == "ValueError"


@pytest.mark.parametrize("kind", files.UNUSABLE)
def test_a_script_ends_in_one_line_and_exit_code_2(capsys, kind):
    def main():
        raise kind("f.jsonl: \x1b[31mdamaged\nmore")

    with pytest.raises(SystemExit) as caught:
        files.run_script("x.py", main)
    assert caught.value.code == 2 and capsys.readouterr().err == "x.py: f.jsonl: ?[31mdamaged\n"


@pytest.mark.parametrize(
    "message",
    ["CUDA out of memory. Tried to", "DefaultCPUAllocator: can't allocate memory"],
)
def test_too_little_memory_is_one_line_that_says_what_to_lower(capsys, message):
    def main():
        raise RuntimeError(message)

    with pytest.raises(SystemExit):
        files.run_script("x.py", main)
    said = capsys.readouterr().err
    assert said.startswith("x.py: out of memory: lower --micro_batch_tokens")
    assert said.count("\n") == 1


def test_a_script_that_is_stopped_says_so(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        files.run_script("x.py", main)
    assert caught.value.code == 130 and capsys.readouterr().err == "\nx.py: stopped\n"


def test_a_script_that_works_returns_and_a_bug_is_no_bad_input(capsys):
    files.run_script("x.py", lambda: print("done"))
    assert capsys.readouterr() == ("done\n", "")
    with pytest.raises(ZeroDivisionError):
        files.run_script("x.py", lambda: 1 / 0)


def test_check():
    files.check([1], "f", "is empty")
    with pytest.raises(DataError, match="^f: is empty$"):
        files.check([], "f", "is empty")


def test_what_a_library_raises_becomes_one_error():
    with pytest.raises(DataError, match=r"^f: damaged: \?x$"):
        with files.on_failure("f: damaged"):
            raise RuntimeError("\x1bx\nmore")


@pytest.mark.parametrize("error", [DataError("as it is"), OSError("as it is")])
def test_our_own_errors_and_the_excepted_ones_pass(error):
    with pytest.raises(type(error), match="^as it is$"):
        with files.on_failure("f: damaged", but=[OSError]):
            raise error


# Reading


def test_jsonl_gives_file_and_line_without_bom_and_blank_lines(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes('\ufeff{"a": "é"}\r\n\n  \n{"a": 2}'.encode())
    rows = list(files.read_jsonl(path))
    assert rows == [(f"{path}, line 1", {"a": "é"}), (f"{path}, line 4", {"a": 2})]


FAULTS = {
    "broken": (b'{"a": ', "not valid JSON: .*column"),
    "two objects": (b"{} {}", "not valid JSON: Extra data"),
    "list": (b"[1]", "expected one JSON object a line, got list"),
    "null": (b"null", "expected one JSON object a line, got NoneType"),
    "BOM in the middle": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "utf-8"),
    "deep": (b"[" * 100_000, ""),
    "long number": (b'{"a": ' + b"1" * 10_000 + b"}", ""),
    "surrogate": (b'{"a": "\\ud800"}', "surrogates"),
    "surrogate key": (b'{"\\uDFFF": 1}', "surrogates"),
}


@pytest.mark.parametrize(("line", "message"), FAULTS.values(), ids=FAULTS)
def test_jsonl_faults_name_the_line(tmp_path, line, message):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}, line 2: .*{message}") as caught:
        list(files.read_jsonl(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 250


def test_a_whole_surrogate_pair_is_text(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}')
    assert [record for _, record in files.read_jsonl(path)] == [{"a": "\U0001f600"}]


def test_an_error_over_a_record_is_not_blamed_on_the_file(tmp_path):
    """What the reader of the records raises passes as it is."""
    path = tmp_path / "f.jsonl"
    path.write_text('{"a": 1}')
    with pytest.raises(DataError, match="^elsewhere: no$"):
        for _ in files.read_jsonl(path):
            raise DataError("elsewhere: no")


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "nul\0.jsonl"])
def test_a_wrong_path(tmp_path, name):
    with pytest.raises(DataError):
        list(files.read_jsonl(f"{tmp_path}/{name}"))


def test_json_is_an_object(tmp_path):
    path = tmp_path / "f.json"
    files.write_json(path, {"a": ["é"]})
    assert files.read_json(path) == {"a": ["é"]}
    for text, message in (("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")):
        path.write_text(text)
        with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {message}"):
            files.read_json(path)
    with pytest.raises(OSError):
        files.read_json(tmp_path / "missing")


def test_a_log_is_read_without_the_line_that_a_kill_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        files.append_line(path, {"step": step, "text": "é\u2028"})
    with open(path, "a") as file:
        file.write('{"step": 3, "te')
    assert [row["step"] for row in files.read_log(path)] == [0, 1, 2]
    path.write_text("")
    assert files.read_log(path) == []


def test_a_shipped_file_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "data/tinyworld/dev.jsonl"
    assert files.locate(name) == str(files.ROOT / name)
    assert files.locate("data/none.jsonl") == "data/none.jsonl"
    os.makedirs("data/tinyworld")
    (tmp_path / name).write_text("")
    assert files.locate(name) == name, "one of the user's own comes first"


# Writing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_text_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    files.write_text(path, "old é")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "a" * 100_000 + "\ud800")
    assert path.read_text(encoding="utf-8") == "old é" and names(tmp_path) == ["f"]
    files.write_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == ["f"]


def test_a_line_of_json_keeps_its_letters(tmp_path):
    path, record = tmp_path / "f.jsonl", {"a": "é\n"}
    line = '{"a": "é\\n"}\n'
    files.append_line(path, record)
    assert path.read_text(encoding="utf-8") == line and json.loads(line) == record
    files.write_jsonl(path, [record, {}])
    assert path.read_text(encoding="utf-8") == line + "{}\n" and names(tmp_path) == ["f.jsonl"]


@needs_fork
def test_a_file_without_space_leaves_the_old_one(tmp_path):
    files.write_text(tmp_path / "f", "old")

    def write():
        limit_files(5)
        try:
            files.write_text(tmp_path / "f", "much longer")
        except OSError:
            return 7

    assert outcome(in_child(write)) == 7
    assert (tmp_path / "f").read_text() == "old" and names(tmp_path) == ["f"]


def test_new_folder_appears_when_it_is_complete_and_the_last_one_is_kept(tmp_path):
    place = tmp_path / "sub" / "adapter"
    for text in ("1", "2", "3"):
        with files.new_folder(place) as beside:
            assert not place.exists() or (place / "f").read_text() != text
            (beside / "f").write_text(text)
    assert (place / "f").read_text() == "3"
    assert (tmp_path / "sub" / "adapter.old" / "f").read_text() == "2"
    assert names(tmp_path / "sub") == ["adapter", "adapter.old"]


def test_new_folder_that_fails_leaves_what_was_there_and_no_rubbish(tmp_path):
    place = tmp_path / "adapter"
    with files.new_folder(place) as beside:
        (beside / "f").write_text("old")
    with pytest.raises(OSError, match="No space"):
        with files.new_folder(place) as beside:
            (beside / "f").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == ["adapter"] and (place / "f").read_text() == "old"


def test_new_folder_sweeps_what_a_kill_left(tmp_path):
    (tmp_path / "a.tmp").mkdir()
    (tmp_path / "a.tmp" / "half").write_text("")
    with files.new_folder(tmp_path / "a") as beside:
        assert names(beside) == []


def test_an_output_that_cannot_be_written_is_named_with_its_option(tmp_path):
    files.check_writable("--out", None)
    files.check_writable("--out", tmp_path / "new.json")
    with pytest.raises(DataError, match=r"^--out .*no/new.json: .*no is no writable folder$"):
        files.check_writable("--out", tmp_path / "no" / "new.json")
    with pytest.raises(DataError, match="is a folder$"):
        files.check_writable("--out", tmp_path)
