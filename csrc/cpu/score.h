// SPDX-License-Identifier: Apache-2.0
// Stage 1, first half: how much the window's queries attend to each key of the prompt, and which tokens to keep
// (arXiv 2502.14051, section 3.3; the formulas are in vllm_rocketkv/kernels/reference.py, window_scores).
//
// Softmax needs its denominator first, so the logits are computed twice: once for maximum and sum, once for the
// weights. A tile of keys is widened and transposed once for all rows, so that a dot product runs down a vector of
// tokens: equal keys get equal logits and equal scores, wherever they lie.
#pragma once

#include "simd.h"
#include "stage1.h"
#include "topk.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

constexpr int kTokensAtOnce = 16;                      // of one block: block sizes are multiples of it
constexpr int kVecsPerStep = kLanes == 16 ? 4 : 2;      // what a block of rows times vectors holds in registers
constexpr int kTileVecs = kTileTokens / kLanes;
constexpr float kLowestLogit = -3.402823466e+38f;      // finite: a difference of two of them is 0, not NaN
static_assert(kTileVecs % kVecsPerStep == 0 && kTokensAtOnce % kLanes == 0 && kLanes <= kMaxLanes);

// tanh, within 3e-7 relative.
ROCKETKV_INLINE Vec Tanh(Vec x) {
  const Vec magnitude = Bits<Vec>(Bits<UVec>(x) & 0x7fffffffu);
  const Vec square = x * x;
  Vec series = Splat(62.0f / 2835.0f);
  series = Fma(series, square, Splat(-17.0f / 315.0f));
  series = Fma(series, square, Splat(2.0f / 15.0f));
  series = Fma(series, square, Splat(-1.0f / 3.0f));
  series = Fma(series * square, x, x);
  const Vec e = Exp(magnitude * Splat(-2.0f));
  const Vec quotient = (Splat(1.0f) - e) / (Splat(1.0f) + e);
  const Vec with_sign = Bits<Vec>(Bits<UVec>(quotient) | (Bits<UVec>(x) & 0x80000000u));
  return Select(magnitude < Splat(0.25f), series, with_sign);
}

// ------------------------------------------------------------------------------------------------ operands

// Dot products of floats: a tile is [head_size][kTileTokens] floats.
struct FloatDot {
  typedef float Unit;
  static constexpr int kDims = 1;  // dimensions in a unit

  template <class T>
  ROCKETKV_INLINE void Fill(const T* head, const NativeLayout& native, KeyOrder order, int offset, int head_size,
                            float* tile) {
    const int32_t* token = native.key_token + offset;
    if (order == KeyOrder::kContiguous) {
      const T* first = head + token[0];
      for (int d = 0; d < head_size; ++d) {
        const T* of_dim = first + native.key_dim[d];
        for (int i = 0; i < kTokensAtOnce; i += kLanes) Store(tile + d * kTileTokens + i, Load(of_dim + i));
      }
    } else {
      for (int d = 0; d < head_size; ++d) {
        const T* of_dim = head + native.key_dim[d];
        for (int i = 0; i < kTokensAtOnce; ++i) tile[d * kTileTokens + i] = ToFloat(of_dim[token[i]]);
      }
    }
  }

  float rows[kRowsAtOnce][kMaxHeadSize];

  template <class Q>
  ROCKETKV_INLINE void Widen(const Q* query, int head_size, float* out) {
    for (int d = 0; d < head_size; d += kLanes) Store(out + d, Load(query + d));
  }
  inline void SetRow(int row, Type type, const void* query, int64_t offset, int head_size) {
    switch (type) {
      case Type::kFloat32: return Widen(static_cast<const Float32*>(query) + offset, head_size, rows[row]);
      case Type::kBFloat16: return Widen(static_cast<const BFloat16*>(query) + offset, head_size, rows[row]);
      default: return Widen(static_cast<const Float16*>(query) + offset, head_size, rows[row]);
    }
  }
  ROCKETKV_INLINE void Step(Vec* sum, const float* keys, float query) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecsPerStep; ++v) sum[v] = Fma(Splat(query), Load(keys + v * kLanes), sum[v]);
  }
};

#if defined(__AVX512BF16__)
// Dot products of bfloat16, two dimensions at a time: a tile is [head_size / 2][kTileTokens] pairs.
struct PairDot {
  typedef uint32_t Unit;
  static constexpr int kDims = 2;

  ROCKETKV_INLINE void Fill(const BFloat16* bf16, const NativeLayout& native, KeyOrder order, int offset,
                            int head_size, uint32_t* tile) {
    const uint16_t* head = reinterpret_cast<const uint16_t*>(bf16);
    const int32_t *token = native.key_token + offset, *dim = native.key_dim;
    for (int d = 0; d < head_size; d += 2, tile += kTileTokens) {
      const uint16_t *low = head + dim[d], *high = head + dim[d + 1];
      if (order == KeyOrder::kPairs) {
        __builtin_memcpy(tile, low + token[0], sizeof(uint32_t) * kTokensAtOnce);
      } else if (order == KeyOrder::kContiguous) {
        const UVec a = __builtin_convertvector(LoadBits<U16Vec>(low + token[0]), UVec);
        const UVec b = __builtin_convertvector(LoadBits<U16Vec>(high + token[0]), UVec);
        const UVec pairs = a | (b << 16);
        __builtin_memcpy(tile, &pairs, sizeof(pairs));
      } else {
        for (int i = 0; i < kTokensAtOnce; ++i) tile[i] = low[token[i]] | uint32_t{high[token[i]]} << 16;
      }
    }
  }

  uint32_t rows[kRowsAtOnce][kMaxHeadSize / 2];

  inline void SetRow(int row, Type, const void* query, int64_t offset, int head_size) {
    __builtin_memcpy(rows[row], static_cast<const uint16_t*>(query) + offset, sizeof(uint16_t) * head_size);
  }
  ROCKETKV_INLINE void Step(Vec* sum, const uint32_t* keys, uint32_t query) {
    const __m512bh q = (__m512bh)_mm512_set1_epi32(int32_t(query));
#pragma GCC unroll 4
    for (int v = 0; v < kVecsPerStep; ++v) {
      sum[v] = (Vec)_mm512_dpbf16_ps((__m512)sum[v], (__m512bh)_mm512_loadu_si512(keys + v * kLanes), q);
    }
  }
};
#endif

// ------------------------------------------------------------------------------------------------ logits

// Keys [first, first + kTileTokens) of the prompt, transposed; zeros where there is no block.
template <class T, class Dot>
inline void FillTile(const ScoreArgs& args, int kv_head, int first, typename Dot::Unit* tile) {
  const int dim = args.cache.head_size, block_size = args.cache.block_size;
  for (int i = 0; i < kTileTokens; i += kTokensAtOnce) {
    const int token = first + i;
    if (token < args.num_tokens) {
      const T* head = reinterpret_cast<const T*>(args.cache.Head(args.prompt_blocks[token / block_size], kv_head));
      Dot::Fill(head, args.native, args.key_order, token % block_size, dim, tile + i);
    } else {
      for (int d = 0; d < dim / Dot::kDims; ++d) {
        __builtin_memset(tile + d * kTileTokens + i, 0, sizeof(*tile) * kTokensAtOnce);
      }
    }
  }
}

// Rows [row, row + kRowsAtOnce) of a KV head; those beyond the last repeat it.
template <class Dot>
inline void SetRows(const ScoreArgs& args, int kv_head, int row, Dot* dot) {
  const int group = args.Group();
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int from = int(MinI(row + r, args.Rows() - 1));
    const int64_t head = int64_t{from / group} * args.num_heads + kv_head * group + from % group;
    dot->SetRow(r, args.model_type, args.window_query, head * args.cache.head_size, args.cache.head_size);
  }
}

template <class Dot>
inline void Logits(const ScoreArgs& args, const Dot& dot, const typename Dot::Unit* tile,
                   Vec (&logits)[kRowsAtOnce][kTileVecs]) {
  const int units = args.cache.head_size / Dot::kDims;
  const Vec scale = Splat(args.scale * args.cache.key_scale);
  for (int first = 0; first < kTileVecs; first += kVecsPerStep) {
    Vec sum[kRowsAtOnce][kVecsPerStep] = {};
    const typename Dot::Unit* keys = tile + first * kLanes;
    for (int d = 0; d < units; ++d, keys += kTileTokens) {
#pragma GCC unroll 4
      for (int r = 0; r < kRowsAtOnce; ++r) Dot::Step(sum[r], keys, dot.rows[r][d]);
    }
    for (int r = 0; r < kRowsAtOnce; ++r) {
      for (int v = 0; v < kVecsPerStep; ++v) logits[r][first + v] = sum[r][v] * scale;
    }
  }
  if (args.softcap > 0) {
    const Vec cap = Splat(args.softcap), inverse = Splat(1.0f / args.softcap);
    for (int r = 0; r < kRowsAtOnce; ++r) {
      for (int v = 0; v < kTileVecs; ++v) logits[r][v] = cap * Tanh(logits[r][v] * inverse);
    }
  }
}

// ------------------------------------------------------------------------------------------------ the two passes

template <class T, class Dot>
inline void RunStats(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  auto* tile = reinterpret_cast<typename Dot::Unit*>(scratch);
  // Maximum and sum of each lane by itself, so that no tile ends in a sum across lanes.
  float* state = scratch + int64_t{kTileTokens} * args.cache.head_size;  // [PaddedRows()][2][kLanes]
  const int rows = args.PaddedRows(), group = args.Group(), prefix = args.Prefix(), scored = args.NumScored();
  for (int r = 0; r < rows; ++r) {
    Store(state + int64_t{r} * 2 * kLanes, Splat(kLowestLogit));
    Store(state + int64_t{r} * 2 * kLanes + kLanes, Splat(0.0f));
  }
  const int begin = run * kScoreRunTokens, end = int(MinI(begin + kScoreRunTokens, scored));
  Dot dot;
  Vec logits[kRowsAtOnce][kTileVecs];
  for (int first = begin; first < end; first += kTileTokens) {
    FillTile<T, Dot>(args, kv_head, first, tile);
    const bool all_visible = first + kTileTokens <= prefix;
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      SetRows(args, kv_head, row, &dot);
      Logits(args, dot, tile, logits);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (!all_visible) {
          const int visible = args.over_all ? int(MinI(prefix + (row + r) / group + 1, scored)) : prefix;
          for (int i = int(MaxI(visible - first, 0)); i < kTileTokens; ++i) {
            logits[r][i / kLanes][i % kLanes] = -INFINITY;
          }
        }
        float* of_row = state + int64_t{row + r} * 2 * kLanes;
        const Vec old_max = Load(of_row);
        Vec max = old_max;
#pragma GCC unroll 16
        for (int v = 0; v < kTileVecs; ++v) max = Max(logits[r][v], max);
        Vec sum = Load(of_row + kLanes) * Exp(old_max - max);
#pragma GCC unroll 4
        for (int v = 0; v < kTileVecs; ++v) sum += Exp(logits[r][v] - max);
        Store(of_row, max);
        Store(of_row + kLanes, sum);
      }
    }
  }
  float* stats = args.Stats(kv_head, run);
  for (int r = 0; r < rows; ++r) {
    const Vec max = Load(state + int64_t{r} * 2 * kLanes), sum = Load(state + int64_t{r} * 2 * kLanes + kLanes);
    stats[2 * r] = MaxLane(max);
    stats[2 * r + 1] = Sum(sum * Exp(max - Splat(stats[2 * r])));
  }
}

template <class T, class Dot>
inline void RunSum(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  auto* tile = reinterpret_cast<typename Dot::Unit*>(scratch);
  const int rows = args.PaddedRows(), prefix = args.Prefix();
  const int begin = run * kScoreRunTokens, end = int(MinI(begin + kScoreRunTokens, prefix));
  const float* norms = args.Norms(kv_head);
  float* scores = args.scores + int64_t{kv_head} * prefix;
  typedef double DVec __attribute__((vector_size(kLanes * 8)));
  Dot dot;
  Vec logits[kRowsAtOnce][kTileVecs];
  for (int first = begin; first < end; first += kTileTokens) {
    FillTile<T, Dot>(args, kv_head, first, tile);
    DVec sums[kTileVecs] = {};
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      SetRows(args, kv_head, row, &dot);
      Logits(args, dot, tile, logits);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; ++v) {
        Vec sum{};
#pragma GCC unroll 4
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const float* norm = norms + 2 * (row + r);
          sum = Fma(Exp(logits[r][v] - Splat(norm[0])), Splat(norm[1]), sum);
        }
        sums[v] += __builtin_convertvector(sum, DVec);
      }
    }
    for (int i = 0; i < kTileTokens && first + i < end; ++i) scores[first + i] = float(sums[i / kLanes][i % kLanes]);
  }
}

// Entry points of the table.

#define ROCKETKV_BY_TYPE(function, args, ...)                                                             \
  switch ((args).cache.type) {                                                                            \
    case Type::kFloat32: return function<Float32, FloatDot>(args, __VA_ARGS__);                           \
    case Type::kBFloat16: return function<BFloat16, FloatDot>(args, __VA_ARGS__);                         \
    case Type::kFloat16: return function<Float16, FloatDot>(args, __VA_ARGS__);                           \
    case Type::kFloat8E4M3: return function<Float8E4M3, FloatDot>(args, __VA_ARGS__);                     \
    case Type::kFloat8E5M2: return function<Float8E5M2, FloatDot>(args, __VA_ARGS__);                     \
  }

inline void ScoreStats(const ScoreArgs& args, int kv_head, int run, float* scratch) {
#if defined(__AVX512BF16__)
  if (args.cache.type == Type::kBFloat16 && args.model_type == Type::kBFloat16) {
    return RunStats<BFloat16, PairDot>(args, kv_head, run, scratch);
  }
#endif
  ROCKETKV_BY_TYPE(RunStats, args, kv_head, run, scratch)
}

inline void ScoreSum(const ScoreArgs& args, int kv_head, int run, float* scratch) {
#if defined(__AVX512BF16__)
  if (args.cache.type == Type::kBFloat16 && args.model_type == Type::kBFloat16) {
    return RunSum<BFloat16, PairDot>(args, kv_head, run, scratch);
  }
#endif
  ROCKETKV_BY_TYPE(RunSum, args, kv_head, run, scratch)
}

#undef ROCKETKV_BY_TYPE

// ------------------------------------------------------------------------------------------------ the choice

// pooled[i] = max of x[i .. i + size), for i < n; x [n + size - 1] is overwritten with it. Maxima of 2, 4, 8, ...
// successive numbers, then of two such runs that overlap: log2(size) passes of two loads and one store per vector.
inline void SlidingMax(float* x, int n, int size) {
  auto pass = [x](int count, int step) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) Store(x + i, Max(Load(x + i), Load(x + i + step)));
    for (; i < count; ++i) x[i] = MaxF(x[i], x[i + step]);
  };
  int length = 1;  // x[i] is the maximum of this many
  for (; 2 * length <= size; length *= 2) pass(n + size - 2 * length, length);
  if (length < size) pass(n, size - length);
}

inline void Keep(const ScoreArgs& args, int kv_head, float* scratch) {
  const int prefix = args.Prefix(), size = args.kernel_size, half = size / 2;
  const float* scores = args.scores + int64_t{kv_head} * prefix;
  int32_t* kept = args.kept + int64_t{kv_head} * args.num_kept;
  for (int i = 0; i < half; ++i) scratch[i] = scratch[half + prefix + i] = 0.0f;
  // One logit that is not a number makes all of the head's scores such: they all rank alike.
  for (int i = 0; i < prefix; ++i) scratch[half + i] = scores[i] > 0.0f ? scores[i] : 0.0f;
  SlidingMax(scratch, prefix, size);
  for (int i = 0; i < args.sink_tokens && i < prefix; ++i) scratch[i] = INFINITY;
  const int best = SelectTop(scratch, prefix, args.num_kept - args.window_size, kept);
  for (int w = 0; w < args.window_size; ++w) kept[best + w] = prefix + w;
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
