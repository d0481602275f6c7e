# SPDX-License-Identifier: Apache-2.0
"""Second stage of split decode (``decode_split.py``): from logits of pages to a list of the pages to read.

A radix search over all splits' pages finds the key of the page at the budget's edge, eight bits a launch: each split counts what
its pages weigh by digit, and in the next launch every split sums the counts of all of them. Tokens of a page share its score, so
that a page weighs the tokens it has to offer. Of equal keys the lower pages come first: counts of the last digit say how much of
them lies in earlier splits.

``U`` = rows x KV heads (units), ``S`` splits, ``G`` query heads of a KV head, ``P`` pages of the capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.combine import share_of
from vllm_rocketkv.kernels.triton.select import forced_bounds, score_keys

BINS = tl.constexpr(256)
"""Values of a digit."""
LARGEST_KEY = tl.constexpr((1 << 30) - 1)
"""Scores are at most 1, and keys of sums as large: 30 bits, in three digits of eight bits and one of six."""


@triton.jit
def free_pages(num_tokens, topk, sink_tokens, recent_tokens, PAGE_SIZE: tl.constexpr, BY_PAGE: tl.constexpr):
    """``(first, last, first_weight, last_weight, budget)``: pages that hold tokens which are not forced, what the first and the
    last of them weigh (the others weigh a whole page; 0 where the last is the first), and what is left of the budget. Weights
    are tokens, or pages if ``BY_PAGE``."""
    sink_end, recent_start = forced_bounds(num_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
    first, last = sink_end // PAGE_SIZE, (recent_start - 1) // PAGE_SIZE
    is_free = sink_end < recent_start
    if BY_PAGE:
        free = tl.where(is_free, last + 1 - first, 0)
        forced, topk = tl.cdiv(num_tokens, PAGE_SIZE) - free, tl.cdiv(topk, PAGE_SIZE)
        first_weight, last_weight = 1, tl.where(last > first, 1, 0)
    else:
        forced = num_tokens - tl.where(is_free, recent_start - sink_end, 0)
        first_weight = tl.minimum((first + 1) * PAGE_SIZE, recent_start) - sink_end
        last_weight = tl.where(last > first, recent_start - last * PAGE_SIZE, 0)
    return first, last, first_weight, last_weight, tl.where(is_free, tl.maximum(topk, forced) - forced, 0)


@triton.jit
def _count_digits(
    key, start, end, free, digit_mask, shift, prefix, prefix_shift, TILE: tl.constexpr, WEIGHT: tl.constexpr
):
    """int32 ``[BINS]``: what the free pages of a tile weigh whose keys begin with ``prefix``, by the digit that follows.

    ``free`` as from ``free_pages``; ``key`` ``[TILE]`` of the pages from ``start`` on, those below ``end`` being counted.
    """
    first, last, first_weight, last_weight, _ = free
    page = start + tl.arange(0, TILE)
    digit = (key >> shift) & digit_mask
    is_match = (page < end) & ((key >> prefix_shift) == prefix)
    counts = tl.histogram(digit, BINS, mask=is_match & (page > first) & (page < last)) * WEIGHT
    if ((first >= start) & (first < start + TILE)) | ((last >= start) & (last < start + TILE)):
        value = tl.arange(0, BINS)
        of_first = tl.max(tl.where(is_match & (page == first), digit, -1))
        of_last = tl.max(tl.where(is_match & (page == last), digit, -1))
        counts += tl.where(value == of_first, first_weight, 0) + tl.where(value == of_last, last_weight, 0)
    return counts


@triton.jit
def _choose_digit(histograms, budget, NUM_SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr):
    """``(digit, left)``: the largest digit that with all larger ones weighs ``budget``, and what is left for it of that.

    ``histograms``: S of them, ``[BINS]``.
    """
    split, value = tl.arange(0, SPLITS_PADDED), tl.arange(0, BINS)
    at = histograms + split[:, None] * BINS + value[None, :]
    weights = tl.sum(tl.load(at, mask=(split < NUM_SPLITS)[:, None], other=0), axis=0)
    up_to = tl.cumsum(weights)
    at_least = tl.sum(weights) - up_to + weights
    digit = tl.max(tl.where(at_least >= budget, value, 0))
    return digit, budget - tl.sum(tl.where(value > digit, weights, 0))


@triton.jit
def score_kernel(
    rows,  # int32 [R, 6]
    logits,  # float32 [U, G, P]
    statistics,  # float32 [U, S, 2, G]
    keys,  # int32 [U, P]: the score's key + 1; 0 for what is not a number
    histograms,  # int32 [U, DIGITS, S, BINS]
    page_capacity,
    min_tokens,
    dense_below,
    topk_tokens,
    sink_tokens,
    recent_tokens,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores of one split's pages: the mean over the group of the softmax weight of one token of the page.

    Program (split, KV head, row). Reads G floats a page and writes one key.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if (num_tokens <= min_tokens) | (num_tokens <= dense_below):
        return
    free = free_pages(num_tokens, topk_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
    if free[4] == 0:
        return  # the forced tokens are all there is to read
    unit = row * tl.num_programs(1) + head
    begin, end, _ = share_of(tl.cdiv(num_tokens, PAGE_SIZE), split, NUM_SPLITS, PAGE_TILE)
    group, part = tl.arange(0, GROUP_PADDED), tl.arange(0, SPLITS_PADDED)
    is_group = group < GROUP
    part_at = statistics + (unit * NUM_SPLITS + part[:, None]) * 2 * GROUP + group[None, :]
    is_part = (part < NUM_SPLITS)[:, None] & is_group[None, :]
    largest_of_part = tl.load(part_at, mask=is_part, other=float("-inf"))
    largest = tl.max(largest_of_part, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.load(part_at + GROUP, mask=is_part, other=0.0) * tl.exp(largest_of_part - base[None, :])
    share = tl.where(is_group, 1.0 / (tl.where(is_group, tl.sum(sums, axis=0), 1.0) * GROUP), 0.0)

    counts = tl.zeros([BINS], tl.int32)
    for start in range(begin, end, TILE):
        page = start + tl.arange(0, TILE)
        is_page = page < end
        logits_at = logits + (unit * GROUP + group[:, None]) * page_capacity + page[None, :]
        logit = tl.load(logits_at, mask=is_group[:, None] & is_page[None, :], other=0.0)
        weight = tl.exp(logit - base[:, None]) * share[:, None]
        score = tl.sum(tl.where(is_group[:, None], weight, 0.0), axis=0)
        key = tl.minimum(score_keys(score) + 1, LARGEST_KEY)
        tl.store(keys + unit * page_capacity + page, key, mask=is_page)
        counts += _count_digits(key, start, end, free, 255, 22, 0, 30, TILE, 1 if BY_PAGE else PAGE_SIZE)
    value = tl.arange(0, BINS)
    tl.store(histograms + (unit * 4 * NUM_SPLITS + split) * BINS + value, counts)


@triton.jit
def digit_kernel(
    rows,  # int32 [R, 6]
    keys,  # int32 [U, P]
    histograms,  # int32 [U, DIGITS, S, BINS]
    progress,  # int32 [U, DIGITS, 2]: digits so far, and what is left of the budget for keys that begin with them
    page_capacity,
    min_tokens,
    dense_below,
    topk_tokens,
    sink_tokens,
    recent_tokens,
    DIGIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Settles digit ``DIGIT - 1`` of the key at the budget's edge, and counts the next digit of the keys that share it so far.
    The first digit is counted where no ``score_kernel`` has done it.

    Program (split, KV head, row). Reads four bytes a page.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if (num_tokens <= min_tokens) | (num_tokens <= dense_below):
        return
    free = free_pages(num_tokens, topk_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
    if free[4] == 0:
        return
    unit = row * tl.num_programs(1) + head
    begin, end, _ = share_of(tl.cdiv(num_tokens, PAGE_SIZE), split, NUM_SPLITS, PAGE_TILE)
    prefix, left = 0, free[4]
    if DIGIT > 1:
        prefix = tl.load(progress + (unit * 4 + DIGIT - 2) * 2) << 8
        left = tl.load(progress + (unit * 4 + DIGIT - 2) * 2 + 1)
    of_unit = histograms + unit * 4 * NUM_SPLITS * BINS
    if DIGIT > 0:
        digit, left = _choose_digit(of_unit + (DIGIT - 1) * NUM_SPLITS * BINS, left, NUM_SPLITS, SPLITS_PADDED)
        prefix += digit
        if split == 0:
            tl.store(progress + (unit * 4 + DIGIT - 1) * 2, prefix)
            tl.store(progress + (unit * 4 + DIGIT - 1) * 2 + 1, left)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(begin, end, TILE):
        page = start + tl.arange(0, TILE)
        key = tl.load(keys + unit * page_capacity + page, mask=page < end, other=0)
        counts += _count_digits(
            key,
            start,
            end,
            free,
            63 if DIGIT == 3 else 255,
            0 if DIGIT == 3 else 22 - 8 * DIGIT,
            prefix,
            30 - 8 * DIGIT,
            TILE,
            1 if BY_PAGE else PAGE_SIZE,
        )
    value = tl.arange(0, BINS)
    tl.store(of_unit + (DIGIT * NUM_SPLITS + split) * BINS + value, counts)


@triton.jit
def gather_kernel(
    rows,  # int32 [R, 6]
    keys,  # int32 [U, P]
    histograms,  # int32 [U, DIGITS, S, BINS]
    progress,  # int32 [U, DIGITS, 2]
    page_lists,  # int32 [U, G, P] (the logits' memory); the first P of a unit are its list
    list_lengths,  # int32 [U, S]
    page_capacity,
    min_tokens,
    dense_below,
    topk_tokens,
    sink_tokens,
    recent_tokens,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The pages of one split of which any token is read, ascending: page * (PAGE_SIZE + 1) + free tokens taken, which are its
    first ones. They start at the place of the split's first page.

    Program (split, KV head, row). Reads four bytes a page and writes four for each page that is read.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if (num_tokens <= min_tokens) | (num_tokens <= dense_below):
        return
    unit = row * tl.num_programs(1) + head
    begin, end, _ = share_of(tl.cdiv(num_tokens, PAGE_SIZE), split, NUM_SPLITS, PAGE_TILE)
    sink_end, recent_start = forced_bounds(num_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
    budget = free_pages(num_tokens, topk_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)[4]
    threshold, left, before = LARGEST_KEY + 1, 0, 0
    if budget > 0:
        prefix, left = tl.load(progress + (unit * 4 + 2) * 2), tl.load(progress + (unit * 4 + 2) * 2 + 1)
        of_last = histograms + (unit * 4 + 3) * NUM_SPLITS * BINS
        digit, left = _choose_digit(of_last, left, NUM_SPLITS, SPLITS_PADDED)
        threshold = (prefix << 6) + digit
        part = tl.arange(0, SPLITS_PADDED)
        before = tl.sum(tl.load(of_last + part * BINS + digit, mask=part < split, other=0))
    count = 0
    for start in range(begin, end, TILE):
        page = start + tl.arange(0, TILE)
        first = page * PAGE_SIZE
        size = tl.where(page < end, tl.minimum(num_tokens - first, PAGE_SIZE), 0)
        sinks = tl.minimum(tl.maximum(sink_end - first, 0), size)
        free = tl.maximum(tl.minimum(tl.maximum(recent_start - first, 0), size) - sinks, 0)
        key = tl.load(keys + unit * page_capacity + page, mask=free > 0, other=0)
        is_best = (key >= threshold) & (free > 0) & (budget > 0)
        if tl.max((is_best | (free < size)).to(tl.int32)) > 0:
            weight = free
            if BY_PAGE:
                weight = (free > 0).to(tl.int32)
            level = tl.where(is_best & (key == threshold), weight, 0)
            rest = left - before - (tl.cumsum(level) - level)
            taken = tl.where(key > threshold, weight, tl.minimum(tl.maximum(rest, 0), level))
            taken = tl.where(is_best, taken, 0)
            if BY_PAGE:
                taken *= free
            is_listed = (taken > 0) | (free < size)
            place = count + tl.cumsum(is_listed.to(tl.int32)) - 1
            list_at = page_lists + unit * GROUP * page_capacity + begin + place
            tl.store(list_at, page * (PAGE_SIZE + 1) + taken, mask=is_listed)
            count += tl.sum(is_listed.to(tl.int32))
            before += tl.sum(level)
    tl.store(list_lengths + unit * NUM_SPLITS + split, count)
