// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>

namespace rocketkv {
namespace {

constexpr PromptPlan kDensePrompt = {.is_sparse = 0, .first_limit = PromptPlan::kNever};

// One request's share of the step: positions start to end - 1, in rows of the batch from `first`
// on.
struct Request {
  int32_t index;
  int64_t first;
  int64_t start;
  int64_t end;
  PromptPlan prompt;

  // The natural length, cut to this step's positions: from here on tokens are sparse.
  int64_t Border() const {
    return prompt.is_sparse ? std::clamp(int64_t{prompt.natural_length}, start, end) : end;
  }
  // How often decoded tokens have been evicted when the token at `position` is computed.
  int64_t NumEvictions(int64_t position) const {
    if (position < prompt.first_limit) return 0;
    return (position - prompt.first_limit) / prompt.interval + 1;
  }
  // The first length beyond `start` at which decoded tokens are evicted.
  int64_t NextLimit() const {
    return prompt.first_limit + NumEvictions(start) * prompt.interval;
  }
  int64_t TokenAt(int64_t position) const { return first + position - start; }
};

int64_t CeilDiv(int64_t numerator, int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

const PromptPlan* FindPrompt(const StepInputs& in, int64_t request) {
  const int64_t id = in.plan_ids[request];
  if (id <= 0) return &kDensePrompt;
  const bool is_known = id < in.num_prompts && in.prompts[id].is_sparse != PromptPlan::kUnknown;
  return is_known ? &in.prompts[id] : nullptr;
}

int64_t FindUnknown(const StepInputs& in) {
  for (int64_t request = 0; request < in.num_reqs; ++request) {
    if (FindPrompt(in, request) == nullptr) return request;
  }
  return -1;
}

Request MakeRequest(const StepInputs& in, int64_t index) {
  const int64_t first = in.query_start_loc[index];
  const int64_t num_tokens = in.query_start_loc[index + 1] - first;
  const int64_t end = in.seq_lens[index];
  return {static_cast<int32_t>(index), first, end - num_tokens, end,
          *FindPrompt(in, index)};
}

void AddDensePart(const StepInputs& in, const StepBuffers& out, const Request& request,
                  StepCounts* counts) {
  const int64_t border = request.Border(), query_len = border - request.start;
  if (query_len == 0) return;
  for (int64_t token = request.first; token < request.first + query_len; ++token) {
    out.natural_slots[token] = in.slot_mapping[token];
    out.dense_tokens[counts->num_dense_tokens++] = token;
    counts->num_written += in.slot_mapping[token] >= 0;
  }
  const int64_t part = counts->num_dense_parts++;
  out.dense_starts[part + 1] = static_cast<int32_t>(counts->num_dense_tokens);
  out.dense_seq_lens[part] = static_cast<int32_t>(border);
  out.dense_requests[part] = request.index;
  counts->max_query_len = std::max(counts->max_query_len, query_len);
  counts->max_seq_len = std::max(counts->max_seq_len, border);
}

void AddRows(const StepInputs& in, const StepBuffers& out, const Request& request,
             StepCounts* counts) {
  const PromptPlan& prompt = request.prompt;
  const int64_t natural_blocks = CeilDiv(prompt.natural_length, in.block_size);
  const int64_t dropped_first = prompt.num_dropped_blocks * in.block_size;
  Row row{};
  row.request = request.index;
  row.first_block = in.evicts ? static_cast<int32_t>(natural_blocks) : 0;
  row.topr = prompt.topr;
  row.topk_tokens = prompt.topk_tokens;
  row.dense_below = prompt.dense_below;
  const int64_t first_row = counts->num_rows;
  const int64_t evicted_before = request.NumEvictions(request.Border());
  for (int64_t position = request.Border(); position < request.end; ++position) {
    const int64_t token = request.TokenAt(position), slot = in.slot_mapping[token];
    out.natural_slots[token] = in.evicts ? -1 : slot;
    counts->num_written += !in.evicts && slot >= 0;
    ++counts->num_sparse_tokens;
    if (slot < 0) continue;  // a dummy run
    row.token = static_cast<int32_t>(token);
    const int64_t evictions = request.NumEvictions(position);
    row.num_tokens =
        static_cast<int32_t>(position + 1 - dropped_first - evictions * prompt.interval);
    row.phase = static_cast<int32_t>(evictions - evicted_before);
    counts->num_phases = std::max<int64_t>(counts->num_phases, row.phase + 1);
    if (counts->num_rows > first_row && out.rows[counts->num_rows - 1].phase == row.phase) {
      out.rows[counts->num_rows - 1].later = 1;
      counts->has_later = 1;
    }
    out.rows[counts->num_rows++] = row;
    counts->max_row_tokens = std::max<int64_t>(counts->max_row_tokens, row.num_tokens);
  }
}

void AddWindow(const StepInputs& in, const StepBuffers& out, const Request& request,
               StepCounts* counts) {
  if (!in.evicts || !request.prompt.is_sparse || in.slot_mapping[request.first] < 0) return;
  const int64_t length = request.prompt.natural_length, window = request.prompt.window_size;
  if ((request.start < length && request.end > length - window) ||
      request.end > request.NextLimit() - window) {
    out.window_requests[counts->num_window_requests++] = request.index;
  }
}

void AddTouchedPages(const StepInputs& in, const StepBuffers& out, const Request& request,
                     StepCounts* counts) {
  if (in.page_size == 0 || in.slot_mapping[request.first] < 0) return;
  const int32_t* blocks = in.block_table + request.index * in.table_stride;
  const int64_t first_page = request.start / in.page_size;
  for (int64_t token = first_page * in.page_size; token < request.end; token += in.page_size) {
    const int64_t offset = token % in.block_size;
    out.touched_pages[counts->num_touched_pages++] = {
        blocks[token / in.block_size], static_cast<int32_t>(offset / in.page_size),
        static_cast<int32_t>(std::min(request.end - token, in.page_size))};
  }
}

}  // namespace

StepCounts PlanStep(const StepInputs& in, const StepBuffers& out) {
  StepCounts counts{};
  counts.unknown_request = FindUnknown(in);
  if (counts.unknown_request >= 0) return counts;
  out.dense_starts[0] = 0;
  for (int64_t index = 0; index < in.num_reqs; ++index) {
    const Request request = MakeRequest(in, index);
    if (request.start >= request.end) continue;  // padding
    AddDensePart(in, out, request, &counts);
    AddRows(in, out, request, &counts);
    AddWindow(in, out, request, &counts);
    AddTouchedPages(in, out, request, &counts);
  }
  std::fill(out.natural_slots + in.query_start_loc[in.num_reqs], out.natural_slots + in.num_slots,
            int64_t{-1});
  return counts;
}

}  // namespace rocketkv
