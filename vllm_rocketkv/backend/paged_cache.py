# SPDX-License-Identifier: Apache-2.0
"""One layer's KV cache as this package reads and writes it: K, V, the KT table and the window's parked queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from vllm import _custom_ops as ops

from vllm_rocketkv.cache.spec import RocketKVSpec

KT_DTYPES = {"bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class BlockLayout:
    """Where element (token t, dimension d) lies inside one (block, head) of vLLM's kernels: at ``token[t] + dim[d]``, counted in
    elements from the start of the ``2 * block_size * head_size`` elements of that head, for keys and for values."""

    key_token: torch.Tensor
    key_dim: torch.Tensor
    value_token: torch.Tensor
    value_dim: torch.Tensor


@cache
def probe_block_layout(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> BlockLayout:
    """Read the layout off vLLM's own op, which knows one for each instruction set, by storing indices with it.

    Raises:
        RuntimeError: if the op's layout is not the sum of a token offset and a dimension offset.
    """
    tokens = _probe(isa, dtype, block_size, head_size, torch.arange(block_size)[:, None].expand(-1, head_size))
    dims = _probe(isa, dtype, block_size, head_size, torch.arange(head_size)[None, :].expand(block_size, -1))
    offsets = []
    for half in range(2):
        where = torch.empty(block_size, head_size, dtype=torch.int64)
        where[tokens[half], dims[half]] = torch.arange(block_size * head_size) + half * block_size * head_size
        token, dim = where[:, 0], where[0] - where[0, 0]
        if not torch.equal(where, token[:, None] + dim):
            raise RuntimeError(f"rocketkv: vLLM's CPU attention uses a KV layout for {isa!r} that is not understood")
        offsets += [token.contiguous(), dim.contiguous()]
    return BlockLayout(*offsets)


def _probe(isa: str, dtype: torch.dtype, block_size: int, head_size: int, index: torch.Tensor) -> torch.Tensor:
    """Store ``index`` ``[block_size, head_size]`` as keys and as values.

    Returns what lies where, ``[2, block_size * head_size]``.
    """
    found = torch.zeros(2, block_size * head_size, dtype=torch.int64)
    for shift in (0, 6):  # six bits at a time: every dtype holds them exactly
        block = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        digits = (index >> shift & 63).to(dtype)[:, None, :].contiguous()
        key_cache, value_cache = block.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digits, digits, key_cache, value_cache, torch.arange(block_size), isa)
        found += block.view(2, -1).long() << shift
    return found


class PagedCache:
    """Views of one layer's cache ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, of which each block is one page.

    A *slot* is ``block * block_size + offset``, as in vLLM's slot_mapping.
    """

    def __init__(
        self, kv_cache: torch.Tensor, spec: RocketKVSpec, isa: str, query_dtype: torch.dtype, num_query_heads: int
    ) -> None:
        self.num_blocks, self.num_kv_heads, self.block_size, _ = kv_cache.shape
        self.head_size = spec.head_size
        self.page_size = spec.config.page_size
        self.layout = probe_block_layout(isa, kv_cache.dtype, self.block_size, self.head_size)
        self._elements_per_head = 2 * self.block_size * self.head_size
        self._block_stride = kv_cache.stride(0)
        assert kv_cache.stride()[1:] == (self._elements_per_head, 2 * self.head_size, 1), (
            "rocketkv: unexpected KV cache"
        )
        self.blocks = kv_cache.as_strided(
            (self.num_blocks, self.num_kv_heads, self._elements_per_head),
            (self._block_stride, self._elements_per_head, 1),
        )
        num_elements = (self.num_blocks - 1) * self._block_stride + self.num_kv_heads * self._elements_per_head
        self._flat = kv_cache.as_strided((num_elements,), (1,))
        self._head_base = torch.arange(self.num_kv_heads) * self._elements_per_head
        page_bytes = _byte_view(kv_cache)
        self.kt = self._kt_view(page_bytes, spec)
        self.parked_queries = self._parked_query_view(page_bytes, spec, query_dtype, num_query_heads)

    def _kt_view(self, page_bytes: torch.Tensor, spec: RocketKVSpec) -> torch.Tensor | None:
        """``[num_blocks, num_kv_heads, 2 (min, max), block_size / page_size, head_size]`` or None without selection."""
        if not spec.config.selects:
            return None
        dtype = KT_DTYPES[spec.config.resolved_kt_dtype]
        pages = self.block_size // self.page_size
        num_bytes = self.num_kv_heads * 2 * pages * self.head_size * dtype.itemsize
        table = page_bytes[:, spec.kt_offset_bytes : spec.kt_offset_bytes + num_bytes].view(dtype)
        return table.unflatten(1, (self.num_kv_heads, 2, pages, self.head_size))

    def _parked_query_view(
        self, page_bytes: torch.Tensor, spec: RocketKVSpec, dtype: torch.dtype, num_query_heads: int
    ) -> torch.Tensor:
        """``[num_blocks, rows, num_query_heads * head_size]``: private blocks hold the window's queries until stage 1 fills them
        with keys and values, so a window cut by a chunk border costs no memory (I7)."""
        row_bytes = num_query_heads * self.head_size * dtype.itemsize
        rows = spec.unpadded_page_size_bytes // row_bytes
        return page_bytes[:, : rows * row_bytes].view(dtype).unflatten(1, (rows, num_query_heads * self.head_size))

    def park(self, blocks: torch.Tensor, index: torch.Tensor, queries: torch.Tensor) -> None:
        """Store ``queries`` ``[w, num_query_heads, head_size]`` at window positions ``index`` of private blocks ``blocks``."""
        rows = self.parked_queries.shape[1]
        self.parked_queries[blocks[index // rows], index % rows] = queries.flatten(1)

    def unpark(self, blocks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The queries that were parked: ``[w, num_query_heads, head_size]``."""
        rows = self.parked_queries.shape[1]
        return self.parked_queries[blocks[index // rows], index % rows].unflatten(1, (-1, self.head_size))

    def read_keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """Keys of whole blocks ``[n]`` in token order: ``[n * block_size, num_kv_heads, head_size]``."""
        return self._read(blocks, self.layout.key_token, self.layout.key_dim)

    def read_values(self, blocks: torch.Tensor) -> torch.Tensor:
        """Values of whole blocks, shaped as ``read_keys``."""
        return self._read(blocks, self.layout.value_token, self.layout.value_dim)

    def _read(self, blocks: torch.Tensor, token: torch.Tensor, dim: torch.Tensor) -> torch.Tensor:
        order = (token[:, None] + dim).flatten()
        heads = self.blocks[blocks].index_select(2, order).unflatten(2, (self.block_size, self.head_size))
        return heads.permute(0, 2, 1, 3).flatten(0, 1)

    def gather_keys(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys at ``slots`` ``[..., num_kv_heads or 1]``, one slot per KV head: ``[..., num_kv_heads, head_size]``."""
        return self._gather(slots, self.layout.key_token, self.layout.key_dim)

    def gather_values(self, slots: torch.Tensor) -> torch.Tensor:
        """Values at ``slots``, shaped as ``gather_keys``."""
        return self._gather(slots, self.layout.value_token, self.layout.value_dim)

    def _gather(self, slots: torch.Tensor, token: torch.Tensor, dim: torch.Tensor) -> torch.Tensor:
        start = slots // self.block_size * self._block_stride + token[slots % self.block_size] + self._head_base
        index = start[..., None] + dim
        return self._flat.index_select(0, index.flatten()).view(index.shape)


def _byte_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """The layer's pages as bytes ``[num_blocks, page bytes]``, including what lies behind K and V."""
    raw = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
    size = kv_cache.element_size()
    page_bytes = kv_cache.stride(0) * size
    return raw.as_strided((kv_cache.shape[0], page_bytes), (page_bytes, 1), kv_cache.storage_offset() * size)
