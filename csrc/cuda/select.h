// SPDX-License-Identifier: Apache-2.0
// The two selections: kept tokens of stage 1, and the pages that a decode step reads.
//
// One block of threads does all of one (row, KV head), so that there is one launch, and no workspace. For stage 1 that
// is enough even for a prompt of a million tokens: six or seven passes over 4 MB are about a millisecond for one
// multiprocessor, once per layer, after a prefill of minutes. A decode step has microseconds: kernels/cuda.py says up
// to how many pages this one block is worth four launches that share the work.
#pragma once

#include "topk.h"

namespace rocketkv::cuda {

// ------------------------------------------------------------------------------------------------ tokens

struct TopTokensArgs {
  const int32_t* keys;  // [heads][size], rows `keys_stride` apart: higher is better, the smallest integer included
  int64_t keys_stride;
  int num_heads;
  int size;
  int count;     // indices to choose: at most `size`
  int num_last;  // indices behind the keys that follow them
  int32_t* out;  // [heads][count + num_last] ascending, rows `out_stride` apart
  int64_t out_stride;
};

ROCKETKV_DEVICE uint32_t AsUnsigned(int32_t key) { return uint32_t(key) ^ 0x80000000u; }

struct TokenItems {
  const int32_t* keys;
  int num_tokens;

  ROCKETKV_DEVICE int size() const { return num_tokens; }
  ROCKETKV_DEVICE uint32_t Key(int i) const { return AsUnsigned(keys[i]); }
  ROCKETKV_DEVICE int Weight(int) const { return 1; }
  ROCKETKV_DEVICE bool IsForced(int) const { return false; }
};

ROCKETKV_DEVICE void TopTokens(const Block& block, const TopTokensArgs& args, int head, TopKShared* shared) {
  const TokenItems items{args.keys + head * args.keys_stride, args.size};
  int32_t* out = args.out + head * args.out_stride;
  ListTop(block, items, args.count, args.size, [&](int place, int i, int) { out[place] = i; }, shared);
  for (int i = block.thread(); i < args.num_last; i += block.threads()) out[args.count + i] = args.size + i;
}

// ------------------------------------------------------------------------------------------------ pages

struct SelectPagesArgs {
  const int32_t* keys;  // [rows][heads][pages] of a token of each page; what lies beyond a row's pages is not read
  int64_t keys_row_stride;
  int64_t keys_head_stride;
  const int32_t* num_tokens;  // [rows], `tokens_stride` apart; 0: an inert row
  int64_t tokens_stride;
  int num_rows;
  int num_heads;
  int page_size;
  int dense_below;  // a row of at most so many tokens reads all of them, or is another kernel's: nothing is listed
  int topk_tokens;
  int sink_tokens;
  int recent_tokens;
  bool by_page;
  // [rows][heads][capacity]: page * (page_size + 1) + how many of its unforced tokens are taken, the first ones
  int32_t* lists;
  int64_t lists_row_stride;
  int64_t lists_head_stride;
  int32_t* lengths;  // [rows][heads][num_lengths]: pages listed; 0 in all but the first place
  int num_lengths;   // the split kernels' attention takes a list in parts
};

// The most pages that one list may get, whatever the keys and lengths: those that sinks and recent tokens touch, and
// those with tokens that were taken, of which all are full but the one at the budget's edge and the sequence's last.
inline int64_t MostListed(int64_t page_size, int64_t topk_tokens, int64_t sink_tokens, int64_t recent_tokens) {
  auto pages = [&](int64_t tokens) { return (tokens + page_size - 1) / page_size; };
  return pages(topk_tokens) + 1 + pages(sink_tokens) + pages(recent_tokens) + (recent_tokens > 0);
}

// Tokens below `sink_end` and from `recent_start` on are read whatever their scores are; under by_page both are rounded
// outward to whole pages.
struct PageItems {
  const int32_t* keys;
  int num_tokens;
  int page_size;
  int sink_end;
  int recent_start;
  bool by_page;

  ROCKETKV_DEVICE PageItems(const SelectPagesArgs& args, const int32_t* keys_of_head, int tokens)
      : keys(keys_of_head), num_tokens(tokens), page_size(args.page_size), by_page(args.by_page) {
    sink_end = Min(args.sink_tokens, num_tokens);
    recent_start = Max(num_tokens - args.recent_tokens, 0);
    if (by_page) {
      sink_end = CeilDiv(sink_end, page_size) * page_size;
      if (args.recent_tokens > 0) recent_start = recent_start / page_size * page_size;
    }
  }

  ROCKETKV_DEVICE int size() const { return CeilDiv(num_tokens, page_size); }
  ROCKETKV_DEVICE uint32_t Key(int i) const { return AsUnsigned(keys[i]); }
  ROCKETKV_DEVICE int NumFree(int i) const {
    return Max(Min((i + 1) * page_size, recent_start) - Max(i * page_size, sink_end), 0);
  }
  ROCKETKV_DEVICE int Weight(int i) const { return by_page ? NumFree(i) > 0 : NumFree(i); }
  ROCKETKV_DEVICE bool IsForced(int i) const {
    return i * page_size < sink_end || Min((i + 1) * page_size, num_tokens) > recent_start;
  }
  ROCKETKV_DEVICE int TotalWeight() const {
    const int free = Max(recent_start - sink_end, 0);  // starts at a whole page if by_page
    return by_page ? CeilDiv(free, page_size) : free;
  }
  ROCKETKV_DEVICE int Budget(int topk_tokens) const {  // what is left of it by the forced ones
    return by_page ? CeilDiv(topk_tokens, page_size) - (size() - TotalWeight())
                   : topk_tokens - (num_tokens - TotalWeight());
  }
};

ROCKETKV_DEVICE void SelectPages(const Block& block, const SelectPagesArgs& args, int row, int head,
                                 TopKShared* shared) {
  const int num_tokens = args.num_tokens[row * args.tokens_stride];
  int count = 0;
  if (num_tokens > args.dense_below && num_tokens > 0) {
    const PageItems items(args, args.keys + row * args.keys_row_stride + head * args.keys_head_stride, num_tokens);
    int32_t* list = args.lists + row * args.lists_row_stride + head * args.lists_head_stride;
    auto emit = [&](int place, int i, int taken) {
      list[place] = i * (args.page_size + 1) + (args.by_page && taken ? items.NumFree(i) : taken);
    };
    count = ListTop(block, items, items.Budget(args.topk_tokens), items.TotalWeight(), emit, shared);
  }
  int32_t* lengths = args.lengths + (int64_t{row} * args.num_heads + head) * args.num_lengths;
  for (int i = block.thread(); i < args.num_lengths; i += block.threads()) lengths[i] = i == 0 ? count : 0;
}

}  // namespace rocketkv::cuda
