# SPDX-License-Identifier: Apache-2.0
"""One layer's attention in one step.

Order (I11): every K and V of the batch is written, then prompts that became complete are compacted into their private blocks,
then attention reads. Compaction may come before the dense reads, since it writes to private blocks alone; it must, since a
resumed request may read its private blocks in the very step that fills them. K and V of private tokens are written by the
decode op. Decoded tokens are evicted after the last row that reads them; a resumed request may go on
to read what is left in the same step, hence phases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_rocketkv.backend.base import current_config
from vllm_rocketkv.backend.metadata import Crossing, RocketKVMetadata, Rows, ScoreParts
from vllm_rocketkv.backend.paged_cache import PagedCache
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.eviction import eviction_policy
from vllm_rocketkv.selection import SELECTION_POLICIES


class RocketKVImplBase(ABC):
    """Goes before an attention implementation of vLLM's among the bases of a class: that one computes prompt parts, this package
    the rest, whatever the device."""

    kv_sharing_target_layer_name: str | None
    scale: float
    logits_soft_cap: float
    do_kv_cache_update: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = current_config()
        selection = SELECTION_POLICIES[self.config.selection]
        self.decode_options = selection(self.config).decode_options(self.scale, self.logits_soft_cap or 0.0)

    @abstractmethod
    def _wrap(self, layer: Any, kv_cache: torch.Tensor, query_dtype: torch.dtype, spec: RocketKVSpec) -> PagedCache:
        """The device's view of this layer's cache."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RocketKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` ``[num_tokens, num_heads, head_size]``; ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_size]``;
        ``kv_cache`` ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; writes and returns ``output``."""
        metadata = attn_metadata
        if metadata is None:  # a profiling run
            return output.fill_(0)
        # A layer that shares another's cache finds everything but its own queries done by that layer.
        if self.kv_sharing_target_layer_name is None:
            self._write_and_evict(layer, query, key, value, kv_cache, metadata)
        if metadata.dense is not None:
            self._dense(layer, query, key, value, kv_cache, metadata.dense, metadata.dense_tokens, output)
        if metadata.rows is not None:
            paged = self._paged(layer, kv_cache, query, metadata)
            self._decode(paged, query, key, value, output, metadata.rows)
            for phase, rows in enumerate(metadata.later_rows, start=1):
                self._evict_decoded(paged, query, metadata, phase - 1)
                self._decode(paged, query, key, value, output, rows)
            if metadata.decode_evictions:
                self._evict_decoded(paged, query, metadata, len(metadata.later_rows))
        if self.kv_sharing_target_layer_name is None:
            # Last: an eviction of this step may need what the window before parked in the same place.
            for part in metadata.window_parts:
                paged = self._paged(layer, kv_cache, query, metadata)
                paged.park(part.parking_blocks, part.index, query[part.tokens])
        return output

    def _decode(
        self,
        paged: PagedCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        rows: Rows,
    ) -> None:
        is_private = self.config.evicts
        writes = is_private and self.kv_sharing_target_layer_name is None
        keys, values = (key, value) if writes else (None, None)
        paged.decode(query, keys, values, output, rows, is_private, self.decode_options)
        if rows.score_parts is not None and writes:
            self._accumulate(paged, query, rows.score_parts, is_private)

    def _paged(self, layer: Any, kv_cache: torch.Tensor, query: torch.Tensor, metadata: RocketKVMetadata) -> PagedCache:
        """This layer's cache, wrapped once. The wrapper is kept by the tensor and goes with it: vLLM profiles with a cache that
        it throws away, and whoever held a view of that would hold its memory."""
        wrapped: PagedCache | None = getattr(kv_cache, "_rocketkv", None)
        if wrapped is None:
            assert metadata.spec is not None
            wrapped = self._wrap(layer, kv_cache, query.dtype, metadata.spec)
            kv_cache._rocketkv = wrapped  # type: ignore[attr-defined]
        return wrapped

    def _write_and_evict(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: RocketKVMetadata,
    ) -> None:
        """Write what belongs to natural blocks, then fill the private blocks of prompts that became complete."""
        windows = [self._window_queries(layer, kv_cache, query, metadata, crossing) for crossing in metadata.crossings]
        if metadata.natural_slots is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, metadata.natural_slots)
        if metadata.natural_queries is not None:
            paged = self._paged(layer, kv_cache, query, metadata)
            self._accumulate(paged, query, metadata.natural_queries, is_private=False)
        for crossing, window in zip(metadata.crossings, windows, strict=True):
            self._evict(self._paged(layer, kv_cache, query, metadata), crossing, window)
        if metadata.touched_pages is not None:
            self._paged(layer, kv_cache, query, metadata).summarise(metadata.touched_pages)

    def _accumulate(self, paged: PagedCache, query: torch.Tensor, parts: ScoreParts, is_private: bool) -> None:
        softcap = self.decode_options.softcap
        paged.accumulate_scores(query, parts.table, parts.block_table, is_private, self.scale, softcap)

    def _dense(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        dense: CPUAttentionMetadata,
        tokens: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, dense, output)  # type: ignore[misc]
            return
        part = torch.empty_like(output[: len(tokens)])
        super().forward(layer, query[tokens], key, value, kv_cache, dense, part)  # type: ignore[misc]
        output[tokens] = part

    def _window_queries(
        self,
        layer: Any,
        kv_cache: torch.Tensor,
        query: torch.Tensor,
        metadata: RocketKVMetadata,
        crossing: Crossing,
    ) -> torch.Tensor:
        """The observation window's queries ``[window_size, num_heads, head_size]``. Taken before anything is written: parked
        ones lie where this step may write the K and V of tokens beyond the prompt."""
        newest = query[crossing.window_tokens]
        if not len(crossing.parked):
            return newest
        parked = self._paged(layer, kv_cache, query, metadata).unpark(crossing.private_blocks, crossing.parked)
        return torch.cat([parked, newest])

    def _evict(self, paged: PagedCache, crossing: Crossing, window: torch.Tensor) -> None:
        """Stage 1: copy the K and V of the tokens that each KV head keeps into the private blocks."""
        layout = crossing.layout
        kept = eviction_policy(crossing.config).keep(
            window,
            paged,
            crossing.prompt_blocks,
            layout.num_prompt_tokens,
            layout.num_kept_tokens,
            self.scale,
            self.decode_options.softcap,
        )
        paged.compact(crossing.prompt_blocks, crossing.private_blocks, kept)

    def _evict_decoded(self, paged: PagedCache, query: torch.Tensor, metadata: RocketKVMetadata, phase: int) -> None:
        """Stage 1 again, on private blocks and in place, for requests that have outgrown ``decode_budget``."""
        for eviction in metadata.decode_evictions:
            if eviction.phase == phase:
                window = query[eviction.window_tokens]
                if len(eviction.parked):
                    window = torch.cat([paged.unpark(eviction.parking_blocks, eviction.parked), window])
                kept = eviction_policy(eviction.config).keep(
                    window,
                    paged,
                    eviction.blocks,
                    eviction.num_tokens,
                    eviction.num_kept,
                    self.scale,
                    self.decode_options.softcap,
                    is_private=True,
                )
                paged.compact(eviction.blocks, eviction.blocks, kept, is_private=True)


class RocketKVImpl(RocketKVImplBase, CPUAttentionBackendImpl):  # type: ignore[misc]
    """On CPUs."""

    def _wrap(self, layer: Any, kv_cache: torch.Tensor, query_dtype: torch.dtype, spec: RocketKVSpec) -> PagedCache:
        scales = (layer._k_scale_float, layer._v_scale_float) if self.is_fp8_kv_cache else (1.0, 1.0)
        dtype_name = self.kv_cache_dtype if self.is_fp8_kv_cache else "auto"
        return PagedCache(kv_cache, spec, layer.isa, query_dtype, self.num_heads, dtype_name, scales)
