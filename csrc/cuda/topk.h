// SPDX-License-Identifier: Apache-2.0
// Exact top-k by one block of threads, with one tie rule: higher key first, then lower index. Results ascend by index.
//
// Items have weights, and the budget counts weight: the last item chosen may be taken in part (a page of which the
// first few tokens fit). Radix select finds the digits of the threshold from the highest on, each by a histogram of
// those items that share the digits found so far: at most four passes over the keys, and no sort. Two more passes write
// the list: a warp counts what it will write, then writes behind what the warps before it have counted.
//
// All counts are integers: the result does not depend on the order in which threads run.
//
// `Items` has
//   int size() const
//   uint32_t Key(int i) const     higher is better
//   int Weight(int i) const       0 or more
//   bool IsForced(int i) const    listed in any case; its weight competes like any other
#pragma once

#include "warp.h"

namespace rocketkv::cuda {

constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kMaxWarps = 32;
constexpr int kAtOnce = 4;  // keys that a thread loads before it looks at the first of them

struct TopKShared {
  int32_t bins[kBins];
  int32_t of_warp[kMaxWarps];
  int32_t digit, above, tied;  // the threshold's digit, the weight of higher ones and that of its own
  int32_t cut, taken_of_cut;
};

// Keys are compared in their digits from `shift` on: those above `prefix` are taken in full, those equal to it (`tied`
// of weight) in the order of their indices up to a weight of `level`.
struct Threshold {
  uint32_t prefix;
  int shift;
  int level;
  int tied;
};

// Which part of an item's weight is taken.
struct Choice {
  uint32_t prefix;
  int shift;
  int cut;  // tied items before this one are taken in full, none after it
  int taken_of_cut;

  template <class Items>
  ROCKETKV_DEVICE int Taken(const Items& items, int i, uint32_t key) const {
    const uint32_t digits = key >> shift;
    if (digits < prefix) return 0;
    if (digits > prefix || i < cut) return items.Weight(i);
    return i == cut ? taken_of_cut : 0;
  }
};

// ------------------------------------------------------------------------------------------------ threshold

// Adds each lane's weight to its bin. Scores have few exponents, so most lanes often want the same bin: those that
// agree with the first one add up their weights among themselves.
ROCKETKV_DEVICE void AddToBins(const Block& block, int digit, int weight, TopKShared* shared) {
  const uint32_t adding = block.Ballot(weight > 0);
  if (adding == 0) return;
  const int first = LowestBit(adding);
  const bool is_same = digit == block.Shuffle(digit, first);
  const int sum = block.Sum(is_same ? weight : 0);
  if (block.lane() == first) {
    block.Add(&shared->bins[digit], sum);
  } else if (!is_same && weight > 0) {
    block.Add(&shared->bins[digit], weight);
  }
}

template <class Items>
ROCKETKV_DEVICE void CountDigits(const Block& block, const Items& items, uint32_t prefix, int shift,
                                 TopKShared* shared) {
  for (int start = 0; start < items.size(); start += kAtOnce * block.threads()) {
    uint32_t keys[kAtOnce];
    ROCKETKV_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = start + j * block.threads() + block.thread();
      keys[j] = i < items.size() ? items.Key(i) : 0;
    }
    ROCKETKV_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = start + j * block.threads() + block.thread();
      const bool counts = i < items.size() && ((keys[j] >> shift) >> kDigitBits) == prefix;
      AddToBins(block, int((keys[j] >> shift) % kBins), counts ? items.Weight(i) : 0, shared);
    }
  }
}

// By one warp: the highest digit from which on the bins hold a weight of `level`, which must be positive.
ROCKETKV_DEVICE void FindDigit(const Block& block, int level, TopKShared* shared) {
  constexpr int kBinsOfLane = kBins / kLanes;
  const int highest = kBins - 1 - block.lane() * kBinsOfLane;
  int sum = 0;
  for (int i = 0; i < kBinsOfLane; ++i) sum += shared->bins[highest - i];
  int above = InclusiveScan(block, sum) - sum;
  if (above >= level || above + sum < level) return;
  int digit = highest;
  for (; above + shared->bins[digit] < level; --digit) above += shared->bins[digit];
  shared->digit = digit;
  shared->above = above;
  shared->tied = shared->bins[digit];
}

// For a budget above 0 and below the sum of all weights.
template <class Items>
ROCKETKV_DEVICE Threshold FindThreshold(const Block& block, const Items& items, int budget, TopKShared* shared) {
  Threshold found{0, 0, budget, 0};
  for (int shift = 32 - kDigitBits;; shift -= kDigitBits) {
    for (int bin = block.thread(); bin < kBins; bin += block.threads()) shared->bins[bin] = 0;
    block.Barrier();
    CountDigits(block, items, found.prefix, shift, shared);
    block.Barrier();
    if (block.warp() == 0) FindDigit(block, found.level, shared);
    block.Barrier();
    found.prefix = found.prefix << kDigitBits | uint32_t(shared->digit);
    found.shift = shift;
    found.level -= shared->above;
    found.tied = shared->tied;
    if (found.tied == found.level || shift == 0) return found;  // all that share these digits are taken: enough
  }
}

// ------------------------------------------------------------------------------------------------ ties

// Calls visit(i, is_valid, key) for a run of items that is the calling warp's own; runs of successive warps follow each
// other. All lanes make the same number of calls, with successive i.
template <class Items, class Visit>
ROCKETKV_DEVICE void ForRunOfWarp(const Block& block, const Items& items, const Visit& visit) {
  const int run = CeilDiv(CeilDiv(items.size(), block.warps()), kLanes) * kLanes;
  const int begin = Min(block.warp() * run, items.size()), end = Min(begin + run, items.size());
  for (int start = begin; start < end; start += kAtOnce * kLanes) {
    uint32_t keys[kAtOnce];
    ROCKETKV_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = start + j * kLanes + block.lane();
      keys[j] = i < end ? items.Key(i) : 0;
    }
    ROCKETKV_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = start + j * kLanes + block.lane();
      visit(i, i < end, keys[j]);
    }
  }
}

// The sum of of_warp[0 .. warp - 1], and of all. Each warp has written its own, and a barrier followed.
ROCKETKV_DEVICE int SumBeforeWarp(const Block& block, const TopKShared& shared, int* total) {
  const int own = block.lane() < block.warps() ? shared.of_warp[block.lane()] : 0;
  const int sum = InclusiveScan(block, own);
  *total = block.Shuffle(sum, kLanes - 1);
  return block.Shuffle(sum - own, block.warp());
}

// Turns "up to a weight of `level`" into an index.
template <class Items>
ROCKETKV_DEVICE Choice CutTies(const Block& block, const Items& items, const Threshold& threshold, TopKShared* shared) {
  if (threshold.tied == threshold.level) return {threshold.prefix, threshold.shift, items.size(), 0};
  auto tied = [&](int i, bool is_valid, uint32_t key) {
    return is_valid && (key >> threshold.shift) == threshold.prefix ? items.Weight(i) : 0;
  };
  int sum = 0;
  ForRunOfWarp(block, items, [&](int i, bool is_valid, uint32_t key) { sum += tied(i, is_valid, key); });
  sum = block.Sum(sum);
  if (block.lane() == 0) shared->of_warp[block.warp()] = sum;
  block.Barrier();
  int total;
  int before = SumBeforeWarp(block, *shared, &total);
  if (before < threshold.level && threshold.level <= before + sum) {  // the same for all lanes, and for one warp alone
    ForRunOfWarp(block, items, [&](int i, bool is_valid, uint32_t key) {
      const int weight = tied(i, is_valid, key), until = before + InclusiveScan(block, weight);
      if (until - weight < threshold.level && threshold.level <= until) {
        shared->cut = i;
        shared->taken_of_cut = threshold.level - (until - weight);
      }
      before = block.Shuffle(until, kLanes - 1);
    });
  }
  block.Barrier();
  return {threshold.prefix, threshold.shift, shared->cut, shared->taken_of_cut};
}

// ------------------------------------------------------------------------------------------------ list

// Chooses items of the highest keys up to a weight of `budget`; `total` is the sum of all weights. Calls emit(place, i,
// taken) once for each item that is taken, in part or in full, or forced; places ascend with i from 0 on. Returns how
// many those are, to every thread.
template <class Items, class Emit>
ROCKETKV_DEVICE int ListTop(const Block& block, const Items& items, int budget, int total, const Emit& emit,
                            TopKShared* shared) {
  Choice choice{~0u, 0, -1, 0};  // nothing
  if (budget >= total) {
    choice = {0, 31, items.size(), 0};  // everything
  } else if (budget > 0) {
    choice = CutTies(block, items, FindThreshold(block, items, budget, shared), shared);
  }
  int count = 0;
  ForRunOfWarp(block, items, [&](int i, bool is_valid, uint32_t key) {
    count += is_valid && (items.IsForced(i) || choice.Taken(items, i, key) > 0);
  });
  count = block.Sum(count);
  if (block.lane() == 0) shared->of_warp[block.warp()] = count;
  block.Barrier();
  int num_listed;
  int place = SumBeforeWarp(block, *shared, &num_listed);
  const uint32_t lanes_below = (1u << block.lane()) - 1;
  ForRunOfWarp(block, items, [&](int i, bool is_valid, uint32_t key) {
    const int taken = is_valid ? choice.Taken(items, i, key) : 0;
    const bool is_listed = is_valid && (taken > 0 || items.IsForced(i));
    const uint32_t listed = block.Ballot(is_listed);
    if (is_listed) emit(place + CountBits(listed & lanes_below), i, taken);
    place += CountBits(listed);
  });
  return num_listed;
}

}  // namespace rocketkv::cuda
