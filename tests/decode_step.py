# SPDX-License-Identifier: Apache-2.0
"""One decode step for the tests of ``csrc/cpu``: a case's numbers and cache, the op on it, and what ``kernels.reference`` says.

What the op selected is read off its output: with ``scale`` 0 every selected token weighs the same, and with values that are
powers of two, each in one dimension, the sums name the tokens (``Layer.selected``). All bytes of a cache that no test
wrote are NaNs, and so are the block table's entries no blocks, and what the step does not read of a fused qkv tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.decode_cases import Case
from tests.decode_oracle import Row, choose_for_rows, rows_of, rows_table
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.cpu import TYPES, ops
from vllm_rocketkv.kernels.options import ESTIMATORS

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
VLLM_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


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
        choose_for_rows(case, self.rows, self.query, self._bounds)

    def _shuffled(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.random).tolist()

    def _place_rows(self) -> None:
        case = self.case
        count = sum(rows for _, rows in case.requests)
        self.batch = count + 2  # two tokens that are not of this step's rows
        self.rows = rows_of(case, sorted(self._shuffled(self.batch)[:count]))

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
        """Store the bounds, or means, of full pages."""
        page, block_size = self.case.page_size, self.case.block_size
        if len(pages):
            keys = self.keys[request][pages[0] * page : (pages[-1] + 1) * page].double()
            low, high = self._summaries(keys)
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

    def _summaries(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """What a page's two entries hold."""
        page, kt_dtype = self.case.page_size, self.case.kt_dtype
        if self.case.estimator == "mean":
            return (reference.page_means(keys, page, kt_dtype),) * 2
        return reference.page_summaries(keys, page, kt_dtype)

    def _bounds(self, request: int, n: int) -> tuple[Tensor, Tensor]:
        keys = self.keys[request][:n].double()
        low, high = self._summaries(keys)
        return low.double() * self.key_scale, high.double() * self.key_scale


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
    def table(self) -> Tensor:
        """All rows, as the op takes them."""
        step = self.step
        table = rows_table(self.case, step.rows, step.table_row, step.first_block)
        budgets = [[row.topk, row.dense_below, i % 3] for i, row in enumerate(step.rows)]
        return torch.cat([table, torch.tensor(budgets, dtype=torch.int32)], 1)

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
            "kt_is_mean": case.estimator == "mean",
            "score_offset": 0,
            "native_layout": step.native_layout,
            "scale": case.scale,
            "softcap": case.softcap,
            "max_tokens": max(n for n, _ in case.requests),
            "sink_tokens": case.sinks,
            "recent_tokens": case.recent,
            "by_page": case.by_page,
            "adaptive": case.adaptive,
            "estimator": ESTIMATORS.index(case.estimator),
        }
        assert other.keys() <= arguments.keys()
        return arguments | other

    def decode(self, **other: Any) -> Tensor:
        arguments = self.arguments(**other)
        ops.decode(**arguments)
        return arguments["output"]

    def selected(self, first_head: int = 0) -> list[list[list[int]]]:
        """The tokens that each row's KV heads attend to, once keys are written, as the output of a group's heads from this one
        on tells. Destroys the values."""
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
                of_group = of_group[first_head:]
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
