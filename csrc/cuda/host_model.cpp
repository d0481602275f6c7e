// SPDX-License-Identifier: Apache-2.0
// The launches of launch.h on the host's model of threads, and a plain C interface to them, for tests. Not part of the
// library for GPUs.
#include <string>

#include "launch.h"

namespace rocketkv::cuda {
namespace {

int chosen_threads = 0;  // of a block; 0: as many as on a GPU
uint64_t seed = 0;
std::string failure;

// Runs body(block, x, y, shared) for a grid of x by y blocks; `shared` is `shared_bytes` of garbage.
template <class Body>
const char* Launch(int num_x, int num_y, int threads, size_t shared_bytes, const Body& body) {
  try {
    HostThreads block_threads(chosen_threads ? chosen_threads : threads, seed);
    std::vector<Vector> shared(shared_bytes / sizeof(Vector) + 1);
    for (int y = 0; y < num_y; ++y) {
      for (int x = 0; x < num_x; ++x) {
        std::memset(shared.data(), 0xa5, shared_bytes);
        block_threads.Run([&](const Block& block) { body(block, x, y, static_cast<void*>(shared.data())); });
      }
    }
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

template <Kind kKind>
const char* LaunchCompactOf(const CompactArgs& args) {
  return Launch(NumTiles(args), args.num_heads, kCompactThreads, kTableFloats * sizeof(float),
                [&](const Block& block, int x, int y, void* shared) {
                  CompactTile<kKind>(block, args, x, y, static_cast<float*>(shared));
                });
}

}  // namespace

const char* LaunchTopTokens(const TopTokensArgs& args, void*) {
  if (args.num_heads == 0 || args.count + args.num_last <= 0) return nullptr;
  return Launch(args.num_heads, 1, kMaxThreads, sizeof(TopKShared),
                [&](const Block& block, int x, int, void* shared) {
                  TopTokens(block, args, x, static_cast<TopKShared*>(shared));
                });
}

const char* LaunchSelectPages(const SelectPagesArgs& args, int max_pages, void*) {
  return Launch(args.num_heads, args.num_rows, SelectThreads(max_pages), sizeof(TopKShared),
                [&](const Block& block, int x, int y, void* shared) {
                  SelectPages(block, args, y, x, static_cast<TopKShared*>(shared));
                });
}

const char* LaunchCompact(const CompactArgs& args, void*) {
  if (args.num_heads == 0 || args.num_kept <= 0) return nullptr;
  switch (args.kv_kind) {
    case Kind::kFloat32: return LaunchCompactOf<Kind::kFloat32>(args);
    case Kind::kBFloat16: return LaunchCompactOf<Kind::kBFloat16>(args);
    case Kind::kFloat16: return LaunchCompactOf<Kind::kFloat16>(args);
    case Kind::kFloat8E4M3: return LaunchCompactOf<Kind::kFloat8E4M3>(args);
    case Kind::kFloat8E5M2: return LaunchCompactOf<Kind::kFloat8E5M2>(args);
  }
  return "unknown kind";
}

}  // namespace rocketkv::cuda

using namespace rocketkv::cuda;

extern "C" {

// Threads of the blocks that run from now on (0: as on a GPU), and the seed of their order.
void rocketkv_model(int threads, uint64_t order) {
  chosen_threads = threads;
  seed = order;
}

const char* rocketkv_top_tokens(const int32_t* keys, int64_t keys_stride, int heads, int size, int count, int num_last,
                                int32_t* out, int64_t out_stride) {
  return LaunchTopTokens({keys, keys_stride, heads, size, count, num_last, out, out_stride}, nullptr);
}

const char* rocketkv_select_pages(const int32_t* keys, int64_t keys_row_stride, int64_t keys_head_stride,
                                  const int32_t* num_tokens, int64_t tokens_stride, int rows, int heads, int max_pages,
                                  int page_size, int dense_below, int topk_tokens, int sink_tokens, int recent_tokens,
                                  int by_page, int32_t* lists, int64_t lists_row_stride, int64_t lists_head_stride,
                                  int32_t* lengths, int num_lengths) {
  return LaunchSelectPages({keys, keys_row_stride, keys_head_stride, num_tokens, tokens_stride, rows, heads, page_size,
                            dense_below, topk_tokens, sink_tokens, recent_tokens, by_page != 0, lists, lists_row_stride,
                            lists_head_stride, lengths, num_lengths},
                           max_pages, nullptr);
}

int64_t rocketkv_most_listed(int64_t page_size, int64_t topk_tokens, int64_t sink_tokens, int64_t recent_tokens) {
  return MostListed(page_size, topk_tokens, sink_tokens, recent_tokens);
}

const char* rocketkv_compact(void* kv, int64_t kv_block_stride, int64_t kv_head_stride, int64_t kv_token_stride,
                             void* kt, int64_t kt_block_stride, int64_t kt_head_stride, int kv_kind, int kt_kind,
                             int heads, int head_size, int block_size, int page_size, const void* prompt_blocks,
                             const void* private_blocks, int has_wide_ids, const int32_t* kept, int64_t kept_stride,
                             int num_kept) {
  return LaunchCompact({static_cast<uint8_t*>(kv), kv_block_stride, kv_head_stride, kv_token_stride,
                        static_cast<uint8_t*>(kt), kt_block_stride, kt_head_stride, Kind(kv_kind), Kind(kt_kind), heads,
                        head_size, block_size, page_size, prompt_blocks, private_blocks, has_wide_ids != 0, kept,
                        kept_stride, num_kept},
                       nullptr);
}

uint32_t rocketkv_encode_bound(int kind, float x, int up) { return EncodeBound(Kind(kind), x, up != 0); }

}  // extern "C"
