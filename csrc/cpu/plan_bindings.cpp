// SPDX-License-Identifier: Apache-2.0
// torch.ops.rocketkv_cpu.plan_step: checks what plan.h takes on trust.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "plan.h"

namespace {

constexpr int64_t kRowColumns = sizeof(rocketkv::Row) / sizeof(int32_t);
constexpr int64_t kPromptColumns = sizeof(rocketkv::PromptPlan) / sizeof(int32_t);
constexpr int64_t kPageColumns = sizeof(rocketkv::TouchedPage) / sizeof(int32_t);
constexpr int64_t kNumCounts = sizeof(rocketkv::StepCounts) / sizeof(int64_t);

// A one-dimensional tensor of at least `size` elements.
template <typename T>
T* Vector(const at::Tensor& tensor, int64_t size, const char* name) {
  TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() && tensor.size(0) >= size,
              "plan_step: ", name, " must be contiguous with at least ", size,
              " elements, but has shape ", tensor.sizes());
  return tensor.mutable_data_ptr<T>();  // checks the dtype
}

// A table of int32 whose rows are structs.
template <typename T>
T* Table(const at::Tensor& tensor, int64_t columns, int64_t size, const char* name) {
  TORCH_CHECK(tensor.dim() == 2 && tensor.is_contiguous() && tensor.size(1) == columns &&
                  tensor.size(0) >= size,
              "plan_step: ", name, " must be a contiguous table of ", columns,
              " columns and at least ", size, " rows, but has shape ", tensor.sizes());
  return reinterpret_cast<T*>(tensor.mutable_data_ptr<int32_t>());
}

void PlanStepOp(const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
                const at::Tensor& plan_ids, const at::Tensor& slot_mapping,
                const at::Tensor& block_table, const at::Tensor& prompts, int64_t num_reqs,
                int64_t block_size, int64_t page_size, bool evicts,
                at::Tensor& rows, at::Tensor& natural_slots, at::Tensor& dense_tokens,
                at::Tensor& dense_starts, at::Tensor& dense_seq_lens, at::Tensor& dense_requests,
                at::Tensor& window_requests, at::Tensor& touched_pages, at::Tensor& counts) {
  TORCH_CHECK(num_reqs >= 0 && block_size > 0 && page_size >= 0,
              "plan_step: sizes must not be negative");
  TORCH_CHECK(page_size == 0 || block_size % page_size == 0,
              "plan_step: page_size must divide block_size");
  TORCH_CHECK(
      block_table.dim() == 2 && block_table.stride(1) == 1 && block_table.size(0) >= num_reqs,
      "plan_step: block_table must have a row of adjacent elements for each request");
  const int32_t* starts = Vector<int32_t>(query_start_loc, num_reqs + 1, "query_start_loc");
  TORCH_CHECK(starts[0] == 0 && std::is_sorted(starts, starts + num_reqs + 1),
              "plan_step: query_start_loc must start at 0 and never fall");
  const int64_t num_tokens = starts[num_reqs], num_slots = slot_mapping.numel();
  const rocketkv::StepInputs in = {
      .query_start_loc = starts,
      .seq_lens = Vector<int32_t>(seq_lens, num_reqs, "seq_lens"),
      .plan_ids = Vector<int32_t>(plan_ids, num_reqs, "plan_ids"),
      .slot_mapping = Vector<int64_t>(slot_mapping, num_tokens, "slot_mapping"),
      .block_table = block_table.const_data_ptr<int32_t>(),
      .prompts = Table<rocketkv::PromptPlan>(prompts, kPromptColumns, 0, "prompts"),
      .num_reqs = num_reqs,
      .num_slots = num_slots,
      .table_stride = block_table.stride(0),
      .num_prompts = prompts.size(0),
      .block_size = block_size,
      .page_size = page_size,
      .evicts = evicts,
  };
  const int64_t num_touched = page_size ? num_tokens : 0;
  const rocketkv::StepBuffers out = {
      .rows = Table<rocketkv::Row>(rows, kRowColumns, num_tokens, "rows"),
      .natural_slots = Vector<int64_t>(natural_slots, num_slots, "natural_slots"),
      .dense_tokens = Vector<int64_t>(dense_tokens, num_tokens, "dense_tokens"),
      .dense_starts = Vector<int32_t>(dense_starts, num_reqs + 1, "dense_starts"),
      .dense_seq_lens = Vector<int32_t>(dense_seq_lens, num_reqs, "dense_seq_lens"),
      .dense_requests = Vector<int32_t>(dense_requests, num_reqs, "dense_requests"),
      .window_requests = Vector<int32_t>(window_requests, num_reqs, "window_requests"),
      .touched_pages =
          Table<rocketkv::TouchedPage>(touched_pages, kPageColumns, num_touched, "touched_pages"),
  };
  const rocketkv::StepCounts result = rocketkv::PlanStep(in, out);
  std::memcpy(Vector<int64_t>(counts, kNumCounts, "counts"), &result, sizeof(result));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rocketkv_cpu, m) {
  m.def(
      "plan_step(Tensor query_start_loc, Tensor seq_lens, Tensor plan_ids, Tensor slot_mapping, "
      "Tensor block_table, Tensor prompts, int num_reqs, int block_size, "
      "int page_size, bool evicts, Tensor(a!) rows, Tensor(b!) natural_slots, "
      "Tensor(c!) dense_tokens, Tensor(d!) dense_starts, Tensor(e!) dense_seq_lens, "
      "Tensor(f!) dense_requests, Tensor(g!) window_requests, Tensor(h!) touched_pages, "
      "Tensor(i!) counts) -> ()");
}

TORCH_LIBRARY_IMPL(rocketkv_cpu, CPU, m) { m.impl("plan_step", &PlanStepOp); }
