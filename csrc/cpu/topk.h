// SPDX-License-Identifier: Apache-2.0
// The best k of n scores, ascending by index, with one tie rule: higher score first, then lower index.
//
// Selection by threshold: floats that are not negative order as their bits do, so a bisection over the bits finds the
// k-th largest score in at most 31 passes over the scores, each of them one compare and one add per vector.
#pragma once

#include "simd.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

// What ranks last: NaN is to be replaced by it before SelectTop. Below zero as an integer, too.
constexpr float kWorstScore = -1.0f;

// Makes any scores fit for SelectTop where numbers are never negative: NaN (and what is negative) ranks last.
inline void WorstForNan(float* scores, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = Load(scores + i);
    Store(scores + i, Select(v >= Splat(0.0f), v + Splat(0.0f), Splat(kWorstScore)));  // -0 + 0 = 0
  }
  for (; i < n; ++i) scores[i] = scores[i] >= 0.0f ? scores[i] + 0.0f : kWorstScore;
}

ROCKETKV_INLINE IVec ScoreBits(const float* p) { return LoadBits<IVec>(p); }
ROCKETKV_INLINE IVec ISplat(int32_t x) { return x - IVec{}; }

// How many scores have bits >= threshold.
ROCKETKV_INLINE int CountAtLeast(const float* scores, int n, int32_t threshold) {
  const IVec t = ISplat(threshold);
  IVec a{}, b{}, c{}, d{};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a -= ScoreBits(scores + i) >= t;
    b -= ScoreBits(scores + i + kLanes) >= t;
    c -= ScoreBits(scores + i + 2 * kLanes) >= t;
    d -= ScoreBits(scores + i + 3 * kLanes) >= t;
  }
  for (; i + kLanes <= n; i += kLanes) a -= ScoreBits(scores + i) >= t;
  const IVec sum = (a + b) + (c + d);
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += sum[lane];
  for (; i < n; ++i) count += Bits<int32_t>(scores[i]) >= threshold;
  return count;
}

// Writes the indices of the best min(k, n) of `scores` [n] to `index_out`, ascending, and returns how many those are.
// Writes nothing beyond them.
//
// Scores: 0 and above, +infinity included, and kWorstScore. Anything else (NaN, -0, other negative numbers) ranks
// wrongly: see WorstForNan.
inline int SelectTop(const float* scores, int n, int k, int32_t* index_out) {
  if (k >= n) {
    for (int i = 0; i < n; ++i) index_out[i] = i;
    return n > 0 ? n : 0;
  }
  if (k <= 0) return 0;

  // At least k scores are >= low, and num_high < k are >= high.
  int32_t low, high;
  int num_high = 0;
  {
    IVec smallest = ISplat(INT32_MAX), largest = ISplat(INT32_MIN);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const IVec bits = ScoreBits(scores + i);
      smallest = bits < smallest ? bits : smallest;
      largest = bits > largest ? bits : largest;
    }
    low = INT32_MAX;
    high = INT32_MIN;
    for (int lane = 0; lane < kLanes; ++lane) {
      low = smallest[lane] < low ? smallest[lane] : low;
      high = largest[lane] > high ? largest[lane] : high;
    }
    for (; i < n; ++i) {
      const int32_t bits = Bits<int32_t>(scores[i]);
      low = bits < low ? bits : low;
      high = bits > high ? bits : high;
    }
    ++high;  // no overflow: infinity is not the largest integer
  }
  int num_level = -1;  // of the scores that are `low`, how many are chosen; -1: all
  while (true) {
    const uint32_t distance = uint32_t(high) - uint32_t(low);
    if (distance <= 1) {
      num_level = k - num_high;
      break;
    }
    const int32_t middle = int32_t(uint32_t(low) + distance / 2);
    const int count = CountAtLeast(scores, n, middle);
    if (count >= k) {
      low = middle;
      if (count == k) break;
    } else {
      high = middle;
      num_high = count;
    }
  }

  int32_t above = low;  // scores with bits >= above are chosen; `low` itself no more once num_level of it are
  int chosen = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + kLanes <= n && chosen < k; i += kLanes) {
    const __m512i bits = _mm512_loadu_si512(scores + i);
    uint32_t mask = _mm512_cmp_epi32_mask(bits, _mm512_set1_epi32(above), _MM_CMPINT_NLT);
    if (mask == 0) continue;
    if (num_level >= 0 && above == low) {
      uint32_t level = _mm512_cmp_epi32_mask(bits, _mm512_set1_epi32(low), _MM_CMPINT_EQ);
      const int num = __builtin_popcount(level);
      if (num <= num_level) {
        num_level -= num;
      } else {
        for (; num_level > 0; --num_level) level &= level - 1;  // the lowest ones stay
        mask &= ~level;
        above = low + 1;
      }
    }
    const __m512i index = _mm512_maskz_compress_epi32(__mmask16(mask), _mm512_add_epi32(lanes, _mm512_set1_epi32(i)));
    const int num = __builtin_popcount(mask);
    if (chosen + kLanes <= k) {
      _mm512_storeu_si512(index_out + chosen, index);
    } else {
      _mm512_mask_storeu_epi32(index_out + chosen, __mmask16((1u << num) - 1), index);
    }
    chosen += num;
  }
#endif
  for (; i < n && chosen < k; ++i) {
    const int32_t bits = Bits<int32_t>(scores[i]);
    bool is_chosen = bits >= above;
    if (num_level >= 0 && above == low && bits == low) {
      is_chosen = num_level > 0;
      if (is_chosen) --num_level;
    }
    index_out[chosen] = i;
    chosen += is_chosen;
  }
  return chosen;
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
