# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which kernels compute."""

from __future__ import annotations

import os
from typing import Literal

Kernels = Literal["cpu", "triton"]


def kernels() -> Kernels:
    """``cpu`` (``csrc/cpu``) on CPUs, ``triton`` (``kernels/triton``) on GPUs.

    ``ROCKETKV_KERNELS=triton`` takes Triton's kernels on a CPU, too, where its interpreter runs them: how the GPU path is tested
    in the real engine without a GPU.

    Raises:
        ValueError: if the environment names something else, or asks for an interpreter that is not chosen.
    """
    from vllm.platforms import current_platform

    wish = os.environ.get("ROCKETKV_KERNELS") or ("cpu" if current_platform.is_cpu() else "triton")
    if wish not in ("cpu", "triton"):
        raise ValueError(f"rocketkv: ROCKETKV_KERNELS is {wish!r}, unset it or set it to cpu or triton")
    if wish == "cpu" and not current_platform.is_cpu():
        raise ValueError("rocketkv: ROCKETKV_KERNELS=cpu computes on CPUs only, unset it")
    if wish == "triton" and current_platform.is_cpu() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("rocketkv: ROCKETKV_KERNELS=triton needs a GPU, or TRITON_INTERPRET=1 for tests: unset it")
    return "triton" if wish == "triton" else "cpu"
