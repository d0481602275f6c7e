// SPDX-License-Identifier: Apache-2.0
// Stage 2, second half: exact attention over chosen tokens, one pass, online softmax.
#pragma once

#include "estimate.h"
#include "score.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

#if defined(__AVX512F__)
constexpr int kValueVecs = 4;  // of a value; times kHeadsAtOnce accumulators stay in registers
#else
constexpr int kValueVecs = 2;
#endif

// q . k for kLanes tokens.
template <class T>
ROCKETKV_INLINE Vec Dots(const float* query, const uint16_t* query_bf16, const T* const* keys, int dim) {
  Vec sums[kLanes];
#if defined(__AVX512BF16__)
  if (sizeof(T) == 2 && query_bf16) {
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; ++t) {
      __m512 sum = _mm512_setzero_ps();
      int d = 0;
      for (; d + 32 <= dim; d += 32) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(keys[t] + d),
                               (__m512bh)_mm512_loadu_si512(query_bf16 + d));
      }
      if (d < dim) {  // 16 more
        sum = _mm512_add_ps(sum, (__m512)(Load(keys[t] + d) * Load(query + d)));
      }
      sums[t] = (Vec)sum;
    }
    return SumEach(sums);
  }
#endif
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) {
    Vec sum = Load(keys[t]) * Load(query);
    for (int d = kLanes; d < dim; d += kLanes) sum = Fma(Load(keys[t] + d), Load(query + d), sum);
    sums[t] = sum;
  }
  (void)query_bf16;
  return SumEach(sums);
}

// accumulator [kHeads][stride] += weights [kHeads][kChunkTokens] x values, for kVecs vectors of the head.
template <int kHeads, int kVecs, class T>
ROCKETKV_INLINE void AddValues(const float* weights, const T* const* keys, int at, int count, float* accumulator,
                               int64_t stride) {
  Vec sum[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVecs; ++v) sum[h][v] = Load(accumulator + h * stride + v * kLanes);
  }
  for (int t = 0; t < count; ++t) {
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = Load(keys[t] + at + v * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Vec weight = Splat(weights[h * kChunkTokens + t]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[h][v] = Fma(weight, value[v], sum[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVecs; ++v) Store(accumulator + h * stride + v * kLanes, sum[h][v]);
  }
}

template <int kHeads, class T>
inline void AddValuesOfHeads(const float* weights, const T* const* keys, int count, int dim, float* accumulator,
                             int64_t stride) {
  int d = 0;
  for (; d + kValueVecs * kLanes <= dim; d += kValueVecs * kLanes) {
    AddValues<kHeads, kValueVecs>(weights, keys, dim + d, count, accumulator + d, stride);
  }
  for (; d < dim; d += kLanes) AddValues<kHeads, 1>(weights, keys, dim + d, count, accumulator + d, stride);
}

// One chunk of tokens, each key followed by its value, into one segment's partial result, partial [G][D + 2]. The chunk
// at `following` and another unit's memory are fetched meanwhile, a few lines at a time.
template <class T>
inline void AttendChunk(const DecodeArgs& args, const Scratch& s, const T* const* keys, int count,
                        const T* const* following, int num_following, Ahead* ahead, float* partial) {
  const int group = args.Group(), dim = args.cache.head_size, stride = dim + 2;
  float weights[kHeadsAtOnce * kChunkTokens];
  const float factor = args.scale * args.cache.key_scale;
  const bool is_bf16 = args.model_type == Type::kBFloat16 && args.cache.type == Type::kBFloat16;
  const int lines = int(CeilDiv(2 * dim * int(sizeof(T)), 64));
  for (int first = 0; first < group; first += kHeadsAtOnce) {
    const int heads = int(MinI(kHeadsAtOnce, group - first));
    for (int h = 0; h < heads; ++h) {
      float* logits = weights + h * kChunkTokens;
      float* of_head = partial + (first + h) * stride;
      const float* query = s.query + (first + h) * dim;
      const uint16_t* query_bf16 = is_bf16 ? s.query_bf16 + (first + h) * dim : nullptr;
      Vec max = Splat(-INFINITY);
      for (int t = 0; t < count; t += kLanes) {  // pointers beyond the count repeat the last token
        Vec logit = Dots(query, query_bf16, keys + t, dim) * Splat(factor);
        if (args.softcap > 0) {
          logit = Tanh(logit / Splat(args.softcap)) * Splat(args.softcap);
        }
        Store(logits + t, logit);
        max = Max(logit, max);
        for (int line = first + h; line < lines; line += group) {
          for (int i = t; i < t + kLanes && i < num_following; ++i) {
            Prefetch(reinterpret_cast<const char*>(following[i]) + 64 * line);
          }
        }
        ahead->Fetch();
      }
      const float before = of_head[dim], now = MaxF(MaxLane(max), before);
      Vec sum = {};
      for (int t = 0; t < count; t += kLanes) {
        Vec weight = Exp(Load(logits + t) - Splat(now));
        for (int i = count - t; i < kLanes; ++i) weight[i] = 0;
        Store(logits + t, weight);
        sum += weight;
      }
      if (now > before) {
        const Vec shrink = Exp(Splat(before - now));
        for (int d = 0; d < dim; d += kLanes) Store(of_head + d, Load(of_head + d) * shrink);
        of_head[dim + 1] *= shrink[0];
        of_head[dim] = now;
      }
      of_head[dim + 1] += Sum(sum);
    }
    float* accumulator = partial + first * stride;
    switch (heads) {
      case 1: AddValuesOfHeads<1>(weights, keys, count, dim, accumulator, stride); break;
      case 2: AddValuesOfHeads<2>(weights, keys, count, dim, accumulator, stride); break;
      case 3: AddValuesOfHeads<3>(weights, keys, count, dim, accumulator, stride); break;
      default: AddValuesOfHeads<4>(weights, keys, count, dim, accumulator, stride);
    }
  }
}

// A token's key and value from vLLM's layout into `out` [2][D].
template <class T>
inline void GatherToken(const NativeLayout& layout, const T* head, int offset, int dim, T* out) {
  const T* key = head + layout.key_token[offset];
  const T* value = head + layout.value_token[offset];
  for (int d = 0; d < dim; ++d) out[d] = key[layout.key_dim[d]];
  for (int d = 0; d < dim; ++d) out[dim + d] = value[layout.value_dim[d]];
}

// Where tokens [begin, end) lie, for a row that reads all of them.
template <class T>
inline void LocateAll(const DecodeArgs& args, const Row& row, int kv_head, int begin, int end, const T** keys) {
  const int block_size = args.cache.block_size, dim = args.cache.head_size;
  const int32_t* blocks = args.Blocks(row);
  for (int token = begin; token < end;) {
    const int offset = token % block_size, count = int(MinI(block_size - offset, end - token));
    const T* key = reinterpret_cast<const T*>(args.cache.Head(blocks[token / block_size], kv_head));
    for (int i = 0; i < count; ++i) *keys++ = key + int64_t{2} * (offset + i) * dim;
    token += count;
  }
}

// Tokens [segment * kSegmentTokens, ...) of the chosen ones (or of all), into the segment's partial result.
template <class T>
inline void AttendSegment(const DecodeArgs& args, const Row& row, int kv_head, int segment, Scratch* s, Ahead ahead) {
  const Cache& cache = args.cache;
  const int group = args.Group(), dim = cache.head_size, stride = dim + 2;
  const bool is_all = s->num_chosen < 0;
  const int begin = segment * kSegmentTokens;
  const int end = int(MinI(begin + kSegmentTokens, is_all ? row.num_tokens : s->num_chosen));
  float* partial = s->partials + int64_t{segment} * group * stride;
  for (int g = 0; g < group; ++g) {
    for (int d = 0; d < dim; ++d) partial[g * stride + d] = 0;
    partial[g * stride + dim] = -INFINITY;
    partial[g * stride + dim + 1] = 0;
  }
  ahead.Spread(CeilDiv(end - begin, kLanes) * group);

  const T* keys[kSegmentTokens + kLanes];
  T* gathered = reinterpret_cast<T*>(s->gathered) + int64_t{segment} * kChunkTokens * 2 * dim;
  if (args.is_private && is_all) {
    LocateAll(args, row, kv_head, begin, end, keys);
  } else if (args.is_private) {
    __builtin_memcpy(keys, s->rows + begin, sizeof(keys[0]) * (end - begin));
  }
  for (int first = begin; first < end; first += kChunkTokens) {
    const int count = int(MinI(kChunkTokens, end - first)), following = int(MinI(kChunkTokens, end - first - count));
    const T** chunk = keys + (first - begin);
    for (int i = 0; !args.is_private && i < count; ++i) {
      const int token = is_all ? first + i : s->tokens[first + i];
      const T* head = reinterpret_cast<const T*>(cache.Head(args.Blocks(row)[token / cache.block_size], kv_head));
      chunk[i] = gathered + int64_t{2} * i * dim;
      GatherToken(args.native, head, token % cache.block_size, dim, gathered + int64_t{2} * i * dim);
    }
    if (first + count == end) {
      for (int i = count; i % kLanes; ++i) chunk[i] = chunk[count - 1];
    }
    AttendChunk(args, *s, chunk, count, chunk + count, args.is_private ? following : 0, &ahead, partial);
  }
}

// Partial results in their order, whoever computed them, to the row's output.
inline void CombineSegments(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  const int group = args.Group(), dim = args.cache.head_size, stride = dim + 2;
  const int tokens = s->num_chosen < 0 ? row.num_tokens : s->num_chosen;
  const int segments = int(CeilDiv(tokens, kSegmentTokens));
  for (int g = 0; g < group; ++g) {
    float* out = s->partials + g * stride;
    for (int i = 1; i < segments; ++i) {
      const float* other = s->partials + (int64_t{i} * group + g) * stride;
      const float max = MaxF(out[dim], other[dim]);
      const Vec a = Exp(Splat(out[dim] - max)), b = Exp(Splat(other[dim] - max));
      for (int d = 0; d < dim; d += kLanes) Store(out + d, Load(out + d) * a + Load(other + d) * b);
      out[dim] = max;
      out[dim + 1] = out[dim + 1] * a[0] + other[dim + 1] * b[0];
    }
    const float factor = segments ? args.cache.value_scale / out[dim + 1] : 0.0f;
    const int64_t at = row.token * args.output_stride + (int64_t{kv_head} * group + g) * dim;
    for (int d = 0; d < dim; ++d) {
      const float value = segments ? out[d] * factor : 0.0f;
      switch (args.model_type) {
        case Type::kBFloat16: FromFloat(value, static_cast<BFloat16*>(args.output) + at + d); break;
        case Type::kFloat16: FromFloat(value, static_cast<Float16*>(args.output) + at + d); break;
        default: static_cast<float*>(args.output)[at + d] = value;
      }
    }
  }
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
