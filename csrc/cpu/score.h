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

// to[row * to_stride + column] = from[column][row], for kLanes rows and columns.
ROCKETKV_INLINE void Transpose(Vec (&from)[kLanes], float* to, int to_stride) {
#if defined(__AVX512F__)
#define ROCKETKV_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ROCKETKV_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define ROCKETKV_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ROCKETKV_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ROCKETKV_LOW 0, 4, 1, 5
#define ROCKETKV_HIGH 2, 6, 3, 7
#endif
  // Interleaving the first half of the vectors with the second rotates the bits of an element's place by one.
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(from[i], from[i + kLanes / 2], ROCKETKV_LOW);
      next[2 * i + 1] = __builtin_shufflevector(from[i], from[i + kLanes / 2], ROCKETKV_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) from[i] = next[i];
  }
#undef ROCKETKV_LOW
#undef ROCKETKV_HIGH
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) Store(to + i * to_stride, from[i]);
}

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
    } else if (order == KeyOrder::kRows) {
      const T* first = head + native.key_dim[0];
      Vec rows[kLanes];
      for (int i = 0; i < kTokensAtOnce; i += kLanes) {
        for (int d = 0; d < head_size; d += kLanes) {
          for (int t = 0; t < kLanes; ++t) rows[t] = Load(first + token[i + t] + d);
          Transpose(rows, tile + d * kTileTokens + i, kTileTokens);
        }
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
    if (order == KeyOrder::kRows && head_size % (2 * kLanes) == 0) {
      const uint16_t* first = head + dim[0];
      Vec rows[kLanes];
      for (int d = 0; d < head_size; d += 2 * kLanes, tile += kLanes * kTileTokens) {
        for (int t = 0; t < kLanes; ++t) rows[t] = LoadBits<Vec>(first + token[t] + d);
        Transpose(rows, reinterpret_cast<float*>(tile), kTileTokens);
      }
      return;
    }
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

// Keys [first, first + kTileTokens), transposed; zeros where there is no block.
template <class T, class Dot>
inline void FillTile(const QueryArgs& args, int kv_head, int first, typename Dot::Unit* tile) {
  const int dim = args.cache.head_size, block_size = args.cache.block_size;
  for (int i = 0; i < kTileTokens; i += kTokensAtOnce) {
    const int token = first + i;
    if (token < args.num_tokens) {
      const T* head = reinterpret_cast<const T*>(args.cache.Head(args.blocks[token / block_size], kv_head));
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
inline void SetRows(const QueryArgs& args, int kv_head, int row, Dot* dot) {
  const int group = args.Group();
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int from = int(MinI(row + r, args.Rows() - 1));
    const int64_t offset = int64_t{kv_head * group + from % group} * args.cache.head_size;
    dot->SetRow(r, args.model_type, args.query, from / group * args.query_stride + offset, args.cache.head_size);
  }
}

template <class Dot>
inline void Logits(const QueryArgs& args, const Dot& dot, const typename Dot::Unit* tile,
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

// Which lanes of vector v of a tile are among its first `count` keys.
ROCKETKV_INLINE IVec IsBelow(int v, int count) {
  IVec lane{};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < ISplat(count - v * kLanes);
}

// Of rows [first_row, last_row), both multiples of kRowsAtOnce: the maximum of the logits of those keys [begin, end) that
// a row sees, and the sum of e^(logit - maximum), into stats [rows][2].
template <class T, class Dot>
inline void RowStats(const QueryArgs& args, int kv_head, int first_row, int last_row, int begin, int end,
                     float* scratch, float* stats) {
  auto* tile = reinterpret_cast<typename Dot::Unit*>(scratch);
  // Maximum and sum of each lane by itself, so that no tile ends in a sum across lanes.
  float* state = scratch + int64_t{kTileTokens} * args.cache.head_size;  // [rows][2][kLanes]
  const int rows = last_row - first_row;
  for (int r = 0; r < rows; ++r) {
    Store(state + int64_t{r} * 2 * kLanes, Splat(kLowestLogit));
    Store(state + int64_t{r} * 2 * kLanes + kLanes, Splat(0.0f));
  }
  Dot dot;
  Vec logits[kRowsAtOnce][kTileVecs];
  for (int first = begin; first < end; first += kTileTokens) {
    FillTile<T, Dot>(args, kv_head, first, tile);
    const bool all_visible = first + kTileTokens <= args.Prefix();
    for (int row = int(MaxI(first_row, args.FirstRow(first))); row < last_row; row += kRowsAtOnce) {
      SetRows(args, kv_head, row, &dot);
      Logits(args, dot, tile, logits);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (!all_visible) {
          const int visible = args.Visible(row + r) - first;
          for (int v = 0; v < kTileVecs; ++v) {
            logits[r][v] = Select(IsBelow(v, visible), logits[r][v], Splat(-INFINITY));
          }
        }
        float* of_row = state + int64_t{row - first_row + r} * 2 * kLanes;
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
  for (int r = 0; r < rows; ++r) {
    const Vec max = Load(state + int64_t{r} * 2 * kLanes), sum = Load(state + int64_t{r} * 2 * kLanes + kLanes);
    stats[2 * r] = MaxLane(max);
    stats[2 * r + 1] = Sum(sum * Exp(max - Splat(stats[2 * r])));
  }
}

typedef double DVec __attribute__((vector_size(kLanes * 8)));

// What the rows give to each key of a tile. norms is [PaddedRows()][2] of the KV head, maximum and 1 / sum.
template <class T, class Dot>
inline void TileSums(const QueryArgs& args, int kv_head, int first, const float* norms, float* scratch,
                     DVec (&sums)[kTileVecs]) {
  auto* tile = reinterpret_cast<typename Dot::Unit*>(scratch);
  FillTile<T, Dot>(args, kv_head, first, tile);
  const int rows = args.PaddedRows();
  const bool all_visible = first + kTileTokens <= args.Prefix();
  Dot dot;
  Vec logits[kRowsAtOnce][kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) sums[v] = DVec{};
  for (int row = args.FirstRow(first); row < rows; row += kRowsAtOnce) {
    SetRows(args, kv_head, row, &dot);
    Logits(args, dot, tile, logits);
    const bool is_masked = !all_visible && args.Visible(row) < first + kTileTokens;
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; ++v) {
      Vec sum{};
#pragma GCC unroll 4
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float* norm = norms + 2 * (row + r);
        const Vec with_row = Fma(Exp(logits[r][v] - Splat(norm[0])), Splat(norm[1]), sum);
        sum = is_masked ? Select(IsBelow(v, args.Visible(row + r) - first), with_row, sum) : with_row;
      }
      sums[v] += __builtin_convertvector(sum, DVec);
    }
  }
}

template <class T, class Dot>
inline void RunStats(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  const int begin = run * kScoreRunTokens, end = int(MinI(begin + kScoreRunTokens, args.NumScored()));
  RowStats<T, Dot>(args, kv_head, 0, args.PaddedRows(), begin, end, scratch, args.Stats(kv_head, run));
}

template <class T, class Dot>
inline void RunSum(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  const int prefix = args.Prefix();
  const int begin = run * kScoreRunTokens, end = int(MinI(begin + kScoreRunTokens, prefix));
  float* scores = args.scores + int64_t{kv_head} * prefix;
  DVec sums[kTileVecs];
  for (int first = begin; first < end; first += kTileTokens) {
    TileSums<T, Dot>(args, kv_head, first, args.Norms(kv_head), scratch, sums);
    for (int i = 0; i < kTileTokens && first + i < end; ++i) scores[first + i] = float(sums[i / kLanes][i % kLanes]);
  }
}

// Calls function<T, Dot>(args, ...).
#if defined(__AVX512BF16__)
#define ROCKETKV_BF16_DOT(function, args, ...)                       \
  if ((args).model_type == Type::kBFloat16) {                        \
    return function<BFloat16, PairDot>(args, __VA_ARGS__);           \
  }
#else
#define ROCKETKV_BF16_DOT(function, args, ...)
#endif
#define ROCKETKV_BY_TYPE(function, args, ...)                                                             \
  switch ((args).cache.type) {                                                                            \
    case Type::kFloat32: return function<Float32, FloatDot>(args, __VA_ARGS__);                           \
    case Type::kBFloat16:                                                                                 \
      ROCKETKV_BF16_DOT(function, args, __VA_ARGS__)                                                      \
      return function<BFloat16, FloatDot>(args, __VA_ARGS__);                                             \
    case Type::kFloat16: return function<Float16, FloatDot>(args, __VA_ARGS__);                           \
    case Type::kFloat8E4M3: return function<Float8E4M3, FloatDot>(args, __VA_ARGS__);                     \
    case Type::kFloat8E5M2: return function<Float8E5M2, FloatDot>(args, __VA_ARGS__);                     \
  }

// Entry points of the table.

inline void ScoreStats(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  ROCKETKV_BY_TYPE(RunStats, args, kv_head, run, scratch)
}

inline void ScoreSum(const ScoreArgs& args, int kv_head, int run, float* scratch) {
  ROCKETKV_BY_TYPE(RunSum, args, kv_head, run, scratch)
}

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
  const int best = SelectTop(scratch, prefix, args.num_kept - args.num_queries, kept);
  for (int w = 0; w < args.num_queries; ++w) kept[best + w] = prefix + w;
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
