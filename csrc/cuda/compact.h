// SPDX-License-Identifier: Apache-2.0
// Stage 1, second half: each KV head's kept tokens from a prompt's blocks to private ones, with the KT table of the
// copies. The layout is that of kernels/triton/cache.py: CacheView.
//
// Moves num_kept * 2 * D elements of each head in and out, 16 bytes at a time, and (num_kept / page_size) * 2 * D
// bounds out. A thread copies the same 16 bytes of all tokens of a page, so it has the minima and maxima of their
// dimensions in registers and needs no other thread. In the KT table the bounds of one dimension lie side by side, one
// for each page, so they are collected in shared memory and leave for the cache in runs.
#pragma once

#include "numbers.h"

namespace rocketkv::cuda {

struct CompactArgs {
  uint8_t* kv;  // [num_blocks][heads][block_size][2 (K, V)][head_size] of kv_kind; strides in bytes, multiples of 16
  int64_t kv_block_stride;
  int64_t kv_head_stride;
  int64_t kv_token_stride;
  uint8_t* kt;  // [num_blocks][heads][head_size][2 (min, max)][block_size / page_size] of kt_kind, a head's in one run
  int64_t kt_block_stride;
  int64_t kt_head_stride;
  Kind kv_kind;
  Kind kt_kind;
  int num_heads;
  int head_size;  // a multiple of 16, up to 256
  int block_size;
  int page_size;  // 0: no KT table
  const void* prompt_blocks;   // [n] ids, int32 or int64
  const void* private_blocks;  // [ceil(num_kept / block_size)]
  bool has_wide_ids;
  const int32_t* kept;  // [heads][num_kept] positions in the prompt, rows `kept_stride` apart; below n * block_size
  int64_t kept_stride;
  int num_kept;
};

constexpr int kVectorBytes = 16;
constexpr int kTableFloats = 4224;     // shared memory for the bounds of a tile: 16 pages of 128 dimensions, 8 of 256
constexpr int kTileTokens = 128;       // copied by one block of threads, if the table and the page size let it
constexpr int kTokensAtOnce = 4;       // that a thread has in registers: loads that are under way together

struct alignas(kVectorBytes) Vector {
  uint32_t words[4];
};

// The bounds of a page in shared memory: all minima, all maxima, and a gap that shifts the next page to other banks.
ROCKETKV_BOTH int TablePitch(int head_size) { return 2 * head_size + 4; }

// The pages of a private block, in tiles of equal size but for the last.
struct Tiling {
  int unit;  // tokens of a page; any number that divides a block, without a KT table
  int pages;
  int pages_per_block;
  int tiles_per_block;
};
ROCKETKV_BOTH Tiling TilingOf(const CompactArgs& args) {
  Tiling tiling{};
  tiling.unit = args.page_size ? args.page_size : 16;
  tiling.pages_per_block = args.block_size / tiling.unit;
  tiling.pages = Max(kTileTokens / tiling.unit, 1);
  if (args.page_size) tiling.pages = Min(tiling.pages, kTableFloats / TablePitch(args.head_size));
  tiling.pages = Min(tiling.pages, tiling.pages_per_block);
  tiling.tiles_per_block = CeilDiv(tiling.pages_per_block, tiling.pages);
  return tiling;
}
ROCKETKV_BOTH int NumTiles(const CompactArgs& args) {
  return CeilDiv(args.num_kept, args.block_size) * TilingOf(args).tiles_per_block;
}

ROCKETKV_DEVICE int64_t BlockId(const void* ids, bool is_wide, int i) {
  return is_wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// Minima and maxima of the dimensions in one column of 16 bytes. What is not a number bounds nothing.
template <Kind kKind>
struct Bounds {
  static constexpr int kSize = SizeOf(kKind), kElements = kVectorBytes / kSize, kPerWord = 4 / kSize;
  float low[kElements], high[kElements];

  ROCKETKV_DEVICE void Clear() {
    ROCKETKV_UNROLL
    for (int e = 0; e < kElements; ++e) {
      low[e] = FloatOf(0x7f800000u);
      high[e] = FloatOf(0xff800000u);
    }
  }
  ROCKETKV_DEVICE void Add(const Vector& vector) {
    ROCKETKV_UNROLL
    for (int e = 0; e < kElements; ++e) {
      const uint32_t bits = vector.words[e / kPerWord] >> (e % kPerWord * 8 * kSize);
      const float x = Decode<kKind>(kSize == 4 ? bits : bits & ((1u << (8 * kSize % 32)) - 1));
      low[e] = x < low[e] ? x : low[e];
      high[e] = x > high[e] ? x : high[e];
    }
  }
  // `out` [2 (min, max)][head_size] at the column's first dimension.
  ROCKETKV_DEVICE void Store(int head_size, float* out) const {
    ROCKETKV_UNROLL
    for (int e = 0; e < kElements; e += 4) {
      *reinterpret_cast<Vector*>(out + e) = Pack(low + e);
      *reinterpret_cast<Vector*>(out + head_size + e) = Pack(high + e);
    }
  }

 private:
  ROCKETKV_DEVICE static Vector Pack(const float* x) {
    return {{BitsOf(x[0]), BitsOf(x[1]), BitsOf(x[2]), BitsOf(x[3])}};
  }
};

// One column of `count` successive kept tokens, to successive slots from `to` on; kHasPages: with their bounds.
template <Kind kKind, bool kHasPages>
ROCKETKV_DEVICE void CopyColumn(const CompactArgs& args, const uint8_t* from, const int32_t* kept, int count,
                                uint8_t* to, Bounds<kKind>* bounds) {
  for (int first = 0; first < count; first += kTokensAtOnce) {
    // Three loads that depend on each other: all tokens take each step together.
    int tokens[kTokensAtOnce];
    int64_t blocks[kTokensAtOnce];
    Vector vectors[kTokensAtOnce];
    ROCKETKV_UNROLL
    for (int i = 0; i < kTokensAtOnce; ++i) tokens[i] = kept[Min(first + i, count - 1)];
    ROCKETKV_UNROLL
    for (int i = 0; i < kTokensAtOnce; ++i) {
      blocks[i] = BlockId(args.prompt_blocks, args.has_wide_ids, tokens[i] / args.block_size);
    }
    ROCKETKV_UNROLL
    for (int i = 0; i < kTokensAtOnce; ++i) {
      vectors[i] = *reinterpret_cast<const Vector*>(from + blocks[i] * args.kv_block_stride +
                                                    tokens[i] % args.block_size * args.kv_token_stride);
    }
    ROCKETKV_UNROLL
    for (int i = 0; i < kTokensAtOnce; ++i) {
      if (first + i >= count) continue;
      *reinterpret_cast<Vector*>(to + (first + i) * args.kv_token_stride) = vectors[i];
      if constexpr (kHasPages) bounds->Add(vectors[i]);
    }
  }
}

// Rounds the bounds of the tile's full pages outward, and writes them to their block's KT table.
ROCKETKV_DEVICE void StoreTable(const Block& block, const CompactArgs& args, int num_full, int first_page, uint8_t* kt,
                                const float* table) {
  const int pitch = TablePitch(args.head_size), pages_per_block = args.block_size / args.page_size;
  for (int i = block.thread(); i < 2 * args.head_size * num_full; i += block.threads()) {
    const int row = i / num_full, page = i % num_full, is_max = row % 2;
    const float bound = table[page * pitch + is_max * args.head_size + row / 2];
    const uint32_t code = EncodeBound(args.kt_kind, bound, is_max);
    const int at = row * pages_per_block + first_page + page;
    switch (SizeOf(args.kt_kind)) {
      case 1: kt[at] = uint8_t(code); break;
      case 2: reinterpret_cast<uint16_t*>(kt)[at] = uint16_t(code); break;
      default: reinterpret_cast<uint32_t*>(kt)[at] = code;
    }
  }
}

// Tile `tile` of NumTiles(args), for one KV head. `table` has kTableFloats, aligned to 16 bytes.
template <Kind kKind>
ROCKETKV_DEVICE void CompactTile(const Block& block, const CompactArgs& args, int tile, int head, float* table) {
  const Tiling tiling = TilingOf(args);
  const int private_index = tile / tiling.tiles_per_block;
  const int first_page = tile % tiling.tiles_per_block * tiling.pages;
  const int pages = Min(tiling.pages, tiling.pages_per_block - first_page);
  const int first = private_index * args.block_size + first_page * tiling.unit;  // of the kept tokens
  const int num_tokens = Min(pages * tiling.unit, args.num_kept - first);
  if (num_tokens <= 0) return;

  const int64_t private_block = BlockId(args.private_blocks, args.has_wide_ids, private_index);
  const int32_t* kept = args.kept + head * args.kept_stride + first;
  const int columns = 2 * args.head_size * SizeOf(kKind) / kVectorBytes, teams = block.threads() / columns;
  const int column = block.thread() % columns, team = block.thread() / columns;
  uint8_t* const of_head = args.kv + head * args.kv_head_stride + column * kVectorBytes;
  uint8_t* const to = of_head + private_block * args.kv_block_stride +
                      first_page * tiling.unit * args.kv_token_stride;
  for (int page = team; team < teams && page < pages; page += teams) {
    const int offset = page * tiling.unit, count = Min(num_tokens - offset, tiling.unit);
    const int32_t* const tokens = kept + offset;
    uint8_t* const slots = to + offset * args.kv_token_stride;
    if (args.page_size == 0) {
      CopyColumn<kKind, false>(args, of_head, tokens, count, slots, nullptr);
      continue;
    }
    Bounds<kKind> bounds;  // of values as well, for nothing: half a warp that goes its own way would cost more
    bounds.Clear();
    CopyColumn<kKind, true>(args, of_head, tokens, count, slots, &bounds);
    if (column < columns / 2 && count == tiling.unit) {
      bounds.Store(args.head_size, table + page * TablePitch(args.head_size) + column * Bounds<kKind>::kElements);
    }
  }
  if (args.page_size == 0) return;
  block.Barrier();
  const int num_full = num_tokens / args.page_size;
  uint8_t* kt = args.kt + private_block * args.kt_block_stride + head * args.kt_head_stride;
  if (num_full > 0) StoreTable(block, args, num_full, first_page, kt, table);
}

}  // namespace rocketkv::cuda
