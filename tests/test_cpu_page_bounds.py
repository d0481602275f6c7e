# SPDX-License-Identifier: Apache-2.0
"""The bounds that ``summarise_pages``, ``compact`` and with them the decode op store, for each instruction set (I8)."""

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


@pytest.mark.parametrize("kt_dtype", KT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", KV_TYPES, ids=str)
def test_every_number_is_bounded_and_tightly(dtype: torch.dtype, kt_dtype: torch.dtype) -> None:
    """By ``summarise_pages`` and by ``compact``, whose rounding the decode op shares; pages of one token."""
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
    ops.summarise_pages(kv_cache, pages, types[0], kv_bytes, types[1], 1, layout)
    prompt, private = torch.arange(2 * num_blocks, dtype=torch.int32).chunk(2)
    kept = torch.arange(num_blocks * B, dtype=torch.int32)[None]
    ops.compact(kv_cache, prompt, private, kept, types[0], 1.0, 1.0, kv_bytes, types[1], 1, layout)
    bounds = raw[:, kv_bytes:].view(kt_dtype).unflatten(1, (D, 2, B)).double().transpose(1, 3)  # [blocks, B, 2, D]
    low, high = (reference_round(keys, kt_dtype).double() for reference_round in ROUNDINGS)
    largest = 2.0**64 if kt_dtype == torch.bfloat16 else torch.inf
    for found in bounds.chunk(2):
        assert torch.equal(found[:, :, 0].flatten(), low.clamp(-largest, largest))
        assert torch.equal(found[:, :, 1].flatten(), high.clamp(-largest, largest))


ROUNDINGS = reference.round_down, reference.round_up


@pytest.mark.parametrize("case", [case for case in CASES if case.native], ids=str)
def test_summarise_pages_bounds_full_native_pages_and_writes_nothing_else(case: Case) -> None:
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
    kt = step.kt_offset, TYPES[case.kt_dtype], case.page_size
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ops.summarise_pages(layer.kv_cache, table, TYPES[case.dtype], *kt, step.native_layout)
        assert_bytes(step, layer.bytes)
        step.kt(layer.bytes).view(torch.uint8).fill_(255)
