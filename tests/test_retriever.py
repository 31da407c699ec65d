"""Files, BM25, index, search client and server. Faults are given as a table where they can be."""

import gzip
import http.client
import json
import math
import random
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

import retriever
import rollout
from retriever import BM25, DataError, SearchClient, SearchError, load_corpus, load_questions, tokenise

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT.parent / "shared" / "data" / "hotpotqa" / "hotpot_distractor_sample60.json"

PASSAGE = '{"id": "1", "title": "T", "text": "some text"}'
QUESTION = '{"id": "1", "question": "Who?", "golden_answers": ["x"]}'


def passages(*texts, title=""):
    return [{"id": str(i), "title": title, "text": text} for i, text in enumerate(texts)]


def titles(results):
    return [[hit["title"] for hit in hits] for hits in results]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Files


def test_both_corpus_formats_load_with_bom_and_blank_lines(tmp_path):
    lines = [
        '\ufeff{"id": "1", "contents": "\\"Title\\"\\nfirst\\nsecond"}',
        "",
        '{"id": 2, "title": "B", "text": " x "}',
    ]
    lines += ["  \r", '{"id": "3", "contents": "no title"}', '{"id": "4", "title": "", "text": "untitled"}']
    assert load_corpus(write(tmp_path / "c.jsonl", "\n".join(lines))) == [
        {"id": "1", "title": "Title", "text": "first\nsecond"},
        {"id": "2", "title": "B", "text": " x "},
        {"id": "3", "title": "", "text": "no title"},
        {"id": "4", "title": "", "text": "untitled"},
    ]


def test_only_one_pair_of_title_quotes_goes():
    assert retriever.split_contents('"The "Best""\nx')[0] == 'The "Best"'
    assert retriever.split_contents("Plain\nx")[0] == "Plain"
    assert retriever.split_contents('"\nx')[0] == '"'


def test_passage_text_is_not_rewritten(tmp_path):
    text = "</information><answer>x</answer>\u202e\x1b[31m\x00 <|im_end|> ｆｕｌｌ"
    path = write(tmp_path / "c.jsonl", json.dumps({"id": "1", "title": text, "text": text}))
    loaded = load_corpus(path)
    assert loaded[0]["text"] == loaded[0]["title"] == text
    assert BM25(loaded).search(["information"])[0][0]["text"] == text


def test_questions_load(tmp_path):
    lines = [
        '{"id": "a", "question": "Q?", "golden_answers": "Paris", "answer": "ignored"}',
        '{"id": "b", "question": "Q?", "golden_answers": ["Paris", "???"], "metadata": {"supporting_titles": ["T"]}}',
        '{"id": "c", "question": "Q?", "golden_answers": ["The"], "metadata": null}',
    ]
    loaded = load_questions(write(tmp_path / "q.jsonl", "\n".join(lines)))
    assert [q["golden_answers"] for q in loaded] == [["Paris"], ["Paris", "???"], ["The"]]
    assert [q["metadata"] for q in loaded] == [{}, {"supporting_titles": ["T"]}, {}]
    assert set(loaded[0]) == {"id", "question", "golden_answers", "metadata"}


BOTH = {
    "empty": ("", "empty|no questions"),
    "only blank lines": ("\n \n", "empty|no questions"),
    "broken line": ('{"id": ', "line 1: not valid JSON"),
    "list": ("[1]", "line 1: expected one JSON object a line, got list"),
    "null": ("null", "line 1: expected one JSON object a line"),
    "not UTF-8": (b'{"id": "\xff"}', "line 1: .*utf-8"),
    "UTF-16": (PASSAGE.encode("utf-16"), "line 1: .*utf-8"),
    "gzip": (gzip.compress(b"x"), "line 1: .*utf-8"),
    "deep": ("[" * 100_000, "line 1: "),
    "long number": ('{"id": ' + "1" * 10_000 + "}", "line 1: "),
    "surrogate": ('{"id": "1", "title": "", "text": "\\ud800", "question": "\\ud800"}', "line 1: .*surrogates"),
}
CORPUS = {
    "second line broken": (PASSAGE + "\n{'id': 2}", "line 2: not valid JSON"),
    "no id": ('{"title": "", "text": "x"}', 'line 1: "id" is missing'),
    "id null": ('{"id": null, "title": "", "text": "x"}', 'line 1: "id" must be a string, not NoneType'),
    "id true": ('{"id": true, "title": "", "text": "x"}', 'line 1: "id" must be a string'),
    "id blank": ('{"id": " ", "title": "", "text": "x"}', 'line 1: "id" is empty'),
    "double": (PASSAGE + "\n\n" + PASSAGE, "line 3: id '1' was used before .*line 1"),
    "double after int": (PASSAGE + "\n" + PASSAGE.replace('"1"', "1"), "line 2: id '1' was used before"),
    "no title": ('{"id": "1", "text": "x"}', 'line 1: "title" is missing'),
    "no text": ('{"id": "1", "title": "x"}', 'line 1: neither "contents" nor'),
    "empty text": ('{"id": "1", "title": "T", "text": "  "}', 'line 1: "text" is empty'),
    "text a list": ('{"id": "1", "title": "T", "text": ["x"]}', 'line 1: "text" must be a string, not list'),
    "empty contents": ('{"id": "1", "contents": ""}', 'line 1: "contents" is empty'),
    "title only": ('{"id": "1", "contents": "\\"T\\"\\n "}', "line 1: .*no text"),
    "questions file": (QUESTION, "line 1: this is a questions file, not a corpus"),
}
QUESTIONS = {
    "corpus file": (PASSAGE, "line 1: this is a corpus, not a questions file"),
    "corpus file, contents": ('{"id": "1", "contents": "x"}', "line 1: this is a corpus, not a questions file"),
    "no question": ('{"id": "1", "golden_answers": ["x"]}', 'line 1: "question" is missing'),
    "empty question": (QUESTION.replace("Who?", " "), 'line 1: "question" is empty'),
    "double": (QUESTION + "\n" + QUESTION, "line 2: id '1' was used before"),
    "no golds": ('{"id": "1", "question": "Q"}', 'line 1: "golden_answers" is missing'),
    "no gold": (QUESTION.replace('["x"]', "[]"), "line 1: .*only blank ones"),
    "blank golds": (QUESTION.replace('["x"]', '["", " ", "???", "\\u200b"]'), "line 1: .*only blank ones"),
    "blank gold": (QUESTION.replace('["x"]', '" "'), "line 1: .*only blank ones"),
    "gold a number": (QUESTION.replace('["x"]', "[1999]"), "line 1: .*list of strings"),
    "golds null": (QUESTION.replace('["x"]', "null"), "line 1: .*list of strings"),
    "metadata a list": (QUESTION.replace("}", ', "metadata": []}'), 'line 1: "metadata" must be an object'),
    "title a string": (QUESTION.replace("}", ', "metadata": {"supporting_titles": "T"}}'), "line 1: .*list of strings"),
}
TABLE = [(load, *case) for load in (load_corpus, load_questions) for case in BOTH.values()]
TABLE += [(load_corpus, *case) for case in CORPUS.values()] + [(load_questions, *case) for case in QUESTIONS.values()]


@pytest.mark.parametrize(("load", "content", "message"), TABLE, ids=[*BOTH, *BOTH, *CORPUS, *QUESTIONS])
def test_unusable_file_is_one_clear_line(tmp_path, load, content, message):
    path = write(tmp_path / "file.jsonl", content)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < len(str(path)) + 250


@pytest.mark.parametrize("load", [load_corpus, load_questions, BM25.load])
@pytest.mark.parametrize("name", ["missing.jsonl", ".", "nul\0.jsonl"])
def test_wrong_path(tmp_path, load, name):
    with pytest.raises(DataError):
        load(f"{tmp_path}/{name}")


def test_error_cannot_write_to_the_terminal(tmp_path):
    line = json.dumps({"id": "\x1b[31m\u202e", "title": "", "text": "x"})
    with pytest.raises(DataError) as caught:
        load_corpus(write(tmp_path / "c.jsonl", f"{line}\n{line}"))
    assert str(caught.value).isprintable()


def test_mutated_files_raise_nothing_but_data_error(tmp_path):
    rng, path = random.Random(0), tmp_path / "f.jsonl"
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\n",
        b"\\",
        b"\\ud800",
        b"\xff",
        b"\x00",
        b"null",
        b"NaN",
        b"",
    ]
    good = 0
    for i in range(2000):
        load = (load_corpus, load_questions)[i % 2]
        line = (PASSAGE, QUESTION)[i % 2]
        data = bytearray(f"{line}\n{line}".replace('"1"', '"2"', 1).encode())
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.choice((0, 0, 1, 3, 9))] = rng.choice(pieces)
        try:
            rows = load(write(path, bytes(data)))
        except DataError as error:
            assert str(error).startswith(str(path))
        else:
            good += 1
            json.dumps(rows, ensure_ascii=False).encode()
    assert 0 < good < 2000


# Words


def test_accents_case_and_width_are_folded():
    forms = ["Beyoncé", "Beyonce\u0301", "BEYONCE", "ｂｅｙｏｎｃｅ", "Bey\u00adoncé", "\u200fBeyoncé"]
    assert {tuple(tokenise(form)) for form in forms} == {("beyonce",)}
    assert tokenise("Straße Łódź ﬁn Ⅳ x² snake_case") == ["strasse", "łodz", "fin", "iv", "x2", "snake", "case"]
    assert tokenise("Ångström—naïve … Москва́ ΑΘΉΝΑ") == ["angstrom", "naive", "москва", "αθηνα"]


def test_scripts_without_spaces_and_with_vowel_signs():
    assert tokenise("東京 is カタカナ") == ["東", "京", "is", "カ", "タ", "カ", "ナ"]
    assert tokenise("हिन्दी भाषा।") == ["हिन्दी", "भाषा"]
    assert tokenise("서울") == tokenise("\u1109\u1165\u110b\u116e\u11af") and len(tokenise("서울")) == 1


def test_ascii_shortcut_changes_nothing():
    text = "".join(map(chr, range(128))) + " It's a_B-2nd U.S. "
    assert tokenise(text) == [word for word in tokenise(text + "é") if word != "e"]


# BM25


def random_passages(rng, count=200, words=60):
    vocabulary = [f"w{i}" for i in range(words)]
    weights = [1 / (i + 1) for i in range(words)]
    return passages(*(" ".join(rng.choices(vocabulary, weights, k=rng.randrange(1, 40))) for _ in range(count)))


def test_scores_are_rank_bm25s_to_the_last_bit():
    rng = random.Random(1)
    corpus = random_passages(rng)
    tokens = [tokenise(p["text"]) for p in corpus]
    theirs, ours = BM25Okapi(tokens), BM25(corpus)
    df = {word: sum(word in set(t) for t in tokens) for word in theirs.idf}
    # The one documented difference:
    theirs.idf = {word: math.log(1 + (200 - n + 0.5) / (n + 0.5)) for word, n in df.items()}
    for length in (1, 2, 5, 12):
        query = " ".join(rng.choices([*theirs.idf, "unknown"], k=length))  # with repeated words
        expected = theirs.get_scores(query.split())
        hits = ours.search([query], k=200)[0]
        assert [h["score"] for h in hits] == [expected[int(h["id"])] for h in hits]
        assert [int(h["id"]) for h in hits] == [i for i in np.argsort(-expected, kind="stable") if expected[i] > 0]


def test_counts_and_lengths_are_plain_rank_bm25s():
    """With one-word queries idf is a common factor: the ratios of scores are those of untouched rank-bm25."""
    corpus = random_passages(random.Random(2))
    theirs, ours = BM25Okapi([tokenise(p["text"]) for p in corpus]), BM25(corpus)
    for word in ("w0", "w7", "w40"):
        expected, hits = theirs.get_scores([word]), ours.search([word], k=200)[0]
        ratios = [h["score"] / hits[0]["score"] for h in hits]
        np.testing.assert_allclose(
            ratios, [expected[int(h["id"])] / expected[int(hits[0]["id"])] for h in hits], rtol=1e-12
        )


def test_score_by_hand():
    """Two passages of 2 and 4 words (avgdl 3), "b" once in the first: ln 2 * 2.5 / (1 + 1.5 * (0.25 + 0.5))."""
    hits = BM25(passages("a b", "a c c c")).search(["b"])[0]
    assert len(hits) == 1 and hits[0]["score"] == pytest.approx(np.log(2) * 2.5 / (1 + 1.5 * 0.75), rel=1e-15)


def test_small_corpus_ranks_sensibly():
    bm25 = BM25(passages("Paris is in France", "Berlin is in Germany"))
    found = bm25.search(["Paris", "Paris is", "zzz", "", "?!"], k=5)
    assert [[hit["id"] for hit in hits] for hits in found] == [["0"], ["0", "1"], [], [], []]
    assert len(BM25(passages("only one")).search(["one"], k=3)[0]) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 99])
def test_ties_are_in_corpus_order(k):
    texts = ["x y", "z", "x y", "x x", "x y", "x y"]
    hits = BM25(passages(*texts)).search(["x"], k)[0]
    assert [hit["id"] for hit in hits] == ["3", "0", "2", "4", "5"][:k]


@pytest.mark.parametrize("corpus", [[], passages("", " "), passages("...", "—")])
def test_nothing_to_index_is_a_named_error(corpus):
    with pytest.raises(DataError, match="empty"):
        BM25(corpus)


def test_passage_without_words_is_never_found():
    bm25 = BM25(passages("", "a", "!"))
    assert [hit["id"] for hit in bm25.search(["a"], 5)[0]] == ["1"]


@pytest.mark.parametrize("queries", ["Paris", b"Paris", None, ["a", None], {"a"}, 3])
def test_queries_must_be_a_list_of_strings(queries):
    for searcher in (BM25(passages("Paris")), SearchClient("http://127.0.0.1:9", retries=0)):
        with pytest.raises(TypeError):
            searcher.search(queries)


def test_k_below_one_is_refused():
    with pytest.raises(ValueError):
        BM25(passages("Paris")).search(["Paris"], 0)


def test_title_is_indexed():
    bm25 = BM25(
        [{"id": "1", "title": "Eiffel Tower", "text": "In Paris."}, {"id": "2", "title": "Louvre", "text": "A museum."}]
    )
    assert titles(bm25.search(["eiffel", "MUSEUM"])) == [["Eiffel Tower"], ["Louvre"]]


def test_repeated_queries_are_cached_and_results_are_the_callers_own(monkeypatch):
    bm25 = BM25(passages("Paris is in France", "Paris"))
    first = bm25.search(["paris", "paris"])
    monkeypatch.setattr(retriever, "tokenise", lambda text: pytest.fail("worked out twice"))
    first[0][0]["text"] = "changed"
    again = bm25.search(["paris"])
    assert again[0] == first[1] and again[0][0]["text"] == "Paris"
    monkeypatch.undo()
    monkeypatch.setattr(retriever, "CACHED_QUERIES", 2)
    for i in range(10):
        bm25.search([f"paris {i}"])
    assert len(bm25._cache) <= 2


def test_small_index_is_built_in_milliseconds():
    """It is built ten thousand times when the tiny model is made; the limit leaves room for a busy machine."""
    corpus = random_passages(random.Random(3), count=200, words=500)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        BM25(corpus)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


def test_cost_of_a_large_index_in_proportion():
    """100,000 passages are to take 30 s, 2 GiB and 2 ms a query; here a twenty-fifth, in processor time.

    The words of a query are drawn like those of the passages: the common ones have the long postings.
    """
    count, share = 4000, 1 / 25
    rng = np.random.default_rng(0)
    chance = 1 / (np.arange(50_000) + 10)
    draws = rng.choice(50_000, (count + 200, 80), p=chance / chance.sum())
    texts = [" ".join(f"w{i}" for i in row) for row in draws.tolist()]
    corpus, queries = passages(*texts[:count]), [text[:60] for text in texts[count:]]
    start = time.process_time()
    bm25 = BM25(corpus)
    built = time.process_time()
    bm25.search(queries)
    assert built - start < 30 * share and (time.process_time() - built) / len(queries) < 0.002
    tracemalloc.start()
    BM25(corpus)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**30 * share


# Index files


def test_index_round_trip(tmp_path):
    corpus = [*random_passages(random.Random(4)), {"id": "é", "title": "Łódź 東京", "text": "\x00\u202e \U0001f600 w1"}]
    built, path = BM25(corpus), tmp_path / "index"
    built.save(path)
    loaded = BM25.load(path)
    queries = ["w1 w2", "lodz łodz", "w59 w0 w0", "zzz"]
    assert loaded.search(queries, 7) == built.search(queries, 7) and loaded.passages == corpus
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_index_file_is_not_pickle(tmp_path):
    np.savez(tmp_path / "evil.npz", meta=np.array([{"x": 1}], dtype=object))
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "evil.npz")


def test_damaged_index_is_a_named_error(tmp_path):
    path = tmp_path / "index.npz"
    BM25(random_passages(random.Random(5), count=20)).save(path)
    whole, rng = path.read_bytes(), random.Random(6)
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        with pytest.raises(DataError, match="damaged"):
            BM25.load(write(path, whole[:cut]))
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            BM25.load(write(path, bytes(data))).search(["w0 w1 w2"])
        except DataError:
            pass


@pytest.mark.parametrize(
    "change", [{"where": [0, 9]}, {"where": [0, -1]}, {"starts": [0, 5]}, {"weight": [1.0]}, {"starts": [0.0, 2]}]
)
def test_index_with_parts_that_do_not_fit(tmp_path, change):
    bm25 = BM25(passages("a", "a"))
    for name, value in change.items():
        setattr(bm25, name, np.array(value))
    bm25.save(tmp_path / "i.npz")
    with pytest.raises(DataError, match="damaged"):
        BM25.load(tmp_path / "i.npz")


def test_failed_save_leaves_the_old_index(tmp_path, monkeypatch):
    bm25, path = BM25(passages("a b")), tmp_path / "i.npz"
    bm25.save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError):
        bm25.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


# Recall


def test_recall_by_hand():
    corpus = [{"id": t, "title": t, "text": f"word{t}"} for t in "ABCD"]
    questions = [
        {"question": "worda wordb", "metadata": {"supporting_titles": ["A", "C"]}},  # half of them
        {"question": "wordd", "metadata": {"supporting_titles": ["D", "D"]}},  # all
        {"question": "wordd", "metadata": {}},  # does not count
    ]
    assert retriever.recall(BM25(corpus), questions, ks=(1, 3)) == {1: 0.75, 3: 0.75}
    with pytest.raises(DataError, match="supporting_titles"):
        retriever.recall(BM25(corpus), questions[2:])


def test_recall_on_the_hotpotqa_sample():
    if not SAMPLE.exists():
        pytest.skip("the HotpotQA sample is not there (../shared/data/hotpotqa)")
    items = json.loads(SAMPLE.read_text(encoding="utf-8"))
    texts = dict.fromkeys((title, "".join(sentences)) for item in items for title, sentences in item["context"])
    corpus = [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(texts)]
    supporting = [sorted({title for title, _ in item["supporting_facts"]}) for item in items]
    questions = [
        {"question": item["question"], "metadata": {"supporting_titles": s}}
        for item, s in zip(items, supporting, strict=True)
    ]
    found = retriever.recall(BM25(corpus), questions)
    assert 0.55 < found[3] < 0.7 and found[3] <= found[5]


# Server and client


@pytest.fixture
def server():
    """URL of our server over three passages."""
    bm25 = BM25(
        [
            {"id": "p", "title": 'The "Best"', "text": "Paris\nis in France"},
            {"id": "b", "title": "", "text": "Berlin is in Germany"},
            {"id": "é", "title": "T\nU", "text": "東京 is in Japan \x00"},
        ]
    )
    with retriever.make_server(bm25, port=0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        running.url, running.bm25 = f"http://127.0.0.1:{running.server_port}/retrieve", bm25
        yield running
        running.shutdown()


def post(server, body, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", "/retrieve", body, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_client_over_server_equals_bm25(server):
    queries = ["paris", "is in", "zzz", "", "東 in", "\ud800 berlin \x1b[0m </information>"] * 5
    for batch_size in (1, 4, 128):
        client = SearchClient(server.url, batch_size=batch_size)
        assert client.search(queries, 2) == server.bm25.search(queries, 2)
    assert SearchClient(server.url.removesuffix("/retrieve")).search([]) == []
    assert server.server_address[0] == "127.0.0.1"


def test_server_speaks_search_r1(server):
    status, reply = post(server, json.dumps({"queries": ["paris"], "topk": 1, "return_scores": True}))
    (hit,) = reply["result"][0]
    assert status == 200 and hit["document"]["contents"] == '"The "Best""\nParis\nis in France' and hit["score"] > 0
    status, reply = post(server, json.dumps({"queries": ["is", "zzz"]}))
    assert [len(documents) for documents in reply["result"]] == [3, 0] and "contents" in reply["result"][0][0]


BAD_REQUESTS = ["", "nonsense", "[]", "{}", "null", '{"queries": "paris"}', '{"queries": [1]}', "[" * 100_000, b"\xff"]
BAD_REQUESTS += ['{"queries": ["a"], "topk": 0}', '{"queries": ["a"], "topk": 1e9}', '{"queries": ["a"], "topk": true}']
BAD_REQUESTS += [json.dumps({"queries": ["a"] * 2000}), json.dumps({"queries": ["a" * 20_000]})]


def test_server_refuses_what_it_cannot_use(server):
    for body in BAD_REQUESTS:
        status, reply = post(server, body)
        assert (status, list(reply)) == (400, ["error"])
    assert post(server, b"x" * (3 << 20))[0] == 413
    for length in ("-1", "abc", "9" * 30, "²".encode("latin-1")):
        assert post(server, b"", {"Content-Length": length})[0] == 411
    assert SearchClient(server.url).search(["paris"]) == server.bm25.search(["paris"])


def test_server_survives_slow_and_broken_clients(server, monkeypatch, capfd):
    monkeypatch.setattr(retriever, "MAX_SECONDS", 0.3)
    address = ("127.0.0.1", server.server_port)
    slow = []
    for start in (
        b"",
        b"POST /retr",
        b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
        b"\x00\xff\n\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        slow.append(socket.create_connection(address))
        slow[-1].sendall(start)
    gone = socket.create_connection(address)
    gone.sendall(b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
    gone.close()
    assert SearchClient(server.url, retries=0).search(["paris"])[0]
    for connection in slow:  # each is dropped in the end
        connection.settimeout(5)
        with connection:
            try:
                while connection.recv(1000):
                    pass
            except ConnectionResetError:
                pass
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def faulty():
    """start(*replies) -> (URL of a server that sends these bytes, one a connection, the last for ever; those sent)."""
    listeners = []

    def start(*replies):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        asked = []

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                reply = replies[min(len(asked), len(replies) - 1)]
                asked.append(reply)
                with connection:
                    try:
                        connection.recv(1 << 16)
                        for part in reply if isinstance(reply, list) else [reply]:
                            if isinstance(part, (int, float)):
                                time.sleep(part)
                            else:
                                connection.sendall(part)
                        if reply:
                            connection.shutdown(socket.SHUT_WR)
                            connection.recv(1 << 16)
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve", asked

    yield start
    for listener in listeners:
        listener.close()


def http_reply(body, status="200 OK", length=None):
    body = body if isinstance(body, bytes) else body.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


GOOD = '{"result": [[{"document": {"id": 7, "contents": "\\"T\\"\\nx"}, "score": 1.5}]]}'
FAULTS = {
    "HTML": (http_reply("<html>login</html>"), "status 200, body b'<html>login"),
    "error 500": (http_reply("out of memory", "500 Oops"), "status 500, body b'out of memory'"),
    "error 503 in colour": (http_reply("\x1b[31mbusy", "503 Busy"), r"status 503, body b'\\x1b\[31mbusy'"),
    "redirect": (http_reply("", "302 Found"), "status 302"),
    "nothing": (b"", "no answer: (RemoteDisconnected|ConnectionResetError)"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", "no answer: BadStatusLine"),
    "half an answer": (http_reply(GOOD[:30], length=500), "status 200, body .*protocol"),
    "half a chunk": (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"re', "no answer: IncompleteRead"),
    "wrong count": (http_reply('{"result": []}'), "0 results for 1 queries"),
    "a list": (http_reply("[]"), "protocol"),
    "no result": (http_reply('{"error": "x"}'), "protocol"),
    "result a number": (http_reply('{"result": 5}'), "protocol"),
    "hit a string": (http_reply('{"result": [["x"]]}'), "protocol"),
    "no contents": (http_reply('{"result": [[{"document": {}, "score": 1}]]}'), "protocol"),
    "contents a list": (http_reply('{"result": [[{"document": {"contents": []}}]]}'), "protocol"),
    "score a word": (http_reply(GOOD.replace("1.5", '"high"')), "protocol"),
    "score enormous": (http_reply(GOOD.replace("1.5", "1" + "0" * 400)), "protocol"),
    "deep": (http_reply("[" * 100_000), "protocol"),
    "not UTF-8": (http_reply(b'{"result": "\xff"}'), "protocol"),
    "hangs": ([3], "no answer: .*after 0.[3-9] s"),
    "hangs in the body": ([http_reply(GOOD[:9], length=99), 3], "after 0.[3-9] s"),
    "a byte now and then": ([http_reply(GOOD[:9], length=99)] + [0.1, b" "] * 30, "after 0.[3-9] s"),
    "a header byte now and then": ([b"HTTP/1.1 200 OK\r\nX: "] + [0.1, b"x"] * 30, "after 0.[3-9] s"),
}


@pytest.mark.parametrize(("reply", "message"), FAULTS.values(), ids=FAULTS)
def test_server_fault_is_one_error_after_retries(faulty, reply, message):
    url, _ = faulty(reply)
    start = time.perf_counter()
    with pytest.raises(SearchError, match=message) as caught:
        SearchClient(url, timeout=0.3, retries=1, backoff=0.01).search(["q"])
    assert time.perf_counter() - start < 3
    text = str(caught.value)
    assert text.startswith(url) and text.endswith("(tries: 2)") and len(text) < 600
    assert text.isprintable()


def test_client_recovers_after_faults(faulty):
    url, asked = faulty(b"", http_reply("x", "500 Oops"), http_reply(GOOD))
    assert SearchClient(url, backoff=0.01).search(["q"]) == [[{"id": "7", "title": "T", "text": "x", "score": 1.5}]]
    assert len(asked) == 3


def test_queries_travel_together(faulty):
    hits = GOOD.removeprefix('{"result": [').removesuffix("]}")
    url, asked = faulty(http_reply(f'{{"result": [{hits}, [], {hits}]}}'))
    assert [len(found) for found in SearchClient(url).search(["a", "b", "c"])] == [1, 0, 1] and len(asked) == 1


def test_the_searches_of_a_turn_are_one_request(server, tiny, world, monkeypatch):
    requests, post = [], SearchClient._post
    monkeypatch.setattr(SearchClient, "_post", lambda self, body: requests.append(json.loads(body)) or post(self, body))
    settings = rollout.RolloutSettings()
    rollout.rollout(*tiny, world[1][:6], SearchClient(server.url), settings, self_answers=False)
    assert len(requests[0]["queries"]) > 1 and 1 <= len(requests) <= settings.max_searches


def test_client_backs_off(faulty, monkeypatch):
    waits = []
    monkeypatch.setattr(retriever.time, "sleep", waits.append)
    with pytest.raises(SearchError):
        SearchClient("http://127.0.0.1:9/retrieve", retries=3, backoff=0.5).search(["q"])
    assert waits == [0, 0.5, 1.0, 2.0]


def test_refused_request_is_not_repeated(faulty):
    url, asked = faulty(http_reply("no such path", "404 Not Found"))
    with pytest.raises(SearchError, match=r"status 404, body b'no such path' \(tries: 1\)"):
        SearchClient(url).search(["q"])
    assert len(asked) == 1


def test_client_takes_documents_without_scores_and_half_surrogates(faulty):
    url, _ = faulty(
        http_reply('{"result": [[{"contents": "\\"T\\"\\na \\ud800"}, {"title": null, "text": "b"}, {"text": "c"}]]}')
    )
    hits = SearchClient(url).search(["q"], k=2)[0]
    assert [(hit["title"], hit["text"], hit["score"]) for hit in hits] == [("T", "a ?", 0.0), ("", "b", 0.0)]


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x/y", "http://", "http://h:port/", "http://h/a b", "http://h\r\n/"]
)
def test_wrong_url(url):
    with pytest.raises(DataError, match="not the URL of a search server"):
        SearchClient(url)


def test_host_that_does_not_exist():
    for host in ("nowhere.invalid", "a" * 70 + ".invalid", "127.0.0.1:99999"):
        with pytest.raises(SearchError, match="no answer"):
            SearchClient(f"http://{host}/retrieve", retries=0).search(["q"])


# Command line


def command(*args):
    return retriever.main([str(arg) for arg in args])


def test_command_line(tmp_path, capsys):
    corpus = write(
        tmp_path / "c.jsonl",
        '{"id": "1", "title": "Paris", "text": "in France"}\n{"id": "2", "title": "B", "text": "in"}',
    )
    line = QUESTION.replace("Who?", "Where is Paris?")[:-1] + ', "metadata": {"supporting_titles": ["Paris", "Z"]}}'
    questions, index = write(tmp_path / "q.jsonl", line), tmp_path / "i.npz"
    assert command("--corpus", corpus, "--questions", questions, "--save_index", index) == 0
    assert "2 passages" in (first := capsys.readouterr().out) and "recall@3 0.500  recall@5 0.500" in first
    assert command("--load_index", index, "--questions", questions) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    "extra",
    [["--questions", "C"], ["--questions", "none"], ["--save_index", "no/where/i.npz"], ["--serve", "--port", 99999]],
)
def test_command_line_errors_are_one_line_and_exit_2(tmp_path, capsys, monkeypatch, extra):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "C", PASSAGE)
    assert command("--corpus", "C", *extra) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["C"]


def test_serve_from_the_command_line(tmp_path):
    corpus = write(tmp_path / "c.jsonl", PASSAGE)
    args = [sys.executable, str(ROOT / "retriever.py"), "--corpus", str(corpus), "--serve", "--port", "0"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            url = re.search(r"http://\S+/retrieve", process.stdout.readline())[0]
            assert titles(SearchClient(url).search(["text"])) == [["T"]]
        finally:
            process.terminate()
