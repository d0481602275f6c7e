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
from vllm_rocketkv.kernels.options import Estimator

NEAR = 2e-5
"""Relative difference of two float64 scores that float32 need not tell apart."""
LEAST = 1e-30
"""Scores below this are as good as none."""
NEAR_SUM = 4e-6
"""The same of sums whose terms have both signs, relative to the sum of their absolute values."""


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
    estimator: Estimator = "hsa"
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

    def budget(self, request: int) -> tuple[int, int]:
        """``topk`` and ``dense_below`` of a request."""
        return self.topk, self.dense_below

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
    topk: int
    dense_below: int
    scores: Tensor | None = None  # the reference's, [Hkv, pages]
    slack: Tensor | None = None  # [Hkv] difference of two scores that float32 need not tell apart; None: NEAR of them
    selected: list[list[int]] = field(default_factory=list)


def rows_of(case: DecodeCase, tokens: Sequence[int]) -> list[Row]:
    places = iter(tokens)
    return [
        Row(r, n - rows + 1 + i, next(places), *case.budget(r))
        for r, (n, rows) in enumerate(case.requests)
        for i in range(rows)
    ]


def rows_table(case: DecodeCase, rows: Sequence[Row], table_row: list[int], first_block: list[int]) -> Tensor:
    """What all devices' kernels are told of rows, of requests whose blocks begin at these places in the block table."""
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
    """Set the rows' scores and selected tokens. ``bounds``: of a request's first n keys, as numbers, by page; where pages
    are ranked by means, these, twice."""
    for row in rows:
        n = row.num_tokens
        if n <= row.dense_below or not case.page_size:
            row.selected = [list(range(n))] * case.num_kv_heads
            continue
        low, high = bounds(row.request, n)
        scores, terms = score(case, query[row.token], low, high, n)
        row.slack = None if terms is None else NEAR_SUM * terms
        row.scores = with_exact_ties(scores, terms)
        row.selected = choose(case, row.scores, n, row.topk)


def score(case: DecodeCase, query: Tensor, low: Tensor, high: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
    """The reference's scores of pages, and where these can be negative the largest sum of their terms' magnitudes ``[Hkv]``."""
    if case.estimator == "hsa":
        temperature = "adaptive" if case.adaptive else "constant"
        return reference.hsa_scores(query, low, high, n, case.page_size, case.topr, temperature), None
    groups = query.double().unflatten(0, (case.num_kv_heads, -1))
    if case.estimator == "quest":
        factors = groups.abs().sum(1)
        scores = reference.quest_scores(query, low, high, n, case.page_size)
    else:
        factors = groups.mean(1).abs()
        scores = reference.mean_scores(query, low, n, case.page_size)
    largest = torch.maximum(low.double().abs(), high.double().abs()).clamp(max=2.0**64)
    return scores, (largest @ factors[..., None]).amax((1, 2))


def choose(case: DecodeCase, scores: Tensor, n: int, topk: int | None = None) -> list[list[int]]:
    granularity, topk = "page" if case.by_page else "token", case.topk if topk is None else topk
    return reference.hsa_choose(scores, n, case.page_size, topk, granularity, case.sinks, case.recent)


def with_exact_ties(scores: Tensor, terms: Tensor | None = None) -> Tensor:
    """Scores that differ by float64's rounding alone made equal. ``terms`` [Hkv]: magnitudes of what the scores are sums of;
    None: the scores'."""
    ordered, order = scores.sort(-1)
    is_tied = torch.zeros_like(ordered, dtype=torch.bool)
    is_tied[..., 1:] = ordered.diff() <= (1e-9 * ordered[..., 1:] if terms is None else 1e-12 * terms[:, None])
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
            slack = NEAR * max(a, b) if row.slack is None else float(row.slack[head])
            assert abs(a - b) <= slack + LEAST, f"head {head} reads {token} ({a}), not {other} ({b})"
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
        slack = (NEAR * edge if row.slack is None else float(row.slack[len(result)])) + LEAST
        result.append(not any(s != edge and abs(s - edge) <= slack for s in others))
    return result
