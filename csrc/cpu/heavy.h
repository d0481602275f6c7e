// SPDX-License-Identifier: Apache-2.0
// Stage 1 of policy h2o: the attention that each token has received so far, summed up in the cache, and the tokens that
// received most (arXiv 2306.14048; vllm_rocketkv/kernels/reference.py, accumulated_scores and keep_heavy).
//
// The newest W tokens' own sums are new and replace what the block held before; those of older tokens grow. Each unit
// adds up its queries in ascending order, in double, so that neither their number nor that of the threads matters.
#pragma once

#include "score.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

template <class T, class Dot>
inline void NormRows(const QueryArgs& args, int kv_head, int first_row, float* norms, float* scratch) {
  const int last_row = int(MinI(first_row + kHeavyRows, args.PaddedRows())), rows = last_row - first_row;
  const int seen = args.Visible(last_row - 1);
  float* stats = scratch + int64_t{kTileTokens} * args.cache.head_size + int64_t{rows} * 2 * kLanes;
  float max[kHeavyRows];
  double sum[kHeavyRows];
  for (int r = 0; r < rows; ++r) {
    max[r] = kLowestLogit;
    sum[r] = 0;
  }
  for (int begin = 0; begin < seen; begin += kScoreRunTokens) {
    const int end = int(MinI(begin + kScoreRunTokens, seen));
    RowStats<T, Dot>(args, kv_head, first_row, last_row, begin, end, scratch, stats);
    for (int r = 0; r < rows; ++r) {
      const float of_run = stats[2 * r], larger = MaxF(of_run, max[r]);
      sum[r] = sum[r] * __builtin_exp(double{max[r]} - larger) + stats[2 * r + 1] * __builtin_exp(double{of_run} - larger);
      max[r] = larger;
    }
  }
  for (int r = 0; r < rows; ++r) {
    norms[2 * (first_row + r)] = max[r];
    norms[2 * (first_row + r) + 1] = first_row + r < args.Rows() ? float(1.0 / sum[r]) : 0.0f;
  }
}

// What the rows give to the keys of a tile, onto the sums in the cache.
inline void AddTile(const QueryArgs& args, int kv_head, int first, const DVec (&sums)[kTileVecs]) {
  const int block_size = args.cache.block_size, prefix = args.Prefix();
  for (int i = 0; i < kTileTokens && first + i < args.num_tokens; ++i) {
    const int token = first + i;
    const float sum = float(sums[i / kLanes][i % kLanes]);
    float* score = args.cache.ScoreHead(args.blocks[token / block_size], kv_head) + token % block_size;
    *score = token < prefix ? *score + sum : sum;
  }
}

template <class T, class Dot>
inline void AddRun(const QueryArgs& args, int kv_head, int run, const float* norms, float* scratch) {
  const int begin = run * kScoreRunTokens, end = int(MinI(begin + kScoreRunTokens, args.num_tokens));
  DVec sums[kTileVecs];
  for (int first = begin; first < end; first += kTileTokens) {
    TileSums<T, Dot>(args, kv_head, first, norms, scratch, sums);
    AddTile(args, kv_head, first, sums);
  }
}

// Both passes over few rows: what the first computes lies in weights [PaddedRows()][PaddedTokens()] behind the tile.
template <class T, class Dot>
inline void AddFew(const QueryArgs& args, int kv_head, float* scratch) {
  auto* tile = reinterpret_cast<typename Dot::Unit*>(scratch);
  float* weights = scratch + int64_t{kTileTokens} * args.cache.head_size;
  const int rows = args.PaddedRows(), tokens = args.PaddedTokens();
  Vec max[kFewRows], logits[kRowsAtOnce][kTileVecs];
  for (int r = 0; r < rows; ++r) max[r] = Splat(kLowestLogit);
  Dot dot;
  for (int first = 0; first < tokens; first += kTileTokens) {
    FillTile<T, Dot>(args, kv_head, first, tile);
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      SetRows(args, kv_head, row, &dot);
      Logits(args, dot, tile, logits);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int visible = args.Visible(row + r) - first;
        for (int v = 0; v < kTileVecs; ++v) {
          const Vec logit = Select(IsBelow(v, visible), logits[r][v], Splat(-INFINITY));
          max[row + r] = Max(logit, max[row + r]);
          Store(weights + int64_t{row + r} * tokens + first + v * kLanes, logit);
        }
      }
    }
  }
  double norm[kFewRows];
  for (int r = 0; r < args.Rows(); ++r) {
    float* of_row = weights + int64_t{r} * tokens;
    const Vec largest = Splat(MaxLane(max[r]));
    DVec sum{};
    for (int t = 0; t < tokens; t += kLanes) {
      const Vec weight = Exp(Load(of_row + t) - largest);
      sum += __builtin_convertvector(weight, DVec);
      Store(of_row + t, weight);
    }
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    norm[r] = 1.0 / total;
  }
  for (int first = 0; first < tokens; first += kTileTokens) {
    DVec sums[kTileVecs] = {};
    for (int r = 0; r < args.Rows(); ++r) {
      const int visible = args.Visible(r) - first;
      for (int v = 0; v < kTileVecs; ++v) {
        const Vec weight = Load(weights + int64_t{r} * tokens + first + v * kLanes) * Splat(float(norm[r]));
        sums[v] += __builtin_convertvector(Select(IsBelow(v, visible), weight, Splat(0.0f)), DVec);
      }
    }
    AddTile(args, kv_head, first, sums);
  }
}

// Entry points of the table.

inline void HeavyStats(const QueryArgs& args, int kv_head, int first_row, float* norms, float* scratch) {
  ROCKETKV_BY_TYPE(NormRows, args, kv_head, first_row, norms, scratch)
}

inline void HeavySum(const QueryArgs& args, int kv_head, int run, const float* norms, float* scratch) {
  ROCKETKV_BY_TYPE(AddRun, args, kv_head, run, norms, scratch)
}

inline void HeavyFew(const QueryArgs& args, int kv_head, float* scratch) {
  ROCKETKV_BY_TYPE(AddFew, args, kv_head, scratch)
}

inline void KeepHeavy(const KeepHeavyArgs& args, int kv_head, float* scratch) {
  const int older = args.num_tokens - args.num_recent, block_size = args.cache.block_size;
  for (int first = 0; first < older; first += block_size) {
    const float* scores = args.cache.ScoreHead(args.blocks[first / block_size], kv_head);
    __builtin_memcpy(scratch + first, scores, sizeof(float) * MinI(block_size, older - first));
  }
  WorstForNan(scratch, older);
  int32_t* kept = args.kept + int64_t{kv_head} * args.num_kept;
  const int best = SelectTop(scratch, older, args.num_kept - args.num_recent, kept);
  for (int i = 0; i < args.num_recent; ++i) kept[best + i] = older + i;
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
