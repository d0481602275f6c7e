# SPDX-License-Identifier: Apache-2.0
"""A layer's cache on GPUs under the policies whose pages are ranked by sums, from its spec on: quest and preset blog."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.triton_kernels.paged import LARGEST, PagedCache, bound_values, page_entries, random_tokens
from vllm_rocketkv.backend.gpu_cache import GPUPagedCache, Workspaces
from vllm_rocketkv.backend.metadata import Rows, TouchedPages
from vllm_rocketkv.cache.spec import rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import cuda, reference
from vllm_rocketkv.kernels.options import DecodeOptions, Estimator
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace

BLOCK, HKV, GROUP, DIM, PAGE = 32, 2, 3, 64, 4
POLICIES = {
    "quest": {"policy": "quest", "topk_tokens": 40},
    "mean": {"preset": "blog", "policy": "rocketkv", "prompt_budget": 64, "window_size": 16, "topk_tokens": 40},
}


class Layer:
    """A cache of one layer, as ``RocketKVImplBase._wrap`` makes it, and the tests' view of the same memory."""

    def __init__(self, options: dict[str, Any], num_blocks: int = 16) -> None:
        self.config = RocketKVConfig.parse(options)
        assert self.config.page_size == PAGE
        dense = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HKV, head_size=DIM, dtype=torch.bfloat16)
        spec = rocketkv_spec(dense, self.config)
        storage = torch.full((num_blocks * spec.page_size_bytes,), 0xFF, dtype=torch.uint8)
        strides = spec.page_size_bytes // 2, BLOCK * 2 * DIM, 2 * DIM, 1
        kv_cache = storage.view(torch.bfloat16).as_strided((num_blocks, HKV, BLOCK, 2 * DIM), strides)
        heads = GROUP * HKV, HKV, DIM
        self.estimator = cast(Estimator, self.config.selection)
        fused = DecodeWorkspace.allocate(4, *heads, 256, PAGE, "cpu", self.estimator)
        split = SplitWorkspace(4, *heads, 1024, PAGE, 2, "cpu", page_tile=16, select_tile=64)
        types = torch.bfloat16, spec, torch.bfloat16
        self.cache = GPUPagedCache(kv_cache, *types, GROUP * HKV, (1.0, 1.0), Workspaces(fused, split))
        self.paged = PagedCache(
            self.cache.view, storage, torch.bfloat16, torch.bfloat16, list(range(num_blocks - 1, 0, -1))
        )

    def entries(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = page_entries(keys, PAGE, torch.bfloat16, self.estimator == "mean")
        return bound_values(low), bound_values(high)

    def selected(self, query: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
        low, high = (x.clamp(-LARGEST, LARGEST) for x in self.entries(keys))
        if self.estimator == "quest":
            scores = reference.quest_scores(query, low, high, len(keys), PAGE)
        else:
            scores = reference.mean_scores(query, low, len(keys), PAGE)
        return reference.hsa_choose(scores, len(keys), PAGE, self.config.topk_for_step, "page")


def assert_same(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(bound_values(ours), theirs)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_tokens", [155, 302])  # the fused kernel's, the split kernels'
def test_a_decode_step_reads_the_references_pages(name: str, num_tokens: int) -> None:
    """The step's token fills no page, the pages before it are summarised here: the newest is read from its keys."""
    layer = Layer(POLICIES[name])
    keys, values = (random_tokens((num_tokens, HKV, DIM), torch.bfloat16, seed) for seed in (1, 2))
    blocks = layer.paged.add(keys[:-1], values[:-1], with_kt=False)
    pages = [[int(blocks[p // 8]), p % 8, min(PAGE, num_tokens - 1 - p * PAGE)] for p in range(-(-num_tokens // PAGE))]
    layer.cache.summarise(TouchedPages(torch.tensor(pages, dtype=torch.int32)))
    full = num_tokens // PAGE * PAGE
    assert_same(layer.paged.kt_entries(blocks, full // PAGE), layer.entries(keys[:full]))

    query = random_tokens((1, GROUP * HKV, DIM), torch.bfloat16, 3)
    output = torch.full_like(query, torch.nan)
    table = torch.tensor([[0, 0, 0, num_tokens, DIM, 0]], dtype=torch.int32)
    rows = Rows(table, blocks[None], False, num_tokens)
    scale = DIM**-0.5
    budgets = layer.config.dense_below, layer.config.topk_for_step, 0, 0
    options = DecodeOptions(scale, 0.0, *budgets, by_page=True, adaptive=False, estimator=layer.estimator)
    layer.cache.decode(query, keys[-1:], values[-1:], output, rows, False, options)
    wanted = reference.attend(query[0], keys, values, layer.selected(query[0], keys), scale)
    torch.testing.assert_close(output[0].double(), wanted, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("name", POLICIES)
def test_compaction_and_the_page_that_is_filled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA C++ compacts bounds where it is there, and never means."""
    compacted_by_cuda = []

    def by_cuda(view: Any, *arguments: Any) -> None:
        from vllm_rocketkv.kernels.triton.compact import compact

        compacted_by_cuda.append(view)
        compact(view, *arguments)

    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(cuda, "compact", by_cuda)
    layer = Layer(POLICIES[name])
    keys, values = (random_tokens((120, HKV, DIM), torch.bfloat16, seed) for seed in (1, 2))
    prompt, private = layer.paged.add(keys, values, with_kt=False), layer.paged.take_blocks(96)
    generator = torch.Generator().manual_seed(4)
    kept = torch.stack([torch.randperm(120, generator=generator)[:63].sort().values for _ in range(HKV)])
    layer.cache.compact(prompt, private, kept.to(torch.int32))
    copies = torch.stack([keys[kept[h], h] for h in range(HKV)], 1)
    assert bool(compacted_by_cuda) == (name != "mean")
    low, high = layer.entries(copies[:60])
    assert_same(layer.paged.kt_entries(private, 15), (low, high))

    new = random_tokens((1, HKV, DIM), torch.bfloat16, 5)
    rows = Rows(torch.tensor([[0, 0, 0, 64, DIM, 0]], dtype=torch.int32), private[None], False, 64)
    query = random_tokens((1, GROUP * HKV, DIM), torch.bfloat16, 6)
    budgets = 64, layer.config.topk_for_step, 0, 0
    options = DecodeOptions(0.125, 0.0, *budgets, by_page=True, adaptive=False, estimator=layer.estimator)
    layer.cache.decode(query, new, new, torch.empty_like(query), rows, True, options)
    assert_same(layer.paged.kt_entries(private, 16), layer.entries(torch.cat([copies, new])))
