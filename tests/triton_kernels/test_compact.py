# SPDX-License-Identifier: Apache-2.0
"""Compaction against torch indexing and the reference: exact copies, bounds of full pages, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.triton_kernels.paged import (
    KT_DTYPES,
    KV_DTYPES,
    PagedCache,
    bound_values,
    make_cache,
    page_bounds,
    random_tokens,
)
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.triton.compact import _constants, compact, compile_cases


def choose(num_tokens: int, num_kv_heads: int, num_kept: int, seed: int = 0) -> torch.Tensor:
    """Other tokens for each head, ascending, int32 ``[Hkv, num_kept]``."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(num_tokens, generator=generator)[:num_kept].sort()[0] for _ in range(num_kv_heads)]
    return torch.stack(chosen).to(torch.int32)


def expected_storage(
    paged: PagedCache, prompt: torch.Tensor, private: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """The whole storage as it should be afterwards, by torch alone."""
    before = paged.storage.clone()
    num_tokens = len(prompt) * paged.view.block_size
    keys, values = paged.read(prompt, num_tokens)
    of_heads = [
        torch.stack([tokens.view(paged.view.kv.dtype)[kept[h].long(), h] for h in range(kept.shape[0])], 1)
        for tokens in (keys, values)
    ]
    keys, values = (codes.view(paged.kv_dtype) for codes in of_heads)
    paged.write(private, keys, values)
    if paged.view.page_size:
        paged.write_kt(private, keys)
    expected = paged.snapshot()
    paged.storage.copy_(before)
    return expected


def check(paged: PagedCache, num_tokens: int, num_kept: int, seed: int = 0, magnitude: float = 1.0) -> None:
    heads, dim = paged.view.num_kv_heads, paged.view.head_size
    keys, values = (random_tokens((num_tokens, heads, dim), paged.kv_dtype, seed + i, magnitude) for i in (1, 2))
    prompt = paged.add(keys, values, with_kt=False)
    private = paged.take_blocks(num_kept + paged.view.block_size)  # one more than is filled
    kept = choose(num_tokens, heads, num_kept, seed)
    expected = expected_storage(paged, prompt, private, kept)
    compact(paged.view, prompt, private, kept)
    assert torch.equal(paged.snapshot(), expected)


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
@pytest.mark.parametrize("is_hnd", [True, False], ids=["hnd", "nhd"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_copies_and_entries(kv_dtype: torch.dtype, head_size: int, is_hnd: bool, is_mean: bool) -> None:
    kt_dtype = torch.float8_e5m2 if kv_dtype.itemsize > 1 else torch.bfloat16
    check(make_cache(12, 2, 16, head_size, kv_dtype, kt_dtype, 4, is_hnd=is_hnd, kt_is_mean=is_mean), 70, 45)


@pytest.mark.parametrize(
    "kt_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32]
)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e5], ids=str)
def test_bounds_are_rounded_outward(kt_dtype: torch.dtype, magnitude: float) -> None:
    """Below the least and beyond the largest number of the KT type, too."""
    paged = make_cache(9, 2, 16, 64, torch.float32, kt_dtype, 2)
    keys, values = (random_tokens((50, 2, 64), torch.float32, seed, magnitude) for seed in (1, 2))
    prompt = paged.add(keys, values, with_kt=False)
    private, kept = paged.take_blocks(48), choose(50, 2, 41)
    compact(paged.view, prompt, private, kept)
    copies = torch.stack([keys[kept[h].long(), h] for h in range(2)], 1)
    expected = page_bounds(copies[:40], 2, kt_dtype)
    for bounds, wanted in zip(paged.kt_entries(private, 20), expected, strict=True):
        assert torch.equal(bound_values(bounds), bound_values(wanted))
    in_pages = copies[:40].view(20, 2, 2, 64).permute(2, 0, 1, 3).double()
    low, high = (bound_values(bounds) for bounds in paged.kt_entries(private, 20))
    limit = 2.0**64 if kt_dtype == torch.bfloat16 else torch.inf
    assert (low <= in_pages.amin(2).clamp(-limit, limit)).all()
    assert (high >= in_pages.amax(2).clamp(-limit, limit)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # of float16, to infinity
@pytest.mark.parametrize("kt_dtype", [*KT_DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e5, 1e30], ids=str)
@pytest.mark.parametrize("page_size", [2, 16])
def test_means_are_those_of_the_reference(kt_dtype: torch.dtype, magnitude: float, page_size: int) -> None:
    """Up to the order in which float32 sums were rounded: to the number itself in all but one of a thousand entries, and to the
    next one, with both slots alike. bfloat16 stops at 2^64."""
    paged = make_cache(9, 2, 16, 64, torch.float32, kt_dtype, page_size, kt_is_mean=True)
    keys, values = (random_tokens((50, 2, 64), torch.float32, seed, magnitude) for seed in (1, 2))
    prompt = paged.add(keys, values, with_kt=False)
    private, kept = paged.take_blocks(48), choose(50, 2, 41)
    compact(paged.view, prompt, private, kept)
    pages = 40 // page_size
    copies = torch.stack([keys[kept[h].long(), h] for h in range(2)], 1)[: pages * page_size]
    low, high = paged.kt_entries(private, pages)
    assert torch.equal(low.view(paged.view.kt.dtype), high.view(paged.view.kt.dtype))
    wanted = reference.page_means(copies, page_size, kt_dtype).double().clamp(-(2.0**64), 2.0**64)
    found = bound_values(low).clamp(-(2.0**64), 2.0**64)
    finite = torch.finfo(kt_dtype)
    torch.testing.assert_close(found, wanted, rtol=finite.eps, atol=finite.smallest_normal * finite.eps)
    assert (found != wanted).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("block_size", "page_size"), [(16, 1), (16, 16), (48, 8), (64, 64), (128, 128), (80, 16), (112, 2)]
)
@pytest.mark.parametrize("num_kept", [1, 63, 128, 205])
@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_any_page_and_block(block_size: int, page_size: int, num_kept: int, is_mean: bool) -> None:
    types = torch.bfloat16, torch.float8_e5m2
    check(make_cache(40, 1, block_size, 64, *types, page_size, kt_is_mean=is_mean), 207, num_kept)


@pytest.mark.parametrize("is_mean", [False, True], ids=["bounds", "mean"])
def test_pages_larger_than_what_is_in_registers(is_mean: bool) -> None:
    paged = make_cache(8, 1, 128, 256, torch.float16, torch.bfloat16, 64, kt_is_mean=is_mean)
    assert _constants(256, 128, 64, 2, 1)["STEPS"] > 1
    check(paged, 300, 260)


def test_without_a_kt_table() -> None:
    check(make_cache(20, 3, 16, 96, torch.float8_e4m3fn, page_size=0), 90, 61)


def test_every_code_is_copied_as_it_is() -> None:
    """NaN with its payload, signed zeros and subnormals: whatever a block holds."""
    paged = make_cache(8, 2, 16, 64, torch.bfloat16, page_size=0)
    prompt, private = paged.take_blocks(64), paged.take_blocks(48)
    generator = torch.Generator().manual_seed(3)
    paged.view.kv[prompt.long()] = torch.randint(-(2**15), 2**15, (4, 2, 16, 128), generator=generator).to(torch.int16)
    kept = choose(64, 2, 40)
    expected = expected_storage(paged, prompt, private, kept)
    compact(paged.view, prompt, private, kept)
    assert torch.equal(paged.snapshot(), expected)


def test_nothing_kept_changes_nothing() -> None:
    paged = make_cache(4, 2, 16, 64)
    before = paged.storage.clone()
    compact(paged.view, paged.take_blocks(16), paged.take_blocks(16), torch.empty(2, 0, dtype=torch.int32))
    assert torch.equal(paged.storage, before)


def test_compile_cases_are_what_is_launched() -> None:
    names = set()
    for case in compile_cases():
        names.add(case.name)
        assert set(case.signature) | set(case.constants) == set(case.kernel.arg_names)
    assert len(names) == len(list(compile_cases()))
