# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM loads for ``--attention-backend rocketkv``: the one of this device."""

from __future__ import annotations

from typing import Any

from vllm_rocketkv.backend.device import kernels

RocketKVBackend: Any
if kernels() == "triton":
    from vllm_rocketkv.backend.gpu_backend import RocketKVGPUBackend as RocketKVBackend
else:
    from vllm_rocketkv.backend.cpu_backend import RocketKVCPUBackend as RocketKVBackend

__all__ = ["RocketKVBackend"]
