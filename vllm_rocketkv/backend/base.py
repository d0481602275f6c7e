# SPDX-License-Identifier: Apache-2.0
"""What the backend says of itself on any device, and the options that it runs under."""

from __future__ import annotations

from typing import ClassVar

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_rocketkv import compat
from vllm_rocketkv.cache.spec import rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.support import config_of

_config: RocketKVConfig | None = None
_query_bytes_per_dim = 0
"""Bytes of one dimension of a token's queries, of all heads of this worker."""


def current_config() -> RocketKVConfig:
    """The options of the engine being built or running in this process, noted when an attention layer is built."""
    global _config, _query_bytes_per_dim
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is not None:
        _config = config_of(vllm_config)
        model = vllm_config.model_config
        _query_bytes_per_dim = model.get_num_attention_heads(vllm_config.parallel_config) * model.dtype.itemsize
    if _config is None:
        raise RuntimeError("rocketkv: the KV cache format was asked for before any attention layer was built")
    return _config


class RocketKVBackendBase:
    """Goes before a backend class of vLLM's among the bases."""

    # The runner's slot mapping is wrong for tokens beyond an evicted prompt, so keys and values are written in forward().
    forward_includes_kv_cache_update: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        return compat.BACKEND_NAME

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Full-attention layers get the KT table behind their pages and this package's block manager."""
        if type(spec) is not FullAttentionSpec or spec.non_causal:
            return spec
        config = current_config()
        return rocketkv_spec(spec, config, query_bytes=_query_bytes_per_dim * spec.head_size)


compat.activate_worker_hooks()
