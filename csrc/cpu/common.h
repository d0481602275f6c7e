// SPDX-License-Identifier: Apache-2.0
// What the kernels are given: plain structs over raw memory, the same for every instruction set.
//
// One layer's cache is an array of blocks (vLLM's paged KV cache), each `block_stride` bytes:
//
//   K and V   [num_kv_heads][2 * block_size * head_size] elements of the KV type, laid out inside one head as
//             native   vLLM's own op does it, element (token t, dimension d) at token_offset[t] + dim_offset[d]
//             private  [block_size][2 (K, V)][head_size]: a token's key and value lie side by side, so that a selected
//                      page is one run of memory
//   KT table  at kt_offset: [num_kv_heads][head_size][2 (min, max)][block_size / page_size] of the KT type: the one of
//             min and max that a query's sign asks for, of all pages of a block, is one run of memory
//   scores    at score_offset: [num_kv_heads][block_size] float, sums of attention, where a policy needs them
#pragma once

#include <cstdint>

namespace rocketkv {

enum class Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3, kFloat8E5M2 = 4 };

inline int64_t SizeOf(Type type) {
  switch (type) {
    case Type::kFloat32: return 4;
    case Type::kBFloat16:
    case Type::kFloat16: return 2;
    default: return 1;
  }
}

// Offsets, in elements from the start of a head's 2 * block_size * head_size, of vLLM's native layout.
struct NativeLayout {
  const int32_t* key_token;    // [block_size]
  const int32_t* key_dim;      // [head_size]
  const int32_t* value_token;  // [block_size]
  const int32_t* value_dim;    // [head_size]
};

struct Cache {
  uint8_t* base;
  int64_t block_stride;  // bytes
  Type type;
  int num_kv_heads;
  int head_size;
  int block_size;
  float key_scale;  // a stored value times its scale is the real one; 1 but for fp8
  float value_scale;
  // KT table; page_size 0 where there is none.
  int64_t kt_offset;  // bytes from the start of a block
  Type kt_type;
  int page_size;
  bool kt_is_mean;       // a page's entry is the mean of its keys, twice; else its bounds
  int64_t score_offset;  // bytes from the start of a block; 0: no sums of attention

  int64_t HeadElements() const { return int64_t{2} * block_size * head_size; }
  uint8_t* Head(int64_t block, int kv_head) const {
    return base + block * block_stride + kv_head * HeadElements() * SizeOf(type);
  }
  int PagesPerBlock() const { return block_size / page_size; }
  uint8_t* KtHead(int64_t block, int kv_head) const {
    return base + block * block_stride + kt_offset +
           kv_head * (int64_t{2} * head_size * PagesPerBlock()) * SizeOf(kt_type);
  }
  // How much attention each token of the block has received: [block_size].
  float* ScoreHead(int64_t block, int kv_head) const {
    return reinterpret_cast<float*>(base + block * block_stride + score_offset) + int64_t{kv_head} * block_size;
  }
};

}  // namespace rocketkv
