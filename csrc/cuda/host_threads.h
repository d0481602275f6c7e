// SPDX-License-Identifier: Apache-2.0
// The host's model of a thread block, for tests: each thread is a fibre of its own that runs until it has to wait for
// others, at a barrier or at a warp-level operation.
//
// Between two such points the order of threads is drawn at random from a seed, and so is how far a warp gets ahead of
// the others, so that code which depends on it (a missing barrier, two writers of one place) gives different results
// for different seeds. Waiting for a thread that never comes, or for one that waits elsewhere, is an error.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#define ROCKETKV_DEVICE inline
#define ROCKETKV_BOTH inline
#define ROCKETKV_UNROLL

namespace rocketkv::cuda {

constexpr int kLanes = 32;

class HostThreads;

class Block {
 public:
  Block(HostThreads* all, int thread, int threads) : all_(all), thread_(thread), threads_(threads) {}
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int lane() const { return thread_ % kLanes; }
  int warp() const { return thread_ / kLanes; }
  int warps() const { return threads_ / kLanes; }

  void Barrier() const;
  uint32_t Ballot(bool condition) const;
  int32_t Shuffle(int32_t value, int from) const;
  int32_t ShuffleUp(int32_t value, int distance) const;
  int32_t Sum(int32_t value) const;
  void Add(int32_t* shared, int32_t value) const { *shared += value; }

 private:
  HostThreads* all_;
  int thread_;
  int threads_;
};

class HostThreads {
 public:
  enum class Wait { kNothing, kBarrier, kBallot, kShuffle, kShuffleUp, kSum, kEnded };

  HostThreads(int threads, uint64_t seed) : fibres_(threads), results_(threads), random_(seed) {
    if (threads < kLanes || threads > 1024 || threads % kLanes) throw std::runtime_error("not a whole number of warps");
    for (Fibre& fibre : fibres_) fibre.stack.reset(new char[kStackBytes]);
  }

  // Runs `body` in every thread of one block.
  void Run(const std::function<void(const Block&)>& body) {
    body_ = &body;
    for (int i = 0; i < int(fibres_.size()); ++i) Start(i);
    while (CountWaiting(Wait::kEnded) < int(fibres_.size())) {
      if (CountWaiting(Wait::kNothing) == 0 && Release() == 0) {
        throw std::runtime_error("threads wait for others that never come");
      }
      RunSome();
      Release();
    }
  }

  // Called by a thread: waits for its warp, or for its block; returns what each lane of the warp brought.
  const int32_t* Meet(int thread, Wait wait, int32_t value) {
    Fibre& fibre = fibres_[thread];
    fibre.wait = wait;
    fibre.value = value;
    swapcontext(&fibre.context, &scheduler_);
    return &results_[thread / kLanes * kLanes];
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Wait wait = Wait::kEnded;
    int32_t value = 0;
  };

  void Start(int thread) {
    Fibre& fibre = fibres_[thread];
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = kStackBytes;
    fibre.context.uc_link = &scheduler_;
    fibre.wait = Wait::kNothing;
    const auto address = reinterpret_cast<uintptr_t>(this);  // makecontext passes only ints
    makecontext(&fibre.context, reinterpret_cast<void (*)()>(&HostThreads::Enter), 3, uint32_t(address >> 32),
                uint32_t(address), uint32_t(thread));
  }

  static void Enter(uint32_t high, uint32_t low, uint32_t thread) {
    auto* self = reinterpret_cast<HostThreads*>(uintptr_t{high} << 32 | low);
    (*self->body_)(Block(self, int(thread), int(self->fibres_.size())));
    self->fibres_[thread].wait = Wait::kEnded;
  }

  // Runs the threads of some warps that do not wait, until they do; in random order.
  void RunSome() {
    const uint32_t warps = uint32_t(random_());
    std::vector<int> ready;
    for (int i = 0; i < int(fibres_.size()); ++i) {
      if (fibres_[i].wait == Wait::kNothing && (warps >> (i / kLanes) & 1)) ready.push_back(i);
    }
    for (size_t i = ready.size(); i > 1; --i) std::swap(ready[i - 1], ready[random_() % i]);
    for (int i : ready) swapcontext(&scheduler_, &fibres_[i].context);
  }

  // Lets those go on whom all others have joined.
  int Release() {
    if (CountWaiting(Wait::kBarrier) == int(fibres_.size())) {
      for (Fibre& fibre : fibres_) fibre.wait = Wait::kNothing;
      return int(fibres_.size());
    }
    int num_released = 0;
    for (size_t first = 0; first < fibres_.size(); first += kLanes) {
      const Wait wait = fibres_[first].wait;
      if (wait == Wait::kBarrier || wait == Wait::kEnded) continue;
      bool all = true;
      for (int i = 0; i < kLanes; ++i) all &= fibres_[first + i].wait == wait;
      for (int i = 0; all && i < kLanes; ++i) {
        results_[first + i] = fibres_[first + i].value;
        fibres_[first + i].wait = Wait::kNothing;
        ++num_released;
      }
    }
    return num_released;
  }

  int CountWaiting(Wait wait) const {
    int count = 0;
    for (const Fibre& fibre : fibres_) count += fibre.wait == wait;
    return count;
  }

  std::vector<Fibre> fibres_;
  std::vector<int32_t> results_;  // of each thread's last warp-level operation
  ucontext_t scheduler_;
  std::mt19937_64 random_;
  const std::function<void(const Block&)>* body_ = nullptr;
};

inline void Block::Barrier() const { all_->Meet(thread_, HostThreads::Wait::kBarrier, 0); }
inline uint32_t Block::Ballot(bool condition) const {
  const int32_t* lanes = all_->Meet(thread_, HostThreads::Wait::kBallot, condition);
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(lanes[i]) << i;
  return bits;
}
inline int32_t Block::Shuffle(int32_t value, int from) const {
  return all_->Meet(thread_, HostThreads::Wait::kShuffle, value)[from % kLanes];
}
inline int32_t Block::ShuffleUp(int32_t value, int distance) const {
  const int32_t* lanes = all_->Meet(thread_, HostThreads::Wait::kShuffleUp, value);
  return lanes[lane() >= distance ? lane() - distance : lane()];
}
inline int32_t Block::Sum(int32_t value) const {
  const int32_t* lanes = all_->Meet(thread_, HostThreads::Wait::kSum, value);
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

inline int CountBits(uint32_t bits) { return __builtin_popcount(bits); }
inline int LowestBit(uint32_t bits) { return __builtin_ffs(int(bits)) - 1; }
inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

}  // namespace rocketkv::cuda
