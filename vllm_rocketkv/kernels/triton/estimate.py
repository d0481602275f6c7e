# SPDX-License-Identifier: Apache-2.0
"""Estimation in the fused decode kernel: from the KT table to the scores of pages, and the list of the chosen ones.

In registers but for notes in the workspace, by which threads tell each other what each dimension takes: a loop cannot index
registers. ``kernels/reference.py`` has the formulas: ``hsa_scores``, ``quest_scores`` and ``mean_scores``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.numbers import decode_bound, decode_number
from vllm_rocketkv.kernels.triton.page import add_some_keys, no_keys, summary_codes
from vllm_rocketkv.kernels.triton.select import score_keys, take_best

# ------------------------------------------------------------------------------------------------ what to read of the KT table


@triton.jit
def newest_page(keys, key_token_stride, size, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
                KV_KIND: tl.constexpr, KT_KIND: tl.constexpr, IS_MEAN: tl.constexpr):  # fmt: skip
    """KT codes int32 ``[1, D_PAD]`` of a page's first ``size`` keys, as if it had an entry: its minima and maxima, or its mean
    twice."""
    TOKENS: tl.constexpr = PAGE_SIZE if PAGE_SIZE < 16 else 16
    d = tl.arange(0, D_PAD)[None, :]
    summary = no_keys(tl.zeros([1, D_PAD], tl.float32), IS_MEAN)
    for first in range(0, size, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        is_real = (token < size) & (d < D)
        key = decode_number(tl.load(keys + token * key_token_stride + d, mask=is_real, other=0), KV_KIND)
        summary = add_some_keys(summary, key, is_real, IS_MEAN, True)
    return summary_codes(summary, tl.maximum(size, 1), KT_KIND, IS_MEAN)


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
    low, high = newest_page(keys, key_token_stride, num_newest, D, D_PAD, PAGE_SIZE, KV_KIND, KT_KIND, False)
    tl.store(dims + 2 * place + 1, tl.where(up, high, low), mask=is_read)


@triton.jit
def prepare_sums(
    query, query_head_stride, keys, key_token_stride, num_newest, dims, summed_query,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KV_KIND: tl.constexpr, KT_KIND: tl.constexpr, IS_MEAN: tl.constexpr,
):  # fmt: skip
    """As ``prepare_estimate`` for the estimators that meet pages with one query for the whole group. Returns how many rows of the
    KT table are read: those whose factor is 0 are not.

    Quest's query has a factor for each minimum, the sum of the group's negative numbers, and one for each maximum, the sum of
    its positive ones; the rows are in the order of the table. The other's is the sum of the group, which ranks as its mean does.
    """
    g = tl.arange(0, G_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    q = tl.load(query + g * query_head_stride + d, mask=(g < G) & (d < D), other=0.0).to(tl.float32)
    low, high = newest_page(keys, key_token_stride, num_newest, D, D_PAD, PAGE_SIZE, KV_KIND, KT_KIND, IS_MEAN)
    # A sum that is not a number is read, and makes scores that are none: hence not "> 0".
    if IS_MEAN:
        of_low = tl.sum(q, axis=0, keep_dims=True)
        takes_low = of_low != 0.0
        place = tl.cumsum(takes_low.to(tl.int32), axis=1) - 1
    else:
        of_low = tl.sum(tl.where(q > 0, 0.0, q), axis=0, keep_dims=True)
        of_high = tl.sum(tl.where(q < 0, 0.0, q), axis=0, keep_dims=True)
        takes_low, takes_high = of_low != 0.0, of_high != 0.0
        place = tl.cumsum(takes_low.to(tl.int32) + takes_high.to(tl.int32), axis=1) - 1
        tl.store(dims + 2 * place, 2 * d + 1, mask=takes_high)
        tl.store(dims + 2 * place + 1, high, mask=takes_high)
        tl.store(summed_query + place, of_high, mask=takes_high)
        place -= takes_high.to(tl.int32)
    tl.store(dims + 2 * place, 2 * d, mask=takes_low)
    tl.store(dims + 2 * place + 1, low, mask=takes_low)
    tl.store(summed_query + place, of_low, mask=takes_low)
    num_read = tl.sum(takes_low.to(tl.int32))
    if not IS_MEAN:
        num_read += tl.sum(takes_high.to(tl.int32))
    return num_read


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
