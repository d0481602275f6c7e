# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: a captured step must give, replayed on new contents of its buffers, bit for bit what eager launches give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu import speed, timing
from benchmarks.traffic import Attention, Selection
from vllm_rocketkv.kernels.triton.cache import CacheView

BATCH, STEPS = 4, 5
SHAPE = Attention(num_heads=8, num_kv_heads=2, head_size=128)


def clone(view: CacheView) -> CacheView:
    """A cache of its own with the same contents and strides."""
    size = view.kv.untyped_storage().nbytes()
    storage = torch.empty(size, dtype=torch.uint8, device=view.kv.device)
    storage.untyped_storage().copy_(view.kv.untyped_storage())

    def same(tensor: torch.Tensor) -> torch.Tensor:
        return storage.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return replace(view, kv=same(view.kv), kt=same(view.kt))


def graph_series(device: torch.device) -> Iterator[dict[str, Any]]:
    """Replays of the update with either decode, while sequences grow and rows come and go."""
    for name in ("fused", "split"):
        wrong = replays(name, device)
        yield {"part": "graphs", "name": f"update + {name} decode, {STEPS} replays", "failure": wrong}


def replays(name: str, device: torch.device, num_tokens: int = 2046) -> str:
    """What differs; empty if nothing does. ``num_tokens``: what the longest sequence has room for, less one step."""
    selection = Selection(num_tokens=num_tokens, block_size=64)
    step = speed.sparse_step(SHAPE, selection, BATCH, 1, device)
    mirror = replace(step, cache=clone(step.cache), output=torch.empty_like(step.output))
    decode = decoder(name, num_tokens, device)

    def work() -> None:
        mirror.update(0)
        decode(mirror)

    graph = timing.capture(work)
    mirror.cache.kv.untyped_storage().copy_(step.cache.kv.untyped_storage())  # the rehearsal wrote to it
    for number in range(STEPS):
        next_step(step, num_tokens - STEPS + 1 + number)
        for side in (step, mirror):
            side.output.fill_(7.0)
        step.update(0)
        decode(step)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(step.output, mirror.output):
            return f"step {number}: outputs differ"
        if not torch.equal(step.cache.kv, mirror.cache.kv) or not torch.equal(step.cache.kt, mirror.cache.kt):
            return f"step {number}: caches differ"
        inert = step.rows[:, 3] == 0
        if not bool((mirror.output[inert] == 7.0).all()):
            return f"step {number}: a row of padding was written"
    return ""


def next_step(step: speed.SparseStep, longest: int) -> None:
    """New contents in the same buffers: sequences grow over a page's end, and every other time one row is padding."""
    for tensor in (step.query, step.new_key, step.new_value):
        tensor.normal_()
    requests = torch.arange(BATCH, dtype=torch.int32, device=step.rows.device)
    step.rows[:, 3] = longest - requests * (longest // (BATCH + 2))
    if longest % 2:
        step.rows[longest % BATCH, 3] = 0


def decoder(name: str, num_tokens: int, device: torch.device) -> Any:
    """A decode of a ``SparseStep`` with its own workspace."""
    from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode
    from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split

    heads = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_size
    if name == "fused":
        fused = DecodeWorkspace.allocate(BATCH, *heads, num_tokens, 4, device)
        return lambda s: decode(s.query, s.cache, s.output, s.rows, s.block_tables[0], s.options, fused)
    split = SplitWorkspace(BATCH, *heads, num_tokens, 4, 4, device)
    return lambda s: decode_split(s.query, s.cache, s.output, s.rows, s.block_tables[0], s.options, split)
