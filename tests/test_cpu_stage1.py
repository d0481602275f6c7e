# SPDX-License-Identifier: Apache-2.0
"""Stage 1's C++ kernels (scoring, choice, compaction) against ``kernels.reference``, for each instruction set.

Whatever a test does not write is random bytes, NaNs among them: what lies behind the prompt must not matter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.combinations import combined
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from tests.stage1_oracle import Stage1Case, assert_equally_good
from vllm_rocketkv.kernels import cpu, reference

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]  # by csrc/cpu's enum
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
MODEL_TYPES = TYPES[:3]
KT_TYPES = [torch.float8_e5m2, torch.bfloat16]

assert cpu is not None  # its import registers torch.ops.rocketkv_cpu


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case(Stage1Case):
    layout: str = "vec"
    page_size: int = 4  # 0: no KT table
    kt_dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0  # of keys and values

    @property
    def detail(self) -> str:
        return self.layout

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(1502)
    axes = {
        "dtype": TYPES,
        "model_dtype": MODEL_TYPES,
        "head_size": [32, 48, 64, 80, 96, 112, 128, 160, 192, 256],
        "num_kv_heads": [1, 2, 3],
        "group": [1, 3, 4, 7, 16],
        "block_size": [32, 128, 48, 16],
        "layout": ["vec", "vec16", "amx", "rows"],
        "num_tokens": [66, 129, 257, 333, 521, 610],
        "window": [1, 5, 32],
        "kernel_size": [1, 5, 63, 701],
        "sinks": [0, 0, 4, 1000],
        "softcap": [0.0, 0.0, 2.0, 30.0],
        "softmax": ["all", "prefix"],
        "page_size": [0, 1, 2, 4, 8, 16],
        "kt_dtype": KT_TYPES,
        "magnitude": [1.0],
    }
    cases = []
    for i, values in enumerate(combined(axes, count, draw)):
        case = Case(**values, seed=i)
        if case.dtype.itemsize > 1:
            case = replace(case, model_dtype=case.dtype)
        if case.layout == "amx" and case.block_size % 32:
            case = replace(case, block_size=64)
        cases.append(replace(case, num_kept=draw.randint(case.window, case.num_tokens - 1)))
    return cases


CASES = generated_cases(40)
EDGES = [
    Case(num_tokens=34, num_kept=33, kernel_size=63),  # N - W below the kernel
    Case(num_tokens=33, num_kept=32),  # one key to choose from, none chosen
    Case(num_tokens=512 + 32, num_kept=200, block_size=128),  # whole runs of scoring
    Case(num_tokens=513, num_kept=512, window=1, group=1, num_kv_heads=1),  # one row; a run of one key
    Case(num_tokens=400, window=399, num_kept=399, group=1),  # nearly everything is window
    Case(num_tokens=1500, window=600, num_kept=700, group=1, softmax="prefix"),  # a window longer than a run
    Case(num_tokens=640, sinks=16, num_kept=40, softcap=5.0, softmax="prefix"),
]


def layout_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets of vLLM's native layout: of the op itself where it has one for the dtype and size, else by its formulas."""
    B, D = case.block_size, case.head_size
    if case.layout.startswith("vec") and case.dtype.itemsize > 1 and B % 32 == 0:
        from vllm_rocketkv.backend.paged_cache import probe_block_layout

        probed = probe_block_layout(case.layout, case.dtype, B, D)
        return probed.key_token, probed.key_dim, probed.value_token, probed.value_dim
    t, d = torch.arange(B), torch.arange(D)
    if case.layout == "amx":
        key = t // 16 * 16 * D + t % 16 * 2, d // 2 * 32 + d % 2
        value = B * D + t // 2 * 32 + t % 2, d // 16 * 16 * B + d % 16 * 2
    elif case.layout == "rows":  # none of vLLM's: neither contiguous nor pairs
        key, value = (t * D, d), (B * D + t * D, d)
    else:
        key, value = (t, d * B), (B * D + t * D, d)
    return *key, *value


class Layer:
    """A cache of random bytes that holds the case's keys and values in native blocks ``prompt_blocks``."""

    def __init__(self, case: Case, keys: Tensor, values: Tensor) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)
        n, B, D, H = case.num_prompt_blocks, case.block_size, case.head_size, case.num_kv_heads
        self.num_private = -(-case.num_kept // B)
        num_blocks = n + self.num_private + 3
        kv_bytes = H * 2 * B * D * case.dtype.itemsize
        self.kt_offset = (kv_bytes + 63) // 64 * 64
        self.kt_shape = (H, D, 2, B // case.page_size if case.page_size else 0)
        kt_bytes = torch.Size(self.kt_shape).numel() * case.kt_dtype.itemsize
        block_bytes = self.kt_offset + (kt_bytes + 127) // 64 * 64
        self.bytes = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=draw)
        order = torch.randperm(num_blocks, generator=draw).int()
        self.prompt_blocks, self.private_blocks = order[:n].clone(), order[n : n + self.num_private].clone()
        self.offsets = layout_of(case)
        self.native_layout = torch.cat(self.offsets).int()
        self.kv_cache = self.bytes[:, :kv_bytes].view(case.dtype).unflatten(1, (H, B, 2 * D))
        if case.dtype.itemsize == 1:
            self.kv_cache = self.kv_cache.view(torch.uint8)
        heads = self.heads(self.bytes)
        tokens = torch.arange(case.num_tokens)
        block, offset = self.prompt_blocks.long()[tokens // B], tokens % B
        for token, dim, what in ((*self.offsets[:2], keys), (*self.offsets[2:], values)):
            where = token[offset][:, None] + dim
            for h in range(H):
                heads[block[:, None], h, where] = what[:, h].contiguous().view(heads.dtype)

    def heads(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, 2 * B * D]`` elements as integers."""
        H, size = self.case.num_kv_heads, 2 * self.case.block_size * self.case.head_size
        itemsize = self.case.dtype.itemsize
        return raw[:, : H * size * itemsize].view(INTEGERS[itemsize]).unflatten(1, (H, size))

    def kt(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, D, 2, pages]`` of the KT dtype."""
        size = torch.Size(self.kt_shape).numel() * self.case.kt_dtype.itemsize
        return raw[:, self.kt_offset : self.kt_offset + size].view(self.case.kt_dtype).unflatten(1, self.kt_shape)

    @property
    def description(self) -> tuple[Any, ...]:
        case = self.case
        types = TYPES.index(case.dtype), TYPES.index(case.kt_dtype)
        return types[0], case.key_scale, 1.0, self.kt_offset, types[1], case.page_size, self.native_layout

    def keep(self, query: Tensor, num_kept: int | None = None, **other: Any) -> Tensor:
        case = self.case
        options = {
            "scale": case.scale,
            "softcap": case.softcap,
            "softmax_over_all": case.softmax == "all",
            "kernel_size": case.kernel_size,
            "sink_tokens": case.sinks,
        }
        arguments = (query, self.kv_cache, other.pop("prompt_blocks", self.prompt_blocks), case.num_tokens)
        num_kept = case.num_kept if num_kept is None else num_kept
        return torch.ops.rocketkv_cpu.keep_tokens(*arguments, num_kept, *self.description, **(options | other))

    def compact(self, kept: Tensor) -> None:
        blocks = self.prompt_blocks, self.private_blocks
        torch.ops.rocketkv_cpu.compact(self.kv_cache, *blocks, kept, *self.description)


def draw_prompt(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The window's queries ``[W, Hq, D]``, keys and values ``[N, Hkv, D]`` as stored."""
    draw = torch.Generator().manual_seed(case.seed)
    heads, shape = case.num_kv_heads * case.group, (case.num_tokens, case.num_kv_heads, case.head_size)
    query = torch.randn(case.window, heads, case.head_size, generator=draw) * 2
    keys, values = (torch.randn(shape, generator=draw) * case.magnitude for _ in range(2))
    return query.to(case.model_dtype), keys.to(case.dtype), values.to(case.dtype)


@cache
def reference_scores(case: Case) -> Tensor:
    query, keys, _ = draw_prompt(case)
    real_keys = keys.double() * torch.tensor(case.key_scale, dtype=torch.float32).double()
    return reference.window_scores(query, real_keys, case.scale, case.softmax, case.kernel_size, case.softcap)


# --------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_keeps_the_tokens_that_the_reference_keeps(case: Case) -> None:
    query, keys, values = draw_prompt(case)
    kept = Layer(case, keys, values).keep(query)
    scores = reference_scores(case)
    expected = reference.keep_tokens(scores, case.num_kept, case.window, case.sinks)
    assert kept.dtype == torch.int32
    assert kept[:, -case.window :].tolist() == expected[:, -case.window :].tolist()
    forced = scores.clone()
    forced[:, : case.sinks] = torch.inf
    assert_equally_good(kept, expected, forced)


@pytest.mark.parametrize("softcap", [0.0, 1.5, 8.0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_ranks_tokens_as_the_reference_does_at_every_budget(dtype: torch.dtype, softcap: float) -> None:
    model = dtype if dtype.itemsize > 1 else torch.float32
    case = Case(dtype, model, num_tokens=801, kernel_size=1, softcap=softcap, num_kv_heads=1, window=8, seed=11)
    query, keys, values = draw_prompt(case)
    layer, scores = Layer(case, keys, values), reference_scores(case)
    for num_kept in range(9, 801, 6):
        expected = reference.keep_tokens(scores, num_kept, case.window)
        assert_equally_good(layer.keep(query, num_kept), expected, scores)


@pytest.mark.parametrize("num_kept", [333, 334, 5000])
def test_keeps_everything_within_the_budget(num_kept: int) -> None:
    case = Case()
    query, keys, values = draw_prompt(case)
    kept = Layer(case, keys, values).keep(query, num_kept)
    assert torch.equal(kept, torch.arange(333, dtype=torch.int32).expand(2, 333))


@pytest.mark.parametrize("layout", ["vec", "amx", "rows"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equal_keys_tie_wherever_they_lie_and_the_lower_index_wins(dtype: torch.dtype, layout: str) -> None:
    model = dtype if dtype.itemsize > 1 else torch.bfloat16
    case = Case(dtype, model, layout=layout, num_tokens=1217, kernel_size=1, seed=3)
    query, keys, values = draw_prompt(case)
    draw = torch.Generator().manual_seed(5)
    kind = torch.randint(0, 4, (case.num_tokens,), generator=draw)
    keys = keys[:4][kind]
    layer = Layer(case, keys, values)
    real_keys = keys.double() * case.key_scale
    scores = reference.window_scores(query, real_keys, case.scale, case.softmax, 1)
    prefix = case.num_tokens - case.window
    of_kind = torch.stack([scores[:, kind[:prefix] == k].mean(1) for k in range(4)], dim=1)  # [Hkv, 4]
    assert (of_kind.sort().values.diff() > 1e-3 * of_kind.amax()).all(), "the kinds must differ"
    for num_kept in (33, 100, 200, 500, 900, 1216):
        expected = reference.keep_tokens(of_kind[:, kind[:prefix]], num_kept, case.window)
        assert layer.keep(query, num_kept).tolist() == expected.tolist()


@pytest.mark.parametrize("softmax", ["all", "prefix"])
@pytest.mark.parametrize("dtype", MODEL_TYPES, ids=str)
def test_scores_that_are_not_numbers_rank_last(dtype: torch.dtype, softmax: str) -> None:
    case = Case(dtype, dtype, softmax=softmax)
    query, keys, values = draw_prompt(case)
    clean = Layer(case, keys, values).keep(query)
    keys[50, 0] = torch.nan
    broken = Layer(case, keys, values).keep(query)
    prefix = case.num_tokens - case.window
    assert broken[0].tolist() == [*range(case.num_kept - case.window), *range(prefix, case.num_tokens)]
    assert torch.equal(broken[1], clean[1])
    if softmax == "prefix":  # the softmax does not see the window's keys
        keys = draw_prompt(case)[1]
        keys[-1] = torch.nan
        assert torch.equal(Layer(case, keys, values).keep(query), clean)


def test_a_weight_that_dominates_every_other_survives() -> None:
    case = Case(torch.float32, torch.float32, kernel_size=1, num_tokens=1100, num_kept=34)
    query, keys, values = draw_prompt(case)
    query[:] = query[0]  # every row looks for the same key
    keys[700] = query[0, :3].mean(0) * 100
    kept = Layer(case, keys, values).keep(query)
    assert 700 in kept[0].tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    model = dtype if dtype.itemsize > 1 else torch.float16
    case = Case(dtype, model, num_kv_heads=3, num_tokens=1901, num_kept=400, layout="amx")
    query, keys, values = draw_prompt(case)
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        layer = Layer(case, keys, values)
        kept = layer.keep(query)
        layer.compact(kept)
        results.append((kept, layer.bytes))
    torch.set_num_threads(1)
    for kept, raw in results[1:]:
        assert torch.equal(kept, results[0][0])
        assert torch.equal(raw, results[0][1])


# --------------------------------------------------------------------------------------------- compaction


COMPACTIONS = [
    *CASES,
    Case(magnitude=1e25, kt_dtype=torch.bfloat16, head_size=32),  # beyond what bounds count as
    Case(magnitude=1e25, kt_dtype=torch.float8_e5m2, head_size=32),  # beyond the largest bound
    Case(torch.float32, torch.float32, magnitude=1e5, kt_dtype=torch.float8_e5m2, page_size=1),
    Case(torch.float32, torch.float32, magnitude=1e5, kt_dtype=torch.bfloat16, page_size=2),
    Case(torch.float32, torch.float32, magnitude=1e-6, kt_dtype=torch.float8_e5m2),  # subnormal bounds
    Case(torch.float16, torch.float16, magnitude=1e-5, kt_dtype=torch.float8_e5m2, layout="amx"),
    Case(num_kept=128),  # whole blocks
    Case(num_kept=3, window=1, page_size=4),  # no full page
]


@pytest.mark.parametrize("case", COMPACTIONS, ids=str)
def test_compaction_copies_bits_and_bounds_full_pages_and_writes_nothing_else(case: Case) -> None:
    _, keys, values = draw_prompt(case)
    layer = Layer(case, keys, values)
    draw = torch.Generator().manual_seed(case.seed)
    H, B, D, page = case.num_kv_heads, case.block_size, case.head_size, case.page_size
    kept = torch.stack([torch.randperm(case.num_tokens, generator=draw)[: case.num_kept] for _ in range(H)])
    kept = kept.sort().values
    expected = layer.bytes.clone()
    position = torch.arange(case.num_kept)
    block, offset = layer.private_blocks.long()[position // B], position % B
    tokens = layer.heads(expected).unflatten(2, (B, 2, D))
    for h in range(H):
        tokens[block, h, offset, 0] = keys[kept[h], h].view(tokens.dtype)
        tokens[block, h, offset, 1] = values[kept[h], h].view(tokens.dtype)

    layer.compact(kept.int())

    pages = case.num_kept // page if page else 0
    if pages:
        found = layer.kt(layer.bytes)
        target = layer.kt(expected).view(INTEGERS[case.kt_dtype.itemsize])
        first = torch.arange(pages) * page
        block, place = layer.private_blocks.long()[first // B], first % B // page
        for h in range(H):
            full = keys[kept[h, : pages * page], h : h + 1].double()
            low, high = reference.page_summaries(full, page, case.kt_dtype)
            bounds = torch.stack([low[0], high[0]], dim=2).double()  # [pages, D, 2]
            if case.kt_dtype == torch.bfloat16:
                bounds = bounds.clamp(-(2.0**64), 2.0**64)
            of_head = found.view(target.dtype)[block, h, :, :, place]
            assert torch.equal(of_head.view(case.kt_dtype).double(), bounds)
            target[block, h, :, :, place] = of_head  # which of two zeros is up to the kernel
    assert torch.equal(layer.bytes, expected)


# --------------------------------------------------------------------------------------------- refusals


def test_refuses_what_would_leave_the_cache() -> None:
    case = Case()
    query, keys, values = draw_prompt(case)
    layer = Layer(case, keys, values)
    blocks = layer.prompt_blocks.clone()
    blocks[3] = len(layer.bytes)
    with pytest.raises(RuntimeError, match="prompt_blocks names a block that does not exist"):
        layer.keep(query, prompt_blocks=blocks)
    with pytest.raises(RuntimeError, match="at least 11 elements"):
        layer.keep(query, prompt_blocks=layer.prompt_blocks[:-1])
    with pytest.raises(RuntimeError, match="cannot keep a window of 32 tokens in a budget of 31"):
        layer.keep(query, 31)
    with pytest.raises(RuntimeError, match="kernel_size must be odd"):
        layer.keep(query, kernel_size=4)
    with pytest.raises(RuntimeError, match="window_query must be float32, bfloat16 or float16"):
        layer.keep(query.double())
    with pytest.raises(RuntimeError, match="window_query must be contiguous"):
        layer.keep(query[:, :, :32])
    kept = torch.full((2, 101), 400, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="kept names a token"):
        layer.compact(kept)
    layer.native_layout[5] = 2 * case.block_size * case.head_size
    with pytest.raises(RuntimeError, match="native_layout leaves the block"):
        layer.keep(query)
