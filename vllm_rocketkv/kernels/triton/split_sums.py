# SPDX-License-Identifier: Apache-2.0
"""First stage of split decode for the estimators that meet a page with one query for the whole group, quest and mean: their sums
are the scores (``quest_scores``, ``mean_scores`` of ``kernels/reference.py``). Symbols as in ``split_estimate.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.combine import share_of
from vllm_rocketkv.kernels.triton.numbers import decode_bound
from vllm_rocketkv.kernels.triton.select import sum_keys
from vllm_rocketkv.kernels.triton.split_estimate import as_entry, newest_codes, place_of


@triton.jit
def sums_of_group(query, IS_MEAN: tl.constexpr):
    """``(of_low, of_high)`` ``[HEAD_PADDED]``: factors of a page's minima and maxima; a mean is in the minimum's place.

    As in ``prepare_sums`` of ``estimate.py``.
    """
    if IS_MEAN:
        of_low = tl.sum(query, axis=0)
        return of_low, of_low
    else:
        return tl.sum(tl.where(query > 0, 0.0, query), axis=0), tl.sum(tl.where(query < 0, 0.0, query), axis=0)


@triton.jit
def sum_kernel(
    query,  # [tokens, Hq, D], tokens query_stride apart
    kv,  # [blocks, Hkv, B, 2 D] codes
    kt,  # [blocks, Hkv, D, 2, B / PAGE_SIZE] codes
    rows,  # int32 [R, 6]
    block_table,  # int32 [requests, blocks]
    keys,  # int32 [U, P]: the score's key + 1; 0 for what is not a number
    query_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    kt_block_stride,
    kt_head_stride,
    page_capacity,
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
    IS_MEAN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    KT_VECTOR: tl.constexpr,
):
    """Keys of one split's pages.

    Program (split, KV head, row). Reads, over all splits, minima and maxima, or means, of all dimensions of each page's KT entry
    (those whose factor is 0 excepted), pages adjacent inside a block; writes an integer a page.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if (num_tokens <= min_tokens) | (num_tokens <= dense_below):
        return
    unit = row * tl.num_programs(1) + head
    num_full = num_tokens // PAGE_SIZE
    begin, end, _ = share_of(tl.cdiv(num_tokens, PAGE_SIZE), split, NUM_SPLITS, PAGE_TILE)
    if begin >= end:
        return
    dim, group = tl.arange(0, HEAD_PADDED), tl.arange(0, GROUP_PADDED)
    table = block_table + tl.load(rows + row * 6 + 1).to(tl.int64) * table_stride + tl.load(rows + row * 6 + 2)
    q_at = query + tl.load(rows + row * 6).to(tl.int64) * query_stride
    q_at += (head * GROUP + group[:, None]) * query_head_stride + dim[None, :]
    q = tl.load(q_at, mask=(group < GROUP)[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0).to(tl.float32)
    of_low, of_high = sums_of_group(q, IS_MEAN)

    newest_low = tl.zeros([HEAD_PADDED], tl.float32)
    newest_high = newest_low
    if PAGE_SIZE > 1:  # noqa: SIM102  (decided at compile time)
        if (num_full * PAGE_SIZE < num_tokens) & (end > num_full):
            first = num_full * PAGE_SIZE
            key_at = kv + tl.load(table + first // BLOCK_SIZE).to(tl.int64) * kv_block_stride
            key_at += head.to(tl.int64) * kv_head_stride + (first % BLOCK_SIZE).to(tl.int64) * kv_token_stride
            low, high = newest_codes(
                key_at,
                kv_token_stride,
                num_tokens - first,
                HEAD_SIZE,
                HEAD_PADDED,
                PAGE_SIZE,
                KV_KIND,
                KT_KIND,
                IS_MEAN,
            )
            newest_low = as_entry(low, HEAD_SIZE, HEAD_PADDED, KT_KIND)
            newest_high = as_entry(high, HEAD_SIZE, HEAD_PADDED, KT_KIND)

    PAGES: tl.constexpr = BLOCK_SIZE // PAGE_SIZE
    kt_head = tl.multiple_of(kt + head.to(tl.int64) * kt_head_stride, 16)
    low_at = tl.multiple_of(dim * (2 * PAGES), KT_VECTOR)
    for start in range(begin, end, PAGE_TILE):
        page = tl.multiple_of(start, PAGE_TILE) + tl.arange(0, PAGE_TILE)
        # With neighbours of its block, by as many as one load takes: what they bring is masked later.
        is_loaded = page // KT_VECTOR * KT_VECTOR < tl.minimum(end, num_full)
        is_newest = (page == num_full)[None, :]
        code_at = (
            kt_head + place_of(page, table, is_loaded, kt_block_stride, PAGES, KT_VECTOR)[None, :] + low_at[:, None]
        )
        code = tl.load(code_at, mask=is_loaded[None, :] & (of_low != 0.0)[:, None], other=0)
        terms = tl.where(is_newest, newest_low[:, None], decode_bound(code, KT_KIND)) * of_low[:, None]
        if not IS_MEAN:
            code = tl.load(code_at + PAGES, mask=is_loaded[None, :] & (of_high != 0.0)[:, None], other=0)
            terms += tl.where(is_newest, newest_high[:, None], decode_bound(code, KT_KIND)) * of_high[:, None]
        key = sum_keys(tl.sum(terms, axis=0)) + 1
        tl.store(keys + unit * page_capacity + page, key, mask=page < end)
