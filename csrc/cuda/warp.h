// SPDX-License-Identifier: Apache-2.0
// What one thread of a block may do with the others: everything that the algorithms in this directory know about GPUs.
//
// `Block` is a thread's view of its block. Under nvcc its methods are the hardware's; any other compiler gets the model
// in host_threads.h, where every thread of a block really runs, so that the same source is tested without a GPU.
//
// All 32 lanes of a warp must make the same warp-level call, and all threads of a block the same Barrier: conditions
// around them must not differ between lanes (or threads). The model stops with an error where they do.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

#define ROCKETKV_DEVICE __device__ __forceinline__
#define ROCKETKV_BOTH __host__ __device__ __forceinline__
#define ROCKETKV_UNROLL _Pragma("unroll")

namespace rocketkv::cuda {

constexpr int kLanes = 32;

class Block {
 public:
  ROCKETKV_DEVICE int thread() const { return int(threadIdx.x); }
  ROCKETKV_DEVICE int threads() const { return int(blockDim.x); }
  ROCKETKV_DEVICE int lane() const { return int(threadIdx.x) % kLanes; }
  ROCKETKV_DEVICE int warp() const { return int(threadIdx.x) / kLanes; }
  ROCKETKV_DEVICE int warps() const { return int(blockDim.x) / kLanes; }

  ROCKETKV_DEVICE void Barrier() const { __syncthreads(); }
  // Bit i is lane i's condition.
  ROCKETKV_DEVICE uint32_t Ballot(bool condition) const { return __ballot_sync(kAll, condition); }
  // The value of lane `from`.
  ROCKETKV_DEVICE int32_t Shuffle(int32_t value, int from) const { return __shfl_sync(kAll, value, from); }
  // The value of the lane `distance` below; the lowest ones keep theirs.
  ROCKETKV_DEVICE int32_t ShuffleUp(int32_t value, int distance) const { return __shfl_up_sync(kAll, value, distance); }
  // The sum of all lanes' values.
  ROCKETKV_DEVICE int32_t Sum(int32_t value) const { return __reduce_add_sync(kAll, value); }
  // Adds to shared memory.
  ROCKETKV_DEVICE void Add(int32_t* shared, int32_t value) const { atomicAdd(shared, value); }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;
};

ROCKETKV_DEVICE int CountBits(uint32_t bits) { return __popc(bits); }
ROCKETKV_DEVICE int LowestBit(uint32_t bits) { return __ffs(int(bits)) - 1; }  // its place; -1 if there is none
ROCKETKV_DEVICE float FloatOf(uint32_t bits) { return __uint_as_float(bits); }
ROCKETKV_DEVICE uint32_t BitsOf(float x) { return __float_as_uint(x); }

}  // namespace rocketkv::cuda

#else
#include "host_threads.h"
#endif

namespace rocketkv::cuda {

// The sum over this lane and those below it.
ROCKETKV_DEVICE int32_t InclusiveScan(const Block& block, int32_t value) {
  ROCKETKV_UNROLL
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int32_t below = block.ShuffleUp(value, distance);
    if (block.lane() >= distance) value += below;
  }
  return value;
}

ROCKETKV_BOTH int Min(int a, int b) { return a < b ? a : b; }
ROCKETKV_BOTH int Max(int a, int b) { return a > b ? a : b; }
ROCKETKV_BOTH int CeilDiv(int a, int b) { return (a + b - 1) / b; }

}  // namespace rocketkv::cuda
