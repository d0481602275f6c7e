# SPDX-License-Identifier: Apache-2.0
"""Time on a GPU: events around eager calls, and around replays of a CUDA graph, over data that is not in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COPY_BYTES = 1 << 30
WARM_UPS = 3
ROTATION = 4
"""All copies of a case's data together, in second-level caches: no call finds its data there."""
MAX_COPIES = 64
GRAPH_CALLS = 16
"""Least calls in one graph, of short ones: what replaying it costs is shared by them."""
LONGEST = 0.05
"""Seconds that a graph may take because of that."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    eager: float
    """Between events around calls one after another: what the host needs to launch is in it where that is longer."""
    graph: float | None
    """A share of a replayed graph; None where the calls could not be captured."""
    note: str = ""

    @property
    def best(self) -> float:
        """The graph's time, if there is one."""
        return self.eager if self.graph is None else self.graph


def copies_for(bytes_touched: float, device: torch.device) -> int:
    """Copies of the data, so that second-level caches cannot hold what calls in rotation read."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MAX_COPIES, -(-ROTATION * cache // max(int(bytes_touched), 1))))


def events(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, by events."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(call: Callable[[int], Any], copies: int, with_graph: bool = True, repeats: int = 10) -> Timing:
    """Time of ``call(i)``, which works on copy ``i`` of its data, in rotation."""
    for i in range(max(copies, WARM_UPS)):  # compiles, allocates, touches all data
        call(i % copies)
    torch.cuda.synchronize()
    one = events(lambda: call(0), 1)
    calls = copies * max(1, min(-(-GRAPH_CALLS // copies), int(LONGEST / (one * copies))))

    def rotate() -> None:
        for i in range(calls):
            call(i % copies)

    eager = events(rotate, repeats) / calls
    if not with_graph:
        return Timing(eager, None)
    try:
        graph = capture(rotate)
    except RuntimeError as error:
        torch.cuda.synchronize()
        return Timing(eager, None, f"not captured: {' '.join(str(error).split())[:120]}")
    graph.replay()
    return Timing(eager, events(graph.replay, repeats) / calls)


def capture(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of what ``work`` launches, after a run on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy: what all other bandwidths are shares of."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * COPY_BYTES / events(lambda: target.copy_(source), 20)
