# SPDX-License-Identifier: Apache-2.0
"""Decode steps and what ``kernels.reference`` selects in them, for the tests of all kernels of stage 2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_rocketkv.kernels import reference

NEAR = 2e-5
"""Relative difference of two float64 scores that float32 need not tell apart."""
LEAST = 1e-30
"""Scores below this are as good as none."""


@dataclass(frozen=True)
class DecodeCase:
    """One layer's decode step. ``requests``: cached tokens of each after the step, and how many of them it adds (its rows)."""

    requests: tuple[tuple[int, int], ...]
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
    magnitude: float = 1.0  # of keys
    seed: int = 0

    def __str__(self) -> str:
        names = [str(x).removeprefix("torch.") for x in (self.dtype, self.kt_dtype)]
        sizes = [f"D{self.head_size}", f"G{self.group}", f"B{self.block_size}", f"page{self.page_size}"]
        return "-".join([*names, *sizes, *self.details, str(self.seed)])

    @property
    def details(self) -> list[str]:
        """What else its name tells."""
        return []

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def scales(self) -> tuple[float, float]:
        return (0.37, 1.7) if self.dtype.itemsize == 1 else (1.0, 1.0)

    def is_dense(self, num_tokens: int) -> bool:
        """A row of so many tokens reads all of them."""
        return num_tokens <= self.dense_below or not self.page_size


OPTION_AXES: dict[str, list[Any]] = {
    "by_page": [True, False],
    "adaptive": [True, False],
    "sinks": [0, 0, 1, 5, 17],
    "recent": [0, 0, 1, 6, 33],
    "softcap": [0.0, 0.0, 4.0],
}


@dataclass
class Row:
    """A row of the step: ``request`` sees its first ``num_tokens`` tokens; ``token`` is its place in the batch."""

    request: int
    num_tokens: int
    token: int
    scores: Tensor | None = None  # the reference's, [Hkv, pages]
    selected: list[list[int]] = field(default_factory=list)


def rows_of(case: DecodeCase, tokens: Sequence[int]) -> list[Row]:
    places = iter(tokens)
    return [Row(r, n - rows + 1 + i, next(places)) for r, (n, rows) in enumerate(case.requests) for i in range(rows)]


def rows_table(case: DecodeCase, rows: Sequence[Row], table_row: list[int], first_block: list[int]) -> Tensor:
    """``Rows.table``, of requests whose blocks begin at these places in the block table."""
    topr = case.head_size if case.topr is None else case.topr
    table = []
    for row in rows:
        request, n = row.request, row.num_tokens
        later = int(n < case.requests[request][0])
        table.append([row.token, table_row[request], first_block[request], n, topr, later])
    return torch.tensor(table, dtype=torch.int32)


# --------------------------------------------------------------------------------------------- the reference's choice


def choose_for_rows(
    case: DecodeCase, rows: Sequence[Row], query: Tensor, bounds: Callable[[int, int], tuple[Tensor, Tensor]]
) -> None:
    """Set the rows' scores and selected tokens. ``bounds``: of a request's first n keys, as numbers, by page."""
    temperature = "adaptive" if case.adaptive else "constant"
    for row in rows:
        n = row.num_tokens
        if case.is_dense(n):
            row.selected = [list(range(n))] * case.num_kv_heads
            continue
        low, high = bounds(row.request, n)
        scores = reference.hsa_scores(query[row.token], low, high, n, case.page_size, case.topr, temperature)
        row.scores = with_exact_ties(scores)
        row.selected = choose(case, row.scores, n)


def choose(case: DecodeCase, scores: Tensor, n: int) -> list[list[int]]:
    granularity = "page" if case.by_page else "token"
    return reference.hsa_choose(scores, n, case.page_size, case.topk, granularity, case.sinks, case.recent)


def with_exact_ties(scores: Tensor) -> Tensor:
    """Scores that differ by float64's rounding alone made equal."""
    ordered, order = scores.sort(-1)
    is_tied = torch.zeros_like(ordered, dtype=torch.bool)
    is_tied[..., 1:] = ordered.diff() <= 1e-9 * ordered[..., 1:]
    first = torch.arange(ordered.shape[-1]).masked_fill(is_tied, 0).cummax(-1).values
    return torch.empty_like(scores).scatter_(-1, order, ordered.gather(-1, first))


# --------------------------------------------------------------------------------------------- a kernel's choice


def assert_equally_good(case: DecodeCase, row: Row, selected: list[list[int]]) -> int:
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


def clear_heads(case: DecodeCase, row: Row) -> list[bool]:
    """Whether no page's score is as good as that of the last page which a KV head selects for its score, unless it is the
    very same: whether the reference's choice is the only good one."""
    if row.scores is None:
        return [True] * case.num_kv_heads
    page, n = case.page_size, row.num_tokens
    forced = {t for t in range(n) if t < case.sinks or t >= n - case.recent}
    if case.by_page:
        forced_pages = {t // page for t in forced}
        forced = {t for t in range(n) if t // page in forced_pages}
    free = set(range(n)) - forced
    result = []
    for scores, selected in zip(row.scores.tolist(), row.selected, strict=True):
        taken = [scores[t // page] for t in set(selected) - forced]
        edge = min(taken, default=0.0)
        others = [scores[p] for p in {t // page for t in free}] if 0 < len(taken) < len(free) else []
        result.append(not any(s != edge and abs(s - edge) <= NEAR * edge + LEAST for s in others))
    return result
