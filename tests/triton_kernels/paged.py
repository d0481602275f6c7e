# SPDX-License-Identifier: Apache-2.0
"""Random paged caches from unpaged keys and values, for the tests of the Triton kernels, and what a KT table should hold.

A new cache is full of bytes 0xFF: NaN in every type, so that whatever reads a place that holds nothing shows it, and any write
changes bytes. Block 0, vLLM's null block, stays so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.triton.cache import CacheView, cache_view

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
KT_DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = 2.0**64


@dataclass
class PagedCache:
    """A layer's cache, its storage, and its unused blocks in random order."""

    view: CacheView
    storage: Tensor
    """uint8, all bytes that kernels could reach."""
    kv_dtype: torch.dtype
    kt_dtype: torch.dtype
    free: list[int] = field(default_factory=list)

    @property
    def kv(self) -> Tensor:
        """``view.kv`` as numbers, ``[num_blocks, Hkv, B, 2 * D]``."""
        return self.view.kv.view(self.kv_dtype)

    def snapshot(self) -> Tensor:
        """All bytes, but with one zero in the KT table: to which of the two a bound is rounded is not specified."""
        before = self.storage.clone()
        self.view.kt.masked_fill_(self.view.kt == torch.tensor(-0.0).to(self.kt_dtype).view(self.view.kt.dtype), 0)
        snapshot = self.storage.clone()
        self.storage.copy_(before)
        return snapshot

    def take_blocks(self, num_tokens: int) -> Tensor:
        """Blocks for so many tokens, int32."""
        count = -(-num_tokens // self.view.block_size)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "make_cache was told too few blocks"
        return torch.tensor(taken, dtype=torch.int32)

    def add(self, keys: Tensor, values: Tensor, with_kt: bool = True) -> Tensor:
        """Store a sequence, ``[n, Hkv, D]`` each, in new blocks, with the KT entries of its full pages. Returns its blocks."""
        blocks = self.take_blocks(len(keys))
        self.write(blocks, keys, values)
        if with_kt and self.view.page_size:
            self.write_kt(blocks, keys)
        return blocks

    def write(self, blocks: Tensor, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Store tokens at positions ``first`` on; as they are, that is in stored units."""
        at = torch.arange(first, first + len(keys))
        block, slot = blocks[at // self.view.block_size].long(), at % self.view.block_size
        codes = torch.cat([keys, values], -1).to(self.kv_dtype).view(self.view.kv.dtype)
        self.view.kv[block, :, slot] = codes

    def read(self, blocks: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values of a sequence, ``[n, Hkv, D]`` each, of the KV dtype."""
        at = torch.arange(num_tokens)
        block, slot = blocks[at // self.view.block_size].long(), at % self.view.block_size
        codes = self.view.kv[block, :, slot]
        key, value = codes.split(self.view.head_size, -1)
        return key.contiguous().view(self.kv_dtype), value.contiguous().view(self.kv_dtype)

    def write_kt(self, blocks: Tensor, keys: Tensor) -> None:
        """The entries of the full pages of ``keys`` (stored units)."""
        pages = len(keys) // self.view.page_size
        stored = keys[: pages * self.view.page_size].to(self.kv_dtype).float()
        for side, entries in enumerate(page_entries(stored, self.view.page_size, self.kt_dtype, self.view.kt_is_mean)):
            codes = entries.view(self.view.kt.dtype)
            for page in range(pages):
                block, inside = divmod(page, self.view.pages_per_block)
                self.view.kt[int(blocks[block]), :, :, side, inside] = codes[:, page]

    def kt_entries(self, blocks: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
        """Stored minima and maxima (or means, twice) of a sequence's pages, ``[Hkv, pages, D]`` each, of the KT dtype."""
        at = torch.arange(num_pages)
        block, inside = blocks[at // self.view.pages_per_block].long(), at % self.view.pages_per_block
        entries = self.view.kt[block, :, :, :, inside].permute(3, 1, 0, 2).contiguous()  # from [pages, Hkv, D, 2]
        low, high = entries.view(self.kt_dtype)
        return low, high


def make_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    kv_dtype: torch.dtype = torch.float32,
    kt_dtype: torch.dtype = torch.bfloat16,
    page_size: int = 4,
    *,
    is_hnd: bool = True,
    tail_bytes: int = 32,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    kt_is_mean: bool = False,
    seed: int = 0,
) -> PagedCache:
    """An empty cache of ``num_blocks`` blocks and the null block: each K and V, a KT table if ``page_size``, and a tail.

    Heads come before tokens inside a block if ``is_hnd``, else tokens before heads.
    """
    kv_bytes = 2 * head_size * block_size * num_kv_heads * kv_dtype.itemsize
    pages = block_size // page_size if page_size else 0
    kt_bytes = 2 * head_size * pages * num_kv_heads * kt_dtype.itemsize
    block_bytes = kv_bytes + kt_bytes + tail_bytes
    storage = torch.full(((num_blocks + 1) * block_bytes,), 0xFF, dtype=torch.uint8)
    numbers = storage.view(kv_dtype)
    width = 2 * head_size
    inner = (block_size * width, width, 1) if is_hnd else (width, num_kv_heads * width, 1)
    kv = numbers.as_strided(
        (num_blocks + 1, num_kv_heads, block_size, width), (block_bytes // kv_dtype.itemsize, *inner)
    )
    view = cache_view(kv, kv_dtype, kt_dtype, kv_bytes, page_size, key_scale, value_scale, kt_is_mean)
    free = list(range(1, num_blocks + 1))
    random.Random(seed).shuffle(free)
    return PagedCache(view, storage, kv_dtype, kt_dtype, free)


def block_table(rows: Sequence[Tensor], first_blocks: Sequence[int] | None = None, width: int | None = None) -> Tensor:
    """The runner's table, int32 ``[num_reqs, blocks]``, with row i's blocks from ``first_blocks[i]`` on and the null block
    everywhere else."""
    firsts = [0] * len(rows) if first_blocks is None else list(first_blocks)
    least = max((first + len(row) for first, row in zip(firsts, rows, strict=True)), default=1)
    table = torch.zeros(len(rows), width or least, dtype=torch.int32)
    for i, (first, row) in enumerate(zip(firsts, rows, strict=True)):
        table[i, first : first + len(row)] = row
    return table


def random_tokens(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Normally distributed numbers that are representable in ``dtype``, as ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * magnitude).to(dtype)


# ------------------------------------------------------------------------------------- what a KT table should hold


def page_entries(keys: Tensor, page_size: int, kt_dtype: torch.dtype, is_mean: bool) -> tuple[Tensor, Tensor]:
    """The two entries of each page, ``[Hkv, pages, D]``."""
    return (page_means(keys, page_size, kt_dtype),) * 2 if is_mean else page_bounds(keys, page_size, kt_dtype)


def page_means(keys: Tensor, page_size: int, kt_dtype: torch.dtype) -> Tensor:
    """``reference.page_means`` as if no order of a page's keys lost anything in the sum, and within the same +-2^64."""
    means = torch.stack([of_page.double().mean(0) for of_page in keys.split(page_size)], 1)
    return means.float().clamp(-LARGEST, LARGEST).to(kt_dtype)


def page_bounds(keys: Tensor, page_size: int, kt_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``reference.page_summaries`` with what the stored formats add: bfloat16 stops at +-2^64, e4m3 has NaN for infinity."""
    keys = keys.float()
    if kt_dtype == torch.bfloat16:
        keys = keys.clamp(-LARGEST, LARGEST)
    if kt_dtype != torch.float8_e4m3fn:
        return reference.page_summaries(keys, page_size, kt_dtype)
    low, high = reference.page_summaries(keys, page_size, torch.float32)
    return round_to_e4m3(low, up=False), round_to_e4m3(high, up=True)


def round_to_e4m3(x: Tensor, up: bool) -> Tensor:
    """``reference.round_up`` or ``round_down`` to a type without infinities: its NaN codes stand for them."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = bound_values(codes.view(torch.float8_e4m3fn))
    ordered, order = numbers.sort()
    if up:
        place = torch.searchsorted(ordered, x.double().contiguous())
    else:
        place = torch.searchsorted(ordered, x.double().contiguous(), right=True) - 1
    return codes[order[place]].view(torch.float8_e4m3fn)


def bound_values(bounds: Tensor) -> Tensor:
    """KT entries as float64 numbers, infinities included: what to compare, since zeros have two codes."""
    numbers = bounds.double()
    if bounds.dtype != torch.float8_e4m3fn:
        return numbers
    infinity = torch.where(bounds.view(torch.uint8) >= 0x80, -torch.inf, torch.inf).double()
    return torch.where(numbers.isnan(), infinity, numbers)
