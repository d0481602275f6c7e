# SPDX-License-Identifier: Apache-2.0
"""Estimation in the fused decode kernel: from the KT table to the scores of pages, and the list of the chosen ones.

In registers but for notes in the workspace, by which threads tell each other what each dimension takes: a loop cannot index
registers. ``hsa_scores`` of ``kernels/reference.py`` has the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.numbers import decode_bound, decode_number, encode_bound
from vllm_rocketkv.kernels.triton.select import score_keys, take_best

# ------------------------------------------------------------------------------------------------ what to read of the KT table


@triton.jit
def newest_page(keys, key_token_stride, size, up, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
                KV_KIND: tl.constexpr, KT_KIND: tl.constexpr):  # fmt: skip
    """KT codes int32 ``[1, D_PAD]`` of a page's first ``size`` keys: maxima where ``up``, else minima, rounded outward."""
    TOKENS: tl.constexpr = PAGE_SIZE if PAGE_SIZE < 16 else 16
    d = tl.arange(0, D_PAD)[None, :]
    low = tl.full([1, D_PAD], float("inf"), tl.float32)
    high = tl.full([1, D_PAD], float("-inf"), tl.float32)
    for first in range(0, size, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        is_real = (token < size) & (d < D)
        key = decode_number(tl.load(keys + token * key_token_stride + d, mask=is_real, other=0), KV_KIND)
        low = tl.minimum(low, tl.min(tl.where(is_real, key, float("inf")), axis=0, keep_dims=True))
        high = tl.maximum(high, tl.max(tl.where(is_real, key, float("-inf")), axis=0, keep_dims=True))
    return tl.where(up, encode_bound(high, True, KT_KIND), encode_bound(low, False, KT_KIND))


@triton.jit
def prepare_estimate(
    query, query_head_stride, keys, key_token_stride, num_newest, topr, key_scale, dims, scaled_query,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KV_KIND: tl.constexpr, KT_KIND: tl.constexpr, ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Write down what the estimation does with each of the ``topr`` dimensions that it reads, in ascending order.

    ``dims`` int32 ``[D_PAD, 2]``: the row of the KT table (2 * dimension + sign) and the KT code of the newest page, whose
    ``num_newest`` first keys are at ``keys`` (none if it is full, and in the table). ``scaled_query`` float32 ``[G_PAD,
    D_PAD]``: the query over the temperature, so that sums of its products with bounds are logits.
    """
    g = tl.arange(0, G_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    is_real = (g < G) & (d < D)
    q = tl.load(query + g * query_head_stride + d, mask=is_real, other=0.0).to(tl.float32)
    magnitude = tl.abs(q)
    # In float64, where the order of the heads is lost: which bound and which dimensions are read must not depend on it.
    up = tl.sum(q.to(tl.float64), axis=0, keep_dims=True) > 0
    is_read = d < D
    if topr < D:
        of_group = tl.sum(magnitude.to(tl.float64), axis=0, keep_dims=True).to(tl.float32)
        is_read = take_best(score_keys(of_group), (d < D).to(tl.int32), topr) > 0
    place = tl.cumsum(is_read.to(tl.int32), axis=1) - 1
    share = tl.full([G_PAD, 1], 1.0, tl.float32)
    if ADAPTIVE:
        total = tl.sum(magnitude, axis=1, keep_dims=True)
        read = tl.sum(tl.where(is_read, magnitude, 0.0), axis=1, keep_dims=True)
        share = tl.where(read > 0, read / total, 1.0)
    tl.store(scaled_query + g * D_PAD + place, q * (key_scale / tl.sqrt(D * share)), mask=is_real & is_read)
    tl.store(dims + 2 * place, 2 * d + up.to(tl.int32), mask=is_read)
    newest = newest_page(keys, key_token_stride, num_newest, up, D, D_PAD, PAGE_SIZE, KV_KIND, KT_KIND)
    tl.store(dims + 2 * place + 1, newest, mask=is_read)


# ------------------------------------------------------------------------------------------------ scores of pages


@triton.jit
def page_logits(
    table, page, num_stored, dims, scaled_query, num_heads, num_read,
    HEADS: tl.constexpr, D_PAD: tl.constexpr, ROW: tl.constexpr, KT_KIND: tl.constexpr,
    NUM_PAGES: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Logits float32 ``[HEADS, NUM_PAGES]``, from ``prepare_estimate``'s notes; ``num_heads`` of the heads are real.

    ``table`` ``[1, NUM_PAGES]`` points to the pages' entries in row 0 of their KT table, whose rows are ``ROW`` entries apart.
    ``num_stored`` pages are in it; entries are loaded ``VECTOR`` at a time, so that a few more may be, and are ignored. Every
    page is summed in the same order, the newest one included: equal pages tie wherever they lie.
    """
    head = tl.arange(0, HEADS)[:, None]
    of_head = scaled_query + head * D_PAD
    is_stored = page < num_stored
    vector = page // VECTOR * VECTOR
    logits = tl.zeros([HEADS, NUM_PAGES], tl.float32)
    for first in range(0, num_read, UNROLL):
        for ahead in tl.static_range(UNROLL):
            i = first + ahead
            is_read = i < num_read
            row = tl.load(dims + 2 * i, mask=is_read, other=0)
            newest = tl.load(dims + 2 * i + 1, mask=is_read, other=0).to(table.dtype.element_ty)
            codes = tl.load(table + row * ROW, mask=vector < tl.where(is_read, num_stored, 0), other=0)
            q = tl.load(of_head + i, mask=head < tl.where(is_read, num_heads, 0), other=0.0)
            logits += q * decode_bound(tl.where(is_stored, codes, newest), KT_KIND)
    return logits


@triton.jit
def add_softmax(scores, logits, size, num_heads, G: tl.constexpr, HEADS: tl.constexpr):
    """``scores`` ``[1, pages]`` plus the share that these heads have in the mean over all G of the softmax over tokens.

    ``size``: tokens of each page. The first ``num_heads`` of the heads are real.
    """
    largest = tl.max(tl.where(size > 0, logits, float("-inf")), axis=1, keep_dims=True)
    weights = tl.where(size > 0, tl.exp(logits - largest), 0.0)
    total = tl.sum(weights * size.to(tl.float32), axis=1, keep_dims=True)
    is_real = tl.arange(0, HEADS)[:, None] < num_heads
    return scores + tl.sum(tl.where(is_real, weights / (total * G), 0.0), axis=0, keep_dims=True)


@triton.jit
def list_tokens(chosen, page, block, is_listed, limit, PAGE_SIZE: tl.constexpr):
    """Write the listed pages to ``chosen`` int32 ``[pages, 3]``: first token, limit and block; ascending. Returns how many."""
    place = tl.cumsum(is_listed.to(tl.int32), axis=1) - 1
    tl.store(chosen + 3 * place, page * PAGE_SIZE, mask=is_listed)
    tl.store(chosen + 3 * place + 1, limit, mask=is_listed)
    tl.store(chosen + 3 * place + 2, block, mask=is_listed)
    return tl.sum(is_listed.to(tl.int32))
