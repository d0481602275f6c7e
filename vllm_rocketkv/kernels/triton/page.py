# SPDX-License-Identifier: Apache-2.0
"""What the KT table holds of a page's keys: their bounds, rounded outward, or their mean, rounded to nearest.

A summary grows key by key: minima and maxima float32, or sums float64, where the order of the keys is lost, so that every kernel
that summarises a page, and every GPU, gets the same mean. Shapes are the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.numbers import encode_bound, encode_mean


@triton.jit
def no_keys(zeros, IS_MEAN: tl.constexpr):
    """The summary ``(low, high)`` of no keys, shaped as ``zeros``, float32. A mean has its sum in ``low``, and no ``high``."""
    if IS_MEAN:
        return zeros.to(tl.float64), zeros
    else:
        return zeros + float("inf"), zeros + float("-inf")


@triton.jit
def add_keys(summary, keys, AXIS: tl.constexpr, IS_MEAN: tl.constexpr):
    """The summary with float32 ``keys`` added, which lie along ``AXIS``."""
    low, high = summary
    if IS_MEAN:
        return low + tl.sum(keys.to(tl.float64), AXIS), high
    else:
        return tl.minimum(low, tl.min(keys, AXIS)), tl.maximum(high, tl.max(keys, AXIS))


@triton.jit
def add_some_keys(summary, keys, is_real, IS_MEAN: tl.constexpr, KEEP_DIMS: tl.constexpr = False):
    """The summary with those of ``keys`` added, along axis 0, that ``is_real``."""
    low, high = summary
    if IS_MEAN:
        return low + tl.sum(tl.where(is_real, keys, 0.0).to(tl.float64), 0, keep_dims=KEEP_DIMS), high
    else:
        low = tl.minimum(low, tl.min(tl.where(is_real, keys, float("inf")), 0, keep_dims=KEEP_DIMS))
        return low, tl.maximum(high, tl.max(tl.where(is_real, keys, float("-inf")), 0, keep_dims=KEEP_DIMS))


@triton.jit
def mean_code(summary, count, KT_KIND: tl.constexpr):
    """KT code (int32) of the mean, after ``count`` keys."""
    return encode_mean((summary[0] / count).to(tl.float32), KT_KIND)


@triton.jit
def summary_codes(summary, count, KT_KIND: tl.constexpr, IS_MEAN: tl.constexpr):
    """KT codes (int32) of the page's two entries, after ``count`` keys."""
    if IS_MEAN:
        code = mean_code(summary, count, KT_KIND)
        return code, code
    else:
        high = encode_bound(summary[1], True, KT_KIND)
        return encode_bound(summary[0], False, KT_KIND), high


@triton.jit
def store_summary(
    kt, place, dims, mask, summary, count, PAGES_PER_BLOCK: tl.constexpr, KT_KIND: tl.constexpr, IS_MEAN: tl.constexpr
):
    """Write KT entries: minima rounded down, maxima rounded up (I8), or the mean twice.

    ``place`` int64 ``[pages, 1]`` is where each page's first entry of dimension 0 lies behind ``kt``; ``summary`` and ``mask``
    ``[pages, dims]``; ``count``: keys of a page.
    """
    at = kt + place + dims * (2 * PAGES_PER_BLOCK)
    if IS_MEAN:
        code = mean_code(summary, count, KT_KIND).to(kt.dtype.element_ty)
        tl.store(at, code, mask=mask)
        tl.store(at + PAGES_PER_BLOCK, code, mask=mask)
    else:
        tl.store(at, encode_bound(summary[0], False, KT_KIND).to(kt.dtype.element_ty), mask=mask)
        tl.store(at + PAGES_PER_BLOCK, encode_bound(summary[1], True, KT_KIND).to(kt.dtype.element_ty), mask=mask)
