# SPDX-License-Identifier: Apache-2.0
"""What one step does for each request, on GPUs: decided on the host where lengths of prompts suffice, completed on the device
where the lengths of sequences are needed (``kernels/triton/plan.py``). Nothing waits for the device.

A step is one of two kinds:

- *uniform*: decodes of equally many tokens, which CUDA graphs replay. Every token has a row, inert where the token is natural,
  and vLLM's dense attention covers the whole batch, with length 0 where a request has nothing natural. So shapes and launches
  follow from the size of the batch alone, and all that changes lies in buffers that stay where they are.
- anything else: only what there is to do. Stage 1 is among it, so it never runs inside a graph
  (``compat.choose_steps_for_cuda_graphs``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)

from vllm_rocketkv import compat
from vllm_rocketkv.backend.metadata import RocketKVMetadata, Rows, TouchedPages, add_window
from vllm_rocketkv.backend.prompt_table import PromptTable
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.kernels.triton.plan import find_touched_pages, finish_rows

Array: TypeAlias = NDArray[np.int64]

EVERYTHING = np.iinfo(np.int32).max
"""No limit to a length."""


class Step:
    """The host's knowledge of a batch, one entry a request unless it says otherwise."""

    def __init__(self, common: CommonAttentionMetadata, prompts: PromptTable, evicts: bool) -> None:
        self.starts = common.query_start_loc_cpu.numpy().astype(np.int64)
        """First token of each request, and the end of the last, ``[num_reqs + 1]``."""
        self.query_lens: Array = np.diff(self.starts)
        self.prompt_lens: Array = compat.prompt_lens(common).numpy().astype(np.int64)
        upper_bound = common.seq_lens_cpu_upper_bound
        assert upper_bound is not None
        # Exact while a prompt is computed, and never less than the prompt's length afterwards: all that is asked of it here.
        ends: Array = upper_bound[: len(self.prompt_lens)].numpy().astype(np.int64)
        self.first_positions = ends - self.query_lens
        plan = prompts.rows(self.prompt_lens)
        self.is_sparse, self.dropped_blocks, self.topr = (
            plan["is_sparse"] != 0,
            plan["num_dropped_blocks"],
            plan["topr"],
        )
        before_prompt_end = np.clip(self.prompt_lens - self.first_positions, 0, self.query_lens)
        self.num_natural: Array = np.where(self.is_sparse, before_prompt_end, self.query_lens)
        """Leading tokens of the request that vLLM's dense attention serves; the others are rows."""
        self.natural_blocks = -(-self.prompt_lens // prompts.block_size) if evicts else np.zeros_like(self.prompt_lens)
        self.dropped_tokens = self.dropped_blocks * prompts.block_size if evicts else self.natural_blocks

    @property
    def straddles(self) -> NDArray[np.bool_]:
        """Requests with natural tokens and rows."""
        return (self.num_natural > 0) & (self.num_natural < self.query_lens)

    def dense_lens(self, evicts: bool) -> Array:
        """Most tokens that the dense attention of a request may see: without eviction it may compute rows as well, which the
        decode kernel overwrites; with it, what lies beyond the prompt is not in the blocks that it reads."""
        limits = np.where(self.straddles & evicts, self.prompt_lens, EVERYTHING)
        return np.where(self.num_natural == 0, 0, limits)

    def max_row_tokens(self) -> int:
        """Most cached tokens that a row can have; 0 without rows."""
        tokens = self.first_positions + self.query_lens - self.dropped_tokens
        return int(tokens.max(initial=0, where=self.num_natural < self.query_lens))

    def row_table(self, every_token: bool, evicts: bool, num_tokens: int) -> NDArray[np.int32]:
        """``Rows.table`` with tokens to subtract from the request's length in place of num_tokens: of rows alone, or a row for
        each of ``num_tokens`` tokens, inert ones with request -1."""
        request: Array = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        token = np.arange(len(request))
        local = token - self.starts[request]
        is_row = local >= self.num_natural[request]
        last = local == self.query_lens[request] - 1
        from_end = self.query_lens[request] - 1 - local
        first_block = self.natural_blocks[request] if evicts else np.zeros_like(request)
        less = from_end + self.dropped_tokens[request]
        table = np.stack([token, request, first_block, less, self.topr[request], ~last], axis=1).astype(np.int32)
        if not every_token:
            return table[is_row]
        padded: NDArray[np.int32] = np.zeros((num_tokens, 6), dtype=np.int32)
        padded[:, 1] = -1
        padded[: len(table)][is_row] = table[is_row]
        return padded

    def touch_table(self, num_tokens: int) -> NDArray[np.int32]:
        """Input of ``find_touched_pages`` for ``num_tokens`` tokens."""
        request: Array = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        less = self.starts[request + 1] - np.arange(len(request))
        table: NDArray[np.int32] = np.full((num_tokens, 2), -1, dtype=np.int32)
        table[: len(request)] = np.stack([np.where(self.prompt_lens[request] > 0, request, -1), less], axis=1)
        return table

    def window_requests(self, window_size: int) -> list[int]:
        """Requests that compute a part of their observation window in this step."""
        ends = self.first_positions + self.num_natural
        return np.flatnonzero(
            self.is_sparse & (self.num_natural > 0) & (ends > self.prompt_lens - window_size)
        ).tolist()


class RocketKVGPUMetadataBuilder(AttentionMetadataBuilder[RocketKVMetadata]):
    """Builds ``RocketKVMetadata``; the dense part is built by vLLM's own builder, an instance of ``dense_builder_class``."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    dense_builder_class: ClassVar[Any]

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.dense_builder = self.dense_builder_class(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = kv_cache_spec if isinstance(kv_cache_spec, RocketKVSpec) else None
        self.config = self.spec.config if self.spec is not None else None
        self.uniform_query_len = max_decode_query_len(vllm_config)
        self.prompts: PromptTable | None = None
        if self.config is None or self.config.policy == "full":
            return
        limits, graphs = vllm_config.scheduler_config, vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._allocate(
            vllm_config.model_config.max_model_len,
            max(limits.max_num_batched_tokens, graphs),
            max(limits.max_num_seqs, graphs),
        )

    def _allocate(self, max_model_len: int, num_tokens: int, num_reqs: int) -> None:
        """Buffers that stay where they are, for CUDA graphs."""
        assert self.config is not None
        spec, device = self.kv_cache_spec, self.device
        self.block_size = spec.block_size
        self.prompts = PromptTable(self.config, spec.block_size, spec.head_size, max_model_len)
        self.rows = torch.zeros(num_tokens, 6, dtype=torch.int32, device=device)
        self.natural_slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.dense_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.dense_seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        touches = num_tokens if self.config.selects and not self.config.evicts else 0
        self.touching = torch.zeros(touches, 2, dtype=torch.int32, device=device)
        self.touched = torch.zeros(touches, 3, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        theirs = cls.dense_builder_class.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(theirs, cls._cudagraph_support, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> RocketKVMetadata:
        return self._build(common_attn_metadata, self.dense_builder.build_for_cudagraph_capture, is_capture=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RocketKVMetadata:
        return self._build(common_attn_metadata, lambda part: self.dense_builder.build(0, part), is_capture=False)

    def _build(self, common: CommonAttentionMetadata, build_dense: Any, is_capture: bool) -> RocketKVMetadata:
        if self.prompts is None:
            return RocketKVMetadata(self.spec, common.slot_mapping, build_dense(common))
        assert self.config is not None
        step = Step(common, self.prompts, self.config.evicts)
        windows = step.window_requests(self.config.eviction_window) if self.config.evicts else []
        is_uniform = is_capture or (
            common.max_query_len <= self.uniform_query_len
            and not windows
            and common.num_actual_tokens <= len(self.rows)
        )
        has_rows = is_uniform or bool((step.num_natural < step.query_lens).any())
        if not has_rows:
            metadata = RocketKVMetadata(self.spec, common.slot_mapping, build_dense(common))
        else:
            metadata = self._sparse(common, step, build_dense, is_uniform)
        for index in windows:
            layout = self.config.layout(int(step.prompt_lens[index]), self.block_size)
            start = int(step.first_positions[index])
            end = start + int(step.query_lens[index])
            row = common.block_table_tensor[index]
            add_window(metadata, self.config, layout, row, int(step.starts[index]), start, end)
        if len(self.touched):  # of short prompts as well, whose blocks a longer one may find in the prefix cache
            metadata.touched_pages = self._touched(common, step)
        return metadata

    def _sparse(
        self, common: CommonAttentionMetadata, step: Step, build_dense: Any, is_uniform: bool
    ) -> RocketKVMetadata:
        """A step with rows, or one that a CUDA graph may replay with rows."""
        assert self.config is not None
        evicts = self.config.evicts
        host_rows = step.row_table(is_uniform, evicts, common.num_actual_tokens)
        rows = async_tensor_h2d(host_rows, out=self.rows[: len(host_rows)])
        slots = self.natural_slots[: common.slot_mapping.shape[0]]
        slots.copy_(common.slot_mapping)
        finish_rows(rows, common.seq_lens, slots, evicts)
        has_later = bool((step.query_lens > 1).any())
        metadata = RocketKVMetadata(self.spec, slots, None)
        metadata.rows = Rows(rows, common.block_table_tensor, has_later, step.max_row_tokens())
        if is_uniform or step.num_natural.any():
            self._dense(metadata, common, step, build_dense, is_uniform)
        return metadata

    def _dense(
        self,
        metadata: RocketKVMetadata,
        common: CommonAttentionMetadata,
        step: Step,
        build_dense: Any,
        is_uniform: bool,
    ) -> None:
        """The natural tokens, for vLLM's dense attention."""
        num_reqs = common.num_reqs
        limits = np.zeros(num_reqs, dtype=np.int32)
        evicts = self.config is not None and self.config.evicts
        limits[: len(step.query_lens)] = step.dense_lens(evicts)
        dense_lens = async_tensor_h2d(limits, out=self.dense_lens[:num_reqs])
        seq_lens = torch.minimum(common.seq_lens[:num_reqs], dense_lens, out=self.dense_seq_lens[:num_reqs])
        if is_uniform or not evicts or not step.straddles.any():
            metadata.dense = build_dense(common.replace(seq_lens=seq_lens))
            return
        # A resumed request computes the end of its prompt and outputs beyond it: its dense part must end where its prompt does.
        request: Array = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
        local = np.arange(len(request)) - step.starts[request]
        tokens = np.flatnonzero(local < step.num_natural[request])
        starts = np.concatenate([[0], np.cumsum(step.num_natural)]).astype(np.int32)
        metadata.dense_tokens = async_tensor_h2d(tokens, self.device)
        metadata.dense = build_dense(
            common.replace(
                seq_lens=seq_lens,
                num_actual_tokens=len(tokens),
                query_start_loc=async_tensor_h2d(starts, self.device),
                query_start_loc_cpu=torch.from_numpy(starts),
                max_query_len=int(step.num_natural.max()),
            )
        )

    def _touched(self, common: CommonAttentionMetadata, step: Step) -> TouchedPages:
        """KT pages that this step fills, where keys stay in natural blocks."""
        assert self.config is not None
        num_tokens = common.num_actual_tokens
        tokens = async_tensor_h2d(step.touch_table(num_tokens), out=self.touching[:num_tokens])
        touched = self.touched[:num_tokens]
        find_touched_pages(
            tokens, common.seq_lens, common.block_table_tensor, touched, self.block_size, self.config.page_size
        )
        return TouchedPages(touched)


@cache
def builder(dense_backend: Any) -> type[RocketKVGPUMetadataBuilder]:
    """The builder whose dense part is that of ``dense_backend``."""
    attributes = {"dense_builder_class": dense_backend.get_builder_cls()}
    return type("RocketKVGPUMetadataBuilder", (RocketKVGPUMetadataBuilder,), attributes)
