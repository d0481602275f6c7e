// SPDX-License-Identifier: Apache-2.0
// All kernels for one instruction set. setup.py compiles this file once for each, with its flags and its ROCKETKV_ISA.
#include "kernels.h"

#include "attend.h"
#include "compact.h"
#include "estimate.h"
#include "heavy.h"
#include "page.h"
#include "score.h"

namespace rocketkv {
namespace ROCKETKV_ISA {
namespace {

void Prepare(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  PrepareQuery(args, row, kv_head, s);
  s->num_chosen = -1;
  if (!args.ReadsAll(row)) PrepareEstimate(args, row, kv_head, s);
}

template <class KT>
void Estimate(const DecodeArgs& args, const Row&, int, int first_block, int last_block, Scratch* s, Ahead ahead) {
  EstimateBlocks<KT>(args, first_block, last_block, s, ahead);
}

template <class T, class KT>
void SelectTokens(const DecodeArgs& args, const Row& row, int kv_head, Scratch* s) {
  EstimateNewestPage<T, KT>(args, row, kv_head, s);
  if (args.estimator == Estimator::kHybrid) {
    ScorePages(args, row, s);
  } else {
    RankPages(args, row, s);
  }
  Choose(args, row, s);
  if (args.is_private) LocateTokens<T>(args, row, kv_head, s);
}

template <class T, class KT>
DecodeKernels Table() {
  return {WriteRow<T>, ClosePage<T, KT>, Prepare, Estimate<KT>, SelectTokens<T, KT>, AttendSegment<T>, CombineSegments};
}

template <class T>
DecodeKernels TableOf(Type kt_type) {
  return kt_type == Type::kFloat8E5M2 ? Table<T, Float8E5M2>() : Table<T, BFloat16>();
}

DecodeKernels Decode(Type kv_type, Type kt_type) {
  switch (kv_type) {
    case Type::kFloat32: return TableOf<Float32>(kt_type);
    case Type::kBFloat16: return TableOf<BFloat16>(kt_type);
    case Type::kFloat16: return TableOf<Float16>(kt_type);
    case Type::kFloat8E4M3: return TableOf<Float8E4M3>(kt_type);
    default: return TableOf<Float8E5M2>(kt_type);
  }
}

template <class T>
SummarisePageFn NativePageOf(Type kt_type) {
  return kt_type == Type::kFloat8E5M2 ? SummariseNativePage<T, Float8E5M2> : SummariseNativePage<T, BFloat16>;
}

SummarisePageFn NativePage(Type kv_type, Type kt_type) {
  switch (kv_type) {
    case Type::kFloat32: return NativePageOf<Float32>(kt_type);
    case Type::kBFloat16: return NativePageOf<BFloat16>(kt_type);
    case Type::kFloat16: return NativePageOf<Float16>(kt_type);
    case Type::kFloat8E4M3: return NativePageOf<Float8E4M3>(kt_type);
    default: return NativePageOf<Float8E5M2>(kt_type);
  }
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {ScoreStats, ScoreSum, Keep,      Compact, HeavyStats,
                          HeavySum,   HeavyFew, KeepHeavy, Decode,  NativePage};

}  // namespace ROCKETKV_ISA
}  // namespace rocketkv
