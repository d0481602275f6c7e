# SPDX-License-Identifier: Apache-2.0
"""Stage 1, second half: kept tokens move from a prompt's blocks to private ones, and the KT table of the copies is built.

=========  ===========================================================================================================
Reads      ``num_kept * Hkv`` tokens of ``2 * D`` elements, each one run of memory, and their positions
Writes     as many, and ``num_kept / page_size * Hkv`` KT entries of ``2 * D`` elements
=========  ===========================================================================================================

Once per prompt and layer. The keys that a page's bounds or mean are taken from are in registers when they are copied, so that
the KT table costs no further reads.
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
from vllm_rocketkv.kernels.triton.numbers import decode_number
from vllm_rocketkv.kernels.triton.page import add_keys, no_keys, store_summary


@triton.jit(do_not_specialize=["num_kept"])
def _compact(
    kv,  # [num_blocks, Hkv, BLOCK, 2 * D] codes, blocks, heads and tokens at the strides below
    kt,  # [num_blocks, Hkv, D, 2, BLOCK / PAGE] codes, contiguous within a block
    prompt_blocks,  # [n]
    private_blocks,  # [e]
    kept,  # [Hkv, num_kept]
    num_kept,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    kt_block_stride,
    D: tl.constexpr,
    DIMS: tl.constexpr,  # D, padded
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,  # 0: no KT table
    ROWS: tl.constexpr,  # tokens that are in registers at once
    PAGES: tl.constexpr,  # pages of a tile; more than one where they are smaller than ROWS
    STEPS: tl.constexpr,  # tiles are ROWS * STEPS tokens
    KV_KIND: tl.constexpr,
    KT_KIND: tl.constexpr,
    KT_IS_MEAN: tl.constexpr,
):
    """One program copies a tile of tokens of one KV head: grid (Hkv, tiles)."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (ROWS * STEPS)
    dims = tl.arange(0, DIMS)[None, :]
    kv += head * kv_head_stride
    kept += head * num_kept
    summary = no_keys(tl.zeros([PAGES, DIMS], tl.float32), KT_IS_MEAN)
    for step in range(STEPS):
        position = first + step * ROWS + tl.arange(0, ROWS)
        exists = position < num_kept
        token = tl.load(kept + position, mask=exists, other=0)
        source = tl.load(prompt_blocks + token // BLOCK, mask=exists, other=0).to(tl.int64) * kv_block_stride
        source += (token % BLOCK).to(tl.int64) * kv_token_stride
        target = tl.load(private_blocks + position // BLOCK, mask=exists, other=0).to(tl.int64) * kv_block_stride
        target += (position % BLOCK).to(tl.int64) * kv_token_stride
        mask = exists[:, None] & (dims < D)
        key = tl.load(kv + source[:, None] + dims, mask=mask, other=0)
        value = tl.load(kv + source[:, None] + D + dims, mask=mask, other=0)
        tl.store(kv + target[:, None] + dims, key, mask=mask)
        tl.store(kv + target[:, None] + D + dims, value, mask=mask)
        if PAGE:
            of_pages = tl.reshape(decode_number(key, KV_KIND), [PAGES, ROWS // PAGES, DIMS])
            summary = add_keys(summary, of_pages, 1, KT_IS_MEAN)
    if PAGE:
        page = first // PAGE + tl.arange(0, PAGES)
        is_full = (page + 1) * PAGE <= num_kept
        block = tl.load(private_blocks + page // (BLOCK // PAGE), mask=is_full, other=0).to(tl.int64)
        place = block * kt_block_stride + head * (2 * D * (BLOCK // PAGE)) + page % (BLOCK // PAGE)
        mask = is_full[:, None] & (dims < D)
        store_summary(kt, place[:, None], dims, mask, summary, PAGE, BLOCK // PAGE, KT_KIND, KT_IS_MEAN)


def _constants(
    head_size: int, block_size: int, page_size: int, kv_kind: int, kt_kind: int, kt_is_mean: bool = False
) -> dict[str, Any]:
    dims = padded(head_size)
    rows = max(1, 2048 // dims)  # 16 numbers for each thread
    return {
        "D": head_size,
        "DIMS": dims,
        "BLOCK": block_size,
        "PAGE": page_size,
        "ROWS": rows,
        "PAGES": max(1, rows // page_size) if page_size else 1,
        "STEPS": max(1, page_size // rows),
        "KV_KIND": kv_kind,
        "KT_KIND": kt_kind,
        "KT_IS_MEAN": kt_is_mean,
    }


def _launch_options(page_size: int) -> dict[str, Any]:
    """Pages of a token or two have about as many bounds as there are keys: more warps share them, and threads may take all the
    registers that they want (left alone, the assembler saves too many and spills)."""
    is_small = 0 < page_size <= 2
    return {"num_warps": 8 if is_small else 4, "num_stages": NUM_STAGES, "maxnreg": 255 if is_small else None}


def compact(cache: CacheView, prompt_blocks: torch.Tensor, private_blocks: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy each KV head's kept tokens to positions 0 .. num_kept - 1 of the private blocks, with the KT entries of full pages.

    ``prompt_blocks`` int32 ``[n]``, ``private_blocks`` int32 ``[e]``, ``kept`` int32 ``[Hkv, num_kept]`` positions in the prompt.
    Copies are exact, bounds and means are those of stored numbers (without any fp8 scale), and the rest of the private blocks is
    left.
    """
    num_kv_heads, num_kept = kept.shape
    assert num_kv_heads == cache.num_kv_heads
    assert num_kept <= private_blocks.numel() * cache.block_size
    assert prompt_blocks.is_contiguous()
    assert private_blocks.is_contiguous()
    assert kept.is_contiguous()
    if num_kept == 0:
        return
    kinds = cache.kv_kind, cache.kt_kind, cache.kt_is_mean
    constants = _constants(cache.head_size, cache.block_size, cache.page_size, *kinds)
    grid = (num_kv_heads, triton.cdiv(num_kept, constants["ROWS"] * constants["STEPS"]))
    _compact[grid](
        cache.kv,
        cache.kt,
        prompt_blocks,
        private_blocks,
        kept,
        num_kept,
        cache.kv.stride(0),
        cache.kv.stride(1),
        cache.kv.stride(2),
        cache.kt.stride(0),
        **constants,
        **_launch_options(cache.page_size),
    )


PAGES_TO_COMPILE = tuple(itertools.product((0, 1, 4, 16, 64), (False,))) + tuple(
    itertools.product((1, 2, 4, 64), (True,))
)
"""Tokens of a page and whether it holds a mean."""


def compile_cases() -> Iterator[CompileCase]:
    """Configurations that can be launched; pages up to a block of the largest usual size."""
    for head_size in (64, 128, 256):
        for kv_name, kv_kind, kv_code in (("bf16", 1, "*i16"), ("e4m3", 3, "*u8")):
            for kt_name, kt_kind, kt_code in (("bf16", 1, "*i16"), ("e5m2", 4, "*u8")):
                for page_size, is_mean in PAGES_TO_COMPILE[int(kt_kind != 1) :]:
                    yield CompileCase(
                        f"compact D={head_size} KV={kv_name} KT={kt_name} page={page_size}{' mean' if is_mean else ''}",
                        _compact,
                        {
                            "kv": kv_code,
                            "kt": kt_code,
                            "prompt_blocks": "*i32",
                            "private_blocks": "*i32",
                            "kept": "*i32",
                            "num_kept": "i32",
                            "kv_block_stride": "i32",
                            "kv_head_stride": "i32",
                            "kv_token_stride": "i32",
                            "kt_block_stride": "i32",
                        },
                        _constants(head_size, 64, page_size, kv_kind, kt_kind, is_mean),
                        **_launch_options(page_size),
                    )
