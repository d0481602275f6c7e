# SPDX-License-Identifier: Apache-2.0
"""Split decode: estimate, select and attend with several programs for each KV head of a row.

For rows longer than the fused kernel holds in registers (policies without eviction read caches of a million tokens). It would
also fill a GPU at batches so small that one program for each row and KV head does not; the engine does not take it for those
yet. Every stage is a launch; ``S`` splits share its work, each with a contiguous run of the row's pages or tokens:

1. ``estimate_kernel`` (``split_estimate.py``): logits of pages, and each split's softmax statistics
2. ``score_kernel`` (``split_select.py``): scores as integer keys, and what pages weigh by the highest eight bits of theirs
   (for estimators quest and mean, ``sum_kernel`` of ``split_sums.py`` and ``digit_kernel`` in place of both)
3. ``digit_kernel``, three times: the next bits of the key at the budget's edge
4. ``gather_kernel``: the pages to read and how much of each, ascending
5. ``attend_kernel``, ``combine_kernel`` (``combine.py``)

Nothing depends on what the host knows of lengths: grids come from shapes, programs without work end at once, and all memory is
in a ``SplitWorkspace``. The formulas are in ``kernels/reference.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.combine import attend_kernel, combine_kernel
from vllm_rocketkv.kernels.triton.launch import INTERPRET, MIN_DOT, NUM_STAGES, CompileCase, padded
from vllm_rocketkv.kernels.triton.numbers import CODES, KINDS
from vllm_rocketkv.kernels.triton.split_estimate import estimate_kernel
from vllm_rocketkv.kernels.triton.split_select import BINS, digit_kernel, gather_kernel, score_kernel
from vllm_rocketkv.kernels.triton.split_sums import sum_kernel

DIGITS = 4
"""Digits of a key."""
NO_LIMIT = (1 << 31) - 1


def _sizes(
    max_rows: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    capacity_tokens: int,
    page_size: int,
    num_splits: int,
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of a workspace's tensors."""
    units, group = max_rows * num_kv_heads, num_query_heads // num_kv_heads
    pages = -(-capacity_tokens // page_size) if page_size else 0
    selects = units if page_size else 0
    return {
        "logits": (torch.float32, (units, group, pages)),
        "statistics": (torch.float32, (selects, num_splits, 2, group)),
        "keys": (torch.int32, (units, pages)),
        "histograms": (torch.int32, (selects, DIGITS, num_splits, BINS.value)),
        "progress": (torch.int32, (selects, DIGITS, 2)),
        "list_lengths": (torch.int32, (selects, num_splits)),
        "partial_sums": (torch.float32, (units, num_splits, group, head_size)),
        "partial_statistics": (torch.float32, (units, num_splits, 2, group)),
    }


def workspace_bytes(
    max_rows: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    capacity_tokens: int,
    page_size: int,
    num_splits: int,
) -> int:
    """Device memory of a ``SplitWorkspace``, which all layers share.

    For each row: 4 (Hq + Hkv) bytes for each page of the capacity, and for each split 4 Hq (D + 4) + 4 Hkv * 1,025 bytes. A row
    of a million tokens in pages of 4 with 32 query and 8 KV heads takes 42 MB, and its 16 splits 0.8 MB more.
    """
    sizes = _sizes(max_rows, num_query_heads, num_kv_heads, head_size, capacity_tokens, page_size, num_splits)
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in sizes.values())


class SplitWorkspace:
    """What ``decode_split`` works in, allocated once. Strides come from the capacities, and nothing needs to be cleared.

    Every row is served by ``num_splits`` programs for each KV head: about twice a GPU's multiprocessors over all rows and KV
    heads of a usual batch is right. ``page_tile`` pages are estimated at a time, ``select_tile`` looked through; both are powers
    of two.
    """

    def __init__(
        self,
        max_rows: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        capacity_tokens: int,
        page_size: int,
        num_splits: int,
        device: torch.device | str,
        page_tile: int = 64,
        select_tile: int = 1024,
    ) -> None:
        self.max_rows, self.capacity_tokens, self.num_splits = max_rows, capacity_tokens, num_splits
        self.page_tile, self.select_tile = page_tile, select_tile
        sizes = _sizes(max_rows, num_query_heads, num_kv_heads, head_size, capacity_tokens, page_size, num_splits)
        self.tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in sizes.items()}
        # Lists are written when the logits have been read for the last time.
        self.tensors["page_lists"] = self.tensors["logits"].view(torch.int32)
        self.page_capacity = self.tensors["keys"].shape[1]
        self.heads = num_query_heads, num_kv_heads, head_size, page_size

    def list_pages(
        self, select: Callable[..., None], rows_table: torch.Tensor, options: DecodeOptions, dense_below: int
    ) -> None:
        """Let ``select`` (``kernels/cuda.py``, ``select_pages``) list the pages of every row of more than ``dense_below`` tokens,
        all of them as the first split's."""
        num_rows, (_, num_kv_heads, _, page_size) = rows_table.shape[0], self.heads
        shape = self.max_rows, num_kv_heads, -1
        lists = self.tensors["page_lists"].view(*shape, self.page_capacity)[:num_rows, :, 0]
        lengths = self.tensors["list_lengths"].view(shape)[:num_rows]
        select(
            self.tensors["keys"].view(shape)[:num_rows],
            rows_table[:, 3],
            page_size,
            dense_below,
            options.topk_tokens,
            options.sink_tokens,
            options.recent_tokens,
            options.by_page,
            lists,
            lengths,
        )


@dataclass(frozen=True)
class SplitConfig:
    """What the kernels are compiled for."""

    group: int
    head_size: int
    block_size: int
    page_size: int
    query_kind: int
    kv_kind: int
    kt_kind: int
    by_page: bool
    adaptive: bool
    has_softcap: bool
    num_splits: int
    page_tile: int
    select_tile: int
    kv_vector: int
    """Adjacent numbers of the cache that one load takes: 16 bytes, if strides are multiples of that."""
    kt_vector: int
    is_mean: bool = False

    def constants(self, kernel: Any) -> dict[str, Any]:
        """Values of the kernel's ``tl.constexpr`` arguments but ``DIGIT``."""
        group_padded = padded(self.group, 1 if kernel in (score_kernel, sum_kernel) else MIN_DOT)
        # Bounds of these kinds are bfloat16 numbers; a float16 query is two of them.
        pieces = {1: 1, 2: 2}.get(self.query_kind, 0) if self.kt_kind in (1, 3, 4) else 0
        is_exact = self.query_kind in (1, 2) and self.kv_kind in (self.query_kind, 3, 4)
        values = {
            "GROUP": self.group,
            "GROUP_PADDED": group_padded,
            "HEAD_SIZE": self.head_size,
            "HEAD_PADDED": padded(self.head_size, MIN_DOT),
            "BLOCK_SIZE": self.block_size,
            "PAGE_SIZE": self.page_size,
            "KV_KIND": self.kv_kind,
            "KT_KIND": self.kt_kind,
            "PIECES": pieces,
            "OPERAND": self.query_kind if is_exact else 0,
            "ADAPTIVE": self.adaptive,
            "IS_MEAN": self.is_mean,
            "BY_PAGE": self.by_page,
            "HAS_SOFTCAP": self.has_softcap,
            "NUM_SPLITS": self.num_splits,
            "SPLITS_PADDED": padded(self.num_splits),
            "PAGE_TILE": self.page_tile,
            "TILE": min(self.select_tile, 8192 // group_padded) if kernel is score_kernel else self.select_tile,
            "TOKEN_TILE": 64 if padded(self.head_size) == 128 else 32,
            "KV_VECTOR": self.kv_vector,
            "KT_VECTOR": self.kt_vector,
            "INTERPRETED": INTERPRET,
        }
        return {name: values[name] for name in kernel.arg_names if name in values}

    def num_warps(self, kernel: Any) -> int:
        """Warps of a program."""
        is_large = kernel is attend_kernel and padded(self.group, MIN_DOT) * padded(self.head_size) >= 8192
        return 8 if is_large or kernel in (estimate_kernel, sum_kernel) else 4


def _vector(codes: torch.Tensor, *sizes: int) -> int:
    """Numbers of an aligned load of at most 16 bytes, from an element that is a multiple of all ``sizes`` away from the first."""
    return math.gcd(16, *(size * codes.element_size() for size in sizes), codes.data_ptr()) // codes.element_size()


def _config(query: torch.Tensor, cache: CacheView, options: DecodeOptions, workspace: SplitWorkspace) -> SplitConfig:
    pages = cache.pages_per_block if cache.page_size else 0
    return SplitConfig(
        query.shape[1] // cache.num_kv_heads,
        cache.head_size,
        cache.block_size,
        cache.page_size,
        KINDS[query.dtype],
        cache.kv_kind,
        cache.kt_kind,
        options.by_page,
        options.adaptive,
        options.softcap > 0,
        workspace.num_splits,
        workspace.page_tile,
        workspace.select_tile,
        _vector(cache.kv, *cache.kv.stride()[:3], cache.head_size),
        _vector(cache.kt, cache.kt.stride(0), pages),
        cache.kt_is_mean,
    )


def decode_split(
    query: torch.Tensor,
    cache: CacheView,
    output: torch.Tensor,
    rows_table: torch.Tensor,
    block_table: torch.Tensor,
    options: DecodeOptions,
    workspace: SplitWorkspace,
    min_tokens: int = 0,
    select: Callable[..., None] | None = None,
) -> None:
    """Attend for each row of more than ``min_tokens`` tokens: ``query`` and ``output`` ``[tokens, Hq, D]``, ``rows_table`` int32
    ``[R, 6]`` and ``block_table`` int32 ``[requests, blocks]`` as in ``backend/metadata.py`` (``Rows``).

    The rows' own keys and values, and the KT entries of full pages, are in the cache already. Other rows' output stays as it
    is. No row may have more than the workspace's capacity of tokens. ``select`` is ``select_pages`` of ``kernels/cuda.py``, or
    another that does in one launch what takes four here.
    """
    num_rows, num_query_heads = rows_table.shape[0], query.shape[1]
    heads = num_query_heads, cache.num_kv_heads, cache.head_size, cache.page_size
    if num_rows > workspace.max_rows or heads != workspace.heads:
        raise ValueError(
            f"a workspace for {workspace.max_rows} rows of {workspace.heads} is given {num_rows} of {heads}"
        )
    assert query.stride(2) == output.stride(2) == block_table.stride(1) == cache.kv.stride(3) == 1
    assert rows_table.stride() == (6, 1) or num_rows == 0
    assert cache.kt_is_mean == (options.estimator == "mean") or cache.page_size == 0
    if num_rows == 0 or min_tokens >= workspace.capacity_tokens:
        return
    arguments = {
        "query": query,
        "output": output,
        "kv": cache.kv,
        "kt": cache.kt,
        "rows": rows_table,
        "block_table": block_table,
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "output_stride": output.stride(0),
        "output_head_stride": output.stride(1),
        "table_stride": block_table.stride(0),
        "kv_block_stride": cache.kv.stride(0),
        "kv_head_stride": cache.kv.stride(1),
        "kv_token_stride": cache.kv.stride(2),
        "kt_block_stride": cache.kt.stride(0),
        "kt_head_stride": cache.kt.stride(1),
        "page_capacity": workspace.page_capacity,
        "key_scale": cache.key_scale,
        "value_scale": cache.value_scale,
        "logit_scale": options.scale * cache.key_scale,
        "softcap": options.softcap,
        "min_tokens": min_tokens,
        "dense_below": min(options.dense_below, NO_LIMIT) if cache.page_size else NO_LIMIT,
        "topk_tokens": options.topk_tokens,
        "sink_tokens": options.sink_tokens,
        "recent_tokens": options.recent_tokens,
        **workspace.tensors,
    }
    config = _config(query, cache, options, workspace)
    grid = workspace.num_splits, cache.num_kv_heads, num_rows

    def launch(kernel: Any, grid: tuple[int, ...], **others: int) -> None:
        constants = config.constants(kernel) | others
        given = {name: arguments[name] for name in kernel.arg_names if name not in constants}
        kernel[grid](**given, **constants, num_warps=config.num_warps(kernel), num_stages=NUM_STAGES)

    if cache.page_size and options.dense_below < workspace.capacity_tokens:
        first_digit = 1
        if options.estimator == "hsa":
            launch(estimate_kernel, grid)
            launch(score_kernel, grid)
        else:
            launch(sum_kernel, grid)
            first_digit = 0
        if select is not None:
            workspace.list_pages(select, rows_table, options, max(options.dense_below, min_tokens))
        else:
            for digit in range(first_digit, DIGITS):
                launch(digit_kernel, grid, DIGIT=digit)
            launch(gather_kernel, grid)
    launch(attend_kernel, grid)
    launch(combine_kernel, (num_query_heads, num_rows))


# --------------------------------------------------------------------------------------------- configurations


def _signature(kernel: Any, config: SplitConfig, constants: dict[str, Any]) -> dict[str, str]:
    """Triton's types of the arguments that are not constants."""
    query = "*" + {0: "fp32", 1: "bf16", 2: "fp16"}[config.query_kind]
    codes = {0: "*i32", 1: "*i16", 2: "*i16", 3: "*u8", 4: "*u8"}
    types = {
        "query": query,
        "output": query,
        "kv": codes[config.kv_kind],
        "kt": codes[config.kt_kind],
        **dict.fromkeys(("key_scale", "value_scale", "logit_scale", "softcap"), "fp32"),
        **dict.fromkeys(("logits", "statistics", "partial_sums", "partial_statistics"), "*fp32"),
        **dict.fromkeys(("rows", "block_table", "keys", "histograms", "progress"), "*i32"),
        **dict.fromkeys(("page_lists", "list_lengths"), "*i32"),
    }
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel for the sizes and types that engines meet; the capacity is no constant of any."""
    axes = itertools.product((64, 128, 256), (1, 4, 8), (1, 3), (1, 4))
    for head_size, group, kv_kind, kt_kind in axes:
        vectors = (16 // CODES[kv_kind].itemsize, 16 // CODES[kt_kind].itemsize)
        config = SplitConfig(group, head_size, 128, 4, 1, kv_kind, kt_kind, False, True, False, 16, 64, 1024, *vectors)
        sizes = f"D{head_size} G{group}"
        yield _case(estimate_kernel, f"{sizes} kv{kv_kind} kt{kt_kind}", config)
        if kt_kind == 1:
            yield _case(attend_kernel, f"{sizes} kv{kv_kind}", config)
        if kt_kind == 1 and kv_kind == 1:
            yield _case(combine_kernel, sizes, config)
        if (head_size, kv_kind, kt_kind) == (64, 1, 1):
            yield _case(score_kernel, f"G{group}", config)
            yield _case(gather_kernel, f"G{group}", config)
        for is_mean in (False, True) if group == 8 else ():
            summary = "mean" if is_mean else "quest"
            yield _case(sum_kernel, f"{sizes} kv{kv_kind} kt{kt_kind} {summary}", replace(config, is_mean=is_mean))
    for digit in range(DIGITS):
        yield _case(digit_kernel, f"digit {digit}", config, DIGIT=digit)


def _case(kernel: Any, name: str, config: SplitConfig, **others: int) -> CompileCase:
    constants = config.constants(kernel) | {"INTERPRETED": False} if "INTERPRETED" in kernel.arg_names else None
    constants = (constants or config.constants(kernel)) | others
    signature = _signature(kernel, config, constants)
    label = f"split {kernel.__name__.removesuffix('_kernel')} {name}"
    return CompileCase(label, kernel, signature, constants, config.num_warps(kernel))
