# SPDX-License-Identifier: Apache-2.0
"""One layer's attention in one step.

Order (I11): every K and V of the batch is written, then prompts that became complete are compacted into their private blocks,
then attention reads. Compaction may come before the dense reads, since it writes to private blocks alone; it must, since a
resumed request may read its private blocks in the very step that fills them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_rocketkv.backend.backend import RocketKVBackend
from vllm_rocketkv.backend.metadata import Crossing, RocketKVMetadata, SparseRows, TouchedPages
from vllm_rocketkv.backend.paged_cache import PagedCache
from vllm_rocketkv.eviction import EVICTION_POLICIES
from vllm_rocketkv.kernels.attention import attend_selected
from vllm_rocketkv.selection import SELECTION_POLICIES
from vllm_rocketkv.selection.page_summary import summarise

MAX_GATHERED_ELEMENTS = 1 << 24
"""Elements of KT table and selected keys gathered at once, per layer: bounds the memory of a step with many sparse rows."""


class RocketKVImpl(CPUAttentionBackendImpl):
    """vLLM's dense CPU attention for prompt parts, this package for the rest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = RocketKVBackend.current_config()
        eviction = EVICTION_POLICIES[self.config.eviction]
        selection = SELECTION_POLICIES[self.config.selection]
        self.eviction = eviction(self.config) if eviction else None
        self.selection = selection(self.config) if selection else None
        self._cache: PagedCache | None = None
        self._cache_of = 0

    def forward(  # type: ignore[override]
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
        if metadata is None:  # warm-up
            return output
        # A layer that shares another's cache finds everything but its own queries done by that layer.
        owns_cache = self.kv_sharing_target_layer_name is None
        windows = []
        if owns_cache:
            windows = [
                self._window_queries(layer, kv_cache, query, metadata, crossing) for crossing in metadata.crossings
            ]
            self.do_kv_cache_update(layer, key, value, kv_cache, metadata.slot_mapping)  # type: ignore[arg-type]
            for part in metadata.window_parts:
                self._paged(layer, kv_cache, query, metadata).park(part.private_blocks, part.index, query[part.tokens])
        for crossing, window in zip(metadata.crossings, windows, strict=owns_cache):
            self._evict(layer, kv_cache, self._paged(layer, kv_cache, query, metadata), crossing, window)
        if metadata.dense is not None:
            self._dense(layer, query, key, value, kv_cache, metadata.dense, metadata.dense_tokens, output)
        if owns_cache and metadata.touched_pages is not None:
            self._update_kt(self._paged(layer, kv_cache, query, metadata), metadata.touched_pages)
        if metadata.sparse is not None:
            self._sparse(self._paged(layer, kv_cache, query, metadata), query, metadata.sparse, output)
        return output

    def _paged(self, layer: Any, kv_cache: torch.Tensor, query: torch.Tensor, metadata: RocketKVMetadata) -> PagedCache:
        """This layer's cache, wrapped once; vLLM may bind another tensor after a profiling run."""
        if self._cache is None or self._cache_of != kv_cache.data_ptr():
            assert metadata.spec is not None
            self._cache = PagedCache(kv_cache, metadata.spec, layer.isa, query.dtype, self.num_heads)
            self._cache_of = kv_cache.data_ptr()
        return self._cache

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
            super().forward(layer, query, key, value, kv_cache, dense, output)
            return
        part = torch.empty_like(output[: len(tokens)])
        super().forward(layer, query[tokens], key, value, kv_cache, dense, part)
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

    def _evict(
        self, layer: Any, kv_cache: torch.Tensor, paged: PagedCache, crossing: Crossing, window: torch.Tensor
    ) -> None:
        """Stage 1: copy the K and V of the tokens that each KV head keeps into the private blocks."""
        assert self.eviction is not None
        layout = crossing.layout
        num_tokens, num_kept = layout.num_prompt_tokens, layout.num_kept_tokens
        keys = paged.read_keys(crossing.prompt_blocks)[:num_tokens]
        values = paged.read_values(crossing.prompt_blocks)[:num_tokens]
        kept = self.eviction.keep(window, keys, num_kept, self.scale, self.logits_soft_cap)
        index = kept.T[..., None].expand(-1, -1, paged.head_size)  # [num_kept, num_kv_heads, head_size]
        position = torch.arange(num_kept)
        slots = crossing.private_blocks[position // paged.block_size] * paged.block_size + position % paged.block_size
        self.do_kv_cache_update(layer, keys.gather(0, index), values.gather(0, index), kv_cache, slots)

    def _update_kt(self, paged: PagedCache, touched: TouchedPages) -> None:
        assert paged.kt is not None
        first_slot = touched.block * paged.block_size + touched.page * paged.page_size
        slots = first_slot[:, None] + torch.arange(paged.page_size)
        keys = paged.gather_keys(slots[..., None])  # [pages, page_size, num_kv_heads, head_size]
        page_min, page_max = summarise(keys, touched.num_valid, paged.kt.dtype)
        paged.kt[touched.block, :, 0, touched.page] = page_min
        paged.kt[touched.block, :, 1, touched.page] = page_max

    def _hide_later_tokens(self, paged: PagedCache, table: torch.Tensor, rows: SparseRows) -> None:
        """Bound each row's newest page by what the row may see: in the cache, later tokens of this step are on it as well."""
        page = (rows.num_tokens - 1) // paged.page_size
        first_token = page * paged.page_size
        row = torch.arange(len(page))
        block = rows.block_table[row, first_token // paged.block_size]
        first_slot = block * paged.block_size + first_token % paged.block_size
        slots = first_slot[:, None] + torch.arange(paged.page_size)
        bounds = summarise(paged.gather_keys(slots[..., None]), rows.num_tokens - first_token, table.dtype)
        for half, own in zip(table, bounds, strict=True):
            half[row, :, page] = own

    def _sparse(self, paged: PagedCache, query: torch.Tensor, rows: SparseRows, output: torch.Tensor) -> None:
        """Stage 2 for as many rows at once as fit ``MAX_GATHERED_ELEMENTS``: a resumed request may bring thousands."""
        pages = rows.block_table.shape[1] * paged.block_size // paged.page_size
        elements_per_row = paged.num_kv_heads * paged.head_size * (2 * pages + self.config.topk_for_step)
        rows_at_once = max(1, MAX_GATHERED_ELEMENTS // elements_per_row)
        for start in range(0, len(rows.tokens), rows_at_once):
            part = rows.part(start, start + rows_at_once)
            output[part.tokens] = self._attend_selected(paged, query[part.tokens], part)

    def _attend_selected(self, paged: PagedCache, query: torch.Tensor, rows: SparseRows) -> torch.Tensor:
        """Estimate on the KT table, select, attend exactly to what was selected; ``query`` ``[R, num_heads, head_size]``."""
        assert self.selection is not None
        assert paged.kt is not None
        table = paged.kt[rows.block_table]  # [R, blocks, num_kv_heads, 2, pages, head_size]
        table = table.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)  # [2, R, num_kv_heads, pages, head_size]
        if rows.has_later_tokens:
            self._hide_later_tokens(paged, table, rows)
        index, is_valid = self.selection.select(query, table[0], table[1], rows.num_tokens, rows.topr)
        block = rows.block_table[:, None].expand(-1, index.shape[1], -1).gather(2, index // paged.block_size)
        slots = (block * paged.block_size + index % paged.block_size).transpose(1, 2)  # [R, K, num_kv_heads]
        keys = paged.gather_keys(slots).transpose(1, 2)
        values = paged.gather_values(slots).transpose(1, 2)
        return attend_selected(query, keys, values, is_valid, self.scale, self.logits_soft_cap)
