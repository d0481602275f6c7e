# SPDX-License-Identifier: Apache-2.0
"""The KV cache format of one layer: vLLM's own block, with the KT table in the bytes behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_rocketkv import compat
from vllm_rocketkv.cache.manager import DenseLayersManager, RocketKVManager
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import parking_blocks

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
    query_bytes: int
    """Bytes of one token's query, of all heads: so many are parked in the K and V bytes of a block."""

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

    @property
    def queries_per_block(self) -> int:
        """Queries that can be parked in one block (``backend/parking.py``); start-up refuses blocks that hold none."""
        return max(1, self.unpadded_page_size_bytes // self.query_bytes)

    def num_parking_blocks(self, config: RocketKVConfig) -> int:
        """Blocks in which a request under ``config`` parks queries of decoded tokens."""
        if config.decode_budget_for_step is None:
            return 0
        return parking_blocks(config.eviction_window, self.queries_per_block)

    def _max_extra_blocks(self, max_len: int) -> int:
        """Private and parking blocks of one request, at most. At a length within one window of the first limit the slots up to
        that limit are held as well; they are within the bound of private blocks, which counts a whole interval."""
        private_blocks = self.config.max_private_blocks(max_len, self.block_size)
        return private_blocks + self.num_parking_blocks(self.config) if private_blocks else 0

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same format with other blocks, free of any padding that belonged to the old size."""
        return replace(self, block_size=block_size, page_size_padded=None)  # type: ignore[call-arg]

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Row length of the worker's append-only block table: prompt and private blocks stand in it side by side."""
        return super().max_num_blocks_per_req(vllm_config, max_len) + self._max_extra_blocks(max_len) + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Prompt and private blocks are held together while stage 1 runs: without them a longest request never starts."""
        extra_blocks = self._max_extra_blocks(vllm_config.model_config.max_model_len)
        return super().max_memory_usage_bytes(vllm_config) + extra_blocks * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[RocketKVSpec]) -> RocketKVSpec:  # type: ignore[override]
        """One group holds layers of one spec. ``FullAttentionSpec.merge`` would rebuild the base class."""
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True, kw_only=True)
class DenseLayerSpec(FullAttentionSpec):
    """A layer of option ``skip_layers``: plain K and V that nobody evicts.

    All KV cache groups share one pool of blocks, so its pages are padded to the size of the sparse layers' pages. A spec of its
    own keeps vLLM from putting it into their group, as it would do with a ``FullAttentionSpec`` of layer 0.
    """

    config: RocketKVConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "page_size_padded", rocketkv_spec(self, self.config).page_size_bytes)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same format with other blocks, free of any padding that belonged to the old size."""
        return replace(self, block_size=block_size, page_size_padded=None)  # type: ignore[call-arg]

    @classmethod
    def merge(cls, specs: list[DenseLayerSpec]) -> DenseLayerSpec:  # type: ignore[override]
        """One group holds layers of one spec. ``FullAttentionSpec.merge`` would rebuild the base class."""
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined,no-any-return]


def rocketkv_spec(spec: FullAttentionSpec, config: RocketKVConfig, *, query_bytes: int | None = None) -> RocketKVSpec:
    """``spec`` of a full-attention layer, as a spec of this package.

    ``query_bytes`` is the size of one token's query, of all heads of this worker; unknown, it fills a block.
    """
    return RocketKVSpec(**_fields(spec), config=config, query_bytes=query_bytes or spec.unpadded_page_size_bytes)


def dense_layer_spec(spec: FullAttentionSpec, config: RocketKVConfig) -> DenseLayerSpec:
    """``spec`` of a full-attention layer that stays dense."""
    return DenseLayerSpec(**_fields(spec), config=config)


def _fields(spec: FullAttentionSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in FullAttentionSpec.__dataclass_fields__}


def _register() -> None:
    # Registering before vLLM's own specs would suppress theirs.
    KVCacheSpecRegistry._ensure_registered()
    for spec, manager in ((RocketKVSpec, RocketKVManager), (DenseLayerSpec, DenseLayersManager)):
        KVCacheSpecRegistry.register(spec, manager_class=manager, uniform_type_base_spec=spec)
    compat.activate_scheduler_hooks()


_register()
