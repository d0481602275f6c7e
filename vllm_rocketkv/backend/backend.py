# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM loads for ``--attention-backend rocketkv``. Device dispatch will be here and nowhere else:
until there are GPU kernels, CPUs are the one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_rocketkv import compat
from vllm_rocketkv.cache.spec import rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.support import config_of

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

    from vllm_rocketkv.backend.impl import RocketKVImpl
    from vllm_rocketkv.backend.metadata import RocketKVMetadataBuilder


class RocketKVBackend(CPUAttentionBackend):
    """vLLM's CPU attention for prompts and short requests; this package for requests longer than the budget."""

    # The runner's slot mapping is wrong for tokens beyond an evicted prompt, so keys and values are written in forward().
    forward_includes_kv_cache_update: bool = True
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto"]

    config: ClassVar[RocketKVConfig | None] = None
    """The options in effect in this process, noted when an attention layer is built."""

    @staticmethod
    def get_name() -> str:
        return compat.BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[RocketKVImpl]:
        from vllm_rocketkv.backend.impl import RocketKVImpl

        return RocketKVImpl

    @staticmethod
    def get_builder_cls() -> type[RocketKVMetadataBuilder]:
        from vllm_rocketkv.backend.metadata import RocketKVMetadataBuilder

        return RocketKVMetadataBuilder

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
    def current_config(cls) -> RocketKVConfig:
        """The options of the engine being built or running in this process."""
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            cls.config = config_of(vllm_config)
        if cls.config is None:
            raise RuntimeError("rocketkv: the KV cache format was asked for before any attention layer was built")
        return cls.config

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Full-attention layers get the KT table behind their pages and this package's block manager."""
        if type(spec) is not FullAttentionSpec or spec.non_causal:
            return spec
        return rocketkv_spec(spec, cls.current_config())


compat.activate_worker_hooks()
