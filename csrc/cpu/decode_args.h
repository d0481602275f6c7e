// SPDX-License-Identifier: Apache-2.0
// What one layer's decode step is given, and the memory it works in.
//
// A *row* is one query token that attends to what selection chooses; a *unit* is one (row, KV head).
#pragma once

#include <cstdint>

#include "common.h"

namespace rocketkv {

// One row of the step's plan (vllm_rocketkv/backend/metadata.py), int32.
struct Row {
  int32_t token;        // row of the batch
  int32_t request;      // row of the block table
  int32_t first_block;  // where the sequence that it reads starts in that row
  int32_t num_tokens;   // cached tokens that it may see, itself included
  int32_t topr;         // dimensions that the estimation reads
  int32_t later;        // 1 if the same request has a later row in this step
  int32_t topk_tokens;  // how many it attends to
  int32_t dense_below;  // with at most so many cached, it attends to all of them
  int32_t phase;        // rows of one op call are of one phase, which it need not look at
};

// How pages are ranked; the formulas are in vllm_rocketkv/kernels/reference.py.
enum class Estimator : int32_t { kHybrid = 0, kQuest = 1, kMean = 2 };

struct DecodeArgs {
  Cache cache;
  bool is_private;      // the rows' blocks are private; else native, and K, V and KT are written by others
  NativeLayout native;  // used where they are not

  Type model_type;  // of query, key, value and output: [tokens][heads][head_size], rows `*_stride` elements apart
  const void* query;
  const void* key;  // null where another layer writes this layer's cache
  const void* value;
  void* output;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t output_stride;
  int num_heads;

  const Row* rows;
  int64_t num_rows;
  const int32_t* block_table;
  int64_t table_stride;
  int max_tokens;  // most num_tokens of any row
  bool selects;    // whether any row does not read everything

  float scale;    // of q.k
  float softcap;  // 0: none

  // Selection, of rows that do not read everything.
  int sink_tokens;
  int recent_tokens;
  bool by_page;   // top-k ranks pages; else tokens
  bool adaptive;  // temperature
  Estimator estimator;

  int Group() const { return num_heads / cache.num_kv_heads; }
  const int32_t* Blocks(const Row& row) const {
    return block_table + row.request * table_stride + row.first_block;
  }
  bool ReadsAll(const Row& row) const { return cache.page_size == 0 || row.num_tokens <= row.dense_below; }
};

constexpr int kMaxGroup = 256;       // query heads of one KV head
constexpr int kChunkTokens = 64;     // tokens attended to at once: their K and V stay in the first-level cache
constexpr int kSegmentTokens = 512;  // tokens whose partial result is one unit of split work
constexpr int kRunBlocks = 8;        // blocks whose estimation is one unit of split work
constexpr int kMaxParts = 3;         // numbers of bfloat16 that add up to any float

// Memory that will be needed soon: lines at each of `offsets` from each of `bases`. While one unit computes, it fetches
// another's into the second-level cache, a few lines at every call, so that threads hardly ever wait for memory.
struct Ahead {
  const uint8_t* const* bases = nullptr;
  int64_t num_bases = 0;
  const int32_t* offsets = nullptr;  // bytes
  int num_offsets = 0;
  int lines_per_call = 0;
  int64_t base = 0;
  int offset = 0;

  // Spreads all lines over so many calls.
  void Spread(int64_t calls) {
    const int64_t lines = num_bases * num_offsets;
    lines_per_call = calls > 0 ? int((lines + calls - 1) / calls) : 0;
  }
  inline __attribute__((always_inline)) void Fetch() {
    for (int i = 0; i < lines_per_call && base < num_bases; ++i) {
      __builtin_prefetch(bases[base] + offsets[offset], 0, 2);
      if (++offset == num_offsets) {
        offset = 0;
        ++base;
      }
    }
  }
};

// Working memory of one unit, carved from one buffer. Sizes depend on lengths alone.
struct Scratch {
  float* query;         // [G][D]
  uint16_t* query_bf16;  // [G][D]
  float* read_query;    // [Q][r] what the rows that the estimation reads are multiplied by, in the order of kt_rows
  uint32_t* pairs;      // [Q or parts][r / 2] the same in bf16, two dimensions each
  int32_t* read_dims;   // [r] 2 * dimension + 1 if its maximum is read, + 0 if its minimum is
  int32_t* kt_rows;     // [r] where those bounds start in a block's KT table, in elements
  float* temperature;   // [G] factor of the logits
  float* logits;        // [Q][pages]
  double* sums;         // [pages]
  float* scores;        // [pages or tokens]
  int32_t* chosen;      // [pages or tokens], then tokens
  int32_t* tokens;      // [tokens]
  const uint8_t** rows;  // [tokens + padding] where the chosen tokens lie, for private layouts
  const uint8_t** kt;    // [blocks] where the blocks' KT tables start
  int32_t* kt_lines;     // [r * lines of a row] lines of a KT table that will be read, in bytes
  int32_t* row_lines;    // [lines of a token's K and V]
  float* partials;      // [segments][G][D + 2]: sum of weighted values, maximum, sum of weights
  uint8_t* gathered;    // [segments][kChunkTokens][2][D] of the KV type, for native layouts
  int64_t logits_stride;
  int pairs_stride;
  int num_read;        // r: at most D, or 2 D for quest, which reads both bounds
  int num_queries;     // Q: the G heads, or the group's one query
  int num_parts;       // of the group's one query, in `pairs`
  int num_chosen;      // tokens to attend to; -1: all
  int num_kt_lines;
  int num_row_lines;
  int64_t bytes;

  static Scratch Carve(uint8_t* base, const DecodeArgs& args) {
    Scratch s{};
    const int64_t group = args.Group(), dim = args.cache.head_size;
    const int64_t blocks = (args.max_tokens + args.cache.block_size - 1) / args.cache.block_size;
    const int64_t tokens = blocks * args.cache.block_size;
    const int64_t pages = args.cache.page_size ? tokens / args.cache.page_size : 0;
    const bool selects = args.selects, is_hybrid = args.estimator == Estimator::kHybrid;
    const int64_t read = args.estimator == Estimator::kQuest ? 2 * dim : dim, queries = is_hybrid ? group : 1;
    const int64_t units = selects ? (args.by_page ? pages : tokens) : 0;
    const int64_t segments = (args.max_tokens + kSegmentTokens - 1) / kSegmentTokens;
    int64_t used = 0;
    auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(+pointer)>(base + used);
      used += (count * int64_t{sizeof(*pointer)} + 127) / 64 * 64;
    };
    take(s.query, group * dim);
    take(s.query_bf16, group * dim);
    take(s.read_query, queries * read);
    s.pairs_stride = int(read / 2 + 1);
    take(s.pairs, (is_hybrid ? group : kMaxParts) * s.pairs_stride);
    take(s.read_dims, read + 1);
    take(s.kt_rows, read + 1);
    take(s.temperature, group);
    s.logits_stride = selects ? pages : 0;
    take(s.logits, queries * s.logits_stride);
    take(s.sums, is_hybrid ? s.logits_stride : 0);
    take(s.scores, units);
    take(s.chosen, units);
    take(s.tokens, selects ? tokens : 0);
    take(s.rows, selects ? tokens + 16 : 0);
    take(s.kt, selects ? blocks : 0);
    const int64_t kt_row = selects ? args.cache.PagesPerBlock() * SizeOf(args.cache.kt_type) : 0;
    take(s.kt_lines, read * ((kt_row + 63) / 64));
    take(s.row_lines, dim * 2 * SizeOf(args.cache.type) / 64 + 1);
    take(s.partials, segments * group * (dim + 2));
    take(s.gathered, args.is_private ? 0 : segments * kChunkTokens * 2 * dim * SizeOf(args.cache.type));
    s.bytes = used;
    return s;
  }
};

// The steps of one unit, in order. All are serial and write only to the scratch, the output of their row and the row's
// own slot and page of the cache.
struct DecodeKernels {
  void (*write_row)(const DecodeArgs&, const Row&, int kv_head);    // its K and V
  void (*close_page)(const DecodeArgs&, const Row&, int kv_head);   // the KT entry of the page that it fills, if it does
  void (*prepare)(const DecodeArgs&, const Row&, int kv_head, Scratch*);
  void (*estimate)(const DecodeArgs&, const Row&, int kv_head, int first_block, int last_block, Scratch*, Ahead);
  void (*select)(const DecodeArgs&, const Row&, int kv_head, Scratch*);
  void (*attend)(const DecodeArgs&, const Row&, int kv_head, int segment, Scratch*, Ahead);
  void (*combine)(const DecodeArgs&, const Row&, int kv_head, Scratch*);
};
using SummarisePageFn = void (*)(const Cache&, const NativeLayout&, int64_t block, int kv_head, int offset);

// The result is the same for any number of threads.
void Decode(const DecodeArgs& args, int threads);

}  // namespace rocketkv
