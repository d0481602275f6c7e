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
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_kernels import paged
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
"""Infinities on the way are meant: exp of a large logit in a soft cap, padding in a maximum."""

NEAR = 2e-5
"""Relative difference of two float64 scores that float32 need not tell apart."""
LEAST = 1e-30
"""Scores below this are as good as none."""
UNUSED = -7
"""What a workspace's list holds where nothing was written."""


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One layer's decode step. ``requests``: cached tokens of each after the step, and how many of them it adds (its rows)."""

    requests: tuple[tuple[int, int], ...] = ((213, 1), (64, 2))
    kv_dtype: torch.dtype = torch.bfloat16
    model_dtype: torch.dtype = torch.bfloat16
    kt_dtype: torch.dtype = torch.bfloat16
    head_size: int = 64
    num_kv_heads: int = 2
    group: int = 3
    block_size: int = 48
    page_size: int = 4  # 0: no KT table
    topr: int | None = None
    topk: int = 50
    dense_below: int = 50
    by_page: bool = False
    adaptive: bool = True
    sinks: int = 0
    recent: int = 0
    softcap: float = 0.0
    is_hnd: bool = True
    capacity: int = 512
    seed: int = 0

    def __str__(self) -> str:
        names = [str(x).removeprefix("torch.") for x in (self.kv_dtype, self.kt_dtype)]
        sizes = [f"D{self.head_size}", f"G{self.group}", f"B{self.block_size}", f"page{self.page_size}"]
        return "-".join([*names, *sizes, str(self.seed)])

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def scales(self) -> tuple[float, float]:
        return (0.37, 1.7) if self.kv_dtype.itemsize == 1 else (1.0, 1.0)

    @property
    def options(self) -> DecodeOptions:
        return DecodeOptions(
            scale=self.scale,
            softcap=self.softcap,
            dense_below=self.dense_below,
            topk_tokens=self.topk,
            sink_tokens=self.sinks,
            recent_tokens=self.recent,
            by_page=self.by_page,
            adaptive=self.adaptive,
        )


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(2502)
    axes: dict[str, list[Any]] = {
        "kv_dtype": paged.KV_DTYPES,
        "model_dtype": [torch.float32, torch.bfloat16, torch.float16],
        "kt_dtype": [*paged.KT_DTYPES, torch.float16],
        "head_size": [64, 64, 80, 96, 128],
        "num_kv_heads": [1, 2],
        "group": [1, 3, 4, 8],
        "block_size": [16, 48, 128],
        "page_size": [1, 2, 4, 16],
        "topr": [None, None, 1, 7, 16, 31],
        "topk": [7, 16, 33, 100],
        "by_page": [True, False],
        "adaptive": [True, False],
        "sinks": [0, 0, 1, 5, 17],
        "recent": [0, 0, 1, 6, 33],
        "softcap": [0.0, 0.0, 4.0],
        "is_hnd": [True, False],
    }
    columns = {}
    for name, values in axes.items():
        columns[name] = list(itertools.islice(itertools.cycle(values), count))
        draw.shuffle(columns[name])
    cases = []
    for i in range(count):
        case = Case(**{name: column[i] for name, column in columns.items()}, seed=i)
        if case.kv_dtype.itemsize > 1 and i % 4:
            case = replace(case, model_dtype=case.kv_dtype)
        topk, page, block = case.topk, case.page_size, case.block_size
        dense = draw.choice([0, topk, topk + page])
        corners = [1, page, page + 1, block, block + 1, dense, dense + 1, topk, topk + 1, topk + page + 1]
        lengths = [draw.choice([n for n in corners if n]), dense + draw.randint(1, 2 * page), draw.randint(140, 300)]
        requests = [(n, 1) for n in lengths]
        requests[draw.randrange(3)] = (draw.choice([150, dense + page + 1]), 2)
        cases.append(replace(case, requests=tuple(requests), dense_below=dense))
    return cases


CASES = generated_cases(24)
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


@dataclass
class Row:
    """A row of the step: ``request`` sees its first ``num_tokens`` tokens; ``token`` is its place in the batch."""

    request: int
    num_tokens: int
    token: int
    is_inert: bool = False
    scores: Tensor | None = None  # the reference's, [Hkv, pages]
    selected: list[list[int]] = field(default_factory=list)


class Step:
    """A case's numbers in a paged cache, and the reference's choice."""

    def __init__(self, case: Case, keys: list[Tensor] | None = None, query: Tensor | None = None) -> None:
        self.case = case
        self.random = random.Random(case.seed)
        H, D = case.num_kv_heads, case.head_size
        count = sum(rows for _, rows in case.requests)
        places = iter(sorted(self.random.sample(range(count + 2), count)))
        self.batch = count + 2
        self.rows = [
            Row(r, n - rows + 1 + i, next(places)) for r, (n, rows) in enumerate(case.requests) for i in range(rows)
        ]
        shape = (self.batch, H * case.group, D)
        self.query = torch.full((self.batch, H * case.group + 3, D + 16), torch.nan).to(case.model_dtype)[:, 2:-1, :D]
        drawn = query if query is not None else paged.random_tokens(shape, torch.float32, case.seed, 1.5)
        for row in self.rows:
            self.query[row.token] = drawn[row.token].to(case.model_dtype)
        key_scale, value_scale = case.scales
        self.cache = paged.make_cache(
            sum(-(-n // case.block_size) for n, _ in case.requests) + 2,
            H,
            case.block_size,
            D,
            case.kv_dtype,
            case.kt_dtype,
            case.page_size,
            is_hnd=case.is_hnd,
            key_scale=key_scale,
            value_scale=value_scale,
            seed=case.seed,
        )
        self.keys, self.values, blocks = [], [], []
        for r, (n, _) in enumerate(case.requests):
            of_request = paged.random_tokens((n, H, D), torch.float32, 100 + r) / key_scale if keys is None else keys[r]
            self.keys.append(of_request.to(case.kv_dtype))
            self.values.append(paged.random_tokens((n, H, D), case.kv_dtype, 200 + r))
            blocks.append(self.cache.add(self.keys[r], self.values[r]))
        self.first_block = [r % 3 for r in range(len(blocks))]
        width = max(first + len(of) for first, of in zip(self.first_block, blocks, strict=True)) + 2
        table = torch.full((len(blocks), width + 5), 1 << 30, dtype=torch.int32)
        self.block_table = table[:, 2 : 2 + width]
        for r, of_request in enumerate(blocks):
            first = self.first_block[r]
            self.block_table[r, first : first + len(of_request)] = of_request
        self._reference()

    def _reference(self) -> None:
        case = self.case
        for row in self.rows:
            n = row.num_tokens
            if n <= case.dense_below or not case.page_size:
                row.selected = [list(range(n))] * case.num_kv_heads
                continue
            bounds = paged.page_bounds(self.keys[row.request][:n], case.page_size, case.kt_dtype)
            low, high = (paged.bound_values(x).clamp(-paged.LARGEST, paged.LARGEST) * case.scales[0] for x in bounds)
            temperature = "adaptive" if case.adaptive else "constant"
            query = self.query[row.token]
            row.scores = reference.hsa_scores(query, low, high, n, case.page_size, case.topr, temperature)
            row.selected = choose(case, row.scores, n)

    def table(self) -> Tensor:
        """``Rows.table``."""
        topr = self.case.head_size if self.case.topr is None else self.case.topr
        table = []
        for row in self.rows:
            n = 0 if row.is_inert else row.num_tokens
            later = int(row.num_tokens < self.case.requests[row.request][0])
            table.append([row.token, row.request, self.first_block[row.request], n, topr, later])
        return torch.tensor(table, dtype=torch.int32)

    def decode(self, cache: CacheView | None = None, **options: Any) -> Tensor:
        """The output, NaN where nothing was written."""
        case, view = self.case, self.cache.view
        output = torch.full((self.batch, self.query.shape[1], 2 * case.head_size), torch.nan, dtype=case.model_dtype)
        self.workspace = DecodeWorkspace.allocate(
            len(self.rows) + 1,
            self.query.shape[1],
            case.num_kv_heads,
            case.head_size,
            case.capacity,
            case.page_size,
            "cpu",
        )
        for memory in (self.workspace.dims, self.workspace.chosen):
            memory.fill_(UNUSED)
        self.workspace.scaled_query.fill_(torch.nan)
        bytes_before = self.cache.storage.clone()
        of_heads = output[:, :, : case.head_size]
        options_now = replace(case.options, **options)
        decode(self.query, cache or view, of_heads, self.table(), self.block_table, options_now, self.workspace)
        assert torch.equal(self.cache.storage, bytes_before), "decode writes nothing to the cache"
        assert output[:, :, case.head_size :].isnan().all()
        return of_heads

    def selected(self, index: int) -> list[list[int]]:
        """Tokens that the row's KV heads attended to, from the kernel's list."""
        case, row = self.case, self.rows[index]
        n = row.num_tokens
        if n <= case.dense_below or not case.page_size:
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


def choose(case: Case, scores: Tensor, n: int) -> list[list[int]]:
    granularity = "page" if case.by_page else "token"
    return reference.hsa_choose(scores, n, case.page_size, case.topk, granularity, case.sinks, case.recent)


def assert_equally_good(case: Case, row: Row, selected: list[list[int]]) -> int:
    """What was selected is the reference's choice, but for pages whose scores are as good as equal. Returns how many heads
    differ from it."""
    differ = 0
    for head, (ours, theirs) in enumerate(zip(selected, row.selected, strict=True)):
        swapped_in, swapped_out = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        if not swapped_in and not swapped_out:
            continue
        differ += 1
        assert row.scores is not None, "all tokens are read"
        page, n = case.page_size, row.num_tokens
        unit = page if case.by_page else 1
        assert len({t // unit for t in ours}) == len({t // unit for t in theirs})
        forced = [t for t in range(n) if t < case.sinks or t >= n - case.recent]
        assert set(forced) <= set(ours)
        if case.by_page:
            assert ours == [t for t in range(n) if t // page in {t // page for t in ours}], "whole pages are read"
        for token, other in itertools.product(swapped_in, swapped_out):
            a, b = float(row.scores[head, token // page]), float(row.scores[head, other // page])
            assert abs(a - b) <= NEAR * max(a, b) + LEAST, f"head {head} reads {token} ({a}), not {other} ({b})"
    return differ


def assert_attends(step: Step, row: Row, output: Tensor, selected: list[list[int]]) -> None:
    case, n = step.case, row.num_tokens
    keys = step.keys[row.request][:n].double() * case.scales[0]
    values = step.values[row.request][:n].double() * case.scales[1]
    want = reference.attend(step.query[row.token], keys, values, selected, case.scale, case.softcap)
    eps = torch.finfo(case.model_dtype).eps
    # Weights are rounded to the type of the products, as in any FlashAttention.
    atol = float(values.abs().max()) * (eps / 4 if eps > 1e-6 else 1e-6)
    torch.testing.assert_close(output.double(), want, rtol=0.6 * eps if eps > 1e-6 else 1e-5, atol=atol)


def check(step: Step, output: Tensor) -> int:
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
    step = Step(case)
    differ = check(step, step.decode())
    assert differ <= 1, "near ties are rare"


def test_inert_rows_read_and_write_nothing() -> None:
    step = Step(Case(requests=((150, 2), (80, 1)), topr=16))
    want = step.decode()
    step.rows[1].is_inert = True
    step.block_table[1] = 1 << 30
    table = step.table()
    table[1, :3] = 1 << 30
    table[2, 3] = 0
    workspace = step.workspace
    workspace.chosen.fill_(UNUSED)
    output = torch.full_like(want, torch.nan)
    decode(step.query, step.cache.view, output, table, step.block_table, step.case.options, workspace)
    assert torch.equal(output[step.rows[0].token], want[step.rows[0].token])
    assert output.isnan().sum() == output.numel() - output[0].numel()
    assert (workspace.chosen[1:] == UNUSED).all()
    decode(step.query, step.cache.view, output, table[:0], step.block_table, step.case.options, workspace)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """The same numbers in blocks 2^30 bytes apart; memory is touched where they are, and nowhere else."""
    types = {"kv_dtype": torch.float8_e4m3fn, "kt_dtype": torch.float8_e5m2}
    step = Step(Case(requests=((91, 1),), topr=16, is_hnd=False, **types))
    want = step.decode()
    view, apart = step.cache.view, 1 << 30
    far = torch.empty(2 * apart + (1 << 20), dtype=torch.uint8)
    kv = far.as_strided((3, *view.kv.shape[1:]), (apart, *view.kv.stride()[1:]))
    kt = far.as_strided((3, *view.kt.shape[1:]), (apart, *view.kt.stride()[1:]), 1 << 19)
    blocks = step.block_table[0, :2]
    for block, other in zip((2, 1), blocks.tolist(), strict=True):
        kv[block], kt[block] = view.kv[other], view.kt[other]
    blocks[:] = torch.tensor([2, 1])
    output = step.decode(replace(view, kv=kv, kt=kt))
    assert torch.equal(output[step.rows[0].token], want[step.rows[0].token])


def test_rows_in_one_launch_do_not_touch_each_other() -> None:
    """Each row alone, and in a workspace that another step has used."""
    step = Step(Case(requests=((150, 2), (201, 1)), kt_dtype=torch.float8_e5m2, topr=16, sinks=3, recent=5))
    want = step.decode()
    table = step.table()
    for i in reversed(range(len(table))):
        output = torch.full_like(want, torch.nan)
        row = table[i : i + 1].clone()
        decode(step.query, step.cache.view, output, row, step.block_table, step.case.options, step.workspace)
        token = step.rows[i].token
        assert torch.equal(output[token], want[token])
        assert output.isnan().sum() == output.numel() - output[token].numel()


@pytest.mark.parametrize("by_page", [False, True], ids=["token", "page"])
@pytest.mark.parametrize(("block_size", "page_size", "kinds"), [(16, 4, 5), (48, 2, 3), (48, 4, 1)])
def test_equal_pages_tie_wherever_they_lie_and_the_lower_index_wins(
    block_size: int, page_size: int, kinds: int, by_page: bool
) -> None:
    """Pages of a few kinds, the newest one included, which is not full and bounded by other instructions."""
    draw = torch.Generator().manual_seed(5)
    drawn = torch.randn(kinds, 1, 2, 64, generator=draw).expand(-1, page_size, -1, -1)
    requests = tuple((n, 1) for n in (30 * page_size - 1, 57 * page_size, 61))
    keys = [
        drawn[torch.randint(0, kinds, (-(-n // page_size),), generator=draw)].flatten(0, 1)[:n] for n, _ in requests
    ]
    case = Case(requests, block_size=block_size, page_size=page_size, dense_below=0, by_page=by_page, topr=16, topk=23)
    step = Step(case, keys)
    step.decode()
    for index, row in enumerate(step.rows):
        assert row.scores is not None
        for head, ours in enumerate(step.selected(index)):
            assert ours == choose(case, with_exact_ties(row.scores[head])[None], row.num_tokens)[0]


def test_a_newest_page_that_is_not_full_weighs_its_tokens() -> None:
    """One head has page 1 and a token four times as good on the newest page, the other pages 2 and 3: page 1 comes before
    page 2, 1/(16 + 4) to 1/32, and after it if all pages counted the same, 1/(1 + 4) to 1/2."""
    keys = torch.full((97, 1, 64), -20.0)
    keys[16:32, :, 0] = 0
    keys[96:, :, 0] = math.log(4)
    keys[32:64, :, 1] = 0
    case = Case(requests=((97, 1),), page_size=16, group=2, num_kv_heads=1, topk=32, by_page=True, adaptive=False)
    step = Step(case, [keys], 8 * torch.eye(2, 64).expand(3, 2, 64))
    assert check(step, step.decode()) == 0
    assert step.selected(0) == [[*range(16, 32), 96]]


def with_exact_ties(scores: Tensor) -> Tensor:
    """Scores that differ by float64's rounding alone made equal."""
    order = scores.argsort().tolist()
    result = scores.clone()
    for before, here in itertools.pairwise(order):
        if abs(result[here] - result[before]) <= 1e-9 * result[here]:
            result[here] = result[before]
    return result


def test_equal_dimensions_tie_and_the_lower_index_wins() -> None:
    case = Case(requests=((150, 1),), topr=5, dense_below=0, topk=9)
    query = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(3)).sign() * 1.5
    step = Step(case, query=query)
    assert check(step, step.decode()) == 0
    rows = step.workspace.dims[0, :, :, 0]
    assert (rows[:, :5] // 2).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (rows[:, 5:] == UNUSED).all()


@pytest.mark.parametrize("kt_dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_key_beyond_the_bounds_type_is_found(kt_dtype: torch.dtype) -> None:
    case = Case(requests=((150, 1),), kv_dtype=torch.float32, model_dtype=torch.float32, kt_dtype=kt_dtype, topk=4)
    case = replace(case, num_kv_heads=1, by_page=True)
    for position in (0, 70, 149):
        keys = torch.randn(150, 1, 64, generator=torch.Generator().manual_seed(position))
        query = torch.rand(3, 3, 64, generator=torch.Generator().manual_seed(position))
        keys[position, 0, 9] = 3e38
        step = Step(case, [keys], query)
        step.decode(softcap=4.0)
        page = position // 4 * 4
        assert step.selected(0) == [list(range(page, min(page + 4, 150)))]


def test_keys_that_are_no_numbers_spoil_only_what_reads_them() -> None:
    """The row's own head is lost, but its selection is within its bounds, and other heads and rows are as without it."""
    case = Case(requests=((150, 1), (80, 1)), sinks=2, recent=3, topr=16)
    want = Step(case).decode()
    of_first, of_second = Step(case).rows
    for position in (0, 77, 149):  # the last one on a page that is not full
        step = Step(case)
        view, blocks = step.cache.view, step.block_table[0, step.first_block[0] :]
        block, slot = int(blocks[position // case.block_size]), position % case.block_size
        view.kv[block, 0, slot] = -1  # NaN
        view.kt[block, 0, :, :, slot // case.page_size] = -1
        output = step.decode()
        chosen = step.selected(0)[0]
        assert len(chosen) == 50
        assert {0, 1, 147, 148, 149} <= set(chosen)
        assert output[of_first.token][:3].isnan().all() == (position in chosen)
        assert torch.equal(output[of_first.token][3:], want[of_first.token][3:])
        assert torch.equal(output[of_second.token], want[of_second.token])
