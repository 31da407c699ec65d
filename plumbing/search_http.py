"""Search-R1's protocol, both sides: POST /retrieve with {"queries", "topk", "return_scores"},
answered by {"result": [[{"document": {"contents"}, "score"}]]}."""

import json
import re
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

from plumbing.data import are_strings, check_queries, split_contents
from plumbing.files import check

# Limits of our server: bytes, queries, passages each, characters of a query, seconds of silence.
MAX_BODY, MAX_QUERIES, MAX_K, MAX_QUERY, MAX_SECONDS = 1 << 24, 16_384, 100, 10_000, 20
AT_ONCE = 1024  # queries that the retriever is given in one call
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class SearchClient:
    """`BM25.search` on the server at `url`: http(s)://HOST:PORT, with a path or /retrieve.
    timeout: seconds without a byte. retries: further tries, after backoff, 2 * backoff, 4 * backoff
    ... seconds. batch_size: queries in one request. Raises DataError for a `url` that is none."""

    def __init__(self, url, timeout=30.0, retries=3, backoff=0.5, batch_size=128):
        self.timeout, self.retries = timeout, retries
        self.backoff, self.batch_size = backoff, batch_size
        pattern = r"(https?://(?:[\w.-]+|\[[\da-f:]+\])(?::\d{1,5})?)(/[!-~]*)?"
        found = re.fullmatch(pattern, url, re.ASCII)
        problem = "not the URL of a search server, such as http://127.0.0.1:8000/retrieve"
        check(found, repr(url), problem)
        self.url = found[1] + ((found[2] or "/").rstrip("/") or "/retrieve")
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy for the web is none for a server of one's own

    def search(self, queries, k=3):
        """As `BM25.search`, scores and order being the server's. Raises ConnectionError."""
        check_queries(queries, k)
        found = []
        for start in range(0, len(queries), self.batch_size):
            found += self.ask(list(queries[start : start + self.batch_size]), k)
        return found

    def ask(self, queries, k):
        """One request, sent again after what may pass: no answer, a server's error, no JSON."""
        request = {"queries": queries, "topk": k, "return_scores": True}
        for attempt in range(self.retries + 1):
            time.sleep(self.backoff * 2 ** (attempt - 1) if attempt else 0)
            problem = "no answer"
            try:
                how = {"timeout": self.timeout, "allow_redirects": False}
                response = self.session.post(self.url, json=request, **how)
                problem = f"status {response.status_code}, body {response.content[:200]!r}"
                if response.status_code == 200:
                    results = json.loads(response.content)["result"]
                    if len(results) == len(queries):
                        return [list(map(read_hit, result[:k])) for result in results]
                    problem += f": {len(results)} results for {len(queries)} queries"
                elif 400 <= response.status_code < 500 and response.status_code not in (408, 429):
                    break  # it would refuse the same request again
            except requests.RequestException as error:
                problem += f": {error!r:.200}"
            except MALFORMED:
                problem += ": not what Search-R1's protocol promises"
        raise ConnectionError(f"{self.url}: {problem} (tries: {attempt + 1})")


def read_hit(item):
    """A passage with its score; without scores some servers send the bare document."""
    document = item.get("document", item)
    title, text = document.get("title") or "", document.get("text")
    if not isinstance(text, str):
        title, text = split_contents(document["contents"])
    hit = {"id": str(document.get("id", "")), "title": title, "text": text}
    # Half a surrogate pair in the JSON would break every later encoding of the text.
    hit = {key: value.encode("utf-8", "replace").decode() for key, value in hit.items()}
    return hit | {"score": float(item.get("score", 0.0))}


def answer(body, retriever):
    """(status, JSON-ready reply) of our server to a request's body."""
    try:
        request = json.loads(body)
        queries, k = request["queries"], request.get("topk") or 3  # 0 and null, as there
        with_scores = request.get("return_scores")
        good = are_strings(queries) and len(queries) <= MAX_QUERIES and type(k) is int
        good = good and 1 <= k <= MAX_K and all(len(query) <= MAX_QUERY for query in queries)
    except MALFORMED:
        good = False
    if not good:
        limits = f"at most {MAX_QUERIES} queries of {MAX_QUERY} characters, topk 1 to {MAX_K}"
        usage = '{"queries": [str], "topk": 3, "return_scores": true}'
        return 400, {"error": f"expected {usage}, {limits}"}
    results = []
    for start in range(0, len(queries), AT_ONCE):
        results += retriever.search(queries[start : start + AT_ONCE], k)
    for hits in results:
        for i, hit in enumerate(hits):
            score = hit.pop("score")
            hit["contents"] = f'"{hit["title"]}"\n{hit["text"]}'
            hits[i] = {"document": hit, "score": score} if with_scores else hit
    return 200, {"result": results}


def make_server(retriever, host="127.0.0.1", port=8000):
    """A server of `retriever.search`, for `.serve_forever()`; port 0 is any. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        timeout = MAX_SECONDS

        def handle(self):
            with suppress(OSError):  # the client hung up
                super().handle()

        def do_POST(self):
            length = self.headers.get("Content-Length", "")
            size = int(length) if re.fullmatch("[0-9]{1,18}", length) else -1
            status, reply = 413, {"error": f"a body of at most {MAX_BODY} bytes is needed"}
            if size < 0:
                status = 411
            elif size <= MAX_BODY:
                status, reply = answer(self.rfile.read(size), retriever)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args):
            pass  # what a request says is not for the terminal

    return ThreadingHTTPServer((host, port), Handler)
