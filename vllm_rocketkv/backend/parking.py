# SPDX-License-Identifier: Apache-2.0
"""Where the observation window's queries wait when a chunk border cuts the window (I7), on any device."""

from __future__ import annotations

import torch

from vllm_rocketkv.cache.spec import RocketKVSpec


class ParkedQueries:
    """Private blocks hold the window's queries until stage 1 fills them with keys and values, so a prompt's cut window costs no
    memory. Windows of decoded tokens have blocks of their own."""

    def __init__(
        self, kv_cache: torch.Tensor, spec: RocketKVSpec, query_dtype: torch.dtype, num_query_heads: int
    ) -> None:
        self.head_size = spec.head_size
        row_bytes = num_query_heads * spec.head_size * query_dtype.itemsize
        rows = spec.unpadded_page_size_bytes // row_bytes
        page_bytes = _byte_view(kv_cache)[:, : rows * row_bytes]
        self.rows = page_bytes.view(query_dtype).unflatten(1, (rows, num_query_heads * spec.head_size))
        """``[num_blocks, rows, num_query_heads * head_size]``."""

    def park(self, blocks: torch.Tensor, index: torch.Tensor, queries: torch.Tensor) -> None:
        """Store ``queries`` ``[w, num_query_heads, head_size]`` at window positions ``index`` of private blocks ``blocks``."""
        rows = self.rows.shape[1]
        self.rows[blocks[index // rows], index % rows] = queries.flatten(1)

    def unpark(self, blocks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The queries that were parked: ``[w, num_query_heads, head_size]``."""
        rows = self.rows.shape[1]
        return self.rows[blocks[index // rows], index % rows].unflatten(1, (-1, self.head_size))


def alias(kv_cache: torch.Tensor) -> torch.Tensor:
    """The same elements as a tensor that does not refer to ``kv_cache`` itself, which keeps what is made of it: a circle would
    keep a cache alive that vLLM has thrown away."""
    storage = torch.empty(0, dtype=kv_cache.dtype, device=kv_cache.device)
    return storage.set_(kv_cache.untyped_storage(), kv_cache.storage_offset(), kv_cache.shape, kv_cache.stride())


def _byte_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """The layer's pages as bytes ``[num_blocks, page bytes]``, including what lies behind K and V."""
    raw = torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())
    size = kv_cache.element_size()
    page_bytes = kv_cache.stride(0) * size
    return raw.as_strided((kv_cache.shape[0], page_bytes), (page_bytes, 1), kv_cache.storage_offset() * size)
