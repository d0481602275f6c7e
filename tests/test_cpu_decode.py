# SPDX-License-Identifier: Apache-2.0
"""Stage 2's C++ decode op against ``kernels.reference``, for each instruction set: what it writes, selects and attends to."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.decode_cases import CASES, EDGES, Case
from tests.decode_oracle import assert_equally_good, choose
from tests.decode_step import Layer, Step, assert_attends, assert_bytes, step_of
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import Estimator

# --------------------------------------------------------------------------------------------- a step


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_step_is_the_reference(case: Case) -> None:
    step = step_of(case)
    layer = Layer(step)
    output = layer.decode()
    assert_bytes(step, layer.bytes)
    selected = layer.selected()
    differ = 0
    for row, of_row in zip(step.rows, selected, strict=True):
        differ += assert_equally_good(case, row, of_row)
        assert_attends(step, row, output[row.token], of_row)
    if case.magnitude == 1:
        assert differ <= 1 + 0.05 * len(step.rows) * case.num_kv_heads, "near ties are rare"
    others = sorted(set(range(step.batch)) - {row.token for row in step.rows})
    assert output[others].isnan().all()


@pytest.mark.parametrize("case", [*CASES[::5], *EDGES], ids=str)
def test_threads_and_company_change_nothing(case: Case) -> None:
    """A row alone is shared out to threads by blocks and segments; in a batch, one thread computes all of a KV head."""
    step = step_of(case)
    layer = Layer(step)
    output = layer.decode()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        other = Layer(step)
        assert torch.equal(other.decode().nan_to_num(), output.nan_to_num())
        assert torch.equal(other.bytes, layer.bytes)
    table = layer.table
    for i in range(0, len(table), 3):
        torch.set_num_threads(2 + i % 3)
        alone = layer.decode(rows=table[i : i + 1].clone(), key=None, value=None)
        token = int(table[i, 0])
        assert torch.equal(alone[token], output[token])
        assert alone.isnan().sum() == alone.numel() - alone[token].numel()


@pytest.mark.parametrize("threads", [1, 7], ids=["whole", "split"])
def test_rows_of_one_request_write_first_whichever_thread_they_are_on(threads: int) -> None:
    case = Case(requests=((70, 3),), num_kv_heads=1, topk=16, dense_below=16)
    step = step_of(case)
    layer = Layer(step)
    want = layer.decode()
    torch.set_num_threads(threads)
    reversed_rows = layer.table.flip(0).contiguous()  # the newest row first
    other = Layer(step)
    output = other.decode(rows=reversed_rows)
    assert torch.equal(output.nan_to_num(), want.nan_to_num())
    assert torch.equal(other.bytes, layer.bytes)


def test_scratch_that_was_used_before_changes_nothing() -> None:
    """Working memory is kept from step to step: a longer step's remains must not show."""
    cases = [EDGES[4], Case(requests=((97, 1),), topk=9, dense_below=9), CASES[3], CASES[10], CASES[11]]
    first = [Layer(step_of(case)).decode() for case in cases]
    second = [Layer(step_of(case)).decode() for case in reversed(cases)][::-1]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_a_longer_longest_row_changes_nothing() -> None:
    step = step_of(EDGES[8])
    want = Layer(step).decode()
    assert torch.equal(Layer(step).decode(max_tokens=5000).nan_to_num(), want.nan_to_num())


def test_a_step_without_rows() -> None:
    step = step_of(Case())
    layer = Layer(step)
    output = layer.decode(rows=layer.table[:0], max_tokens=0)
    assert output.isnan().all()
    assert torch.equal(layer.bytes, step.bytes)


# --------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_many_short_rows_whose_heads_disagree(page_size: int, by_page: bool) -> None:
    """Few pages, so that what the newest, partly filled page weighs decides which head has the say."""
    lengths = [33 + i % 67 for i in range(160)]
    case = Case(
        requests=tuple((n, 1) for n in lengths),
        dtype=torch.float32,
        model_dtype=torch.float32,
        head_size=32,
        group=4,
        page_size=page_size,
        topk=2 * page_size,
        dense_below=0,
        by_page=by_page,
        magnitude=2.0,
        seed=17,
    )
    step = step_of(case)
    layer = Layer(step)
    layer.decode()
    selected = layer.selected()
    differ = sum(assert_equally_good(case, row, of_row) for row, of_row in zip(step.rows, selected, strict=True))
    assert differ <= 3


@cache
def tied_step(case: Case, is_exact: bool) -> Step:
    """Pages of five kinds. ``is_exact``: of integers, whose dot products are exact in any order of summation."""
    draw = torch.Generator().manual_seed(case.seed)
    shape = (5, case.page_size, case.num_kv_heads, case.head_size)
    kinds = torch.randint(-2, 3, shape, generator=draw) if is_exact else torch.randn(shape, generator=draw)
    keys = []
    for n, _ in case.requests:
        kind = torch.randint(0, 5, (-(-n // case.page_size),), generator=draw)
        keys.append(kinds[kind].flatten(0, 1)[:n].float() * 0.37)
        if case.dtype.itemsize > 1:
            keys[-1] = kinds[kind].flatten(0, 1)[:n].float()
    shape = (sum(rows for _, rows in case.requests), case.num_kv_heads * case.group, case.head_size)
    query = torch.randint(-2, 3, shape, generator=draw) if is_exact else torch.randn(shape, generator=draw)
    return Step(case, keys=keys, query=query.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
@pytest.mark.parametrize(("group", "estimator"), [(1, "hsa"), (3, "hsa"), (1, "quest"), (4, "quest"), (4, "mean")])
@pytest.mark.parametrize(("block_size", "page_size"), [(32, 4), (128, 4), (48, 2), (32, 1)])
def test_equal_pages_tie_wherever_they_lie_and_the_lower_index_wins(
    block_size: int, page_size: int, group: int, estimator: Estimator, by_page: bool, dtype: torch.dtype
) -> None:
    case = Case(
        estimator=estimator,
        requests=tuple((n * page_size, 1) for n in (30, 57, 130)),
        dtype=dtype,
        model_dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
        head_size=32,
        group=group,
        block_size=block_size,
        page_size=page_size,
        dense_below=0,
        by_page=by_page,
        topr=20,
        seed=5,
    )
    # The newest page's logit, and those of a block's pages that fill no vector, are summed in another order.
    same_order = block_size // page_size in (8, 32)
    for is_exact in (True, False) if same_order else (True,):
        step = tied_step(replace(case, by_page=False), is_exact)
        for topk in (20, 99):
            layer = Layer(step)
            layer.decode()
            layer.case = replace(case, topk=topk)
            for row in step.rows:
                row.topk = topk
            for row, selected in zip(step.rows, layer.selected(), strict=True):
                assert row.scores is not None
                all_theirs = choose(layer.case, row.scores, row.num_tokens)
                for scores, ours, theirs in zip(row.scores, selected, all_theirs, strict=True):
                    pages = {t // page_size for t in set(ours) ^ set(theirs)}
                    newest = (row.num_tokens - 1) // page_size
                    is_about_newest = newest in pages and len({float(scores[p]) for p in pages}) == 1
                    assert ours == theirs or (not is_exact and is_about_newest)


@pytest.mark.parametrize("estimator", ["hsa", "quest", "mean"])
@pytest.mark.parametrize("head_size", [64, 128])  # a temperature that is a power of two, and one that rounds
def test_a_key_beyond_the_bounds_type_is_found(head_size: int, estimator: Estimator) -> None:
    case = Case(
        estimator=estimator,
        head_size=head_size,
        requests=((150, 1),),
        dtype=torch.float32,
        model_dtype=torch.float32,
        kt_dtype=torch.float8_e5m2,
        topk=4,
        dense_below=4,
        num_kv_heads=1,
        by_page=True,
    )
    for position in (0, 70, 149):
        keys = torch.randn(150, 1, head_size, generator=torch.Generator().manual_seed(position))
        query = torch.rand(1, 3, head_size, generator=torch.Generator().manual_seed(position))
        keys[position, 0, 9] = 1e6  # beyond float8_e5m2, and so is the mean of four
        layer = Layer(Step(case, keys=[keys], query=query))
        layer.decode()
        page = position // 4 * 4
        assert layer.selected() == [[list(range(page, min(page + 4, 150)))]]


SPECIAL = {
    "block of 8 pages": {"block_size": 32, "page_size": 4},
    "block of 32 pages": {"block_size": 128, "page_size": 4},
    "native": {"block_size": 96, "page_size": 3, "native": "vec"},
}


@pytest.mark.parametrize("estimator", ["quest", "mean"])
@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
def test_pages_are_ranked_by_negative_scores_too(options: dict[str, Any], estimator: Estimator) -> None:
    """Keys that all point away from all queries; the best page is that with the least negative score."""
    case = Case(requests=((397, 1), (253, 2)), estimator=estimator, by_page=True, topk=13, dense_below=13, **options)
    draw = torch.Generator().manual_seed(9)
    keys = [-torch.rand(n, 2, 64, generator=draw) - 0.1 for n, _ in case.requests]
    step = Step(case, keys=keys, query=torch.rand(3, 6, 64, generator=draw) + 0.1)
    layer = Layer(step)
    layer.decode()
    for row, selected in zip(step.rows, layer.selected(), strict=True):
        assert row.scores is not None
        assert (row.scores < 0).all()
        assert_equally_good(case, row, selected)


@pytest.mark.parametrize("estimator", ["quest", "mean"])
@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
def test_a_query_that_is_no_number(number: float, options: dict[str, Any], estimator: Estimator) -> None:
    """One head's query has it; what the group selects is read off another's output. Scores that are no numbers rank last; a
    query of zeros ties all pages. Two pages hold zeros, whose product with infinity is no number."""
    case = Case(
        requests=((130, 1),), num_kv_heads=1, estimator=estimator, by_page=True, topk=30, dense_below=30, **options
    )
    draw = torch.Generator().manual_seed(2)
    keys, query = torch.randn(130, 1, 64, generator=draw), torch.randn(1, 3, 64, generator=draw)
    keys[: 2 * case.page_size] = 0.0
    query[0, 0, 5] = number
    if number == 0:
        query[:] = number
    step = Step(case, keys=[keys], query=query)
    low, high = step._bounds(0, 130)
    if estimator == "quest":
        scores = reference.quest_scores(query[0].bfloat16(), low, high, 130, case.page_size)
    else:
        scores = reference.mean_scores(query[0].bfloat16(), low, 130, case.page_size)
    assert scores.isnan().any() == (number != 0)
    layer = Layer(step)
    layer.decode()
    assert layer.selected(first_head=1) == [choose(case, scores, 130)]
