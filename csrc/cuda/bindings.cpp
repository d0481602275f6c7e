// SPDX-License-Identifier: Apache-2.0
// torch.ops.rocketkv_cuda.*: from tensors to the launches of launch.h. Everything that a kernel takes on trust is
// checked here, from shapes and strides alone: no op reads device memory, waits for the device or allocates, so that
// CUDA graphs can hold them.
//
// Streams are asked for through c10's interface that is common to all devices, so that this file needs no header of
// CUDA and is also built over the host's model of threads (ROCKETKV_HOST_MODEL), as ops for CPU tensors, to be tested.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "launch.h"

#if defined(ROCKETKV_HOST_MODEL)
#define ROCKETKV_DISPATCH CPU
#else
#define ROCKETKV_DISPATCH CUDA
#endif

namespace rocketkv::cuda {
namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::ROCKETKV_DISPATCH;
constexpr int64_t kLargest = int64_t{1} << 30;  // of any count: sums of two stay below 2^31

void* CurrentStream([[maybe_unused]] const at::Tensor& tensor) {
#if defined(ROCKETKV_HOST_MODEL)
  return nullptr;
#else
  return c10::impl::VirtualGuardImpl(kDevice).getStream(tensor.device()).native_handle();
#endif
}

void Check(const at::Tensor& tensor, const char* name, int64_t dims, at::ScalarType type, const at::Tensor& beside) {
  TORCH_CHECK(tensor.device() == beside.device() && tensor.device().type() == kDevice, "rocketkv_cuda: ", name,
              " is on ", tensor.device(), ", the first argument on ", beside.device());
  TORCH_CHECK(tensor.dim() == dims && tensor.scalar_type() == type, "rocketkv_cuda: ", name, " must be ", type, " of ",
              dims, " dimensions, but is ", tensor.scalar_type(), " ", tensor.sizes());
}

void CheckRuns(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, "rocketkv_cuda: the last dimension of ", name,
              " must be contiguous, but its stride is ", tensor.stride(-1));
}

int Count(int64_t value, const char* name) {
  TORCH_CHECK(value >= 0 && value < kLargest, "rocketkv_cuda: ", name, " is ", value, ", not within 0 .. 2^30 - 1");
  return int(value);
}

// A number of tokens that may be larger than any sequence.
int Clamped(int64_t tokens) { return int(std::clamp<int64_t>(tokens, 0, kLargest)); }

void CheckLaunch(const char* op, const char* failure) {
  TORCH_CHECK(failure == nullptr, "rocketkv_cuda: ", op, " was not launched: ", failure);
}

void TopTokensOp(const at::Tensor& keys, int64_t num_best, int64_t num_last, const at::Tensor& out) {
  Check(keys, "keys", 2, at::kInt, keys);
  Check(out, "out", 2, at::kInt, keys);
  CheckRuns(keys, "keys");
  CheckRuns(out, "out");
  TopTokensArgs args{};
  args.size = Count(keys.size(1), "the number of keys");
  args.count = Count(num_best, "num_best");
  args.num_last = Count(num_last, "num_last");
  TORCH_CHECK(num_best <= args.size, "rocketkv_cuda: cannot choose ", num_best, " of ", args.size, " keys");
  TORCH_CHECK(out.size(0) == keys.size(0) && out.size(1) == num_best + num_last, "rocketkv_cuda: ", num_best, " + ",
              num_last, " indices of each of ", keys.size(0), " heads do not fit an output of ", out.sizes());
  args.keys = keys.const_data_ptr<int32_t>();
  args.keys_stride = keys.stride(0);
  args.num_heads = Count(keys.size(0), "the number of heads");
  args.out = out.mutable_data_ptr<int32_t>();
  args.out_stride = out.stride(0);
  const c10::DeviceGuard guard(keys.device());
  CheckLaunch("top_tokens", LaunchTopTokens(args, CurrentStream(keys)));
}

void SelectPagesOp(const at::Tensor& keys, const at::Tensor& num_tokens, int64_t page_size, int64_t dense_below,
                   int64_t topk_tokens, int64_t sink_tokens, int64_t recent_tokens, bool by_page,
                   const at::Tensor& lists, const at::Tensor& lengths) {
  Check(keys, "keys", 3, at::kInt, keys);
  Check(num_tokens, "num_tokens", 1, at::kInt, keys);
  Check(lists, "lists", 3, at::kInt, keys);
  Check(lengths, "lengths", 3, at::kInt, keys);
  CheckRuns(keys, "keys");
  CheckRuns(lists, "lists");
  const int64_t rows = num_tokens.size(0), heads = keys.size(1), max_pages = keys.size(2);
  TORCH_CHECK(rows <= 65535, "rocketkv_cuda: ", rows, " rows are more than a grid can hold");
  TORCH_CHECK(page_size > 0 && page_size < kLargest && max_pages < kLargest / (page_size + 1),
              "rocketkv_cuda: ", max_pages, " pages of ", page_size, " tokens are not supported");
  SelectPagesArgs args{};
  args.page_size = int(page_size);
  args.dense_below = Clamped(dense_below);
  args.topk_tokens = Clamped(topk_tokens);
  args.sink_tokens = Clamped(sink_tokens);
  args.recent_tokens = Clamped(recent_tokens);
  args.by_page = by_page;
  const int64_t most =
      std::min(MostListed(page_size, args.topk_tokens, args.sink_tokens, args.recent_tokens), max_pages);
  TORCH_CHECK(keys.size(0) >= rows && lists.size(0) >= rows && lists.size(1) == heads && lists.size(2) >= most,
              "rocketkv_cuda: keys ", keys.sizes(), " and lists ", lists.sizes(), " must hold ", rows, " rows of ",
              heads, " heads, and lists ", most, " pages of each");
  TORCH_CHECK(lengths.size(0) >= rows && lengths.size(1) == heads && lengths.size(2) > 0 && lengths.is_contiguous(),
              "rocketkv_cuda: lengths must be contiguous [", rows, ", ", heads, ", parts], but are ", lengths.sizes());
  args.keys = keys.const_data_ptr<int32_t>();
  args.keys_row_stride = keys.stride(0);
  args.keys_head_stride = keys.stride(1);
  args.num_tokens = num_tokens.const_data_ptr<int32_t>();
  args.tokens_stride = num_tokens.stride(0);
  args.num_rows = int(rows);
  args.num_heads = Count(heads, "the number of heads");
  args.lists = lists.mutable_data_ptr<int32_t>();
  args.lists_row_stride = lists.stride(0);
  args.lists_head_stride = lists.stride(1);
  args.lengths = lengths.mutable_data_ptr<int32_t>();
  args.num_lengths = Count(lengths.size(2), "the number of lengths");
  const c10::DeviceGuard guard(keys.device());
  CheckLaunch("select_pages", LaunchSelectPages(args, int(max_pages), CurrentStream(keys)));
}

Kind KindOf(int64_t kind, const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(kind >= 0 && kind <= int64_t(Kind::kFloat8E5M2), "rocketkv_cuda: unknown kind ", kind, " of ", name);
  TORCH_CHECK(int64_t(tensor.element_size()) == SizeOf(Kind(kind)), "rocketkv_cuda: kind ", kind, " does not fit ",
              name, ", which is ", tensor.scalar_type());
  return Kind(kind);
}

// A stride in bytes, of which vectors of 16 bytes are asked.
int64_t VectorStride(const at::Tensor& tensor, int64_t dim, const char* name) {
  const int64_t bytes = tensor.stride(dim) * int64_t(tensor.element_size());
  TORCH_CHECK(bytes % kVectorBytes == 0, "rocketkv_cuda: dimension ", dim, " of ", name, " has a stride of ", bytes,
              " bytes, which is not a multiple of ", kVectorBytes);
  return bytes;
}

const void* BlockIds(const at::Tensor& ids, const char* name, const at::Tensor& like, const at::Tensor& beside) {
  TORCH_CHECK(like.scalar_type() == at::kInt || like.scalar_type() == at::kLong,
              "rocketkv_cuda: block ids must be int32 or int64, but are ", like.scalar_type());
  Check(ids, name, 1, like.scalar_type(), beside);
  TORCH_CHECK(ids.is_contiguous(), "rocketkv_cuda: ", name, " must be contiguous");
  return ids.const_data_ptr();
}

void CompactOp(const at::Tensor& kv, const at::Tensor& kt, const at::Tensor& prompt_blocks,
               const at::Tensor& private_blocks, const at::Tensor& kept, int64_t kv_kind, int64_t kt_kind,
               int64_t page_size) {
  Check(kv, "kv", 4, kv.scalar_type(), kv);
  Check(kt, "kt", 5, kt.scalar_type(), kv);
  Check(kept, "kept", 2, at::kInt, kv);
  CheckRuns(kept, "kept");
  CompactArgs args{};
  args.kv_kind = KindOf(kv_kind, kv, "kv");
  args.num_heads = Count(kv.size(1), "the number of heads");
  args.block_size = Count(kv.size(2), "the block size");
  args.head_size = Count(kv.size(3) / 2, "the head size");
  args.page_size = Count(page_size, "the page size");
  args.num_kept = Count(kept.size(1), "the number of kept tokens");
  TORCH_CHECK(args.head_size > 0 && args.head_size % 16 == 0 && args.head_size <= 256 && args.block_size > 0 &&
                  args.block_size % 16 == 0 && kv.stride(3) == 1,
              "rocketkv_cuda: kv must be [blocks, heads, a multiple of 16, 2 * a multiple of 16 up to 256], the last ",
              "dimension contiguous, but is ", kv.sizes());
  TORCH_CHECK(args.num_heads <= 65535, "rocketkv_cuda: ", args.num_heads, " heads are more than a grid can hold");
  args.kv = static_cast<uint8_t*>(kv.mutable_data_ptr());
  args.kv_block_stride = VectorStride(kv, 0, "kv");
  args.kv_head_stride = VectorStride(kv, 1, "kv");
  args.kv_token_stride = VectorStride(kv, 2, "kv");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(args.kv) % kVectorBytes == 0,
              "rocketkv_cuda: kv must start at a multiple of ", kVectorBytes, " bytes");
  if (page_size > 0) {
    TORCH_CHECK(args.block_size % page_size == 0, "rocketkv_cuda: pages of ", page_size, " do not divide blocks of ",
                args.block_size);
    const int64_t pages = args.block_size / page_size;
    args.kt_kind = KindOf(kt_kind, kt, "kt");
    TORCH_CHECK(kt.size(0) == kv.size(0) && kt.size(1) == args.num_heads && kt.size(2) == args.head_size &&
                    kt.size(3) == 2 && kt.size(4) == pages && kt.stride(2) == 2 * pages && kt.stride(3) == pages &&
                    (kt.stride(4) == 1 || pages == 1),
                "rocketkv_cuda: kt must be [", kv.size(0), ", ", args.num_heads, ", ", args.head_size, ", 2, ", pages,
                "], the last three dimensions contiguous, but is ", kt.sizes());
    args.kt = static_cast<uint8_t*>(kt.mutable_data_ptr());
    args.kt_block_stride = kt.stride(0) * int64_t(kt.element_size());
    args.kt_head_stride = kt.stride(1) * int64_t(kt.element_size());
  }
  args.prompt_blocks = BlockIds(prompt_blocks, "prompt_blocks", prompt_blocks, kv);
  args.private_blocks = BlockIds(private_blocks, "private_blocks", prompt_blocks, kv);
  args.has_wide_ids = prompt_blocks.scalar_type() == at::kLong;
  TORCH_CHECK(kept.size(0) == args.num_heads && args.num_kept <= private_blocks.size(0) * args.block_size,
              "rocketkv_cuda: kept ", kept.sizes(), " does not fit ", args.num_heads, " heads and ",
              private_blocks.size(0), " private blocks of ", args.block_size);
  args.kept = kept.const_data_ptr<int32_t>();
  args.kept_stride = kept.stride(0);
  const c10::DeviceGuard guard(kv.device());
  CheckLaunch("compact", LaunchCompact(args, CurrentStream(kv)));
}

TORCH_LIBRARY(rocketkv_cuda, m) {
  m.def("top_tokens(Tensor keys, int num_best, int num_last, Tensor(a!) out) -> ()");
  m.def(
      "select_pages(Tensor keys, Tensor num_tokens, int page_size, int dense_below, int topk_tokens, int sink_tokens, "
      "int recent_tokens, bool by_page, Tensor(a!) lists, Tensor(b!) lengths) -> ()");
  m.def(
      "compact(Tensor(a!) kv, Tensor(b!) kt, Tensor prompt_blocks, Tensor private_blocks, Tensor kept, int kv_kind, "
      "int kt_kind, int page_size) -> ()");
}

TORCH_LIBRARY_IMPL(rocketkv_cuda, ROCKETKV_DISPATCH, m) {
  m.impl("top_tokens", &TopTokensOp);
  m.impl("select_pages", &SelectPagesOp);
  m.impl("compact", &CompactOp);
}

}  // namespace
}  // namespace rocketkv::cuda
