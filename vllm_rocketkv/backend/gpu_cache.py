# SPDX-License-Identifier: Apache-2.0
"""One layer's KV cache on a GPU, with the same methods as ``paged_cache.py`` has for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_rocketkv.backend.metadata import Rows, TouchedPages
from vllm_rocketkv.backend.parking import ParkedQueries, alias
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.kernels import cuda
from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.kernels.triton.cache import cache_view
from vllm_rocketkv.kernels.triton.compact import compact
from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split
from vllm_rocketkv.kernels.triton.stage1 import keep_tokens
from vllm_rocketkv.kernels.triton.top_tokens import top_tokens
from vllm_rocketkv.kernels.triton.update import summarise_pages, write_rows

KT_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Workspaces:
    """Memory that all layers share, since they run one after another."""

    fused: DecodeWorkspace
    split: SplitWorkspace | None
    """None where no row can have more tokens than ``fused`` has room for."""


class GPUPagedCache(ParkedQueries):
    """Prompt blocks and private blocks have one layout (``kernels/triton/cache.py``)."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        kv_dtype: torch.dtype,
        spec: RocketKVSpec,
        query_dtype: torch.dtype,
        num_query_heads: int,
        scales: tuple[float, float],
        workspaces: Workspaces,
    ) -> None:
        super().__init__(kv_cache, spec, query_dtype, num_query_heads)
        page_size = spec.config.page_size if spec.config.selects else 0
        kt_dtype = KT_DTYPES[spec.config.resolved_kt_dtype]
        is_mean = spec.config.selection == "mean"
        self.view = cache_view(alias(kv_cache), kv_dtype, kt_dtype, spec.kt_offset_bytes, page_size, *scales, is_mean)
        self.workspaces = workspaces

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
        """See ``PagedCache.keep_tokens``."""
        return keep_tokens(
            window_query,
            self.view,
            blocks.to(torch.int32),
            num_tokens,
            num_kept,
            scale,
            softcap,
            softmax_over_all,
            kernel_size,
            sink_tokens,
            choose=cuda.top_tokens if cuda.available() else top_tokens,
        )

    def compact(self, prompt_blocks: torch.Tensor, private_blocks: torch.Tensor, kept: torch.Tensor) -> None:
        """See ``PagedCache.compact``."""
        copy = cuda.compact if cuda.available() and not self.view.kt_is_mean else compact
        copy(self.view, prompt_blocks.to(torch.int32), private_blocks.to(torch.int32), kept)

    def summarise(self, touched: TouchedPages) -> None:
        """See ``PagedCache.summarise``."""
        summarise_pages(self.view, touched.table)

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
        """See ``PagedCache.decode``. A resumed request may bring more rows than the workspaces hold: they go in portions, once
        all keys and values are written."""
        if key is not None and value is not None:
            write_rows(self.view, key, value, rows.table, rows.block_table)
        fused, split = self.workspaces.fused, self.workspaces.split
        for table in rows.table.split(fused.max_rows):
            decode(query, self.view, output, table, rows.block_table, options, fused)
        # With eviction, rows grow long by decoding alone, and a CUDA graph holds no split kernels: see ``compat``.
        if split is None or (is_private and rows.max_num_tokens <= fused.capacity_tokens):
            return
        select = cuda.select_pages if split.page_capacity <= cuda.MOST_PAGES and cuda.available() else None
        for table in rows.table.split(split.max_rows):
            decode_split(
                query, self.view, output, table, rows.block_table, options, split, fused.capacity_tokens, select
            )
