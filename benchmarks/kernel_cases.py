# SPDX-License-Identifier: Apache-2.0
"""This package's own kernels as cases of series 4: one layer of the demo model, bfloat16, default options."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels import BLOCK, HEAD_DIM, HEADS, KV_HEADS, Case, copies_for, kernel
from vllm_rocketkv.backend.paged_cache import probe_block_layout
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels.cpu import TYPES, ops
from vllm_rocketkv.kernels.options import ESTIMATORS, Estimator
from vllm_rocketkv.layout import ceil_div

CONFIG = RocketKVConfig.parse({})
PAGE, TOPK = CONFIG.page_size, CONFIG.topk_tokens
KV_BYTES = KV_HEADS * BLOCK * HEAD_DIM * 2 * 2
KT_BYTES = KV_HEADS * HEAD_DIM * 2 * (BLOCK // PAGE) * 2
SCALE = HEAD_DIM**-0.5


def make_cache(num_blocks: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Random blocks with room for their KT table behind them, and how the ops are told about them."""
    pages = torch.randn(num_blocks, (KV_BYTES + KT_BYTES) // 2, dtype=torch.bfloat16)
    stride = pages.stride(0)
    cache = pages.as_strided(
        (num_blocks, KV_HEADS, BLOCK, 2 * HEAD_DIM),
        (stride, BLOCK * 2 * HEAD_DIM, 2 * HEAD_DIM, 1),
    )
    bf16 = TYPES[torch.bfloat16]
    return cache, (bf16, 1.0, 1.0, KV_BYTES, bf16, PAGE, False, 0)


def scattered(num_blocks: int) -> torch.Tensor:
    """Blocks in the order of a pool in use."""
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)


def read_case(run_bytes: int, total_bytes: int = 3 << 20) -> Case:
    """As many bytes as a fused decode step of batch 8 reads, by torch, into a target that stays in the cache: what the machine
    gives to runs of that length in random order, whatever is computed with them."""
    runs = total_bytes // run_bytes
    copies = copies_for(total_bytes)
    source = torch.ones(copies * runs, run_bytes // 2, dtype=torch.bfloat16)
    order = scattered(copies * runs).view(copies, runs).long()
    target = torch.empty(runs, run_bytes // 2, dtype=torch.bfloat16)

    def call(copy: int) -> None:
        torch.index_select(source, 0, order[copy], out=target)

    return Case(call, copies, total_bytes)


for _run_bytes in (1 << 10, 16 << 10, 256 << 10):  # a page's keys and values are 1 KiB
    kernel(f"read 3 MiB in runs of {_run_bytes >> 10} KiB")(lambda run_bytes=_run_bytes: read_case(run_bytes))  # type: ignore[misc]


def decode_case(length: int, batch: int, topk: int, estimator: Estimator = "hsa") -> Case:
    """The decode op for ``batch`` requests of ``length`` private tokens; ``topk`` >= ``length`` reads all of them."""
    blocks_each = ceil_div(length, BLOCK)
    copies = copies_for(batch * blocks_each * (KV_BYTES + KT_BYTES))
    cache, layout = make_cache(copies * batch * blocks_each)
    tables = scattered(copies * batch * blocks_each).view(copies, batch, blocks_each)
    # One request in four fills a page in a step.
    table_of_rows = [[i, i, 0, length - i % PAGE, HEAD_DIM, 0, topk, topk, 0] for i in range(batch)]
    rows = torch.tensor(table_of_rows, dtype=torch.int32)
    query = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    key, value = torch.randn(2, batch, KV_HEADS, HEAD_DIM).to(torch.bfloat16)
    output = torch.empty_like(query)
    selection = (CONFIG.sink_tokens, CONFIG.recent_tokens, True, True, ESTIMATORS.index(estimator))
    layout = (*layout[:-2], estimator == "mean", 0)

    def call(copy: int) -> None:
        table = tables[copy]
        ops.decode(query, key, value, cache, output, rows, table, *layout, None, SCALE, 0.0, length, *selection)

    attended = min(topk, length)
    # One of minimum and maximum; quest reads both where the heads' signs differ, nearly everywhere.
    kt = 0 if topk >= length else ceil_div(length, PAGE) * HEAD_DIM * 2 * (2 if estimator == "quest" else 1)
    written = HEAD_DIM * 2 * 2 + HEAD_DIM * 2 * 2 // PAGE  # K and V, and now and then a KT entry
    return Case(call, copies, batch * KV_HEADS * (kt + attended * HEAD_DIM * 2 * 2 + written))


def _register_decode(length: int, batch: int) -> None:
    kernel(f"fused decode, batch {batch}, P {length}, top-k {TOPK}")(lambda: decode_case(length, batch, TOPK))
    kernel(f"private dense decode, batch {batch}, P {length}")(lambda: decode_case(length, batch, length))


for _length, _batch in ((512, 8), (1024, 8), (2048, 8), (2048, 1), (8192, 8)):
    _register_decode(_length, _batch)


def _register_ranking(estimator: Estimator) -> None:
    kernel(f"fused decode by {estimator}, batch 8, P 2048, top-k {TOPK}")(lambda: decode_case(2048, 8, TOPK, estimator))


_register_ranking("quest")
_register_ranking("mean")


def _stage1(num_tokens: int) -> tuple[torch.Tensor, tuple[Any, ...], torch.Tensor, torch.Tensor, int]:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, BLOCK, HEAD_DIM, "auto")
    if isa == "amx":
        torch.cpu._init_amx()
    native = probe_block_layout(isa, torch.bfloat16, BLOCK, HEAD_DIM).packed()
    prompt, private = ceil_div(num_tokens, BLOCK), ceil_div(CONFIG.prompt_budget, BLOCK)
    copies = copies_for((prompt + private) * (KV_BYTES + KT_BYTES))
    cache, layout = make_cache(copies * (prompt + private))
    tables = scattered(copies * (prompt + private)).view(copies, prompt + private)
    return cache, layout, native, tables, prompt


@kernel("stage 1 scoring and choice, 7000 tokens")
def score_case() -> Case:
    """Window queries against all keys: the keys are read twice, once for the softmax' denominator."""
    num_tokens = 7000
    cache, layout, native, tables, prompt = _stage1(num_tokens)
    query = torch.randn(CONFIG.window_size, HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def call(copy: int) -> None:
        blocks = tables[copy, :prompt]
        options = (SCALE, 0.0, True, CONFIG.kernel_size, CONFIG.sink_tokens)
        ops.keep_tokens(query, cache, blocks, num_tokens, CONFIG.prompt_budget, *layout, native, *options)

    return Case(call, len(tables), 2 * num_tokens * KV_HEADS * HEAD_DIM * 2)


@kernel("compaction with KT table, 7000 tokens")
def compact_case() -> Case:
    """The kept tokens' K and V, read and written once, and the KT table of the private blocks, written once."""
    cache, layout, native, tables, prompt = _stage1(7000)
    num_kept = CONFIG.prompt_budget
    random = torch.Generator().manual_seed(1)
    kept = [torch.randperm(7000, generator=random)[:num_kept].sort().values for _ in range(KV_HEADS)]
    index = torch.stack(kept).to(torch.int32)

    def call(copy: int) -> None:
        ops.compact(cache, tables[copy, :prompt], tables[copy, prompt:], index, *layout, native)

    kt = num_kept // PAGE * HEAD_DIM * 2 * 2
    return Case(call, len(tables), KV_HEADS * (2 * num_kept * HEAD_DIM * 2 * 2 + kt))


@kernel("KT update of native pages, 2048 tokens")
def summarise_case() -> Case:
    """What a policy without eviction does for a chunk of a prompt: keys read once, bounds written once."""
    cache, layout, native, tables, _ = _stage1(7000)
    blocks, pages = 2048 // BLOCK, BLOCK // PAGE
    touched = [
        torch.stack([table[:blocks].repeat_interleave(pages), torch.arange(pages).repeat(blocks)], 1)
        for table in tables
    ]
    rows = [torch.nn.functional.pad(pair, (0, 1), value=PAGE).to(torch.int32).contiguous() for pair in touched]

    def call(copy: int) -> None:
        ops.summarise_pages(cache, rows[copy], layout[0], *layout[3:], native)

    return Case(call, len(tables), KV_HEADS * (2048 * HEAD_DIM * 2 + 2048 // PAGE * HEAD_DIM * 2 * 2))
