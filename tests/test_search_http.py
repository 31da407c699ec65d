"""The search server and its client: over each other, and each against faults of the other side."""

import http.client
import json
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

import rollout
from plumbing import search_http
from plumbing.files import DataError
from plumbing.search_http import SearchClient, answer, make_server, read_hit
from retriever import BM25

PASSAGES = [
    {"id": "p", "title": 'The "Best"', "text": "Paris\nis in France"},
    {"id": "b", "title": "", "text": "Berlin is in Germany"},
    {"id": "é", "title": "T\nU", "text": "東京 is in Japan \x00"},
]


@contextmanager
def serving(retriever):
    """Our server over a retriever, with its `url`."""
    with make_server(retriever, port=0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        running.url = f"http://127.0.0.1:{running.server_port}/retrieve"
        yield running
        running.shutdown()


@pytest.fixture
def bm25():
    return BM25(PASSAGES)


@pytest.fixture
def server(bm25):
    with serving(bm25) as running:
        yield running


def post(server, body, headers=None):
    """(status, reply) of one request, made without our client."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", "/retrieve", body, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


# Both sides


@pytest.mark.parametrize("batch_size", [1, 4, 128])
def test_client_over_server_equals_bm25(server, bm25, batch_size):
    queries = ["paris", "is in", "zzz", "", "東 in", "\ud800 berlin \x1b[0m </information>"] * 5
    client = SearchClient(server.url, batch_size=batch_size)
    assert client.search(queries, 2) == bm25.search(queries, 2)


def test_the_path_is_added_and_the_server_is_this_machines_own(server):
    client = SearchClient(server.url.removesuffix("/retrieve"))
    assert client.search([]) == [] and client.search(["paris"])[0]
    assert server.server_address[0] == "127.0.0.1"


def test_a_proxy_for_the_web_is_not_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert SearchClient(server.url, retries=0).search(["paris"])[0]


def test_the_searches_of_a_turn_are_one_request(server, tiny, world, monkeypatch):
    requests = []

    def counted(body, retriever):
        requests.append(json.loads(body))
        return answer(body, retriever)

    monkeypatch.setattr(search_http, "answer", counted)
    settings, sampling = rollout.RolloutSettings(), rollout.Sampling(self_answers=False)
    client = SearchClient(server.url)
    rollout.rollout(tiny, world.questions[:6], client, settings, sampling)
    assert len(requests[0]["queries"]) > 1 and 1 <= len(requests) <= settings.max_searches


# The server


def test_server_speaks_search_r1(server):
    request = {"queries": ["paris"], "topk": 1, "return_scores": True}
    status, reply = post(server, json.dumps(request))
    (hit,) = reply["result"][0]
    assert status == 200 and hit["score"] > 0
    assert hit["document"]["contents"] == '"The "Best""\nParis\nis in France'
    status, reply = post(server, json.dumps({"queries": ["is", "zzz"]}))
    assert status == 200 and [len(documents) for documents in reply["result"]] == [3, 0]
    assert "contents" in reply["result"][0][0]


BAD_REQUESTS = [
    "",
    "nonsense",
    "[]",
    "{}",
    "null",
    '{"queries": "paris"}',
    '{"queries": [1]}',
    "[" * 100_000,
    b"\xff",
    '{"queries": ["a"], "topk": 1e9}',
    '{"queries": ["a"], "topk": 101}',
    '{"queries": ["a"], "topk": true}',
    json.dumps({"queries": ["a"] * 20_000}),
    json.dumps({"queries": ["a" * 20_000]}),
]


def test_server_serves_search_r1s_default_batch_in_pieces(bm25, monkeypatch):
    """2,560 queries in one request: 512 prompts, 5 rollouts of each."""
    sizes, search = [], bm25.search
    monkeypatch.setattr(bm25, "search", lambda q, k: sizes.append(len(q)) or search(q, k))
    queries = ["paris", "zzz", "is"] * 853 + ["paris"]
    status, reply = answer(json.dumps({"queries": queries, "topk": 1}), bm25)
    assert status == 200 and sizes == [1024, 1024, 512]
    assert [len(hits) for hits in reply["result"]] == [1, 0, 1] * 853 + [1]


@pytest.mark.parametrize("topk", ["0", "null"])
def test_no_topk_is_the_default(server, topk):
    status, reply = post(server, f'{{"queries": ["is"], "topk": {topk}}}')
    assert status == 200 and len(reply["result"][0]) == 3


def test_server_refuses_what_it_cannot_use(server, bm25):
    for body in BAD_REQUESTS:
        assert answer(body, bm25)[0] == 400
        status, reply = post(server, body)
        assert (status, list(reply)) == (400, ["error"])
    assert post(server, b"", {"Content-Length": str(20 << 20)})[0] == 413
    for length in ("-1", "abc", "9" * 30, "²".encode("latin-1")):
        assert post(server, b"", {"Content-Length": length})[0] == 411
    assert SearchClient(server.url).search(["paris"]) == bm25.search(["paris"])


def test_a_request_too_large_for_the_server_is_one_error(server):
    with pytest.raises(ConnectionError, match=r"(no answer|status 413).* \(tries: [12]\)$"):
        SearchClient(server.url, retries=1, backoff=0.01).search(["a" * (20 << 20)])


SLOW = [
    b"",
    b"POST /retr",
    b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
    b"\x00\xff\n\n",
    b"GET / HTTP/1.1\r\n\r\n",
]


def test_server_drops_silent_and_survives_broken_clients(bm25, monkeypatch, capfd):
    monkeypatch.setattr(search_http, "MAX_SECONDS", 0.3)
    with serving(bm25) as server:
        address, silent = ("127.0.0.1", server.server_port), []
        for start in SLOW:
            silent.append(socket.create_connection(address))
            silent[-1].sendall(start)
        gone = socket.create_connection(address)
        gone.sendall(SLOW[2])
        gone.close()
        assert SearchClient(server.url, retries=0).search(["paris"])[0]
        for connection in silent:  # each is dropped in the end
            connection.settimeout(5)
            with connection, suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
    assert "Traceback" not in capfd.readouterr().err


# The client, against a server that sends what it is told to


@pytest.fixture
def faulty():
    """start(*replies) -> (URL of a server, the replies that it has sent so far).

    It sends one reply a connection, the last for ever: bytes, or a list of bytes and pauses.
    """
    listeners = []

    def serve(listener, replies, sent):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            reply = replies[min(len(sent), len(replies) - 1)]
            sent.append(reply)
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for part in reply if isinstance(reply, list) else [reply]:
                    if isinstance(part, bytes):
                        connection.sendall(part)
                    else:
                        time.sleep(part)
                if reply:
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1 << 16)

    def start(*replies):
        listener, sent = socket.create_server(("127.0.0.1", 0)), []
        listeners.append(listener)
        threading.Thread(target=serve, args=(listener, replies, sent), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve", sent

    yield start
    for listener in listeners:
        listener.close()


def http_reply(body, status="200 OK", length=None):
    body = body if isinstance(body, bytes) else body.encode()
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def result(item):
    """The reply of a server that found one passage for one query."""
    return http_reply(f'{{"result": [[{item}]]}}')


GOOD = '{"document": {"id": 7, "contents": "\\"T\\"\\nx"}, "score": 1.5}'
HALF_A_CHUNK = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"re'
NO_GZIP = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"x" * 20
LONG_HEADER = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
FAULTS = {
    "HTML": (http_reply("<html>login</html>"), "status 200, body b'<html>login"),
    "error 500": (http_reply("no memory", "500 Oops"), "status 500, body b'no memory'"),
    "in colour": (http_reply("\x1b[31mx", "503 Busy"), r"status 503, body b'\\x1b\[31mx'"),
    "redirect": (http_reply("", "302 Found"), "status 302"),
    "nothing": (b"", "no answer: ConnectionError.*(RemoteDisconnected|ConnectionResetError)"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", "no answer: ConnectionError.*BadStatusLine"),
    "endless header": (LONG_HEADER, "no answer: ConnectionError.*LineTooLong"),
    "half an answer": (http_reply(GOOD, length=500), "no answer: ChunkedEncodingError.*Incomplete"),
    "half a chunk": (HALF_A_CHUNK, "no answer: ChunkedEncodingError"),
    "not what it says": (NO_GZIP, "no answer: ContentDecodingError"),
    "wrong count": (http_reply('{"result": []}'), "0 results for 1 queries"),
    "a list": (http_reply("[]"), "protocol"),
    "no result": (http_reply('{"error": "x"}'), "protocol"),
    "result a number": (http_reply('{"result": 5}'), "protocol"),
    "hit a string": (result('"x"'), "protocol"),
    "no contents": (result('{"document": {}, "score": 1}'), "protocol"),
    "contents a list": (result('{"document": {"contents": []}}'), "protocol"),
    "score a word": (result(GOOD.replace("1.5", '"high"')), "protocol"),
    "score enormous": (result(GOOD.replace("1.5", "1" + "0" * 400)), "protocol"),
    "deep": (http_reply("[" * 100_000), "protocol"),
    "not UTF-8": (http_reply(b'{"result": "\xff"}'), "protocol"),
    "hangs": ([3], "no answer: ReadTimeout.*timed out"),
    "hangs in the header": ([b"HTTP/1.1 200 OK\r\nX: ", 3], "no answer: ReadTimeout"),
    "hangs in the body": ([http_reply(GOOD, length=99), 3], "no answer: .*[Tt]imed out"),
}


@pytest.mark.parametrize(("reply", "message"), FAULTS.values(), ids=FAULTS)
def test_server_fault_is_one_error_after_retries(faulty, reply, message):
    url, _ = faulty(reply)
    start = time.perf_counter()
    with pytest.raises(ConnectionError, match=message) as caught:
        SearchClient(url, timeout=0.3, retries=1, backoff=0.01).search(["q"])
    assert time.perf_counter() - start < 3
    text = str(caught.value)
    assert text.startswith(url) and text.endswith("(tries: 2)") and len(text) < 600
    assert text.isprintable()


def test_client_recovers_after_faults(faulty):
    url, sent = faulty(b"", http_reply("x", "500 Oops"), result(GOOD))
    hit = {"id": "7", "title": "T", "text": "x", "score": 1.5}
    assert SearchClient(url, backoff=0.01).search(["q"]) == [[hit]]
    assert len(sent) == 3


def test_queries_travel_together(faulty):
    url, sent = faulty(http_reply(f'{{"result": [[{GOOD}], [], [{GOOD}]]}}'))
    found = SearchClient(url).search(["a", "b", "c"])
    assert [len(hits) for hits in found] == [1, 0, 1] and len(sent) == 1


def test_client_backs_off(monkeypatch):
    waits = []
    monkeypatch.setattr(search_http.time, "sleep", waits.append)
    with pytest.raises(ConnectionError, match=r"\(tries: 4\)$"):
        SearchClient("http://127.0.0.1:9/retrieve", retries=3, backoff=0.5).search(["q"])
    assert waits == [0, 0.5, 1.0, 2.0]


def test_refused_request_is_not_repeated(faulty):
    url, sent = faulty(http_reply("no such path", "404 Not Found"))
    with pytest.raises(ConnectionError, match=r"status 404, body b'no such path' \(tries: 1\)"):
        SearchClient(url).search(["q"])
    assert len(sent) == 1


@pytest.mark.parametrize("status", ["408 Request Timeout", "429 Too Many Requests"])
def test_refused_for_now_is_repeated(faulty, status):
    url, sent = faulty(http_reply("", status), result(GOOD))
    assert SearchClient(url, backoff=0.01).search(["q"])[0] and len(sent) == 2


def test_client_takes_documents_without_scores_and_half_surrogates(faulty):
    documents = [
        '{"contents": "\\"T\\"\\na \\ud800"}',
        '{"title": null, "text": "b"}',
        '{"text": "c"}',
    ]
    url, _ = faulty(result(", ".join(documents)))
    hits = SearchClient(url).search(["q"], k=2)[0]
    found = [(hit["title"], hit["text"], hit["score"]) for hit in hits]
    assert found == [("T", "a ?", 0.0), ("", "b", 0.0)]


def test_hits_with_and_without_a_score():
    document = {"id": 7, "contents": '"T"\nx'}
    assert read_hit(document) == {"id": "7", "title": "T", "text": "x", "score": 0.0}
    assert read_hit({"document": document, "score": 2})["score"] == 2.0


WRONG_URLS = ["", "localhost:8000", "ftp://x/y", "http://", "http://h:port/", "http://h/a b"]
WRONG_URLS += ["http://h\r\n/"]


@pytest.mark.parametrize("url", WRONG_URLS)
def test_wrong_url(url):
    with pytest.raises(DataError, match="not the URL of a search server"):
        SearchClient(url)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70 + ".invalid", "127.0.0.1:99999"])
def test_host_that_does_not_exist(host):
    url = f"http://{host}/retrieve"
    with pytest.raises(ConnectionError, match="^" + re.escape(f"{url}: no answer")) as caught:
        SearchClient(url, retries=0).search(["q"])
    assert str(caught.value).isprintable() and str(caught.value).endswith("(tries: 1)")
