"""Sampling on one key-value cache that lives across the turns of a batch of trajectories."""

import re
from functools import wraps
from typing import NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from plumbing.adapters import half_precision
from plumbing.files import check
from plumbing.models import encode


def inference(play):
    """Decorator of a rollout by a policy: no gradients, and products in the weights' 16 bits."""

    @wraps(play)
    def played(policy, *arguments, **more):
        with torch.inference_mode(), half_precision(policy.model):
            return play(policy, *arguments, **more)

    return played


class Piece(NamedTuple):
    """Ids of a turn: sampled by the policy, or put in by the environment."""

    ids: list
    logps: list | None = None  # of sampled ids; None where the environment wrote


class Written(NamedTuple):
    """What a row wrote in a turn."""

    text: str
    pieces: list[Piece]  # one, but for a forced turn


class Sampler:
    """Draws token ids at a temperature, from a random stream of its own."""

    def __init__(self, temperature, seed, device):
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits):
        """Token ids drawn from logits (B, V), and their log-probabilities: two (B,).
        At temperature 0 the most likely ones, which then are certain."""
        if self.temperature == 0:
            return logits.argmax(-1), logits.new_zeros(len(logits))
        probabilities = (logits / self.temperature).softmax(-1)
        # `torch.multinomial` less its checks, which would wait for the device
        noise = torch.empty_like(probabilities).exponential_(generator=self.generator)
        ids = (probabilities / noise).argmax(-1, keepdim=True)  # (B, 1)
        return ids[:, 0], probabilities.gather(1, ids)[:, 0].log()


class CachedBatch:
    """Rows of token ids that grow together in one key-value cache.
    New ids are padded on the left, the padding is masked, positions count real tokens only. A token
    that was sampled last of all has yet to go through the model: it waits in `pending`."""

    def __init__(self, policy, num_rows):
        self.policy, self.device = policy, policy.model.device
        ends = getattr(policy.model.generation_config, "eos_token_id", None)  # one, several, none
        self.eos_ids = {policy.tokenizer.eos_token_id, *(ends if type(ends) is list else [ends])}
        self.may_end = {}  # token id -> does its text hold `<` or `>`, without which no turn ends?
        self.cache = DynamicCache(config=policy.model.config)
        self.cache.layers = [GrowingLayer() for _ in self.cache.layers]
        self.mask = torch.zeros(num_rows, 0, dtype=torch.long, device=self.device)  # (B, columns)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=self.device)  # (B,)
        self.pending = [[] for _ in range(num_rows)]

    @classmethod
    def start(cls, policy, prompts, repeats, columns=0):
        """Forward each prompt once, then repeat it: the batch, and logits (B * repeats, V).
        columns: how many tokens of a row to make room for in the cache, once and for all."""
        batch = cls(policy, len(prompts))
        logits = batch.append(prompts).repeat_interleave(repeats, 0)
        batch.cache.batch_repeat_interleave(repeats)
        for layer in batch.cache.layers:
            layer.columns = columns
        batch.mask = batch.mask.repeat_interleave(repeats, 0)
        batch.lengths = batch.lengths.repeat_interleave(repeats, 0)
        batch.pending = [[] for _ in logits]
        return batch, logits

    def append(self, rows):
        """Forward each row's pending and new ids: the logits (B, V) after each row's last one."""
        rows = [waiting + new for waiting, new in zip(self.pending, rows)]
        self.pending = [[] for _ in rows]
        width = max(map(len, rows))
        ids = [[0] * (width - len(row)) + row for row in rows]
        is_real = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        ids, is_real = (torch.tensor(columns, device=self.device) for columns in (ids, is_real))
        return self.forward(ids, is_real)

    def forward(self, ids, is_real):
        """Forward new columns, ids and is_real (B, n): the logits (B, V) after the last one."""
        positions = (self.lengths[:, None] + is_real.cumsum(1) - 1).clamp(min=0)
        self.mask = torch.cat([self.mask, is_real], 1)
        self.lengths = self.lengths + is_real.sum(1)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": self.mask}
        inputs |= {"cache": self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.policy.model(**inputs).logits[:, -1].float()

    def write(self, logits, limit, stops, sampler, drop_last=False):
        """Sample until each row has closed a tag of `stops`, ended with EOS, or is at the limit.
        stops: a compiled pattern, looked for in the decoded text. drop_last: a row's last token
        will be replaced, so it is not to stay in the cache. Returns a Piece for each row.
        All rows go on until the last has ended, so that a token costs one wait for the device, for
        the sampled ids; what came after a row's end is masked afterwards."""
        before, lengths, all_logps = self.mask, self.lengths, []
        written, ended, one = [[] for _ in logits], set(), torch.ones_like(lengths)[:, None]
        for position in range(limit):
            sampled, logps = sampler(logits)
            all_logps.append(logps)
            for row, token in enumerate(sampled.tolist()):
                if row not in ended:
                    written[row].append(token)
                    if self.is_over(written[row], stops):
                        ended.add(row)
            if position == limit - 1 or len(ended) == len(written):
                break
            logits = self.forward(sampled[:, None], one)
        cached = [min(len(ids) - drop_last, position) for ids in written]  # tokens of a row
        self.pending = [ids[number:] for ids, number in zip(written, cached)]
        cached = torch.tensor(cached, device=self.device)  # (B,)
        is_real = torch.arange(position, device=self.device) < cached[:, None]  # (B, position)
        self.mask, self.lengths = torch.cat([before, is_real.long()], 1), lengths + cached
        logps = torch.stack(all_logps, 1)  # (B, position + 1)
        is_finite = bool(logps.isfinite().all())
        check(is_finite, "nothing can be sampled", "the model's logits are not finite")
        return [Piece(ids, row[: len(ids)]) for ids, row in zip(written, logps.tolist())]

    def is_over(self, ids, stops):
        """True if the last id is an EOS or has closed a tag of `stops`, alone or fused."""
        last = ids[-1]
        if last not in self.may_end:
            self.may_end[last] = re.search("[<>]", self.policy.tokenizer.decode([last])) is not None
        if last in self.eos_ids:
            return True
        return self.may_end[last] and stops.search(self.decode(ids)) is not None

    def decode(self, ids):
        """Text of sampled ids, an EOS at the end left out."""
        return self.policy.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)

    def branch(self, rows, *how):
        """Append ids, write, and forget both: what self-answers need. Returns Pieces."""
        mask, lengths = self.mask, self.lengths
        written = self.write(self.append(rows), *how)
        self.cache.crop(mask.shape[1] - self.mask.shape[1])
        self.mask, self.lengths = mask, lengths
        self.pending = [[] for _ in rows]
        return written

    def keep(self, rows):
        """Drop all rows but these (indices), and squeeze out padding between a row's tokens."""
        index = torch.tensor(rows, device=self.device)
        self.mask, self.lengths = self.mask[index], self.lengths[index]
        self.pending = [self.pending[row] for row in rows]
        longest = int(self.mask.sum(1).max())
        columns = self.mask.argsort(dim=1, stable=True)[:, -longest:]  # padding first, then tokens
        self.mask = self.mask.gather(1, columns)
        for layer in self.cache.layers:
            layer.keys = moved(layer.keys, index, columns)
            layer.values = moved(layer.values, index, columns)


def force_search(batch, logits, limit, sampler):
    """A turn of `limit` tokens that must search (the paper's Figure 2): a list of Written.
    The policy thinks and fills in the query, the environment opens and closes the tag."""
    decode, opening, closing = batch.policy.tokenizer.decode, "</think> <search>", "</search>"
    room = limit - len(encode(batch.policy.tokenizer, opening + closing))
    thoughts = write_until(batch, logits, room - limit // 4, "</think>", opening, sampler)
    logits = batch.append([[] for _ in thoughts])
    queries = write_until(batch, logits, limit // 4, "<", closing, sampler)
    pieces = [thought + query for thought, query in zip(thoughts, queries)]
    return [Written(decode(sum((piece.ids for piece in row), [])), row) for row in pieces]


def write_until(batch, logits, limit, end, addition, sampler):
    """Sample up to the text `end` and put `addition` in its place: pieces of rows, as in Written.
    The last token is not in the cache yet and may hold more than the end: it is written anew."""
    rows, tokenizer = [], batch.policy.tokenizer
    for ids, logps in batch.write(logits, limit, re.compile(end), sampler, drop_last=True):
        text = batch.decode(ids).split(end)[0] + addition
        new = encode(tokenizer, text[len(tokenizer.decode(ids[:-1])) :])
        rows.append([Piece(ids[:-1], logps[:-1]), Piece(new)])
    batch.pending = [row[1].ids for row in rows]
    return rows


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: the library's own copies the cache for each new token."""

    columns = 0  # to make room for at once

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = extended(self.keys, key_states, self.columns)
        self.values = extended(self.values, value_states, self.columns)
        return self.keys, self.values


def extended(cached, new, columns, room=128):
    """`cached` (B, H, L, D) and `new` (B, H, n, D) behind it, in place where there is room.
    `cached` is always the beginning of a larger buffer; freed columns are simply written over."""
    length, total = cached.shape[2], cached.shape[2] + new.shape[2]
    capacity = cached.stride(1) // cached.stride(2)  # columns of that buffer
    if length == 0 or total > capacity:
        buffer = new.new_empty(*new.shape[:2], max(columns, total + room), new.shape[3])
        buffer[:, :, :length] = cached
        cached = buffer[:, :, :length]
    whole = cached.as_strided((*cached.shape[:2], total, cached.shape[3]), cached.stride())
    whole[:, :, length:] = new
    return whole


def moved(cached, rows, columns):
    """Rows (b,) of `cached` (B, H, L, D), their columns (b, l) alone, at its buffer's beginning."""
    chosen = cached[rows[:, None], :, columns].transpose(1, 2)  # (b, H, l, D)
    return cached.as_strided(chosen.shape, cached.stride()).copy_(chosen)
