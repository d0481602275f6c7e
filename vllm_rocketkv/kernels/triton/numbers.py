# SPDX-License-Identifier: Apache-2.0
"""Element types of the cache inside Triton kernels: how stored numbers become float32, and how they are rounded.

A stored number is an integer code of its width, so that every type goes through the same instructions on every GPU (sm_80 has no
conversions for fp8 e4m3) and in Triton's interpreter:

====  ===============  ==========  =====================================================================
kind  type             code        beyond the largest finite number
====  ===============  ==========  =====================================================================
0     float32          int32       infinity
1     bfloat16         int16       infinity
2     float16          int16       infinity
3     float8_e4m3fn    uint8       as a KT bound its NaN code stands for infinity, which the type lacks
4     float8_e5m2      uint8       infinity
====  ===============  ==========  =====================================================================

The numbers of the kinds are those of ``kernels/cpu.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
CODES = {0: torch.int32, 1: torch.int16, 2: torch.int16, 3: torch.uint8, 4: torch.uint8}
"""Integer types that the kernels read and write the kinds as."""

LARGEST = tl.constexpr(1.8446744073709552e19)
"""2^64: what an infinite KT bound counts as, so that sums stay finite (``kernels/reference.py``, ``hsa_scores``)."""


@triton.jit
def decode_number(code, KIND: tl.constexpr):
    """Float32 values of stored codes; exact."""
    if KIND == 0:
        return code.to(tl.float32, bitcast=True)
    elif KIND == 1:
        return ((code.to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    elif KIND == 2:
        return code.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == 3:
        # The bits of a float16 that is 2^8 too small, subnormals included; NaN is the one code that does not carry over.
        bits = code.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = half.to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    else:
        return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_bound(code, KIND: tl.constexpr):
    """Float32 values of KT codes; infinite bounds count as +-2^64."""
    number = decode_number(code, KIND)
    if KIND == 3:
        infinity = tl.where(code.to(tl.int16) >= 0x80, -LARGEST, LARGEST)
        number = tl.where(number != number, infinity, number)
    return tl.minimum(tl.maximum(number, -LARGEST), LARGEST)


@triton.jit
def encode_bound(x, UP: tl.constexpr, KIND: tl.constexpr):
    """KT codes (int32) of float32 ``x``: the least representable number >= ``x`` if ``UP``, else the greatest <= ``x``.

    The magnitude is truncated, and one is added to its code where that rounded inward: codes of one sign are in the order of
    their magnitudes, and infinity follows the largest finite number. bfloat16 bounds stop at +-2^64 (as ``csrc/cpu`` has it).
    """
    bits = x.to(tl.int32, bitcast=True)
    negative = bits < 0
    magnitude = bits & 0x7FFFFFFF
    if KIND == 0:
        return bits
    if KIND == 1:
        code = magnitude >> 16
        exact = (magnitude & 0xFFFF) == 0
        sign = 0x8000
        largest = 0x5F80  # 2^64
    elif KIND == 2:
        code, exact = _truncate(magnitude, 10, 15)
        sign = 0x8000
        largest = 0x7C00
    elif KIND == 3:
        code, exact = _truncate(magnitude, 3, 7)
        sign = 0x80
        largest = 0x7F
    else:
        code, exact = _truncate(magnitude, 2, 15)
        sign = 0x80
        largest = 0x7C
    outward = negative != UP  # away from zero
    code = tl.where(outward & ~exact, code + 1, code)
    if KIND != 1:
        # An inward rounding of what is beyond the range stops at the largest finite number, unless it is infinite itself.
        largest = tl.where(outward | (magnitude == 0x7F800000), largest, largest - 1)
    code = tl.minimum(code, largest)
    return tl.where(negative, code | sign, code)


@triton.jit
def _truncate(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Code of float32 magnitude bits, truncated to a type with so many mantissa bits and such a bias; whether it is exact."""
    shift: tl.constexpr = 23 - MANTISSA
    normal = (magnitude >> shift) - ((127 - BIAS) << MANTISSA)
    scaled = magnitude.to(tl.float32, bitcast=True) * (2.0 ** (BIAS - 1 + MANTISSA))
    is_normal = magnitude >= ((128 - BIAS) << 23)
    subnormal = tl.where(is_normal, 0.0, scaled).to(tl.int32)
    exact = tl.where(is_normal, (magnitude & ((1 << shift) - 1)) == 0, subnormal.to(tl.float32) == scaled)
    return tl.where(is_normal, normal, subnormal), exact


@triton.jit
def encode_number(x, KIND: tl.constexpr, SATURATES: tl.constexpr = True):
    """Codes (int32) of float32 ``x`` rounded to nearest, ties to even.

    Too large for float16 or bfloat16 is infinity; too large for fp8 is the largest finite number, infinity included, as vLLM's
    CUDA op has it. (``csrc/cpu`` makes infinity of what e5m2 cannot hold, as torch does, and this where not ``SATURATES``.)
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if KIND == 0:
        return bits
    elif KIND == 1:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return tl.where(is_nan, 0x7FC0, rounded) | ((bits >> 16) & 0x8000)
    elif KIND == 2:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        if KIND == 3:
            code = tl.minimum(_round_magnitude(magnitude, 3, 7), 0x7E)
        else:
            code = tl.minimum(_round_magnitude(magnitude, 2, 15), 0x7B if SATURATES else 0x7C)
        return tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def _round_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Code of float32 magnitude bits in a type with so many mantissa bits and such a bias, as if its exponents had no end."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding half of the last place, less one where that place is even, carries exactly when it must.
    normal = magnitude - ((127 - BIAS) << 23)
    normal = (normal + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    # The last place of 2^(SHIFT + 1 - BIAS) in float32 is the least subnormal of the type: addition itself rounds to it.
    least = tl.full(magnitude.shape, 2.0 ** (SHIFT + 1 - BIAS), tl.float32)
    sum_of = magnitude.to(tl.float32, bitcast=True) + least
    subnormal = sum_of.to(tl.int32, bitcast=True) - least.to(tl.int32, bitcast=True)
    return tl.where(magnitude >= ((128 - BIAS) << 23), normal, subnormal)


@triton.jit
def encode_mean(x, KIND: tl.constexpr):
    """KT codes (int32) of a page's mean, float32 ``x``, rounded to nearest. It stops at +-2^64, or where the type does: e4m3 at
    its largest number, as torch has it, the others at infinity."""
    return encode_number(tl.minimum(tl.maximum(x, -LARGEST), LARGEST), KIND, KIND == 3)


def as_codes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage as integer codes; same shape and strides."""
    return tensor.view(CODES[KINDS[tensor.dtype]])
