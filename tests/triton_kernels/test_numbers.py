# SPDX-License-Identifier: Apache-2.0
"""Number formats of the Triton kernels against torch and the reference: every code's value, rounding outward and to nearest."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_kernels.paged import LARGEST, bound_values, round_to_e4m3
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.triton.numbers import (
    CODES,
    KINDS,
    decode_bound,
    decode_number,
    encode_bound,
    encode_mean,
    encode_number,
)

DTYPES = list(KINDS)
BOUND_DTYPES = [dtype for dtype in DTYPES if dtype != torch.float32]
FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _decode(codes, out, n, IS_BOUND: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    code = tl.load(codes + at, mask=at < n, other=0)
    if IS_BOUND:
        tl.store(out + at, decode_bound(code, KIND), mask=at < n)
    else:
        tl.store(out + at, decode_number(code, KIND), mask=at < n)


@triton.jit
def _encode(x, nearest, low, high, mean, n, KIND: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    number = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(nearest + at, encode_number(number, KIND), mask=at < n)
    tl.store(low + at, encode_bound(number, False, KIND), mask=at < n)
    tl.store(high + at, encode_bound(number, True, KIND), mask=at < n)
    tl.store(mean + at, encode_mean(number, KIND), mask=at < n)


def decode(codes: torch.Tensor, kind: int, is_bound: bool = False) -> torch.Tensor:
    out = torch.empty(len(codes))
    _decode[(triton.cdiv(len(codes), 4096),)](codes, out, len(codes), is_bound, kind, 4096)
    return out


def encode(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """``x`` rounded to nearest, down and up, and as a mean, as ``dtype``."""
    codes = torch.empty(4, len(x), dtype=torch.int32)
    size = triton.next_power_of_2(min(len(x), 4096))
    _encode[(triton.cdiv(len(x), size),)](x, *codes, len(x), KINDS[dtype], size)
    width = dtype.itemsize * 8
    assert width == 32 or (codes >= 0).logical_and(codes < 2**width).all(), "a code has bits beyond its width"
    return [code.to(CODES[KINDS[dtype]]).view(dtype) for code in codes]


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:  # every sign, exponent and edge of the mantissa
        top = torch.arange(512)[:, None] << 23
        codes = (top + torch.tensor([0, 1, 2**22, 2**23 - 1])).flatten()
        return codes.to(torch.int32)
    return torch.arange(2 ** (8 * dtype.itemsize)).to(CODES[KINDS[dtype]])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, but for the payload of NaN."""
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(a[~is_nan].view(torch.int32), b[~is_nan].view(torch.int32))


def finite_numbers() -> torch.Tensor:
    """Float32 of many magnitudes, and those at which rounding is most easily wrong, of both signs."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-46, 38, (3000,), generator=generator)
    powers = torch.tensor([2.0**e for e in range(-149, 128)])
    edges = [448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65520.0, 65536.0, LARGEST, 3.3895e38, 3.4028e38]
    of_types = [all_codes(dtype).view(dtype).float() for dtype in FP8_LARGEST]
    of_types.append(torch.arange(0x7C00, dtype=torch.int16)[::13].view(torch.float16).float())
    points = torch.cat([powers, torch.tensor(edges), *of_types])
    points = points[points.isfinite()].abs()
    halfway = (points[:, None] * torch.tensor([1 + 2.0**-k for k in range(2, 13)])).flatten()
    points = torch.cat([points, halfway, spread.abs()])
    neighbours = [torch.nextafter(points, torch.tensor(end)) for end in (0.0, torch.inf)]
    magnitudes = torch.cat([torch.zeros(1), points, *neighbours])
    magnitudes = magnitudes[magnitudes.isfinite()].unique()
    return torch.cat([magnitudes, -magnitudes])


def bounds_of(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a KT table of ``dtype`` should hold for minima and maxima ``x``."""
    if dtype == torch.float8_e4m3fn:
        return round_to_e4m3(x, up=False), round_to_e4m3(x, up=True)
    if dtype == torch.bfloat16:
        x = x.clamp(-LARGEST, LARGEST)
    return reference.round_down(x, dtype), reference.round_up(x, dtype)


def nearest_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """vLLM's CUDA op: torch's rounding, but fp8 saturates."""
    if dtype in FP8_LARGEST:
        x = x.clamp(-FP8_LARGEST[dtype], FP8_LARGEST[dtype])
    return x.to(dtype)


def check_rounding(x: torch.Tensor, dtype: torch.dtype) -> None:
    nearest, *bounds, mean = encode(x, dtype)
    assert same(nearest.float(), nearest_of(x, dtype).float())
    assert same(mean.float(), x.clamp(-LARGEST, LARGEST).to(dtype).float())
    for bound, expected in zip(bounds, bounds_of(x, dtype), strict=True):
        wrong = bound_values(bound) != bound_values(expected)
        assert not wrong.any(), (x[wrong][:4], bound[wrong][:4], expected[wrong][:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_decodes_to_torchs_value(dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    assert same(decode(codes, KINDS[dtype]), codes.view(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bound_decodes_to_at_most_2_to_the_64(dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    values = bound_values(codes.view(dtype))
    codes, values = codes[~values.isnan()], values[~values.isnan()]
    assert torch.equal(decode(codes, KINDS[dtype], is_bound=True).double(), values.clamp(-LARGEST, LARGEST))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_to_itself(dtype: torch.dtype) -> None:
    numbers = all_codes(dtype).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    if dtype == torch.bfloat16:
        numbers = numbers[numbers.abs() <= LARGEST]
    *others, mean = encode(numbers, dtype)
    for rounded in others:
        assert same(rounded.float(), numbers)
    assert same(mean.float(), numbers.clamp(-LARGEST, LARGEST))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_numbers_are_rounded_outward_and_to_nearest(dtype: torch.dtype) -> None:
    check_rounding(finite_numbers(), dtype)


@pytest.mark.parametrize("dtype", BOUND_DTYPES, ids=str)
@settings(max_examples=40)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16))
def test_any_finite_number_is_rounded_outward_and_to_nearest(dtype: torch.dtype, numbers: list[float]) -> None:
    check_rounding(torch.tensor(numbers), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_keys_have_bounds(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf])
    _, low, high, mean = encode(x, dtype)
    largest = LARGEST if dtype == torch.bfloat16 else torch.inf
    assert bound_values(low)[1] == -largest
    assert bound_values(high)[0] == largest
    assert bound_values(low)[0] > 0, "the greatest number or infinity"
    assert bound_values(high)[1] < 0
    assert same(mean.float(), x.clamp(-LARGEST, LARGEST).to(dtype).float())


@pytest.mark.parametrize("dtype", FP8_LARGEST, ids=str)
def test_fp8_keeps_nan_and_saturates_infinity(dtype: torch.dtype) -> None:
    nearest, *_ = encode(torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]), dtype)
    assert nearest[0].isnan()
    largest = FP8_LARGEST[dtype]
    assert nearest[1:].float().tolist() == [largest, -largest, largest]
