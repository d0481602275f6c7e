# SPDX-License-Identifier: Apache-2.0
"""Stage 1's Triton kernels (scoring, pooling, choice) in Triton's interpreter, against ``kernels.reference``.

All of a cache that no test writes is NaN, the null block and the values among it; behind the prompt's blocks, the list of them
goes on with blocks that do not exist.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.combinations import combined
from tests.stage1_oracle import NEAR, Stage1Case, assert_equally_good
from tests.triton_kernels.paged import KV_DTYPES, PagedCache, make_cache, random_tokens
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.triton import stage1, top_tokens, window_scores
from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.numbers import KINDS

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case(Stage1Case):
    block_size: int = 16
    is_hnd: bool = True

    @property
    def scale(self) -> float:
        return 1.3 * self.head_size**-0.5


class Prompt:
    """A case's queries and keys, which a test may change before it asks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        heads = case.num_kv_heads
        self.query = random_tokens((case.window, heads * case.group, case.head_size), case.model_dtype, case.seed)
        self.keys = random_tokens((case.num_tokens, heads, case.head_size), case.dtype, case.seed + 1)

    @cached_property
    def stored(self) -> tuple[PagedCache, Tensor]:
        case = self.case
        cache = make_cache(
            -(-case.num_tokens // case.block_size) + 3, case.num_kv_heads, case.block_size, case.head_size,
            case.dtype, is_hnd=case.is_hnd, key_scale=case.key_scale, seed=case.seed,
        )  # fmt: skip
        blocks = cache.add(self.keys, torch.full(self.keys.shape, torch.nan).to(case.dtype), with_kt=False)
        return cache, torch.cat([blocks, torch.tensor([10**9, -(10**9)], dtype=torch.int32)])

    def scores(self) -> Tensor:
        case, (cache, blocks) = self.case, self.stored
        return window_scores.window_scores(
            self.query, cache.view, blocks, case.num_tokens, case.scale, case.softcap, case.softmax == "all"
        )

    def keep(self, num_kept: int | None = None, **options: Any) -> Tensor:
        case, (cache, blocks) = self.case, self.stored
        options = {"prompt_blocks": blocks, "window_query": self.query, "kernel_size": case.kernel_size} | options
        return stage1.keep_tokens(
            cache=cache.view,
            num_prompt_tokens=case.num_tokens,
            num_kept=case.num_kept if num_kept is None else num_kept,
            scale=case.scale,
            softcap=case.softcap,
            softmax_over_all=case.softmax == "all",
            sink_tokens=case.sinks,
            **options,
        )

    def reference_scores(self, kernel_size: int = 1) -> Tensor:
        case = self.case
        keys = self.keys.double() * case.key_scale
        return reference.window_scores(self.query, keys, case.scale, case.softmax, kernel_size, case.softcap)


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(2502)
    axes: dict[str, list[Any]] = {
        "dtype": KV_DTYPES,
        "model_dtype": [torch.bfloat16, torch.float16, torch.bfloat16, torch.float32],
        "head_size": [64, 80, 96, 128, 256],
        "num_kv_heads": [1, 2, 3],
        "group": [1, 3, 8, 3, 48],
        "block_size": [16, 48, 128],
        "is_hnd": [True, False],
        "num_tokens": [66, 129, 257, 333, 521, 700],
        "window": [1, 5, 32],
        "kernel_size": [1, 7, 63, 1023],
        "sinks": [0, 0, 4, 1000],
        "softcap": [0.0, 0.0, 2.0, 30.0],
        "softmax": ["all", "prefix"],
    }
    cases = []
    for i, values in enumerate(combined(axes, count, draw)):
        case = Case(**values, seed=i)
        if case.dtype.itemsize > 1:
            case = replace(case, model_dtype=case.dtype)
        if torch.float32 in (case.dtype, case.model_dtype):  # small tiles, that is many
            case = replace(
                case, group=min(case.group, 8), window=min(case.window, 5), num_tokens=min(case.num_tokens, 257)
            )
        cases.append(replace(case, num_kept=draw.randint(case.window, case.num_tokens - 1)))
    return cases


CASES = generated_cases(25)
EDGES = [
    Case(num_tokens=33, num_kept=32),  # one key to choose from, none chosen
    Case(num_tokens=34, num_kept=33, kernel_size=63, softmax="prefix"),  # N - W below the pool
    Case(
        num_tokens=160, window=32, num_kept=100, block_size=128
    ),  # the window begins with a tile, and in one block with
    Case(num_tokens=2049, num_kept=2048, window=1, group=1, num_kv_heads=1, block_size=128),  # one row, several splits
    Case(num_tokens=513, window=128, num_kept=128, num_kv_heads=1, block_size=48),  # nothing but the window is kept
    Case(num_tokens=300, window=40, group=48, num_kv_heads=1, num_kept=200),  # 15 tiles of rows
    Case(torch.float32, torch.bfloat16, window=8, num_kept=60),  # types that no product takes as they are
    Case(torch.bfloat16, torch.float16, window=8, sinks=16, num_kept=40, softcap=5.0),
    Case(torch.float8_e4m3fn, torch.float32, window=8, num_kept=60),
]


# --------------------------------------------------------------------------------------------- scores and choice


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_scores_and_keeps_the_tokens_that_the_reference_keeps(case: Case) -> None:
    prompt = Prompt(case)
    found: list[Tensor] = []

    def choose(ranks: Tensor, num_best: int, num_last: int) -> Tensor:
        found.append(ranks)
        return top_tokens.top_tokens(ranks, num_best, num_last)

    kept = prompt.keep(choose=choose)
    scores = prompt.reference_scores(case.kernel_size)
    pooled = found[0].view(torch.float32)  # of positive scores, ranks are the bits
    torch.testing.assert_close(pooled[:, case.sinks :].double(), scores[:, case.sinks :], rtol=NEAR, atol=0)
    assert kept.dtype == torch.int32
    expected = reference.keep_tokens(scores, case.num_kept, case.window, case.sinks)
    assert kept[:, -case.window :].tolist() == expected[:, -case.window :].tolist()
    scores[:, : case.sinks] = torch.inf
    assert_equally_good(kept, expected, scores)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_ranks_tokens_as_the_reference_does_at_every_budget(dtype: torch.dtype, softcap: float) -> None:
    query_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    prompt = Prompt(Case(dtype, query_dtype, num_tokens=401, softcap=softcap, num_kv_heads=1, window=8, seed=11))
    found, scores = prompt.scores(), prompt.reference_scores()
    torch.testing.assert_close(found.double(), scores, rtol=NEAR, atol=0)
    ranks = stage1.pool_scores(found, kernel_size=1)
    for num_kept in range(9, 401, 29):
        expected = reference.keep_tokens(scores, num_kept, 8)
        assert_equally_good(top_tokens.top_tokens(ranks, num_kept - 8, 8), expected, scores)


@pytest.mark.parametrize("num_kept", [333, 334, 5000])
def test_keeps_everything_within_the_budget(num_kept: int) -> None:
    kept = Prompt(Case()).keep(num_kept)
    assert kept.dtype == torch.int32
    assert torch.equal(kept, torch.arange(333, dtype=torch.int32).expand(2, 333))


def test_there_are_no_scores_without_a_prefix() -> None:
    assert Prompt(Case(num_tokens=32)).scores().shape == (2, 0)


@pytest.mark.parametrize("is_hnd", [True, False])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_equal_keys_tie_wherever_they_lie_and_the_lower_index_wins(dtype: torch.dtype, is_hnd: bool) -> None:
    query_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    case = Case(dtype, query_dtype, is_hnd=is_hnd, num_tokens=517, window=8, block_size=48, seed=10)
    prompt = Prompt(case)
    kind = torch.randint(0, 4, (case.num_tokens,), generator=torch.Generator().manual_seed(5))
    prompt.keys = prompt.keys[:4][kind]
    scores = prompt.reference_scores()
    prefix = case.num_tokens - case.window
    of_kind = torch.stack([scores[:, kind[:prefix] == k].mean(1) for k in range(4)], dim=1)  # [Hkv, 4]
    assert (of_kind.sort().values.diff() > 1e-2 * of_kind.amax()).all(), "the kinds must differ"
    ranks = stage1.pool_scores(prompt.scores(), kernel_size=1)
    for num_kept in (9, 100, 200, 516):
        expected = reference.keep_tokens(of_kind[:, kind[:prefix]], num_kept, case.window)
        assert top_tokens.top_tokens(ranks, num_kept - case.window, case.window).tolist() == expected.tolist()


@pytest.mark.parametrize("softmax", ["all", "prefix"])
def test_of_equal_scores_the_first_win(softmax: str) -> None:
    prompt = Prompt(Case(softmax=softmax, kernel_size=63))
    prompt.keys[:] = prompt.keys[0]
    assert prompt.keep(50).tolist() == [[*range(50 - 32), *range(333 - 32, 333)]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("softmax", ["all", "prefix"])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_scores_that_are_not_numbers_rank_last(dtype: torch.dtype, softmax: str, broken: float) -> None:
    if dtype == torch.float8_e4m3fn:
        broken = torch.nan  # the type has no infinity
    query_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    case = Case(dtype, query_dtype, softmax=softmax, num_tokens=90, window=8, num_kept=40)
    clean = Prompt(case).keep()
    prompt = Prompt(case)
    prompt.keys[50, 0, 3] = broken
    kept = prompt.keep()
    assert prompt.reference_scores()[0].isnan().all(), "one such logit makes a row such"
    assert kept[0].tolist() == [*range(40 - 8), *range(90 - 8, 90)]
    assert torch.equal(kept[1], clean[1])
    prompt = Prompt(case)
    prompt.keys[-1, 0] = broken  # which the prefix's softmax does not see, and of the other only the last row
    kept = prompt.keep()
    assert torch.equal(kept[1], clean[1])
    assert torch.equal(kept[0], clean[0]) == (softmax == "prefix")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # 0 * inf in rows of padding
def test_a_key_that_no_row_attends_to_has_no_weight() -> None:
    prompt = Prompt(Case(num_tokens=150))
    prompt.query[..., 3] = 1.0
    prompt.keys[50, 0, 3] = -torch.inf
    scores = prompt.scores()
    assert scores[0, 50] == 0
    torch.testing.assert_close(scores.double(), prompt.reference_scores(), rtol=NEAR, atol=0)


def test_logits_beyond_the_range_of_exponentials() -> None:
    prompt = Prompt(Case(num_tokens=700))
    prompt.keys[::2] *= 300  # logits of +-1000, in all splits
    scores = prompt.scores()
    torch.testing.assert_close(scores.double(), prompt.reference_scores(), rtol=1e-3, atol=1e-30)


def test_queries_may_be_a_view() -> None:
    prompt = Prompt(Case())
    W, Hq, D = prompt.query.shape
    wide = torch.full((W, Hq + 4, D + 16), torch.nan, dtype=prompt.query.dtype)
    wide[:, 2:-2, 8:-8] = prompt.query
    assert torch.equal(prompt.keep(window_query=wide[:, 2:-2, 8:-8]), prompt.keep())


def test_blocks_may_lie_beyond_2_to_the_31_elements() -> None:
    case = Case(torch.float8_e5m2, num_tokens=40, window=8, num_kept=20, num_kv_heads=1)
    prompt = Prompt(case)
    expected = prompt.scores()
    stride = (1 << 30) + 16  # of memory that nothing touches, but for three blocks
    storage = torch.empty(5 * stride, dtype=torch.uint8)
    cache, blocks = prompt.stored
    far = storage.as_strided((5, *cache.view.kv.shape[1:]), (stride, *cache.view.kv.stride()[1:]))
    for place, block in zip((4, 2, 3), blocks.tolist(), strict=False):
        far[place] = cache.view.kv[block]
    view = CacheView(far, cache.view.kt, KINDS[case.dtype], cache.view.kt_kind, 0, case.key_scale)
    prompt.stored = (replace(cache, view=view), torch.tensor([4, 2, 3], dtype=torch.int32))
    assert torch.equal(prompt.scores(), expected)


def test_splits_change_nothing_but_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(Case(num_tokens=1100, window=16, num_kv_heads=1))
    scores = prompt.scores()
    monkeypatch.setattr(window_scores, "PROGRAMS", 1)
    torch.testing.assert_close(prompt.scores(), scores, rtol=1e-6, atol=0)
    monkeypatch.setattr(window_scores, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(window_scores, "PROGRAMS", 10**6)
    torch.testing.assert_close(prompt.scores(), scores, rtol=1e-6, atol=0)


def test_refuses_what_would_leave_the_cache() -> None:
    prompt = Prompt(Case())
    with pytest.raises(ValueError, match="20 blocks of 16 do not hold 333 tokens"):
        prompt.keep(prompt_blocks=prompt.stored[1][:20])
    with pytest.raises(ValueError, match="cannot keep a window of 32 tokens in a budget of 31"):
        prompt.keep(31)
    with pytest.raises(ValueError, match="kernel_size must be odd"):
        prompt.keep(kernel_size=4)
    with pytest.raises(ValueError, match="do not fit keys"):
        prompt.keep(window_query=prompt.query[:, :, :32])
    with pytest.raises(ValueError, match="do not fit keys"):
        prompt.keep(window_query=prompt.query[:, :5])
    with pytest.raises(ValueError, match="cannot choose 11 of 10 keys"):
        top_tokens.top_tokens(torch.zeros(1, 10, dtype=torch.int32), 11)


# --------------------------------------------------------------------------------------------- pooling

NUMBERS = [0.0, -0.0, 1e-45, 1e-20, 0.5, 0.5, 1.0, 3.0, 3.4e38, torch.inf, torch.nan, -1e-45, -2.0, -3.4e38]


@pytest.mark.parametrize(
    ("num_tokens", "kernel_size"), [*itertools.product([1, 100], [1, 3, 63, 199, 201, 1023]), (1100, 63), (2049, 201)]
)
def test_ranks_order_as_the_pooled_scores(num_tokens: int, kernel_size: int) -> None:
    draw = torch.Generator().manual_seed(num_tokens + kernel_size)
    scores = torch.tensor(NUMBERS)[torch.randint(0, len(NUMBERS), (3, num_tokens), generator=draw)]
    scores[2] = torch.rand(num_tokens, generator=draw)  # few ties
    scores[1, num_tokens // 4 : num_tokens // 2] = torch.nan
    ranks = stage1.pool_scores(scores, kernel_size, sink_tokens=2)
    assert ranks.dtype == torch.int32
    half = kernel_size // 2
    numbers = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf)
    pooled = torch.stack([numbers[:, max(t - half, 0) : t + half + 1].amax(1) for t in range(num_tokens)], dim=1)
    for rank, score in zip(ranks, pooled, strict=True):
        assert (rank[:2] == INT_MAX).all()
        assert (rank[2:] < INT_MAX).all()
        assert torch.equal(rank[2:] == INT_MIN, score[2:] == -torch.inf)
        assert torch.equal(rank[2:, None] < rank[2:], score[2:, None] < score[2:])


# --------------------------------------------------------------------------------------------- the best k


def best(keys: Tensor, num_best: int, num_last: int = 0) -> list[list[int]]:
    last = [keys.shape[1] + i for i in range(num_last)]
    return [reference.best(row, num_best) + last for row in keys.tolist()]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are many tiles and chunks."""
    monkeypatch.setattr(top_tokens, "_CONSTANTS", {"BLOCK": 32})
    monkeypatch.setattr(top_tokens, "CHUNK", 96)


int32s = st.integers(INT_MIN, INT_MAX)
near = st.builds(lambda x, y: x ^ y, int32s, st.integers(0, 0x10101))  # share higher digits with others


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.one_of(st.lists(int32s, min_size=1, max_size=5), st.lists(near, min_size=1, max_size=40)),
    shape=st.tuples(st.integers(1, 3), st.one_of(st.integers(1, 100), st.integers(1, 300), st.just(96))),
    share=st.floats(0, 1),
    num_last=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**16),
)
@example(values=[7], shape=(2, 300), share=0.5, num_last=1, seed=0)
@example(values=[INT_MIN, INT_MAX, -1, 0], shape=(1, 97), share=0.9, num_last=0, seed=0)
@example(values=[INT_MIN], shape=(1, 97), share=1.0, num_last=0, seed=0)
def test_the_best_keys_of_any(
    values: list[int], shape: tuple[int, int], share: float, num_last: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.tensor(values, dtype=torch.int32)[torch.randint(0, len(values), shape, generator=draw)]
    num_best = round(share * shape[1])
    found = top_tokens.top_tokens(keys, num_best, num_last)
    assert found.dtype == torch.int32
    assert found.tolist() == best(keys, num_best, num_last)


def test_more_chunks_than_are_summed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_tokens, "_CONSTANTS", {"BLOCK": 16})
    monkeypatch.setattr(top_tokens, "CHUNK", 16)
    keys = torch.randint(0, 50, (1, 16 * 35 + 7), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert top_tokens.top_tokens(keys, 300).tolist() == best(keys, 300)


@pytest.mark.parametrize("num_keys", [2048, 16384, 33000])
@pytest.mark.parametrize("high", [3, 2**31 - 1])
def test_the_best_of_many(num_keys: int, high: int) -> None:
    draw = torch.Generator().manual_seed(num_keys)
    keys = torch.randint(-high, high, (2, num_keys), generator=draw, dtype=torch.int32)
    for num_best in (1, 2016):
        assert top_tokens.top_tokens(keys, num_best, 32).tolist() == best(keys, num_best, 32)
