# SPDX-License-Identifier: Apache-2.0
"""Decode steps that the C++ kernels of stage 2 are tested on: shapes, options and lengths, every axis several times."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.combinations import combined
from tests.decode_oracle import OPTION_AXES, DecodeCase
from vllm_rocketkv.kernels.cpu import TYPES

KV_TYPES = list(TYPES)
KT_TYPES = [torch.bfloat16, torch.float8_e5m2]


@dataclass(frozen=True)
class Case(DecodeCase):
    requests: tuple[tuple[int, int], ...] = ((317, 1), (64, 1), (201, 4))
    budgets: tuple[tuple[int, int], ...] = ()  # topk and dense_below of each request in turn; else the case's
    native: str = ""  # vLLM's layout of that name; else private blocks
    is_shared: bool = False  # another layer has written the cache
    is_fused: bool = False  # query, key and value are slices of one tensor

    @property
    def details(self) -> list[str]:
        return [self.native or "private", *([self.estimator] if self.estimator != "hsa" else [])]

    def budget(self, request: int) -> tuple[int, int]:
        return self.budgets[request % len(self.budgets)] if self.budgets else super().budget(request)

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
        **OPTION_AXES,
        "estimator": ["hsa", "quest", "hsa", "mean"],
        "budgets": [(), (), (), ((16, 40), (50, 1 << 30), (7, 0))],
        "native": ["", "", "vec", "vec16"],
        "is_shared": [False, False, False, True],
        "is_fused": [True, False],
    }
    cases = []
    for i, values in enumerate(combined(axes, count, draw)):
        case = Case(**values, seed=i)
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


CASES = generated_cases(100)
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
for _estimator in ("quest", "mean"):
    _same: dict[str, Any] = {"estimator": _estimator, "by_page": True, "topk": 40, "dense_below": 40}
    EDGES += [
        # 32 pages a block and a multiple of it, one head and several: with bfloat16 bounds pairs of rows are multiplied, of
        # one or three parts of a query.
        Case(requests=((1400, 1), (901, 3)), block_size=128, page_size=4, group=1, head_size=80, **_same),
        Case(requests=((1400, 1), (901, 3)), block_size=128, page_size=2, group=8, head_size=256, **_same),
        Case(requests=((700, 1),), block_size=96, page_size=1, dtype=torch.float16, model_dtype=torch.float16, **_same),
        Case(
            requests=((300, 1),),
            block_size=128,
            dtype=torch.float32,
            model_dtype=torch.float32,
            magnitude=99.0,
            **_same,
        ),
        Case(requests=((300, 2),), kt_dtype=torch.float8_e5m2, dtype=torch.float8_e4m3fn, num_kv_heads=1, **_same),
        # Rows that read everything beside others that select, each so much of its own.
        Case(requests=((90, 2),) * 9, budgets=((16, 16), (1 << 30, 1 << 30), (60, 88), (4, 89), (5, 0)), **_same),
        Case(requests=((160, 1),) * 20, group=1, num_kv_heads=1, **_same),  # more units than threads
        Case(requests=((90, 33), (70, 70)), page_size=16, **_same),  # the rows of several pages
        Case(requests=((5, 1), (6, 1), (3, 1)), **(_same | {"topk": 1, "dense_below": 0})),
    ]
