// SPDX-License-Identifier: Apache-2.0
// The block-level algorithms as kernels, and their launches.
#include <cuda_runtime.h>

#include "launch.h"

namespace rocketkv::cuda {
namespace {

// One block for each KV head.
__global__ void __launch_bounds__(kMaxThreads) TopTokensKernel(const TopTokensArgs args) {
  __shared__ TopKShared shared;
  TopTokens(Block(), args, int(blockIdx.x), &shared);
}

// One block for each (row, KV head).
__global__ void __launch_bounds__(kMaxThreads) SelectPagesKernel(const SelectPagesArgs args) {
  __shared__ TopKShared shared;
  SelectPages(Block(), args, int(blockIdx.y), int(blockIdx.x), &shared);
}

// One block for each (tile of a private block, KV head).
template <Kind kKind>
__global__ void __launch_bounds__(kCompactThreads, 2) CompactKernel(const CompactArgs args) {
  __shared__ alignas(kVectorBytes) float table[kTableFloats];
  CompactTile<kKind>(Block(), args, int(blockIdx.x), int(blockIdx.y), table);
}

const char* Failure() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* LaunchTopTokens(const TopTokensArgs& args, void* stream) {
  if (args.num_heads == 0 || args.count + args.num_last <= 0) return nullptr;
  TopTokensKernel<<<args.num_heads, kMaxThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return Failure();
}

const char* LaunchSelectPages(const SelectPagesArgs& args, int max_pages, void* stream) {
  if (args.num_rows == 0 || args.num_heads == 0) return nullptr;
  const dim3 grid(unsigned(args.num_heads), unsigned(args.num_rows));
  SelectPagesKernel<<<grid, SelectThreads(max_pages), 0, static_cast<cudaStream_t>(stream)>>>(args);
  return Failure();
}

const char* LaunchCompact(const CompactArgs& args, void* stream) {
  if (args.num_heads == 0 || args.num_kept <= 0) return nullptr;
  const dim3 grid(unsigned(NumTiles(args)), unsigned(args.num_heads));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kCompactThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  };
  switch (args.kv_kind) {
    case Kind::kFloat32: launch(CompactKernel<Kind::kFloat32>); break;
    case Kind::kBFloat16: launch(CompactKernel<Kind::kBFloat16>); break;
    case Kind::kFloat16: launch(CompactKernel<Kind::kFloat16>); break;
    case Kind::kFloat8E4M3: launch(CompactKernel<Kind::kFloat8E4M3>); break;
    case Kind::kFloat8E5M2: launch(CompactKernel<Kind::kFloat8E5M2>); break;
  }
  return Failure();
}

}  // namespace rocketkv::cuda
