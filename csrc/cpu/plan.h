// SPDX-License-Identifier: Apache-2.0
// What one step does with each token of the batch, from lengths alone
// (vllm_rocketkv/backend/metadata.py).
//
// The tokens of a request that is evicted or selected from are cut at its natural length, which is
// that of its prompt, or where decoded tokens are evicted first:
//
// - natural tokens: positions below it, and every token of other requests. Their K and V are written
//   and read by vLLM's own ops.
// - sparse tokens: positions from it on. The decode op attends for them, one row each. If the prompt
//   was evicted they are private as well: that op writes their K and V to blocks of its own layout,
//   and vLLM's op must skip them (slot -1).
//
// Everything is one pass over the batch into buffers of the caller; nothing is allocated.
#pragma once

#include <cstdint>

#include "decode_args.h"

namespace rocketkv {

// What the configuration says about one length of prompt (layout.py has the words); asked of Python
// when a length first occurs.
struct PromptPlan {
  int32_t is_sparse;           // whether any token is, or kUnknown
  int32_t natural_length;      // tokens before the first sparse one
  int32_t num_dropped_blocks;  // s, blocks by which the first eviction makes the request shorter
  int32_t topr;                // dimensions that the estimation reads
  int32_t topk_tokens;         // tokens that a row attends to
  int32_t dense_below;         // with at most so many cached, it attends to all of them
  int32_t window_size;         // newest tokens whose queries an eviction needs
  int32_t first_limit;         // length at which decoded tokens are first evicted; a huge one for never
  int32_t interval;            // tokens between two such evictions, by which each shortens the request

  static constexpr int32_t kUnknown = -1;
  static constexpr int32_t kNever = 1 << 30;
};

// A KT page that holds a token of this step, for policies that select without evicting.
struct TouchedPage {
  int32_t block;
  int32_t page;       // inside the block
  int32_t num_valid;  // real tokens on it after this step
};

struct StepInputs {
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* plan_ids;         // [num_reqs], 0 for padded rows and dummy runs
  const int64_t* slot_mapping;     // [num_slots] right for natural tokens, negative for dummy ones
  const int32_t* block_table;      // [num_reqs][table_stride]
  const PromptPlan* prompts;       // [num_prompts] by plan id
  int64_t num_reqs;
  int64_t num_slots;  // at least query_start_loc[num_reqs]
  int64_t table_stride;
  int64_t num_prompts;
  int64_t block_size;
  int64_t page_size;    // tokens of a KT page; 0 where no touched pages are asked for
  bool evicts;
};

// Room for T tokens and Q requests.
struct StepBuffers {
  Row* rows;                   // [T] in the order of the batch
  int64_t* natural_slots;      // [T] the runner's, but -1 for private tokens
  int64_t* dense_tokens;       // [T] rows of the batch that are natural
  int32_t* dense_starts;       // [Q + 1] where each dense part starts among these
  int32_t* dense_seq_lens;     // [Q]
  int32_t* dense_requests;     // [Q] request of each dense part
  int32_t* window_requests;    // [Q] that compute a part of an eviction's window
  TouchedPage* touched_pages;  // [T]
};

// Fields in the order of StepCounts in vllm_rocketkv/backend/cpu_metadata.py.
struct StepCounts {
  int64_t unknown_request;  // the first without a PromptPlan: nothing else was done; else -1
  int64_t num_rows;
  int64_t max_row_tokens;     // most num_tokens of any row
  int64_t has_later;          // whether any row has a later one of the same phase
  int64_t num_sparse_tokens;  // beyond the natural length, emitted as rows or dummy
  int64_t num_written;        // natural slots that are not negative
  int64_t num_dense_parts;
  int64_t num_dense_tokens;
  int64_t max_query_len;  // of the dense parts
  int64_t max_seq_len;
  int64_t num_window_requests;
  int64_t num_touched_pages;
  int64_t num_phases;  // rows of one phase must be done before decoded tokens are evicted and the next begins
};

StepCounts PlanStep(const StepInputs& in, const StepBuffers& out);

}  // namespace rocketkv
