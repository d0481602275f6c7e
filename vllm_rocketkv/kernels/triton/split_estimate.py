# SPDX-License-Identifier: Apache-2.0
"""First stage of split decode (``decode_split.py``): logits of a row's pages from the KT table.

``U`` = rows x KV heads (units), ``S`` splits, ``G`` query heads of a KV head, ``P`` pages of the capacity, ``D`` head size, ``B``
block size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.combine import share_of
from vllm_rocketkv.kernels.triton.launch import dot
from vllm_rocketkv.kernels.triton.numbers import decode_bound, decode_number
from vllm_rocketkv.kernels.triton.page import add_some_keys, no_keys, summary_codes
from vllm_rocketkv.kernels.triton.select import score_keys, take_best


@triton.jit
def dims_to_read(query, topr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """``(is_read, is_max)`` ``[HEAD_PADDED]``: the ``topr`` dimensions of the largest sums of ``|query|`` ``[G, D]``, and whose
    maxima are read rather than minima. In float64, so that the order of summation hardly ever decides."""
    is_read = tl.arange(0, HEAD_PADDED) < HEAD_SIZE
    if topr < HEAD_SIZE:
        magnitude = tl.sum(tl.abs(query).to(tl.float64), axis=0).to(tl.float32)
        taken = take_best(score_keys(magnitude)[None, :], is_read.to(tl.int32)[None, :], topr)
        is_read = tl.reshape(taken, [HEAD_PADDED]) > 0
    return is_read, tl.sum(query.to(tl.float64), axis=0) > 0


@triton.jit
def newest_codes(
    keys,  # the page's first key
    token_stride,
    count,  # of the page's tokens
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """KT codes int32 ``[HEAD_PADDED]``, of a page that is not full and has no KT entry yet, rounded as if it had."""
    CHUNK: tl.constexpr = PAGE_SIZE if PAGE_SIZE < 16 else 16
    dim = tl.arange(0, HEAD_PADDED)
    summary = no_keys(tl.zeros([HEAD_PADDED], tl.float32), IS_MEAN)
    for start in range(0, count, CHUNK):
        token = start + tl.arange(0, CHUNK)
        is_key = (token < count)[:, None] & (dim < HEAD_SIZE)[None, :]
        code = tl.load(keys + token[:, None].to(tl.int64) * token_stride + dim[None, :], mask=is_key, other=0)
        summary = add_some_keys(summary, decode_number(code, KV_KIND), is_key, IS_MEAN)
    return summary_codes(summary, count, KT_KIND, IS_MEAN)


@triton.jit
def as_entry(code, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, KT_KIND: tl.constexpr):
    """What the estimation reads for KT codes int32 ``[HEAD_PADDED]``."""
    if KT_KIND == 1 or KT_KIND == 2:
        code = code.to(tl.int16)
    elif KT_KIND >= 3:
        code = code.to(tl.uint8)
    return tl.where(tl.arange(0, HEAD_PADDED) < HEAD_SIZE, decode_bound(code, KT_KIND), 0.0)


@triton.jit
def place_of(page, table, is_loaded, kt_block_stride, PAGES: tl.constexpr, KT_VECTOR: tl.constexpr):
    """int64: where in ``kt`` the entries of pages lie, ``PAGES`` of which are in a block."""
    block = tl.max_constancy(tl.load(table + page // PAGES, mask=is_loaded, other=0).to(tl.int64), KT_VECTOR)
    in_block = tl.multiple_of(tl.max_contiguous(page % PAGES, KT_VECTOR), KT_VECTOR)
    return tl.multiple_of(block * kt_block_stride, KT_VECTOR) + in_block


@triton.jit
def _dot_pieces(query, bound, PIECES: tl.constexpr, INTERPRETED: tl.constexpr):
    """``query @ bound``; bounds and each of ``PIECES`` bfloat16 numbers that sum to the query are exact, 0: in float32."""
    if PIECES == 0:
        return dot(query, bound, INTERPRETED)
    high = query.to(tl.bfloat16)
    bound = bound.to(tl.bfloat16)
    sums = dot(high, bound, INTERPRETED)
    if PIECES == 2:
        sums += dot((query - high.to(tl.float32)).to(tl.bfloat16), bound, INTERPRETED)
    return sums


@triton.jit
def estimate_kernel(
    query,  # [tokens, Hq, D], tokens query_stride apart
    kv,  # [blocks, Hkv, B, 2 D] codes
    kt,  # [blocks, Hkv, D, 2, B / PAGE_SIZE] codes
    rows,  # int32 [R, 6]
    block_table,  # int32 [requests, blocks]
    logits,  # float32 [U, G, P]
    statistics,  # float32 [U, S, 2, G]: largest logit, sum over tokens of exp(logit - largest)
    query_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    kt_block_stride,
    kt_head_stride,
    page_capacity,
    key_scale,
    min_tokens,
    dense_below,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    PIECES: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    KT_VECTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Logits of one split's pages for the G query heads of a KV head.

    Program (split, KV head, row). Reads, over all splits, one of minimum and maximum of ``topr`` dimensions of each page's KT
    entry, pages adjacent inside a block; writes G floats a page.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if (num_tokens <= min_tokens) | (num_tokens <= dense_below):
        return
    unit = row * tl.num_programs(1) + head
    num_full = num_tokens // PAGE_SIZE
    begin, end, _ = share_of(tl.cdiv(num_tokens, PAGE_SIZE), split, NUM_SPLITS, PAGE_TILE)
    dim, group = tl.arange(0, HEAD_PADDED), tl.arange(0, GROUP_PADDED)
    is_group = group < GROUP
    statistics_at = statistics + (unit * NUM_SPLITS + split) * 2 * GROUP + group
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_PADDED], tl.float32)
    if begin >= end:
        tl.store(statistics_at, largest, mask=is_group)
        tl.store(statistics_at + GROUP, weight_sum, mask=is_group)
        return

    token_of_row, topr = tl.load(rows + row * 6).to(tl.int64), tl.load(rows + row * 6 + 4)
    table = block_table + tl.load(rows + row * 6 + 1).to(tl.int64) * table_stride + tl.load(rows + row * 6 + 2)
    q_at = query + token_of_row * query_stride + (head * GROUP + group[:, None]) * query_head_stride + dim[None, :]
    q = tl.load(q_at, mask=is_group[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0).to(tl.float32)
    is_read, is_max = dims_to_read(q, topr, HEAD_SIZE, HEAD_PADDED)
    all_of_q = tl.sum(tl.abs(q), axis=1)
    q = tl.where(is_read[None, :], q, 0.0)
    share = tl.zeros([GROUP_PADDED], tl.float32) + 1.0
    if ADAPTIVE:
        read = tl.sum(tl.abs(q), axis=1)
        share = tl.where(read > 0, read / tl.where(all_of_q > 0, all_of_q, 1.0), 1.0)
    factor = key_scale / tl.sqrt_rn(HEAD_SIZE * share)

    newest = tl.zeros([HEAD_PADDED], tl.float32)
    if PAGE_SIZE > 1:  # noqa: SIM102  (decided at compile time)
        if (num_full * PAGE_SIZE < num_tokens) & (end > num_full):
            first = num_full * PAGE_SIZE
            key_at = kv + tl.load(table + first // BLOCK_SIZE).to(tl.int64) * kv_block_stride
            key_at += head.to(tl.int64) * kv_head_stride + (first % BLOCK_SIZE).to(tl.int64) * kv_token_stride
            low, high = newest_codes(
                key_at, kv_token_stride, num_tokens - first, HEAD_SIZE, HEAD_PADDED, PAGE_SIZE, KV_KIND, KT_KIND, False
            )
            newest = as_entry(tl.where(is_max, high, low), HEAD_SIZE, HEAD_PADDED, KT_KIND)

    PAGES: tl.constexpr = BLOCK_SIZE // PAGE_SIZE
    kt_head = tl.multiple_of(kt + head.to(tl.int64) * kt_head_stride, 16)
    bounds_at = tl.multiple_of(dim * (2 * PAGES) + tl.where(is_max, PAGES, 0), KT_VECTOR)
    for start in range(begin, end, PAGE_TILE):
        page = tl.multiple_of(start, PAGE_TILE) + tl.arange(0, PAGE_TILE)
        is_page = page < end
        # With neighbours of its block, by as many as one load takes: what they bring is masked later.
        is_loaded = page // KT_VECTOR * KT_VECTOR < tl.minimum(end, num_full)
        page_at = place_of(page, table, is_loaded, kt_block_stride, PAGES, KT_VECTOR)
        code_at = kt_head + page_at[None, :] + bounds_at[:, None]
        code = tl.load(code_at, mask=is_loaded[None, :] & is_read[:, None], other=0)
        bound = decode_bound(code, KT_KIND)
        if PAGE_SIZE > 1:
            bound = tl.where((page == num_full)[None, :], newest[:, None], bound)
        logit = _dot_pieces(q, bound, PIECES, INTERPRETED) * factor[:, None]
        logits_at = logits + (unit * GROUP + group[:, None]) * page_capacity + page[None, :]
        tl.store(logits_at, logit, mask=is_group[:, None] & is_page[None, :])
        logit = tl.where(is_page[None, :], logit, float("-inf"))
        now = tl.maximum(largest, tl.max(logit, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        tokens = tl.minimum(num_tokens - page * PAGE_SIZE, PAGE_SIZE).to(tl.float32)
        weight = tl.exp(logit - base[:, None]) * tokens[None, :]
        weight_sum = weight_sum * tl.exp(largest - base) + tl.sum(weight, axis=1)
        largest = now
    tl.store(statistics_at, largest, mask=is_group)
    tl.store(statistics_at + GROUP, weight_sum, mask=is_group)
