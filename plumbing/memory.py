"""How much memory a step needs: computing logits a piece at a time, and measuring."""

import math
import sys
import time
from contextlib import contextmanager
from heapq import nlargest

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**26  # numbers: 256 MiB in float32


def in_pieces(score, states, sampled, vocab_size):
    """`score(states, sampled)` in pieces: the logits (n, V) of one at a time are in memory, also in
    the backward pass, which computes them again. Returns the joined results, tensors (N,)."""
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    if len(states) <= size:
        return score(states, sampled)
    pieces = []
    for rows, targets in zip(states.split(size), sampled.split(size)):
        pieces.append(checkpoint(score, rows, targets, use_reentrant=False))
    return [torch.cat(parts) for parts in zip(*pieces)]


def peak_memory():
    """Most GiB in use until now, of the GPU or else of this process; NaN where none can tell."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return math.nan
    return getrusage(RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


@contextmanager
def measured(phase):
    """Print the seconds of a block, and the peak memory until its end; of a GPU also what torch
    has reserved of it, freed blocks that fit nothing included."""
    start, reserved = time.perf_counter(), ""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        reserved = f", reserved {torch.cuda.max_memory_reserved() / 2**30:.2f}"
    seconds = time.perf_counter() - start
    print(f"{phase:>12}  {seconds:8.1f} s   peak {peak_memory():6.2f} GiB{reserved}", flush=True)


class Longest:
    """A retriever whose searches bring the longest passages of another one's, if it has them."""

    def __init__(self, retriever):
        passages = getattr(retriever, "passages", [])
        self.passages = nlargest(100, passages, key=lambda passage: len(passage["text"]))
        self.search = self.longest if self.passages else retriever.search

    def longest(self, queries, k=3):
        return [self.passages[:k] for _ in queries]
