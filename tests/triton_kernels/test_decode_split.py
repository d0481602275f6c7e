# SPDX-License-Identifier: Apache-2.0
"""Split decode against ``kernels.reference``.

Every step is run twice. With ``scale`` 0 all tokens that a row reads weigh the same, so that a single wrong one shows in the
float32 output, whatever the types; then with the real scale. Tiles are small, so that short rows span many of them, and the
workspace is full of garbage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode_oracle import Row, choose, clear_heads
from tests.triton_kernels.decode_step import NEWEST_PAGES, Step
from tests.triton_kernels.split_cases import CASES, EDGES, SUM_ESTIMATORS, Case
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import ESTIMATORS, Estimator
from vllm_rocketkv.kernels.triton.cache import CacheView, cache_view
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split, workspace_bytes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NaN in lanes that are masked later

GARBAGE = 0x7F7F7F7F


class SplitStep(Step):
    """A step that the kernels of split decode take."""

    case: Case

    def rows_table(self) -> Tensor:
        """All rows, with inert ones before, between and behind them."""
        inert = [-(1 << 30), 1 << 30, -5, 0, 1 << 30, 7]
        table = [inert]
        for row, entries in zip(self.rows, self.table().tolist(), strict=True):
            table.append(entries)
            if row.request == 0:
                table.append(inert)
        return torch.tensor([*table, inert], dtype=torch.int32)

    def workspace(self, **other: Any) -> SplitWorkspace:
        case = self.case
        heads = case.num_kv_heads * case.group, case.num_kv_heads, case.head_size
        sizes = {"num_splits": case.num_splits, "page_tile": case.page_tile, "select_tile": case.select_tile} | other
        rows = len(self.rows_table()) + 2
        workspace = SplitWorkspace(rows, *heads, case.capacity, case.page_size, device="cpu", **sizes)
        for tensor in workspace.tensors.values():
            tensor.view(torch.int32).fill_(GARBAGE)
        return workspace

    def decode(
        self,
        scale: float,
        dtype: torch.dtype = torch.float32,
        min_tokens: int = 0,
        view: CacheView | None = None,
        **o: Any,
    ) -> Tensor:
        output = torch.full((self.batch, self.query.shape[1], self.case.head_size), torch.nan, dtype=dtype)
        options = self.case.options(scale)
        workspace = self.workspace(**o)
        decode_split(
            self.query, view or self.view, output, self.rows_table(), self.block_table, options, workspace, min_tokens
        )
        return output


@cache
def step_of(case: Case) -> SplitStep:
    return SplitStep(case)


def assert_attends(step: SplitStep, row: Row, output: Tensor, scale: float, rtol: float, atol: float) -> int:
    """Returns how many KV heads the comparison had to leave out."""
    case, n = step.case, row.num_tokens
    keys, values = step.real_keys[row.request][:n], step.real_values[row.request][:n]
    softcap = case.softcap if scale else 0.0
    want = reference.attend(step.query[row.token], keys, values, row.selected, scale, softcap)
    are_clear = clear_heads(case, row)
    clear = torch.tensor(are_clear).repeat_interleave(case.group)
    torch.testing.assert_close(output.double()[clear], want[clear], rtol=rtol, atol=atol)
    return are_clear.count(False)


def assert_reads(step: SplitStep, output: Tensor) -> None:
    """The rows' outputs at scale 0 are the means of the values that the reference reads, and others are untouched."""
    left_out = sum(assert_attends(step, row, output[row.token], 0.0, 1e-5, 1e-5) for row in step.rows)
    assert left_out <= 1 + 0.05 * len(step.rows) * step.case.num_kv_heads, "near ties are rare"
    others = sorted(set(range(step.batch)) - set(step.tokens))
    assert output[others].isnan().all()


# --------------------------------------------------------------------------------------------- a step


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_rows_are_the_reference(case: Case) -> None:
    step = step_of(case)
    assert_reads(step, step.decode(0.0))
    scale = case.head_size**-0.5 / case.magnitude
    output = step.decode(scale, case.model_dtype)
    eps = torch.finfo(case.model_dtype).eps
    # Products of 16-bit types round the weights to them, as FlashAttention does.
    atol = (
        2e-5 if case.model_dtype == torch.float32 else 0.5 * eps * max(float(x.abs().max()) for x in step.real_values)
    )
    for row in step.rows:
        assert_attends(step, row, output[row.token], scale, max(0.51 * eps, 1e-5), atol)


@pytest.mark.parametrize("case", [EDGES[0], EDGES[4], EDGES[13], EDGES[14]], ids=str)
def test_the_number_of_splits_changes_rounding_alone(case: Case) -> None:
    step = step_of(case)
    want = step.decode(0.125)
    for splits, tile in ((1, 64), (7, 16), (12, 32)):
        found = step.decode(0.125, num_splits=splits, page_tile=tile, select_tile=4 * tile)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("min_tokens", [63, 64, 200])
def test_rows_of_at_most_min_tokens_are_left_alone(min_tokens: int) -> None:
    step = step_of(Case())  # rows of 317, 64, 199, 200 and 201 tokens
    everything = step.decode(0.0)
    output = step.decode(0.0, min_tokens=min_tokens)
    for row in step.rows:
        if row.num_tokens <= min_tokens:
            assert output[row.token].isnan().all()
        else:
            assert torch.equal(output[row.token], everything[row.token])


@pytest.mark.parametrize(
    "case",
    [
        Case(page_size=16, recent=5, sinks=3, topr=20),
        *(Case(page_size=16, recent=5, sinks=3, estimator=estimator) for estimator in SUM_ESTIMATORS),
        CASES[3],
    ],
    ids=str,
)
def test_agrees_with_the_fused_kernel_and_shares_a_batch_with_it(case: Case) -> None:
    step = step_of(case)
    want = step.decode(0.0)
    heads = case.num_kv_heads * case.group, case.num_kv_heads, case.head_size
    for limit in (1024, sorted(row.num_tokens for row in step.rows)[-2]):
        fused = DecodeWorkspace.allocate(20, *heads, limit, case.page_size, "cpu", case.estimator)
        output = step.decode(0.0, min_tokens=limit)
        decode(step.query, step.view, output, step.rows_table(), step.block_table, case.options(0.0), fused)
        torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_step_without_rows() -> None:
    step = step_of(Case())
    output = torch.full_like(step.query, torch.nan)
    for table in (step.rows_table()[:0], step.rows_table()[:1]):
        decode_split(step.query, step.view, output, table, step.block_table, step.case.options(1.0), step.workspace())
    assert output.isnan().all()


def test_a_used_workspace_changes_nothing() -> None:
    step = step_of(EDGES[0])
    workspace = step.workspace()
    outputs = []
    for scale in (0.1, 0.2, 0.1):
        output = torch.full_like(step.query, torch.nan)
        options = step.case.options(scale)
        decode_split(step.query, step.view, output, step.rows_table(), step.block_table, options, workspace)
        outputs.append(output.nan_to_num())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


# --------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
@pytest.mark.parametrize(("group", "page_size", "topk"), [(1, 4, 30), (3, 2, 99), (3, 4, 62), (2, 1, 20)])
def test_equal_pages_tie_wherever_they_lie_and_the_lower_index_wins(
    by_page: bool, group: int, page_size: int, topk: int, estimator: Estimator
) -> None:
    """Pages of five kinds, the newest one among them, over several tiles and splits."""
    case = Case(
        requests=((33 * page_size, 1), (130 * page_size, 1), (130 * page_size - 1, 1)),
        group=group,
        page_size=page_size,
        topk=topk,
        dense_below=0,
        by_page=by_page,
        topr=20,
        estimator=estimator,
        select_tile=16,
    )
    draw = torch.Generator().manual_seed(5)
    kinds = torch.randint(-2, 3, (5, page_size, case.num_kv_heads, case.head_size), generator=draw).float()
    keys = []
    for n, _ in case.requests:
        kind = torch.randint(0, 5, (-(-n // page_size),), generator=draw)
        keys.append(kinds[kind].flatten(0, 1)[:n])
    query = torch.randn(3, case.num_kv_heads * group, case.head_size, generator=draw)
    step = SplitStep(case, keys, query)
    assert all(all(clear_heads(case, row)) for row in step.rows)
    assert_reads(step, step.decode(0.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
def test_all_pages_are_equal(by_page: bool, estimator: Estimator) -> None:
    case = Case(requests=((203, 1),), by_page=by_page, sinks=6, recent=9, topk=61, estimator=estimator)
    step = SplitStep(case, [torch.ones(203, case.num_kv_heads, case.head_size)])
    assert_reads(step, step.decode(0.0))


@pytest.mark.parametrize("best", [3, 27])
def test_pages_that_are_forced_in_part_weigh_what_is_left_of_them(best: int) -> None:
    """Pages 3 and 27 are the first and the last with free tokens, 3 and 2 of them; they and three others are the best."""
    case = Case(requests=((123, 1),), sinks=13, recent=13, topk=26 + 3 + 2 + 7, dense_below=0, num_splits=3)
    strength = torch.zeros(31)
    strength[[3, 27, 9, 10, 20]] = torch.tensor([3.0, 3.0, 1.5, 1.0, 0.5])
    strength[best] = 3.5
    keys = strength.repeat_interleave(4)[:123, None, None] + torch.zeros(123, 1, case.head_size)
    step = SplitStep(case, [keys], torch.ones(1, case.group, case.head_size))
    forced = {*range(13), *range(110, 123)}
    assert step.rows[0].selected == [sorted({*forced, 13, 14, 15, 108, 109, 36, 37, 38, 39, 40, 41, 42})]
    assert_reads(step, step.decode(0.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_score_that_is_not_a_number_ranks_last(estimator: Estimator) -> None:
    """A NaN in one head's query makes all scores NaN: the lowest tokens are read, which the other head shows."""
    case = Case(requests=((203, 1),), group=2, num_kv_heads=1, topk=61, estimator=estimator)
    query = torch.randn(1, 2, case.head_size, generator=torch.Generator().manual_seed(1))
    query[0, 1, 5] = torch.nan
    step = SplitStep(case, query=query)
    row = step.rows[0]
    assert row.selected == [list(range(61))]
    want = step.real_values[0][:61, 0].mean(0)
    torch.testing.assert_close(step.decode(0.0)[row.token, 0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", [0, 70, 149])
@pytest.mark.parametrize("estimator", SUM_ESTIMATORS)
def test_the_mean_and_quests_bound_see_every_dimension_and_head(estimator: Estimator, position: int) -> None:
    """As in ``test_decode.py``: a small number in the last dimension, which top-r and the sign of the group's sum would miss."""
    case = Case(requests=((150, 1),), topk=4, dense_below=0, by_page=True, topr=8, estimator=estimator)
    keys = torch.zeros(150, 1, 64)
    keys[position, 0, 63] = 1.0 if estimator == "mean" else -1.0
    query = torch.full((1, 3, 64), 2.0)
    query[0, :, 63] = torch.tensor([-0.75, 0.5, 0.5])
    step = SplitStep(case, [keys], query)
    page = position // 4 * 4
    assert step.rows[0].selected == [list(range(page, min(page + 4, 150)))]
    assert_reads(step, step.decode(0.0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("newest", "estimator", "is_best"), NEWEST_PAGES)
def test_the_newest_page_is_ranked_by_its_own_keys(
    newest: list[float], estimator: Estimator, is_best: bool, sign: float
) -> None:
    """Page 7's keys are 1 in the only dimension that counts, the others' 0 but for those of the newest page."""
    n = 96 + len(newest)
    case = Case(
        ((n, 1),), topk=4, dense_below=0, by_page=True, num_kv_heads=1, group=2, page_size=4, estimator=estimator
    )
    keys = torch.zeros(n, 1, 64)
    keys[28:32, 0, 3] = 1.0
    keys[96:, 0, 3] = torch.tensor(newest)
    query = torch.zeros(1, 2, 64)
    query[0, 0, 3] = 2.0 * sign
    step = SplitStep(case, [sign * keys], query)
    assert step.rows[0].selected == [list(range(96, n)) if is_best else [28, 29, 30, 31]]
    assert_reads(step, step.decode(0.0))


@pytest.mark.parametrize("position", [0, 70, 149])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kt_dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_a_key_beyond_the_bounds_type_is_found(position: int, kt_dtype: torch.dtype, estimator: Estimator) -> None:
    case = Case(requests=((150, 1),), kt_dtype=kt_dtype, topk=4, dense_below=4, num_kv_heads=1, by_page=True)
    case = replace(case, estimator=estimator)
    keys = torch.randn(150, 1, case.head_size, generator=torch.Generator().manual_seed(position))
    keys[position, 0, 9] = 1e5
    query = torch.rand(1, 3, case.head_size, generator=torch.Generator().manual_seed(position))
    step = SplitStep(case, [keys], query)
    page = position // 4 * 4
    assert step.rows[0].selected == [list(range(page, min(page + 4, 150)))]
    assert_reads(step, step.decode(0.0))


def test_few_pages_whose_heads_disagree() -> None:
    """What the newest, partly filled page weighs decides which head has the say."""
    lengths = [33 + 5 * i for i in range(8)]
    case = Case(
        requests=tuple((n, 1) for n in lengths),
        head_size=32,
        num_kv_heads=1,
        group=4,
        page_size=16,
        topk=32,
        dense_below=0,
        magnitude=2.0,
        by_page=True,
        num_splits=2,
        seed=55,
    )
    step = step_of(case)

    def selected_if_the_newest_were_full(row: Row) -> list[list[int]]:
        n, bounds = row.num_tokens, step.bounds(row.request, row.num_tokens)
        return choose(case, reference.hsa_scores(step.query[row.token], *bounds, -(-n // 16) * 16, 16), n)

    assert sum(selected_if_the_newest_were_full(row) != row.selected for row in step.rows) > 1, "its weight decides"
    assert_reads(step, step.decode(0.0))


# --------------------------------------------------------------------------------------------- addresses, memory


def test_caches_of_more_elements_than_an_int32_counts() -> None:
    """Blocks 2^28 bytes apart; memory that is not touched is not there."""
    case = Case(requests=((317, 1), (40, 1)), dtype=torch.float8_e5m2, model_dtype=torch.bfloat16, num_splits=2)
    step = step_of(case)
    small = step.view
    num_blocks, apart = small.kv.shape[0], 1 << 28
    kv_bytes = small.kv[0].numel()
    storage = torch.empty(num_blocks * apart, dtype=torch.uint8)
    kv = storage.as_strided(small.kv.shape, (apart, *small.kv.stride()[1:]))
    huge = cache_view(kv, case.dtype, case.kt_dtype, kv_bytes, case.page_size, *case.scales)
    huge.kv.copy_(small.kv)
    huge.kt.copy_(small.kt)
    assert num_blocks * apart > 1 << 31
    assert torch.equal(step.decode(0.125, view=huge).nan_to_num(), step.decode(0.125).nan_to_num())


def test_workspace_bytes_are_those_of_its_tensors() -> None:
    for sizes in ((3, 12, 4, 80, 1000, 4, 5), (2, 8, 8, 64, 77, 16, 1), (2, 8, 2, 64, 500, 0, 16)):
        workspace = SplitWorkspace(*sizes, device="cpu")
        distinct = {tensor.data_ptr(): tensor for tensor in workspace.tensors.values() if tensor.numel()}
        assert sum(t.numel() * t.element_size() for t in distinct.values()) == workspace_bytes(*sizes)
    large = workspace_bytes(1, 32, 8, 128, 1 << 20, 4, 16) - workspace_bytes(1, 32, 8, 128, 4, 4, 16)
    assert large == 4 * 40 * ((1 << 18) - 1)


@pytest.mark.parametrize(("rows", "page_size"), [(1, 4), (20, 2)])
def test_refuses_a_workspace_that_does_not_fit(rows: int, page_size: int) -> None:
    step = step_of(Case())
    workspace = SplitWorkspace(rows, 3, 1, 64, 400, page_size, 4, device="cpu")
    output = torch.empty_like(step.query)
    with pytest.raises(ValueError, match="a workspace for"):
        decode_split(
            step.query, step.view, output, step.rows_table(), step.block_table, step.case.options(1.0), workspace
        )
