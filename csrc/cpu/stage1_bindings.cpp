// SPDX-License-Identifier: Apache-2.0
// torch.ops.rocketkv_cpu.keep_tokens and compact: eviction by observation window, once per eviction and layer.
//
// Work is split by sizes alone, and partial results are merged in order: the number of threads changes no bit.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "stage1.h"
#include "torch_cache.h"

namespace rocketkv {
namespace {

// The runs' maxima and sums of one KV head, merged into what its rows are normalised with.
void MergeStats(const ScoreArgs& args, int kv_head) {
  float* norms = args.Norms(kv_head);
  for (int r = 0; r < args.PaddedRows(); ++r) {
    float max = -INFINITY;
    for (int run = 0; run < args.NumRuns(); ++run) max = std::max(max, args.Stats(kv_head, run)[2 * r]);
    double sum = 0;
    for (int run = 0; run < args.NumRuns(); ++run) {
      const float* stats = args.Stats(kv_head, run) + 2 * r;
      sum += stats[1] * std::exp(double{stats[0]} - max);
    }
    norms[2 * r] = max;
    norms[2 * r + 1] = r < args.Rows() ? float(1.0 / sum) : 0.0f;
  }
}

at::Tensor KeepTokens(const at::Tensor& window_query, const at::Tensor& kv_cache, const at::Tensor& prompt_blocks,
                      int64_t num_prompt_tokens, int64_t num_kept, int64_t kv_type, double key_scale,
                      double value_scale, int64_t kt_offset, int64_t kt_type, int64_t page_size, bool kt_is_mean,
                      int64_t score_offset, const at::Tensor& native_layout, double scale, double softcap, bool softmax_over_all,
                      int64_t kernel_size, int64_t sink_tokens) {
  ScoreArgs args{};
  args.cache = MakeCache(kv_cache, kv_type, key_scale, value_scale, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  const int64_t num_kv_heads = args.cache.num_kv_heads;
  TORCH_CHECK(window_query.device().is_cpu() && window_query.dim() == 3 && window_query.is_contiguous() &&
                  window_query.size(2) == args.cache.head_size && window_query.size(1) > 0 &&
                  window_query.size(1) % num_kv_heads == 0,
              "rocketkv_cpu: window_query must be contiguous [W, a multiple of ", num_kv_heads, ", ",
              args.cache.head_size, "], but is ", window_query.sizes());
  const int64_t window_size = window_query.size(0);
  TORCH_CHECK(num_prompt_tokens < (int64_t{1} << 30) && window_size <= num_prompt_tokens && num_kept >= 0,
              "rocketkv_cpu: ", window_size, " window queries do not fit a prompt of ", num_prompt_tokens, " tokens");
  TORCH_CHECK(kernel_size > 0 && kernel_size % 2 == 1 && kernel_size < (1 << 20) && sink_tokens >= 0 && softcap >= 0,
              "rocketkv_cpu: kernel_size must be odd, and sink_tokens and softcap not negative");
  num_kept = std::min(num_kept, num_prompt_tokens);
  const at::TensorOptions ints = at::TensorOptions().dtype(at::kInt), floats = ints.dtype(at::kFloat);
  at::Tensor kept = at::empty({num_kv_heads, num_kept}, ints);
  args.kept = kept.mutable_data_ptr<int32_t>();
  if (num_kept == num_prompt_tokens) {
    for (int64_t i = 0; i < kept.numel(); ++i) args.kept[i] = int32_t(i % num_kept);
    return kept;
  }
  TORCH_CHECK(num_kept >= window_size, "rocketkv_cpu: cannot keep a window of ", window_size, " tokens in a budget of ",
              num_kept);
  args.native = MakeNativeLayout(native_layout, args.cache);
  args.key_order = OrderOf(args.native, args.cache);
  const int64_t num_blocks = (num_prompt_tokens + args.cache.block_size - 1) / args.cache.block_size;
  args.blocks = BlockIds(prompt_blocks, num_blocks, kv_cache.size(0), "prompt_blocks");
  args.num_tokens = int(num_prompt_tokens);
  args.num_kept = int(num_kept);
  args.model_type = ModelType(window_query, "window_query");
  args.query = window_query.const_data_ptr();
  args.query_stride = window_query.size(1) * window_query.size(2);
  args.num_queries = int(window_size);
  args.num_heads = int(window_query.size(1));
  args.scale = float(scale);
  args.softcap = float(softcap);
  args.over_all = softmax_over_all;
  args.kernel_size = int(kernel_size);
  args.sink_tokens = int(std::min(sink_tokens, num_prompt_tokens));

  const int heads = args.cache.num_kv_heads, runs = args.NumRuns(), prefix_runs = args.NumPrefixRuns();
  const int threads = at::get_num_threads();
  at::Tensor stats = at::empty({heads, runs, args.PaddedRows(), 2}, floats);
  at::Tensor norms = at::empty({heads, args.PaddedRows(), 2}, floats);
  at::Tensor scores = at::empty({heads, args.Prefix()}, floats);
  at::Tensor scratch = at::empty({threads, args.ScratchFloats()}, floats);
  args.stats = stats.mutable_data_ptr<float>();
  args.norms = norms.mutable_data_ptr<float>();
  args.scores = scores.mutable_data_ptr<float>();
  float* const all_scratch = scratch.mutable_data_ptr<float>();
  const Kernels& table = kernels();
#pragma omp parallel num_threads(threads)
  {
    float* of_thread = all_scratch + omp_get_thread_num() * args.ScratchFloats();
#pragma omp for schedule(dynamic)
    for (int i = 0; i < heads * runs; ++i) table.score_stats(args, i / runs, i % runs, of_thread);
#pragma omp for schedule(dynamic)
    for (int h = 0; h < heads; ++h) MergeStats(args, h);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < heads * prefix_runs; ++i) table.score_sum(args, i / prefix_runs, i % prefix_runs, of_thread);
#pragma omp for schedule(dynamic)
    for (int h = 0; h < heads; ++h) table.keep(args, h, of_thread);
  }
  return kept;
}

// Refuses what would read a slot of a private block after another token has come there.
void CheckInPlace(const CompactArgs& args, int64_t num_prompt_blocks, int64_t num_private_blocks) {
  TORCH_CHECK(num_private_blocks <= num_prompt_blocks &&
                  std::equal(args.private_blocks, args.private_blocks + num_private_blocks, args.prompt_blocks),
              "rocketkv_cpu: in place, private_blocks must be the first of prompt_blocks");
  const int dim = args.cache.head_size;
  bool is_private = true;
  for (int t = 0; t < args.cache.block_size; ++t) {
    is_private &= args.native.key_token[t] == 2 * dim * t && args.native.value_token[t] == 2 * dim * t + dim;
  }
  for (int d = 0; d < dim; ++d) is_private &= args.native.key_dim[d] == d && args.native.value_dim[d] == d;
  TORCH_CHECK(is_private, "rocketkv_cpu: in place, native_layout must be that of private blocks");
  for (int h = 0; h < args.cache.num_kv_heads; ++h) {
    const int32_t* kept = args.kept + int64_t{h} * args.num_kept;
    for (int i = 1; i < args.num_kept; ++i) {
      TORCH_CHECK(kept[i] > kept[i - 1], "rocketkv_cpu: in place, kept must be ascending, but head ", h, " has ",
                  kept[i - 1], " before ", kept[i]);
    }
  }
}

void CompactTokens(const at::Tensor& kv_cache, const at::Tensor& prompt_blocks, const at::Tensor& private_blocks,
                   const at::Tensor& kept, int64_t kv_type, double key_scale, double value_scale, int64_t kt_offset,
                   int64_t kt_type, int64_t page_size, bool kt_is_mean, int64_t score_offset,
                   const at::Tensor& native_layout, bool in_place) {
  CompactArgs args{};
  args.cache = MakeCache(kv_cache, kv_type, key_scale, value_scale, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  args.native = MakeNativeLayout(native_layout, args.cache);
  const int heads = args.cache.num_kv_heads;
  TORCH_CHECK(kept.device().is_cpu() && kept.scalar_type() == at::kInt && kept.dim() == 2 && kept.is_contiguous() &&
                  kept.size(0) == heads && kept.size(1) < (int64_t{1} << 30),
              "rocketkv_cpu: kept must be contiguous int32 [", heads, ", tokens], but is ", kept.sizes());
  args.kept = kept.const_data_ptr<int32_t>();
  args.num_kept = int(kept.size(1));
  const int blocks = (args.num_kept + args.cache.block_size - 1) / args.cache.block_size;
  args.prompt_blocks = BlockIds(prompt_blocks, prompt_blocks.numel(), kv_cache.size(0), "prompt_blocks");
  args.private_blocks = BlockIds(private_blocks, blocks, kv_cache.size(0), "private_blocks");
  const int64_t num_tokens = prompt_blocks.numel() * args.cache.block_size;
  TORCH_CHECK(std::all_of(args.kept, args.kept + kept.numel(), [=](int32_t t) { return t >= 0 && t < num_tokens; }),
              "rocketkv_cpu: kept names a token that prompt_blocks do not hold");
  if (in_place) CheckInPlace(args, prompt_blocks.numel(), blocks);
  const Kernels& table = kernels();
  // In place, a block's tokens must have gone where they belong before others come: its blocks are one unit of work.
  const int at_once = in_place ? std::max(blocks, 1) : 1, units = heads * blocks / at_once;
#pragma omp parallel for schedule(dynamic) num_threads(at::get_num_threads())
  for (int i = 0; i < units; ++i) {
    for (int j = i * at_once; j < (i + 1) * at_once; ++j) table.compact(args, j / blocks, j % blocks);
  }
}

#define ROCKETKV_CACHE_SCHEMA                                                                                  \
  "int kv_type, float key_scale, float value_scale, int kt_offset, int kt_type, int page_size, bool kt_is_mean, " \
  "int score_offset, Tensor native_layout"

TORCH_LIBRARY_FRAGMENT(rocketkv_cpu, m) {
  m.def(
      "keep_tokens(Tensor window_query, Tensor kv_cache, Tensor prompt_blocks, int num_prompt_tokens, int num_kept, "
      ROCKETKV_CACHE_SCHEMA
      ", float scale, float softcap, bool softmax_over_all, int kernel_size, int sink_tokens) -> Tensor");
  m.def(
      "compact(Tensor(a!) kv_cache, Tensor prompt_blocks, Tensor private_blocks, Tensor kept, "
      ROCKETKV_CACHE_SCHEMA ", bool in_place=False) -> ()");
}

TORCH_LIBRARY_IMPL(rocketkv_cpu, CPU, m) {
  m.impl("keep_tokens", &KeepTokens);
  m.impl("compact", &CompactTokens);
}

}  // namespace
}  // namespace rocketkv
