# SPDX-License-Identifier: Apache-2.0
"""One layer's attention in one step, on GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_rocketkv.backend.gpu_cache import GPUPagedCache, Workspaces
from vllm_rocketkv.backend.impl import RocketKVImplBase
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace
from vllm_rocketkv.kernels.triton.launch import padded

FUSED_TOKENS = 8192
"""Most cached tokens that one program can hold the scores of in registers."""
DECODED_TOKENS = 1024
NUM_SPLITS = 16
"""Programs that share the attention of one row and KV head in the split kernels."""
FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class RocketKVGPUImpl(RocketKVImplBase):
    """Goes before the implementation of vLLM's dense backend among the bases."""

    num_heads: int
    num_kv_heads: int
    kv_cache_dtype: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_config = get_current_vllm_config()

    def fused_rope_kvcache_supported(self) -> bool:
        # It would write by the runner's slots, which are wrong for private tokens.
        return False

    def _wrap(self, layer: Any, kv_cache: torch.Tensor, query_dtype: torch.dtype, spec: RocketKVSpec) -> Any:
        is_fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        kv_dtype = FP8_DTYPES[self.kv_cache_dtype] if is_fp8 else kv_cache.dtype
        scales = (layer._k_scale_float, layer._v_scale_float) if is_fp8 else (1.0, 1.0)
        workspaces = shared_workspaces(self._vllm_config, spec, self.num_heads, kv_cache.device)
        return GPUPagedCache(kv_cache, kv_dtype, spec, query_dtype, self.num_heads, scales, workspaces)


@cache
def implementation(dense_backend: type[AttentionBackend]) -> type[Any]:
    """The implementation whose dense part is that of ``dense_backend``."""
    return type("RocketKVGPUImpl", (RocketKVGPUImpl, dense_backend.get_impl_cls()), {})


_workspaces: dict[Any, Workspaces] = {}


def shared_workspaces(
    vllm_config: VllmConfig, spec: RocketKVSpec, num_query_heads: int, device: torch.device
) -> Workspaces:
    """The decode kernels' memory, one for all layers of a shape."""
    key = (id(vllm_config), spec, num_query_heads, device)
    if key not in _workspaces:
        _workspaces[key] = _make_workspaces(vllm_config, spec, num_query_heads, device)
    return _workspaces[key]


def _make_workspaces(
    vllm_config: VllmConfig, spec: RocketKVSpec, num_query_heads: int, device: torch.device
) -> Workspaces:
    from vllm.v1.attention.backend import max_decode_query_len

    limits, config = vllm_config.scheduler_config, spec.config
    graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    max_rows = max(limits.max_num_seqs * max_decode_query_len(vllm_config), graphs)
    max_tokens = vllm_config.model_config.max_model_len
    page_size = config.page_size if config.selects else 0
    heads = num_query_heads, spec.num_kv_heads, spec.head_size
    fused_tokens = min(max_tokens, fused_capacity(config, max_tokens, spec.block_size))
    fused = DecodeWorkspace.allocate(max_rows, *heads, fused_tokens, page_size, device)
    split = None
    if max_tokens > fused_tokens:
        split = SplitWorkspace(max_rows, *heads, max_tokens, page_size, NUM_SPLITS, device)
    return Workspaces(fused, split, max_rows)


def fused_capacity(config: RocketKVConfig, max_model_len: int, block_size: int) -> int:
    """Cached tokens that one program has registers for: what eviction keeps and ``DECODED_TOKENS`` more, if that is possible.

    Longer rows go to the split kernels: a program pays for its capacity, however short its row is.
    """
    kept = config.max_private_blocks(max_model_len, block_size) * block_size if config.evicts else max_model_len
    return min(FUSED_TOKENS, padded(kept + DECODED_TOKENS))
