# SPDX-License-Identifier: Apache-2.0
"""The part of a step's plan that only the device knows: how long each sequence has become.

The host knows which tokens of the batch are rows and where their sequences start in the block table; with asynchronous
scheduling it does not know how many draft tokens were accepted, that is the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.launch import NUM_STAGES, CompileCase

BLOCK = 128
"""Rows or tokens of a program."""
NUM_WARPS = 4


@triton.jit
def finish_rows_kernel(
    rows,  # int32 [R, 6]: Rows.table, with tokens to subtract from the request's length in place of num_tokens
    seq_lens,  # int32 [num_reqs]
    natural_slots,  # int64 [T]
    num_rows,
    IS_PRIVATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn column 3 into num_tokens, 0 for inert rows (request < 0), and take private tokens out of ``natural_slots``."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    token = tl.load(rows + row * 6, mask=is_row, other=0)
    request = tl.load(rows + row * 6 + 1, mask=is_row, other=-1)
    less = tl.load(rows + row * 6 + 3, mask=is_row, other=0)
    is_real = request >= 0
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)
    tl.store(rows + row * 6 + 3, tl.where(is_real, tl.maximum(seq_len - less, 0), 0), mask=is_row)
    if IS_PRIVATE:
        tl.store(natural_slots + token, tl.full([BLOCK], -1, tl.int64), mask=is_real)


@triton.jit
def touched_pages_kernel(
    tokens,  # int32 [T, 2]: request (-1: of no interest), tokens to subtract from its length for this token's position
    seq_lens,  # int32 [num_reqs]
    block_table,  # int32 [num_reqs, table_stride]
    touched,  # int32 [T, 3]: TouchedPages.table
    num_tokens,
    table_stride,
    block_size: tl.constexpr,
    page_size: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One entry a token: the KT page that it fills, or an entry without tokens where it fills none."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < num_tokens
    request = tl.load(tokens + 2 * index, mask=is_token, other=-1)
    less = tl.load(tokens + 2 * index + 1, mask=is_token, other=0)
    position = tl.load(seq_lens + request, mask=request >= 0, other=0) - less
    fills = (request >= 0) & (position >= 0) & (position % page_size == page_size - 1)
    where = request.to(tl.int64) * table_stride + position // block_size
    block = tl.load(block_table + where, mask=fills, other=0)
    tl.store(touched + 3 * index, block, mask=is_token)
    tl.store(touched + 3 * index + 1, tl.where(fills, position % block_size // page_size, 0), mask=is_token)
    tl.store(touched + 3 * index + 2, tl.where(fills, page_size, 0), mask=is_token)


def finish_rows(rows: torch.Tensor, seq_lens: torch.Tensor, natural_slots: torch.Tensor, is_private: bool) -> None:
    """Complete ``rows`` int32 ``[R, 6]`` in place from ``seq_lens`` int32 ``[num_reqs]``: see ``finish_rows_kernel``."""
    num_rows = rows.shape[0]
    if num_rows:
        finish_rows_kernel[(triton.cdiv(num_rows, BLOCK),)](
            rows, seq_lens, natural_slots, num_rows, is_private, BLOCK, num_warps=NUM_WARPS, num_stages=NUM_STAGES
        )


def find_touched_pages(
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    touched: torch.Tensor,
    block_size: int,
    page_size: int,
) -> None:
    """Fill ``touched`` int32 ``[T, 3]`` for ``tokens`` int32 ``[T, 2]``: see ``touched_pages_kernel``."""
    num_tokens = tokens.shape[0]
    if num_tokens:
        touched_pages_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            tokens,
            seq_lens,
            block_table,
            touched,
            num_tokens,
            block_table.stride(0),
            block_size,
            page_size,
            BLOCK,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )


def compile_cases() -> Iterator[CompileCase]:
    """Rows of either kind, and pages of every size that a block of 64 tokens holds."""
    signature = {"rows": "*i32", "seq_lens": "*i32", "natural_slots": "*i64", "num_rows": "i32"}
    for is_private in (False, True):
        constants = {"IS_PRIVATE": is_private, "BLOCK": BLOCK}
        yield CompileCase(f"finish_rows private={is_private}", finish_rows_kernel, signature, constants, NUM_WARPS)
    signature = dict.fromkeys(("tokens", "seq_lens", "block_table", "touched"), "*i32")
    signature |= {"num_tokens": "i32", "table_stride": "i32"}
    for page_size in (1, 4, 16, 64):
        constants = {"block_size": 64, "page_size": page_size, "BLOCK": BLOCK}
        yield CompileCase(f"touched_pages page={page_size}", touched_pages_kernel, signature, constants, NUM_WARPS)
