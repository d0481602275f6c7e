# SPDX-License-Identifier: Apache-2.0
"""The second half of split decode: attention over shares of what a row reads, and the sum of the shares (``decode_split.py``).

``U`` = rows x KV heads (units), ``S`` splits, ``G`` query heads of a KV head, ``D`` head size, ``B`` block size,
``P`` pages of the capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.launch import dot
from vllm_rocketkv.kernels.triton.numbers import decode_number
from vllm_rocketkv.kernels.triton.select import forced_bounds


@triton.jit
def share_of(count, split, NUM_SPLITS: tl.constexpr, ALIGN: tl.constexpr):
    """``(begin, end, size)`` of a split's share of ``count`` things. Shares are contiguous and ``size`` a multiple of ``ALIGN``;
    of an empty one ``end <= begin``."""
    size = tl.cdiv(tl.cdiv(count, NUM_SPLITS), ALIGN) * ALIGN
    return split * size, tl.minimum(split * size + size, count), size


@triton.jit
def dot_operand(code, KIND: tl.constexpr, OPERAND: tl.constexpr):
    """Stored codes as numbers that ``tl.dot`` multiplies, ``OPERAND`` being the kind of those numbers; exact."""
    if OPERAND == 1:
        if KIND == 1:
            return code.to(tl.bfloat16, bitcast=True)
        else:
            return decode_number(code, KIND).to(tl.bfloat16)
    elif OPERAND == 2:
        if KIND == 2:
            return code.to(tl.float16, bitcast=True)
        else:
            return decode_number(code, KIND).to(tl.float16)
    else:
        return decode_number(code, KIND)


@triton.jit
def query_operand(query, OPERAND: tl.constexpr):
    """The query in the type of ``dot_operand``; exact."""
    if OPERAND == 1:
        return query.to(tl.bfloat16)
    elif OPERAND == 2:
        return query.to(tl.float16)
    else:
        return query.to(tl.float32)


@triton.jit
def _listed_tokens(
    slot, page_list, list_ends, region, sink_end, recent_start, num_tokens, is_slot, PAGE_SIZE: tl.constexpr
):
    """Tokens of slots (``PAGE_SIZE`` to a listed page), and which of them are read.

    Each split of ``gather_kernel`` has written ``page_list`` from a place of its own on, ``region`` apart; ``list_ends`` are the
    running totals of how many pages.
    """
    entry = slot // PAGE_SIZE
    is_before = list_ends[None, :] <= entry[:, None]
    part = tl.sum(is_before.to(tl.int32), axis=1)
    start = tl.max(tl.where(is_before, list_ends[None, :], 0), axis=1)
    packed = tl.load(page_list + part * region + entry - start, mask=is_slot, other=0)
    first = packed // (PAGE_SIZE + 1) * PAGE_SIZE
    limit = tl.maximum(first, sink_end) + packed % (PAGE_SIZE + 1)
    token = first + slot % PAGE_SIZE
    return token, is_slot & (token < num_tokens) & ((token < limit) | (token >= recent_start))


@triton.jit
def attend_kernel(
    query,  # [tokens, Hq, D], tokens query_stride apart
    kv,  # [blocks, Hkv, B, 2 D] codes: key, then value
    rows,  # int32 [R, 6]
    block_table,  # int32 [requests, blocks]
    page_lists,  # int32 [U, G, P], of which the first P are a unit's list: page * (PAGE_SIZE + 1) + free tokens taken of it
    list_lengths,  # int32 [U, S]
    partial_sums,  # float32 [U, S, G, D]
    partial_statistics,  # float32 [U, S, 2, G]: largest logit, sum of weights
    query_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    page_capacity,
    logit_scale,
    softcap,
    min_tokens,
    dense_below,
    sink_tokens,
    recent_tokens,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    OPERAND: tl.constexpr,
    BY_PAGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Online softmax over one split's share of the listed tokens, or of all tokens where the row reads all.

    Program (split, KV head, row). Reads the selected tokens' K and V once over all splits, 2 D numbers each (of a page at the
    budget's edge the tokens taken alone), and writes G (D + 2) floats. A split without a token writes its statistics only.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if num_tokens <= min_tokens:
        return
    unit = row * tl.num_programs(1) + head
    dim, group = tl.arange(0, HEAD_PADDED), tl.arange(0, GROUP_PADDED)
    is_dim, is_group = dim < HEAD_SIZE, group < GROUP
    out = unit * NUM_SPLITS + split
    statistics = partial_statistics + out * 2 * GROUP + group

    is_sparse = num_tokens > dense_below
    total = num_tokens
    if PAGE_SIZE > 0:
        sink_end, recent_start = forced_bounds(num_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
        part = tl.arange(0, SPLITS_PADDED)
        num_lists = tl.where(is_sparse, NUM_SPLITS, 0)
        lengths = tl.load(list_lengths + unit * NUM_SPLITS + part, mask=part < num_lists, other=0)
        list_ends = tl.cumsum(lengths)
        total = tl.where(is_sparse, tl.sum(lengths) * PAGE_SIZE, num_tokens)
        region = share_of(tl.cdiv(num_tokens, PAGE_SIZE), 0, NUM_SPLITS, PAGE_TILE)[2]
        page_list = page_lists + unit * GROUP * page_capacity
    begin, end, _ = share_of(total, split, NUM_SPLITS, TOKEN_TILE)
    if begin >= end:
        tl.store(statistics, tl.full([GROUP_PADDED], float("-inf"), tl.float32), mask=is_group)
        tl.store(statistics + GROUP, tl.zeros([GROUP_PADDED], tl.float32), mask=is_group)
        return

    token_of_row = tl.load(rows + row * 6).to(tl.int64)
    table = block_table + tl.load(rows + row * 6 + 1).to(tl.int64) * table_stride + tl.load(rows + row * 6 + 2)
    q_at = query + token_of_row * query_stride + (head * GROUP + group[:, None]) * query_head_stride + dim[None, :]
    q = query_operand(tl.load(q_at, mask=is_group[:, None] & is_dim[None, :], other=0.0), OPERAND)
    kv_head = tl.multiple_of(kv + head.to(tl.int64) * kv_head_stride, 16)

    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_PADDED], tl.float32)
    sums = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    for start in range(begin, end, TOKEN_TILE):
        slot = start + tl.arange(0, TOKEN_TILE)
        token, is_read = slot, slot < end
        if PAGE_SIZE > 0:  # noqa: SIM102  (the outer one is decided at compile time)
            if is_sparse:
                token, is_read = _listed_tokens(
                    slot, page_list, list_ends, region, sink_end, recent_start, num_tokens, slot < end, PAGE_SIZE
                )
        block = tl.load(table + token // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        at = block * kv_block_stride + (token % BLOCK_SIZE).to(tl.int64) * kv_token_stride
        at = tl.multiple_of(at, KV_VECTOR)
        key_at = kv_head + at[:, None] + dim[None, :]
        is_loaded = is_read[:, None] & is_dim[None, :]
        key = dot_operand(tl.load(key_at, mask=is_loaded, other=0), KV_KIND, OPERAND)
        value = dot_operand(tl.load(key_at + HEAD_SIZE, mask=is_loaded, other=0), KV_KIND, OPERAND)
        logit = dot(q, tl.trans(key), INTERPRETED) * logit_scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            logit = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logit / softcap) + 1.0))
        logit = tl.where(is_read[None, :], logit, float("-inf"))
        now = tl.maximum(largest, tl.max(logit, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing read yet
        weight = tl.exp(logit - base[:, None])
        shrink = tl.exp(largest - base)
        weight_sum = weight_sum * shrink + tl.sum(weight, axis=1)
        sums = sums * shrink[:, None] + dot(weight.to(value.dtype), value, INTERPRETED)
        largest = now
    tl.store(statistics, largest, mask=is_group)
    tl.store(statistics + GROUP, weight_sum, mask=is_group)
    sums_at = partial_sums + (out * GROUP + group[:, None]) * HEAD_SIZE + dim[None, :]
    tl.store(sums_at, sums, mask=is_group[:, None] & is_dim[None, :])


@triton.jit
def combine_kernel(
    output,  # [tokens, Hq, D], tokens output_stride apart
    rows,  # int32 [R, 6]
    partial_sums,  # float32 [U, S, G, D]
    partial_statistics,  # float32 [U, S, 2, G]
    output_stride,
    output_head_stride,
    value_scale,
    min_tokens,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """The splits' partial results merged into the row's output; zeros where nothing was read.

    Program (query head, row). Reads S (D + 2) floats at most, splits that read nothing being skipped, and writes D numbers.
    """
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(rows + row * 6 + 3) <= min_tokens:
        return
    unit = row * (tl.num_programs(0) // GROUP) + query_head // GROUP
    member = query_head % GROUP
    dim, split = tl.arange(0, HEAD_PADDED), tl.arange(0, SPLITS_PADDED)
    part = unit * NUM_SPLITS + split
    is_split = split < NUM_SPLITS
    largest = tl.load(partial_statistics + part * 2 * GROUP + member, mask=is_split, other=float("-inf"))
    weight_sum = tl.load(partial_statistics + (part * 2 + 1) * GROUP + member, mask=is_split, other=0.0)
    is_used = weight_sum != 0  # NaN is not 0
    base = tl.max(largest)
    factor = tl.where(is_used, tl.exp(largest - tl.where(base == float("-inf"), 0.0, base)), 0.0)
    sums_at = partial_sums + (part[:, None] * GROUP + member) * HEAD_SIZE + dim[None, :]
    sums = tl.load(sums_at, mask=is_used[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    total = tl.sum(weight_sum * factor)
    result = tl.sum(sums * factor[:, None], axis=0) * (value_scale / tl.where(total == 0, 1.0, total))
    token = tl.load(rows + row * 6).to(tl.int64)
    out_at = output + token * output_stride + query_head * output_head_stride + dim
    tl.store(out_at, result.to(output.dtype.element_ty), mask=dim < HEAD_SIZE)
