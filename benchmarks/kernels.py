# SPDX-License-Identifier: Apache-2.0
"""Series 4: each kernel alone: bytes moved, achieved bandwidth against a copy measured in the same run.

A case is a function decorated with `@kernel(name)` that returns a `Case`: a callable that works on the i-th of several copies of
the data, and the bytes that one call must move. Calls rotate over the copies, so none finds its data in the last-level cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from benchmarks import engines
from benchmarks.engines import say
from benchmarks.machine import l3_bytes
from benchmarks.store import Results

SERIES = "kernels"
COPY = "copy"
COPY_BYTES = 256 << 20
ROTATION = 6  # all copies of a case's data together, in last-level caches
MIN_SECONDS, MIN_CALLS, MAX_CALLS = 1.0, 15, 2000

# The demo model's attention.
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 128


class KernelMissingError(Exception):
    """What a case raises if this build or machine has no such kernel."""


@dataclass(frozen=True)
class Case:
    """A kernel with data: `call(i)` works on copy i, `bytes_moved` are read and written by one call."""

    call: Callable[[int], Any]
    copies: int
    bytes_moved: int


CASES: dict[str, Callable[[], Case]] = {}


def kernel(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a case under a name."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in CASES, f"two kernels are named {name}"
        CASES[name] = make
        return make

    return register


def copies_for(bytes_of_one: int) -> int:
    """How many copies of the data no last-level cache can hold together."""
    return max(2, -(-ROTATION * l3_bytes() // bytes_of_one))


def copy_bandwidth(rounds: int = 9) -> dict[str, Any]:
    """A STREAM-like copy by all threads: bytes read and written per second, median of `rounds`."""
    import torch

    source = torch.ones(max(COPY_BYTES, 4 * l3_bytes()), dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    moved = 2 * source.numel()
    middle = statistics.median(seconds[2:])
    return {"bytes": moved, "seconds": middle, "bandwidth": moved / middle, "share_of_copy": 1.0, "calls": rounds}


def measure(case: Case) -> dict[str, Any]:
    """Median time of a call, over at least a second, in rotation."""
    for copy in range(case.copies):  # touches all memory
        case.call(copy)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < MIN_CALLS or (time.perf_counter() - began < MIN_SECONDS and len(seconds) < MAX_CALLS):
        copy = len(seconds) % case.copies
        started = time.perf_counter()
        case.call(copy)
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds)
    return {
        "bytes": case.bytes_moved,
        "seconds": middle,
        "fastest": min(seconds),
        "bandwidth": case.bytes_moved / middle,
        "calls": len(seconds),
        "copies": case.copies,
    }


def measure_all(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The copy and the named cases, in this process."""
    import torch

    copy = copy_bandwidth()
    found = {COPY: copy | {"threads": torch.get_num_threads()}}
    for name in names:
        try:
            found[name] = measure(CASES[name]())
            found[name]["share_of_copy"] = found[name]["bandwidth"] / copy["bandwidth"]
        except KernelMissingError as missing:
            found[name] = {"skipped": str(missing)}
        except Exception as error:  # one broken kernel does not hide the others
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def estimate(options: argparse.Namespace, results: Results) -> float:
    """Seconds that this series takes, roughly."""
    return 15 + 3.0 * len(selected(options))


def selected(options: argparse.Namespace) -> list[str]:
    """The registered cases whose name holds what was asked for."""
    return [name for name in CASES if options.kernels in name]


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure in a process with the engines' environment; always anew, since the copy must be of the same run."""
    with engines.child_environment(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            found = pool.submit(measure_all, selected(options)).result()
        except BrokenProcessPool:
            found = {name: {"error": "the process died"} for name in selected(options)}
    for name, entry in found.items():
        results.put(SERIES, name, {}, entry)
        say(f"{name}: {sentence(entry)}")


def sentence(entry: dict[str, Any]) -> str:
    """One measurement in words."""
    if failure := entry.get("skipped") or entry.get("error"):
        return str(failure)
    return (
        f"{entry['seconds'] * 1e3:.3f} ms, {entry['bytes'] / 2**20:.1f} MiB, {entry['bandwidth'] / 1e9:.1f} GB/s, "
        f"{entry['share_of_copy']:.0%} of copy"
    )


# ---- cases ----


def dense_case(length: int, batch: int) -> Case:
    """vLLM's own paged attention for `batch` decoding requests of `length` cached tokens: one layer of the demo model, bf16."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, BLOCK, HEAD_DIM, "auto")
    if isa == "amx":
        torch.cpu._init_amx()
    blocks_each = -(-length // BLOCK)
    bytes_moved = batch * length * KV_HEADS * HEAD_DIM * 2 * 2
    copies = copies_for(batch * blocks_each * BLOCK * KV_HEADS * HEAD_DIM * 2 * 2)
    blocks = copies * batch * blocks_each
    cache = torch.randn(blocks, KV_HEADS, BLOCK * 2, HEAD_DIM, dtype=torch.bfloat16)
    keys, values = cache.chunk(2, dim=2)
    # Blocks of a request lie scattered, as in a pool in use.
    tables = (
        torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        .to(torch.int32)
        .view(copies, batch, blocks_each)
    )
    query = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def call(copy: int) -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables[copy],
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )

    return Case(call, copies, bytes_moved)


def _register_dense(length: int, batch: int) -> None:
    kernel(f"vLLM dense decode, {length} tokens, batch {batch}")(lambda: dense_case(length, batch))


for _length in (1024, 2048, 7000, 32768):
    for _batch in (1, 8) if _length < 32768 else (4,):
        _register_dense(_length, _batch)

from benchmarks import kernel_cases  # noqa: E402, F401  (registers this package's kernels)
