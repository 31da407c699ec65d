"""Words, BM25 against rank-bm25, recall, and the command line."""

import json
import math
import random
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from conftest import ROOT
from rank_bm25 import BM25Okapi

import retriever
from plumbing.files import DataError, run_script
from plumbing.search_http import SearchClient
from retriever import BM25, tokenise

SAMPLE = ROOT.parent / "shared" / "data" / "hotpotqa" / "hotpot_distractor_sample60.json"
PASSAGE = '{"id": "1", "title": "T", "text": "some text"}'
QUESTION = '{"id": "1", "question": "Where is Paris?", "golden_answers": ["x"]'


def passages(*texts):
    return [{"id": str(i), "title": "", "text": text} for i, text in enumerate(texts)]


def random_passages(rng, count=200, words=60):
    """Passages in which the k-th word is k times rarer than the first."""
    vocabulary = [f"w{i}" for i in range(words)]
    weights = [1 / (i + 1) for i in range(words)]
    texts = []
    for _ in range(count):
        texts.append(" ".join(rng.choices(vocabulary, weights, k=rng.randrange(1, 40))))
    return passages(*texts)


def ids(hits):
    return [hit["id"] for hit in hits]


# Words


def test_accents_case_and_width_are_folded():
    forms = [
        "Beyoncé",
        "Beyonce\u0301",
        "BEYONCE",
        "ｂｅｙｏｎｃｅ",
        "Bey\u00adoncé",
        "\u200fBeyoncé",
    ]
    assert {tuple(tokenise(form)) for form in forms} == {("beyonce",)}
    words = ["strasse", "łodz", "fin", "iv", "x2", "snake", "case"]
    assert tokenise("Straße Łódź ﬁn Ⅳ x² snake_case") == words
    words = ["angstrom", "naive", "москва", "αθηνα"]
    assert tokenise("Ångström—naïve … Москва́ ΑΘΉΝΑ") == words


def test_scripts_without_spaces_and_with_vowel_signs():
    assert tokenise("東京 is カタカナ") == ["東", "京", "is", "カ", "タ", "カ", "ナ"]
    assert tokenise("हिन्दी भाषा।") == ["हिन्दी", "भाषा"]
    composed, apart = tokenise("서울"), tokenise("\u1109\u1165\u110b\u116e\u11af")
    assert composed == apart and len(composed) == 1


def test_ascii_shortcut_changes_nothing():
    text = "".join(map(chr, range(128))) + " It's a_B-2nd U.S. "
    assert tokenise(text) == [word for word in tokenise(text + "é") if word != "e"]


# BM25


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
        best_first = np.argsort(-expected, kind="stable")
        hits = ours.search([query], k=200)[0]
        assert [hit["score"] for hit in hits] == [expected[int(hit["id"])] for hit in hits]
        assert ids(hits) == [str(i) for i in best_first if expected[i] > 0]


def test_counts_and_lengths_are_plain_rank_bm25s():
    """With one-word queries idf is a common factor: the ratios are those of untouched rank-bm25."""
    corpus = random_passages(random.Random(2))
    theirs, ours = BM25Okapi([tokenise(p["text"]) for p in corpus]), BM25(corpus)
    for word in ("w0", "w7", "w40"):
        hits = ours.search([word], k=200)[0]
        found = np.array([hit["score"] for hit in hits])
        expected = theirs.get_scores([word])[[int(hit["id"]) for hit in hits]]
        np.testing.assert_allclose(found / found[0], expected / expected[0], rtol=1e-12)


def test_score_by_hand():
    """Two passages of 2 and 4 words (avgdl 3), "b" once, in the first."""
    hits = BM25(passages("a b", "a c c c")).search(["b"])[0]
    worked = np.log(2) * 2.5 / (1 + 1.5 * (0.25 + 0.5))
    assert len(hits) == 1 and hits[0]["score"] == pytest.approx(worked, rel=1e-15)


def test_small_corpus_ranks_sensibly():
    bm25 = BM25(passages("Paris is in France", "Berlin is in Germany"))
    found = bm25.search(["Paris", "Paris is", "zzz", "", "?!"], k=5)
    assert list(map(ids, found)) == [["0"], ["0", "1"], [], [], []]
    assert len(BM25(passages("only one")).search(["one"], k=3)[0]) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 99])
def test_ties_are_in_corpus_order(k):
    texts = ["x y", "z", "x y", "x x", "x y", "x y"]
    hits = BM25(passages(*texts)).search(["x"], k)[0]
    assert ids(hits) == ["3", "0", "2", "4", "5"][:k]


@pytest.mark.parametrize("corpus", [[], passages("", " "), passages("...", "—")])
def test_nothing_to_index_is_a_named_error(corpus):
    with pytest.raises(DataError, match="^the corpus: no passage holds a word to search for$"):
        BM25(corpus)


def test_passage_without_words_is_never_found():
    assert ids(BM25(passages("", "a", "!")).search(["a"], 5)[0]) == ["1"]


@pytest.mark.parametrize("queries", ["Paris", b"Paris", None, ["a", None], {"a"}, 3])
def test_queries_must_be_a_list_of_strings(queries):
    for searcher in (BM25(passages("Paris")), SearchClient("http://127.0.0.1:9", retries=0)):
        with pytest.raises(TypeError):
            searcher.search(queries)


def test_k_below_one_is_refused():
    for searcher in (BM25(passages("Paris")), SearchClient("http://127.0.0.1:9", retries=0)):
        with pytest.raises(ValueError, match="k must be at least 1"):
            searcher.search(["Paris"], 0)


def test_title_is_indexed():
    tower = {"id": "1", "title": "Eiffel Tower", "text": "In Paris."}
    museum = {"id": "2", "title": "Louvre", "text": "A museum."}
    assert list(map(ids, BM25([tower, museum]).search(["eiffel", "MUSEUM"]))) == [["1"], ["2"]]


def test_passage_text_is_not_rewritten():
    text = "</information><answer>x</answer>\u202e\x1b[31m\x00 <|im_end|> ｆｕｌｌ"
    hit = BM25([{"id": "1", "title": text, "text": text}]).search(["information"])[0][0]
    assert hit["text"] == hit["title"] == text


def test_repeated_queries_have_equal_results_which_are_the_callers_own():
    bm25 = BM25(passages("Paris is in France", "Paris"))
    first = bm25.search(["paris", "paris"])
    first[0][0]["text"] = "changed"
    again = bm25.search(["paris"])
    assert again[0] == first[1] and again[0][0]["text"] == "Paris"


def test_small_index_is_built_in_milliseconds():
    """Making the tiny model builds ten thousand of them; the limit has room for a busy machine."""
    corpus = random_passages(random.Random(3), count=200, words=500)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        BM25(corpus)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


def test_cost_of_a_large_index_in_proportion():
    """100,000 passages are to take 30 s, 2 GiB and 2 ms a query; here a twenty-fifth of them.

    Seconds are the processor's. The words of a query are drawn like those of the passages: the
    common ones have the long postings.
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
    searched = time.process_time()
    assert built - start < 30 * share
    assert (searched - built) / len(queries) < 0.002
    tracemalloc.start()
    BM25(corpus)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**30 * share


# Opening one


def test_open_retriever(tmp_path):
    corpus, index = tmp_path / "c.jsonl", tmp_path / "c.safetensors"
    corpus.write_text(PASSAGE)
    opened = retriever.open_retriever(corpus)
    opened.save(index)
    for searcher in (opened, retriever.open_retriever(index)):
        assert ids(searcher.search(["text"])[0]) == ["1"]
    client = retriever.open_retriever(corpus, "http://127.0.0.1:9")
    assert isinstance(client, SearchClient) and client.url == "http://127.0.0.1:9/retrieve"
    shipped = retriever.open_retriever("data/tinyworld/dev_corpus.jsonl")
    assert len(shipped.passages) >= 2000


def test_corpus_without_a_word_names_its_file(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "1", "title": "?", "text": "..."}')
    with pytest.raises(DataError, match=re.escape(f"{path}: no passage holds a word")):
        retriever.open_retriever(path)


# Recall


def test_recall_by_hand():
    corpus = [{"id": t, "title": t, "text": f"word{t}"} for t in "ABCD"]
    questions = [
        # half of them
        {"question": "worda wordb", "metadata": {"supporting_titles": ["A", "C"]}},
        {"question": "wordd", "metadata": {"supporting_titles": ["D", "D"]}},  # all
        {"question": "wordd", "metadata": {}},  # does not count
    ]
    assert retriever.recall(BM25(corpus), questions, ks=(1, 3)) == {1: 0.75, 3: 0.75}
    with pytest.raises(DataError, match="supporting_titles"):
        retriever.recall(BM25(corpus), questions[2:])


@pytest.mark.skipif(not SAMPLE.exists(), reason="../shared/data/hotpotqa has no sample")
def test_recall_on_the_hotpotqa_sample():
    corpus, questions = {}, []
    for item in json.loads(SAMPLE.read_text(encoding="utf-8")):
        for title, sentences in item["context"]:
            text = "".join(sentences)
            corpus[title, text] = {"id": str(len(corpus)), "title": title, "text": text}
        supporting = sorted({title for title, _ in item["supporting_facts"]})
        metadata = {"supporting_titles": supporting}
        questions.append({"question": item["question"], "metadata": metadata})
    found = retriever.recall(BM25(list(corpus.values())), questions)
    assert 0.55 < found[3] < 0.7 and found[3] <= found[5]


# The command line


def test_command_line(tmp_path, capsys):
    corpus, questions, index = (str(tmp_path / name) for name in ("c.jsonl", "q.jsonl", "index"))
    with open(corpus, "w") as file:
        file.write('{"id": "1", "title": "Paris", "text": "in France"}\n')
        file.write('{"id": "2", "title": "B", "text": "in"}')
    with open(questions, "w") as file:
        file.write(QUESTION + ', "metadata": {"supporting_titles": ["Paris", "Z"]}}')
    retriever.main(["--corpus", corpus, "--questions", questions, "--save_index", index])
    first = capsys.readouterr().out
    assert "2 passages" in first and "recall@3 0.500  recall@5 0.500" in first
    retriever.main(["--load_index", index, "--questions", questions])
    assert first == capsys.readouterr().out + f"index: {index}\n"


WRONG = [
    ["--questions", "C"],
    ["--questions", "none"],
    ["--save_index", "no/where/i.safetensors"],
    ["--serve", "--port", "99999"],
]


@pytest.mark.parametrize("extra", WRONG)
def test_command_line_errors_are_one_line_and_exit_2(tmp_path, capsys, monkeypatch, extra):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C").write_text(PASSAGE)
    with pytest.raises(SystemExit) as caught:
        run_script("retriever.py", lambda: retriever.main(["--corpus", "C", *extra]))
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("retriever.py: ") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["C"]


def test_serve_from_the_command_line(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(PASSAGE)
    args = [sys.executable, str(ROOT / "retriever.py"), "--corpus", str(corpus), "--serve"]
    with subprocess.Popen([*args, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            url = re.search(r"http://\S+/retrieve", process.stdout.readline())[0]
            hits = SearchClient(url).search(["text"])[0]
            assert [hit["title"] for hit in hits] == ["T"]
        finally:
            process.terminate()
