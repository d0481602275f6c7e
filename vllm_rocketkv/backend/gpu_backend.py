# SPDX-License-Identifier: Apache-2.0
"""The backend on GPUs: vLLM's FlashAttention, or its Triton attention where that is missing, for prompts and short requests; this
package's Triton kernels for requests longer than the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout, is_quantized_kv_cache

from vllm_rocketkv.backend.base import RocketKVBackendBase
from vllm_rocketkv.support import kv_dtype_name

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.platforms.interface import DeviceCapability

HEAD_SIZES = (64, 80, 96, 128, 256)
PREFERRED_BLOCK_SIZE = 128
"""The KT entries of a dimension are one run over the pages of a block: 32 pages of a byte fill the sector that a GPU reads at
least. With smaller blocks more is read than asked for."""


def dense_backend() -> Any:
    """vLLM's attention for what is not sparse, under the configuration that is being built."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    if not current_platform.is_cuda():
        return TritonAttentionBackend
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    config = get_current_vllm_config()
    # FlashAttention reads an fp8 cache with fp8 queries alone, of which stage 1 and our decode would get no others.
    is_fp8 = is_quantized_kv_cache(kv_dtype_name(config))
    suits = FlashAttentionBackend.supports_dtype(config.model_config.dtype) and not is_fp8
    return FlashAttentionBackend if suits and is_flash_attn_varlen_func_available() else TritonAttentionBackend


class RocketKVGPUBackend(RocketKVBackendBase, AttentionBackend):
    """On NVIDIA GPUs from sm_80 on, and on AMD's as far as Triton carries."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]

    @staticmethod
    def get_impl_cls() -> Any:
        from vllm_rocketkv.backend.gpu_impl import implementation

        return implementation(dense_backend())

    @staticmethod
    def get_builder_cls() -> Any:
        from vllm_rocketkv.backend.gpu_metadata import builder

        return builder(dense_backend())

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK_SIZE)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Heads before tokens: a page of a KV head is one run of memory.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability is None or capability.major >= 8 or current_platform.is_rocm()
