// SPDX-License-Identifier: Apache-2.0
// What eviction (stage 1) is given, and the steps it consists of.
//
// W = num_queries, N = num_tokens. KV head h serves `Group()` query heads; a *row* is one query of one of them, row
// w * Group() + g. Rows are padded to a multiple of kRowsAtOnce, and worked on in tiles of kTileTokens keys.
#pragma once

#include <cstdint>

#include "common.h"

namespace rocketkv {

constexpr int kTileTokens = 64;
constexpr int kRowsAtOnce = 4;
constexpr int kScoreRunTokens = 512;  // keys whose scoring is one unit of split work
constexpr int kHeavyRows = 128;       // rows whose normalisation is one unit, when attention is summed up
constexpr int kFewRows = 32;          // up to so many, weights are kept and not computed twice: decoded tokens
constexpr int64_t kFewWeights = 1 << 18;
constexpr int kMaxHeadSize = 256;
constexpr int kMaxLanes = 16;

// How 16 successive keys, the first at a multiple of 16, lie in a native block.
enum class KeyOrder : int32_t {
  kAny,
  kContiguous,  // the same dimension of successive tokens side by side
  kPairs,       // two dimensions of a token side by side, followed by the same two of the next token
  kRows,        // the dimensions of a token side by side
};

// The newest W queries of a request, and its keys.
struct QueryArgs {
  Cache cache;
  NativeLayout native;  // of the blocks: vLLM's, or the private one
  KeyOrder key_order;
  const int32_t* blocks;  // [ceil(N / block_size)]
  int num_tokens;

  Type model_type;
  const void* query;  // [W][num_heads][head_size], queries query_stride elements apart
  int64_t query_stride;
  int num_queries;
  int num_heads;
  float scale;    // of q.k with real keys, that is without key_scale
  float softcap;  // 0: none
  bool over_all;  // softmax over the keys that a row sees causally; else over the first N - W

  int Group() const { return num_heads / cache.num_kv_heads; }
  int Rows() const { return num_queries * Group(); }
  int PaddedRows() const { return (Rows() + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce; }
  int Prefix() const { return num_tokens - num_queries; }
  int NumScored() const { return over_all ? num_tokens : Prefix(); }  // keys that the softmax runs over
  // How many keys a row sees. Rows of padding are at least as many as the last one.
  int Visible(int row) const {
    const int causal = Prefix() + row / Group() + 1;
    return !over_all ? Prefix() : causal < num_tokens ? causal : num_tokens;
  }
  int PaddedTokens() const { return (num_tokens + kTileTokens - 1) / kTileTokens * kTileTokens; }
  bool IsFew() const { return PaddedRows() <= kFewRows && int64_t{PaddedRows()} * PaddedTokens() <= kFewWeights; }
  // The first row, rounded down to a multiple of kRowsAtOnce, that sees this key.
  int FirstRow(int token) const {
    return token <= Prefix() ? 0 : (token - Prefix()) * Group() / kRowsAtOnce * kRowsAtOnce;
  }
};

struct ScoreArgs : QueryArgs {
  int num_kept;  // W .. N - 1
  int kernel_size;
  int sink_tokens;

  // Filled by one step, read by the next.
  float* stats;   // [Hkv][NumRuns()][PaddedRows()][2] maximum of the logits, sum of e^(logit - maximum)
  float* norms;   // [Hkv][PaddedRows()][2] maximum, 1 / sum; 0 / 0 for rows of padding
  float* scores;  // [Hkv][N - W]
  int32_t* kept;  // [Hkv][num_kept] ascending

  int NumRuns() const { return (NumScored() + kScoreRunTokens - 1) / kScoreRunTokens; }
  int NumPrefixRuns() const { return (Prefix() + kScoreRunTokens - 1) / kScoreRunTokens; }
  float* Stats(int kv_head, int run) const {
    return stats + (int64_t{kv_head} * NumRuns() + run) * PaddedRows() * 2;
  }
  float* Norms(int kv_head) const { return norms + int64_t{kv_head} * PaddedRows() * 2; }
  // Floats of working memory that one call of any step may use.
  int64_t ScratchFloats() const {
    const int64_t score = int64_t{kTileTokens} * cache.head_size + int64_t{PaddedRows()} * 2 * kMaxLanes;
    const int64_t keep = int64_t{num_tokens} + kernel_size;
    return score > keep ? score : keep;
  }
};

struct CompactArgs {
  Cache cache;
  NativeLayout native;            // of prompt_blocks
  const int32_t* prompt_blocks;
  const int32_t* private_blocks;  // [ceil(num_kept / block_size)]
  const int32_t* kept;            // [Hkv][num_kept] positions in the prompt
  int num_kept;
};

// The tokens with the largest sums of attention, of blocks of any layout.
struct KeepHeavyArgs {
  Cache cache;
  const int32_t* blocks;  // [ceil(num_tokens / block_size)]
  int num_tokens;
  int num_kept;    // num_recent .. num_tokens - 1
  int num_recent;  // newest tokens, which are kept whatever their sums
  int32_t* kept;   // [Hkv][num_kept] ascending
};

// The steps, all of them serial. In order: score_stats for each run of NumRuns(); a merge of the runs' statistics, in
// order, into `norms`; score_sum for each run of NumPrefixRuns(); keep; compact for each private block (in place, where
// private blocks are prompt blocks: in ascending order).
using ScoreStatsFn = void (*)(const ScoreArgs&, int kv_head, int run, float* scratch);
using ScoreSumFn = void (*)(const ScoreArgs&, int kv_head, int run, float* scratch);
using KeepFn = void (*)(const ScoreArgs&, int kv_head, float* scratch);
using CompactFn = void (*)(const CompactArgs&, int kv_head, int private_block_index);

// Sums of attention, over_all: heavy_stats for each kHeavyRows rows, which fills norms [PaddedRows()][2] of the KV head,
// maximum and 1 / sum; then heavy_sum for each kScoreRunTokens tokens. Where IsFew(), heavy_few does both. keep_heavy
// chooses by them.
using HeavyStatsFn = void (*)(const QueryArgs&, int kv_head, int first_row, float* norms, float* scratch);
using HeavySumFn = void (*)(const QueryArgs&, int kv_head, int run, const float* norms, float* scratch);
using HeavyFewFn = void (*)(const QueryArgs&, int kv_head, float* scratch);
using KeepHeavyFn = void (*)(const KeepHeavyArgs&, int kv_head, float* scratch);  // scratch [num_tokens]

}  // namespace rocketkv
