# SPDX-License-Identifier: Apache-2.0
"""Writing decoded tokens and closing pages against torch indexing and the reference; whole storages are compared."""

from __future__ import annotations

import random

import pytest
import torch
from triton.runtime import interpreter

from tests.triton_kernels.paged import (
    KV_DTYPES,
    PagedCache,
    block_table,
    make_cache,
    random_tokens,
)
from vllm_rocketkv.kernels.triton.update import compile_cases, summarise_pages, write_rows

FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def stored(tokens: torch.Tensor, kv_dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What vLLM's CUDA op makes of the model's numbers."""
    if tokens.dtype == kv_dtype:
        return tokens
    scaled = tokens.float() / scale
    if kv_dtype in FP8_LARGEST:
        scaled = scaled.clamp(-FP8_LARGEST[kv_dtype], FP8_LARGEST[kv_dtype])
    return scaled.to(kv_dtype)


class Step:
    """Requests with some tokens cached, which one step makes longer; in stored units beside what the model computes."""

    def __init__(
        self,
        paged: PagedCache,
        requests: list[tuple[int, int]],
        model_dtype: torch.dtype = torch.float32,
        padding: int = 0,
        magnitude: float = 1.0,
        seed: int = 0,
    ) -> None:
        """``requests``: tokens cached before and tokens of this step; ``padding`` inert rows behind them."""
        self.paged = paged
        heads, dim = paged.view.num_kv_heads, paged.view.head_size
        num_new = sum(new for _, new in requests)
        unused = 3  # tokens of the batch that are no rows
        shape = (num_new + unused, heads, dim)
        self.key = random_tokens(shape, model_dtype, seed + 1, magnitude)
        self.value = random_tokens(shape, model_dtype, seed + 2, magnitude)
        tokens = list(range(num_new + unused))
        random.Random(seed).shuffle(tokens)
        rows, self.sequences, blocks, firsts = [], [], [], []
        for request, (old, new) in enumerate(requests):
            cached = [
                random_tokens((old, heads, dim), paged.kv_dtype, seed + 10 * request + i, magnitude) for i in (3, 4)
            ]
            of_request = paged.take_blocks(old + new)
            paged.write(of_request, *cached)
            if paged.view.page_size:
                paged.write_kt(of_request, cached[0])
            blocks.append(of_request)
            firsts.append(request % 3)
            mine = [tokens.pop() for _ in range(new)]
            for i, token in enumerate(mine):
                rows.append((token, request, firsts[-1], old + i + 1, dim, int(i + 1 < new)))
            scales = paged.view.key_scale, paged.view.value_scale
            added = [stored(t[mine], paged.kv_dtype, s) for t, s in zip((self.key, self.value), scales, strict=True)]
            self.sequences.append([torch.cat(pair) for pair in zip(cached, added, strict=True)])
        self.blocks = blocks
        rows += [(0, 0, 0, 0, 0, 0)] * padding
        self.rows = torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
        self.block_table = block_table(blocks, firsts)

    def expected(self) -> torch.Tensor:
        before = self.paged.storage.clone()
        for blocks, (keys, values) in zip(self.blocks, self.sequences, strict=True):
            self.paged.write(blocks, keys, values)
            if self.paged.view.page_size:
                self.paged.write_kt(blocks, keys)
        expected = self.paged.snapshot()
        self.paged.storage.copy_(before)
        return expected

    def run(self) -> None:
        write_rows(self.paged.view, self.key, self.value, self.rows, self.block_table)

    def check(self) -> None:
        expected = self.expected()
        self.run()
        assert torch.equal(self.paged.snapshot(), expected)


BATCH = [(7, 1), (15, 1), (16, 1), (0, 1), (22, 1), (3, 1)]
DRAFTS = [(6, 5), (0, 4), (13, 4), (31, 1), (2, 1), (15, 2)]


LAYOUTS = [(64, True), (80, False), (96, True), (128, False), (256, True)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "is_hnd"), LAYOUTS)
def test_one_token_a_request(kv_dtype: torch.dtype, head_size: int, is_hnd: bool) -> None:
    paged = make_cache(
        14, 2, 16, head_size, kv_dtype, torch.float8_e5m2, 4, is_hnd=is_hnd, key_scale=0.5, value_scale=0.3
    )
    Step(paged, BATCH, torch.bfloat16, padding=2).check()


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_drafts_that_fill_pages(kv_dtype: torch.dtype, model_dtype: torch.dtype, is_mean: bool) -> None:
    scales = {"key_scale": 0.7, "value_scale": 1.7}
    paged = make_cache(20, 2, 16, 64, kv_dtype, torch.bfloat16, 4, kt_is_mean=is_mean, **scales)
    Step(paged, DRAFTS, model_dtype, padding=1).check()


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
@pytest.mark.parametrize(("block_size", "page_size"), [(16, 1), (16, 16), (48, 8), (64, 64), (80, 16), (112, 2)])
@pytest.mark.parametrize("kt_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_any_page_and_block(block_size: int, page_size: int, kt_dtype: torch.dtype, is_mean: bool) -> None:
    drafts = min(page_size + 1, 9)
    full = [(block_size - 1, 1), (block_size - 3, 4), (2 * block_size - 1, 2), (page_size, 1), (0, drafts)]
    paged = make_cache(16, 1, block_size, 64, torch.bfloat16, kt_dtype, page_size, kt_is_mean=is_mean)
    Step(paged, full, torch.bfloat16).check()


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_pages_larger_than_what_is_in_registers(is_mean: bool) -> None:
    paged = make_cache(8, 1, 64, 256, torch.float16, torch.float8_e5m2, 64, kt_is_mean=is_mean)
    Step(paged, [(63, 1), (54, 10), (60, 6)], torch.float16).check()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("holds_rejected", [False, True])
@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_the_programs_of_a_step_may_run_in_any_order(
    kv_dtype: torch.dtype, holds_rejected: bool, is_mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here from the last to the first: the cache holds nothing, or a draft that was rejected, where earlier rows will write."""
    paged = make_cache(20, 2, 16, 64, kv_dtype, torch.bfloat16, 4, kt_is_mean=is_mean, key_scale=0.7)
    requests = [(6, 5), (0, 4), (13, 4), (1, 2)]
    step = Step(paged, requests, torch.bfloat16)
    if holds_rejected:
        for blocks, (old, new) in zip(step.blocks, requests, strict=True):
            rejected = random_tokens((new, 2, 64), torch.float32, magnitude=50.0)
            paged.write(blocks, rejected, rejected, first=old)
    builder, num_rows = interpreter.interpreter_builder, len(step.rows)
    set_grid_idx, seen = builder.set_grid_idx, []

    def backwards(x: int, y: int, z: int) -> None:
        seen.append(num_rows - 1 - x)
        set_grid_idx(num_rows - 1 - x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    step.check()
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == 2 * num_rows


def view_of(paged: PagedCache, name: str) -> torch.Tensor:
    """``view.kv`` or ``view.kt`` over another copy of the storage."""
    tensor = getattr(paged.view, name)
    codes = paged.storage.view(tensor.dtype)
    return codes.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_rejected_drafts_are_overwritten() -> None:
    """A page that drafts had closed is closed again by other tokens."""
    paged = make_cache(4, 2, 16, 64, torch.bfloat16, torch.bfloat16, 4)
    first = Step(paged, [(6, 3)], torch.bfloat16, seed=1)
    first.run()
    keys, values = (random_tokens((2, 2, 64), torch.bfloat16, seed) for seed in (21, 22))
    rows = torch.tensor([[0, 0, 0, 8, 64, 1], [1, 0, 0, 9, 64, 0]], dtype=torch.int32)
    write_rows(paged.view, keys, values, rows, first.block_table)
    cached = [torch.cat([old[:7], new]) for old, new in zip(first.sequences[0], (keys, values), strict=True)]
    actual = paged.snapshot()
    paged.write(first.blocks[0], *cached)
    paged.write_kt(first.blocks[0], cached[0])
    assert torch.equal(actual, paged.snapshot())


def test_neighbours_of_other_requests_are_not_taken_for_earlier_rows() -> None:
    """Two requests of the same length side by side, and rows of the same request that are not adjacent in position."""
    Step(make_cache(12, 1, 16, 64, torch.float32), [(6, 1), (7, 1), (6, 2), (7, 1)]).check()


def test_strided_views_of_the_models_projection() -> None:
    paged = make_cache(14, 2, 16, 64, torch.float8_e5m2, torch.bfloat16, 4, key_scale=0.1, value_scale=0.2)
    step = Step(paged, DRAFTS[:3], torch.bfloat16)
    qkv = torch.full((len(step.key), 10, 64), torch.nan, dtype=torch.bfloat16)
    qkv[:, 6:8], qkv[:, 8:] = step.key, step.value
    step.key, step.value = qkv[:, 6:8], qkv[:, 8:]
    step.check()


def test_without_a_kt_table() -> None:
    Step(make_cache(14, 2, 16, 80, torch.bfloat16, page_size=0), BATCH, torch.bfloat16, padding=3).check()


@pytest.mark.parametrize("kv_dtype", FP8_LARGEST, ids=str)
@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1e6], ids=str)
@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_what_fp8_cannot_hold(kv_dtype: torch.dtype, magnitude: float, is_mean: bool) -> None:
    """Keys beyond the range saturate; those between zero and the least number are rounded to either."""
    scales = {"key_scale": 0.37, "value_scale": 2.0}
    paged = make_cache(14, 2, 16, 64, kv_dtype, torch.float8_e5m2, 4, kt_is_mean=is_mean, **scales)
    step = Step(paged, [(0, 9), (0, 4)], torch.float32, magnitude=magnitude)
    step.check()


def test_padding_alone_changes_nothing() -> None:
    paged = make_cache(3, 2, 16, 64)
    before = paged.storage.clone()
    tokens = random_tokens((4, 2, 64), torch.float32)
    rows = torch.zeros(4, 6, dtype=torch.int32)
    write_rows(paged.view, tokens, tokens, rows, torch.zeros(1, 2, dtype=torch.int32))
    write_rows(paged.view, tokens, tokens, rows[:0], torch.zeros(1, 2, dtype=torch.int32))
    assert torch.equal(paged.storage, before)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "page_size", "head_size", "is_hnd"),
    [(16, 4, 64, True), (16, 16, 80, False), (48, 1, 96, True), (64, 64, 256, True), (80, 8, 128, False)],
)
@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_touched_pages(
    kv_dtype: torch.dtype, block_size: int, page_size: int, head_size: int, is_hnd: bool, is_mean: bool
) -> None:
    """Only full pages are built, and only those that are listed."""
    kt_dtype = torch.float8_e5m2 if kv_dtype.itemsize > 1 else torch.bfloat16
    types = kv_dtype, kt_dtype, page_size
    paged = make_cache(9, 2, block_size, head_size, *types, is_hnd=is_hnd, kt_is_mean=is_mean)
    num_tokens = 2 * block_size + page_size + page_size // 2
    keys, values = (random_tokens((num_tokens, 2, head_size), kv_dtype, seed) for seed in (1, 2))
    blocks = paged.add(keys, values, with_kt=False)
    first = num_tokens // page_size - 2
    pages = []
    for page in range(first, -(-num_tokens // page_size)):
        block, inside = divmod(page, paged.view.pages_per_block)
        pages.append((int(blocks[block]), inside, min(num_tokens - page * page_size, page_size)))
    padding = [(0, 0, 0), (int(blocks[0]), 0, 0)]
    table = torch.tensor(pages + padding, dtype=torch.int32)
    before = paged.storage.clone()
    paged.write_kt(blocks, keys)
    for page in range(first):  # not listed
        block, inside = divmod(page, paged.view.pages_per_block)
        old = view_of(PagedCache(paged.view, before, kv_dtype, kt_dtype), "kt")
        paged.view.kt[blocks[block], ..., inside] = old[blocks[block], ..., inside]
    expected = paged.snapshot()
    paged.storage.copy_(before)
    summarise_pages(paged.view, table)
    assert torch.equal(paged.snapshot(), expected)


def test_compile_cases_are_what_is_launched() -> None:
    names = set()
    for case in compile_cases():
        names.add(case.name)
        assert set(case.signature) | set(case.constants) == set(case.kernel.arg_names)
    assert len(names) == len(list(compile_cases()))
