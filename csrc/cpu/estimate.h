// SPDX-License-Identifier: Apache-2.0
// Stage 2, first half: from the KT table to the tokens that a row attends to (hybrid sparse attention, arXiv 2502.14051,
// section 3.4; the formulas are in vllm_rocketkv/kernels/reference.py, hsa_scores and hsa_choose), and two other ways
// to rank pages, by one query of the whole group (quest_scores, mean_scores).
#pragma once

#include "decode_args.h"
#include "simd.h"
#include "topk.h"

namespace rocketkv {
namespace ROCKETKV_ISA {

constexpr float kLargestBound = 18446744073709551616.0f;  // 2^64: what an infinite bound counts as
constexpr int kHeadsAtOnce = 4;

ROCKETKV_INLINE Vec Clamp(Vec bound) { return Min(Max(bound, Splat(-kLargestBound)), Splat(kLargestBound)); }

ROCKETKV_INLINE float Clamp(float bound) {
  bound = bound > -kLargestBound ? bound : -kLargestBound;
  return bound < kLargestBound ? bound : kLargestBound;
}

// `n` values of a run-time type as floats.
template <class T>
ROCKETKV_INLINE void Widen(const T* in, int n, float* out) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(out + i, Load(in + i));
  for (; i < n; ++i) out[i] = ToFloat(in[i]);
}
inline void Widen(Type type, const void* in, int64_t offset, int n, float* out) {
  switch (type) {
    case Type::kFloat32: return Widen(static_cast<const Float32*>(in) + offset, n, out);
    case Type::kBFloat16: return Widen(static_cast<const BFloat16*>(in) + offset, n, out);
    case Type::kFloat16: return Widen(static_cast<const Float16*>(in) + offset, n, out);
    case Type::kFloat8E4M3: return Widen(static_cast<const Float8E4M3*>(in) + offset, n, out);
    case Type::kFloat8E5M2: return Widen(static_cast<const Float8E5M2*>(in) + offset, n, out);
  }
}

// ------------------------------------------------------------------------------------------------ the query

inline void PrepareQuery(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  const int group = args.Group(), dim = args.cache.head_size;
  const int64_t offset = row.token * args.query_stride + int64_t{kv_head} * group * dim;
  Widen(args.model_type, args.query, offset, group * dim, s->query);
  if (args.model_type == Type::kBFloat16) {
    __builtin_memcpy(s->query_bf16, static_cast<const uint16_t*>(args.query) + offset, 2 * group * dim);
  }
}

// Hybrid sparse attention: the dimensions to read, which of their bounds, and each head's temperature.
inline void PrepareHybrid(const DecodeArgs& args, const Row& row, Scratch* s) {
  const int group = args.Group(), dim = args.cache.head_size;
  int32_t* dims = s->read_dims;
  int num_read = dim;
  if (row.topr < dim) {
    float* magnitude = s->read_query;  // filled below
    for (int d = 0; d < dim; ++d) {
      double sum = 0;
      for (int g = 0; g < group; ++g) sum += std::fabs(double{s->query[g * dim + d]});
      magnitude[d] = float(sum);
    }
    num_read = SelectTop(magnitude, dim, row.topr, dims);
  } else {
    for (int d = 0; d < dim; ++d) dims[d] = d;
  }
  for (int g = 0; g < group; ++g) {
    const float* q = s->query + g * dim;
    float total = 0, read = 0;
    for (int d = 0; d < dim; ++d) total += std::fabs(q[d]);
    for (int i = 0; i < num_read; ++i) {
      s->read_query[g * dim + i] = q[dims[i]];
      read += std::fabs(q[dims[i]]);
    }
    const float share = args.adaptive && read > 0 ? read / total : 1.0f;
    s->temperature[g] = args.cache.key_scale / std::sqrt(float(dim) * share);
    for (int i = 0; i < num_read; i += 2) {
      const uint32_t low = s->query_bf16[g * dim + dims[i]];
      const uint32_t high = i + 1 < num_read ? s->query_bf16[g * dim + dims[i + 1]] : 0;
      s->pairs[g * s->pairs_stride + i / 2] = low | high << 16;
    }
  }
  for (int i = 0; i < num_read; ++i) {  // one sign for the group, or it would read both bounds
    double sum = 0;
    for (int g = 0; g < group; ++g) sum += s->query[g * dim + dims[i]];
    dims[i] = 2 * dims[i] + (sum > 0 ? 1 : 0);
  }
  s->num_read = num_read;
  s->num_queries = group;
}

// Cuts the part that bfloat16 holds off a float: three of them are all of it. Infinity and NaN are the first part alone.
ROCKETKV_INLINE uint32_t TakePart(float* rest) {
  if (*rest != *rest) {  // the upper half of its bits may be infinity's
    *rest = 0.0f;
    return 0x7fc0;
  }
  const uint32_t part = Bits<uint32_t>(*rest) >> 16;
  const float left = *rest - Bits<float>(part << 16);
  *rest = left == left ? left : 0.0f;
  return part;
}

// quest and mean: one query for the group. quest reads a dimension's maximum for the heads whose q_d is positive and its
// minimum for the others, so that the heads' bounds add up; rows whose factor is 0 are not read.
inline void PrepareCombined(const DecodeArgs& args, Scratch* s) {
  const int group = args.Group(), dim = args.cache.head_size;
  const bool is_quest = args.estimator == Estimator::kQuest;
  int num_read = 0;
  auto read = [&](int row, double factor) {
    if (factor == 0) return;
    s->read_dims[num_read] = row;
    s->read_query[num_read++] = float(factor);
  };
  for (int d = 0; d < dim; ++d) {
    double of_min = 0, of_max = 0, sum = 0;  // what is not a number is part of both
    for (int g = 0; g < group; ++g) {
      const float q = s->query[g * dim + d];
      of_min += q > 0 ? 0.0f : q;
      of_max += q < 0 ? 0.0f : q;
      sum += q;
    }
    if (is_quest) {
      read(2 * d, of_min);
      read(2 * d + 1, of_max);
    } else {
      read(2 * d, sum / group);  // the mean, which lies in the place of both
    }
  }
  // In bfloat16 without rounding: one part if all factors have so few digits, else three.
  s->num_parts = 1;
  for (int i = 0; i < num_read; ++i) {
    if (Bits<uint32_t>(s->read_query[i]) & 0xffffu) s->num_parts = kMaxParts;
  }
  for (int i = 0; i < num_read; i += 2) {
    float low = s->read_query[i], high = i + 1 < num_read ? s->read_query[i + 1] : 0.0f;
    for (int part = 0; part < s->num_parts; ++part) {
      const uint32_t of_low = TakePart(&low);
      s->pairs[part * s->pairs_stride + i / 2] = of_low | TakePart(&high) << 16;
    }
  }
  s->num_read = num_read;
  s->num_queries = 1;
}

// The rows of the KT table to read, where they lie, and what they are multiplied by.
inline void PrepareEstimate(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  const int pages = args.cache.PagesPerBlock();
  if (args.estimator == Estimator::kHybrid) {
    PrepareHybrid(args, row, s);
  } else {
    PrepareCombined(args, s);
  }
  const int num_read = s->num_read;
  for (int i = 0; i < num_read; ++i) s->kt_rows[i] = s->read_dims[i] * pages;
  const int row_bytes = pages * int(SizeOf(args.cache.kt_type));
  s->num_kt_lines = 0;
  for (int i = 0; i < num_read; ++i) {
    for (int byte = 0; byte < row_bytes; byte += 64) {
      s->kt_lines[s->num_kt_lines++] = s->kt_rows[i] * int(SizeOf(args.cache.kt_type)) + byte;
    }
  }
  if (num_read % 2) s->kt_rows[num_read] = s->kt_rows[num_read - 1];  // the last one's partner; its query is 0
  const int32_t* blocks = args.Blocks(row);
  const int64_t num_blocks = CeilDiv(row.num_tokens, args.cache.block_size);
  for (int64_t b = 0; b < num_blocks; ++b) s->kt[b] = args.cache.KtHead(blocks[b], kv_head);
}

// ------------------------------------------------------------------------------------------------ logits of pages

#if defined(__AVX512BF16__)
// Pages [page, page + 32) of a block for kHeads heads. Two bounds of a page are brought side by side, so that one
// instruction multiplies both: 32 pages of two dimensions in two loads and two shuffles. `kIsSum`: the heads are parts of
// one query, and only their sum is stored.
template <int kHeads, bool kIsSum = false>
ROCKETKV_INLINE void EstimatePages(const uint16_t* kt, const int32_t* rows, int num_pairs, const uint32_t* pairs,
                                   int pairs_stride, const uint16_t* next, float* logits, int64_t logits_stride,
                                   Ahead* ahead) {
  __m512 low[kHeads], high[kHeads];
  for (int h = 0; h < kHeads; ++h) low[h] = high[h] = _mm512_setzero_ps();
  for (int i = 0; i < num_pairs; ++i) {
    const __m512i a = _mm512_loadu_si512(kt + rows[2 * i]);
    const __m512i b = _mm512_loadu_si512(kt + rows[2 * i + 1]);
    Prefetch(next + rows[2 * i]);
    Prefetch(next + rows[2 * i + 1]);
    ahead->Fetch();
    const __m512i l = _mm512_unpacklo_epi16(a, b), h = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) {
      const __m512i q = _mm512_set1_epi32(int32_t(pairs[head * pairs_stride + i]));
      low[head] = _mm512_dpbf16_ps(low[head], (__m512bh)l, (__m512bh)q);
      high[head] = _mm512_dpbf16_ps(high[head], (__m512bh)h, (__m512bh)q);
    }
  }
  for (int head = kHeads - 1; kIsSum && head > 0; --head) {  // the least digits first
    low[head - 1] = _mm512_add_ps(low[head - 1], low[head]);
    high[head - 1] = _mm512_add_ps(high[head - 1], high[head]);
  }
  // The unpacking went by quarters: four pages of the low halves, four of the high ones.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int head = 0; head < (kIsSum ? 1 : kHeads); ++head) {
    _mm512_storeu_ps(logits + head * logits_stride, _mm512_permutex2var_ps(low[head], first, high[head]));
    _mm512_storeu_ps(logits + head * logits_stride + 16, _mm512_permutex2var_ps(low[head], second, high[head]));
  }
}
#endif

template <int kHeads, class KT>
ROCKETKV_INLINE void EstimatePages(const KT* kt, const int32_t* rows, int num_read, const float* query,
                                   int query_stride, const KT* next, float* logits, int64_t logits_stride,
                                   Ahead* ahead) {
  Vec sum[kHeads] = {};
  for (int i = 0; i < num_read; ++i) {
    const Vec bound = Clamp(Load(kt + rows[i]));
    Prefetch(next + rows[i]);
    ahead->Fetch();
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) sum[head] = Fma(Splat(query[head * query_stride + i]), bound, sum[head]);
  }
  for (int head = 0; head < kHeads; ++head) Store(logits + head * logits_stride, sum[head]);
}

// All pages of one block for kHeads heads from `head` on; `next` is the block that will be read after it.
template <int kHeads, class KT>
inline void EstimateBlock(const DecodeArgs& args, const Scratch& s, int head, const KT* kt, const KT* next,
                          float* logits, Ahead* ahead) {
  const int dim = args.cache.head_size, pages = args.cache.PagesPerBlock();
  int page = 0;
#if defined(__AVX512BF16__)
  if (sizeof(KT) == 2 && args.model_type == Type::kBFloat16 && pages % 32 == 0) {  // all pages of a block one way
    for (; page + 32 <= pages; page += 32) {
      EstimatePages<kHeads>(reinterpret_cast<const uint16_t*>(kt) + page, s.kt_rows, (s.num_read + 1) / 2,
                            s.pairs + head * s.pairs_stride, s.pairs_stride,
                            reinterpret_cast<const uint16_t*>(next) + page, logits + page, s.logits_stride, ahead);
    }
  }
#endif
  const float* query = s.read_query + head * dim;
  for (; page + kLanes <= pages; page += kLanes) {
    EstimatePages<kHeads>(kt + page, s.kt_rows, s.num_read, query, dim, next + page, logits + page, s.logits_stride,
                          ahead);
  }
  for (; page < pages; ++page) {
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0;
      for (int i = 0; i < s.num_read; ++i) {
        const float bound = ToFloat(kt[s.kt_rows[i] + page]);
        sum = Fma(query[h * dim + i], Clamp(bound), sum);
      }
      logits[h * s.logits_stride + page] = sum;
    }
  }
}

// All pages of one block for the one query of the group, whatever type the model computes in.
template <class KT>
inline void EstimateCombined(const DecodeArgs& args, const Scratch& s, const KT* kt, const KT* next, float* logits,
                             Ahead* ahead) {
#if defined(__AVX512BF16__)
  const int pages = args.cache.PagesPerBlock();
  if (sizeof(KT) == 2 && pages % 32 == 0) {
    const int num_pairs = (s.num_read + 1) / 2;
    for (int page = 0; page < pages; page += 32) {
      const uint16_t* at = reinterpret_cast<const uint16_t*>(kt) + page;
      const uint16_t* after = reinterpret_cast<const uint16_t*>(next) + page;
      if (s.num_parts == 1) {
        EstimatePages<1>(at, s.kt_rows, num_pairs, s.pairs, s.pairs_stride, after, logits + page, 0, ahead);
      } else {
        EstimatePages<kMaxParts, true>(at, s.kt_rows, num_pairs, s.pairs, s.pairs_stride, after, logits + page, 0,
                                       ahead);
      }
    }
    return;
  }
#endif
  EstimateBlock<1>(args, s, 0, kt, next, logits, ahead);
}

// A key's element where the row's sequence has it, as stored.
template <class T>
ROCKETKV_INLINE float KeyElement(const DecodeArgs& args, const T* head, int offset, int d) {
  const int64_t at = args.is_private ? int64_t{2} * offset * args.cache.head_size + d
                                     : int64_t{args.native.key_token[offset]} + args.native.key_dim[d];
  return ToFloat(head[at]);
}

// The newest page, from the keys that the row may see: its KT entry is not written before it is full, and may hold
// tokens that come after this row.
template <class T, class KT>
inline void EstimateNewestPage(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  const Cache& cache = args.cache;
  if (row.num_tokens % cache.page_size == 0 && !row.later) return;  // it is full, and in the table
  const int dim = cache.head_size, page = (row.num_tokens - 1) / cache.page_size, first = page * cache.page_size;
  const T* head = reinterpret_cast<const T*>(cache.Head(args.Blocks(row)[first / cache.block_size], kv_head));
  const int offset = first % cache.block_size;
  float sums[kMaxGroup] = {};
  const int queries = s->num_queries, count = row.num_tokens - first;
  for (int i = 0; i < s->num_read; ++i) {
    const int d = s->read_dims[i] >> 1;
    const bool up = s->read_dims[i] & 1;
    float bound = KeyElement(args, head, offset, d);
    if (cache.kt_is_mean) {
      for (int t = 1; t < count; ++t) bound += KeyElement(args, head, offset + t, d);
      KT mean;
      FromFloat(bound / float(count), &mean);
      bound = Clamp(ToFloat(mean));
    } else {
      for (int t = 1; t < count; ++t) {
        const float key = KeyElement(args, head, offset + t, d);
        bound = (up ? key > bound : key < bound) ? key : bound;
      }
      bound = Clamp(ToFloat(RoundOutward<KT>(bound, up)));
    }
    for (int g = 0; g < queries; ++g) sums[g] = Fma(s->read_query[g * dim + i], bound, sums[g]);
  }
  for (int g = 0; g < queries; ++g) s->logits[g * s->logits_stride + page] = sums[g];
}

template <class KT>
inline void EstimateBlocks(const DecodeArgs& args, int first_block, int last_block, Scratch* s, Ahead ahead) {
  const int group = s->num_queries, pages = args.cache.PagesPerBlock();
  const bool is_combined = args.estimator != Estimator::kHybrid;
  ahead.Spread(int64_t{last_block - first_block} * s->num_kt_lines * int64_t(sizeof(KT)) / 4 *
               CeilDiv(group, kHeadsAtOnce));
  for (int i = 0; i < s->num_kt_lines; ++i) Prefetch(s->kt[first_block] + s->kt_lines[i]);
  for (int block = first_block; block < last_block; ++block) {
    const KT* kt = reinterpret_cast<const KT*>(s->kt[block]);
    const KT* next = reinterpret_cast<const KT*>(s->kt[block + 1 < last_block ? block + 1 : block]);
    float* logits = s->logits + int64_t{block} * pages;
    if (is_combined) {
      EstimateCombined(args, *s, kt, next, logits, &ahead);
      continue;
    }
    for (int head = 0; head < group; head += kHeadsAtOnce) {
      float* of_head = logits + head * s->logits_stride;
      switch (group - head) {
        case 1: EstimateBlock<1>(args, *s, head, kt, next, of_head, &ahead); break;
        case 2: EstimateBlock<2>(args, *s, head, kt, next, of_head, &ahead); break;
        case 3: EstimateBlock<3>(args, *s, head, kt, next, of_head, &ahead); break;
        default: EstimateBlock<4>(args, *s, head, kt, next, of_head, &ahead);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ scores and choice

// Softmax over tokens in each head, then the mean over the heads: scores [pages] of one token of each page.
inline void ScorePages(const DecodeArgs& args, const Row& row, Scratch* s) {
  const int group = args.Group(), page_size = args.cache.page_size;
  const int pages = int(CeilDiv(row.num_tokens, page_size)), tokens_of_last = row.num_tokens - (pages - 1) * page_size;
  const int padded = int(CeilDiv(pages, kLanes)) * kLanes;  // a block's pages beyond the last are scratch, too
  for (int p = 0; p < pages; ++p) s->sums[p] = 0;
  for (int g = 0; g < group; ++g) {
    float* logits = s->logits + g * s->logits_stride;
    // Lanes beyond the sequence may hold anything; the buffer may end before them.
    const int whole = pages / kLanes * kLanes;
    float last[kLanes];
    for (int i = 0; i < kLanes; ++i) last[i] = whole + i < pages ? logits[whole + i] : -INFINITY;
    const Vec factor = Splat(s->temperature[g]);
    Vec max = Splat(-INFINITY);
    for (int p = 0; p < whole; p += kLanes) max = Max(Load(logits + p) * factor, max);
    if (whole < padded) max = Max(Load(last) * factor, max);
    // Of the same rounded products, so that the largest page's exponent is 0 however large its logit.
    const Vec largest = Splat(MaxLane(max));
    Vec sum = {};
    for (int p = 0; p < whole; p += kLanes) {
      const Vec weight = Exp(Load(logits + p) * factor - largest);
      Store(logits + p, weight);
      sum += weight;
    }
    if (whole < padded) {
      const Vec weight = Exp(Load(last) * factor - largest);
      sum += weight;
      for (int i = 0; whole + i < pages; ++i) logits[whole + i] = weight[i];
    }
    const double total = double(Sum(sum)) * page_size - double(logits[pages - 1]) * (page_size - tokens_of_last);
    const double share = 1.0 / (total * group);
    // In double, where the order of the heads is lost in the rounding that follows: equal pages tie wherever they lie.
    for (int p = 0; p < pages; ++p) s->sums[p] += share * logits[p];
  }
  for (int p = 0; p < pages; ++p) {
    const float score = float(s->sums[p]);
    s->logits[p] = score >= 0 ? score : kWorstScore;  // not a number ranks last
  }
}

// quest and mean rank by the logits themselves, which may be negative. SelectTop compares scores as integers: here they
// become those that order as the logits do. What is not a number ranks last; the two zeros tie.
inline void RankPages(const DecodeArgs& args, const Row& row, Scratch* s) {
  const int pages = int(CeilDiv(row.num_tokens, args.cache.page_size));
  for (int p = 0; p < pages; ++p) {
    const float logit = s->logits[p] + 0.0f;  // -0 + 0 = 0
    const int32_t bits = Bits<int32_t>(logit);
    const int32_t order = logit == logit ? bits ^ (bits >> 31 & INT32_MAX) : INT32_MIN;
    __builtin_memcpy(s->logits + p, &order, sizeof(order));
  }
}

// Tokens to attend to, ascending, from the scores of ScorePages or RankPages, which lie at the start of `logits`.
inline void Choose(const DecodeArgs& args, const Row& row, Scratch* s) {
  const int page_size = args.cache.page_size, n = row.num_tokens;
  const int unit = args.by_page ? page_size : 1, per_page = page_size / unit;
  const int units = int(CeilDiv(n, unit));
  float* scores = s->scores;
  if (unit > 1 || page_size == 1) {
    __builtin_memcpy(scores, s->logits, sizeof(float) * units);
  } else {
    for (int t = 0; t < units; ++t) __builtin_memcpy(scores + t, s->logits + t / per_page, sizeof(float));
  }
  const int sinks = int(MinI(CeilDiv(args.sink_tokens, unit), units));
  int recent = units;  // the first unit of the newest tokens
  if (args.recent_tokens) recent = n > args.recent_tokens ? (n - args.recent_tokens) / unit : 0;
  const int forced = recent > sinks ? sinks + units - recent : units;
  for (int u = 0; u < sinks; ++u) scores[u] = INFINITY;
  for (int u = recent; u < units; ++u) scores[u] = INFINITY;
  const int budget = int(CeilDiv(row.topk_tokens, unit));
  const int count = int(MinI(forced > budget ? forced : budget, units));
  const int chosen = SelectTop(scores, units, count, s->chosen);
  int tokens = 0;
  for (int i = 0; i < chosen; ++i) {
    const int first = s->chosen[i] * unit, end = int(MinI(first + unit, n));
    for (int t = first; t < end; ++t) s->tokens[tokens++] = t;
  }
  s->num_chosen = tokens;
}

// Where the chosen tokens of a private layout lie. They ascend, so a block's address is looked up once.
template <class T>
inline void LocateTokens(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  const int block_size = args.cache.block_size;
  const int64_t token_bytes = int64_t{2} * args.cache.head_size * int64_t(sizeof(T));
  const int32_t* blocks = args.Blocks(row);
  const uint8_t* head = nullptr;
  int start = 0, stop = 0;  // tokens of the block at `head`
  for (int i = 0; i < s->num_chosen; ++i) {
    const int token = s->tokens[i];
    if (token >= stop) {
      const int block = token / block_size;
      start = block * block_size;
      stop = start + block_size;
      head = args.cache.Head(blocks[block], kv_head);
    }
    s->rows[i] = head + (token - start) * token_bytes;
  }
  s->num_row_lines = 0;
  for (int64_t byte = 0; byte < token_bytes; byte += 64) s->row_lines[s->num_row_lines++] = int32_t(byte);
}

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
