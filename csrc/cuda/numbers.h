// SPDX-License-Identifier: Apache-2.0
// Element types of the cache: how stored numbers become floats, and how bounds are rounded outward. The table of
// kinds is that of kernels/triton/numbers.py.
#pragma once

#include "warp.h"

namespace rocketkv::cuda {

enum class Kind : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3, kFloat8E5M2 = 4 };

ROCKETKV_BOTH constexpr int SizeOf(Kind kind) {
  return kind == Kind::kFloat32 ? 4 : kind == Kind::kBFloat16 || kind == Kind::kFloat16 ? 2 : 1;
}

// Multiplying by 2^112 makes up for the exponent's bias, in subnormals as well.
ROCKETKV_DEVICE float HalfToFloat(uint32_t half) {
  const float magnitude = FloatOf((half & 0x7fffu) << 13) * 5.192296858534828e+33f;
  const uint32_t infinite = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return FloatOf(BitsOf(magnitude) | infinite | (half & 0x8000u) << 16);
}

// The value of a stored code; exact.
template <Kind kKind>
ROCKETKV_DEVICE float Decode(uint32_t code) {
  if constexpr (kKind == Kind::kFloat32) return FloatOf(code);
  if constexpr (kKind == Kind::kBFloat16) return FloatOf(code << 16);
  if constexpr (kKind == Kind::kFloat16) return HalfToFloat(code);
  if constexpr (kKind == Kind::kFloat8E5M2) return HalfToFloat(code << 8);
  if constexpr (kKind == Kind::kFloat8E4M3) {
    const float magnitude = FloatOf((code & 0x7fu) << 20) * 1.329227995784916e+36f;  // 2^120
    const uint32_t nan = (code & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
    return FloatOf(BitsOf(magnitude) | nan | (code & 0x80u) << 24);
  }
}

// The code of the least representable number >= x if `up`, else of the greatest <= x.
//
// The magnitude is truncated, and 1 added to its code where that rounded inward: codes of one sign are in the order of
// their magnitudes, and infinity (float8_e4m3fn has none: its NaN stands for it) follows the largest finite number.
// bfloat16, which has every float's range, stops at +-2^64: what the estimation counts anything larger as.
ROCKETKV_DEVICE uint32_t EncodeBound(Kind kind, float x, bool up) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffffu;
  if (kind == Kind::kFloat32) return bits;
  const bool is_negative = bits >> 31, is_outward = is_negative != up;  // away from zero
  uint32_t code, sign, largest;
  bool is_exact;
  if (kind == Kind::kBFloat16) {
    code = magnitude >> 16;
    is_exact = (magnitude & 0xffffu) == 0;
    sign = 0x8000u;
    largest = 0x5f80u;
  } else {
    const int mantissa = kind == Kind::kFloat16 ? 10 : kind == Kind::kFloat8E4M3 ? 3 : 2;
    const int bias = kind == Kind::kFloat8E4M3 ? 7 : 15, shift = 23 - mantissa;
    if (magnitude >= uint32_t(128 - bias) << 23) {
      code = (magnitude >> shift) - (uint32_t(127 - bias) << mantissa);
      is_exact = (magnitude & ((1u << shift) - 1)) == 0;
    } else {  // subnormals are multiples of the least one, which is 2^-(bias - 1 + mantissa)
      const float multiples = FloatOf(magnitude) * FloatOf(uint32_t(127 + bias - 1 + mantissa) << 23);
      code = uint32_t(multiples);
      is_exact = float(code) == multiples;
    }
    sign = kind == Kind::kFloat16 ? 0x8000u : 0x80u;
    largest = kind == Kind::kFloat16 ? 0x7c00u : kind == Kind::kFloat8E4M3 ? 0x7fu : 0x7cu;
    if (!is_outward && magnitude < 0x7f800000u) --largest;  // finite numbers rounded inward stay finite
  }
  if (is_outward && !is_exact) ++code;
  if (code > largest) code = largest;
  return is_negative ? code | sign : code;
}

}  // namespace rocketkv::cuda
