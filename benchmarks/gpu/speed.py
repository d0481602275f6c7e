# SPDX-License-Identifier: Apache-2.0
"""The timed parts: our decode against the bytes floor, dense attention by others, stage 1 against dense prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import traffic
from benchmarks.gpu import rivals, timing
from benchmarks.gpu.predict import LLAMA_8B
from benchmarks.gpu.resources import one_line
from benchmarks.traffic import Attention, Selection
from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.kernels.triton.cache import CacheView, cache_view
from vllm_rocketkv.layout import dense_below

Row = dict[str, Any]
"""One measurement as it stands in the JSON."""
KT_DTYPES = {1: torch.float8_e5m2, 2: torch.bfloat16}
BATCHES = (1, 8, 32, 64)
CONTEXTS = (8 << 10, 32 << 10, 128 << 10)
PROMPT = 32 << 10
WINDOW, POOL, SINKS = 32, 63, 4
DECODED_TOKENS = 1024
"""What the engine's fused kernel has room for beyond what eviction keeps (``backend/limits.py``)."""
# Llama-3.1-8B's other products of one layer: query, key and value; output; gate and up; down.
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def random_cache(shape: Attention, selection: Selection, num_blocks: int, device: torch.device) -> CacheView:
    """Blocks of random bfloat16 numbers with their KT tables behind them, as vLLM's cache with this package lays them out."""
    from vllm_rocketkv.kernels.triton.update import summarise_pages

    Hkv, D, block = shape.num_kv_heads, shape.head_size, selection.block_size
    pages = block // selection.page_size
    kv_bytes = Hkv * block * 2 * D * 2
    block_bytes = kv_bytes + Hkv * D * 2 * pages * selection.kt_itemsize
    storage = torch.empty(num_blocks * block_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    kv = storage.as_strided((num_blocks, Hkv, block, 2 * D), (block_bytes // 2, block * 2 * D, 2 * D, 1))
    view = cache_view(kv, torch.bfloat16, KT_DTYPES[selection.kt_itemsize], kv_bytes, selection.page_size)
    table = torch.stack(
        [
            torch.arange(num_blocks, dtype=torch.int32, device=device).repeat_interleave(pages),
            torch.arange(pages, dtype=torch.int32, device=device).repeat(num_blocks),
            torch.full((num_blocks * pages,), selection.page_size, dtype=torch.int32, device=device),
        ],
        1,
    )
    summarise_pages(view, table)
    return view


@dataclass
class SparseStep:
    """One layer's decode step of a batch, over several copies of its data."""

    cache: CacheView
    query: torch.Tensor
    output: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    rows: torch.Tensor
    block_tables: torch.Tensor
    """int32 ``[copies, batch, blocks]``."""
    options: DecodeOptions

    def update(self, copy: int) -> None:
        """Write the newest token."""
        from vllm_rocketkv.kernels.triton.update import write_rows

        write_rows(self.cache, self.new_key, self.new_value, self.rows, self.block_tables[copy])


def sparse_step(shape: Attention, selection: Selection, batch: int, copies: int, device: torch.device) -> SparseStep:
    """Private caches of ``selection.num_tokens`` tokens in scattered blocks."""
    blocks_each = -(-selection.num_tokens // selection.block_size)
    cache = random_cache(shape, selection, copies * batch * blocks_each, device)
    order = torch.randperm(copies * batch * blocks_each, generator=torch.Generator().manual_seed(0))
    topr = shape.head_size if selection.topr is None else selection.topr
    rows = [[i, i, 0, selection.num_tokens, topr, 0] for i in range(batch)]
    query = torch.randn(batch, shape.num_heads, shape.head_size, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, batch, shape.num_kv_heads, shape.head_size, dtype=torch.bfloat16, device=device)
    options = DecodeOptions(
        shape.head_size**-0.5, 0.0, dense_below(selection.topk_tokens), selection.topk_tokens, SINKS, SINKS,
        by_page=False, adaptive=True,
    )  # fmt: skip
    return SparseStep(
        cache, query, torch.empty_like(query), key, value, torch.tensor(rows, dtype=torch.int32, device=device),
        order.to(torch.int32).view(copies, batch, blocks_each).to(device), options,
    )  # fmt: skip


def time_fused(
    selection: Selection, batch: int, device: torch.device, with_update: bool = False, capacity: int = 0
) -> Row:
    """``decode.py``, for Llama-3.1-8B's layer; with the engine's capacity if none is given."""
    from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode

    shape = LLAMA_8B
    floor = batch * shape.num_kv_heads * traffic.decode_floor(shape, selection)
    copies = timing.copies_for(floor, device)
    step = sparse_step(shape, selection, batch, copies, device)
    capacity = capacity or engine_capacity(selection)
    workspace = DecodeWorkspace.allocate(
        batch, shape.num_heads, shape.num_kv_heads, shape.head_size, capacity, selection.page_size, device
    )

    def call(copy: int) -> None:
        if with_update:
            step.update(copy)
        decode(step.query, step.cache, step.output, step.rows, step.block_tables[copy], step.options, workspace)

    name = "update + fused decode" if with_update else "fused decode"
    return row(name, selection, batch, floor, timing.measure(call, copies)) | {"capacity": capacity}


def time_split(selection: Selection, batch: int, device: torch.device, num_splits: int = 16) -> Row:
    """``decode_split.py``, for Llama-3.1-8B's layer."""
    from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split

    shape = LLAMA_8B
    floor = batch * shape.num_kv_heads * traffic.decode_floor(shape, selection)
    copies = timing.copies_for(floor, device)
    step = sparse_step(shape, selection, batch, copies, device)
    workspace = SplitWorkspace(
        batch, shape.num_heads, shape.num_kv_heads, shape.head_size, selection.num_tokens, selection.page_size,
        num_splits, device,
    )  # fmt: skip

    def call(copy: int) -> None:
        decode_split(step.query, step.cache, step.output, step.rows, step.block_tables[copy], step.options, workspace)

    return row(f"split decode, {num_splits} splits", selection, batch, floor, timing.measure(call, copies))


def engine_capacity(selection: Selection) -> int:
    """Tokens that the engine makes the fused kernel for: a program pays for its capacity."""
    return max(selection.num_tokens, min(8192, 1 << math.ceil(math.log2(selection.num_tokens + DECODED_TOKENS))))


def row(name: str, selection: Selection, batch: int, floor: float, timed: timing.Timing) -> Row:
    """A measurement of a decode kernel."""
    read = batch * LLAMA_8B.num_kv_heads * traffic.decode_bytes(LLAMA_8B, selection)
    return {
        "part": "decode", "name": name, "batch": batch, "tokens": selection.num_tokens,
        "block_size": selection.block_size, "kt_itemsize": selection.kt_itemsize, "topr": selection.topr,
        "eager": timed.eager, "graph": timed.graph, "seconds": timed.best, "note": timed.note,
        "floor": floor, "read": read, "bandwidth": floor / timed.best,
    }  # fmt: skip


def decode_series(device: torch.device) -> Iterator[Row]:
    """The most important first: what the targets ask for, batches, block sizes and KT types, longer caches, top-r."""
    plain, fused, split = Selection(), partial(time_fused, device=device), partial(time_split, device=device)
    calls: list[Callable[[], Row]] = [
        partial(fused, plain, 32),
        partial(fused, plain, 8),
        partial(fused, plain, 8, with_update=True),
        partial(fused, plain, 1),
        partial(fused, plain, 64),
        partial(fused, plain, 32, capacity=2048),
    ]
    for block_size, kt_itemsize in ((16, 1), (64, 1), (128, 2)):
        calls.append(partial(fused, Selection(block_size=block_size, kt_itemsize=kt_itemsize), 32))
    calls += [
        partial(fused, Selection(topr=32), 32),
        partial(fused, Selection(num_tokens=8192), 32),
        partial(split, plain, 1),
        partial(split, plain, 8),
        partial(split, Selection(num_tokens=32768), 8),
    ]
    for call in calls:
        try:
            yield call()
        except Exception as error:  # one configuration that cannot be launched does not hide the others
            name = " ".join(str(argument) for argument in call.args)  # type: ignore[attr-defined]
            yield {"part": "decode", "name": name, "failure": one_line(error)}


def dense_series(device: torch.device) -> Iterator[Row]:
    """Every rival at every context and batch that fits the memory; the point of the target first."""
    points = [(n, batch) for n in CONTEXTS for batch in BATCHES]
    for num_tokens, batch in sorted(points, key=lambda point: point != (128 << 10, 8)):
        needed = batch * LLAMA_8B.num_kv_heads * traffic.dense_bytes(LLAMA_8B, num_tokens)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if needed * 1.1 + (1 << 30) > free:
            yield dense_row("all", num_tokens, batch, needed, None, f"{needed / 1e9:.0f} GB do not fit the memory")
        else:
            yield from rival_rows(num_tokens, batch, needed, device)


def rival_rows(num_tokens: int, batch: int, needed: float, device: torch.device) -> Iterator[Row]:
    """Every rival at one point."""
    step = rivals.make_dense_step(LLAMA_8B, batch, num_tokens, device)
    for name in rivals.RIVALS:
        call, why = rivals.prepare(name, step)
        if call is None:
            yield dense_row(name, num_tokens, batch, needed, None, why)
            continue
        try:
            timed = timing.measure(lambda _, run=call: run(), 1, repeats=5)  # type: ignore[misc]
        except RuntimeError as error:  # theirs, and not ours to fix
            yield dense_row(name, num_tokens, batch, needed, None, one_line(error))
        else:
            yield dense_row(name, num_tokens, batch, needed, timed, "")


def dense_row(name: str, num_tokens: int, batch: int, floor: float, timed: timing.Timing | None, why: str) -> Row:
    """A measurement of dense attention, or why there is none."""
    entry: Row = {"part": "dense", "name": name, "tokens": num_tokens, "batch": batch, "floor": floor}
    if timed is None:
        return entry | {"skipped": why}
    return entry | {
        "eager": timed.eager, "graph": timed.graph, "seconds": timed.best, "note": timed.note,
        "bandwidth": floor / timed.best,
    }  # fmt: skip


def stage1_series(device: torch.device) -> Iterator[Row]:
    """One layer at 32K: stage 1, compaction, and what a dense prefill of the layer takes."""
    from vllm_rocketkv.kernels.triton.compact import compact
    from vllm_rocketkv.kernels.triton.stage1 import keep_tokens

    shape, selection = LLAMA_8B, Selection()
    blocks = PROMPT // selection.block_size
    private_blocks = selection.num_tokens // selection.block_size
    cache = random_cache(shape, selection, blocks + private_blocks, device)
    order = torch.randperm(blocks + private_blocks, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    prompt, private = order[:blocks], order[blocks:]
    query = torch.randn(WINDOW, shape.num_heads, shape.head_size, dtype=torch.bfloat16, device=device)
    scale = shape.head_size**-0.5

    def score(_: int) -> torch.Tensor:
        return keep_tokens(query, cache, prompt, PROMPT, selection.num_tokens, scale, 0.0, True, POOL, SINKS)

    kept = score(0)
    floor = traffic.window_bytes(shape, PROMPT, passes=2)
    yield stage1_row("stage 1: scores and choice", floor, timing.measure(score, 1, with_graph=False))
    timed = timing.measure(lambda _: compact(cache, prompt, private, kept), 1, with_graph=False)
    yield stage1_row("compaction", traffic.compact_bytes(shape, selection), timed)
    yield from prefill_rows(shape, device)


def prefill_rows(shape: Attention, device: torch.device) -> Iterator[Row]:
    """Dense causal attention over the prompt, and the layer's products with its weights."""
    step = rivals.make_dense_step(shape, 1, PROMPT, device)
    q = torch.randn(1, shape.num_heads, PROMPT, shape.head_size, dtype=torch.bfloat16, device=device)
    k, v = step.keys.transpose(1, 2), step.values.transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    timed = timing.measure(lambda _: attention(q, k, v, is_causal=True, enable_gqa=True), 1, False, repeats=3)
    yield stage1_row("prefill: attention", 0, timed)
    seconds = 0.0
    for rows, columns in PRODUCTS:
        a = torch.randn(PROMPT, rows, dtype=torch.bfloat16, device=device)
        b = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        seconds += timing.measure(lambda _, a=a, b=b: a @ b, 1, False, repeats=3).eager  # type: ignore[misc]
    yield stage1_row("prefill: products with weights", 0, timing.Timing(seconds, None))


def stage1_row(name: str, floor: float, timed: timing.Timing) -> Row:
    """A measurement of what happens once a prompt."""
    return {
        "part": "stage 1", "name": name, "tokens": PROMPT, "batch": 1, "seconds": timed.best, "eager": timed.eager,
        "floor": floor, "bandwidth": floor / timed.best,
    }  # fmt: skip
