# SPDX-License-Identifier: Apache-2.0
"""Bytes that each operation moves, from shapes alone: what timings are held against, and what predictions are made from.

Memory is read in sectors of 32 bytes. A selected page of keys and values is one long run, so only the KT table can waste part of
a sector: per block and KV head it is ``[head_size, 2 (min, max), block_size / page_size]``, of which a query's signs ask for one
of min and max, a run of ``block_size / page_size`` numbers for each dimension. Runs shorter than a sector bring their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

SECTOR = 32
"""Bytes: the least that an NVIDIA GPU's second-level cache moves."""


@dataclass(frozen=True)
class Attention:
    """One layer's attention and the numbers that its cache stores."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_itemsize: int = 2
    model_itemsize: int = 2
    """Bytes of an element of query and output."""


@dataclass(frozen=True)
class Selection:
    """How a decode step reads the private cache of one request."""

    num_tokens: int = 2048
    """Cached tokens: what eviction kept, and what was decoded since."""
    topk_tokens: int = 256
    page_size: int = 4
    block_size: int = 128
    kt_itemsize: int = 1
    topr: int | None = None
    """Dimensions that the estimation reads; None for all."""

    @property
    def topk_pages(self) -> int:
        """Pages that are attended to."""
        return min(-(-self.topk_tokens // self.page_size), -(-self.num_tokens // self.page_size))


# ---- one row (token) and KV head of a decode step ----


def estimate_floor(head_size: int, selection: Selection) -> int:
    """Bytes of the KT numbers that the estimation needs: one of min and max, for each full page and dimension read."""
    dims = head_size if selection.topr is None else selection.topr
    return selection.num_tokens // selection.page_size * dims * selection.kt_itemsize


def estimate_bytes(head_size: int, selection: Selection, sector: int = SECTOR) -> float:
    """Bytes of all sectors that hold those numbers; the expected value where signs and ``topr`` choose at random."""
    pages = selection.num_tokens // selection.page_size
    per_block = selection.block_size // selection.page_size
    whole, rest = divmod(pages, per_block)
    dims = head_size if selection.topr is None else selection.topr
    size = selection.kt_itemsize
    read = whole * _block_sectors(head_size, dims, per_block * size, per_block * size, sector)
    if rest:
        read += _block_sectors(head_size, dims, per_block * size, rest * size, sector)
    return read * sector


@lru_cache
def _block_sectors(head_size: int, dims: int, run: int, used: int, sector: int) -> float:
    """Expected sectors touched in one block's table, which starts at a sector: for ``dims`` dimensions chosen at random of
    ``head_size``, the first ``used`` bytes of one of the two runs (``run`` bytes each), either with probability 1/2."""
    touching: dict[int, dict[int, int]] = {}  # sector -> dimension -> how many of its two runs reach into it
    for dim in range(head_size):
        for start in (2 * dim * run, (2 * dim + 1) * run):
            for index in range(start // sector, (start + used - 1) // sector + 1):
                of_sector = touching.setdefault(index, {})
                of_sector[dim] = of_sector.get(dim, 0) + 1
    expected = 0.0
    for of_sector in touching.values():
        halves = sum(runs == 1 for runs in of_sector.values())
        others = head_size - len(of_sector)
        # Untouched: no dimension with both runs here is read, and each one with a single run has the other sign.
        untouched = sum(comb(halves, j) * comb(others, dims - j) * 0.5**j for j in range(min(halves, dims) + 1))
        expected += 1 - untouched / comb(head_size, dims)
    return expected


def attend_bytes(attention: Attention, num_tokens: int) -> int:
    """Keys and values of ``num_tokens`` tokens of one KV head."""
    return num_tokens * attention.head_size * 2 * attention.kv_itemsize


def selected_tokens(selection: Selection) -> int:
    """Tokens that the attention reads."""
    return min(selection.topk_pages * selection.page_size, selection.num_tokens)


def decode_floor(attention: Attention, selection: Selection) -> int:
    """The least that a step reads for one KV head: 192 KiB for D = 128, 2,048 tokens, top-k 256, pages of 4, fp8 KT, bf16 KV."""
    return estimate_floor(attention.head_size, selection) + attend_bytes(attention, selected_tokens(selection))


def decode_bytes(attention: Attention, selection: Selection, sector: int = SECTOR) -> float:
    """The same in whole sectors, with the keys of a newest page that is not full yet, the query, the output, the block table."""
    group = attention.num_heads // attention.num_kv_heads
    newest = selection.num_tokens % selection.page_size * attention.head_size * attention.kv_itemsize
    query_and_output = 2 * group * attention.head_size * attention.model_itemsize
    table = -(-selection.num_tokens // selection.block_size) * 4
    read = estimate_bytes(attention.head_size, selection, sector)
    return read + attend_bytes(attention, selected_tokens(selection)) + newest + query_and_output + table


def dense_bytes(attention: Attention, num_tokens: int) -> int:
    """What any dense attention of one token reads for one KV head: 64 MiB for D = 128, bf16, 131,072 tokens."""
    return attend_bytes(attention, num_tokens)


def update_bytes(attention: Attention, selection: Selection) -> float:
    """A new token's key and value, read and written, for one KV head; every ``page_size`` tokens the page's keys are read and
    its KT entry is written."""
    token = 2 * attend_bytes(attention, 1)
    page = selection.page_size * attention.head_size * attention.kv_itemsize
    entry = 2 * attention.head_size * selection.kt_itemsize
    return token + (page + entry) / selection.page_size


# ---- all KV heads of a layer ----


def decode_layer_bytes(attention: Attention, selection: Selection, batch: int, sector: int = SECTOR) -> float:
    """Estimation, attention and the cache's update for ``batch`` requests."""
    of_head = decode_bytes(attention, selection, sector) + update_bytes(attention, selection)
    return batch * attention.num_kv_heads * of_head


def dense_layer_bytes(attention: Attention, num_tokens: int, batch: int) -> float:
    """Dense attention and the cache's update for ``batch`` requests of ``num_tokens`` cached tokens."""
    group = attention.num_heads // attention.num_kv_heads
    query_and_output = 2 * group * attention.head_size * attention.model_itemsize
    of_head = dense_bytes(attention, num_tokens) + query_and_output + 2 * attend_bytes(attention, 1)
    return batch * attention.num_kv_heads * float(of_head)


def cache_bytes(attention: Attention, num_layers: int, num_tokens: int, selection: Selection | None = None) -> int:
    """Memory of one request's cache in all layers; with ``selection``, its KT table too."""
    of_token = 2 * attention.head_size * attention.kv_itemsize
    if selection is not None:
        of_token += 2 * attention.head_size * selection.kt_itemsize // selection.page_size
    return num_layers * attention.num_kv_heads * num_tokens * of_token


# ---- stage 1, once a prompt ----


def window_bytes(attention: Attention, num_tokens: int, passes: int = 1) -> int:
    """Window scoring of one layer: every key of the prompt once in each pass; scores (float32) written once and read once."""
    keys = passes * num_tokens * attention.head_size * attention.kv_itemsize
    return attention.num_kv_heads * (keys + 2 * num_tokens * 4)


def compact_bytes(attention: Attention, selection: Selection) -> int:
    """Compaction of one layer: kept keys and values read and written once, the KT table written once."""
    moved = 2 * attend_bytes(attention, selection.num_tokens)
    table = selection.num_tokens // selection.page_size * 2 * attention.head_size * selection.kt_itemsize
    return attention.num_kv_heads * (moved + table)
