# SPDX-License-Identifier: Apache-2.0
"""What launching needs everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which takes tensors on CPUs."""

MIN_DOT = 16
"""Least extent of each side of ``tl.dot``."""


@triton.jit
def dot(a, b, INTERPRETED: tl.constexpr):
    """``a @ b`` accumulated in float32; float32 operands keep their precision (no TF32)."""
    if INTERPRETED:  # Triton 3.9 interprets a product of bfloat16 wrongly
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


NUM_STAGES = 2
"""Stages of the pipelines that loops become, in every launch (Triton's own default is another)."""


def padded(extent: int, least: int = 1) -> int:
    """The power of two that a block of ``extent`` elements is padded to."""
    return max(least, triton.next_power_of_2(extent))


@dataclass(frozen=True)
class CompileCase:
    """A configuration in which a kernel can be launched; each kernel's module lists its own in ``compile_cases()``."""

    name: str
    kernel: Any
    """The jitted function."""
    signature: Mapping[str, str]
    """Triton's type of each argument that is not a constant, e.g. ``*bf16``, ``*i32``, ``i32``, ``fp32``."""
    constants: Mapping[str, Any]
    """Values of the ``tl.constexpr`` arguments."""
    num_warps: int
    num_stages: int = NUM_STAGES
    maxnreg: int | None = None
    """Most registers of a thread; None: as the assembler likes."""
    compute_capabilities: tuple[int, ...] = (80, 90, 100)
