// SPDX-License-Identifier: Apache-2.0
// What bindings.cpp calls: by kernels.cu on a GPU, by host_model.cpp in tests. `stream` is a cudaStream_t.
#pragma once

#include "compact.h"
#include "select.h"

namespace rocketkv::cuda {

// Each returns null, or why the launch failed. Nothing is launched where there is nothing to do.
const char* LaunchTopTokens(const TopTokensArgs& args, void* stream);
const char* LaunchSelectPages(const SelectPagesArgs& args, int max_pages, void* stream);
const char* LaunchCompact(const CompactArgs& args, void* stream);

constexpr int kMaxThreads = 1024;
constexpr int kCompactThreads = 256;

// Threads of a block that selects among so many pages: a few pages for each.
inline int SelectThreads(int max_pages) {
  int threads = 128;
  while (threads < kMaxThreads && threads * kAtOnce < max_pages) threads *= 2;
  return threads;
}

}  // namespace rocketkv::cuda
