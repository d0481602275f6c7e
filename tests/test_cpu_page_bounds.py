# SPDX-License-Identifier: Apache-2.0
"""The bounds or means that ``summarise_pages``, ``compact`` and with them the decode op store, for each instruction set (I8)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.decode_cases import CASES, KT_TYPES, KV_TYPES, Case
from tests.decode_step import INTEGERS, Layer, assert_bytes, step_of
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.cpu import TYPES, ops


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a type of 8 or 16 bits; of float32, those at and beside the numbers of both KT types, and random ones."""
    if dtype.itemsize < 4:
        bits = 8 * dtype.itemsize
        numbers = torch.arange(-(1 << bits - 1), 1 << bits - 1).to(INTEGERS[dtype.itemsize]).view(dtype)
    else:
        bounds = torch.cat([reference.representable(kt).float() for kt in KT_TYPES])
        bounds = bounds.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
        draw = torch.Generator().manual_seed(1)
        others = torch.randint(-(1 << 31), 1 << 31, (50_000,), generator=draw, dtype=torch.int64).int()
        numbers = torch.cat([bounds.flatten(), others]).view(torch.float32)
    return numbers[~numbers.float().isnan()]


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
@pytest.mark.parametrize("kt_dtype", KT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", KV_TYPES, ids=str)
def test_every_number_is_bounded_and_tightly(dtype: torch.dtype, kt_dtype: torch.dtype, is_mean: bool) -> None:
    """By ``summarise_pages`` and by ``compact``, whose rounding the decode op shares; pages of one token. A mean of one is it,
    rounded to nearest."""
    B, D = 128, 256
    numbers = hard_numbers(dtype)
    num_blocks = -(-len(numbers) // (B * D))
    kv_bytes = 2 * B * D * dtype.itemsize
    raw = torch.zeros(2 * num_blocks, kv_bytes + 2 * B * D * kt_dtype.itemsize, dtype=torch.uint8)
    kv_cache = raw[:, :kv_bytes].view(torch.uint8 if dtype.itemsize == 1 else dtype).unflatten(1, (1, B, 2 * D))
    keys = torch.zeros(num_blocks * B * D, dtype=dtype)
    keys[: len(numbers)] = numbers
    raw[:num_blocks, : kv_bytes // 2] = keys.view(torch.uint8).view(num_blocks, -1)
    layout = torch.cat([torch.arange(B) * D, torch.arange(D), B * D + torch.arange(B) * D, torch.arange(D)]).int()
    types = TYPES[dtype], TYPES[kt_dtype]
    pages = torch.cartesian_prod(torch.arange(num_blocks), torch.arange(B), torch.tensor([1])).int().contiguous()
    ops.summarise_pages(kv_cache, pages, types[0], kv_bytes, types[1], 1, is_mean, 0, layout)
    prompt, private = torch.arange(2 * num_blocks, dtype=torch.int32).chunk(2)
    kept = torch.arange(num_blocks * B, dtype=torch.int32)[None]
    ops.compact(kv_cache, prompt, private, kept, types[0], 1.0, 1.0, kv_bytes, types[1], 1, is_mean, 0, layout)
    bounds = raw[:, kv_bytes:].view(kt_dtype).unflatten(1, (D, 2, B)).double().transpose(1, 3)  # [blocks, B, 2, D]
    low, high = (reference_round(keys, kt_dtype).double() for reference_round in ROUNDINGS)
    if is_mean:
        mean = reference.page_means(keys[:, None, None], 1, kt_dtype).double().flatten()
        assert ((mean == low) | (mean == high)).all()
        low = high = mean
    largest = 2.0**64 if kt_dtype == torch.bfloat16 else torch.inf
    for found in bounds.chunk(2):
        assert torch.equal(found[:, :, 0].flatten(), low.clamp(-largest, largest))
        assert torch.equal(found[:, :, 1].flatten(), high.clamp(-largest, largest))


ROUNDINGS = reference.round_down, reference.round_up


@pytest.mark.parametrize("case", [case for case in CASES if case.native], ids=str)
def test_summarise_pages_fills_entries_of_full_native_pages_and_writes_nothing_else(case: Case) -> None:
    step = step_of(case)
    layer = Layer(step)
    pages = []
    step.kt(layer.bytes).view(torch.uint8).fill_(255)
    for r, (n, _) in enumerate(case.requests):
        first = torch.arange(0, n, case.page_size)
        block, offset = step.place(r, first)
        pages.append(torch.stack([block, offset // case.page_size, (n - first).clamp(max=case.page_size)], 1))
    table = torch.cat(pages)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(case.seed))].int().contiguous()
    kt = step.kt_offset, TYPES[case.kt_dtype], case.page_size, case.estimator == "mean", 0
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ops.summarise_pages(layer.kv_cache, table, TYPES[case.dtype], *kt, step.native_layout)
        assert_bytes(step, layer.bytes)
        step.kt(layer.bytes).view(torch.uint8).fill_(255)


@pytest.mark.parametrize("kt_dtype", KT_TYPES, ids=str)
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_compact_stores_the_mean_of_full_pages_in_both_places(page_size: int, kt_dtype: torch.dtype) -> None:
    """Of float32 keys, whose sum depends on its order; the entries of the page that is not full stay as they are."""
    B, D, H, kept = 32, 48, 2, 32 + 19
    draw = torch.Generator().manual_seed(3)
    keys = torch.randn(kept, H, D, generator=draw) * 10 ** torch.randn(kept, 1, 1, generator=draw)
    kv_bytes = 2 * H * B * D * 4
    raw = torch.full((4, kv_bytes + 2 * H * D * (B // page_size) * kt_dtype.itemsize), 255, dtype=torch.uint8)
    kv_cache = raw[:, :kv_bytes].view(torch.float32).unflatten(1, (H, B, 2 * D))
    kv_cache[:2] = 0.0
    for position in range(kept):
        kv_cache[position // B, :, position % B, :D] = keys[position]
    layout = torch.cat([torch.arange(B) * 2 * D, torch.arange(D), torch.arange(B) * 2 * D, D + torch.arange(D)]).int()
    prompt, private = torch.arange(4, dtype=torch.int32).chunk(2)
    all_kept = torch.arange(kept, dtype=torch.int32).repeat(H, 1)
    types = TYPES[torch.float32], TYPES[kt_dtype]
    ops.compact(kv_cache, prompt, private, all_kept, types[0], 1.0, 1.0, kv_bytes, types[1], page_size, True, 0, layout)
    found = raw[2:, kv_bytes:].view(kt_dtype).unflatten(1, (H, D, 2, B // page_size)).float()
    found = found.permute(1, 0, 4, 2, 3).reshape(H, -1, D, 2)  # [H, pages, D, 2]
    full = kept // page_size
    want = reference.page_means(keys, page_size, kt_dtype)[:, :full].float()
    assert torch.equal(found[:, :full], torch.stack([want, want], -1))
    assert found[:, full:].isnan().all()
