# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a step's private tokens, and the KT entries of pages that became full.

``write_rows`` goes before the decode kernels of a step, ``summarise_pages`` after vLLM's own op has written natural blocks, for
policies that select without evicting. Both are one launch whose grid depends on shapes alone, so that CUDA graphs can hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.compact import store_bounds
from vllm_rocketkv.kernels.triton.launch import NUM_STAGES, CompileCase, padded
from vllm_rocketkv.kernels.triton.numbers import KINDS, as_codes, decode_number


@triton.jit
def encode_number(x, KIND: tl.constexpr):
    """Codes (int32) of float32 ``x`` rounded to nearest, ties to even.

    Too large for float16 or bfloat16 is infinity; too large for fp8 is the largest finite number, infinity included, as vLLM's
    CUDA op has it. (``csrc/cpu`` makes infinity of what e5m2 cannot hold.)
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if KIND == 0:
        return bits
    elif KIND == 1:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return tl.where(is_nan, 0x7FC0, rounded) | ((bits >> 16) & 0x8000)
    elif KIND == 2:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    elif KIND == 3:
        code = tl.minimum(_round_magnitude(magnitude, 3, 7), 0x7E)
    else:
        code = tl.minimum(_round_magnitude(magnitude, 2, 15), 0x7B)
    return tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def _round_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Code of float32 magnitude bits in a type with so many mantissa bits and such a bias, as if its exponents had no end."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding half of the last place, less one where that place is even, carries exactly when it must.
    normal = magnitude - ((127 - BIAS) << 23)
    normal = (normal + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    # The last place of 2^(SHIFT + 1 - BIAS) in float32 is the least subnormal of the type: addition itself rounds to it.
    least = tl.full(magnitude.shape, 2.0 ** (SHIFT + 1 - BIAS), tl.float32)
    sum_of = magnitude.to(tl.float32, bitcast=True) + least
    subnormal = sum_of.to(tl.int32, bitcast=True) - least.to(tl.int32, bitcast=True)
    return tl.where(magnitude >= ((128 - BIAS) << 23), normal, subnormal)


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
):
    """Write the KT entry of the page that the row's token fills, if it fills one."""
    if num_tokens % PAGE == 0:
        last = (num_tokens - 1) % BLOCK
        dims = tl.arange(0, DIMS)
        in_head = dims < D
        low = tl.full([DIMS], float("inf"), tl.float32)
        high = tl.full([DIMS], float("-inf"), tl.float32)
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
            low = tl.minimum(low, tl.min(keys, 0))
            high = tl.maximum(high, tl.max(keys, 0))
        store_bounds(kt, last // PAGE, dims, in_head, low, high, BLOCK // PAGE, KT_KIND)


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
            D, DIMS, BLOCK, PAGE, ROWS, MODEL_KIND, KV_KIND, KT_KIND,
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
):
    """One program writes the entry of one page of one KV head: grid (pages, Hkv)."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(table + row * 3 + 2) != PAGE:
        return
    block = tl.load(table + row * 3).to(tl.int64)
    page = tl.load(table + row * 3 + 1)
    dims = tl.arange(0, DIMS)
    kv += block * kv_block_stride + head * kv_head_stride
    low = tl.full([DIMS], float("inf"), tl.float32)
    high = tl.full([DIMS], float("-inf"), tl.float32)
    for first in range(0, PAGE, ROWS):
        slot = (page * PAGE + first + tl.arange(0, ROWS)).to(tl.int64)
        at = kv + slot[:, None] * kv_token_stride + dims[None, :]
        keys = decode_number(tl.load(at, mask=(dims < D)[None, :], other=0), KV_KIND)
        low = tl.minimum(low, tl.min(keys, 0))
        high = tl.maximum(high, tl.max(keys, 0))
    pages: tl.constexpr = BLOCK // PAGE
    place = block * kt_block_stride + head * (2 * D * pages) + page
    store_bounds(kt, place, dims, dims < D, low, high, pages, KT_KIND)


def _constants(head_size: int, block_size: int, page_size: int, kv_kind: int, kt_kind: int) -> dict[str, Any]:
    dims = padded(head_size)
    return {
        "D": head_size,
        "DIMS": dims,
        "BLOCK": block_size,
        "PAGE": page_size,
        "ROWS": max(1, min(page_size, 512 // dims)),  # 8 numbers for each thread of two warps
        "KV_KIND": kv_kind,
        "KT_KIND": kt_kind,
    }


NUM_WARPS = 2


def write_rows(
    cache: CacheView, key: torch.Tensor, value: torch.Tensor, rows_table: torch.Tensor, block_table: torch.Tensor
) -> None:
    """Write each row's token to its private block, and the KT entry of the page that it fills, if it fills one.

    ``key`` and ``value`` ``[T, Hkv, D]`` of the model's type, any strides but the last; ``rows_table`` int32 ``[R, 6]`` and
    ``block_table`` int32 ``[num_reqs, blocks]`` as in ``backend/metadata.py``. A row's token is its sequence's position
    ``num_tokens - 1``; rows of no tokens are padding. fp8 caches hold number / scale.

    Moves ``R * Hkv * 2 * D`` elements in and out; for each head and row that fills a page, ``page_size * D`` keys in and
    ``2 * D`` bounds out.
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
        **_constants(cache.head_size, cache.block_size, cache.page_size, cache.kv_kind, cache.kt_kind),
        MODEL_KIND=KINDS[key.dtype],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def summarise_pages(cache: CacheView, table: torch.Tensor) -> None:
    """Rebuild KT entries from the cache's keys; ``table`` int32 ``[pages, 3]``: block, page inside the block, real tokens on it.

    Pages that are not full have no entry: they are skipped, as are rows of no tokens, which are padding.

    Moves ``page_size * D`` keys in and ``2 * D`` bounds out for each full page and head.
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
        **_constants(cache.head_size, cache.block_size, cache.page_size, cache.kv_kind, cache.kt_kind),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def compile_cases() -> Iterator[CompileCase]:
    """Configurations that can be launched; pages up to a block of the largest usual size."""
    integers = ("table_stride", "kv_block_stride", "kv_head_stride", "kv_token_stride", "kt_block_stride")
    strides = ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
    for head_size in (64, 128, 256):
        for kv_name, kv_kind, kv_code in (("bf16", 1, "*i16"), ("e4m3", 3, "*u8")):
            for kt_name, kt_kind, kt_code in (("bf16", 1, "*i16"), ("e5m2", 4, "*u8")):
                cache = {"kv": kv_code, "kt": kt_code}
                for page_size in (0, 1, 4, 16, 64) if kt_kind == 1 else (1, 4, 16, 64):
                    constants = _constants(head_size, 64, page_size, kv_kind, kt_kind)
                    name = f"D={head_size} KV={kv_name} KT={kt_name} page={page_size}"
                    tensors = {"key": "*i16", "value": "*i16", "rows": "*i32", "block_table": "*i32"}
                    scales = {"key_scale": "fp32", "value_scale": "fp32"}
                    signature = cache | tensors | scales | dict.fromkeys(strides + integers, "i32")
                    with_model = constants | {"MODEL_KIND": 1}
                    yield CompileCase(f"write_rows {name}", _write_rows, signature, with_model, NUM_WARPS)
                    if page_size:
                        signature = cache | {"table": "*i32"} | dict.fromkeys(integers[1:], "i32")
                        yield CompileCase(f"summarise_pages {name}", _summarise_pages, signature, constants, NUM_WARPS)
