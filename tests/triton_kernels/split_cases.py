# SPDX-License-Identifier: Apache-2.0
"""Steps that ``test_decode_split.py`` runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.combinations import combined
from tests.decode_oracle import OPTION_AXES
from tests.triton_kernels.decode_step import TritonCase
from vllm_rocketkv.kernels.options import Estimator

FP8 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case(TritonCase):
    requests: tuple[tuple[int, int], ...] = ((317, 1), (64, 1), (201, 3))
    dtype: torch.dtype = torch.float32
    model_dtype: torch.dtype = torch.float32
    num_kv_heads: int = 1
    num_splits: int = 4
    page_tile: int = 16
    select_tile: int = 32

    @property
    def details(self) -> list[str]:
        return [*super().details, f"S{self.num_splits}"]

    @property
    def capacity(self) -> int:
        return max(n for n, _ in self.requests) + 70


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis, combined at random."""
    draw = random.Random(2502)
    axes: dict[str, list[Any]] = {
        "dtype": [torch.float32, torch.bfloat16, torch.float16, *FP8],
        "model_dtype": [torch.bfloat16, torch.float32, torch.float16],
        "kt_dtype": [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn],
        "head_size": [64, 80, 128, 96, 256, 64],
        "num_kv_heads": [1, 2, 1],
        "group": [1, 3, 4, 5, 8],
        "block_size": [32, 48, 128, 16],
        "page_size": [1, 2, 4, 16],
        "topr": [None, None, 1, 7, 31],
        "topk": [7, 16, 33, 100],
        **OPTION_AXES,
        "estimator": ["hsa", "quest", "hsa", "mean"],
        "is_hnd": [True, False],
        "num_splits": [1, 2, 3, 4, 2],
        "select_tile": [16, 64],
    }
    cases = []
    for i, values in enumerate(combined(axes, count, draw)):
        case = Case(**values, seed=i)
        if case.dtype not in FP8:
            case = replace(case, model_dtype=case.dtype)
        topk, page, block = case.topk, case.page_size, case.block_size
        dense = draw.choice([0, topk, topk, topk + page, 2 * topk])
        corners = [1, page, page + 1, block, block + 1, dense, dense + 1, topk + 1, topk + page + 1]
        lengths = [draw.choice([n for n in corners if n]), draw.randint(150, 400)]
        requests = [*((n, 1) for n in lengths), (max(dense, topk) + 2 * page + 1, min(page + 1, 3))]
        draw.shuffle(requests)
        cases.append(replace(case, requests=tuple(requests), dense_below=dense))
    return cases


SUM_ESTIMATORS: tuple[Estimator, ...] = ("quest", "mean")
CASES = generated_cases(28)
EDGES = [
    Case(page_size=0, requests=((300, 1), (1, 1), (40, 1)), num_splits=2),  # no KT table: everything is read
    Case(requests=((413, 1),), group=1, num_splits=16),
    Case(requests=((1200, 1),), topk=512, page_size=2, by_page=True, block_size=128, select_tile=256, page_tile=128),
    Case(requests=((500, 1),), dense_below=1 << 30, num_splits=16),
    Case(requests=((150, 1), (149, 1)), sinks=40, recent=41),  # the forced tokens exceed the budget
    Case(requests=((150, 1), (149, 1)), sinks=400),  # all are forced
    Case(requests=((149, 1),), recent=400, by_page=True),
    Case(requests=((160, 1), (159, 1)), topk=400, dense_below=0),  # the budget exceeds the tokens
    Case(requests=((159, 1),), topk=400, dense_below=0, by_page=True, sinks=3),
    Case(requests=((90, 5),), topk=16, dense_below=16, page_size=4, num_splits=2),  # the rows of several pages
    Case(requests=((5, 1), (3, 1), (6, 1)), topk=2, dense_below=0, recent=1),  # one page, two pages
    Case(requests=((161, 1),), group=48, topk=20, dense_below=20),
    Case(requests=((300, 1),), magnitude=5.0),
    Case(requests=((230, 1),), page_size=32, sinks=33, recent=33, topk=100),  # pages that are forced in part
    Case(requests=((229, 1),), page_size=32, sinks=33, recent=2, topk=37, dense_below=37),  # budget of a page's part
]
for _estimator in SUM_ESTIMATORS:
    _same: dict[str, Any] = {"estimator": _estimator, "by_page": True}
    EDGES += [
        Case(requests=((413, 1),), group=1, num_splits=16, **_same),
        Case(requests=((1200, 1),), topk=512, page_size=2, block_size=128, select_tile=256, page_tile=128, **_same),
        Case(requests=((300, 1),), group=1, page_size=1, topk=250, **_same),  # many of the chosen are below 0
        Case(requests=((230, 1),), page_size=32, sinks=33, recent=33, topk=100, estimator=_estimator),
        Case(requests=((90, 5),), topk=16, dense_below=16, num_splits=2, **_same),  # the rows of several pages
        Case(requests=((161, 1),), group=48, topk=20, dense_below=20, **_same),
        Case(requests=((5, 1), (3, 1), (6, 1)), topk=2, dense_below=0, **_same),
        Case(requests=((160, 1), (159, 1)), topk=400, dense_below=0, **_same),
        Case(requests=((160, 1),), page_size=0, **_same),
    ]
