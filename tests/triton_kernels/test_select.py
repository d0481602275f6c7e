# SPDX-License-Identifier: Apache-2.0
"""Integers of the order of scores, by which all kernels rank pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.select import sum_keys


@triton.jit
def _sum_keys(x, keys, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(keys + at, sum_keys(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


def keys_of(numbers: list[float] | torch.Tensor) -> torch.Tensor:
    x = torch.as_tensor(numbers, dtype=torch.float32)
    keys = torch.empty(len(x), dtype=torch.int32)
    _sum_keys[(1,)](x, keys, len(x), triton.next_power_of_2(len(x)))
    return keys


def test_keys_of_sums_are_in_their_order() -> None:
    """Of every exponent and both signs, infinities included: none is larger than that of a larger number, those of numbers that
    differ by more than 2^-21 of theirs differ, and all fit the 30 bits that the kernels look at, with one more for 0."""
    mantissas = torch.tensor([0, 1, 5, 1 << 12, (1 << 22) - 3, (1 << 23) - 1])
    codes = ((torch.arange(255) << 23)[:, None] + mantissas).flatten().to(torch.int32)
    magnitudes = torch.cat([codes.view(torch.float32), torch.tensor([torch.inf])]).sort().values
    numbers = torch.cat([-magnitudes.flip(0), magnitudes[1:]])
    keys = keys_of(numbers)
    assert int(keys.min()) >= 0
    assert int(keys.max()) + 1 < 1 << 30
    assert (keys.diff() >= 0).all()
    least = torch.maximum(numbers.abs() * 2.0**-21, torch.tensor(2.0**-147))
    apart = numbers.diff() > torch.maximum(least[1:], least[:-1])
    assert apart.sum() > 1500
    assert (keys.diff()[apart] > 0).all()


def test_zeros_tie_and_what_is_not_a_number_ranks_last() -> None:
    zero, minus_zero, nan, minus_nan, lowest = keys_of([0.0, -0.0, torch.nan, -torch.nan, -torch.inf]).tolist()
    assert zero == minus_zero
    assert nan == minus_nan == -1 < lowest
