"""Where passages come from: BM25 over a corpus in memory, or a search server.

    python retriever.py --corpus C.jsonl --questions Q.jsonl  # recall@3 and @5 of plain questions
    python retriever.py --corpus C.jsonl --save_index I.safetensors  # a --corpus that opens fast
    python retriever.py --corpus C.jsonl --serve              # under Search-R1's HTTP protocol

A retriever is anything with `search(queries, k)`. Two choices differ from rank-bm25 as it comes:
1. idf is log(1 + (N - df + 0.5) / (df + 0.5)), Lucene's form. The classic one, without "1 +", is 0
   or less for a word in half of the passages. Counts, lengths and formula are rank-bm25's.
2. A passage without any word of the query is never returned (rank-bm25's `get_top_n` fills up with
   the last documents), and ties come in corpus order (there: reversed).
Passages are untrusted and stay here as they were read; whoever shows them cleans them.
"""

import argparse
import math
import re
import unicodedata
from collections import defaultdict
from contextlib import suppress
from itertools import chain

import numpy as np
from rank_bm25 import BM25Okapi

import reward
from plumbing import data, files, indexes, search_http

# Accents, as NFKD sets them apart. Vowel signs of Indian and South-East Asian scripts are letters;
# each Chinese or Japanese character is a word.
ACCENTS = re.compile("[\u0300-\u036f]")
LETTER = r"[^\W_\u3040-\u30ff\u3400-\u9fff]|[\u0900-\u0963\u0966-\u0eff]"
WORDS = re.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|(?:{LETTER})+")


def tokenise(text):
    """Words of a text: NFKD, case folded, accents dropped, split at what is no letter or digit.
    >>> tokenise("Beyoncé's 2nd-best SONG")
    ['beyonce', 's', '2nd', 'best', 'song']
    """
    if text.isascii():  # the same result, sooner
        return re.findall("[a-z0-9]+", text.lower())
    text = unicodedata.normalize("NFKD", reward.visible(text)).casefold()
    return WORDS.findall(ACCENTS.sub("", text))


class BM25:
    """BM25 over passages in memory: rank-bm25's statistics, kept as postings.
    score(q, d) = sum over the words w of q of
        idf(w) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / avgdl))

    passages: list of {"id", "title", "text"}; title and text are both indexed. Raises DataError,
    naming their `source`, if they hold no word.
    >>> bm25 = BM25([{"id": "1", "title": "Paris", "text": "Paris is in France"},
    ...              {"id": "2", "title": "Berlin", "text": "Berlin is in Germany"}])
    >>> [[hit["title"] for hit in hits] for hits in bm25.search(["Paris", "in", "zzz"], k=5)]
    [['Paris'], ['Paris', 'Berlin'], []]
    """

    def __init__(self, passages, k1=1.5, b=0.75, source="the corpus"):
        words = defaultdict()  # word -> its number, in order of first use
        words.default_factory = words.__len__
        texts = (f"{passage['title']} {passage['text']}" for passage in passages)
        try:  # rank-bm25 counts numbers as well as words; not all are in memory at once
            stats = BM25Okapi([words[word] for word in tokenise(text)] for text in texts)
        except ZeroDivisionError:
            raise files.DataError(f"{source}: no passage holds a word to search for") from None
        counts = stats.doc_freqs  # list (N,) of {word: tf}
        N, sizes = len(counts), np.fromiter(map(len, counts), np.int64, len(counts))
        word = np.fromiter(chain.from_iterable(counts), np.int64, sizes.sum())  # (P,) P = postings
        values = chain.from_iterable(count.values() for count in counts)
        tf = np.fromiter(values, np.int64, sizes.sum())
        order = np.argsort(word, kind="stable")  # by word; within a word in corpus order
        word, tf, where = word[order], tf[order], np.repeat(np.arange(N), sizes)[order]
        df = np.bincount(word)  # (V,) V = words
        idf = np.array([math.log(1 + (N - n + 0.5) / (n + 0.5)) for n in df.tolist()])
        length = np.array(stats.doc_len)[where]
        # Terms and order as in rank-bm25's get_scores: the scores are equal to the last bit.
        weight = idf[word] * (tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / stats.avgdl)))
        starts = np.concatenate([[0], np.cumsum(df)])
        self.passages = passages
        self.index = indexes.Index(passages, dict(words), starts, where, weight)

    def top(self, query, k):
        """The best k passages of one query: list of (index, score)."""
        index, scores = self.index, np.zeros(len(self.passages))
        for word in tokenise(query):
            if word in index.words:
                w = index.words[word]
                span = slice(index.starts[w], index.starts[w + 1])
                np.add.at(scores, index.where[span], index.weight[span])  # faster than `+=`
        kth = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        found = np.flatnonzero((scores >= kth) & (scores > 0))  # with ties, for the sort
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [(int(i), float(scores[i])) for i in best]

    def search(self, queries, k=3):
        """Of each query the best passages, best first: up to k {"id", "title", "text", "score"}.
        Ties are in corpus order; a query without a known word gets []. Raises TypeError where
        `queries` is no list of strings, ValueError for k < 1."""
        data.check_queries(queries, k)
        found = []
        for query in queries:
            found.append([{**self.passages[i], "score": score} for i, score in self.top(query, k)])
        return found

    def save(self, path):
        """Write the index to one .safetensors file. Raises OSError."""
        indexes.save(path, self.index)

    @classmethod
    def load(cls, path):
        """The index that `save` wrote. Raises DataError where it is damaged or missing."""
        retriever = cls.__new__(cls)
        retriever.index = indexes.load(path)
        retriever.passages = retriever.index.passages
        return retriever


def open_retriever(corpus, url=None):
    """The server at `url`, or a BM25 over a corpus or an index, .safetensors. Raises DataError."""
    if url:
        return search_http.SearchClient(url)
    path = files.locate(corpus)
    if path.endswith(".safetensors"):
        return BM25.load(path)
    return BM25(data.load_corpus(path), source=path)


def recall(retriever, questions, ks=(3, 5)):
    """{k: recall@k}: share of a question's supporting titles among those of the first k passages,
    the question being the query; a mean over those that name titles. DataError where none does."""
    questions = [q for q in questions if q["metadata"].get("supporting_titles")]
    files.check(questions, "no recall", "no question has supporting_titles in its metadata")
    results = retriever.search([q["question"] for q in questions], max(ks))
    totals = dict.fromkeys(ks, 0.0)
    for question, hits in zip(questions, results):
        wanted = set(question["metadata"]["supporting_titles"])
        for k in ks:
            found = wanted & {hit["title"] for hit in hits[:k]}
            totals[k] += len(found) / len(wanted)
    return {k: total / len(questions) for k, total in totals.items()}


# The command line


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="JSONL file of passages")
    source.add_argument("--load_index", help="index written by --save_index, in place of --corpus")
    parser.add_argument("--questions", help="JSONL file: print recall@3, recall@5 of its questions")
    parser.add_argument("--save_index", help="write the index to this .safetensors file")
    parser.add_argument("--serve", action="store_true", help="answer POST /retrieve until stopped")
    parser.add_argument("--host", default="127.0.0.1", help="for --serve (default: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="for --serve (default: 8000)")
    args = parser.parse_args(arguments)
    files.check_writable("--save_index", args.save_index)

    questions = data.load_questions(args.questions) if args.questions else []
    retriever = BM25.load(args.load_index) if args.load_index else open_retriever(args.corpus)
    print(f"{len(retriever.passages)} passages")
    if questions:
        found = [f"recall@{k} {value:.3f}" for k, value in recall(retriever, questions).items()]
        print(f"{len(questions)} questions: {'  '.join(found)}")
    if args.save_index:
        retriever.save(args.save_index)
        print(f"index: {args.save_index}")
    if args.serve:
        server = search_http.make_server(retriever, args.host, args.port)
        with server, suppress(KeyboardInterrupt):
            url = f"http://{args.host}:{server.server_port}/retrieve"
            print(f"serving {url}, Ctrl-C stops", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    files.run_script("retriever.py", main)
