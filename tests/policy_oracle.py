# SPDX-License-Identifier: Apache-2.0
"""Which tokens of one request a layer holds and reads under each policy: positions of a whole sequence, no blocks, no batches.

The formulas are those of ``kernels.reference``; here is only what the life of a request adds to them: when tokens are evicted
(design section 2, written out again), and that what one eviction has left is what the next one chooses from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import reference

KT_DTYPES = {"bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
NEAR, SAME = 1e-6, 1e-8
"""Relative difference of two float64 scores that float32 need not, and cannot, tell apart."""
FLOOR = 1e-35
"""Scores below count as 0: float32 ends at 1.2e-38, and every term of a sum may lie there."""


class Lengths:
    """A request's life in numbers."""

    def __init__(self, num_prompt: int, config: RocketKVConfig, block_size: int) -> None:
        N, B, P = num_prompt, block_size, config.prompt_budget_for(num_prompt, block_size)
        budget, interval = config.decode_budget_for_step, config.decode_interval_for(block_size)
        self.config, self.budget, self.interval = config, budget, interval
        self.natural = N if budget is None or N > P else budget + interval
        """X: tokens that are dense, and evicted from at once."""
        self.is_sparse = config.policy != "full" and (N > P or budget is not None)
        self.is_evicted = self.is_sparse and config.evicts
        left = P if budget is None or N > P else budget
        self.num_natural = math.ceil(self.natural / B)
        self.num_dropped = math.ceil((self.natural - left) / B) if self.is_evicted else 0
        self.num_private = self.num_natural - self.num_dropped if self.is_evicted else 0
        self.dropped = self.num_dropped * B
        self.first_limit = math.inf if budget is None or not self.is_evicted else self.dropped + budget + interval
        """L: tokens after which decoded ones are first evicted."""

    def next_eviction(self, length: int) -> float:
        """Length, beyond ``length``, after whose last token something is evicted."""
        if not self.is_evicted:
            return math.inf
        if length < self.natural:
            return self.natural
        if length < self.first_limit:
            return self.first_limit
        return self.first_limit + ((length - int(self.first_limit)) // self.interval + 1) * self.interval

    def evictions(self, start: int, end: int) -> list[int]:
        """Lengths in ``start`` + 1 to ``end`` after whose last token something is evicted."""
        found: list[int] = []
        while self.next_eviction(start) <= end:
            start = int(self.next_eviction(start))
            found.append(start)
        return found

    def dropped_at(self, position: int) -> int:
        """Tokens fewer than ``position`` that are held when the token there, beyond X, is computed."""
        times = sum(length > self.natural for length in self.evictions(0, position))
        return self.dropped + times * self.interval

    def milestones(self) -> list[int]:
        """X, L and the next two."""
        return self.evictions(0, self.natural + 4 * self.interval + self.config.prompt_budget)[:4]


class Life:
    """What one layer holds, from the first token on."""

    def __init__(self, lengths: Lengths, num_kv_heads: int, scale: float, softcap: float) -> None:
        self.lengths, self.config, self.scale, self.softcap = lengths, lengths.config, scale, softcap
        self.evictions: list[tuple[int, Tensor]] = []
        """At which length, and positions then left, int64 ``[Hkv, kept]``, ascending."""
        self.num_kv_heads = num_kv_heads
        self.computed = 0
        self.scores = torch.zeros(num_kv_heads, 0, dtype=torch.float64)
        """h2o's: all attention that each held token has received, ``[Hkv, held]``."""

    def _held(self, end: int, first: int) -> Tensor:
        """Tokens left by the newest eviction at a length below ``first``, and all later ones up to ``end`` - 1: ``[Hkv, n]``."""
        at, left = 0, torch.empty(self.num_kv_heads, 0, dtype=torch.long)
        for length, kept in self.evictions:
            if length < first:
                at, left = length, kept
        return torch.cat([left, torch.arange(at, end).expand(self.num_kv_heads, -1)], 1)

    def seen(self, position: int) -> Tensor:
        """Positions that the token at ``position`` may read, its own included: int64 ``[Hkv, n]``."""
        return self._held(position + 1, position + 1)

    def left(self, length: int) -> Tensor:
        """Positions held once ``length`` tokens are computed and what must go has gone: int64 ``[Hkv, n]``."""
        return self._held(length, length + 1)

    def compute(self, query: Tensor, key: Tensor, start: int, end: int) -> None:
        """Compute tokens ``start`` to ``end`` - 1. ``query`` [>= end, Hq, D] and ``key`` [>= end, Hkv, D] from position 0."""
        if start < self.computed:  # drafts were rejected
            assert not self.config.accumulates
            assert self.lengths.next_eviction(start) > self.computed
        self.computed = start
        while self.computed < end:
            stop = int(min(end, self.lengths.next_eviction(self.computed)))
            if self.config.accumulates:
                self._accumulate(query, key, stop)
            self.computed = stop
            if stop == self.lengths.next_eviction(stop - 1):
                self._evict(query, key)

    def _accumulate(self, query: Tensor, key: Tensor, stop: int) -> None:
        """H2O (arXiv 2306.14048): every query adds its softmax weights to the tokens that it sees."""
        start = self.computed
        held = torch.cat([self.left(start), torch.arange(start, stop).expand(self.num_kv_heads, -1)], 1)
        self.scores = torch.nn.functional.pad(self.scores, (0, stop - start))
        hidden = torch.ones(stop - start, held.shape[1], dtype=torch.bool).triu(held.shape[1] - (stop - start) + 1)
        for head, group in enumerate(query[start:stop].double().chunk(self.num_kv_heads, 1)):
            logits = torch.einsum("mgd,nd->gmn", group, key[held[head], head].double()) * self.scale
            logits = reference.capped(logits, self.softcap).masked_fill(hidden, -torch.inf)
            self.scores[head] += logits.softmax(-1).sum((0, 1))

    def _evict(self, query: Tensor, key: Tensor) -> None:
        config, length = self.config, self.computed
        held = self._held(length, length)
        is_first = length == self.lengths.natural
        num_kept = length - self.lengths.dropped if is_first else self.lengths.budget
        assert num_kept is not None
        if config.eviction == "streaming_llm":
            index = reference.keep_sinks_and_recent(held.shape[1], num_kept, config.sink_tokens, self.num_kv_heads)
        elif config.eviction == "h2o":
            scores, num_recent = as_float32(self.scores), config.num_recent(num_kept)
            index = reference.keep_heavy(scores, num_kept, num_recent)
            check_clear(scores[:, : held.shape[1] - num_recent], index, num_recent, 0)
        else:
            W = config.window_size
            keys = torch.stack([key[positions, head] for head, positions in enumerate(held)], 1)
            window = query[length - W : length]
            options = (config.window_softmax, config.kernel_size, self.softcap)
            scores = as_float32(reference.window_scores(window, keys, self.scale, *options))
            index = reference.keep_tokens(scores, num_kept, W, config.sink_tokens)
            check_clear(scores, index, W, config.sink_tokens)
        self.evictions.append((length, held.gather(1, index)))
        if config.accumulates:
            self.scores = self.scores.gather(1, index)


def as_float32(scores: Tensor) -> Tensor:
    """Scores ``[Hkv, n]`` made equal where they differ by less than float32 can show."""
    scores = torch.where(scores < FLOOR, 0.0, scores)
    ordered, order = scores.sort(-1)
    is_tied = torch.zeros_like(ordered, dtype=torch.bool)
    is_tied[:, 1:] = ordered.diff() <= SAME * ordered[:, 1:]
    first = torch.arange(ordered.shape[-1]).masked_fill(is_tied, 0).cummax(-1).values
    return torch.empty_like(scores).scatter_(-1, order, ordered.gather(-1, first))


def check_clear(scores: Tensor, kept: Tensor, num_recent: int, num_sinks: int) -> None:
    """The numbers leave no choice to rounding: what goes is clearly worse than what stays, or exactly as good as the worst."""
    for of_token, tokens in zip(scores, kept, strict=True):
        stays = torch.zeros(len(of_token) + num_recent, dtype=torch.bool)
        stays[tokens] = True
        stays = stays[: len(of_token)]
        chosen, gone = of_token[stays][num_sinks:], of_token[~stays]
        if len(chosen) and len(gone):
            worst = float(chosen.min())
            is_near = (of_token[num_sinks:] - worst).abs() <= NEAR * worst
            is_clear = gone.max() < worst and not (is_near & (of_token[num_sinks:] < worst)).any()
            assert is_clear or (of_token[num_sinks:][is_near] == worst).all(), "unclear: take another seed"


class Pages:
    """Summaries of the pages of one KV sequence, by policy."""

    def __init__(self, config: RocketKVConfig, keys: Tensor) -> None:
        self.config = config
        self.settled = self._summarise(keys)

    def _summarise(self, keys: Tensor) -> tuple[Tensor, ...]:
        page_size, dtype = self.config.page_size, KT_DTYPES[self.config.resolved_kt_dtype]
        if self.config.selection == "mean":
            return (reference.page_means(keys, page_size, dtype),)
        return reference.page_summaries(keys, page_size, dtype)

    def select(self, query: Tensor, rest: Tensor, num_tokens: int, topr: int) -> list[list[int]]:
        """Tokens that a decode step reads of each KV head: ``query`` [Hq, D]; ``rest`` are the keys beyond the pages, the query's
        own the last: a page's summary never knows of later ones."""
        config, page_size = self.config, self.config.page_size
        summaries = [torch.cat(pair, 1) for pair in zip(self.settled, self._summarise(rest), strict=True)]
        if config.selection == "hsa":
            scores = reference.hsa_scores(query, *summaries, num_tokens, page_size, topr, config.temperature)
            forced = (config.sink_tokens, config.recent_tokens)
            return reference.hsa_choose(
                as_float32(scores), num_tokens, page_size, config.topk_for_step, config.granularity, *forced
            )
        score = reference.quest_scores if config.selection == "quest" else reference.mean_scores
        scores = score(query, *summaries, num_tokens, page_size)
        return reference.hsa_choose(scores, num_tokens, page_size, config.topk_for_step, "page")


def assert_summaries(config: RocketKVConfig, low: Tensor, high: Tensor, keys: Tensor, what: str) -> None:
    """A KT table, entries of full pages, both ``[Hkv, pages, D]``, bounds their ``keys`` [n, Hkv, D] and is as tight as its dtype
    allows (I8), or holds their mean, rounded to nearest."""
    page_size, dtype = config.page_size, KT_DTYPES[config.resolved_kt_dtype]
    if config.selection == "mean":
        expected_low = expected_high = reference.page_means(keys, page_size, dtype)
    else:
        expected_low, expected_high = reference.page_summaries(keys, page_size, dtype)
        of_token = torch.arange(len(keys)) // page_size
        by_head = keys.transpose(0, 1).float()
        assert (low[:, of_token] <= by_head).all(), what
        assert (high[:, of_token] >= by_head).all(), what
    assert torch.equal(low, expected_low.float()), what
    assert torch.equal(high, expected_high.float()), what
