# SPDX-License-Identifier: Apache-2.0
"""The backend on CPUs: vLLM's CPU attention for prompts and short requests, this package's C++ kernels for requests longer than
the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_rocketkv.backend.base import RocketKVBackendBase

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

    from vllm_rocketkv.backend.cpu_metadata import RocketKVMetadataBuilder
    from vllm_rocketkv.backend.impl import RocketKVImpl


class RocketKVCPUBackend(RocketKVBackendBase, CPUAttentionBackend):
    """On x86 and ARM processors."""

    # vLLM's CPU attention stores the model's own type under every name that is not fp8; support.py refuses names of others.
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        *CPUAttentionBackend.supported_kv_cache_dtypes,
        "bfloat16",
        "float16",
    ]

    @staticmethod
    def get_impl_cls() -> type[RocketKVImpl]:
        from vllm_rocketkv.backend.impl import RocketKVImpl

        return RocketKVImpl

    @staticmethod
    def get_builder_cls() -> type[RocketKVMetadataBuilder]:
        from vllm_rocketkv.backend.cpu_metadata import RocketKVMetadataBuilder

        return RocketKVMetadataBuilder
