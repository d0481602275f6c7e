// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set, as pointers; chosen once, at run time, from what the processor has.
#pragma once

#include "decode_args.h"
#include "stage1.h"

namespace rocketkv {

struct Kernels {
  ScoreStatsFn score_stats;
  ScoreSumFn score_sum;
  KeepFn keep;
  CompactFn compact;
  HeavyStatsFn heavy_stats;
  HeavySumFn heavy_sum;
  HeavyFewFn heavy_few;
  KeepHeavyFn keep_heavy;
  DecodeKernels (*decode)(Type kv_type, Type kt_type);
  SummarisePageFn (*summarise_native_page)(Type kv_type, Type kt_type);
};

const Kernels& kernels();

// The builds that this processor can run, best first.
int NumIsas();
const char* IsaName(int index);
bool SetIsa(const char* name);  // false if it is none of them
const char* ActiveIsa();

}  // namespace rocketkv
