// SPDX-License-Identifier: Apache-2.0
// A vector of floats as wide as the instruction set this file is compiled for, and what the kernels do with it.
//
// Compiled once for each instruction set, each time inside a namespace of its own (ROCKETKV_ISA), so that the linker
// can never let one build's code stand in for another's. For the same reason nothing here uses templates of std.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "common.h"

#define ROCKETKV_INLINE static inline __attribute__((always_inline))

namespace rocketkv {
namespace ROCKETKV_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2, NEON, or whatever the compiler makes of it
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16Vec __attribute__((vector_size(kLanes * 2)));
typedef uint8_t U8Vec __attribute__((vector_size(kLanes)));

// ------------------------------------------------------------------------------------------------ storage types

struct Float32 {
  float bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <class A, class B>
ROCKETKV_INLINE A Bits(B b) {
  static_assert(sizeof(A) == sizeof(B));
  A a;
  __builtin_memcpy(&a, &b, sizeof(a));
  return a;
}

ROCKETKV_INLINE Vec Splat(float x) { return x - Vec{}; }
ROCKETKV_INLINE UVec USplat(uint32_t x) { return x - UVec{}; }
ROCKETKV_INLINE Vec Select(IVec mask, Vec a, Vec b) { return mask ? a : b; }
ROCKETKV_INLINE Vec Max(Vec a, Vec b) { return Select(a > b, a, b); }
ROCKETKV_INLINE Vec Min(Vec a, Vec b) { return Select(a < b, a, b); }
ROCKETKV_INLINE float MaxF(float a, float b) { return a > b ? a : b; }
ROCKETKV_INLINE int64_t MinI(int64_t a, int64_t b) { return a < b ? a : b; }
ROCKETKV_INLINE int64_t MaxI(int64_t a, int64_t b) { return a > b ? a : b; }
ROCKETKV_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class V>
ROCKETKV_INLINE V LoadBits(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

ROCKETKV_INLINE void Store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
ROCKETKV_INLINE Vec Load(const float* p) { return LoadBits<Vec>(p); }
ROCKETKV_INLINE Vec Load(const Float32* p) { return LoadBits<Vec>(p); }
ROCKETKV_INLINE Vec Load(const BFloat16* p) {
  return Bits<Vec>(__builtin_convertvector(LoadBits<U16Vec>(p), UVec) << 16);
}

// Widens bits of float16 that sit in the low half of each lane.
ROCKETKV_INLINE Vec WidenHalf(UVec h) {
  const UVec magnitude = (h & 0x7fffu) << 13;
  // The exponent's bias differs by 112; multiplying by it is right for subnormals, too.
  Vec value = Bits<Vec>(magnitude) * Splat(5.192296858534828e+33f);  // 2^112
  const UVec infinite = (h & 0x7c00u) == 0x7c00u ? USplat(0x7f800000u) : USplat(0u);
  return Bits<Vec>(Bits<UVec>(value) | infinite | ((h & 0x8000u) << 16));
}

ROCKETKV_INLINE Vec Load(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(LoadBits<__m256i>(p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(LoadBits<__m128i>(p));
#else
  return WidenHalf(__builtin_convertvector(LoadBits<U16Vec>(p), UVec));
#endif
}
ROCKETKV_INLINE Vec Load(const Float8E5M2* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(LoadBits<__m128i>(p)), 8));
#else
  return WidenHalf(__builtin_convertvector(LoadBits<U8Vec>(p), UVec) << 8);
#endif
}
ROCKETKV_INLINE Vec Load(const Float8E4M3* p) {
  const UVec b = __builtin_convertvector(LoadBits<U8Vec>(p), UVec);
  const Vec value = Bits<Vec>((b & 0x7fu) << 20) * Splat(1.329227995784916e+36f);  // 2^120
  const UVec nan = (b & 0x7fu) == 0x7fu ? USplat(0x7fc00000u) : USplat(0u);
  return Bits<Vec>(Bits<UVec>(value) | nan | ((b & 0x80u) << 24));
}

// One value. The same results as the vectors above.
ROCKETKV_INLINE float ToFloat(Float32 x) { return x.bits; }
ROCKETKV_INLINE float ToFloat(BFloat16 x) { return Bits<float>(uint32_t{x.bits} << 16); }
ROCKETKV_INLINE float HalfToFloat(uint32_t h) {
  const float value = Bits<float>((h & 0x7fffu) << 13) * 5.192296858534828e+33f;
  const uint32_t infinite = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return Bits<float>(Bits<uint32_t>(value) | infinite | ((h & 0x8000u) << 16));
}
ROCKETKV_INLINE float ToFloat(Float16 x) { return HalfToFloat(x.bits); }
ROCKETKV_INLINE float ToFloat(Float8E5M2 x) { return HalfToFloat(uint32_t{x.bits} << 8); }
ROCKETKV_INLINE float ToFloat(Float8E4M3 x) {
  const uint32_t b = x.bits;
  const float value = Bits<float>((b & 0x7fu) << 20) * 1.329227995784916e+36f;
  const uint32_t nan = (b & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
  return Bits<float>(Bits<uint32_t>(value) | nan | ((b & 0x80u) << 24));
}

// Round to nearest, ties to even; beyond the largest number to infinity (float8_e4m3fn, which has none: to its largest).
ROCKETKV_INLINE void FromFloat(float x, Float32* out) { out->bits = x; }
ROCKETKV_INLINE void FromFloat(float x, BFloat16* out) {
  const uint32_t u = Bits<uint32_t>(x);
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  out->bits = is_nan ? uint16_t((u >> 16) | 0x40) : uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
// Rounds |x| to `mantissa` bits with an exponent of `bias`; returns the bits of magnitude, subnormals included.
ROCKETKV_INLINE uint32_t RoundMagnitude(float magnitude, int mantissa, int bias) {
  const int shift = 23 - mantissa;
  const float smallest_normal = Bits<float>(uint32_t(127 - bias + 1) << 23);
  if (magnitude < smallest_normal) {  // adding a constant lets the FPU round at the last subnormal bit
    const float magic = Bits<float>(uint32_t(127 - bias + 1 + shift) << 23);
    return Bits<uint32_t>(magnitude + magic) - Bits<uint32_t>(magic);
  }
  const uint32_t u = Bits<uint32_t>(magnitude);
  return (u + ((1u << (shift - 1)) - 1) + ((u >> shift) & 1) - (uint32_t(127 - bias) << 23)) >> shift;
}
ROCKETKV_INLINE uint32_t FloatToHalf(float x) {
  const uint32_t u = Bits<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  const uint32_t bits = magnitude >= 0x477ff000u ? 0x7c00u : RoundMagnitude(Bits<float>(magnitude), 10, 15);
  return sign | bits;
}
ROCKETKV_INLINE void FromFloat(float x, Float16* out) { out->bits = uint16_t(FloatToHalf(x)); }
ROCKETKV_INLINE void FromFloat(float x, Float8E5M2* out) {
  const uint32_t u = Bits<uint32_t>(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = uint8_t(sign | 0x7fu);
  } else {  // 61440 lies halfway between the largest number and where the next would be
    out->bits = uint8_t(sign | (magnitude >= 0x47700000u ? 0x7cu : RoundMagnitude(Bits<float>(magnitude), 2, 15)));
  }
}
ROCKETKV_INLINE void FromFloat(float x, Float8E4M3* out) {
  const uint32_t u = Bits<uint32_t>(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = uint8_t(sign | 0x7fu);
  } else {
    out->bits = uint8_t(sign | (magnitude >= 0x43e00000u ? 0x7eu : RoundMagnitude(Bits<float>(magnitude), 3, 7)));
  }
}

// ------------------------------------------------------------------------------------------------ outward rounding

// The largest value of the type that is <= x, and the smallest that is >= x (I8: a page's bounds bound its keys).
template <class T>
ROCKETKV_INLINE T RoundOutward(float x, bool up) {
  T out;
  FromFloat(x, &out);
  const float rounded = ToFloat(out);
  const bool is_wrong = up ? rounded < x : rounded > x;
  // Magnitude and sign: one more in the bits is one step away from zero.
  const bool is_away = up ? x > 0 : x < 0;
  if (is_wrong) out.bits = is_away ? out.bits + 1 : out.bits - 1;
  return out;
}
template <>
inline Float32 RoundOutward<Float32>(float x, bool) {
  return Float32{x};
}
template <>
inline BFloat16 RoundOutward<BFloat16>(float x, bool up) {
  const uint32_t u = Bits<uint32_t>(x);
  const bool is_away = up == ((u >> 31) == 0);
  return BFloat16{uint16_t((u >> 16) + ((u & 0xffffu) != 0 && is_away ? 1 : 0))};
}

// ------------------------------------------------------------------------------------------------ arithmetic

ROCKETKV_INLINE Vec Fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Rounds as the vectors do, so that a page's score does not depend on which loop computes it.
ROCKETKV_INLINE float Fma(float a, float b, float c) {
#if defined(__AVX2__) && defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#define ROCKETKV_EVEN4(b) b, b + 2, b + 4, b + 6
// Lane i of the result is the sum of lanes 2i and 2i + 1 of a followed by b.
ROCKETKV_INLINE Vec AddNeighbours(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, ROCKETKV_EVEN4(0), ROCKETKV_EVEN4(8), ROCKETKV_EVEN4(16), ROCKETKV_EVEN4(24)) +
         __builtin_shufflevector(a, b, ROCKETKV_EVEN4(1), ROCKETKV_EVEN4(9), ROCKETKV_EVEN4(17), ROCKETKV_EVEN4(25));
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, ROCKETKV_EVEN4(0), ROCKETKV_EVEN4(8)) +
         __builtin_shufflevector(a, b, ROCKETKV_EVEN4(1), ROCKETKV_EVEN4(9));
#else
  return __builtin_shufflevector(a, b, ROCKETKV_EVEN4(0)) + __builtin_shufflevector(a, b, ROCKETKV_EVEN4(1));
#endif
}

// Lane i of the result is the sum of the lanes of v[i]; v [kLanes] is destroyed.
ROCKETKV_INLINE Vec SumEach(Vec* v) {
#pragma GCC unroll 4
  for (int n = kLanes; n > 1; n /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) v[i] = AddNeighbours(v[2 * i], v[2 * i + 1]);
  }
  return v[0];
}

ROCKETKV_INLINE float Sum(Vec v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}
ROCKETKV_INLINE float MaxLane(Vec v) {
  float max = v[0];
  for (int i = 1; i < kLanes; ++i) max = MaxF(max, v[i]);
  return max;
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87.
ROCKETKV_INLINE Vec Exp(Vec x) {
  const IVec is_tiny = x < Splat(-87.0f);
  const Vec clamped = Select(is_tiny, Splat(-87.0f), x);
  const Vec magic = Splat(12582912.0f);  // 1.5 * 2^23: adding and taking it away rounds to an integer
  const Vec shifted = Fma(clamped, Splat(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  const Vec r = Fma(n, Splat(-1.42860677e-6f), Fma(n, Splat(-0.693145752f), clamped));
  Vec p = Splat(1.9875691500e-4f);
  p = Fma(p, r, Splat(1.3981999507e-3f));
  p = Fma(p, r, Splat(8.3334519073e-3f));
  p = Fma(p, r, Splat(4.1665795894e-2f));
  p = Fma(p, r, Splat(1.6666665459e-1f));
  p = Fma(p, r, Splat(5.0000001201e-1f));
  p = Fma(p, r * r, r + Splat(1.0f));
  const Vec power = Bits<Vec>((Bits<UVec>(shifted) << 23) + USplat(0x3f800000u));
  return Select(is_tiny, Splat(0.0f), p * power);
}

ROCKETKV_INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
