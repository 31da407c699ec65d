"""Where passages come from: a corpus and questions in JSONL, BM25 in memory, or a search server over HTTP.

    python retriever.py --corpus C.jsonl --questions Q.jsonl    # recall@3 and recall@5 of the plain question
    python retriever.py --corpus C.jsonl --save_index C.npz     # build once, then --load_index C.npz for --corpus
    python retriever.py --corpus C.jsonl --serve                # the same BM25 under Search-R1's HTTP protocol

`BM25` and `SearchClient` have the same method, `search(queries, k)`. Two choices differ from rank-bm25 as it comes:
1. idf is log(1 + (N - df + 0.5) / (df + 0.5)), Lucene's form. The classic one, without "1 +", is 0 or less for a word
   in half of the passages: in a corpus of two no word would count. Counts, lengths and formula are rank-bm25's.
2. A passage without any word of the query is never returned (rank-bm25's `get_top_n` fills up with the last documents),
   and ties come in corpus order (there: reversed).
Passages are untrusted and stay here exactly as they were read; whoever shows them to a model or a terminal cleans them.
"""

import argparse
import json
import math
import os
import re
import socket
import string
import sys
import threading
import time
import unicodedata
from collections import defaultdict
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain

import numpy as np
from rank_bm25 import BM25Okapi

CACHED_QUERIES = 10_000
INDEX_FORMAT = 1  # goes up when tokenise or the arrays change: an older index would silently find less
MAX_REPLY = 64 << 20  # bytes the client reads
# Limits of our server: bytes, queries, passages each, characters of a query, seconds until it drops a client.
MAX_BODY, MAX_QUERIES, MAX_K, MAX_QUERY, MAX_SECONDS = 1 << 20, 1024, 100, 10_000, 20


class DataError(ValueError):
    """Input cannot be used. The message is one line that names the file and, where there is one, the line."""


class SearchError(RuntimeError):
    """A search server did not give a usable answer. One line: URL, status and the start of the body."""


def error_line(error):
    """The first line of an error's message, for a terminal: what it might obey (escapes, direction marks) goes.

    >>> error_line(DataError("a\\x1b[2Jb\\u202e: damaged\\nmore"))
    'a?[2Jb?: damaged'
    """
    first = str(error).partition("\n")[0] or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in first)


def _check(ok, where, problem):
    if not ok:
        raise DataError(f"{where}: {problem}")


def read_jsonl(path):
    """Yield ("file, line n", object) of a JSONL file in UTF-8; a BOM and blank lines are skipped. Raises DataError."""
    where = path
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path}, line {number}"
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                record = json.loads(line)
                if re.search(r"\\u[dD][89a-fA-F]", line):  # half a surrogate pair is no text: fail now, not on saving
                    json.dumps(record, ensure_ascii=False).encode("utf-8")
                if not isinstance(record, dict):
                    raise ValueError(f"expected one JSON object a line, got {type(record).__name__}")
                yield where, record
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, surrogates, thousands of digits or brackets
        raise DataError(f"{where}: {error}") from None


def _text(record, key, where, may_be_blank=False):
    """The string under `key`; an error where it is missing, no string, or blank."""
    _check(key in record, where, f'"{key}" is missing')
    _check(isinstance(record[key], str), where, f'"{key}" must be a string, not {type(record[key]).__name__}')
    _check(may_be_blank or record[key].strip(), where, f'"{key}" is empty')
    return record[key]


def _new_id(record, where, seen):
    """The id as a string (whole numbers are taken too), noted in `seen` (id -> where); an error if it is there."""
    name = str(record["id"]) if type(record.get("id")) is int else _text(record, "id", where)
    _check(name not in seen, where, f"id {name[:60]!r} was used before ({seen.get(name)})")
    seen[name] = where
    return name


def split_contents(contents):
    r"""Title and text of the field's `contents`: the first line is the title, its quotes go; a single line is all text.

    >>> split_contents('"Paris"\nParis is in France.')
    ('Paris', 'Paris is in France.')
    """
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents
    title = title.strip()
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title, text


def load_corpus(path):
    r"""Passages of a JSONL corpus, in file order: list of {"id", "title", "text"}, all strings, the text as it stands.

    A line is {"id", "contents": "\"Title\"\ntext"} (Search-R1, FlashRAG) or {"id", "title", "text"}; "" is a title too.
    Raises DataError (file and line) for anything malformed, missing, blank or double, and for a file without passages.
    """
    passages, seen = [], {}
    for where, record in read_jsonl(path):
        is_corpus = "text" in record or "contents" in record
        _check(is_corpus or "question" not in record, where, "this is a questions file, not a corpus")
        _check(is_corpus, where, 'neither "contents" nor "title" and "text"')
        name = _new_id(record, where, seen)
        if "text" in record:
            title, text = _text(record, "title", where, may_be_blank=True), _text(record, "text", where)
        else:
            title, text = split_contents(_text(record, "contents", where))
            _check(text.strip(), where, '"contents" has a title but no text')
        passages.append({"id": name, "title": title, "text": text})
    _check(passages, path, "the corpus is empty")
    _check(any(tokenise(f"{p['title']} {p['text']}") for p in passages), path, "no passage holds a word to search for")
    return passages


def is_blank(answer):
    """True where scoring would find nothing: only punctuation, spaces and invisible characters."""
    return all(c in string.punctuation or unicodedata.category(c)[0] in "CZP" for c in answer)


def _are_strings(value):
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def load_questions(path):
    """Questions of a JSONL file, in file order: list of {"id", "question", "golden_answers", "metadata"}.

    `golden_answers` (a list of strings; in the file one string will do) needs one that is not blank; `metadata` is {}
    where absent. Raises DataError (file and line) for anything malformed, missing, blank or double, or no questions.
    """
    questions, seen = [], {}
    for where, record in read_jsonl(path):
        is_corpus = "question" not in record and ("contents" in record or "text" in record)
        _check(not is_corpus, where, "this is a corpus, not a questions file")
        name, question = _new_id(record, where, seen), _text(record, "question", where)
        _check("golden_answers" in record, where, '"golden_answers" is missing')
        golds = record["golden_answers"]
        golds = [golds] if isinstance(golds, str) else golds
        _check(_are_strings(golds), where, '"golden_answers" must be a string or a list of strings')
        _check(not all(map(is_blank, golds)), where, '"golden_answers" holds no answer, or only blank ones')
        metadata = {} if record.get("metadata") is None else record["metadata"]
        _check(isinstance(metadata, dict), where, '"metadata" must be an object')
        titles = metadata.get("supporting_titles", [])
        _check(_are_strings(titles), where, '"supporting_titles" must be a list of strings')
        questions.append({"id": name, "question": question, "golden_answers": golds, "metadata": metadata})
    _check(questions, path, "there are no questions in it")
    return questions


# Accents (as NFKD sets them apart), soft hyphens, joiners and direction marks. The vowel signs of Indian and South-East
# Asian scripts are no accents, though no \w either. Chinese and Japanese have no spaces: each character is a word.
_DROPPED = re.compile("[\u0300-\u036f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:[^\W_\u3040-\u30ff\u3400-\u9fff]|[\u0900-\u0963\u0966-\u0eff])+")


def tokenise(text):
    """Words of a text: NFKD, case folded, accents dropped, split at everything that is no letter or digit.

    So "Beyoncé" composed, decomposed and unaccented are one word; "ø" or "ł", which have no accent, stay themselves.

    >>> tokenise("Beyoncé's 2nd-best SONG")
    ['beyonce', 's', '2nd', 'best', 'song']
    """
    if text.isascii():  # the same result, sooner
        return re.findall("[a-z0-9]+", text.lower())
    return _WORDS.findall(_DROPPED.sub("", unicodedata.normalize("NFKD", text).casefold()))


def _check_search(queries, k):
    if not isinstance(queries, (list, tuple)) or not _are_strings(list(queries)):  # a string: searched by letters
        raise TypeError(f"queries must be a list of strings, got {type(queries).__name__}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


class BM25:
    """BM25 over passages in memory: rank-bm25's statistics, kept as postings so that a query costs only its own words.

    score(q, d) = sum over the words w of q of  idf(w) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / avgdl))

    passages: list of {"id", "title", "text"}; title and text are both indexed. Raises DataError if they hold no word.

    >>> bm25 = BM25([{"id": "1", "title": "Paris", "text": "Paris is in France"},
    ...              {"id": "2", "title": "Berlin", "text": "Berlin is in Germany"}])
    >>> [[hit["title"] for hit in hits] for hits in bm25.search(["Paris", "in", "zzz"], k=5)]
    [['Paris'], ['Paris', 'Berlin'], []]
    """

    def __init__(self, passages, k1=1.5, b=0.75):
        words = defaultdict()  # word -> its number, in order of first use
        words.default_factory = words.__len__
        try:  # numbers from a generator: rank-bm25 counts any hashable, and the tokens are never all in memory
            stats = BM25Okapi([words[w] for w in tokenise(f"{p['title']} {p['text']}")] for p in passages)
        except ZeroDivisionError:
            raise DataError(f"the corpus is empty: no word in its {len(passages)} passages") from None
        counts = stats.doc_freqs  # list (N,) of {word: tf}
        sizes = np.fromiter(map(len, counts), np.int64, len(counts))
        word = np.fromiter(chain.from_iterable(counts), np.int64, sizes.sum())  # (P,) P = postings
        tf = np.fromiter(chain.from_iterable(c.values() for c in counts), np.int64, sizes.sum())
        order = np.argsort(word, kind="stable")  # by word; within a word in corpus order
        word, tf, where = word[order], tf[order], np.repeat(np.arange(len(counts)), sizes)[order]
        df = np.bincount(word)  # (V,) V = words
        idf = np.array([math.log(1 + (len(counts) - n + 0.5) / (n + 0.5)) for n in df.tolist()])
        length = np.array(stats.doc_len)[where]
        # The terms and their order are those of rank-bm25's get_scores: the scores are equal to the last bit.
        weight = idf[word] * (tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / stats.avgdl)))
        self._set(passages, dict(words), np.concatenate([[0], np.cumsum(df)]), where, weight)

    def _set(self, passages, words, starts, where, weight):
        """words: word -> w; the postings of w are [starts[w]:starts[w + 1]] of where (passage) and weight (score)."""
        self.passages, self.words, self.starts, self.where, self.weight = passages, words, starts, where, weight
        self._cache = {}

    def _top(self, query, k):
        """The best k passages of one query: list of (index, score)."""
        top = self._cache.get((query, k))
        if top is None:
            scores = np.zeros(len(self.passages))
            for w in (self.words[word] for word in tokenise(query) if word in self.words):
                span = slice(self.starts[w], self.starts[w + 1])
                np.add.at(scores, self.where[span], self.weight[span])  # faster than `scores[...] += ...`
            kth = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
            found = np.flatnonzero((scores >= kth) & (scores > 0))  # ties with the k-th stay in, for the stable sort
            best = found[np.argsort(-scores[found], kind="stable")][:k]
            if len(self._cache) >= CACHED_QUERIES:
                self._cache.clear()
            top = self._cache[query, k] = [(int(i), float(scores[i])) for i in best]
        return top  # not read from the cache again: another thread of the server may have emptied it

    def search(self, queries, k=3):
        """The best passages, best first: list (per query) of at most k {"id", "title", "text", "score"}.

        Ties are in corpus order; a query without a known word gets []. Raises TypeError where `queries` is no list of
        strings, ValueError for k < 1.
        """
        _check_search(queries, k)
        return [[{**self.passages[i], "score": score} for i, score in self._top(query, k)] for query in queries]

    def save(self, path):
        """Write the index to one .npz file: arrays, and JSON for words and passages. Raises OSError."""
        meta = json.dumps({"format": INDEX_FORMAT, "words": list(self.words), "passages": self.passages}).encode()
        arrays = {"meta": np.frombuffer(meta, np.uint8), "starts": self.starts, "where": self.where}
        try:
            with open(f"{path}.tmp", "wb") as file:
                np.savez(file, **arrays, weight=self.weight)
            os.replace(f"{path}.tmp", path)
        finally:
            with suppress(OSError):
                os.remove(f"{path}.tmp")

    @classmethod
    def load(cls, path):
        """The index `save` wrote; nothing in the file is executed. Raises DataError where it is damaged or missing."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                starts, where, weight = file["starts"], file["where"], file["weight"]
                meta = json.loads(file["meta"].tobytes())
            words, passages = {word: w for w, word in enumerate(meta["words"])}, meta["passages"]
            good = all(isinstance(p[key], str) for p in passages for key in ("id", "title", "text"))
            good = good and starts.dtype == where.dtype == np.int64 and weight.dtype == np.float64
            good = good and meta["format"] == INDEX_FORMAT and starts[-1] == len(where) == len(weight)
            good = good and starts[0] == 0 and (np.diff(starts) > 0).all() and len(words) == len(starts) - 1
            _check(good and where.min() >= 0 and where.max() < len(passages), path, "the parts do not fit together")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        except Exception:  # damaged zip, array and JSON data fail in a dozen ways, and all mean the same
            raise DataError(f"{path}: damaged, or no index of this version: build it again") from None
        index = cls.__new__(cls)
        index._set(passages, words, starts, where, weight)
        return index


def open_corpus(path):
    """A BM25 over a corpus file, or the index that `--save_index` made of one (.npz). Raises DataError."""
    return BM25.load(path) if str(path).endswith(".npz") else BM25(load_corpus(path))


def recall(retriever, questions, ks=(3, 5)):
    """{k: recall@k}, the query being the plain question: the share of its supporting titles among the titles of the
    first k passages, averaged over the questions that name some. Raises DataError where none does.
    """
    questions = [q for q in questions if q["metadata"].get("supporting_titles")]
    _check(questions, "no recall", "no question has supporting_titles in its metadata")
    hits = retriever.search([q["question"] for q in questions], max(ks))
    pairs = [(set(q["metadata"]["supporting_titles"]), h) for q, h in zip(questions, hits, strict=True)]
    return {k: sum(len(w & {hit["title"] for hit in h[:k]}) / len(w) for w, h in pairs) / len(pairs) for k in ks}


def _cut_off(sock, seconds):
    """A started timer that ends all traffic of a socket; a socket's own time-out begins anew with every byte."""

    def shut():
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True  # does not keep the process alive
    timer.start()
    return timer


def _read_hit(item):
    """A passage with its score from an item of a server's reply; without scores some servers send the bare document."""
    document = item.get("document", item)
    title, text = document.get("title") or "", document.get("text")
    title, text = (title, text) if isinstance(text, str) else split_contents(document["contents"])
    # Half a surrogate pair in the JSON would break every later encoding of the text.
    name, title, text = (s.encode("utf-8", "replace").decode() for s in (str(document.get("id", "")), title, text))
    return {"id": name, "title": title, "text": text, "score": float(item.get("score", 0.0))}


class SearchClient:
    """`BM25.search` on a server that speaks Search-R1's protocol: POST {"queries", "topk", "return_scores"}, answered
    by {"result": [[{"document": {"contents"}, "score"}]]}.

    url: http(s)://HOST:PORT/retrieve, the path being added if there is none. timeout: seconds for one request in all.
    retries: further tries, after backoff, 2 * backoff, 4 * backoff ... seconds. batch_size: queries in one request.
    """

    def __init__(self, url, timeout=30.0, retries=3, backoff=0.5, batch_size=128):
        self.url, self.timeout, self.retries = url, timeout, retries
        self.backoff, self.batch_size = backoff, batch_size
        found = re.fullmatch(r"(https?)://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[!-~]*)?", url, re.ASCII)
        _check(found, repr(url), "not the URL of a search server, such as http://127.0.0.1:8000/retrieve")
        self._kind = HTTPSConnection if found[1] == "https" else HTTPConnection
        self._host, self._path = found[2] + (found[3] or ""), (found[4] or "/").rstrip("/") or "/retrieve"

    def search(self, queries, k=3):
        """As `BM25.search`, scores and order being the server's. Raises SearchError once the retries are used up."""
        _check_search(queries, k)
        batches = [queries[i : i + self.batch_size] for i in range(0, len(queries), self.batch_size)]
        return [hits for batch in batches for hits in self._ask(batch, k)]

    def _ask(self, queries, k):
        request = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        for attempt in range(self.retries + 1):
            time.sleep(self.backoff * 2 ** (attempt - 1) if attempt else 0)
            start, problem = time.perf_counter(), "no answer"
            try:
                status, body = self._post(request)
                problem = f"status {status}, body {body[:200]!r}"
                if status == 200:
                    results = json.loads(body)["result"]
                    if len(results) == len(queries):
                        return [[_read_hit(item) for item in result[:k]] for result in results]
                    problem += f": {len(results)} results for {len(queries)} queries"
                elif 400 <= status < 500 and status not in (408, 429):
                    break  # it would refuse the same request again
            except (OSError, HTTPException) as error:
                problem += f": {error!r:.200}"
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
                problem += ": not what Search-R1's protocol promises"
            problem += f", after {time.perf_counter() - start:.1f} s"
        raise SearchError(f"{self.url}: {problem} (tries: {attempt + 1})")

    def _post(self, request):
        """(status, body) of one request. Raises OSError or HTTPException."""
        connection = self._kind(self._host, timeout=self.timeout)
        connection.connect()
        timer = _cut_off(connection.sock, self.timeout)
        try:
            connection.request("POST", self._path, request, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read(MAX_REPLY)
        finally:
            timer.cancel()
            connection.close()


def _answer(body, retriever):
    """(status, JSON-ready reply) of our server to a request's body."""
    try:
        request = json.loads(body)
        queries, k, with_scores = request["queries"], request.get("topk"), request.get("return_scores")
        k = 3 if k is None else k
        good = _are_strings(queries) and len(queries) <= MAX_QUERIES and all(len(q) <= MAX_QUERY for q in queries)
        if not good or type(k) is not int or not 1 <= k <= MAX_K:
            raise ValueError
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        limits = f"at most {MAX_QUERIES} queries of {MAX_QUERY} characters, topk 1 to {MAX_K}"
        return 400, {"error": f'expected {{"queries": [str], "topk": 3, "return_scores": true}}, {limits}'}
    results = []
    for hits in retriever.search(queries, k):
        scores = [hit.pop("score") for hit in hits]
        hits = [{**hit, "contents": f'"{hit["title"]}"\n{hit["text"]}'} for hit in hits]
        pairs = [{"document": hit, "score": score} for hit, score in zip(hits, scores, strict=True)]
        results.append(pairs if with_scores else hits)
    return 200, {"result": results}


def make_server(retriever, host="127.0.0.1", port=8000):
    """A server of `retriever.search` under Search-R1's protocol (POST /retrieve), ready for `.serve_forever()`.

    Bodies, query counts and lengths, k and the time of a request are limited; port 0 takes a free one. Raises OSError.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            timer = _cut_off(self.connection, MAX_SECONDS)
            with suppress(OSError):  # the client hung up
                super().handle()
            timer.cancel()

        def do_POST(self):
            length = self.headers.get("Content-Length", "")
            size = int(length) if re.fullmatch("[0-9]{1,18}", length) else -1
            status, reply = 411 if size < 0 else 413, {"error": f"a body of at most {MAX_BODY} bytes is needed"}
            if 0 <= size <= MAX_BODY:
                status, reply = _answer(self.rfile.read(size), retriever)
            else:  # closing with unread data would reset the connection before the answer is read
                while size > 0 and (part := self.rfile.read(min(size, MAX_BODY))):
                    size -= len(part)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args):
            pass  # what a request says is not for the terminal

    return ThreadingHTTPServer((host, port), Handler)


def main(argv=None):
    """The command line; returns the exit code: 2, after one line, where input cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="JSONL file of passages")
    source.add_argument("--load_index", help="index written by --save_index, in place of --corpus")
    parser.add_argument("--questions", help="JSONL file of questions: print recall@3 and recall@5 of supporting_titles")
    parser.add_argument("--save_index", help="write the index to this .npz file")
    parser.add_argument("--serve", action="store_true", help="answer POST /retrieve until stopped")
    parser.add_argument("--host", default="127.0.0.1", help="address for --serve (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port for --serve (default: 8000)")
    args = parser.parse_args(argv)
    try:
        questions = load_questions(args.questions) if args.questions else []
        index = BM25.load(args.load_index) if args.load_index else BM25(load_corpus(args.corpus))
        print(f"{len(index.passages)} passages, {len(index.words)} different words")
        if questions:
            values = "  ".join(f"recall@{k} {value:.3f}" for k, value in recall(index, questions).items())
            print(f"{len(questions)} questions: {values}")
        if args.save_index:
            index.save(args.save_index)
        if args.serve:
            with make_server(index, args.host, args.port) as server, suppress(KeyboardInterrupt):
                print(f"serving http://{args.host}:{server.server_port}/retrieve, Ctrl-C stops", flush=True)
                server.serve_forever()
    except (DataError, OSError, OverflowError) as error:  # OverflowError: a port that is none
        print(f"error: {error_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
