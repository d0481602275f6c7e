# SPDX-License-Identifier: Apache-2.0
"""``csrc/cuda`` without a GPU: the blocks' algorithms run on the host's model of threads, and must equal the reference.

The model runs every thread of a block, in an order drawn from a seed (``csrc/cuda/host_threads.h``).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cuda_model import SOURCES, Model, build
from vllm_rocketkv.kernels import cuda, reference
from vllm_rocketkv.kernels.triton.cache import CacheView, cache_view
from vllm_rocketkv.kernels.triton.numbers import CODES, KINDS

LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build(tmp_path_factory.mktemp("cuda"), "model", str(SOURCES / "host_model.cpp")))


# ------------------------------------------------------------------------------------------- the model of threads

MODEL_CHECK = """
#include <string>
#include "warp.h"
using namespace rocketkv::cuda;
extern "C" int missing_barrier(int has_barrier, int order) {
  HostThreads threads(64, order);
  int last = 0, sum = 0;
  threads.Run([&](const Block& block) {
    last = block.thread();
    if (has_barrier) block.Barrier();
    if (block.thread() == 0) sum = last < 64;
    if (has_barrier) block.Barrier();
    if (!has_barrier) sum = 64 * last + block.thread();
  });
  return sum;
}
extern "C" int divergence(int kind) {
  try {
    HostThreads(64, 1).Run([&](const Block& block) {
      if (kind == 0 && block.thread() != 40) block.Barrier();
      if (kind == 1 && block.lane() != 7) block.Sum(1);
      if (kind == 2) block.lane() < 16 ? block.Sum(1) : block.Shuffle(1, 0);
      if (kind == 3 && block.warp() == 1) block.Sum(1);  // whole warps may go their own way
    });
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
extern "C" int scan(int lane_of_interest) {
  int result = -1;
  HostThreads(32, 3).Run([&](const Block& block) {
    const int sum = InclusiveScan(block, block.lane() + 1);
    if (block.lane() == lane_of_interest) result = sum;
  });
  return result;
}
"""


def test_the_model_of_threads_shows_races_and_divergence(tmp_path: Path) -> None:
    (tmp_path / "check.cpp").write_text(MODEL_CHECK)
    check = ctypes.CDLL(str(build(tmp_path, "check", str(tmp_path / "check.cpp"))))
    assert len({check.missing_barrier(0, order) for order in range(8)}) > 1
    assert {check.missing_barrier(1, order) for order in range(8)} == {1}
    assert [check.divergence(kind) for kind in range(4)] == [1, 1, 1, 0]
    assert [check.scan(lane) for lane in (0, 1, 15, 31)] == [1, 3, 136, 528]


# ------------------------------------------------------------------------------------------- top_tokens


def best(keys: Sequence[int], k: int) -> list[int]:
    return sorted(sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:k])


THREADS = st.sampled_from([32, 64, 96, 128, 256])
ORDERS = st.integers(0, 2**32)
KEYS = st.one_of(
    st.sampled_from([LOWEST, LOWEST + 1, -1, 0, 1, 255, 256, 257, 65536, HIGHEST - 1, HIGHEST]),  # edges of digits
    st.integers(0, 3),
    st.integers(LOWEST, HIGHEST),
    st.floats(0, 1, width=32).map(lambda x: int(torch.tensor(x).view(torch.int32))),
)


@settings(max_examples=80)
@given(
    heads=st.lists(st.lists(KEYS, min_size=0, max_size=300), min_size=1, max_size=2),
    k=st.integers(0, 320),
    threads=THREADS,
    order=ORDERS,
)
@example(heads=[[5] * 129], k=64, threads=32, order=0)
@example(heads=[[HIGHEST] * 10 + [LOWEST] * 10], k=15, threads=64, order=1)
@example(heads=[[]], k=3, threads=64, order=2)
def test_top_tokens_are_the_references(model: Model, heads: list[list[int]], k: int, threads: int, order: int) -> None:
    size = min(len(head) for head in heads)
    wide = torch.full((len(heads), size + 5), HIGHEST, dtype=torch.int32)  # what follows a row must not be read
    for row, head in zip(wide, heads, strict=True):
        row[:size] = torch.tensor(head[:size], dtype=torch.int32)
    num_last = order % 4
    result = model.top_tokens(wide[:, :size], k, threads, order, num_last)
    last = list(range(size, size + num_last))
    assert result.tolist() == [best(head[:size], k) + last for head in heads]


@pytest.mark.parametrize("threads", [32, 128, 1024])
@pytest.mark.parametrize("spread", [1, 3, 1000, 2**31])
def test_top_tokens_of_every_size_around_multiples_of_the_block(model: Model, threads: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    tile = 4 * threads  # keys that a block looks at before it loads more
    for size in {n + d for n in (32, threads, tile, 2 * tile) for d in (-1, 0, 1) if n + d > 0 and n <= 2048}:
        keys = torch.randint(0, spread, (1, size), generator=generator, dtype=torch.int64).to(torch.int32)
        for k in {0, 1, size // 3, size - 1, size, size + 1}:
            assert model.top_tokens(keys, k, threads, size).tolist() == [best(keys[0].tolist(), k)], (size, k)


def test_top_tokens_of_a_long_prompt(model: Model) -> None:
    scores = torch.rand(1, 200_003, generator=torch.Generator().manual_seed(0)) ** 8
    keys = scores.view(torch.int32)
    expected = torch.sort(-keys.long(), dim=1, stable=True).indices[:, :2016].sort().values
    assert torch.equal(model.top_tokens(keys, 2016).long(), expected)


# ------------------------------------------------------------------------------------------- select_pages


def tokens_read(
    listed: list[tuple[int, int]], n: int, page_size: int, sinks: int, recent: int, by_page: bool
) -> list[int]:
    """What a list means: the page's forced tokens, and the first so many of the others."""
    sink_end, recent_start = sinks, max(n - recent, 0)
    if by_page:
        sink_end = -(-sinks // page_size) * page_size
        recent_start = recent_start // page_size * page_size if recent else n
    read = []
    for page, taken in listed:
        of_page = range(page * page_size, min((page + 1) * page_size, n))
        free = [t for t in of_page if sink_end <= t < recent_start]
        assert 0 <= taken <= len(free)
        assert taken > 0 or len(free) < len(of_page), "a page of which nothing is read"
        read += sorted({t for t in of_page if t not in free} | set(free[:taken]))
    return read


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    lengths = draw(st.lists(st.integers(0, 60 * page_size + 3), min_size=1, max_size=3))
    most = max(1, *(-(-n // page_size) for n in lengths))
    scores = st.one_of(st.sampled_from([0.0, 0.125, 0.25, math.nan]), st.floats(0, 1, width=32))
    tokens = st.one_of(st.just(0), st.integers(0, 3 * page_size), st.integers(0, 61 * page_size))
    return {
        "lengths": lengths,
        "scores": draw(st.lists(scores, min_size=1, max_size=2 * most)),
        "heads": draw(st.integers(1, 2)),
        "pages": most + draw(st.integers(0, 3)),
        "page_size": page_size,
        "topk": draw(tokens),
        "sinks": draw(tokens),
        "recent": draw(tokens),
        "by_page": draw(st.booleans()),
        "threads": draw(THREADS),
        "order": draw(ORDERS),
    }


def as_keys(scores: torch.Tensor) -> torch.Tensor:
    """Integers of the scores' order, NaN last: ``score_keys`` of ``kernels/triton/select.py``."""
    return torch.where(scores >= 0, scores.contiguous().view(torch.int32), -1)


@settings(max_examples=150)
@given(case=selections())
def test_selected_pages_are_the_references(model: Model, case: dict[str, Any]) -> None:
    lengths, heads, pages, page_size = (case[name] for name in ("lengths", "heads", "pages", "page_size"))
    drawn = torch.tensor(case["scores"], dtype=torch.float32)
    scores = drawn[torch.arange(len(lengths) * heads * pages) % len(drawn)].reshape(len(lengths), heads, pages)
    keys = as_keys(scores)
    for row, n in enumerate(lengths):
        keys[row, :, -(-n // page_size) :] = HIGHEST  # beyond a row's pages there may be anything
    rule = {name: case[name] for name in ("topk", "sinks", "recent", "by_page")}
    listed = model.select_pages(keys, lengths, page_size, **rule, threads=case["threads"], order=case["order"])
    for row, n in enumerate(lengths):
        granularity = "page" if case["by_page"] else "token"
        of_row = scores[row, :, : -(-n // page_size)]
        expected = reference.hsa_choose(
            of_row, n, page_size, case["topk"], granularity, case["sinks"], case["recent"]
        )  # fmt: skip
        for head in range(heads):
            read = tokens_read(listed[row][head], n, page_size, case["sinks"], case["recent"], case["by_page"])
            assert read == expected[head]


@pytest.mark.parametrize("by_page", [False, True])
def test_selection_with_as_many_threads_as_on_a_gpu(model: Model, by_page: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [2048, 2047, 0, 8192, 300, 6001]
    scores = torch.rand(len(lengths), 2, 2048, generator=generator)
    scores[:, 1] = (scores[:, 1] * 4).round()  # many ties
    listed = model.select_pages(as_keys(scores), lengths, 4, 256, 4, 64, by_page, dense_below=300)
    for row, n in enumerate(lengths):
        if 0 < n <= 300:
            assert listed[row] == [[], []]
            continue
        expected = reference.hsa_choose(scores[row, :, : -(-n // 4)], n, 4, 256, "page" if by_page else "token", 4, 64)
        for head in range(2):
            assert tokens_read(listed[row][head], n, 4, 4, 64, by_page) == expected[head]


def test_a_list_holds_what_it_may_have_to(model: Model) -> None:
    for arguments in [(4, 256, 4, 64), (16, 1, 0, 0), (1, 5, 0, 3), (64, 0, 65, 1), (8, 17, 9, 0)]:
        numbers = [ctypes.c_int64(argument) for argument in arguments]
        assert model.library.rocketkv_most_listed(*numbers) == cuda.most_listed(*arguments)


# ------------------------------------------------------------------------------------------- compaction

KT_TYPES = [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.float16, torch.float32]
KV_TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = 2.0**64


@functools.cache
def values_of(dtype: torch.dtype) -> torch.Tensor:
    """All values of a KT type as the estimation reads them, by code: float64, NaN for codes that stand for none."""
    codes = torch.arange(0, 2 ** (8 * dtype.itemsize)).to(CODES[KINDS[dtype]])
    values = codes.view(dtype).double()
    if dtype == torch.float8_e4m3fn:
        values[0x7F], values[0xFF] = math.inf, -math.inf
    return values


def expected_bound(x: float, dtype: torch.dtype, up: bool) -> float:
    """The type's nearest value outward, infinite ones counted as +-2^64."""
    if dtype != torch.float32:
        values = values_of(dtype)
        x = float(values[values >= x].min() if up else values[values <= x].max())
    return min(max(x, -LARGEST), LARGEST)


@settings(max_examples=300)
@given(
    x=st.one_of(
        st.floats(width=32, allow_nan=False), st.floats(-500, 500, width=32), st.floats(-(2.0**-16), 2.0**-16, width=32)
    ),
    dtype=st.sampled_from(KT_TYPES),
    up=st.booleans(),
)
@example(x=math.inf, dtype=torch.float8_e5m2, up=False)
@example(x=-math.inf, dtype=torch.float16, up=True)
@example(x=math.inf, dtype=torch.bfloat16, up=True)
@example(x=448.0, dtype=torch.float8_e4m3fn, up=True)
@example(x=448.5, dtype=torch.float8_e4m3fn, up=True)
@example(x=1e30, dtype=torch.float8_e4m3fn, up=False)
@example(x=1e30, dtype=torch.bfloat16, up=False)
@example(x=-0.0, dtype=torch.float8_e5m2, up=True)
@example(x=1e-45, dtype=torch.float8_e5m2, up=True)
def test_bounds_are_rounded_outward(model: Model, x: float, dtype: torch.dtype, up: bool) -> None:
    code = model.library.rocketkv_encode_bound(KINDS[dtype], ctypes.c_float(x), int(up))
    value = torch.tensor(x).item() if dtype == torch.float32 else float(values_of(dtype)[code])
    assert min(max(value, -LARGEST), LARGEST) == expected_bound(x, dtype, up)


class Prompt:
    """A layer's cache with random codes in every block, and two disjoint lists of blocks."""

    def __init__(
        self,
        kv_dtype: torch.dtype,
        kt_dtype: torch.dtype,
        heads: int,
        head_size: int,
        block_size: int,
        page_size: int,
        num_kept: int,
        hnd: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(head_size * block_size + num_kept)
        num_prompt, num_private = 3 + num_kept // block_size, -(-num_kept // block_size)
        num_blocks = 1 + num_prompt + num_private
        kv_bytes = 2 * heads * block_size * head_size * kv_dtype.itemsize
        kt_bytes = 2 * heads * head_size * (block_size // page_size if page_size else 0) * kt_dtype.itemsize
        self.storage = torch.randint(
            0, 256, (num_blocks, kv_bytes + -(-kt_bytes // 16) * 16), dtype=torch.uint8, generator=generator
        )
        size = kv_dtype.itemsize
        of_storage = self.storage.view(CODES[KINDS[kv_dtype]])
        shape = (num_blocks, heads, block_size, 2 * head_size)
        strides = (block_size * 2 * head_size, 2 * head_size) if hnd else (2 * head_size, heads * 2 * head_size)
        kv = of_storage.as_strided(shape, (self.storage.stride(0) // size, *strides, 1))
        numbers = torch.randn(shape, generator=generator).to(kv_dtype).view(kv.dtype)
        kv.copy_(numbers)
        self.cache = cache_view(kv, kv_dtype, kt_dtype, kv_bytes, page_size)
        blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.prompt_blocks, self.private_blocks = blocks[:num_prompt].clone(), blocks[num_prompt:].clone()
        choices = [torch.randperm(num_prompt * block_size, generator=generator)[:num_kept] for _ in range(heads)]
        self.kept = torch.stack([choice.sort().values for choice in choices]).to(torch.int32)
        self.kv_dtype, self.kt_dtype = kv_dtype, kt_dtype

    def view(self, storage: torch.Tensor) -> CacheView:
        """The layer's cache over another storage of the same shape."""
        cache = self.cache
        kv = storage.view(cache.kv.dtype).as_strided(cache.kv.shape, cache.kv.stride())
        offset = 2 * cache.num_kv_heads * cache.block_size * cache.head_size * self.kv_dtype.itemsize
        return cache_view(kv, self.kv_dtype, self.kt_dtype, offset, cache.page_size)

    def expected(self) -> torch.Tensor:
        """The storage after compaction, made token by token; bounds by the reference."""
        storage = self.storage.clone()
        cache = self.view(storage)
        block_size, page_size = cache.block_size, cache.page_size
        for head in range(cache.num_kv_heads):
            positions = self.kept[head].long()
            tokens = cache.kv[self.prompt_blocks[positions // block_size], head, positions % block_size]
            place = torch.arange(len(positions))
            cache.kv[self.private_blocks[place // block_size], head, place % block_size] = tokens
            keys = tokens[:, : cache.head_size].contiguous().view(self.kv_dtype).float()
            for page in range(len(positions) // page_size if page_size else 0):
                of_page = keys[page * page_size : (page + 1) * page_size]
                block, inside = divmod(page, cache.pages_per_block)
                entry = cache.kt[self.private_blocks[block], head, :, :, inside]
                entry[:, 0] = reference.round_down(of_page.amin(0), self.kt_dtype).view(cache.kt.dtype)
                entry[:, 1] = reference.round_up(of_page.amax(0), self.kt_dtype).view(cache.kt.dtype)
        return self.without_negative_zeros(storage)

    def without_negative_zeros(self, storage: torch.Tensor) -> torch.Tensor:
        """A bound of 0 may have either sign."""
        storage = storage.clone()
        kt = self.view(storage).kt
        kt[kt == torch.tensor(-0.0).to(self.kt_dtype).view(kt.dtype)] = 0
        return storage


REFERENCE_KT = (torch.bfloat16, torch.float8_e5m2, torch.float16, torch.float32)
"""KT types that the reference rounds to; the other one's rounding is tested by itself, above."""

SHAPES = [
    # heads, head size, block size, page size, kept
    (2, 64, 16, 4, 40),
    (1, 128, 32, 16, 95),
    (3, 80, 48, 8, 97),
    (1, 96, 16, 16, 16),
    (2, 256, 64, 1, 64),
    (1, 128, 256, 2, 300),  # several tiles in a block
    (1, 64, 256, 256, 255),  # one page, not full
    (2, 64, 16, 0, 21),  # no KT table
    (1, 16, 16, 4, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_dtype", KV_TYPES, ids=lambda dtype: str(dtype)[6:])
def test_compaction_moves_tokens_and_bounds_their_keys(
    model: Model, kv_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    index = SHAPES.index(shape)
    prompt = Prompt(kv_dtype, REFERENCE_KT[index % 2], *shape, hnd=index % 3 != 0)
    expected = prompt.expected()
    ids = torch.int64 if index % 2 else torch.int32
    blocks = prompt.prompt_blocks.to(ids), prompt.private_blocks.to(ids)
    model.compact(prompt.cache, *blocks, prompt.kept, order=index)
    assert torch.equal(prompt.without_negative_zeros(prompt.storage), expected)


@pytest.mark.parametrize("kt_dtype", REFERENCE_KT, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("threads", [32, 96, 512])
def test_compaction_to_every_kt_type(model: Model, kt_dtype: torch.dtype, threads: int) -> None:
    prompt = Prompt(torch.bfloat16, kt_dtype, 2, 64, 32, 4, 75)
    expected = prompt.expected()
    model.compact(prompt.cache, prompt.prompt_blocks, prompt.private_blocks, prompt.kept, threads, order=threads)
    assert torch.equal(prompt.without_negative_zeros(prompt.storage), expected)
