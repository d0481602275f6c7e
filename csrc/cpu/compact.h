// SPDX-License-Identifier: Apache-2.0
// Stage 1, second half: the kept tokens' K and V from the prompt's blocks into private ones, with their sums of attention
// and the KT entries of the pages that they fill.
#pragma once

#include "simd.h"
#include "stage1.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

// bfloat16 holds every float's magnitude; the other types of the KT table keep the bounds as they are.
template <class KT>
ROCKETKV_INLINE float ClampBound(float bound) {
  return bound;
}
template <>
inline float ClampBound<BFloat16>(float bound) {
  constexpr float kLargest = 18446744073709551616.0f;  // 2^64: what the estimation counts anything larger as
  return bound > kLargest ? kLargest : bound < -kLargest ? -kLargest : bound;
}

// The KT entries of one full page: minima rounded down, maxima rounded up (I8), or the mean rounded to nearest in the place
// of both. `keys` is its first token in a private block; `entry` the place of the page in dimension 0's minima.
template <class T, class KT>
inline void SummarisePage(const Cache& cache, const T* keys, KT* entry) {
  const int page_size = cache.page_size, head_size = cache.head_size, pages_per_block = cache.PagesPerBlock();
  for (int d = 0; d < head_size; d += kLanes) {
    Vec min = Load(keys + d), max = min;
    if (cache.kt_is_mean) {
      Vec sum = min;
      for (int t = 1; t < page_size; ++t) sum += Load(keys + int64_t{t} * 2 * head_size + d);
      sum /= Splat(float(page_size));
      for (int lane = 0; lane < kLanes; ++lane) {
        KT* of_dim = entry + int64_t{d + lane} * 2 * pages_per_block;
        FromFloat(ClampBound<KT>(sum[lane]), of_dim);
        of_dim[pages_per_block] = of_dim[0];
      }
      continue;
    }
    for (int t = 1; t < page_size; ++t) {
      const Vec key = Load(keys + int64_t{t} * 2 * head_size + d);
      min = Min(key, min);
      max = Max(key, max);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      KT* of_dim = entry + int64_t{d + lane} * 2 * pages_per_block;
      of_dim[0] = RoundOutward<KT>(ClampBound<KT>(min[lane]), false);
      of_dim[pages_per_block] = RoundOutward<KT>(ClampBound<KT>(max[lane]), true);
    }
  }
}

template <class T, class KT>
inline void SummariseBlock(const Cache& cache, int64_t block, int kv_head, int num_tokens) {
  const T* keys = reinterpret_cast<const T*>(cache.Head(block, kv_head));
  KT* kt = reinterpret_cast<KT*>(cache.KtHead(block, kv_head));
  const int pages = num_tokens / cache.page_size;
  for (int p = 0; p < pages; ++p) {
    SummarisePage(cache, keys + int64_t{p} * cache.page_size * 2 * cache.head_size, kt + p);
  }
}

template <class T>
ROCKETKV_INLINE void CopyRow(const T* from, const int32_t* dim, bool is_contiguous, int head_size, T* to) {
  if (is_contiguous) {
    __builtin_memcpy(to, from + dim[0], sizeof(T) * head_size);
  } else {
    for (int d = 0; d < head_size; ++d) to[d] = from[dim[d]];
  }
}

template <class T>
inline void CompactBlock(const CompactArgs& args, int kv_head, int index) {
  const Cache& cache = args.cache;
  const int dim = cache.head_size, block_size = cache.block_size;
  const int first = index * block_size, count = int(MinI(block_size, args.num_kept - first));
  const int32_t* kept = args.kept + int64_t{kv_head} * args.num_kept + first;
  const int64_t block = args.private_blocks[index];
  T* to = reinterpret_cast<T*>(cache.Head(block, kv_head));
  bool key_is_row = true, value_is_row = true;
  for (int d = 1; d < dim; ++d) {
    key_is_row &= args.native.key_dim[d] == args.native.key_dim[0] + d;
    value_is_row &= args.native.value_dim[d] == args.native.value_dim[0] + d;
  }
  for (int i = 0; i < count; ++i, to += 2 * dim) {
    const int offset = kept[i] % block_size;
    const int64_t source = args.prompt_blocks[kept[i] / block_size];
    if (source == block && offset == i) continue;  // in place: it stays
    const T* from = reinterpret_cast<const T*>(cache.Head(source, kv_head));
    CopyRow(from + args.native.key_token[offset], args.native.key_dim, key_is_row, dim, to);
    CopyRow(from + args.native.value_token[offset], args.native.value_dim, value_is_row, dim, to + dim);
    if (cache.score_offset != 0) cache.ScoreHead(block, kv_head)[i] = cache.ScoreHead(source, kv_head)[offset];
  }
  if (cache.page_size == 0) return;
  if (cache.kt_type == Type::kFloat8E5M2) {
    SummariseBlock<T, Float8E5M2>(cache, block, kv_head, count);
  } else {
    SummariseBlock<T, BFloat16>(cache, block, kv_head, count);
  }
}

// Fills private block `private_block_index` of one KV head: the kept tokens' slots and the entries of full pages. Its
// blocks may be prompt blocks in the same order and layout, if `kept` is ascending and they are filled in ascending order:
// no token comes from a slot before its own.
inline void Compact(const CompactArgs& args, int kv_head, int private_block_index) {
  switch (args.cache.type) {
    case Type::kFloat32: return CompactBlock<Float32>(args, kv_head, private_block_index);
    case Type::kBFloat16: return CompactBlock<BFloat16>(args, kv_head, private_block_index);
    case Type::kFloat16: return CompactBlock<Float16>(args, kv_head, private_block_index);
    case Type::kFloat8E4M3: return CompactBlock<Float8E4M3>(args, kv_head, private_block_index);
    case Type::kFloat8E5M2: return CompactBlock<Float8E5M2>(args, kv_head, private_block_index);
  }
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
