// SPDX-License-Identifier: Apache-2.0
// One layer's decode step: which thread does which part of which unit.
//
// A unit's arithmetic is the same whoever does it and however it is split: blocks are estimated independently, and partial
// results of segments are combined in their order. So results do not depend on the number of threads.
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "kernels.h"

namespace rocketkv {
namespace {

// Working memory that is kept from step to step.
class Buffer {
 public:
  uint8_t* Reserve(int64_t bytes) {
    if (bytes > size_) {
      size_ = 0;
      memory_.reset();
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t size_ = 0;
};

struct Step {
  const DecodeArgs& args;
  DecodeKernels kernels;
  int heads;
  int64_t units;
  bool writes;
  bool has_later;

  const Row& RowOf(int64_t unit) const { return args.rows[unit / heads]; }
  int HeadOf(int64_t unit) const { return int(unit % heads); }
  int Blocks(const Row& row) const { return (row.num_tokens + args.cache.block_size - 1) / args.cache.block_size; }
  int Segments(const Row& row, const Scratch& s) const {
    const int tokens = s.num_chosen < 0 ? row.num_tokens : s.num_chosen;
    return (tokens + kSegmentTokens - 1) / kSegmentTokens;
  }

  void Write(int64_t unit) const { kernels.write_row(args, RowOf(unit), HeadOf(unit)); }
  void Close(int64_t unit) const {
    if (args.cache.page_size) kernels.close_page(args, RowOf(unit), HeadOf(unit));
  }
  void Prepare(int64_t unit, Scratch* s) const { kernels.prepare(args, RowOf(unit), HeadOf(unit), s); }
  void Select(int64_t unit, Scratch* s, const Ahead& ahead) const {
    const Row& row = RowOf(unit);
    if (args.ReadsAll(row)) return;
    kernels.estimate(args, row, HeadOf(unit), 0, Blocks(row), s, ahead);
    kernels.select(args, row, HeadOf(unit), s);
  }
  void Attend(int64_t unit, Scratch* s, const Ahead& ahead) const {
    const Row& row = RowOf(unit);
    const int head = HeadOf(unit);
    for (int i = 0; i < Segments(row, *s); ++i) kernels.attend(args, row, head, i, s, i == 0 ? ahead : Ahead{});
    kernels.combine(args, row, head, s);
  }
  // What a prepared unit will estimate from, and what a unit that has chosen will attend to.
  Ahead KtOf(int64_t unit, const Scratch& s) const {
    if (args.ReadsAll(RowOf(unit))) return {};
    return {.bases = s.kt, .num_bases = Blocks(RowOf(unit)), .offsets = s.kt_lines, .num_offsets = s.num_kt_lines};
  }
  Ahead ChosenOf(const Scratch& s) const {
    if (s.num_chosen < 0 || !args.is_private) return {};
    return {.bases = s.rows, .num_bases = s.num_chosen, .offsets = s.row_lines, .num_offsets = s.num_row_lines};
  }
};

// More units than threads: each is one thread's from its write to its output. A thread has three units in work: while
// one estimates, the memory that the one before it chose is fetched; while that one attends, the KT table of the third.
void RunWhole(const Step& step, Buffer* buffer, int threads) {
  const int64_t bytes = Scratch::Carve(nullptr, step.args).bytes, units = step.units;
  uint8_t* memory = buffer->Reserve(3 * bytes * threads);
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    if (step.writes && step.has_later) {  // a page may hold tokens of several rows, of which each may be another thread's
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < units; ++unit) step.Write(unit);
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < units; ++unit) step.Close(unit);
    }
    Scratch scratch[3];
    for (int i = 0; i < 3; ++i) {
      scratch[i] = Scratch::Carve(memory + bytes * (3 * omp_get_thread_num() + i), step.args);
    }
    Scratch *a = &scratch[0], *b = &scratch[1], *c = &scratch[2];
    auto take = [&](Scratch* s) {
      const int64_t unit = next.fetch_add(1);
      if (unit >= units) return unit;
      if (step.writes && !step.has_later) {
        step.Write(unit);
        step.Close(unit);
      }
      step.Prepare(unit, s);
      return unit;
    };
    int64_t first = take(a);
    if (first < units) step.Select(first, a, {});
    int64_t second = take(b);
    while (first < units) {
      if (second < units) step.Select(second, b, step.ChosenOf(*a));
      const int64_t third = take(c);
      step.Attend(first, a, third < units ? step.KtOf(third, *c) : Ahead{});
      first = second;
      second = third;
      std::swap(a, b);
      std::swap(b, c);
    }
  }
}

// Few units: threads share them.
void RunSplit(const Step& step, Buffer* buffer, int threads) {
  constexpr int kMaxUnits = 512;
  const DecodeArgs& args = step.args;
  const int64_t bytes = Scratch::Carve(nullptr, args).bytes;
  uint8_t* memory = buffer->Reserve(bytes * step.units);
  static thread_local Scratch scratch[kMaxUnits];
  Scratch* const scratches = scratch;  // the calling thread's, for all threads
  const int64_t runs = (args.max_tokens + args.cache.block_size * kRunBlocks - 1) / (args.cache.block_size * kRunBlocks);
  const int64_t segments = (args.max_tokens + kSegmentTokens - 1) / kSegmentTokens;
#pragma omp parallel num_threads(threads)
  {
    if (step.writes) {
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < step.units; ++unit) step.Write(unit);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < step.units; ++unit) {
      if (step.writes) step.Close(unit);
      scratches[unit] = Scratch::Carve(memory + bytes * unit, args);
      step.kernels.prepare(args, step.RowOf(unit), step.HeadOf(unit), &scratches[unit]);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < step.units * runs; ++i) {
      const int64_t unit = i / runs;
      const Row& row = step.RowOf(unit);
      const int first = int(i % runs) * kRunBlocks, blocks = step.Blocks(row);
      if (args.ReadsAll(row) || first >= blocks) continue;
      const int last = first + kRunBlocks < blocks ? first + kRunBlocks : blocks;
      step.kernels.estimate(args, row, step.HeadOf(unit), first, last, &scratches[unit], {});
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < step.units; ++unit) {
      const Row& row = step.RowOf(unit);
      if (!args.ReadsAll(row)) step.kernels.select(args, row, step.HeadOf(unit), &scratches[unit]);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < step.units * segments; ++i) {
      const int64_t unit = i / segments;
      const Row& row = step.RowOf(unit);
      if (i % segments >= step.Segments(row, scratches[unit])) continue;
      step.kernels.attend(args, row, step.HeadOf(unit), int(i % segments), &scratches[unit], {});
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < step.units; ++unit) {
      step.kernels.combine(args, step.RowOf(unit), step.HeadOf(unit), &scratches[unit]);
    }
  }
}

}  // namespace

void Decode(const DecodeArgs& args, int threads) {
  static thread_local Buffer buffer;
  Step step{args, kernels().decode(args.cache.type, args.cache.kt_type), args.cache.num_kv_heads, 0, false, false};
  step.units = args.num_rows * step.heads;
  step.writes = args.key != nullptr && args.is_private;
  for (int64_t i = 0; i < args.num_rows; ++i) step.has_later |= args.rows[i].later != 0;
  if (step.units < 2 * threads && threads <= 256) {
    RunSplit(step, &buffer, threads);
  } else {
    RunWhole(step, &buffer, threads);
  }
}

}  // namespace rocketkv
