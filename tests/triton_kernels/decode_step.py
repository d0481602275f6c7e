# SPDX-License-Identifier: Apache-2.0
"""A decode step for the Triton kernels: its numbers in a paged cache, and the reference's choice.

All bytes of the cache that hold nothing are NaNs, as are queries of other tokens and heads; the block table's entries beyond
a row's blocks are no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.decode_oracle import DecodeCase, choose_for_rows, rows_of, rows_table
from tests.triton_kernels.paged import LARGEST, bound_values, make_cache, page_entries, random_tokens
from vllm_rocketkv.kernels.options import DecodeOptions

NEWEST_PAGES = [
    ([-3.0, 7.0], "mean", True),
    ([3.0, -2.0, 1.0], "mean", False),
    ([1.5], "mean", True),
    ([0.75, 0.75, 0.75], "mean", False),
    ([-3.0, 7.0], "quest", True),
    ([0.75, -9.0], "quest", False),
]
"""Keys of a newest page, and whether it is better than one whose keys are 1."""


@dataclass(frozen=True)
class TritonCase(DecodeCase):
    is_hnd: bool = True

    @property
    def details(self) -> list[str]:
        return [] if self.estimator == "hsa" else [self.estimator]

    @property
    def is_mean(self) -> bool:
        return self.estimator == "mean"

    def options(self, scale: float) -> DecodeOptions:
        softcap = self.softcap if scale else 0.0
        budgets = self.dense_below, self.topk, self.sinks, self.recent
        return DecodeOptions(scale, softcap, *budgets, self.by_page, self.adaptive, self.estimator)


class Step:
    """A case's numbers, its cache and the reference's choice. ``query``: of the rows, in their order."""

    def __init__(self, case: TritonCase, keys: list[Tensor] | None = None, query: Tensor | None = None) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        H, D = case.num_kv_heads, case.head_size
        count = sum(rows for _, rows in case.requests)
        self.batch = count + 2  # two tokens that are not of this step's rows
        self.tokens = sorted(torch.randperm(self.batch, generator=self.random)[:count].tolist())
        self.rows = rows_of(case, self.tokens)
        wide = torch.full((self.batch, H * case.group + 3, D + 16), torch.nan, dtype=case.model_dtype)
        self.query = wide[:, 2:-1, :D]
        drawn = random_tokens((count, H * case.group, D), torch.float32, case.seed, 1.5) if query is None else query
        self.query[self.tokens] = drawn.to(case.model_dtype)
        sizes = [(n, H, D) for n, _ in case.requests]
        of_keys = keys or [
            random_tokens(size, torch.float32, 100 + r, case.magnitude / case.scales[0]) for r, size in enumerate(sizes)
        ]
        self.keys = [x.to(case.dtype) for x in of_keys]
        self.values = [random_tokens(size, case.dtype, 200 + r) for r, size in enumerate(sizes)]
        self.real_keys = [x.double() * case.scales[0] for x in self.keys]
        self.real_values = [x.double() * case.scales[1] for x in self.values]
        self._lay_out()
        choose_for_rows(case, self.rows, self.query, self.bounds)

    def _lay_out(self) -> None:
        case = self.case
        counts = [-(-n // case.block_size) for n, _ in case.requests]
        sizes = (sum(counts) + 2, case.num_kv_heads, case.block_size, case.head_size, case.dtype, case.kt_dtype)
        scales = {"key_scale": case.scales[0], "value_scale": case.scales[1]}
        others = {"is_hnd": case.is_hnd, "kt_is_mean": case.is_mean, "seed": case.seed}
        self.cache = make_cache(*sizes, case.page_size, **others, **scales)
        self.view = self.cache.view
        self.blocks = [self.cache.add(*of_request) for of_request in zip(self.keys, self.values, strict=True)]
        table = torch.full((len(counts), max(counts) + 9), 1 << 30, dtype=torch.int32)
        self.block_table = table[:, 2:-3]  # its rows are not adjacent
        self.table_row = torch.randperm(len(counts), generator=self.random).tolist()
        self.first_block = [r % 4 for r in range(len(counts))]
        for blocks, row, first in zip(self.blocks, self.table_row, self.first_block, strict=True):
            self.block_table[row, first : first + len(blocks)] = blocks

    def bounds(self, request: int, n: int) -> tuple[Tensor, Tensor]:
        """Of the pages of the request's first n keys, as the KT dtype has them; or their means, twice."""
        case = self.case
        entries = page_entries(self.keys[request][:n], case.page_size, case.kt_dtype, case.is_mean)
        low, high = (bound_values(x).clamp(-LARGEST, LARGEST) * case.scales[0] for x in entries)
        return low, high

    def table(self) -> Tensor:
        """``Rows.table``."""
        return rows_table(self.case, self.rows, self.table_row, self.first_block)
