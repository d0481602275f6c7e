# SPDX-License-Identifier: Apache-2.0
"""One layer's attention in one step, on GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_rocketkv.backend.gpu_cache import GPUPagedCache, Workspaces
from vllm_rocketkv.backend.impl import RocketKVImplBase
from vllm_rocketkv.backend.limits import fused_capacity
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.eviction import eviction_policy
from vllm_rocketkv.kernels.options import Estimator
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, workspace_bytes
from vllm_rocketkv.kernels.triton.top_tokens import CHUNK

NUM_SPLITS = 16
"""Programs that share the attention of one row and KV head in the split kernels."""
SPLIT_BYTES = 512 << 20
"""Most memory for the split kernels; larger batches go through it in portions."""
FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class RocketKVGPUImpl(RocketKVImplBase):
    """Goes before the implementation of vLLM's dense backend among the bases."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # stage 1 and the decode kernels read the model's own queries
        # Here, while the model is loaded, so that vLLM's memory profile counts it.
        device = torch.empty(0).device
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        self.workspaces = shared_workspaces(self.config, get_current_vllm_config(), heads, device)

    def fused_rope_kvcache_supported(self) -> bool:
        # It would write by the runner's slots, which are wrong for private tokens.
        return False

    def _wrap(self, layer: Any, kv_cache: torch.Tensor, query_dtype: torch.dtype, spec: RocketKVSpec) -> Any:
        is_fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        kv_dtype = FP8_DTYPES[self.kv_cache_dtype] if is_fp8 else kv_cache.dtype
        scales = (layer._k_scale_float, layer._v_scale_float) if is_fp8 else (1.0, 1.0)
        paged = GPUPagedCache(kv_cache, kv_dtype, spec, query_dtype, self.num_heads, scales, self.workspaces)
        if self.config.evicts:
            self._compile_stage_1(paged, query_dtype, kv_cache.device)
        return paged

    def _compile_stage_1(self, paged: GPUPagedCache, query_dtype: torch.dtype, device: torch.device) -> None:
        """Run stage 1 once on the null block, whose contents mean nothing: vLLM's warm-up has no prompts beyond the budget, and
        compiling in the first such request would hold up all others. Later layers find it compiled."""
        config, block_size = self.config, paged.view.block_size
        shape = (config.window_size, self.num_heads, self.head_size)
        kind = (shape, query_dtype, paged.view.kv_kind, paged.view.kt_kind, device)
        if device.type == "cpu" or kind in _compiled or torch.cuda.is_current_stream_capturing():
            return
        _compiled.add(kind)
        query = torch.zeros(shape, dtype=query_dtype, device=device)
        for num_tokens in (CHUNK // 2, 2 * CHUNK):  # top-k takes one launch or several
            num_kept = config.window_size + block_size
            null = torch.zeros(num_tokens // block_size + 1, dtype=torch.int32, device=device)
            cache: Any = paged
            kept = eviction_policy(config).keep(
                query, cache, null, num_tokens, num_kept, self.scale, self.decode_options.softcap
            )
            paged.compact(null, null, kept)


@cache
def implementation(dense_backend: Any) -> type[Any]:
    """The implementation whose dense part is that of ``dense_backend``."""
    return type("RocketKVGPUImpl", (RocketKVGPUImpl, dense_backend.get_impl_cls()), {})


_compiled: set[Any] = set()
_workspaces: dict[Any, Workspaces] = {}


def shared_workspaces(
    config: RocketKVConfig, vllm_config: VllmConfig, heads: tuple[int, int, int], device: torch.device
) -> Workspaces:
    """The decode kernels' memory, one for all layers with as many heads: ``(Hq, Hkv, D)``."""
    limits = vllm_config.scheduler_config
    graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    max_rows = max(limits.max_num_seqs * max_decode_query_len(vllm_config), graphs)
    max_tokens, block_size = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    key = (config, heads, device, max_rows, max_tokens, block_size)
    if key not in _workspaces:
        fused_tokens = fused_capacity(config, max_tokens, block_size)
        page_size = config.page_size if config.selects else 0
        estimator = cast(Estimator, config.selection) if config.selects else "hsa"
        fused = DecodeWorkspace.allocate(max_rows, *heads, fused_tokens, page_size, device, estimator)
        split = None
        if max_tokens > fused_tokens:
            row_bytes = workspace_bytes(1, *heads, max_tokens, page_size, NUM_SPLITS)
            rows = min(max_rows, max(1, SPLIT_BYTES // row_bytes))
            split = SplitWorkspace(rows, *heads, max_tokens, page_size, NUM_SPLITS, device)
        _workspaces[key] = Workspaces(fused, split)
    return _workspaces[key]
