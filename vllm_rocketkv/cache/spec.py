# SPDX-License-Identifier: Apache-2.0
"""The KV cache format of one layer: vLLM's own block, with the KT table in the bytes behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_rocketkv import compat
from vllm_rocketkv.cache.manager import RocketKVManager
from vllm_rocketkv.config import RocketKVConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ALIGNMENT_BYTES = 64  # a cache line: no row of the KT table straddles two
_KT_BYTES_PER_VALUE = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, kw_only=True)
class RocketKVSpec(FullAttentionSpec):
    """A page is ``K and V | KT``.

    K and V are as vLLM's kernels lay them out: ``[num_kv_heads, 2, block_size, head_size]`` on CPUs,
    ``[num_kv_heads, block_size, 2 * head_size]`` on GPUs. The KT table, for policies with selection, is
    ``[num_kv_heads, head_size, 2 (min, max), block_size / page_size]`` in the KT dtype, 64-byte aligned. Behind it, for
    policies that sum up attention, float32 ``[num_kv_heads, block_size]``.
    """

    config: RocketKVConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        # A larger page is one that vLLM padded to fit other layers.
        page_size = self.kt_offset_bytes + self.kt_size_bytes + self.score_size_bytes
        object.__setattr__(self, "page_size_padded", max(page_size, self.page_size_padded or 0))

    @property
    def kt_offset_bytes(self) -> int:
        return round_up(self.unpadded_page_size_bytes, _ALIGNMENT_BYTES)

    @property
    def kt_size_bytes(self) -> int:
        if not self.config.selects:
            return 0
        values = self.num_kv_heads * 2 * (self.block_size // self.config.page_size) * self.head_size
        return round_up(values * _KT_BYTES_PER_VALUE[self.config.resolved_kt_dtype], _ALIGNMENT_BYTES)

    @property
    def score_offset_bytes(self) -> int:
        """Where the sums of attention lie, 0 if the policy needs none."""
        return self.kt_offset_bytes + self.kt_size_bytes if self.config.accumulates else 0

    @property
    def score_size_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * 4 if self.config.accumulates else 0

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same format with other blocks, free of any padding that belonged to the old size."""
        return replace(self, block_size=block_size, page_size_padded=None)  # type: ignore[call-arg]

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Row length of the worker's append-only block table: prompt and private blocks stand in it side by side."""
        private_blocks = self.config.max_private_blocks(max_len, self.block_size)
        return super().max_num_blocks_per_req(vllm_config, max_len) + private_blocks + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Prompt and private blocks are held together while stage 1 runs: without them a longest request never starts."""
        max_model_len = vllm_config.model_config.max_model_len
        private_blocks = self.config.max_private_blocks(max_model_len, self.block_size)
        return super().max_memory_usage_bytes(vllm_config) + private_blocks * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[RocketKVSpec]) -> RocketKVSpec:  # type: ignore[override]
        """One group holds layers of one spec. ``FullAttentionSpec.merge`` would rebuild the base class."""
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined,no-any-return]


def rocketkv_spec(spec: FullAttentionSpec, config: RocketKVConfig) -> RocketKVSpec:
    """``spec`` of a full-attention layer, as a spec of this package."""
    values = {name: getattr(spec, name) for name in FullAttentionSpec.__dataclass_fields__}
    return RocketKVSpec(**values, config=config)


def _register() -> None:
    # Registering before vLLM's own specs would suppress theirs.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RocketKVSpec, manager_class=RocketKVManager, uniform_type_base_spec=RocketKVSpec)
    compat.activate_scheduler_hooks()


_register()
