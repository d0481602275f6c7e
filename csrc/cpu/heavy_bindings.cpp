// SPDX-License-Identifier: Apache-2.0
// torch.ops.rocketkv_cpu.accumulate_scores and keep_heavy: eviction by the attention that tokens have received.
//
// accumulate_scores takes every query of a request, in parts of successive ones: chunks of a prompt, decoded tokens.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "stage1.h"
#include "torch_cache.h"

namespace rocketkv {
namespace {

// Successive queries of one request.
struct Part {
  int32_t first_token;  // row of the batch
  int32_t num_tokens;   // queries
  int32_t request;      // row of the block table
  int32_t first_block;  // where its sequence starts in that row
  int32_t end;          // cached tokens that the last query sees, itself included
};
constexpr int64_t kPartColumns = sizeof(Part) / sizeof(int32_t);

struct Unit {
  int32_t part, kv_head, index;
};

void CheckPart(const Part& part, int64_t index, const QueryArgs& args, const at::Tensor& block_table,
               int64_t num_tokens, std::vector<bool>* is_used) {
  const int64_t blocks = (int64_t{part.end} + args.cache.block_size - 1) / args.cache.block_size;
  TORCH_CHECK(part.first_token >= 0 && part.num_tokens > 0 && int64_t{part.first_token} + part.num_tokens <= num_tokens &&
                  int64_t{part.num_tokens} * args.num_heads < (int64_t{1} << 30) && part.num_tokens <= part.end &&
                  part.end < (1 << 30) && part.request >= 0 && part.request < block_table.size(0) &&
                  part.first_block >= 0 && part.first_block + blocks <= block_table.size(1),
              "rocketkv_cpu: part ", index, " leaves the batch, its sequence or the block table");
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t block = args.blocks[b];
    TORCH_CHECK(block >= 0 && block < int64_t(is_used->size()), "rocketkv_cpu: part ", index, " reads block ", block,
                " of ", is_used->size());
    TORCH_CHECK(!(*is_used)[block], "rocketkv_cpu: block ", block, " of part ", index, " belongs to two places");
    (*is_used)[block] = true;
  }
}

void AccumulateScores(const at::Tensor& query, const at::Tensor& kv_cache, const at::Tensor& parts,
                      const at::Tensor& block_table, int64_t kv_type, double key_scale, double value_scale,
                      int64_t kt_offset, int64_t kt_type, int64_t page_size, bool kt_is_mean, int64_t score_offset,
                      const at::Tensor& native_layout, double scale, double softcap) {
  QueryArgs args{};
  args.cache = MakeCache(kv_cache, kv_type, key_scale, value_scale, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  TORCH_CHECK(score_offset != 0, "rocketkv_cpu: kv_cache has no sums of attention");
  const int heads = args.cache.num_kv_heads, dim = args.cache.head_size;
  TORCH_CHECK(query.device().is_cpu() && query.dim() == 3 && query.size(2) == dim && query.size(1) > 0 &&
                  query.size(1) % heads == 0 && query.stride(2) == 1 && (query.size(1) == 1 || query.stride(1) == dim),
              "rocketkv_cpu: query must be [tokens, a multiple of ", heads, ", ", dim,
              "] with adjacent heads, but is ", query.sizes());
  TORCH_CHECK(parts.device().is_cpu() && parts.scalar_type() == at::kInt && parts.dim() == 2 && parts.is_contiguous() &&
                  parts.size(1) == kPartColumns,
              "rocketkv_cpu: parts must be contiguous int32 [parts, ", kPartColumns, "]");
  TORCH_CHECK(block_table.device().is_cpu() && block_table.scalar_type() == at::kInt && block_table.dim() == 2 &&
                  block_table.stride(1) == 1,
              "rocketkv_cpu: block_table must be int32 [requests, blocks]");
  TORCH_CHECK(softcap >= 0, "rocketkv_cpu: softcap must not be negative");
  args.native = MakeNativeLayout(native_layout, args.cache);
  args.key_order = OrderOf(args.native, args.cache);
  args.model_type = ModelType(query, "query");
  args.query_stride = query.stride(0);
  args.num_heads = int(query.size(1));
  args.scale = float(scale);
  args.softcap = float(softcap);
  args.over_all = true;

  std::vector<QueryArgs> of_part(parts.size(0), args);
  std::vector<int64_t> first_norm(parts.size(0));
  std::vector<Unit> few, stats, sums;
  std::vector<bool> is_used(kv_cache.size(0));
  int64_t rows = 0, scratch_floats = kHeavyRows * 2 * (kMaxLanes + 1);
  for (int64_t i = 0; i < parts.size(0); ++i) {
    const Part& part = reinterpret_cast<const Part*>(parts.const_data_ptr<int32_t>())[i];
    QueryArgs& of = of_part[i];
    of.blocks = block_table.const_data_ptr<int32_t>() + part.request * block_table.stride(0) + part.first_block;
    CheckPart(part, i, of, block_table, query.size(0), &is_used);
    of.query = static_cast<const uint8_t*>(query.const_data_ptr()) +
               part.first_token * args.query_stride * int64_t(query.element_size());
    of.num_queries = part.num_tokens;
    of.num_tokens = part.end;
    if (of.IsFew()) {
      for (int h = 0; h < heads; ++h) few.push_back({int32_t(i), h, 0});
      scratch_floats = std::max(scratch_floats, int64_t{of.PaddedRows()} * of.PaddedTokens());
      continue;
    }
    first_norm[i] = rows * heads;
    rows += of.PaddedRows();
    for (int h = 0; h < heads; ++h) {
      for (int row = 0; row < of.PaddedRows(); row += kHeavyRows) stats.push_back({int32_t(i), h, row});
      for (int run = 0; run < of.num_tokens; run += kScoreRunTokens) {
        sums.push_back({int32_t(i), h, run / kScoreRunTokens});
      }
    }
  }
  // Threads take the most expensive units first: the last queries of a prompt, and its first keys.
  std::reverse(stats.begin(), stats.end());

  const int threads = at::get_num_threads();
  scratch_floats += int64_t{kTileTokens} * dim;
  const at::TensorOptions floats = at::TensorOptions().dtype(at::kFloat);
  at::Tensor all_norms = at::empty({rows * heads, 2}, floats), scratch = at::empty({threads, scratch_floats}, floats);
  float* const scratch_of_all = scratch.mutable_data_ptr<float>();
  float* const norms_of_all = all_norms.mutable_data_ptr<float>();
  auto norms = [&](const Unit& unit) {
    return norms_of_all + 2 * (first_norm[unit.part] + int64_t{unit.kv_head} * of_part[unit.part].PaddedRows());
  };
  const Kernels& table = kernels();
#pragma omp parallel num_threads(threads)
  {
    float* of_thread = scratch_of_all + omp_get_thread_num() * scratch_floats;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < few.size(); ++i) table.heavy_few(of_part[few[i].part], few[i].kv_head, of_thread);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < stats.size(); ++i) {
      table.heavy_stats(of_part[stats[i].part], stats[i].kv_head, stats[i].index, norms(stats[i]), of_thread);
    }
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < sums.size(); ++i) {
      table.heavy_sum(of_part[sums[i].part], sums[i].kv_head, sums[i].index, norms(sums[i]), of_thread);
    }
  }
}

at::Tensor KeepHeavyTokens(const at::Tensor& kv_cache, const at::Tensor& blocks, int64_t num_tokens, int64_t num_kept,
                           int64_t num_recent, int64_t kv_type, double key_scale, double value_scale,
                           int64_t kt_offset, int64_t kt_type, int64_t page_size, bool kt_is_mean,
                           int64_t score_offset) {
  KeepHeavyArgs args{};
  args.cache = MakeCache(kv_cache, kv_type, key_scale, value_scale, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  TORCH_CHECK(score_offset != 0, "rocketkv_cpu: kv_cache has no sums of attention");
  TORCH_CHECK(num_tokens >= 0 && num_tokens < (int64_t{1} << 30) && num_kept >= 0 && num_recent >= 0,
              "rocketkv_cpu: cannot keep ", num_kept, " of ", num_tokens, " tokens");
  const int heads = args.cache.num_kv_heads;
  num_kept = std::min(num_kept, num_tokens);
  at::Tensor kept = at::empty({heads, num_kept}, at::TensorOptions().dtype(at::kInt));
  args.kept = kept.mutable_data_ptr<int32_t>();
  if (num_kept == num_tokens) {
    for (int64_t i = 0; i < kept.numel(); ++i) args.kept[i] = int32_t(i % num_kept);
    return kept;
  }
  TORCH_CHECK(num_recent <= num_kept, "rocketkv_cpu: cannot keep ", num_recent, " recent tokens in a budget of ",
              num_kept);
  args.blocks = BlockIds(blocks, (num_tokens + args.cache.block_size - 1) / args.cache.block_size, kv_cache.size(0), "blocks");
  args.num_tokens = int(num_tokens);
  args.num_kept = int(num_kept);
  args.num_recent = int(num_recent);
  at::Tensor scratch = at::empty({heads, num_tokens}, at::TensorOptions().dtype(at::kFloat));
  float* const scratch_of_all = scratch.mutable_data_ptr<float>();
  const Kernels& table = kernels();
#pragma omp parallel for schedule(dynamic) num_threads(at::get_num_threads())
  for (int h = 0; h < heads; ++h) table.keep_heavy(args, h, scratch_of_all + h * num_tokens);
  return kept;
}

#define ROCKETKV_FORMAT_SCHEMA                                                                                 \
  "int kv_type, float key_scale, float value_scale, int kt_offset, int kt_type, int page_size, bool kt_is_mean, " \
  "int score_offset"

TORCH_LIBRARY_FRAGMENT(rocketkv_cpu, m) {
  m.def(
      "accumulate_scores(Tensor query, Tensor(a!) kv_cache, Tensor parts, Tensor block_table, " ROCKETKV_FORMAT_SCHEMA
      ", Tensor native_layout, float scale, float softcap) -> ()");
  m.def(
      "keep_heavy(Tensor kv_cache, Tensor blocks, int num_tokens, int num_kept, int num_recent, " ROCKETKV_FORMAT_SCHEMA
      ") -> Tensor");
}

TORCH_LIBRARY_IMPL(rocketkv_cpu, CPU, m) {
  m.impl("accumulate_scores", &AccumulateScores);
  m.impl("keep_heavy", &KeepHeavyTokens);
}

}  // namespace
}  // namespace rocketkv
