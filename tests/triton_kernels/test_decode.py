# SPDX-License-Identifier: Apache-2.0
"""The fused decode kernel against ``kernels.reference``.

What a row selected is read from the kernel's own list in the workspace and held against the reference's scores; its attention,
against the reference's over exactly these tokens. All bytes of a cache that no test wrote are NaNs, and the block table's
entries beyond a row's blocks are no blocks.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.combinations import combined
from tests.decode_oracle import OPTION_AXES, Row, assert_equally_good
from tests.triton_kernels.decode_step import NEWEST_PAGES, Step, TritonCase
from tests.triton_kernels.paged import KT_DTYPES, KV_DTYPES
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import ESTIMATORS, Estimator
from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, compile_cases, decode, launch_options

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
"""Infinities on the way are meant: exp of a large logit in a soft cap, padding in a maximum."""

UNUSED = -7
"""What a workspace's list holds where nothing was written."""


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case(TritonCase):
    requests: tuple[tuple[int, int], ...] = ((213, 1), (64, 2))
    block_size: int = 48
    capacity: int = 512


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(2502)
    axes: dict[str, list[Any]] = {
        "dtype": KV_DTYPES,
        "model_dtype": [torch.float32, torch.bfloat16, torch.float16],
        "kt_dtype": [*KT_DTYPES, torch.float16],
        "head_size": [64, 64, 80, 96, 128],
        "num_kv_heads": [1, 2],
        "group": [1, 3, 4, 8],
        "block_size": [16, 48, 128],
        "page_size": [1, 2, 4, 16],
        "topr": [None, None, 1, 7, 16, 31],
        "topk": [7, 16, 33, 100],
        **OPTION_AXES,
        "estimator": ["hsa", "quest", "hsa", "mean"],
        "is_hnd": [True, False],
    }
    cases = []
    for i, values in enumerate(combined(axes, count, draw)):
        case = Case(**values, seed=i)
        if case.dtype.itemsize > 1 and i % 4:
            case = replace(case, model_dtype=case.dtype)
        topk, page, block = case.topk, case.page_size, case.block_size
        dense = draw.choice([0, topk, topk + page])
        corners = [1, page, page + 1, block, block + 1, dense, dense + 1, topk, topk + 1, topk + page + 1]
        lengths = [draw.choice([n for n in corners if n]), dense + draw.randint(1, 2 * page), draw.randint(140, 300)]
        requests = [(n, 1) for n in lengths]
        requests[draw.randrange(3)] = (draw.choice([150, dense + page + 1]), 2)
        cases.append(replace(case, requests=tuple(requests), dense_below=dense))
    return cases


SUM_ESTIMATORS: tuple[Estimator, ...] = ("quest", "mean")
CASES = generated_cases(44)
EDGES = [
    Case(page_size=0, requests=((300, 1), (1, 1), (40, 3))),  # no KT table: everything is read
    Case(requests=((300, 1),), group=48, num_kv_heads=1, topr=20),
    Case(requests=((300, 1),), head_size=256, group=5, kt_dtype=torch.float8_e5m2, num_kv_heads=1),
    Case(requests=((150, 1), (149, 2)), sinks=40, recent=41),  # the forced tokens exceed the budget
    Case(requests=((150, 1), (149, 2)), sinks=400),  # all are forced
    Case(requests=((150, 1), (149, 2)), recent=400, by_page=True),
    Case(requests=((150, 1), (149, 2)), sinks=9, recent=2, by_page=True, page_size=16),
    Case(requests=((90, 5), (70, 3)), topk=16, dense_below=16, topr=15, num_kv_heads=1),  # rows of several pages
    Case(requests=((120, 1),), topk=500),  # the budget exceeds the tokens
    Case(requests=((51, 1), (50, 1), (49, 1))),  # around dense_below
    Case(requests=((512, 1), (513, 1), (511, 1)), num_kv_heads=1),  # around the capacity
    Case(requests=((100, 1),), topk=0, dense_below=0),  # nothing at all is read
    Case(requests=((5, 1), (1, 1)), topk=2, dense_below=0, page_size=16, block_size=16),  # no page is full
    Case(requests=((500, 1),), page_size=1, block_size=16, group=8, kt_dtype=torch.float8_e4m3fn, num_kv_heads=1),
]
for _estimator in SUM_ESTIMATORS:
    _same: dict[str, Any] = {"estimator": _estimator, "by_page": True}
    EDGES += [
        Case(requests=((300, 1),), group=48, num_kv_heads=1, **_same),
        Case(requests=((300, 1),), head_size=256, group=5, kt_dtype=torch.float8_e5m2, num_kv_heads=1, **_same),
        Case(requests=((300, 1),), group=1, page_size=1, topk=250, **_same),  # many of the chosen are below 0
        Case(requests=((150, 1), (149, 2)), sinks=9, recent=2, page_size=16, estimator=_estimator),
        Case(requests=((90, 5), (70, 3)), topk=16, dense_below=16, num_kv_heads=1, **_same),  # rows of several pages
        Case(requests=((512, 1), (513, 1), (511, 1)), num_kv_heads=1, **_same),  # around the capacity
        Case(requests=((100, 1),), topk=0, dense_below=0, **_same),
        Case(requests=((5, 1), (1, 1)), topk=2, dense_below=0, page_size=16, block_size=16, **_same),
        Case(requests=((120, 1),), page_size=0, **_same),
    ]


class FusedStep(Step):
    """A step that one kernel takes."""

    case: Case

    def decode(self, cache: CacheView | None = None, **options: Any) -> Tensor:
        """The output, NaN where nothing was written."""
        case = self.case
        output = torch.full((self.batch, self.query.shape[1], 2 * case.head_size), torch.nan, dtype=case.model_dtype)
        self.workspace = DecodeWorkspace.allocate(
            len(self.rows) + 1,
            self.query.shape[1],
            case.num_kv_heads,
            case.head_size,
            case.capacity,
            case.page_size,
            "cpu",
            case.estimator,
        )
        for memory in (self.workspace.dims, self.workspace.chosen):
            memory.fill_(UNUSED)
        self.workspace.scaled_query.fill_(torch.nan)
        bytes_before = self.cache.storage.clone()
        of_heads = output[:, :, : case.head_size]
        options_now = replace(case.options(case.scale), **options)
        decode(self.query, cache or self.view, of_heads, self.table(), self.block_table, options_now, self.workspace)
        assert torch.equal(self.cache.storage, bytes_before), "decode writes nothing to the cache"
        assert output[:, :, case.head_size :].isnan().all()
        return of_heads

    def selected(self, index: int) -> list[list[int]]:
        """Tokens that the row's KV heads attended to, from the kernel's list."""
        case, row = self.case, self.rows[index]
        n = row.num_tokens
        if case.is_dense(n):
            return [list(range(n))] * case.num_kv_heads
        recent_start = max(n - case.recent, 0)
        if case.by_page:
            recent_start = recent_start // case.page_size * case.page_size if case.recent else n
        result = []
        for entries in self.workspace.chosen[index].tolist():
            tokens: list[int] = []
            for first, limit, _ in itertools.takewhile(lambda entry: entry[0] != UNUSED, entries):
                assert not tokens or first > tokens[-1], "pages ascend"
                of_page = range(first, min(first + case.page_size, n))
                read = [t for t in of_page if t < limit or t >= recent_start]
                assert read, "a listed page has something to read"
                tokens += read
            result.append(tokens)
        return result


def assert_attends(step: FusedStep, row: Row, output: Tensor, selected: list[list[int]]) -> None:
    case, n = step.case, row.num_tokens
    keys, values = step.real_keys[row.request][:n], step.real_values[row.request][:n]
    want = reference.attend(step.query[row.token], keys, values, selected, case.scale, case.softcap)
    eps = torch.finfo(case.model_dtype).eps
    # Weights are rounded to the type of the products, as in any FlashAttention; by Triton's interpreter, toward zero.
    atol = float(values.abs().max()) * (eps / 2 if eps > 1e-6 else 1e-6)
    torch.testing.assert_close(output.double(), want, rtol=0.6 * eps if eps > 1e-6 else 1e-5, atol=atol)


def check(step: FusedStep, output: Tensor) -> int:
    differ = 0
    written = []
    for index, row in enumerate(step.rows):
        if row.num_tokens <= step.case.capacity:
            written.append(row.token)
            selected = step.selected(index)
            differ += assert_equally_good(step.case, row, selected)
            assert_attends(step, row, output[row.token], selected)
    others = sorted(set(range(step.batch)) - set(written))
    assert output[others].isnan().all()
    return differ


# --------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_step_is_the_reference(case: Case) -> None:
    step = FusedStep(case)
    differ = check(step, step.decode())
    assert differ <= 1, "near ties are rare"


def test_inert_rows_read_and_write_nothing() -> None:
    step = FusedStep(Case(requests=((150, 2), (80, 1)), topr=16))
    want = step.decode()
    step.block_table[step.table_row[1]] = 1 << 30
    table = step.table()
    table[1, :3] = 1 << 30
    table[1:, 3] = 0
    workspace = step.workspace
    workspace.chosen.fill_(UNUSED)
    output = torch.full_like(want, torch.nan)
    decode(step.query, step.view, output, table, step.block_table, step.case.options(step.case.scale), workspace)
    assert torch.equal(output[step.rows[0].token], want[step.rows[0].token])
    assert output.isnan().sum() == output.numel() - output[0].numel()
    assert (workspace.chosen[1:] == UNUSED).all()
    decode(step.query, step.view, output, table[:0], step.block_table, step.case.options(step.case.scale), workspace)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """The same numbers in blocks 2^30 bytes apart; memory is touched where they are, and nowhere else."""
    types = {"dtype": torch.float8_e4m3fn, "kt_dtype": torch.float8_e5m2}
    step = FusedStep(Case(requests=((91, 1),), topr=16, is_hnd=False, **types))
    want = step.decode()
    view, apart = step.view, 1 << 30
    far = torch.empty(2 * apart + (1 << 20), dtype=torch.uint8)
    kv = far.as_strided((3, *view.kv.shape[1:]), (apart, *view.kv.stride()[1:]))
    kt = far.as_strided((3, *view.kt.shape[1:]), (apart, *view.kt.stride()[1:]), 1 << 19)
    for block, other in zip((2, 1), step.blocks[0].tolist(), strict=True):
        kv[block], kt[block] = view.kv[other], view.kt[other]
    step.block_table[0, :2] = torch.tensor([2, 1])
    output = step.decode(replace(view, kv=kv, kt=kt))
    assert torch.equal(output[step.rows[0].token], want[step.rows[0].token])


def test_rows_in_one_launch_do_not_touch_each_other() -> None:
    """Each row alone, and in a workspace that another step has used."""
    step = FusedStep(Case(requests=((150, 2), (201, 1)), kt_dtype=torch.float8_e5m2, topr=16, sinks=3, recent=5))
    want = step.decode()
    table = step.table()
    for i in reversed(range(len(table))):
        output = torch.full_like(want, torch.nan)
        row = table[i : i + 1].clone()
        decode(step.query, step.view, output, row, step.block_table, step.case.options(step.case.scale), step.workspace)
        token = step.rows[i].token
        assert torch.equal(output[token], want[token])
        assert output.isnan().sum() == output.numel() - output[token].numel()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
@pytest.mark.parametrize(("block_size", "page_size", "kinds"), [(16, 4, 5), (48, 2, 3), (48, 4, 1)])
def test_equal_pages_tie_wherever_they_lie_and_the_lower_index_wins(
    block_size: int, page_size: int, kinds: int, by_page: bool, estimator: Estimator
) -> None:
    """Pages of a few kinds, the newest one included, which is not full and summarised by other instructions."""
    draw = torch.Generator().manual_seed(5)
    drawn = torch.randn(kinds, 1, 2, 64, generator=draw).expand(-1, page_size, -1, -1)
    requests = tuple((n, 1) for n in (30 * page_size - 1, 57 * page_size, 61))
    keys = [
        drawn[torch.randint(0, kinds, (-(-n // page_size),), generator=draw)].flatten(0, 1)[:n] for n, _ in requests
    ]
    case = Case(requests, block_size=block_size, page_size=page_size, dense_below=0, by_page=by_page, topr=16, topk=23)
    step = FusedStep(replace(case, estimator=estimator), keys)
    step.decode()
    for index, row in enumerate(step.rows):
        assert step.selected(index) == row.selected


def test_a_newest_page_that_is_not_full_weighs_its_tokens() -> None:
    """One head has page 1 and a token four times as good on the newest page, the other pages 2 and 3: page 1 comes before
    page 2, 1/(16 + 4) to 1/32, and after it if all pages counted the same, 1/(1 + 4) to 1/2."""
    keys = torch.full((97, 1, 64), -20.0)
    keys[16:32, :, 0] = 0
    keys[96:, :, 0] = math.log(4)
    keys[32:64, :, 1] = 0
    case = Case(requests=((97, 1),), page_size=16, group=2, num_kv_heads=1, topk=32, by_page=True, adaptive=False)
    step = FusedStep(case, [keys], 8 * torch.eye(2, 64)[None])
    assert check(step, step.decode()) == 0
    assert step.selected(0) == [[*range(16, 32), 96]]


def test_equal_dimensions_tie_and_the_lower_index_wins() -> None:
    case = Case(requests=((150, 1),), topr=5, dense_below=0, topk=9)
    query = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3)).sign() * 1.5
    step = FusedStep(case, query=query)
    assert check(step, step.decode()) == 0
    rows = step.workspace.dims[0, :, :, 0]
    assert (rows[:, :5] // 2).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (rows[:, 5:] == UNUSED).all()


@pytest.mark.parametrize("position", [0, 77, 149])
@pytest.mark.parametrize("estimator", SUM_ESTIMATORS)
def test_the_mean_and_quests_bound_see_every_dimension_and_head(estimator: Estimator, position: int) -> None:
    """One key differs from the others, in the last dimension, which one head of the group alone looks at, and with a small
    number: top-r would leave it out, and the sign of the group's sum would ask for the other bound."""
    case = Case(requests=((150, 1),), topk=4, dense_below=0, num_kv_heads=1, by_page=True, topr=8, estimator=estimator)
    keys = torch.zeros(150, 1, 64)
    keys[position, 0, 63] = 1.0 if estimator == "mean" else -1.0
    query = torch.full((1, 3, 64), 2.0)
    query[0, :, 63] = torch.tensor([-0.75, 0.5, 0.5])
    step = FusedStep(case, [keys], query)
    step.decode()
    page = position // 4 * 4
    assert step.selected(0) == [list(range(page, min(page + 4, 150)))]


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
    step = FusedStep(case, [sign * keys], query)
    step.decode()
    assert step.selected(0) == [list(range(96, n)) if is_best else [28, 29, 30, 31]]


@pytest.mark.parametrize("estimator", SUM_ESTIMATORS)
def test_a_score_that_is_not_a_number_ranks_last(estimator: Estimator) -> None:
    """An infinite query makes scores infinite, but of pages whose keys are 0 there: those scores are none. A query that is not a
    number makes all scores none."""
    case = Case(requests=((150, 1),), topk=20, dense_below=0, by_page=True, estimator=estimator)
    keys = torch.randn(150, 2, 64, generator=torch.Generator().manual_seed(1))
    keys[:, 0, 5] = 1.0
    keys[4:8, 0, 5] = keys[12:16, 0, 5] = 0.0
    query = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    query[0, 1, 5] = torch.inf
    query[0, 4, 5] = torch.nan
    step = FusedStep(case, [keys], query)
    step.decode()
    assert step.selected(0) == [[*range(4), *range(8, 12), *range(16, 28)], list(range(20))]


def test_a_workspace_is_of_one_estimator() -> None:
    step = FusedStep(Case(requests=((150, 1),)))
    output = step.decode()
    step.case = replace(step.case, estimator="quest")
    with pytest.raises(AssertionError, match="another estimator"):
        decode(step.query, step.view, output, step.table(), step.block_table, step.case.options(1.0), step.workspace)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kt_dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_key_beyond_the_bounds_type_is_found(kt_dtype: torch.dtype, estimator: Estimator) -> None:
    case = Case(requests=((150, 1),), dtype=torch.float32, model_dtype=torch.float32, kt_dtype=kt_dtype, topk=4)
    case = replace(case, num_kv_heads=1, by_page=True, estimator=estimator)
    for position in (0, 70, 149):
        keys = torch.randn(150, 1, 64, generator=torch.Generator().manual_seed(position))
        query = torch.rand(1, 3, 64, generator=torch.Generator().manual_seed(position))
        keys[position, 0, 9] = 3e38
        step = FusedStep(case, [keys], query)
        step.decode(softcap=4.0)
        page = position // 4 * 4
        assert step.selected(0) == [list(range(page, min(page + 4, 150)))]


def test_keys_that_are_no_numbers_spoil_only_what_reads_them() -> None:
    """The row's own head is lost, but its selection is within its bounds, and other heads and rows are as without it."""
    case = Case(requests=((150, 1), (80, 1)), sinks=2, recent=3, topr=16)
    want = FusedStep(case).decode()
    of_first, of_second = FusedStep(case).rows
    for position in (0, 77, 149):  # the last one on a page that is not full
        step = FusedStep(case)
        block, slot = int(step.blocks[0][position // case.block_size]), position % case.block_size
        step.view.kv[block, 0, slot] = -1  # NaN
        step.view.kt[block, 0, :, :, slot // case.page_size] = -1
        output = step.decode()
        chosen = step.selected(0)[0]
        assert len(chosen) == 50
        assert {0, 1, 147, 148, 149} <= set(chosen)
        assert output[of_first.token][:3].isnan().all() == (position in chosen)
        assert torch.equal(output[of_first.token][3:], want[of_first.token][3:])
        assert torch.equal(output[of_second.token], want[of_second.token])


# --------------------------------------------------------------------------------------------- configurations

REGISTERS = 65536
"""Of a multiprocessor."""


def test_compile_cases_are_what_is_launched() -> None:
    cases = list(compile_cases())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert set(case.signature) | set(case.constants) == set(case.kernel.arg_names)
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
        assert options == launch_options(case.constants)
        assert (case.maxnreg or 0) * 32 * case.num_warps <= REGISTERS
