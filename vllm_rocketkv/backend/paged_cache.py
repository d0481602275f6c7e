# SPDX-License-Identifier: Apache-2.0
"""One layer's KV cache as this package reads and writes it: K, V, the KT table and the window's parked queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from vllm import _custom_ops as vllm_ops

from vllm_rocketkv.backend.metadata import Rows, TouchedPages
from vllm_rocketkv.backend.parking import ParkedQueries, alias
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.kernels.cpu import TYPES, ops
from vllm_rocketkv.kernels.options import ESTIMATORS, DecodeOptions

KT_DTYPES = {"bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM's names of the types whose cache is an array of bytes."""


@dataclass(frozen=True)
class BlockLayout:
    """Where element (token t, dimension d) lies inside one (block, head) of vLLM's kernels: at ``token[t] + dim[d]``, counted in
    elements from the start of the ``2 * block_size * head_size`` elements of that head, for keys and for values."""

    key_token: torch.Tensor
    key_dim: torch.Tensor
    value_token: torch.Tensor
    value_dim: torch.Tensor

    def packed(self) -> torch.Tensor:
        """All four in one int32 tensor, as the ops take it."""
        return torch.cat([self.key_token, self.key_dim, self.value_token, self.value_dim]).to(torch.int32)


def private_layout(block_size: int, head_size: int) -> torch.Tensor:
    """The layout of private blocks, ``[block_size][2 (K, V)][head_size]``, packed as the ops take it."""
    token, dim = 2 * head_size * torch.arange(block_size), torch.arange(head_size)
    return BlockLayout(token, dim, token + head_size, dim).packed()


@cache
def probe_block_layout(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int, kv_cache_dtype: str = "auto"
) -> BlockLayout:
    """Read the layout off vLLM's own op, which knows one for each instruction set, by storing indices with it.

    Raises:
        RuntimeError: if the op's layout is not the sum of a token offset and a dimension offset.
    """

    def where_is(index: torch.Tensor) -> torch.Tensor:
        return _probe(isa, dtype, index, kv_cache_dtype)

    tokens = where_is(torch.arange(block_size)[:, None].expand(-1, head_size))
    dims = where_is(torch.arange(head_size)[None, :].expand(block_size, -1))
    offsets = []
    for half in range(2):
        where = torch.empty(block_size, head_size, dtype=torch.int64)
        where[tokens[half], dims[half]] = torch.arange(block_size * head_size) + half * block_size * head_size
        token, dim = where[:, 0], where[0] - where[0, 0]
        if not torch.equal(where, token[:, None] + dim):
            raise RuntimeError(f"rocketkv: vLLM's CPU attention uses a KV layout for {isa!r} that is not understood")
        offsets += [token.contiguous(), dim.contiguous()]
    return BlockLayout(*offsets)


def _probe(isa: str, dtype: torch.dtype, index: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Store ``index`` ``[block_size, head_size]`` as keys and as values of a model in ``dtype``.

    Returns what lies where, ``[2, block_size * head_size]``.
    """
    block_size, head_size = index.shape
    stored = KV_CACHE_DTYPES.get(kv_cache_dtype)
    found = torch.zeros(2, block_size * head_size, dtype=torch.int64)
    for shift in range(0, 12, 3):  # three bits at a time: every type holds them exactly
        block = torch.zeros(1, 1, 2 * block_size, head_size, dtype=torch.uint8 if stored else dtype)
        digits = (index >> shift & 7).to(dtype)[:, None, :].contiguous()
        key_cache, value_cache = block.chunk(2, dim=2)
        slots = torch.arange(block_size)
        vllm_ops.cpu_attn_reshape_and_cache(
            digits, digits, key_cache, value_cache, slots, isa, kv_cache_dtype=kv_cache_dtype
        )
        found += block.view(stored or dtype).view(2, -1).float().long() << shift
    return found


class PagedCache(ParkedQueries):
    """One layer's cache ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, of which each block is one page.

    Prompt blocks are laid out as vLLM's kernels do it (*native*), private ones as ``private_layout`` says.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        spec: RocketKVSpec,
        isa: str,
        query_dtype: torch.dtype,
        num_query_heads: int,
        kv_cache_dtype: str = "auto",
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__(kv_cache, spec, query_dtype, num_query_heads)
        self.kv_cache = alias(kv_cache)
        self.num_blocks, self.num_kv_heads, self.block_size, _ = kv_cache.shape
        layout = probe_block_layout(isa, query_dtype, self.block_size, self.head_size, kv_cache_dtype)
        self.native_layout = layout.packed()
        self.private_layout = private_layout(self.block_size, self.head_size)
        kv_type = TYPES[KV_CACHE_DTYPES.get(kv_cache_dtype, kv_cache.dtype)]
        kt_type = TYPES[KT_DTYPES[spec.config.resolved_kt_dtype]]
        page_size = spec.config.page_size if spec.config.selects else 0
        is_mean, score_offset = spec.config.selection == "mean", spec.score_offset_bytes
        self._kt = (spec.kt_offset_bytes, kt_type, page_size, is_mean, score_offset)
        self._format = (kv_type, *scales, *self._kt)
        self._kv_type = kv_type

    def _layout(self, is_private: bool) -> torch.Tensor:
        return self.private_layout if is_private else self.native_layout

    def keep_tokens(
        self,
        window_query: torch.Tensor,
        blocks: torch.Tensor,
        num_tokens: int,
        num_kept: int,
        scale: float,
        softcap: float,
        softmax_over_all: bool,
        kernel_size: int,
        sink_tokens: int,
        is_private: bool = False,
    ) -> torch.Tensor:
        """Stage 1 by observation window: positions to keep, int32 ``[num_kv_heads, num_kept]``, ascending, of the tokens in
        ``blocks``, which are prompt blocks or private ones."""
        kept: torch.Tensor = ops.keep_tokens(
            window_query,
            self.kv_cache,
            blocks.to(torch.int32),
            num_tokens,
            num_kept,
            *self._format,
            self._layout(is_private),
            scale,
            softcap,
            softmax_over_all,
            kernel_size,
            sink_tokens,
        )
        return kept

    def keep_heavy(self, blocks: torch.Tensor, num_tokens: int, num_kept: int, num_recent: int) -> torch.Tensor:
        """Stage 1 by sums of attention: the newest ``num_recent`` tokens in ``blocks``, of any layout, and the best others.

        Returns positions, int32 ``[num_kv_heads, num_kept]``, ascending.
        """
        kept: torch.Tensor = ops.keep_heavy(
            self.kv_cache, blocks.to(torch.int32), num_tokens, num_kept, num_recent, *self._format
        )
        return kept

    def accumulate_scores(
        self,
        query: torch.Tensor,
        parts: torch.Tensor,
        block_table: torch.Tensor,
        is_private: bool,
        scale: float,
        softcap: float,
    ) -> None:
        """Add to every token's sum of attention what the step's queries ``[tokens, num_query_heads, head_size]`` give it.

        ``parts`` int32 ``[parts, 5]``: (first row of ``query``, number of successive rows, row of ``block_table``, first block in
        that row, cached tokens that the last of the queries sees, itself included). Sums of the parts' own tokens start here.
        """
        ops.accumulate_scores(
            query, self.kv_cache, parts, block_table, *self._format, self._layout(is_private), scale, softcap
        )

    def compact(
        self, blocks: torch.Tensor, private_blocks: torch.Tensor, kept: torch.Tensor, is_private: bool = False
    ) -> None:
        """Move the tokens ``kept`` int32 ``[num_kv_heads, n]`` of ``blocks`` to private positions 0 to n - 1, with their sums of
        attention and their KT table. With ``is_private`` in place: ``private_blocks`` are the first of ``blocks``."""
        ops.compact(
            self.kv_cache,
            blocks.to(torch.int32),
            private_blocks.to(torch.int32),
            kept,
            *self._format,
            self._layout(is_private),
            is_private,
        )

    def summarise(self, touched: TouchedPages) -> None:
        """Rebuild the KT entries of native pages that this step filled."""
        ops.summarise_pages(self.kv_cache, touched.table, self._kv_type, *self._kt, self.native_layout)

    def decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        rows: Rows,
        is_private: bool,
        options: DecodeOptions,
    ) -> None:
        """Attend for ``rows``, into ``output``; private ones are written first unless ``key`` is None."""
        ops.decode(
            query,
            key,
            value,
            self.kv_cache,
            output,
            rows.table,
            rows.block_table,
            *self._format,
            None if is_private else self.native_layout,
            options.scale,
            options.softcap,
            rows.max_num_tokens,
            options.sink_tokens,
            options.recent_tokens,
            options.by_page,
            options.adaptive,
            ESTIMATORS.index(options.estimator),
        )
