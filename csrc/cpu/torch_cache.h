// SPDX-License-Identifier: Apache-2.0
// From torch tensors to the kernels' structs. Everything that a kernel takes on trust is checked here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "stage1.h"

namespace rocketkv {

inline Type TypeOf(int64_t type, const char* name) {
  TORCH_CHECK(type >= 0 && type <= int64_t(Type::kFloat8E5M2), "rocketkv_cpu: unknown ", name, " ", type);
  return Type(type);
}

// The type of what the model computes in.
inline Type ModelType(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Type::kFloat32;
    case at::kBFloat16: return Type::kBFloat16;
    case at::kHalf: return Type::kFloat16;
    default:
      TORCH_CHECK(false, "rocketkv_cpu: ", name, " must be float32, bfloat16 or float16, but is ",
                  tensor.scalar_type());
  }
}

// `kv_cache` is vLLM's view [num_blocks, num_kv_heads, block_size, 2 * head_size] of one layer, whose blocks may be
// further apart than their K and V are long; the KT table lies kt_offset bytes into a block. page_size 0: no KT table.
inline Cache MakeCache(const at::Tensor& kv_cache, int64_t kv_type, double key_scale, double value_scale,
                       int64_t kt_offset, int64_t kt_type, int64_t page_size, bool kt_is_mean, int64_t score_offset) {
  TORCH_CHECK(kv_cache.device().is_cpu() && kv_cache.dim() == 4 && kv_cache.numel() > 0 && kv_cache.size(3) % 2 == 0,
              "rocketkv_cpu: kv_cache must be [num_blocks, num_kv_heads, block_size, 2 * head_size] on the CPU, but is ",
              kv_cache.sizes());
  const int64_t heads = kv_cache.size(1), block_size = kv_cache.size(2), head_size = kv_cache.size(3) / 2;
  TORCH_CHECK(head_size >= 16 && head_size <= 256 && head_size % 16 == 0 && block_size % 16 == 0,
              "rocketkv_cpu: head sizes up to 256 and block sizes must be multiples of 16, but are ", head_size, " and ",
              block_size);
  TORCH_CHECK(kv_cache.stride(3) == 1 && kv_cache.stride(2) == 2 * head_size &&
                  (heads == 1 || kv_cache.stride(1) == 2 * head_size * block_size),
              "rocketkv_cpu: the elements of a block of kv_cache must be adjacent");
  Cache cache{};
  cache.base = static_cast<uint8_t*>(kv_cache.data_ptr());
  cache.type = TypeOf(kv_type, "kv_type");
  const int64_t item = SizeOf(cache.type);
  TORCH_CHECK(int64_t(kv_cache.element_size()) == item, "rocketkv_cpu: kv_type does not fit kv_cache's ",
              kv_cache.scalar_type());
  cache.block_stride = kv_cache.stride(0) * item;
  cache.num_kv_heads = int(heads);
  cache.head_size = int(head_size);
  cache.block_size = int(block_size);
  cache.key_scale = float(key_scale);
  cache.value_scale = float(value_scale);
  cache.kt_offset = kt_offset;
  cache.kt_type = TypeOf(kt_type, "kt_type");
  cache.page_size = int(page_size);
  cache.kt_is_mean = kt_is_mean;
  cache.score_offset = score_offset;

  int64_t used = heads * cache.HeadElements() * item;
  if (page_size != 0) {
    TORCH_CHECK(page_size > 0 && block_size % page_size == 0, "rocketkv_cpu: page_size must divide block_size");
    TORCH_CHECK(cache.kt_type == Type::kBFloat16 || cache.kt_type == Type::kFloat8E5M2,
                "rocketkv_cpu: the KT table must be bfloat16 or float8_e5m2");
    TORCH_CHECK(kt_offset >= used && kt_offset % SizeOf(cache.kt_type) == 0 &&
                    cache.block_stride % SizeOf(cache.kt_type) == 0,
                "rocketkv_cpu: kt_offset must lie behind K and V and be aligned");
    used = kt_offset + heads * 2 * head_size * cache.PagesPerBlock() * SizeOf(cache.kt_type);
  }
  if (score_offset != 0) {
    TORCH_CHECK(score_offset >= used && score_offset % 4 == 0 && cache.block_stride % 4 == 0,
                "rocketkv_cpu: score_offset must lie behind all else of a block and be aligned");
    used = score_offset + heads * block_size * int64_t{sizeof(float)};
  }
  const int64_t blocks = kv_cache.size(0);
  TORCH_CHECK(blocks == 1 || cache.block_stride >= used, "rocketkv_cpu: blocks of kv_cache overlap");
  TORCH_CHECK(kv_cache.storage_offset() * item + (blocks - 1) * cache.block_stride + used <=
                  int64_t(kv_cache.storage().nbytes()),
              "rocketkv_cpu: kv_cache's storage ends before its last block does");
  return cache;
}

// A contiguous int32 vector on the CPU.
inline const int32_t* Int32Vector(const at::Tensor& tensor, int64_t size, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kInt && tensor.dim() == 1 &&
                  tensor.is_contiguous() && tensor.size(0) >= size,
              "rocketkv_cpu: ", name, " must be a contiguous int32 vector of at least ", size, " elements");
  return static_cast<const int32_t*>(tensor.data_ptr());
}

// Ids of existing blocks.
inline const int32_t* BlockIds(const at::Tensor& tensor, int64_t size, int64_t num_blocks, const char* name) {
  const int32_t* ids = Int32Vector(tensor, size, name);
  TORCH_CHECK(std::all_of(ids, ids + size, [=](int32_t id) { return id >= 0 && id < num_blocks; }),
              "rocketkv_cpu: ", name, " names a block that does not exist");
  return ids;
}

// `offsets` is key_token [block_size], key_dim [head_size], value_token and value_dim of the same sizes, concatenated.
inline NativeLayout MakeNativeLayout(const at::Tensor& offsets, const Cache& cache) {
  const int64_t half = int64_t{cache.block_size} + cache.head_size;
  const int32_t* p = Int32Vector(offsets, 2 * half, "native_layout");
  for (const int32_t* part : {p, p + half}) {
    const auto token = std::minmax_element(part, part + cache.block_size);
    const auto dim = std::minmax_element(part + cache.block_size, part + half);
    TORCH_CHECK(int64_t{*token.first} + *dim.first >= 0 && int64_t{*token.second} + *dim.second < cache.HeadElements(),
                "rocketkv_cpu: native_layout leaves the block");
  }
  return NativeLayout{p, p + cache.block_size, p + half, p + half + cache.block_size};
}

// How the blocks' keys lie, as the scoring kernels tell apart.
inline KeyOrder OrderOf(const NativeLayout& native, const Cache& cache) {
  auto is_apart = [&](int distance) {
    for (int t = 0; t < cache.block_size; ++t) {
      if (native.key_token[t] != native.key_token[t / 16 * 16] + t % 16 * distance) return false;
    }
    return true;
  };
  if (is_apart(1)) return KeyOrder::kContiguous;
  bool has_pairs = is_apart(2), has_rows = true;
  for (int d = 0; d < cache.head_size; ++d) {
    has_pairs &= native.key_dim[d] == native.key_dim[d / 2 * 2] + d % 2;
    has_rows &= native.key_dim[d] == native.key_dim[0] + d;
  }
  return has_pairs ? KeyOrder::kPairs : has_rows ? KeyOrder::kRows : KeyOrder::kAny;
}

}  // namespace rocketkv
