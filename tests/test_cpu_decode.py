# SPDX-License-Identifier: Apache-2.0
"""Stage 2's C++ kernels (``decode``, ``summarise_pages``) against ``kernels.reference``, for each instruction set.

What the op selected is read off its output: with ``scale`` 0 every selected token weighs the same, and with values that are
powers of two, each in one dimension, the sums name the tokens (``Layer.selected``). All bytes of a cache that no test
wrote are NaNs, and so are the block table's entries no blocks, and what the step does not read of a fused qkv tensor.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.cpu import TYPES, ops

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
KV_TYPES = list(TYPES)
KT_TYPES = [torch.bfloat16, torch.float8_e5m2]
VLLM_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
NEAR = 2e-5
"""Relative difference of two float64 scores that float32 need not tell apart."""
LEAST = 1e-30
"""Scores below this are as good as none."""


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One layer's decode step. ``requests``: cached tokens of each after the step, and how many of them it adds (its rows)."""

    requests: tuple[tuple[int, int], ...] = ((317, 1), (64, 1), (201, 4))
    dtype: torch.dtype = torch.bfloat16  # of the cache
    model_dtype: torch.dtype = torch.bfloat16
    kt_dtype: torch.dtype = torch.bfloat16
    head_size: int = 64
    num_kv_heads: int = 2
    group: int = 3
    block_size: int = 32
    page_size: int = 4  # 0: no KT table
    topr: int | None = None
    topk: int = 50
    dense_below: int = 50
    by_page: bool = False
    adaptive: bool = True
    sinks: int = 0
    recent: int = 0
    softcap: float = 0.0
    native: str = ""  # vLLM's layout of that name; else private blocks
    is_shared: bool = False  # another layer has written the cache
    is_fused: bool = False  # query, key and value are slices of one tensor
    magnitude: float = 1.0  # of keys
    seed: int = 0

    def __str__(self) -> str:
        names = [str(x).removeprefix("torch.") for x in (self.dtype, self.kt_dtype)]
        sizes = [f"D{self.head_size}", f"G{self.group}", f"B{self.block_size}", f"page{self.page_size}"]
        return "-".join([*names, *sizes, self.native or "private", str(self.seed)])

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def scales(self) -> tuple[float, float]:
        return (0.37, 1.7) if self.dtype.itemsize == 1 else (1.0, 1.0)

    @property
    def is_written(self) -> bool:
        """The step stores its rows' keys and values."""
        return not self.native and not self.is_shared


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(2502)
    axes: dict[str, list[Any]] = {
        "dtype": KV_TYPES,
        "model_dtype": KV_TYPES[:3],
        "kt_dtype": KT_TYPES,
        "head_size": [32, 64, 80, 96, 128, 256],
        "num_kv_heads": [1, 2, 3],
        "group": [1, 3, 4, 5, 8],
        "block_size": [32, 48, 128, 16],
        "page_size": [1, 2, 4, 16],
        "topr": [None, None, 1, 7, 16, 31],
        "topk": [7, 16, 33, 100, 550],
        "by_page": [True, False],
        "adaptive": [True, False],
        "sinks": [0, 0, 1, 5, 17],
        "recent": [0, 0, 1, 6, 33],
        "softcap": [0.0, 0.0, 4.0],
        "native": ["", "", "vec", "vec16"],
        "is_shared": [False, False, False, True],
        "is_fused": [True, False],
    }
    columns = {}
    for name, values in axes.items():
        columns[name] = list(itertools.islice(itertools.cycle(values), count))
        draw.shuffle(columns[name])
    cases = []
    for i in range(count):
        case = Case(**{name: column[i] for name, column in columns.items()}, seed=i)
        if case.dtype.itemsize > 1:
            case = replace(case, model_dtype=case.dtype)
        if case.native:
            case = replace(case, block_size=draw.choice([32, 96, 128]))
            if case.dtype.itemsize == 1:  # what vLLM has kernels for
                head_size = 128 if case.head_size == 80 else case.head_size
                case = replace(case, native="vec", model_dtype=torch.bfloat16, head_size=head_size)
        topk, page, block = case.topk, case.page_size, case.block_size
        dense = draw.choice([0, topk, topk, topk + page, 2 * topk, 600])
        corners = [
            1,
            page,
            page + 1,
            block,
            block + 1,
            2 * block - 1,
            dense,
            dense + 1,
            topk,
            topk + 1,
            topk + page + 1,
        ]
        lengths = [*draw.sample([n for n in corners if n], 5), draw.randint(1, 400), draw.randint(521, 1300)]
        rows = [1] * 5 + [min(draw.randint(2, 6), lengths[5]), 1]
        requests = [*zip(lengths, rows, strict=True), (max(dense, topk) + 2 * page + 1, 2 * page if page < 16 else 3)]
        draw.shuffle(requests)
        cases.append(replace(case, requests=tuple(requests), dense_below=dense))
    return cases


CASES = generated_cases(60)
EDGES = [
    Case(page_size=0, requests=((700, 1), (1, 1), (40, 3))),  # no KT table: everything is read
    Case(requests=((513, 1),), num_kv_heads=1, group=1),  # one unit
    Case(requests=((1200, 1),), num_kv_heads=1, topk=512, block_size=128),  # one segment exactly
    Case(requests=((1200, 1),), num_kv_heads=1, topk=513, by_page=True, page_size=2),
    Case(requests=((1537, 1),), dense_below=5000),  # four dense segments, the last of one token
    Case(requests=((300, 1), (299, 2)), sinks=40, recent=41, topk=50),  # the forced tokens exceed the budget
    Case(requests=((300, 1), (299, 2)), sinks=400),  # all are forced
    Case(requests=((300, 1), (299, 2)), recent=400, by_page=True),
    Case(requests=((90, 33), (70, 70)), topk=16, dense_below=16),  # the rows of several pages and blocks
    Case(requests=((160, 1),) * 20, topk=16, dense_below=16),  # more units than threads
    Case(requests=((1400, 1),), block_size=128, page_size=2, head_size=96, topr=31, group=5),  # 64 pages a block
    Case(requests=((1400, 1),), block_size=96, page_size=2, kt_dtype=torch.float8_e5m2, dtype=torch.float8_e5m2),
    Case(requests=((900, 2),), dtype=torch.float32, model_dtype=torch.float32, magnitude=2000.0),
]


@dataclass
class Row:
    """A row of the step: ``request`` sees its first ``num_tokens`` tokens; ``token`` is its place in the batch."""

    request: int
    num_tokens: int
    token: int
    scores: Tensor | None = None  # the reference's, [Hkv, pages]
    selected: list[list[int]] = field(default_factory=list)


class Step:
    """A case's numbers, its cache before the step and the reference's choice."""

    def __init__(
        self, case: Case, keys: list[Tensor] | None = None, values: Tensor | None = None, query: Tensor | None = None
    ) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        self._place_rows()
        self._draw_tokens(keys, query)
        self._lay_out()
        self._fill()
        self._reference()

    def _shuffled(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.random).tolist()

    def _place_rows(self) -> None:
        case = self.case
        count = sum(rows for _, rows in case.requests)
        self.batch = count + 2  # two tokens that are not of this step's rows
        tokens = sorted(self._shuffled(self.batch)[:count])
        places = iter(tokens)
        self.rows = [
            Row(r, n - rows + 1 + i, next(places)) for r, (n, rows) in enumerate(case.requests) for i in range(rows)
        ]

    def _draw_tokens(self, keys: list[Tensor] | None, query: Tensor | None) -> None:
        case, H, D = self.case, self.case.num_kv_heads, self.case.head_size

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.random)

        def stored(x: Tensor, scale: float) -> Tensor:
            return x if case.dtype == case.model_dtype else (x.float() / torch.tensor(scale)).to(case.dtype)

        sizes = (H * case.group * D, H * D, H * D)
        fused = torch.full((self.batch, sum(sizes)), torch.nan, dtype=case.model_dtype)
        parts = [x.unflatten(1, (-1, D)) for x in fused.split(sizes, 1)]
        self.query, self.key, self.value = parts if case.is_fused else [x.contiguous() for x in parts]
        raw_keys = keys or [draw(n, H, D) * case.magnitude for n, _ in case.requests]
        raw_keys = [x.to(case.model_dtype) for x in raw_keys]
        raw_values = [draw(n, H, D).to(case.model_dtype) for n, _ in case.requests]
        queries = draw(len(self.rows), H * case.group, D) * 1.5 if query is None else query
        for row, of_row in zip(self.rows, queries.to(case.model_dtype), strict=True):
            self.query[row.token] = of_row
            self.key[row.token] = raw_keys[row.request][row.num_tokens - 1]
            self.value[row.token] = raw_values[row.request][row.num_tokens - 1]
        self.keys = [stored(x, case.scales[0]) for x in raw_keys]
        self.values = [stored(x, case.scales[1]) for x in raw_values]
        key_scale, value_scale = (torch.tensor(x, dtype=torch.float32).double() for x in case.scales)
        self.key_scale = key_scale
        self.real_keys = [x.double() * key_scale for x in self.keys]
        self.real_values = [x.double() * value_scale for x in self.values]

    def _lay_out(self) -> None:
        case, B, D, H = self.case, self.case.block_size, self.case.head_size, self.case.num_kv_heads
        blocks = [-(-n // B) for n, _ in case.requests]
        num_blocks = sum(blocks) + 3
        ids = iter([1 + i for i in self._shuffled(num_blocks - 1)])  # block 0 is vLLM's null block
        table = torch.full((len(blocks), max(blocks) + 9), 1 << 30, dtype=torch.int32)
        self.table = table[:, 2:-3]  # its rows are not adjacent
        self.table_row = self._shuffled(len(blocks))
        self.first_block = [r % 4 for r in range(len(blocks))]
        for r, (row, first) in enumerate(zip(self.table_row, self.first_block, strict=True)):
            of_request = [next(ids) for _ in range(blocks[r])]
            self.table[row, first : first + blocks[r]] = torch.tensor(of_request, dtype=torch.int32)
        self.kv_bytes = H * 2 * B * D * case.dtype.itemsize
        self.kt_offset = (self.kv_bytes + 63) // 64 * 64
        self.kt_shape = (H, D, 2, B // case.page_size if case.page_size else 0)
        self.kt_bytes = torch.Size(self.kt_shape).numel() * case.kt_dtype.itemsize
        self.bytes = torch.full((num_blocks, self.kt_offset + (self.kt_bytes + 127) // 64 * 64), 255, dtype=torch.uint8)
        t, d = torch.arange(B), torch.arange(D)
        self.offsets = t * 2 * D, d, t * 2 * D, D + d
        self.native_layout = None
        if case.native:
            from vllm_rocketkv.backend.paged_cache import probe_block_layout

            kv_cache_dtype = VLLM_NAMES.get(case.dtype, "auto")
            layout = probe_block_layout(case.native, case.model_dtype, B, D, kv_cache_dtype)
            self.offsets = layout.key_token, layout.key_dim, layout.value_token, layout.value_dim
            self.native_layout = layout.packed()

    def heads(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, 2 * B * D]`` elements as integers."""
        itemsize = self.case.dtype.itemsize
        return raw[:, : self.kv_bytes].view(INTEGERS[itemsize]).unflatten(1, (self.case.num_kv_heads, -1))

    def kt(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, D, 2, pages]`` of the KT dtype."""
        raw = raw[:, self.kt_offset : self.kt_offset + self.kt_bytes]
        return raw.view(self.case.kt_dtype).unflatten(1, self.kt_shape)

    def place(self, request: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks and offsets of cached tokens."""
        blocks = self.table[self.table_row[request], self.first_block[request] :].long()
        return blocks[position // self.case.block_size], position % self.case.block_size

    def put(self, raw: Tensor, request: int, position: Tensor, numbers: Tensor, is_value: bool) -> None:
        """Store ``numbers`` ``[n, H, D]`` of the cache's dtype as keys or values."""
        block, offset = self.place(request, position)
        token, dim = self.offsets[2:] if is_value else self.offsets[:2]
        where = token[offset][:, None] + dim
        heads = self.heads(raw)
        for h in range(self.case.num_kv_heads):
            heads[block[:, None], h, where] = numbers[:, h].contiguous().view(heads.dtype)

    def put_pages(self, raw: Tensor, request: int, pages: Tensor) -> None:
        """Store the bounds of full pages."""
        page, block_size = self.case.page_size, self.case.block_size
        if len(pages):
            keys = self.keys[request][pages[0] * page : (pages[-1] + 1) * page].double()
            low, high = reference.page_summaries(keys, page, self.case.kt_dtype)
            block, offset = self.place(request, pages * page)
            bounds = torch.stack([low.double(), high.double()], 3).to(self.case.kt_dtype)  # [H, pages, D, 2]
            kt = self.kt(raw).view(INTEGERS[self.case.kt_dtype.itemsize])
            integers = bounds.view(kt.dtype)
            for h in range(self.case.num_kv_heads):
                kt[block, h, :, :, offset % block_size // page] = integers[h]

    def _fill(self) -> None:
        case = self.case
        self.expected = self.bytes.clone()
        for r, (n, rows) in enumerate(case.requests):
            before = n - rows if case.is_written else n
            for raw, count in ((self.bytes, before), (self.expected, n)):
                position = torch.arange(count)
                self.put(raw, r, position, self.keys[r][:count], False)
                self.put(raw, r, position, self.values[r][:count], True)
                if case.page_size:
                    self.put_pages(raw, r, torch.arange(count // case.page_size))

    def _reference(self) -> None:
        case = self.case
        for row in self.rows:
            n = row.num_tokens
            if n <= case.dense_below or not case.page_size:
                row.selected = [list(range(n))] * case.num_kv_heads
                continue
            low, high = reference.page_summaries(self.keys[row.request][:n].double(), case.page_size, case.kt_dtype)
            low, high = low.double() * self.key_scale, high.double() * self.key_scale
            temperature = "adaptive" if case.adaptive else "constant"
            query = self.query[row.token]
            row.scores = reference.hsa_scores(query, low, high, n, case.page_size, case.topr, temperature)
            granularity = "page" if case.by_page else "token"
            options = (case.page_size, case.topk, granularity, case.sinks, case.recent)
            row.selected = reference.hsa_choose(row.scores, n, *options)


@cache
def step_of(case: Case) -> Step:
    return Step(case)


class Layer:
    """A step's cache of its own, and the op on it."""

    def __init__(self, step: Step) -> None:
        self.step, self.case = step, step.case
        self.bytes = step.bytes.clone()
        case = step.case
        heads, block, width = case.num_kv_heads, case.block_size, 2 * case.head_size
        kv_cache = self.bytes[:, : step.kv_bytes].view(case.dtype).unflatten(1, (heads, block, width))
        self.kv_cache = kv_cache.view(torch.uint8) if case.dtype.itemsize == 1 else kv_cache

    @property
    def granularity(self) -> str:
        return "page" if self.case.by_page else "token"

    @property
    def table(self) -> Tensor:
        """All rows, as the op takes them."""
        step, topr = self.step, self.case.head_size if self.case.topr is None else self.case.topr
        table = []
        for row in step.rows:
            request, n = row.request, row.num_tokens
            later = int(n < self.case.requests[request][0])
            table.append([row.token, step.table_row[request], step.first_block[request], n, topr, later])
        return torch.tensor(table, dtype=torch.int32)

    def arguments(self, **other: Any) -> dict[str, Any]:
        case, step = self.case, self.step
        arguments = {
            "query": step.query,
            "key": None if case.is_shared else step.key,
            "value": None if case.is_shared else step.value,
            "kv_cache": self.kv_cache,
            "output": torch.full_like(step.query, torch.nan, memory_format=torch.contiguous_format),
            "rows": self.table,
            "block_table": step.table,
            "kv_type": TYPES[case.dtype],
            "key_scale": case.scales[0],
            "value_scale": case.scales[1],
            "kt_offset": step.kt_offset,
            "kt_type": TYPES[case.kt_dtype],
            "page_size": case.page_size,
            "native_layout": step.native_layout,
            "scale": case.scale,
            "softcap": case.softcap,
            "max_tokens": max(n for n, _ in case.requests),
            "dense_below": case.dense_below,
            "topk_tokens": case.topk,
            "sink_tokens": case.sinks,
            "recent_tokens": case.recent,
            "by_page": case.by_page,
            "adaptive": case.adaptive,
        }
        assert other.keys() <= arguments.keys()
        return arguments | other

    def decode(self, **other: Any) -> Tensor:
        arguments = self.arguments(**other)
        ops.decode(**arguments)
        return arguments["output"]

    def selected(self) -> list[list[list[int]]]:
        """The tokens that each row's KV heads attend to, once keys are written. Destroys the values."""
        case, step, D = self.case, self.step, self.case.head_size
        H, longest = case.num_kv_heads, max(n for n, _ in case.requests)
        index = torch.arange(D * BITS)
        codes = torch.zeros(D * BITS, H, D)
        codes[index, :, index // BITS] = (2.0 ** (index % BITS))[:, None]
        codes = codes.to(case.dtype)
        zeros = torch.zeros(longest, H, D).to(case.dtype)
        found = []
        for first in range(0, longest, D * BITS):
            for r, (n, _) in enumerate(case.requests):
                step.put(self.bytes, r, torch.arange(n), zeros[:n], True)
                position = torch.arange(min(n, first), min(n, first + D * BITS))
                step.put(self.bytes, r, position, codes[: len(position)], True)
            found.append(self.decode(key=None, value=None, scale=0.0, softcap=0.0))
        weights = torch.cat(found, 2).unflatten(1, (H, case.group)).double() / case.scales[1]
        result = []
        for row in step.rows:
            of_heads = []
            for of_group, expected in zip(weights[row.token], row.selected, strict=True):
                assert (of_group == of_group[0]).all(), "the heads of a group read the same tokens"
                of_heads.append(decoded(of_group[0], len(expected)))
            result.append(of_heads)
        return result


BITS = 5


def decoded(sums: Tensor, likely: int) -> list[int]:
    """Tokens of which each dimension's sum tells BITS: bit b of dimension d stands for token BITS * d + b, and every selected
    one weighs 1 / their number."""
    for count in (likely, *range(1, len(sums) * BITS + 1)):
        numbers = sums * count
        bits = numbers.round().long()
        if int(bits.max()) < 2**BITS and ((numbers - bits).abs() <= 0.004 * bits).all():
            tokens = (bits[:, None] >> torch.arange(BITS) & 1).flatten().nonzero().flatten().tolist()
            if len(tokens) == count:
                return tokens
    raise AssertionError(f"not a mean of distinct tokens: {sums}")


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
    keys, values = step.real_keys[row.request][:n], step.real_values[row.request][:n]
    want = reference.attend(step.query[row.token], keys, values, selected, case.scale, case.softcap)
    atol = 1e-5 * case.magnitude * float(values.abs().max())
    torch.testing.assert_close(output.double(), want, rtol=0.51 * torch.finfo(case.model_dtype).eps, atol=atol)


def assert_bytes(step: Step, found: Tensor) -> None:
    """The cache is what it should be, to the bit, but that which of two zeros a bound is may differ."""
    expected = step.expected.clone()
    if step.case.page_size:
        ours, theirs = step.kt(found).float(), step.kt(expected).float()
        zero = (ours == 0) & (theirs == 0)
        integer = INTEGERS[step.case.kt_dtype.itemsize]
        step.kt(expected).view(integer)[zero] = step.kt(found).view(integer)[zero]
    assert torch.equal(found, expected)


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
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("block_size", "page_size"), [(32, 4), (128, 4), (48, 2), (32, 1)])
def test_equal_pages_tie_wherever_they_lie_and_the_lower_index_wins(
    block_size: int, page_size: int, group: int, by_page: bool, dtype: torch.dtype
) -> None:
    case = Case(
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
            for row, selected in zip(step.rows, layer.selected(), strict=True):
                assert row.scores is not None
                for head, ours in enumerate(selected):
                    scores = with_exact_ties(row.scores[head])
                    theirs = reference.hsa_choose(scores[None], row.num_tokens, page_size, topk, layer.granularity)[0]
                    pages = {t // page_size for t in set(ours) ^ set(theirs)}
                    newest = (row.num_tokens - 1) // page_size
                    is_about_newest = newest in pages and len({float(scores[p]) for p in pages}) == 1
                    assert ours == theirs or (not is_exact and is_about_newest)


def with_exact_ties(scores: Tensor) -> Tensor:
    """Scores that differ by float64's rounding alone made equal."""
    order = scores.argsort().tolist()
    result = scores.clone()
    for before, here in itertools.pairwise(order):
        if abs(result[here] - result[before]) <= 1e-9 * result[here]:
            result[here] = result[before]
    return result


@pytest.mark.parametrize("head_size", [64, 128])  # a temperature that is a power of two, and one that rounds
def test_a_key_beyond_the_bounds_type_is_found(head_size: int) -> None:
    case = Case(
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
        keys[position, 0, 9] = 1e5
        layer = Layer(Step(case, keys=[keys], query=query))
        layer.decode()
        page = position // 4 * 4
        assert layer.selected() == [[list(range(page, min(page + 4, 150)))]]


# --------------------------------------------------------------------------------------------- KT entries


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a type of 8 or 16 bits; of float32, those at and beside the numbers of both KT types, and random ones."""
    if dtype.itemsize < 4:
        bits = 8 * dtype.itemsize
        numbers = torch.arange(-(1 << bits - 1), 1 << bits - 1).to(INTEGERS[dtype.itemsize]).view(dtype)
    else:
        bounds = torch.cat([reference.representable(kt).float() for kt in KT_TYPES])
        bounds = bounds.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
        draw = torch.Generator().manual_seed(1)
        others = torch.randint(-(1 << 31), 1 << 31, (50_000,), generator=draw, dtype=torch.int64).int()
        numbers = torch.cat([bounds.flatten(), others]).view(torch.float32)
    return numbers[~numbers.float().isnan()]


@pytest.mark.parametrize("kt_dtype", KT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", KV_TYPES, ids=str)
def test_every_number_is_bounded_and_tightly(dtype: torch.dtype, kt_dtype: torch.dtype) -> None:
    """By ``summarise_pages`` and by ``compact``, whose rounding the decode op shares; pages of one token."""
    B, D = 128, 256
    numbers = hard_numbers(dtype)
    num_blocks = -(-len(numbers) // (B * D))
    kv_bytes = 2 * B * D * dtype.itemsize
    raw = torch.zeros(2 * num_blocks, kv_bytes + 2 * B * D * kt_dtype.itemsize, dtype=torch.uint8)
    kv_cache = raw[:, :kv_bytes].view(torch.uint8 if dtype.itemsize == 1 else dtype).unflatten(1, (1, B, 2 * D))
    keys = torch.zeros(num_blocks * B * D, dtype=dtype)
    keys[: len(numbers)] = numbers
    raw[:num_blocks, : kv_bytes // 2] = keys.view(torch.uint8).view(num_blocks, -1)
    layout = torch.cat([torch.arange(B) * D, torch.arange(D), B * D + torch.arange(B) * D, torch.arange(D)]).int()
    types = TYPES[dtype], TYPES[kt_dtype]
    pages = torch.cartesian_prod(torch.arange(num_blocks), torch.arange(B), torch.tensor([1])).int().contiguous()
    ops.summarise_pages(kv_cache, pages, types[0], kv_bytes, types[1], 1, layout)
    prompt, private = torch.arange(2 * num_blocks, dtype=torch.int32).chunk(2)
    kept = torch.arange(num_blocks * B, dtype=torch.int32)[None]
    ops.compact(kv_cache, prompt, private, kept, types[0], 1.0, 1.0, kv_bytes, types[1], 1, layout)
    bounds = raw[:, kv_bytes:].view(kt_dtype).unflatten(1, (D, 2, B)).double().transpose(1, 3)  # [blocks, B, 2, D]
    low, high = (reference_round(keys, kt_dtype).double() for reference_round in ROUNDINGS)
    largest = 2.0**64 if kt_dtype == torch.bfloat16 else torch.inf
    for found in bounds.chunk(2):
        assert torch.equal(found[:, :, 0].flatten(), low.clamp(-largest, largest))
        assert torch.equal(found[:, :, 1].flatten(), high.clamp(-largest, largest))


ROUNDINGS = reference.round_down, reference.round_up


@pytest.mark.parametrize("case", [case for case in CASES if case.native], ids=str)
def test_summarise_pages_bounds_full_native_pages_and_writes_nothing_else(case: Case) -> None:
    step = step_of(case)
    layer = Layer(step)
    pages = []
    step.kt(layer.bytes).view(torch.uint8).fill_(255)
    for r, (n, _) in enumerate(case.requests):
        first = torch.arange(0, n, case.page_size)
        block, offset = step.place(r, first)
        pages.append(torch.stack([block, offset // case.page_size, (n - first).clamp(max=case.page_size)], 1))
    table = torch.cat(pages)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(case.seed))].int().contiguous()
    kt = step.kt_offset, TYPES[case.kt_dtype], case.page_size
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ops.summarise_pages(layer.kv_cache, table, TYPES[case.dtype], *kt, step.native_layout)
        assert_bytes(step, layer.bytes)
        step.kt(layer.bytes).view(torch.uint8).fill_(255)


# --------------------------------------------------------------------------------------------- refusals


def refused(message: str, **other: Any) -> None:
    step = step_of(Case())
    layer = Layer(step)
    with pytest.raises(RuntimeError, match=message):
        layer.decode(**other)
    assert torch.equal(layer.bytes, step.bytes), "nothing is written before a refusal"


def changed_rows(column: int, value: int) -> Tensor:
    rows = Layer(step_of(Case())).table
    rows[2, column] = value
    return rows


def test_refuses_tensors_that_do_not_fit() -> None:
    step = step_of(Case())
    refused("query must be float32, bfloat16 or float16", query=step.query.double())
    refused("key must be .* of the query's dtype", key=step.key.float())
    refused("value must be .* of the query's dtype", value=step.value[:, :1])
    refused("output must be .* of the query's dtype", output=step.query.float())
    refused("query must be .*64", query=step.query[:, :, :32])
    refused("query must be .*a multiple of 2", query=step.query[:, :5])
    refused("kv_type does not fit", kv_type=0)
    refused("unknown kv_type", kv_type=9)
    refused("kv_cache must be", kv_cache=Layer(step).kv_cache[0])
    refused("page_size must divide", page_size=5)
    refused("kt_offset must lie behind K and V", kt_offset=step.kt_offset - 64)
    refused("storage ends before|overlap", kt_offset=step.kt_offset + 1024)
    refused("rows must be contiguous int32", rows=Layer(step).table.long())
    refused("rows must be contiguous int32", rows=Layer(step).table[:, :5].contiguous())
    refused("block_table must be int32", block_table=step.table.long())
    refused("native_layout must be", native_layout=torch.zeros(5, dtype=torch.int32))


def test_refuses_rows_that_leave_the_batch_or_the_table() -> None:
    step = step_of(Case())
    blocks, requests = step.table.shape[1], step.table.shape[0]
    message = "row 2 leaves the batch"
    for column, values in enumerate([(-1, step.batch), (-1, requests), (-1, blocks), (0, 32 * blocks + 1), (0,)]):
        for value in values:
            refused(message, rows=changed_rows(column, value), max_tokens=max(value, 317))
    for block in (-1, len(step.bytes)):
        table = step.table.clone()
        table[step.table_row[0], step.first_block[0] + 1] = block
        refused(f"row 0 reads block {block}", block_table=table)


def test_refuses_a_row_longer_than_max_tokens() -> None:
    """Working memory is as long as ``max_tokens`` says."""
    refused("row 0 .*max_tokens", max_tokens=316)


def test_refuses_pages_that_do_not_exist() -> None:
    step = step_of(next(case for case in CASES if case.native))
    layer, case = Layer(step), step.case
    kt = TYPES[case.dtype], step.kt_offset, TYPES[case.kt_dtype]
    for page in ([len(step.bytes), 0, 1], [-1, 0, 1], [1, -1, 1], [1, case.block_size // case.page_size, 1]):
        table = torch.tensor([[1, 0, 1], page], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="page 1 does not exist"):
            ops.summarise_pages(layer.kv_cache, table, *kt, case.page_size, step.native_layout)
    with pytest.raises(RuntimeError, match="pages must be contiguous int32"):
        ops.summarise_pages(layer.kv_cache, table.long(), *kt, case.page_size, step.native_layout)
    with pytest.raises(RuntimeError, match="there is no KT table"):
        ops.summarise_pages(layer.kv_cache, table, *kt, 0, step.native_layout)


def test_refuses_an_unknown_instruction_set() -> None:
    with pytest.raises(RuntimeError, match="no kernels named mmx"):
        ops.set_isa("mmx")


def test_schemas_and_fakes() -> None:
    """``opcheck`` copies a cache without what lies behind it, so that it cannot have a KT table."""
    layer = Layer(step_of(EDGES[0]))
    arguments = layer.arguments(kv_cache=layer.kv_cache.clone())
    torch.library.opcheck(ops.decode.default, (), arguments, test_utils=("test_schema", "test_faketensor"))
    step = step_of(next(case for case in CASES if case.native))
    layer = Layer(step)
    with FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(x) for x in (layer.kv_cache, torch.zeros(1, 3, dtype=torch.int32), step.native_layout)
        ]
        kt = TYPES[step.case.dtype], step.kt_offset, TYPES[step.case.kt_dtype], step.case.page_size
        assert ops.summarise_pages(*fakes[:2], *kt, fakes[2]) is None
    assert torch.equal(layer.bytes, step.bytes)


@pytest.mark.parametrize("wish", ["portable", "avx9"])
def test_an_instruction_set_can_be_wished_for(wish: str) -> None:
    program = "from vllm_rocketkv.kernels import cpu; print(cpu.ops.isa())"
    environment = os.environ | {"ROCKETKV_CPU_ISA": wish}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    if wish == "portable":
        assert ended.stdout.split() == ["portable"]
    else:
        assert ended.stderr.splitlines()[-1].startswith("ImportError: rocketkv: ROCKETKV_CPU_ISA is 'avx9', but this")
