# SPDX-License-Identifier: Apache-2.0
"""What stage 2's C++ ops refuse before they write anything, their schemas, and the choice of an instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.decode_cases import CASES, EDGES, Case
from tests.decode_step import Layer, step_of
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from vllm_rocketkv.kernels.cpu import TYPES, ops


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
    refused("score_offset must lie behind", score_offset=step.kt_offset)


def test_refuses_an_estimator_that_the_kt_table_is_not_for() -> None:
    refused("unknown estimator 3", estimator=3)
    refused("unknown estimator -1", estimator=-1)
    refused("pages hold their keys' bounds, which estimator 2", estimator=2)
    for estimator in (0, 1):
        refused(f"pages hold their keys' mean, which estimator {estimator}", kt_is_mean=True, estimator=estimator)
    step = step_of(Case(dense_below=1 << 30))  # nothing is ranked
    Layer(step).decode(estimator=2)
    Layer(step).decode(kt_is_mean=True)


def test_refuses_rows_that_leave_the_batch_or_the_table() -> None:
    step = step_of(Case())
    blocks, requests = step.table.shape[1], step.table.shape[0]
    message = "row 2 leaves the batch"
    for column, values in enumerate(
        [(-1, step.batch), (-1, requests), (-1, blocks), (0, 32 * blocks + 1), (0,), (), (0, -1)]  # not of `later`
    ):
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
    kt, mean_and_scores = (TYPES[case.dtype], step.kt_offset, TYPES[case.kt_dtype]), (case.estimator == "mean", 0)
    for page in ([len(step.bytes), 0, 1], [-1, 0, 1], [1, -1, 1], [1, case.block_size // case.page_size, 1]):
        table = torch.tensor([[1, 0, 1], page], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="page 1 does not exist"):
            ops.summarise_pages(layer.kv_cache, table, *kt, case.page_size, *mean_and_scores, step.native_layout)
    with pytest.raises(RuntimeError, match="pages must be contiguous int32"):
        ops.summarise_pages(layer.kv_cache, table.long(), *kt, case.page_size, *mean_and_scores, step.native_layout)
    with pytest.raises(RuntimeError, match="there is no KT table"):
        ops.summarise_pages(layer.kv_cache, table, *kt, 0, *mean_and_scores, step.native_layout)


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
        assert ops.summarise_pages(*fakes[:2], *kt, False, 0, fakes[2]) is None
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
