"""The download of public question sets, against a server here that has every fault we know."""

import hashlib
import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT
from test_convert import main

from plumbing.data import load_questions
from plumbing.files import DataError

sys.path.insert(0, str(ROOT / "data"))
import convert  # noqa: E402
import download  # noqa: E402

ITEM = {
    "question": "Is it?",
    "answer": "yes",
    "supporting_facts": [["T", 0]],
    "context": [["T", ["It is."]]],
}
DATA = json.dumps([{"_id": str(i)} | ITEM for i in range(3000)]).encode()
SHA256 = hashlib.sha256(DATA).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves DATA. `cuts`: bytes sent in the first, second, ... answer before it breaks off."""

    cuts, ranges, status, kind, length, body = (), True, 200, "application/json", True, DATA

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.cuts = [], []
        self.url = f"http://127.0.0.1:{self.server_port}/f.json"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        start, size = int(asked[6:-1]) if asked and server.ranges else 0, len(server.body)
        status = server.status if server.status != 200 else 206 if start else 200
        if start >= size:
            status = 416
        self.send_response(status)
        self.send_header("Content-Type", server.kind)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
        body = server.body[start:] if status in (200, 206) else b"sorry"
        if server.length:
            length = len(body) if server.length is True else server.length
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def get(server, tmp_path):
    """get(sha256) downloads the server's file to get.path; get.part is what has come so far."""

    def get(sha256=SHA256):
        download.download(server.url, get.path, sha256, convert.read_array)

    get.path, get.part = tmp_path / "raw" / "f.json", tmp_path / "raw" / "f.json.part"
    return get


def had(get, content):
    get.part.parent.mkdir()
    get.part.write_bytes(content)


def names(tmp_path):
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


def test_download(server, get, tmp_path, capsys):
    get()
    assert get.path.read_bytes() == DATA
    assert names(tmp_path) == ["f.json"] and server.asked == [None]
    captured = capsys.readouterr()
    assert f"SHA-256 {SHA256} as expected" in captured.out and "100%" in captured.err
    get()  # it is not fetched twice
    assert len(server.asked) == 1 and "already there" in capsys.readouterr().out


def test_download_without_a_known_hash_is_read_through(server, get, capsys):
    get(None)
    assert f"SHA-256 {SHA256} with 3000 items" in capsys.readouterr().out
    assert get.path.read_bytes() == DATA


def test_download_that_breaks_off_goes_on_where_it_was(server, get, tmp_path):
    server.cuts = [100_000, 200_000]
    get()
    assert get.path.read_bytes() == DATA and names(tmp_path) == ["f.json"]
    assert server.asked == [None, "bytes=100000-", "bytes=300000-"]


def test_part_of_an_earlier_call_is_used(server, get):
    had(get, DATA[:50_000])
    get()
    assert get.path.read_bytes() == DATA and server.asked == ["bytes=50000-"]


def test_complete_part_of_an_earlier_call(server, get):
    had(get, DATA)
    get()
    assert get.path.read_bytes() == DATA and server.asked == [f"bytes={len(DATA)}-"]


def test_part_that_is_too_long_starts_anew(server, get):
    had(get, DATA + b"more")
    get()
    assert get.path.read_bytes() == DATA and server.asked == [f"bytes={len(DATA) + 4}-", None]


def test_server_without_range_sends_all_again(server, get):
    server.ranges, server.cuts = False, [100_000]
    get()
    assert get.path.read_bytes() == DATA and server.asked == [None, "bytes=100000-"]


def test_server_that_names_no_length(server, get):
    server.length = None
    get()
    assert get.path.read_bytes() == DATA


def test_server_that_always_breaks_off_is_given_up_and_the_part_kept(server, get, tmp_path):
    server.ranges, server.cuts = False, [100_000, 100_000, 100_000]
    problem = "cannot be fetched: .*broke off after 100,000 of .*the same command goes on"
    with pytest.raises(DataError, match=problem):
        get()
    assert names(tmp_path) == ["f.json.part"] and len(server.asked) == 2


def test_length_that_is_too_long(server, get, tmp_path):
    server.length, server.ranges = len(DATA) + 10, False
    with pytest.raises(DataError, match="broke off after"):
        get()
    assert names(tmp_path) == ["f.json.part"]


@pytest.mark.parametrize("sha256", [SHA256, None])
def test_file_cut_short_is_thrown_away(server, get, tmp_path, sha256):
    server.length = len(DATA) - 10
    problem = "not the expected file, thrown away: .*(SHA-256|not valid JSON)"
    with pytest.raises(DataError, match=problem):
        get(sha256)
    assert names(tmp_path) == []


def test_part_of_another_file_is_thrown_away(server, get, tmp_path):
    had(get, b"x" * 50_000)
    with pytest.raises(DataError, match="thrown away"):
        get()
    assert names(tmp_path) == []
    get()
    assert get.path.read_bytes() == DATA


REFUSALS = [
    (404, "text/html", "status 404"),
    (503, "text/plain", "status 503"),
    (204, "text/plain", "status 204"),
    (200, "text/html; charset=utf-8", "a web page"),
]


@pytest.mark.parametrize(("status", "kind", "message"), REFUSALS)
def test_answer_that_is_not_the_file_leaves_the_part_alone(
    server, get, tmp_path, status, kind, message
):
    server.status, server.kind = status, kind
    had(get, DATA[:1000])
    server.ranges = server.status != 200
    with pytest.raises(DataError, match=message) as caught:
        get()
    assert str(caught.value).startswith(server.url) and get.part.read_bytes() == DATA[:1000]
    assert names(tmp_path) == ["f.json.part"] and len(server.asked) == 1


def test_no_network_is_one_line(tmp_path, capsys, monkeypatch):
    public = {"dev": ("http://nowhere.invalid/f.json", None)}
    monkeypatch.setitem(convert.PUBLIC, "hotpotqa", public)
    assert main(["hotpotqa", "--download", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("convert.py: http://nowhere.invalid/f.json: cannot be fetched: ")
    assert err.count("\n") == 1 and names(tmp_path) == []


def test_server_that_is_none_cannot_write_to_the_terminal(tmp_path, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/f.json"
        monkeypatch.setitem(convert.PUBLIC, "hotpotqa", {"dev": (url, None)})

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x1b[31mSSH-2.0\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert main(["hotpotqa", "--download", "dev", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.endswith("\n") and err[:-1].isprintable() and "SSH-2.0" in err


def test_server_that_hangs(server, get, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server.url = f"http://127.0.0.1:{silent.getsockname()[1]}/f.json"
        with pytest.raises(DataError, match="cannot be fetched: .*timed out"):
            get()


def test_download_and_convert(server, tmp_path, monkeypatch, capsys):
    public = {"train": (server.url, SHA256), "a/b": (server.url, None)}
    monkeypatch.setitem(convert.PUBLIC, "hotpotqa", public)
    assert main(["hotpotqa", "--download", "--out", str(tmp_path), "--limit", "20"]) == 0
    made = [f"{name}{end}" for name in ("a_b", "train") for end in (".json", ".jsonl")]
    assert names(tmp_path) == sorted([*made, "a_b_corpus.jsonl", "train_corpus.jsonl"])
    assert len(load_questions(tmp_path / "train.jsonl")) == 20


def test_addresses_and_hashes_are_well_formed():
    for splits in convert.PUBLIC.values():
        for url, sha256 in splits.values():
            assert re.fullmatch(r"https?://[\w./-]+\.jsonl?", url)
            assert sha256 is None or re.fullmatch("[0-9a-f]{64}", sha256)
