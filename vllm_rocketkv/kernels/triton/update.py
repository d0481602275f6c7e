# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a step's private tokens, and the KT entries of pages that became full.

``write_rows`` goes before the decode kernels of a step, ``summarise_pages`` after vLLM's own op has written natural blocks, for
policies that select without evicting. Both are one launch whose grid depends on shapes alone, so that CUDA graphs can hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.launch import NUM_STAGES, CompileCase, padded
from vllm_rocketkv.kernels.triton.numbers import KINDS, as_codes, decode_number, encode_number
from vllm_rocketkv.kernels.triton.page import add_keys, no_keys, store_summary


@triton.jit
def _store_form(code, scale, MODEL_KIND: tl.constexpr, KV_KIND: tl.constexpr):
    """What the cache holds of a model's number: its code if it is of the cache's type, else number / scale, rounded."""
    if MODEL_KIND == KV_KIND:
        return code
    else:
        return encode_number(tl.div_rn(decode_number(code, MODEL_KIND), scale), KV_KIND)


@triton.jit
def _close_page(
    kv,  # [BLOCK, 2 * D] codes of the head in the row's newest block
    kt,  # [D, 2, BLOCK / PAGE] codes, the same
    key,  # [T, D] codes of the head
    rows,  # [R, 6]
    row,
    request,
    num_tokens,
    key_scale,
    key_token_stride,
    kv_token_stride,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    MODEL_KIND: tl.constexpr,
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    KT_IS_MEAN: tl.constexpr,
):
    """Write the KT entry of the page that the row's token fills, if it fills one."""
    if num_tokens % PAGE == 0:
        last = (num_tokens - 1) % BLOCK
        dims = tl.arange(0, DIMS)
        in_head = dims < D
        summary = no_keys(tl.zeros([DIMS], tl.float32), KT_IS_MEAN)
        for first in range(0, PAGE, ROWS):
            # The page's tokens, counted back from the row's. The programs of this step's other rows may or may not have written
            # theirs: those come from `key`. Rows of a request are neighbours, in the order of their positions.
            back = PAGE - 1 - first - tl.arange(0, ROWS)
            earlier = rows + (row - back) * 6
            is_new = tl.load(earlier + 3, mask=row >= back, other=0) == num_tokens - back
            is_new &= tl.load(earlier + 1, mask=row >= back, other=-1) == request
            token = tl.load(earlier, mask=is_new, other=0).to(tl.int64)
            new = key + token[:, None] * key_token_stride + dims[None, :]
            new = tl.load(new, mask=is_new[:, None] & in_head[None, :], other=0)
            new = _store_form(new, key_scale, MODEL_KIND, KV_KIND).to(kv.dtype.element_ty)
            old = kv + (last - back).to(tl.int64)[:, None] * kv_token_stride + dims[None, :]
            old = tl.load(old, mask=(~is_new)[:, None] & in_head[None, :], other=0)
            keys = decode_number(tl.where(is_new[:, None], new, old), KV_KIND)
            summary = add_keys(summary, keys, 0, KT_IS_MEAN)
        store_summary(kt, last // PAGE, dims, in_head, summary, PAGE, BLOCK // PAGE, KT_KIND, KT_IS_MEAN)


@triton.jit
def _write_rows(
    kv,  # [num_blocks, Hkv, BLOCK, 2 * D] codes, blocks, heads and tokens at the strides below
    kt,  # [num_blocks, Hkv, D, 2, BLOCK / PAGE] codes, contiguous within a block
    key,  # [T, Hkv, D] codes of the model's type, tokens and heads at the strides below
    value,
    rows,  # [R, 6]: token, request, first_block, num_tokens, topr, later
    block_table,  # [num_reqs, blocks]
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    kt_block_stride,
    D: tl.constexpr,
    DIMS: tl.constexpr,  # D, padded
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,  # 0: no KT table
    ROWS: tl.constexpr,  # tokens of a page that are in registers at once
    MODEL_KIND: tl.constexpr,
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    KT_IS_MEAN: tl.constexpr,
):
    """One program writes one row's token for one KV head: grid (R, Hkv)."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(rows + row * 6 + 3)
    if num_tokens <= 0:
        return
    token = tl.load(rows + row * 6).to(tl.int64)
    request = tl.load(rows + row * 6 + 1)
    blocks = block_table + request.to(tl.int64) * table_stride + tl.load(rows + row * 6 + 2)
    position = num_tokens - 1
    block = tl.load(blocks + position // BLOCK).to(tl.int64)
    kv += block * kv_block_stride + head * kv_head_stride
    key += head * key_head_stride
    dims = tl.arange(0, DIMS)
    code = kv.dtype.element_ty

    own_key = tl.load(key + token * key_token_stride + dims, mask=dims < D, other=0)
    own_value = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=dims < D, other=0)
    target = kv + (position % BLOCK).to(tl.int64) * kv_token_stride + dims
    tl.store(target, _store_form(own_key, key_scale, MODEL_KIND, KV_KIND).to(code), mask=dims < D)
    tl.store(target + D, _store_form(own_value, value_scale, MODEL_KIND, KV_KIND).to(code), mask=dims < D)
    if PAGE:
        kt += block * kt_block_stride + head * (2 * D * (BLOCK // PAGE))
        _close_page(
            kv, kt, key, rows, row, request, num_tokens, key_scale, key_token_stride, kv_token_stride,
            D, DIMS, BLOCK, PAGE, ROWS, MODEL_KIND, KV_KIND, KT_KIND, KT_IS_MEAN,
        )  # fmt: skip


@triton.jit
def _summarise_pages(
    kv,  # [num_blocks, Hkv, BLOCK, 2 * D] codes, blocks, heads and tokens at the strides below
    kt,  # [num_blocks, Hkv, D, 2, BLOCK / PAGE] codes, contiguous within a block
    table,  # [pages, 3]: block, page inside the block, real tokens on it
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    kt_block_stride,
    D: tl.constexpr,
    DIMS: tl.constexpr,  # D, padded
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens that are in registers at once
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    KT_IS_MEAN: tl.constexpr,
):
    """One program writes the entry of one page of one KV head: grid (pages, Hkv)."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(table + row * 3 + 2) != PAGE:
        return
    block = tl.load(table + row * 3).to(tl.int64)
    page = tl.load(table + row * 3 + 1)
    dims = tl.arange(0, DIMS)
    kv += block * kv_block_stride + head * kv_head_stride
    summary = no_keys(tl.zeros([DIMS], tl.float32), KT_IS_MEAN)
    for first in range(0, PAGE, ROWS):
        slot = (page * PAGE + first + tl.arange(0, ROWS)).to(tl.int64)
        at = kv + slot[:, None] * kv_token_stride + dims[None, :]
        keys = decode_number(tl.load(at, mask=(dims < D)[None, :], other=0), KV_KIND)
        summary = add_keys(summary, keys, 0, KT_IS_MEAN)
    pages: tl.constexpr = BLOCK // PAGE
    place = block * kt_block_stride + head * (2 * D * pages) + page
    store_summary(kt, place, dims, dims < D, summary, PAGE, pages, KT_KIND, KT_IS_MEAN)


def _constants(
    head_size: int, block_size: int, page_size: int, kv_kind: int, kt_kind: int, kt_is_mean: bool = False
) -> dict[str, Any]:
    dims = padded(head_size)
    return {
        "D": head_size,
        "DIMS": dims,
        "BLOCK": block_size,
        "PAGE": page_size,
        "ROWS": max(1, min(page_size, 512 // dims)),  # 8 numbers for each thread of two warps
        "KV_KIND": kv_kind,
        "KT_KIND": kt_kind,
        "KT_IS_MEAN": kt_is_mean,
    }


def _constants_of(cache: CacheView) -> dict[str, Any]:
    kinds = cache.kv_kind, cache.kt_kind, cache.kt_is_mean
    return _constants(cache.head_size, cache.block_size, cache.page_size, *kinds)


NUM_WARPS = 2


def write_rows(
    cache: CacheView, key: torch.Tensor, value: torch.Tensor, rows_table: torch.Tensor, block_table: torch.Tensor
) -> None:
    """Write each row's token to its private block, and the KT entry of the page that it fills, if it fills one.

    ``key`` and ``value`` ``[T, Hkv, D]`` of the model's type, any strides but the last; ``rows_table`` int32 ``[R, 6]`` and
    ``block_table`` int32 ``[num_reqs, blocks]`` as in ``backend/metadata.py``. A row's token is its sequence's position
    ``num_tokens - 1``; rows of no tokens are padding. fp8 caches hold number / scale.

    Moves ``R * Hkv * 2 * D`` elements in and out; for each head and row that fills a page, ``page_size * D`` keys in and
    ``2 * D`` entries out.
    """
    num_rows, num_columns = rows_table.shape
    assert num_columns == 6
    assert rows_table.is_contiguous()
    assert block_table.stride(1) == 1
    assert key.shape[1:] == value.shape[1:] == (cache.num_kv_heads, cache.head_size)
    assert key.dtype == value.dtype
    assert key.stride(2) == value.stride(2) == 1
    if num_rows == 0:
        return
    _write_rows[(num_rows, cache.num_kv_heads)](
        cache.kv,
        cache.kt,
        as_codes(key),
        as_codes(value),
        rows_table,
        block_table,
        cache.key_scale,
        cache.value_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        block_table.stride(0),
        cache.kv.stride(0),
        cache.kv.stride(1),
        cache.kv.stride(2),
        cache.kt.stride(0),
        **_constants_of(cache),
        MODEL_KIND=KINDS[key.dtype],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def summarise_pages(cache: CacheView, table: torch.Tensor) -> None:
    """Rebuild KT entries from the cache's keys; ``table`` int32 ``[pages, 3]``: block, page inside the block, real tokens on it.

    Pages that are not full have no entry: they are skipped, as are rows of no tokens, which are padding.

    Moves ``page_size * D`` keys in and ``2 * D`` entries out for each full page and head.
    """
    num_rows, num_columns = table.shape
    assert num_columns == 3
    assert table.is_contiguous()
    assert cache.page_size > 0
    if num_rows == 0:
        return
    _summarise_pages[(num_rows, cache.num_kv_heads)](
        cache.kv,
        cache.kt,
        table,
        cache.kv.stride(0),
        cache.kv.stride(1),
        cache.kv.stride(2),
        cache.kt.stride(0),
        **_constants_of(cache),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


PAGES_TO_COMPILE = tuple(itertools.product((0, 1, 4, 16, 64), (False,))) + tuple(itertools.product((1, 4, 64), (True,)))
"""Tokens of a page and whether it holds a mean."""


def compile_cases() -> Iterator[CompileCase]:
    """Configurations that can be launched; pages up to a block of the largest usual size."""
    integers = ("table_stride", "kv_block_stride", "kv_head_stride", "kv_token_stride", "kt_block_stride")
    strides = ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
    for head_size in (64, 128, 256):
        for kv_name, kv_kind, kv_code in (("bf16", 1, "*i16"), ("e4m3", 3, "*u8")):
            for kt_name, kt_kind, kt_code in (("bf16", 1, "*i16"), ("e5m2", 4, "*u8")):
                cache = {"kv": kv_code, "kt": kt_code}
                for page_size, is_mean in PAGES_TO_COMPILE[int(kt_kind != 1) :]:
                    constants = _constants(head_size, 64, page_size, kv_kind, kt_kind, is_mean)
                    name = f"D={head_size} KV={kv_name} KT={kt_name} page={page_size}{' mean' if is_mean else ''}"
                    tensors = {"key": "*i16", "value": "*i16", "rows": "*i32", "block_table": "*i32"}
                    scales = {"key_scale": "fp32", "value_scale": "fp32"}
                    signature = cache | tensors | scales | dict.fromkeys(strides + integers, "i32")
                    with_model = constants | {"MODEL_KIND": 1}
                    yield CompileCase(f"write_rows {name}", _write_rows, signature, with_model, NUM_WARPS)
                    if page_size:
                        signature = cache | {"table": "*i32"} | dict.fromkeys(integers[1:], "i32")
                        yield CompileCase(f"summarise_pages {name}", _summarise_pages, signature, constants, NUM_WARPS)
