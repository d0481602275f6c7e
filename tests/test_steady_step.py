# SPDX-License-Identifier: Apache-2.0
"""A decode step costs the same Python and the same torch calls for any number of requests, and asks for no memory.

Counted is what ``RocketKVMetadataBuilder.build`` and ``RocketKVImpl.forward`` do, on the real classes without an engine: every
bytecode of this package, every torch op, and every op whose result has memory of its own. What the C++ ops do inside is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vllm_rocketkv
from tests.kernel_fixtures import one_thread  # noqa: F401  (used by all tests)
from tests.layer_harness import World
from tests.layer_request import Request, Shape, Step, cut
from vllm_rocketkv import compat
from vllm_rocketkv.options import USED_BY

PACKAGE = str(Path(vllm_rocketkv.__file__).parent)
SHAPE = Shape(num_kv_heads=2, group=2)
# Selects: dense_below is 48, and at least 54 tokens are kept.
OPTIONS = {
    "prompt_budget": 64,
    "window_size": 16,
    "kernel_size": 7,
    "topk_tokens": 32,
    "sink_tokens": 3,
    "recent_tokens": 6,
}
LONG, SHORT = 150, 40
POLICIES = ["rocketkv", "snapkv", "hsa", "quest"]


@dataclass
class Work:
    """What one step did."""

    bytecodes: int = 0
    """Of this package's Python."""
    calls: int = 0
    """Of this package's functions."""
    ops: list[str] = field(default_factory=list)
    allocated: list[tuple[str, int]] = field(default_factory=list)
    """Ops whose result is in no storage that they were given, with its bytes."""

    @property
    def allocated_bytes(self) -> int:
        return sum(size for _, size in self.allocated)


class TorchCounter(TorchDispatchMode):
    """Notes every op and every new storage."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.work.ops.append(str(func))
        for address, size in storages(result).items():
            if address not in given:
                self.work.allocated.append((str(func), size))
        return result


def storages(tree: Any) -> dict[int, int]:
    """Address and size of all memory behind the tensors of ``tree``."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@contextmanager
def python_counted(work: Work) -> Iterator[None]:
    """Counts bytecodes, not calls alone: a loop over requests need not call anything."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        work.calls += event == "call"
        work.bytecodes += event == "opcode"
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Steady:
    """Requests whose prompts are computed, decoding together."""

    def __init__(self, path: Path, policy: str, num_long: int, num_short: int = 0) -> None:
        path.mkdir()
        options = {name: value for name, value in OPTIONS.items() if policy in USED_BY[name]}
        self.world = World(SHAPE, options | {"policy": policy}, path, num_blocks=240)
        lengths = [LONG] * num_long + [SHORT] * num_short
        self.requests = [
            Request(N, [*cut(N), *[Step(1, 1)] * 70], SHAPE, self.world.config, seed) for seed, N in enumerate(lengths)
        ]
        self.layer = self.world.layers[0]

    def prefill(self) -> Work:
        return self.step(LONG)

    def decode(self, num_steps: int = 1) -> Work:
        """The last step's work."""
        for _ in range(num_steps):
            work = self.step(1)
        return work

    def step(self, most_tokens: int) -> Work:
        """One step, with nothing of the harness inside what is counted."""
        rows = []
        for request in self.requests:
            start = request.computed
            end = min(start + most_tokens, max(request.num_prompt, start + 1))
            self.world.reserve(request, start, end)
            rows.append((request.row, start, end, request.num_prompt))
            request.computed = end
        common = self.world.common_metadata(rows, 0)
        compat._v1_prompt_lens = torch.tensor([request.num_prompt for request in self.requests], dtype=torch.int32)
        data = [torch.cat([r.query[a:b] for r, (_, a, b, _) in zip(self.requests, rows, strict=True)])]
        data += [torch.cat([r.key[a:b] for r, (_, a, b, _) in zip(self.requests, rows, strict=True)])] * 2
        output = torch.empty_like(data[0])
        work = Work()
        try:
            with torch.inference_mode(), TorchCounter(work), python_counted(work):
                self.metadata = self.world.builder.build(0, common)
                self.layer.impl.forward(self.layer, *data, self.layer.kv_cache, self.metadata, output)
        finally:
            compat._v1_prompt_lens = None
        for request, (_, _, end, _) in zip(self.requests, rows, strict=True):
            if request.is_evicted and not request.is_compact and end >= request.num_prompt:
                self.world.compact(request)
        assert output.isfinite().all()
        return work


def steady(path: Path, policy: str, num_long: int, num_short: int = 0) -> Steady:
    """Past the step that computes the prompts and the first that decodes, which fill tables once."""
    batch = Steady(path, policy, num_long, num_short)
    batch.prefill()
    batch.decode()
    return batch


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_of_16_requests_is_the_python_of_one(policy: str, tmp_path: Path) -> None:
    one, many = (steady(tmp_path / str(n), policy, n).decode() for n in (1, 16))
    assert many.bytecodes == one.bytecodes > 0
    assert many.calls == one.calls > 0
    assert many.ops == one.ops
    assert "rocketkv_cpu.decode.default" in one.ops
    assert "rocketkv_cpu.plan_step.default" in one.ops


@pytest.mark.parametrize("policy", POLICIES)
def test_short_requests_beside_long_ones_change_nothing_of_that(policy: str, tmp_path: Path) -> None:
    """Their tokens are a batch of their own to vLLM's op. (Two, since torch drops a dimension of size 1 in an op of its own.)"""
    few, many = (steady(tmp_path / str(n), policy, n, n).decode() for n in (2, 8))
    assert (many.bytecodes, many.calls, many.ops) == (few.bytecodes, few.calls, few.ops)
    assert [op for op, _ in many.allocated] == [op for op, _ in few.allocated]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_asks_for_no_memory(policy: str, tmp_path: Path) -> None:
    batch = steady(tmp_path / "batch", policy, 16)
    for _ in range(3):
        assert batch.decode().allocated == []


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_mixed_step_asks_for_does_not_grow(policy: str, tmp_path: Path) -> None:
    """After 40 tokens, that is a block and more, it is the same: what vLLM's op is given and gives back, one token a request.
    Rows of the block table are as wide as the runner makes them, and vLLM's metadata is vLLM's."""
    batch = steady(tmp_path / "batch", policy, 4, 4)
    early = batch.decode()
    late = batch.decode(40)
    assert late.ops == early.ops
    token = SHAPE.num_heads * SHAPE.head_size * SHAPE.dtype.itemsize
    theirs = ("aten.index_select.default", "_C.get_scheduler_metadata.default")
    for work in (early, late):
        assert [size for op, size in work.allocated if op not in theirs] == [4 * token] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_stay_where_they_are(policy: str, tmp_path: Path) -> None:
    batch = steady(tmp_path / "batch", policy, 16)
    before = buffers(batch)
    batch.decode(40)
    assert buffers(batch) == before
    table = batch.metadata.rows.table
    assert table.untyped_storage().data_ptr() == batch.world.builder.planner.rows.untyped_storage().data_ptr()


def buffers(batch: Steady) -> dict[str, int]:
    """Address of every tensor that planner, prompt table and the layer's cache hold."""
    planner = batch.world.builder.planner
    owners = {"planner": planner, "prompts": planner.prompts, "cache": batch.layer.kv_cache._rocketkv}
    tensors = {
        f"{owner}.{name}": value.data_ptr()
        for owner, thing in owners.items()
        for name, value in vars(thing).items()
        if isinstance(value, torch.Tensor)
    }
    assert {"planner.rows", "planner.counts", "prompts.tensor", "cache.native_layout"} <= tensors.keys()
    return tensors


def test_the_counters_see_work_of_single_requests(tmp_path: Path) -> None:
    """Prompts that become complete are handled one by one, in Python and with memory of their own."""
    one, two = (Steady(tmp_path / str(n), "rocketkv", n).prefill() for n in (1, 2))
    assert two.bytecodes > one.bytecodes
    assert two.calls > one.calls
    assert len(two.ops) > len(one.ops)
    assert two.allocated_bytes > one.allocated_bytes > 0
