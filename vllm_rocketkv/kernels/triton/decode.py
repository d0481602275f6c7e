# SPDX-License-Identifier: Apache-2.0
"""Fused decode: estimation, selection and attention of one row and KV head in one program.

=============  ==================================================================================
``R``          rows of the step (``Rows.table`` of ``backend/metadata.py``)
``G``          query heads of a KV head
``D``          head size
``pages``      KT pages that a row may have, ``capacity_tokens / page_size``, a power of two
=============  ==================================================================================

Bytes that a program reads: of its KT table one of minimum and maximum for each dimension read, ``topr * pages * sizeof(KT)``,
and the selected tokens' keys and values, ``topk * 2 * D * sizeof(KV)``. (Estimator quest reads all dimensions, and both where
the group's query heads have both signs; mean, one of all.) At D = 128, 2,048 cached tokens in pages of 4, all
dimensions, fp8 KT, bf16 K and V, top-k 256 that is 64 KB + 128 KB = 192 KB; it writes 2 * G * D bytes.

What memory really moves are sectors of 32 bytes. The bounds of one dimension and kind are a run of ``block_size / page_size``
entries. A run that fills whole sectors (pages of 4: blocks of 128 tokens in fp8, of 64 in bf16) is read alone. Shorter runs
share sectors with the other kind, which then comes along unused: twice the KT bytes, another 64 KB in the example; below half a
sector, with other dimensions as well, so that ``topr`` saves less than its share. A selected token is 2 * D * sizeof(KV)
contiguous bytes, and so whole sectors. Groups of more than 8 query heads read the KT table once for each 8 (all but once
from the second-level cache). A program also writes and reads back D * (8 + 4 G) + 12 * pages bytes of workspace, all in cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.options import ESTIMATORS, DecodeOptions, Estimator
from vllm_rocketkv.kernels.triton.attend import attend_tokens
from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.estimate import (
    add_softmax,
    list_tokens,
    page_logits,
    prepare_estimate,
    prepare_sums,
)
from vllm_rocketkv.kernels.triton.launch import INTERPRET, MIN_DOT, NUM_STAGES, CompileCase, padded
from vllm_rocketkv.kernels.triton.numbers import CODES, KINDS
from vllm_rocketkv.kernels.triton.select import choose_tokens, forced_bounds, score_keys, sum_keys

MAX_CAPACITY = 8192
"""Most cached tokens of a row that this kernel is meant for: all its pages' logits are held in registers."""
MAX_LOGITS = 32768
"""Most logits (query heads x pages) that a program holds."""


# ------------------------------------------------------------------------------------------------ the kernel


@triton.jit(do_not_specialize=["dense_below", "topk_tokens", "sink_tokens", "recent_tokens"])
def decode_kernel(
    query, query_token_stride, query_head_stride, output, output_token_stride, output_head_stride,
    kv, kv_block_stride, kv_head_stride, kv_token_stride, kt, kt_block_stride,
    rows, block_table, block_table_stride, dims, scaled_query, chosen,
    scale, softcap, key_scale, value_scale, dense_below, topk_tokens, sink_tokens, recent_tokens,
    G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
    KV_KIND: tl.constexpr, KT_KIND: tl.constexpr, BY_PAGE: tl.constexpr, ADAPTIVE: tl.constexpr, SOFTCAP: tl.constexpr,
    ESTIMATOR: tl.constexpr, NOTES: tl.constexpr, NUM_QUERIES: tl.constexpr,
    G_PAD: tl.constexpr, G_DOT: tl.constexpr, D_PAD: tl.constexpr, NUM_PAGES: tl.constexpr, HEADS: tl.constexpr,
    VECTOR: tl.constexpr, UNROLL: tl.constexpr, TOKENS: tl.constexpr, DOT_TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row and KV head of a decode step; grid ``(R, Hkv)``. Tensors as in ``decode``; workspace as in ``DecodeWorkspace``.

    In phases, each waiting for the one before it: ``prepare_estimate`` or ``prepare_sums``; ``page_logits``, softmax,
    ``choose_tokens`` and ``list_tokens``; attention over the list, ``TOKENS`` at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_tokens = tl.load(rows + 6 * row + 3)
    if (num_tokens == 0) | (num_tokens > CAPACITY):
        return
    token = tl.load(rows + 6 * row).to(tl.int64)
    request = tl.load(rows + 6 * row + 1).to(tl.int64)
    blocks = block_table + request * block_table_stride + tl.load(rows + 6 * row + 2)
    query += token * query_token_stride + (kv_head * G).to(tl.int64) * query_head_stride
    kv += kv_head.to(tl.int64) * kv_head_stride

    reads_all = num_tokens <= dense_below
    length = num_tokens  # tokens of the list, or all
    recent_start = 0
    if PAGE_SIZE:
        program = row * tl.num_programs(1) + kv_head
        chosen += program * (3 * NUM_PAGES)
        if num_tokens > dense_below:
            dims += program * (2 * NOTES)
            scaled_query += program * (NUM_QUERIES * NOTES)
            num_full = num_tokens // PAGE_SIZE
            num_newest = num_tokens % PAGE_SIZE
            newest = num_full * PAGE_SIZE
            newest_block = tl.load(blocks + newest // BLOCK_SIZE, mask=num_newest > 0, other=0)
            newest_keys = kv + newest_block.to(tl.int64) * kv_block_stride
            newest_keys += (newest % BLOCK_SIZE).to(tl.int64) * kv_token_stride
            if ESTIMATOR == 0:
                num_read = tl.minimum(tl.load(rows + 6 * row + 4), D)
                prepare_estimate(query, query_head_stride, newest_keys, kv_token_stride, num_newest, num_read, key_scale, dims,
                                 scaled_query, G, G_PAD, D, D_PAD, PAGE_SIZE, KV_KIND, KT_KIND, ADAPTIVE)  # fmt: skip
            else:
                num_read = prepare_sums(query, query_head_stride, newest_keys, kv_token_stride, num_newest, dims, scaled_query,
                                        G, G_PAD, D, D_PAD, PAGE_SIZE, KV_KIND, KT_KIND, ESTIMATOR == 2)  # fmt: skip
            tl.debug_barrier()

            PAGES: tl.constexpr = BLOCK_SIZE // PAGE_SIZE
            page = tl.arange(0, NUM_PAGES)[None, :]
            block = tl.load(blocks + page // PAGES, mask=page // VECTOR * VECTOR < num_full, other=0)
            table = kt + kv_head.to(tl.int64) * (D * 2 * PAGES) + block.to(tl.int64) * kt_block_stride + page % PAGES
            if ESTIMATOR == 0:
                size = tl.minimum(tl.maximum(num_tokens - page * PAGE_SIZE, 0), PAGE_SIZE)
                scores = tl.zeros([1, NUM_PAGES], tl.float32)
                for head in range(0, G, HEADS):
                    logits = page_logits(table, page, num_full, dims, scaled_query + head * D_PAD, G - head, num_read,
                                         HEADS, D_PAD, PAGES, KT_KIND, NUM_PAGES, VECTOR, UNROLL)  # fmt: skip
                    scores = add_softmax(scores, logits, size, G - head, G, HEADS)
                keys = score_keys(scores)
            else:
                keys = sum_keys(page_logits(table, page, num_full, dims, scaled_query, 1, num_read,
                                            1, NOTES, PAGES, KT_KIND, NUM_PAGES, VECTOR, UNROLL))  # fmt: skip
            sink_end, recent_start = forced_bounds(num_tokens, sink_tokens, recent_tokens, PAGE_SIZE, BY_PAGE)
            is_listed, limit = choose_tokens(
                keys, page, num_tokens, topk_tokens, sink_end, recent_start, PAGE_SIZE, BY_PAGE
            )
            block = tl.where(page == num_full, newest_block, block)
            length = list_tokens(chosen, page, block, is_listed, limit, PAGE_SIZE) * PAGE_SIZE
            tl.debug_barrier()

    g = tl.arange(0, G_DOT)
    d = tl.arange(0, D_PAD)
    mask = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(query + g[:, None] * query_head_stride + d[None, :], mask=mask, other=0.0).to(DOT_TYPE)
    largest = tl.full([G_DOT], float("-inf"), tl.float32)
    total = tl.zeros([G_DOT], tl.float32)
    accumulator = tl.zeros([G_DOT, D_PAD], tl.float32)
    for first in range(0, length, TOKENS):
        place = first + tl.arange(0, TOKENS)
        position = place
        is_read = place < length
        if PAGE_SIZE:
            is_listed = place < tl.where(reads_all, 0, length)
            block = tl.load(blocks + place // BLOCK_SIZE, mask=place < tl.where(reads_all, length, 0), other=0)
            entry = chosen + 3 * (place // PAGE_SIZE)
            position = tl.where(reads_all, place, tl.load(entry, mask=is_listed, other=0) + place % PAGE_SIZE)
            limit = tl.load(entry + 1, mask=is_listed, other=CAPACITY)
            block = tl.where(reads_all, block, tl.load(entry + 2, mask=is_listed, other=0))
            is_read = is_read & (position < num_tokens) & ((position < limit) | (position >= recent_start))
        else:
            block = tl.load(blocks + place // BLOCK_SIZE, mask=is_read, other=0)
        key = block.to(tl.int64) * kv_block_stride + (position % BLOCK_SIZE).to(tl.int64) * kv_token_stride
        state = largest, total, accumulator
        largest, total, accumulator = attend_tokens(
            state, q, kv, key, is_read, scale, softcap, D, D_PAD, KV_KIND, DOT_TYPE, SOFTCAP, INTERPRETED
        )
    nothing = total[:, None] == 0  # was read; a sum that is not a number is kept
    result = tl.where(nothing, 0.0, accumulator * value_scale / total[:, None])
    output += token * output_token_stride + (kv_head * G).to(tl.int64) * output_head_stride
    where = output + g[:, None] * output_head_stride + d[None, :]
    tl.store(where, result.to(output.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------ the host's side


@dataclass(frozen=True)
class DecodeWorkspace:
    """Memory of ``decode``, allocated once; strides come from capacities."""

    capacity_tokens: int
    """Rows with more cached tokens are left to the split variant."""
    dims: torch.Tensor
    """int32 ``[max_rows, num_kv_heads, notes, 2]``: ``prepare_estimate``. Notes are D, padded, or twice as many."""
    scaled_query: torch.Tensor
    """float32 ``[max_rows, num_kv_heads, queries, notes]``: ``prepare_estimate``. Queries are G, padded, or one for the group."""
    chosen: torch.Tensor
    """int32 ``[max_rows, num_kv_heads, pages, 3]``: ``list_tokens``."""

    @property
    def max_rows(self) -> int:
        """Rows of a step."""
        return self.chosen.shape[0]

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        capacity_tokens: int,
        page_size: int,
        device: torch.device | str,
        estimator: Estimator = "hsa",
    ) -> DecodeWorkspace:
        """Memory for steps of up to ``max_rows`` rows; ``page_size`` 0 without a KT table."""
        assert capacity_tokens <= MAX_CAPACITY or page_size == 0
        queries, notes = note_shape(num_query_heads // num_kv_heads, head_size, estimator)
        pages = num_pages(capacity_tokens, page_size)
        if page_size == 0:
            queries = notes = 0
        lead = max_rows, num_kv_heads
        return cls(
            capacity_tokens,
            torch.zeros(*lead, notes, 2, dtype=torch.int32, device=device),
            torch.zeros(*lead, queries, notes, dtype=torch.float32, device=device),
            torch.zeros(*lead, pages, 3, dtype=torch.int32, device=device),
        )


def num_pages(capacity_tokens: int, page_size: int) -> int:
    """Pages that a program has room for."""
    return padded(-(-capacity_tokens // page_size)) if page_size else 1


def note_shape(group: int, head_size: int, estimator: Estimator) -> tuple[int, int]:
    """Queries that meet the pages, and rows of the KT table that each of them may read."""
    if estimator == "hsa":
        return padded(group), padded(head_size)
    return 1, padded(head_size) * (2 if estimator == "quest" else 1)


def dot_type(model_dtype: torch.dtype, kv_kind: int) -> Any:
    """Triton's type of products: the smallest that holds both what the model computes and what the cache stores."""
    half = {torch.bfloat16: (tl.bfloat16, 1), torch.float16: (tl.float16, 2)}
    if model_dtype in half and kv_kind in (half[model_dtype][1], 3, 4):
        return half[model_dtype][0]
    return tl.float32


@lru_cache
def launch_constants(
    model_dtype: torch.dtype,
    group: int,
    head_size: int,
    block_size: int,
    page_size: int,
    capacity_tokens: int,
    kv_kind: int,
    kt_kind: int,
    options: DecodeOptions,
) -> dict[str, Any]:
    """The kernel's ``tl.constexpr`` arguments."""
    pages = num_pages(capacity_tokens, page_size)
    operands = dot_type(model_dtype, kv_kind)
    queries, notes = note_shape(group, head_size, options.estimator)
    return {
        "G": group,
        "D": head_size,
        "BLOCK_SIZE": block_size,
        "PAGE_SIZE": page_size,
        "CAPACITY": capacity_tokens,
        "KV_KIND": kv_kind,
        "KT_KIND": kt_kind,
        "BY_PAGE": options.by_page,
        "ADAPTIVE": options.adaptive,
        "SOFTCAP": options.softcap > 0,
        "ESTIMATOR": ESTIMATORS.index(options.estimator),
        "NOTES": notes,
        "NUM_QUERIES": queries,
        "G_PAD": padded(group),
        "G_DOT": padded(group, MIN_DOT),
        "D_PAD": padded(head_size),
        "NUM_PAGES": pages,
        "HEADS": min(queries, 8, max(1, MAX_LOGITS // pages)),
        "VECTOR": math.gcd(block_size // page_size, 4) if page_size else 1,
        "UNROLL": 16 if num_warps(pages, head_size) == 4 else 8,  # loads in flight: few threads need more of them each
        "TOKENS": 32 if operands is tl.float32 or head_size > 128 else 64,
        "DOT_TYPE": operands,
        "INTERPRETED": INTERPRET,
    }


def num_warps(pages: int, head_size: int) -> int:
    """Warps of a program that holds the logits of so many pages, and what it accumulates for heads of that size."""
    return 16 if pages > 512 or head_size > 128 else 4


def launch_options(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Warps, stages, and most registers of a thread.

    Left alone, the assembler often rounds registers down to where one more program fits on a multiprocessor, and spills a few. A
    stated maximum is taken for the aim instead: the register file's share of 4, 3 or 2 programs of 4 warps, or of 1 of 16. None
    is stated where it finds room without spilling: for threads with 32 logits or more, and wide heads that fit twice.
    """
    pages, dim = constants["NUM_PAGES"], constants["D_PAD"]
    warps = num_warps(pages, constants["D"])
    logits = constants["HEADS"] * pages // (32 * warps)  # of a thread
    as_stored = constants["KV_KIND"] in (1, 2)  # nothing to decode
    plain_bounds = constants["KT_KIND"] in (1, 4)  # the upper bits of what they stand for
    fits_twice = dim > 128 and pages <= 1024 and as_stored and plain_bounds and constants["G"] <= constants["HEADS"]
    most: int | None
    if constants["DOT_TYPE"] is tl.float32:
        most = None  # products without tensor cores take what there is
    elif warps == 16:
        most = None if logits >= 32 or fits_twice else 128
    elif dim <= 64:
        most = 128 if logits < 32 else 168 if plain_bounds else 255
    else:
        most = 168 if as_stored else 255
    return {"num_warps": warps, "num_stages": NUM_STAGES, "maxnreg": most}


def decode(
    query: torch.Tensor,
    cache: CacheView,
    output: torch.Tensor,
    rows_table: torch.Tensor,
    block_table: torch.Tensor,
    options: DecodeOptions,
    workspace: DecodeWorkspace,
) -> None:
    """Attend for every row of a decode step with at most ``workspace.capacity_tokens`` cached tokens.

    ``query``, ``output`` ``[T, Hq, D]``, of which the last stride is 1; ``rows_table`` int32 ``[R, 6]`` (``Rows.table``);
    ``block_table`` int32 ``[num_reqs, blocks]``. Keys, values and the KT entries of full pages are in the cache. Writes
    ``output[token]`` of those rows and nothing else; rows of no tokens are padding.
    """
    num_rows, group = rows_table.shape[0], query.shape[1] // cache.num_kv_heads
    assert num_rows <= workspace.max_rows
    assert query.stride(2) == output.stride(2) == rows_table.stride(1) == block_table.stride(1) == 1
    assert rows_table.stride(0) == 6
    assert cache.kt_is_mean == (options.estimator == "mean") or cache.page_size == 0
    if num_rows == 0:
        return
    constants = launch_constants(
        query.dtype,
        group,
        cache.head_size,
        cache.block_size,
        cache.page_size,
        workspace.capacity_tokens,
        cache.kv_kind,
        cache.kt_kind,
        options,
    )
    notes = constants["NUM_QUERIES"], constants["NOTES"]
    assert workspace.scaled_query.shape[2:] == notes or cache.page_size == 0, "a workspace for another estimator"
    decode_kernel[(num_rows, cache.num_kv_heads)](
        query,
        query.stride(0),
        query.stride(1),
        output,
        output.stride(0),
        output.stride(1),
        cache.kv,
        *cache.kv.stride()[:3],
        cache.kt,
        cache.kt.stride(0),
        rows_table,
        block_table,
        block_table.stride(0),
        workspace.dims,
        workspace.scaled_query,
        workspace.chosen,
        options.scale * cache.key_scale,
        options.softcap,
        cache.key_scale,
        cache.value_scale,
        options.dense_below,
        options.topk_tokens,
        options.sink_tokens,
        options.recent_tokens,
        **constants,
        **launch_options(constants),
    )


# ------------------------------------------------------------------------------------------------ for kernel_report


def compile_cases() -> Iterator[CompileCase]:
    """What ``decode`` launches: head sizes, groups, types and capacities that a server may have, in pages of 4."""
    options = DecodeOptions(0.1, 0.0, 384, 256, 4, 4, by_page=False, adaptive=True)
    by_sums = [DecodeOptions(0.1, 0.0, 384, 256, 0, 0, True, True, estimator) for estimator in ("quest", "mean")]
    kv_kinds = KINDS[torch.bfloat16], KINDS[torch.float8_e4m3fn]
    kt_kinds = KINDS[torch.bfloat16], KINDS[torch.float8_e5m2]
    axes = itertools.product((64, 128, 256), (1, 4, 8), kv_kinds, kt_kinds, (2048, 4096, MAX_CAPACITY))
    for head_size, group, kv_kind, kt_kind, capacity in axes:
        for chosen in [options, *by_sums] if group == 8 and capacity != 4096 else [options]:
            constants = launch_constants(torch.bfloat16, group, head_size, 128, 4, capacity, kv_kind, kt_kind, chosen)
            name = f"decode-D{head_size}-G{group}-kv{kv_kind}-kt{kt_kind}-{capacity}"
            name += "" if chosen is options else f"-{chosen.estimator}"
            yield CompileCase(name, decode_kernel, _signature(constants), constants, **launch_options(constants))


def _signature(constants: Mapping[str, Any]) -> dict[str, str]:
    """Types of the arguments that are no constants, as ``decode`` passes them for a bfloat16 model."""
    code = {torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}
    pointers = {
        "query": "*bf16",
        "output": "*bf16",
        "kv": code[CODES[constants["KV_KIND"]]],
        "kt": code[CODES[constants["KT_KIND"]]],
        "rows": "*i32",
        "block_table": "*i32",
        "dims": "*i32",
        "scaled_query": "*fp32",
        "chosen": "*i32",
    }
    floats = {"scale", "softcap", "key_scale", "value_scale"}
    arguments = [name for name in decode_kernel.arg_names if name not in constants]
    return {name: pointers.get(name, "fp32" if name in floats else "i32") for name in arguments}
