# SPDX-License-Identifier: Apache-2.0
"""Published figures of GPUs, all in this one place, and the occupancy that follows from them.

Limits of a streaming multiprocessor (SM): CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
Bandwidth, memory, SMs and clocks: NVIDIA's data sheets and architecture white papers. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this."""
SHARED_UNIT = 128
"""Bytes: shared memory is given to a block in multiples of this."""
SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes of each block."""


@dataclass(frozen=True)
class Limits:
    """What the blocks on one SM share."""

    compute_capability: int
    registers: int
    warps: int
    blocks: int
    shared: int
    """Bytes of shared memory of an SM, the reserved ones included."""
    shared_of_block: int
    """Most bytes of shared memory that one block may ask for."""


LIMITS = {
    limits.compute_capability: limits
    for limits in (
        Limits(80, 65536, 64, 32, 164 << 10, 163 << 10),
        Limits(90, 65536, 64, 32, 228 << 10, 227 << 10),
        Limits(100, 65536, 64, 32, 228 << 10, 227 << 10),
    )
}


@dataclass(frozen=True)
class Gpu:
    """A product."""

    name: str
    compute_capability: int
    bandwidth: float
    """Bytes per second, as stated by NVIDIA."""
    memory: float
    """Bytes that software can allocate, as stated."""
    sms: int
    clock: float
    """Boost clock, Hz."""


GPUS = (
    Gpu("A100 80GB", 80, 2.039e12, 80e9, 108, 1.41e9),
    Gpu("H100 SXM", 90, 3.35e12, 80e9, 132, 1.98e9),
    Gpu("H200", 90, 4.8e12, 141e9, 132, 1.98e9),
    Gpu("B200", 100, 8.0e12, 180e9, 148, 1.965e9),
)

SM_BYTES_PER_CLOCK = 64
"""Most bytes that one SM takes from the second-level cache in a clock."""


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that one SM holds at once."""

    blocks: int
    warps: int
    share: float
    """Of the warps that an SM can hold."""
    limiter: str
    """What an SM runs out of first."""


def occupancy(compute_capability: int, registers: int, shared: int, num_warps: int) -> Occupancy:
    """From registers of a thread, bytes of shared memory and warps of a block; 0 blocks if it cannot be launched."""
    limits = LIMITS[compute_capability]
    of_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    fits = {
        "registers": limits.registers // of_warp // num_warps,
        "shared memory": limits.shared // of_block if shared <= limits.shared_of_block else 0,
        "warps": limits.warps // num_warps,
        "blocks": limits.blocks,
    }
    limiter = min(fits, key=lambda name: fits[name])
    blocks = fits[limiter]
    return Occupancy(blocks, blocks * num_warps, blocks * num_warps / limits.warps, limiter)
