# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a decode step from bytes moved and published figures of GPUs. A prediction is not a measurement.

Twice: from bytes alone, and with what small batches wait for.

* bytes: a layer's attention takes launches x overhead + bytes / (share x bandwidth).
* waiting: where it is longer, what the SMs that have work can take from the second-level cache, or the round trips to memory that
  one program makes one after another; and the launches that find nothing to do.

A step adds the model's weights, read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import traffic
from benchmarks.gpu.hardware import GPUS, SM_BYTES_PER_CLOCK, Gpu
from benchmarks.traffic import Attention, Selection

LLAMA_8B = Attention(num_heads=32, num_kv_heads=8, head_size=128)
LAYERS = 32
WEIGHTS = 16e9
"""Bytes of Llama-3.1-8B in bfloat16."""
CONTEXTS = (32 << 10, 128 << 10, 1 << 20)
BATCHES = (1, 8, 32)
BLOCK_SIZES = (128, 64, 16)
KT_TYPES = {"fp8 e5m2": 1, "bf16": 2}
TOPR = (128, 64, 32, 16)


@dataclass(frozen=True)
class Assumptions:
    """What a prediction takes for granted; every field is an option of ``benchmarks.kernel_report``."""

    share: float = 0.8
    """Achieved of the stated bandwidth, by every kernel, ours and the dense ones alike."""
    launch: float = 2e-6
    """Seconds from one kernel's end to the next one's start inside a CUDA graph."""
    memory_share: float = 0.9
    """Of a GPU's memory that weights and caches may fill, as vLLM's ``gpu_memory_utilization``."""
    dense_launches: int = 2
    """A layer's kernels: the cache's update, attention."""
    sparse_launches: int = 2
    """A layer's kernels that work: the cache's update, fused decode."""
    idle_launches: int = 2
    """A layer's kernels that find nothing to do: vLLM's cache update and dense attention, which a CUDA graph holds for tokens
    within the budget."""
    idle: float = 1.5e-6
    """Seconds that each of those takes."""
    round_trips: int = 25
    """To memory that a program of fused decode makes one after another: 3 to prepare, one for each 16 of 128 dimensions, about 10
    to select, one for each 64 of 256 tokens."""
    latency: float = 6e-7
    """Seconds of a round trip."""
    programs_of_sm: int = 1
    """Programs of fused decode that an SM holds at once: see its occupancy with the engine's capacity of 4,096 tokens."""


@dataclass(frozen=True)
class Point:
    """One prediction. Times in seconds for one step of the whole batch."""

    gpu: str
    context: int
    batch: int
    kt: str
    block_size: int
    dense_attention: float
    sparse_attention: float
    """From bytes."""
    sparse_waiting: float
    """With waiting."""
    weights: float
    dense_fits: bool
    sparse_fits: bool
    prompt_fits: bool
    """Whether at least one request's prompt fits beside the weights: both kinds compute a prompt whole."""

    @property
    def attention_ratios(self) -> tuple[float, float]:
        """Dense over ours, attention alone: with waiting, from bytes."""
        return self.dense_attention / self.sparse_waiting, self.dense_attention / self.sparse_attention

    @property
    def step_ratios(self) -> tuple[float, float]:
        """Dense over ours, the whole step: with waiting, from bytes."""
        dense = self.weights + self.dense_attention
        return dense / (self.weights + self.sparse_waiting), dense / (self.weights + self.sparse_attention)

    def as_json(self) -> dict[str, Any]:
        """All fields and what follows from them."""
        return asdict(self) | {"attention_ratios": self.attention_ratios, "step_ratios": self.step_ratios}


def predict(gpu: Gpu, context: int, batch: int, kt: str, block_size: int, a: Assumptions) -> Point:
    """A step of Llama-3.1-8B in which ``batch`` requests of ``context`` tokens decode."""
    selection = Selection(num_tokens=min(2048, context), block_size=block_size, kt_itemsize=KT_TYPES[kt])
    prompt = traffic.cache_bytes(LLAMA_8B, LAYERS, context)
    private = traffic.cache_bytes(LLAMA_8B, LAYERS, selection.num_tokens, selection)
    # Blocks of a prompt have room for a KT table behind them, too.
    natural = traffic.cache_bytes(LLAMA_8B, LAYERS, context, selection)
    room = a.memory_share * gpu.memory - WEIGHTS
    return Point(
        gpu.name,
        context,
        batch,
        kt,
        block_size,
        dense_attention=dense_seconds(gpu, context, batch, a),
        sparse_attention=sparse_seconds(gpu, selection, batch, a),
        sparse_waiting=waiting_seconds(gpu, selection, batch, a),
        weights=WEIGHTS / (a.share * gpu.bandwidth),
        dense_fits=batch * prompt <= room,
        sparse_fits=natural + batch * private <= room,
        prompt_fits=prompt <= room,
    )


def dense_seconds(gpu: Gpu, context: int, batch: int, a: Assumptions) -> float:
    """All layers' dense attention, split over as many programs as keep all SMs busy."""
    moved = traffic.dense_layer_bytes(LLAMA_8B, context, batch)
    return LAYERS * (a.dense_launches * a.launch + moved / (a.share * gpu.bandwidth))


def sparse_seconds(gpu: Gpu, selection: Selection, batch: int, a: Assumptions) -> float:
    """All layers' estimation, selection and attention, from bytes."""
    moved = traffic.decode_layer_bytes(LLAMA_8B, selection, batch)
    return LAYERS * (a.sparse_launches * a.launch + moved / (a.share * gpu.bandwidth))


def waiting_seconds(gpu: Gpu, selection: Selection, batch: int, a: Assumptions) -> float:
    """The same with what programs wait for, and launches without work."""
    moved = traffic.decode_layer_bytes(LLAMA_8B, selection, batch)
    programs = batch * LLAMA_8B.num_kv_heads
    rate = min(gpu.bandwidth, min(programs, gpu.sms) * SM_BYTES_PER_CLOCK * gpu.clock)
    waves = -(-programs // (gpu.sms * a.programs_of_sm))
    working = max(moved / (a.share * rate), waves * a.round_trips * a.latency)
    return LAYERS * (a.sparse_launches * a.launch + a.idle_launches * a.idle + working)


def points(a: Assumptions, block_sizes: Sequence[int] = BLOCK_SIZES) -> list[Point]:
    """Every combination."""
    return [
        predict(gpu, context, batch, kt, block_size, a)
        for gpu in GPUS
        for context in CONTEXTS
        for batch in BATCHES
        for kt in KT_TYPES
        for block_size in block_sizes
    ]


@dataclass(frozen=True)
class Granularity:
    """What one row of one KV head reads in a step, in bytes."""

    kt: str
    block_size: int
    topr: int
    floor: int
    """What is needed: KT numbers and selected tokens."""
    estimate: float
    """KT in sectors of 32 bytes."""
    attend: int
    estimate_64: float
    """KT in pieces of 64 bytes, which is what HBM delivers at once."""

    @property
    def total(self) -> float:
        """Bytes read, in sectors of 32 bytes."""
        return self.estimate + self.attend


def granularities() -> list[Granularity]:
    """The effect of block size, KT type and ``topr`` on what is read."""
    found = []
    for kt, itemsize in KT_TYPES.items():
        for block_size in BLOCK_SIZES:
            for topr in TOPR:
                selection = Selection(block_size=block_size, kt_itemsize=itemsize, topr=topr)
                found.append(granularity(kt, selection))
    return found


def granularity(kt: str, selection: Selection) -> Granularity:
    """One of them, for D = 128 and bfloat16 keys and values."""
    size = LLAMA_8B.head_size
    whole = replace(selection, topr=selection.topr or size)
    return Granularity(
        kt,
        selection.block_size,
        whole.topr or size,
        traffic.decode_floor(LLAMA_8B, whole),
        traffic.estimate_bytes(size, whole),
        traffic.attend_bytes(LLAMA_8B, traffic.selected_tokens(whole)),
        traffic.estimate_bytes(size, whole, sector=64),
    )
