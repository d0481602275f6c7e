// SPDX-License-Identifier: Apache-2.0
// Writing one token's key and value to its private block, and the KT entries of pages that became full.
#pragma once

#include "compact.h"
#include "estimate.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

template <class T>
inline void WriteHead(Type model_type, const void* in, int64_t offset, int dim, float scale, T* out) {
  float values[256];
  Widen(model_type, in, offset, dim, values);
  for (int d = 0; d < dim; ++d) FromFloat(values[d] / scale, out + d);
}

// The token's key and value, to its place in its private block.
template <class T>
inline void WriteRow(const DecodeArgs& args, const Row& row, int kv_head) {
  const Cache& cache = args.cache;
  const int dim = cache.head_size, position = row.num_tokens - 1;
  T* out = reinterpret_cast<T*>(cache.Head(args.Blocks(row)[position / cache.block_size], kv_head)) +
           int64_t{2} * (position % cache.block_size) * dim;
  const int64_t key = row.token * args.key_stride + int64_t{kv_head} * dim;
  const int64_t value = row.token * args.value_stride + int64_t{kv_head} * dim;
  if (args.model_type == cache.type) {
    __builtin_memcpy(out, static_cast<const T*>(args.key) + key, dim * sizeof(T));
    __builtin_memcpy(out + dim, static_cast<const T*>(args.value) + value, dim * sizeof(T));
  } else {
    WriteHead(args.model_type, args.key, key, dim, cache.key_scale, out);
    WriteHead(args.model_type, args.value, value, dim, cache.value_scale, out + dim);
  }
}

// The KT entry of the full page that starts at `offset` of a native block.
template <class T, class KT>
inline void SummariseNativePage(const Cache& cache, const NativeLayout& native, int64_t block, int kv_head, int offset) {
  const T* head = reinterpret_cast<const T*>(cache.Head(block, kv_head));
  const int pages = cache.PagesPerBlock();
  KT* entry = reinterpret_cast<KT*>(cache.KtHead(block, kv_head)) + offset / cache.page_size;
  for (int d = 0; d < cache.head_size; ++d) {
    if (cache.kt_is_mean) {
      float sum = ToFloat(head[native.key_token[offset] + native.key_dim[d]]);
      for (int t = 1; t < cache.page_size; ++t) {
        sum += ToFloat(head[native.key_token[offset + t] + native.key_dim[d]]);
      }
      FromFloat(ClampBound<KT>(sum / float(cache.page_size)), &entry[2 * d * pages]);
      entry[(2 * d + 1) * pages] = entry[2 * d * pages];
      continue;
    }
    float low = INFINITY, high = -INFINITY;
    for (int t = 0; t < cache.page_size; ++t) {
      const float key = ToFloat(head[native.key_token[offset + t] + native.key_dim[d]]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    entry[2 * d * pages] = RoundOutward<KT>(ClampBound<KT>(low), false);
    entry[(2 * d + 1) * pages] = RoundOutward<KT>(ClampBound<KT>(high), true);
  }
}

// The KT entry of the page that the row's token fills, if it fills one.
template <class T, class KT>
inline void ClosePage(const DecodeArgs& args, const Row& row, int kv_head) {
  const Cache& cache = args.cache;
  if (row.num_tokens % cache.page_size) return;
  const int dim = cache.head_size, first = row.num_tokens - cache.page_size, offset = first % cache.block_size;
  const int64_t block = args.Blocks(row)[first / cache.block_size];
  const T* keys = reinterpret_cast<const T*>(cache.Head(block, kv_head)) + int64_t{2} * offset * dim;
  KT* entry = reinterpret_cast<KT*>(cache.KtHead(block, kv_head)) + offset / cache.page_size;
  SummarisePage(cache, keys, entry);
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
