# SPDX-License-Identifier: Apache-2.0
"""Stage 1's C++ kernels (scoring, choice, compaction) against ``kernels.reference``, for each instruction set.

Whatever a test does not write is random bytes, NaNs among them: what lies behind the prompt must not matter.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.combinations import combined
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from tests.stage1_layer import INTEGERS, KT_TYPES, LAYOUTS, MODEL_TYPES, TYPES, Case, Layer, draw_prompt
from tests.stage1_oracle import assert_equally_good
from vllm_rocketkv.kernels import reference

# --------------------------------------------------------------------------------------------- cases


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
        "layout": LAYOUTS,
        "num_tokens": [66, 129, 257, 333, 521, 610],
        "window": [1, 5, 32],
        "kernel_size": [1, 5, 63, 701],
        "sinks": [0, 0, 4, 1000],
        "softcap": [0.0, 0.0, 2.0, 30.0],
        "softmax": ["all", "prefix"],
        "page_size": [0, 1, 2, 4, 8, 16],
        "kt_dtype": KT_TYPES,
        "magnitude": [1.0],
        "accumulates": [False, True],
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


@pytest.mark.parametrize("layout", ["vec", "amx", "rows", "private"])
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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, in_place: bool) -> None:
    model = dtype if dtype.itemsize > 1 else torch.float16
    layout = "private" if in_place else "amx"
    case = Case(dtype, model, num_kv_heads=3, num_tokens=1901, num_kept=400, layout=layout, in_place=in_place)
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
    *(replace(case, layout="private", in_place=True, accumulates=i % 2 == 0) for i, case in enumerate(CASES)),
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
    before, expected = layer.bytes.clone(), layer.bytes.clone()
    position = torch.arange(case.num_kept)
    block, offset = layer.private_blocks.long()[position // B], position % B
    tokens = layer.heads(expected).unflatten(2, (B, 2, D))
    for h in range(H):
        tokens[block, h, offset, 0] = keys[kept[h], h].view(tokens.dtype)
        tokens[block, h, offset, 1] = values[kept[h], h].view(tokens.dtype)
        if case.accumulates:
            source = layer.prompt_blocks.long()[kept[h] // B]
            layer.sums(expected)[block, h, offset] = layer.sums(before)[source, h, kept[h] % B]

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


def test_in_place_refuses_what_would_move_a_token_back() -> None:
    case = Case(layout="private", in_place=True)
    _, keys, values = draw_prompt(case)
    kept = torch.arange(101, dtype=torch.int32).repeat(2, 1)
    layer = Layer(case, keys, values)
    for pair in ([50, 50], [51, 50]):
        wrong = kept.clone()
        wrong[1, 50:52] = torch.tensor(pair)
        with pytest.raises(RuntimeError, match=f"kept must be ascending, but head 1 has {pair[0]} before 50"):
            layer.compact(wrong)
    layer.private_blocks = layer.prompt_blocks[1:5].clone()
    with pytest.raises(RuntimeError, match="private_blocks must be the first of prompt_blocks"):
        layer.compact(kept)
    layer = Layer(replace(case, layout="rows"), keys, values)
    with pytest.raises(RuntimeError, match="native_layout must be that of private blocks"):
        layer.compact(kept)
