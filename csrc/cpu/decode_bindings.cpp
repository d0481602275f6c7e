// SPDX-License-Identifier: Apache-2.0
// torch.ops.rocketkv_cpu.decode, summarise_pages, isas, isa and set_isa.
#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "kernels.h"
#include "torch_cache.h"

namespace rocketkv {
namespace {

// Query, key, value or output [tokens, heads, head_size]: returns the distance of its tokens in elements.
int64_t TokenStride(const at::Tensor& tensor, int64_t heads, int64_t head_size, at::ScalarType dtype, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 3 &&
                  tensor.size(1) == heads && tensor.size(2) == head_size && tensor.stride(2) == 1 &&
                  (heads == 1 || tensor.stride(1) == head_size),
              "rocketkv_cpu: ", name, " must be [tokens, ", heads, ", ", head_size, "] of the query's dtype, but is ",
              tensor.sizes());
  return tensor.stride(0);
}

void CheckRows(const DecodeArgs& args, const at::Tensor& block_table, int64_t num_tokens, int64_t num_blocks) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const Row& row = args.rows[i];
    const int64_t blocks = (row.num_tokens + args.cache.block_size - 1) / args.cache.block_size;
    TORCH_CHECK(row.token >= 0 && row.token < num_tokens && row.request >= 0 && row.request < block_table.size(0) &&
                    row.num_tokens > 0 && row.num_tokens <= args.max_tokens && row.first_block >= 0 &&
                    row.first_block + blocks <= block_table.size(1) && row.topr > 0 && row.topk_tokens > 0,
                "rocketkv_cpu: row ", i, " leaves the batch, the block table or max_tokens");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t block = args.Blocks(row)[b];
      TORCH_CHECK(block >= 0 && block < num_blocks, "rocketkv_cpu: row ", i, " reads block ", block, " of ", num_blocks);
    }
  }
}

void DecodeOp(const at::Tensor& query, const std::optional<at::Tensor>& key, const std::optional<at::Tensor>& value,
              const at::Tensor& kv_cache, const at::Tensor& output, const at::Tensor& rows, const at::Tensor& block_table,
              int64_t kv_type, double key_scale, double value_scale, int64_t kt_offset, int64_t kt_type, int64_t page_size,
              bool kt_is_mean, int64_t score_offset, const std::optional<at::Tensor>& native_layout, double scale,
              double softcap, int64_t max_tokens, int64_t sink_tokens, int64_t recent_tokens, bool by_page, bool adaptive,
              int64_t estimator) {
  DecodeArgs args{};
  args.cache =
      MakeCache(kv_cache, kv_type, key_scale, value_scale, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  args.is_private = !native_layout.has_value();
  if (native_layout) args.native = MakeNativeLayout(*native_layout, args.cache);
  const int64_t head_size = args.cache.head_size, kv_heads = args.cache.num_kv_heads;
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(query.dim() == 3 && query.size(1) > 0 && query.size(1) % kv_heads == 0,
              "rocketkv_cpu: query must be [tokens, a multiple of ", kv_heads, ", head_size]");
  args.model_type = ModelType(query, "query");
  args.num_heads = int(query.size(1));
  TORCH_CHECK(args.Group() <= kMaxGroup, "rocketkv_cpu: at most ", kMaxGroup, " query heads can share a KV head");
  args.query = query.const_data_ptr();
  args.query_stride = TokenStride(query, args.num_heads, head_size, dtype, "query");
  args.output = output.mutable_data_ptr();
  args.output_stride = TokenStride(output, args.num_heads, head_size, dtype, "output");
  int64_t num_tokens = std::min(query.size(0), output.size(0));
  TORCH_CHECK(key.has_value() == value.has_value(), "rocketkv_cpu: key and value must be given together");
  if (key) {
    args.key = key->const_data_ptr();
    args.value = value->const_data_ptr();
    args.key_stride = TokenStride(*key, kv_heads, head_size, dtype, "key");
    args.value_stride = TokenStride(*value, kv_heads, head_size, dtype, "value");
    num_tokens = std::min({num_tokens, key->size(0), value->size(0)});
  }
  TORCH_CHECK(rows.scalar_type() == at::kInt && rows.dim() == 2 && rows.is_contiguous() &&
                  rows.size(1) == int64_t(sizeof(Row) / sizeof(int32_t)),
              "rocketkv_cpu: rows must be contiguous int32 [rows, 9]");
  TORCH_CHECK(block_table.scalar_type() == at::kInt && block_table.dim() == 2 && block_table.stride(1) == 1,
              "rocketkv_cpu: block_table must be int32 [requests, blocks]");
  args.rows = reinterpret_cast<const Row*>(rows.const_data_ptr<int32_t>());
  args.num_rows = rows.size(0);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.table_stride = block_table.stride(0);
  args.max_tokens = int(max_tokens);
  args.scale = float(scale);
  args.softcap = float(softcap);
  args.sink_tokens = int(sink_tokens);
  args.recent_tokens = int(recent_tokens);
  args.by_page = by_page;
  args.adaptive = adaptive;
  TORCH_CHECK(estimator >= 0 && estimator <= int64_t(Estimator::kMean), "rocketkv_cpu: unknown estimator ", estimator);
  args.estimator = Estimator(estimator);
  for (int64_t i = 0; i < args.num_rows; ++i) args.selects |= !args.ReadsAll(args.rows[i]);
  TORCH_CHECK(!args.selects || kt_is_mean == (args.estimator == Estimator::kMean),
              "rocketkv_cpu: pages hold their keys' ", kt_is_mean ? "mean" : "bounds", ", which estimator ", estimator,
              " does not rank by");
  CheckRows(args, block_table, num_tokens, kv_cache.size(0));
  Decode(args, at::get_num_threads());
}

void SummarisePages(const at::Tensor& kv_cache, const at::Tensor& pages, int64_t kv_type, int64_t kt_offset,
                    int64_t kt_type, int64_t page_size, bool kt_is_mean, int64_t score_offset,
                    const at::Tensor& native_layout) {
  const Cache cache = MakeCache(kv_cache, kv_type, 1, 1, kt_offset, kt_type, page_size, kt_is_mean, score_offset);
  TORCH_CHECK(page_size > 0, "rocketkv_cpu: there is no KT table");
  const NativeLayout native = MakeNativeLayout(native_layout, cache);
  TORCH_CHECK(pages.scalar_type() == at::kInt && pages.dim() == 2 && pages.is_contiguous() && pages.size(1) == 3,
              "rocketkv_cpu: pages must be contiguous int32 [pages, 3]");
  const int32_t* table = pages.const_data_ptr<int32_t>();
  const int64_t count = pages.size(0);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(table[3 * i] >= 0 && table[3 * i] < kv_cache.size(0) && table[3 * i + 1] >= 0 &&
                    table[3 * i + 1] < cache.PagesPerBlock(),
                "rocketkv_cpu: page ", i, " does not exist");
  }
  const SummarisePageFn summarise = kernels().summarise_native_page(cache.type, cache.kt_type);
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
  for (int64_t i = 0; i < count * cache.num_kv_heads; ++i) {
    const int32_t* page = table + i / cache.num_kv_heads * 3;
    if (page[2] < page_size) continue;  // the newest page's bounds are computed where they are read
    summarise(cache, native, page[0], int(i % cache.num_kv_heads), int(page[1] * page_size));
  }
}

std::vector<std::string> Isas() {
  std::vector<std::string> names;
  for (int i = 0; i < NumIsas(); ++i) names.emplace_back(IsaName(i));
  return names;
}

void SetIsaOp(std::string name) {
  TORCH_CHECK(SetIsa(name.c_str()), "rocketkv_cpu: this processor has no kernels named ", name);
}

std::string IsaOp() { return ActiveIsa(); }

TORCH_LIBRARY_FRAGMENT(rocketkv_cpu, m) {
  m.def(
      "decode(Tensor query, Tensor? key, Tensor? value, Tensor(a!) kv_cache, Tensor(b!) output, Tensor rows, "
      "Tensor block_table, int kv_type, float key_scale, float value_scale, int kt_offset, int kt_type, int page_size, "
      "bool kt_is_mean, int score_offset, Tensor? native_layout, float scale, float softcap, int max_tokens, "
      "int sink_tokens, int recent_tokens, bool by_page, bool adaptive, int estimator) -> ()");
  m.def(
      "summarise_pages(Tensor(a!) kv_cache, Tensor pages, int kv_type, int kt_offset, int kt_type, int page_size, "
      "bool kt_is_mean, int score_offset, Tensor native_layout) -> ()");
  m.def("isas() -> str[]", &Isas);
  m.def("isa() -> str", &IsaOp);
  m.def("set_isa(str name) -> ()", &SetIsaOp);
}

TORCH_LIBRARY_IMPL(rocketkv_cpu, CPU, m) {
  m.impl("decode", &DecodeOp);
  m.impl("summarise_pages", &SummarisePages);
}

}  // namespace
}  // namespace rocketkv
