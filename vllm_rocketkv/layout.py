# SPDX-License-Identifier: Apache-2.0
"""Pure arithmetic of the block layout and of the paper's budget split.

Scheduler and workers both import this module and nothing else decides where a token lives: that is how they agree without
messages. No torch and no vLLM here.

Words used throughout the package:

======================  ===========================================================================
``num_prompt_tokens``   N, tokens that are evicted at once: those of the prompt; with decode-time eviction,
                        of a prompt within the budget, also decoded ones up to the first eviction
``prompt_budget``       P, most prompt tokens kept for each KV head of each layer
``block_size``          B, tokens of one block of vLLM's paged KV cache
``num_natural_blocks``  n = ceil(N / B), blocks of the prompt as vLLM lays it out
``num_dropped_blocks``  s = ceil((N - P) / B), by how many blocks the request becomes shorter
``num_private_blocks``  e = n - s, blocks that hold the kept prompt tokens
``num_kept_tokens``     P' = N - s * B, prompt tokens really kept; P - B < P' <= P
======================  ===========================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Where the tokens of one request live before and after its prompt is evicted.

    A request is *evictable* when its prompt is longer than the budget. Its block table row, append-only, is
    ``[p_0 .. p_{n-1} | c_0 .. c_{e-1} | rest]``: prompt blocks p, private blocks c with the kept tokens right-aligned to N (so
    that the offset inside a block stays ``position % block_size``), then whatever lies beyond the prompt.
    """

    num_prompt_tokens: int
    prompt_budget: int
    block_size: int
    decode_budget: int | None = None
    """Tokens that every eviction after the first leaves; None if there is none but the first. At least ``prompt_budget``."""
    decode_interval: int = 0
    """Tokens between two evictions of decoded tokens, a multiple of ``block_size``."""

    @property
    def is_evictable(self) -> bool:
        return self.num_prompt_tokens > self.prompt_budget

    @property
    def num_natural_blocks(self) -> int:
        return ceil_div(self.num_prompt_tokens, self.block_size)

    @property
    def num_dropped_blocks(self) -> int:
        return ceil_div(max(self.num_prompt_tokens - self.prompt_budget, 0), self.block_size)

    @property
    def num_private_blocks(self) -> int:
        return self.num_natural_blocks - self.num_dropped_blocks if self.is_evictable else 0

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens by which the request becomes shorter, a whole number of blocks: position p is private slot p - dropped."""
        return self.num_dropped_blocks * self.block_size

    @property
    def num_kept_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_dropped_tokens

    @property
    def num_hashable_tokens(self) -> int:
        """Leading tokens whose full blocks may enter the prefix cache (I2)."""
        return self.num_prompt_tokens // self.block_size * self.block_size

    def max_prefix_hit(self, window_size: int) -> int:
        """Longest prefix-cache hit, in tokens, that still leaves the whole observation window to compute (I7)."""
        return (self.num_prompt_tokens - window_size) // self.block_size * self.block_size

    # --- decode-time eviction: at lengths L, L + I, L + 2 I, ... the oldest I tokens' worth of private slots are given up --

    @property
    def first_limit(self) -> int | None:
        """L, the length at which decoded tokens are first evicted, or None for never: the private blocks then hold
        ``decode_budget + decode_interval`` tokens, of which ``decode_budget`` stay."""
        if self.decode_budget is None or not self.is_evictable:
            return None
        return self.num_dropped_tokens + self.decode_budget + self.decode_interval

    def num_decode_evictions(self, position: int) -> int:
        """How often decoded tokens have been evicted when the token at ``position`` is computed."""
        limit = self.first_limit
        if limit is None or position < limit:
            return 0
        return (position - limit) // self.decode_interval + 1

    def dropped_tokens_at(self, position: int) -> int:
        """Tokens by which the request is shorter when the token at ``position`` >= N is computed: its private slot is
        ``position`` less this."""
        return self.num_dropped_tokens + self.num_decode_evictions(position) * self.decode_interval

    def num_slots(self, num_tokens: int, window_size: int = 1, num_parking_blocks: int = 0) -> int:
        """Slots, counted as if no private block were used twice, of a request of ``num_tokens`` tokens.

        They stop growing at the first eviction of decoded tokens; ``num_parking_blocks`` come on top once a query of its window
        of ``window_size`` tokens must be kept.
        """
        limit = self.first_limit
        if limit is None or num_tokens <= limit - window_size:
            return num_tokens
        return limit + num_parking_blocks * self.block_size

    @property
    def parking_index(self) -> int:
        """Index, in the worker's row, of the first block that decoded tokens' queries are parked in."""
        assert self.decode_budget is not None
        return self.num_natural_blocks + ceil_div(self.decode_budget + self.decode_interval, self.block_size)

    def evictions_between(self, start: int, end: int, window_size: int) -> range:
        """Lengths at which decoded tokens are evicted and of whose last ``window_size`` tokens positions ``start`` to
        ``end - 1`` compute some."""
        limit = self.first_limit
        if limit is None:
            return range(0)
        interval = self.decode_interval
        first = limit + max(0, (start - limit) // interval + 1) * interval
        return range(first, max(first, end + window_size), interval)

    def block_index(self, position: int) -> int:
        """Index, in the worker's append-only row, of the block that holds the token at ``position``.

        Workers compute it for whole batches (``csrc/cpu/plan.cpp``, ``backend/gpu_metadata.py``); tests hold these together.
        """
        if not self.is_evictable or position < self.num_prompt_tokens:
            return position // self.block_size
        return self.num_natural_blocks + (position - self.dropped_tokens_at(position)) // self.block_size


def max_private_blocks(prompt_budget: int, block_size: int) -> int:
    """Upper bound of ``PromptLayout.num_private_blocks`` over every prompt length: ceil(P / B)."""
    return ceil_div(prompt_budget, block_size)


def default_decode_interval(block_size: int) -> int:
    """Whole blocks, of at least 128 tokens: eviction costs about as much as a decode step."""
    return ceil_div(128, block_size) * block_size


def parking_blocks(window_size: int, queries_per_block: int) -> int:
    """Blocks that hold all but the newest query of a window of decoded tokens, while every private slot holds a token."""
    return ceil_div(window_size - 1, queries_per_block)


@dataclass(frozen=True, slots=True)
class BudgetSplit:
    """One token budget split between the two stages (RocketKV, arXiv 2502.14051, section 3.4 and its released settings)."""

    prompt_budget: int
    """Prompt tokens that eviction keeps for each KV head."""
    topk_tokens: int
    """Tokens that one decode step attends to."""
    page_size: int
    """Tokens summarised by one KT page in the paper's adaptive choice (the engine uses one page size per server)."""
    estimation_ratio: float
    """c2: how much smaller the estimation's traffic must be than reading every kept key."""


def adaptive_split(num_prompt_tokens: int, token_budget: int, max_new_tokens: int) -> BudgetSplit:
    """Split ``token_budget`` t for a prompt of N tokens and at most ``max_new_tokens`` generated ones.

    With S = N + max_new: c = max(1, S / t); r = min(0.2 + 0.06 log2 c, 0.8);
    capacity = max(int(S / c**r), min(2 max_new, S)); P = capacity - max_new; topk = t // 2; c2 = max(1, capacity / t);
    page = ceil(sqrt c2) if that is <= c2, else 1.
    """
    total = num_prompt_tokens + max_new_tokens
    ratio = max(1.0, total / token_budget)
    exponent = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    capacity = max(int(total / ratio**exponent), min(2 * max_new_tokens, total))
    estimation_ratio = max(1.0, capacity / token_budget)
    page_size = math.ceil(math.sqrt(estimation_ratio))
    if page_size > estimation_ratio:
        page_size = 1
    return BudgetSplit(
        prompt_budget=capacity - max_new_tokens,
        topk_tokens=token_budget // 2,
        page_size=page_size,
        estimation_ratio=estimation_ratio,
    )


def adaptive_topr(head_size: int, page_size: int, estimation_ratio: float) -> int:
    """Dimensions that the estimation reads: topr = int(D * page / c2), at least 1 and at most D."""
    return max(1, min(head_size, int(head_size * page_size / estimation_ratio)))


def dense_below(topk_tokens: int) -> int:
    """Cached tokens up to which a decode step reads every token instead of estimating and selecting ``topk_tokens`` of them.

    Chosen from sizes alone, so that answers do not depend on the machine. Measured with ``benchmarks`` (series kernels): with
    256 tokens of top-k, reading everything is faster up to about 400 cached tokens and slower from 512 on.
    """
    return topk_tokens + topk_tokens // 2
