# SPDX-License-Identifier: Apache-2.0
"""Binding of ``csrc/cpu``: importing this module registers ``torch.ops.rocketkv_cpu.*`` and their fake implementations.

======================  ============================================================================================
``plan_step``           what a step does for each request, from lengths alone (``csrc/cpu/plan.h``)
``keep_tokens``         stage 1: the tokens that each KV head keeps, by observation window (``csrc/cpu/stage1.h``)
``accumulate_scores``   adds a step's attention to the sums in the cache (``csrc/cpu/heavy.h``)
``keep_heavy``          stage 1: the tokens that each KV head keeps, by those sums
``compact``             moves the kept tokens into private blocks and builds their KT table (``csrc/cpu/compact.h``)
``summarise_pages``     the KT table of natural blocks, for policies that evict nothing (``csrc/cpu/page.h``)
``decode``              writes a step's K and V, estimates, selects and attends (``csrc/cpu/decode_args.h``)
``isas`` ``set_isa``    instruction sets that this processor has kernels for; ``isa`` is the one in use
======================  ============================================================================================

The environment variable ``ROCKETKV_CPU_ISA`` names the instruction set to use from the start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Codes of element types in the ops' arguments (``Type`` in ``csrc/cpu/common.h``)."""


def _library() -> Path:
    name = "_cpu_sanitize" if os.environ.get("ROCKETKV_SANITIZE") == "1" else "_cpu"
    found = sorted(Path(__file__).parent.glob(f"{name}.*"))
    if not found:
        raise ImportError(
            "rocketkv: its C++ kernels are not built: run `pip install --no-build-isolation -e .` in the checkout, "
            "with torch and a C++ compiler installed, or start vLLM without --attention-backend rocketkv"
        )
    return found[0]


def _register_fakes() -> None:
    """All ops but those that choose tokens return nothing."""

    def nothing(*args: Any) -> None:
        return None

    for name in ("plan_step", "accumulate_scores", "compact", "summarise_pages", "decode"):
        torch.library.register_fake(f"rocketkv_cpu::{name}", nothing)

    @torch.library.register_fake("rocketkv_cpu::keep_tokens")
    def keep_tokens(
        window_query: torch.Tensor,
        kv_cache: torch.Tensor,
        prompt_blocks: torch.Tensor,
        num_prompt_tokens: int,
        num_kept: int,
        *args: Any,
    ) -> torch.Tensor:
        return kv_cache.new_empty((kv_cache.shape[1], min(num_kept, num_prompt_tokens)), dtype=torch.int32)

    @torch.library.register_fake("rocketkv_cpu::keep_heavy")
    def keep_heavy(
        kv_cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int, num_kept: int, *args: Any
    ) -> torch.Tensor:
        return kv_cache.new_empty((kv_cache.shape[1], min(num_kept, num_tokens)), dtype=torch.int32)


def _check_wish() -> None:
    """The library takes ``ROCKETKV_CPU_ISA`` by itself if it can."""
    wish, isas = os.environ.get("ROCKETKV_CPU_ISA"), torch.ops.rocketkv_cpu.isas()
    if wish and wish not in isas:
        raise ImportError(
            f"rocketkv: ROCKETKV_CPU_ISA is '{wish}', but this processor has kernels for {', '.join(isas)}: "
            "set it to one of these or unset it"
        )


torch.ops.load_library(_library())
_register_fakes()
_check_wish()
ops = torch.ops.rocketkv_cpu
