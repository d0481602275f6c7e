# SPDX-License-Identifier: Apache-2.0
"""Which tokens a decode step reads, from the scores of its pages: ``hsa_choose`` of ``kernels/reference.py`` in registers.

No token is sorted or even looked at. All tokens of a page share its score, so that pages are chosen with *weights*, the numbers
of tokens that each has to offer, and of the page at the budget's edge the first tokens are taken.

Tensors are ``[1, N]``, pages in ascending order, padded to a power of two; a padding page weighs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_keys(scores):
    """int32 keys that order as the scores do: scores are >= 0, and what is not a number ranks last."""
    return tl.where(scores >= 0, scores.to(tl.int32, bitcast=True), -1)


@triton.jit
def sum_keys(sums):
    """int32 keys below 2^30 that order as sums of either sign do, to 22 of their 24 bits, which is finer than sums of products
    are exact; what is not a number ranks last. Zeros of both signs are one key."""
    bits = sums.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF) >> 2
    key = (1 << 29) + tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(sums == sums, key, -1)


@triton.jit
def find_threshold(keys, weights, budget):
    """A key T such that those >= T weigh at least ``budget``, and those > T at most that (-1 if all together weigh less).

    Three bits of T a pass, from the highest, and no more passes than it takes to hit the budget exactly.
    """
    candidates = tl.arange(0, 8)[:, None]
    weight = tl.sum(tl.where(keys >= 0, weights, 0))
    threshold = tl.where(weight < budget, -1, 0)
    shift = tl.where(weight > budget, 28, -1)
    while shift >= 0:
        tried = threshold + (candidates << shift)
        reached = tl.sum(tl.where(keys >= tried, weights, 0), axis=1)
        best = tl.sum((reached >= budget).to(tl.int32), axis=0) - 1
        threshold += best << shift
        is_exact = tl.sum((reached == budget).to(tl.int32), axis=0) > 0
        # The last pass finds one bit alone: 31 bits are ten times three, and one.
        shift = tl.where(is_exact | (shift == 0), -1, tl.maximum(shift - 3, 0))
    return threshold


@triton.jit
def take_best(keys, weights, budget):
    """How much of each weight belongs to the best ``budget``; of equal keys, the lower indices come first."""
    threshold = find_threshold(keys, weights, budget)
    above = tl.where(keys > threshold, weights, 0)
    level = tl.where(keys == threshold, weights, 0)
    left = budget - tl.sum(above)
    before = tl.cumsum(level, axis=1) - level
    return above + tl.minimum(tl.maximum(left - before, 0), level)


@triton.jit
def forced_bounds(num_tokens, sink_tokens, recent_tokens, PAGE_SIZE: tl.constexpr, BY_PAGE: tl.constexpr):
    """``(sink_end, recent_start)``: tokens below the one and from the other on are read whatever their scores are."""
    sink_end = sink_tokens
    recent_start = tl.maximum(num_tokens - recent_tokens, 0)
    if BY_PAGE:
        sink_end = (sink_tokens + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
        recent_start = tl.where(recent_tokens > 0, recent_start // PAGE_SIZE * PAGE_SIZE, num_tokens)
    return sink_end, recent_start


@triton.jit
def choose_tokens(
    keys, page, num_tokens, topk_tokens, sink_end, recent_start, PAGE_SIZE: tl.constexpr, BY_PAGE: tl.constexpr
):
    """``(is_listed, limit)`` of each page: whether any of its tokens is read, and which.

    Of a listed page, token ``t < num_tokens`` is read if and only if ``t < limit`` or ``t >= recent_start``. ``page`` are the
    indices of the pages and ``keys`` those of their scores; ``sink_end`` and ``recent_start`` those of ``forced_bounds``.
    """
    first = page * PAGE_SIZE
    size = tl.minimum(tl.maximum(num_tokens - first, 0), PAGE_SIZE)
    sinks = tl.minimum(tl.maximum(sink_end - first, 0), size)
    free = tl.maximum(tl.minimum(tl.maximum(recent_start - first, 0), size) - sinks, 0)
    if BY_PAGE:
        num_forced = tl.sum(((size > 0) & (free == 0)).to(tl.int32))
        budget = tl.maximum((topk_tokens + PAGE_SIZE - 1) // PAGE_SIZE, num_forced) - num_forced
        taken = take_best(keys, (free > 0).to(tl.int32), budget) * free
    else:
        num_forced = tl.sum(size - free)
        budget = tl.maximum(topk_tokens, num_forced) - num_forced
        taken = take_best(keys, free, budget)
    return (taken > 0) | (free < size), tl.maximum(first, sink_end) + taken
