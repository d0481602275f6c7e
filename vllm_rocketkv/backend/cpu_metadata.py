# SPDX-License-Identifier: Apache-2.0
"""What one step does for each request, on CPUs: the cut is made by one C++ op for the whole batch (``csrc/cpu/plan.h``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_rocketkv import compat
from vllm_rocketkv.backend.metadata import (
    PHASE,
    RocketKVMetadata,
    Rows,
    ScoreParts,
    TouchedPages,
    add_decode_windows,
    add_window,
)
from vllm_rocketkv.backend.prompt_table import PromptTable
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import cpu as _ops  # noqa: F401  (registers torch.ops.rocketkv_cpu)


class StepCounts(NamedTuple):
    """How much of each buffer one step fills; the order of ``StepCounts`` in ``csrc/cpu/plan.h``."""

    unknown_request: int
    num_rows: int
    max_row_tokens: int
    has_later: int
    num_sparse_tokens: int
    num_written: int
    num_dense_parts: int
    num_dense_tokens: int
    max_query_len: int
    max_seq_len: int
    num_window_requests: int
    num_touched_pages: int
    num_phases: int


class StepPlanner:
    """Runs ``plan_step`` into buffers that are reused by every step.

    They may be: on CPUs vLLM builds one metadata at a time for a KV cache group, and runs it to its end before the next.
    """

    def __init__(self, prompts: PromptTable, num_tokens: int, num_reqs: int) -> None:
        self.prompts, self.config = prompts, prompts.config
        # Where keys stay in natural blocks, no other op keeps the summaries of prompt tokens up to date.
        self._touched_page_size = self.config.page_size if self.config.selects and not self.config.evicts else 0
        self.counts = torch.zeros(len(StepCounts._fields), dtype=torch.int64)
        self._allocate(num_tokens, num_reqs)

    def _allocate(self, num_tokens: int, num_reqs: int) -> None:
        self.num_tokens, self.num_reqs = num_tokens, num_reqs
        self.rows = torch.empty(num_tokens, 9, dtype=torch.int32)
        self.natural_slots = torch.empty(num_tokens, dtype=torch.int64)
        self.dense_tokens = torch.empty(num_tokens, dtype=torch.int64)
        self.dense_starts = torch.empty(num_reqs + 1, dtype=torch.int32)
        self.dense_seq_lens = torch.empty(num_reqs, dtype=torch.int32)
        self.dense_requests = torch.empty(num_reqs, dtype=torch.int32)
        self.window_requests = torch.empty(num_reqs, dtype=torch.int32)
        self.touched_pages = torch.empty(num_tokens if self._touched_page_size else 0, 3, dtype=torch.int32)

    def plan(self, common: CommonAttentionMetadata, plan_ids: torch.Tensor) -> StepCounts:
        """Fill the buffers for a step; ``plan_ids`` int32 ``[num_reqs]`` are those of ``PromptTable``."""
        num_tokens, num_reqs = common.slot_mapping.shape[0], common.num_reqs
        if num_tokens > self.num_tokens or num_reqs > self.num_reqs:  # more padding than the limits let expect
            self._allocate(max(num_tokens, self.num_tokens), max(num_reqs, self.num_reqs))
        while True:
            counts = self._run(common, plan_ids)
            if counts.unknown_request < 0:
                return counts
            self.prompts.fill(int(plan_ids[counts.unknown_request]))

    def _run(self, common: CommonAttentionMetadata, plan_ids: torch.Tensor) -> StepCounts:
        torch.ops.rocketkv_cpu.plan_step(
            common.query_start_loc_cpu,
            common.seq_lens,
            plan_ids,
            common.slot_mapping,
            common.block_table_tensor,
            self.prompts.tensor,
            common.num_reqs,
            self.prompts.block_size,
            self._touched_page_size,
            self.config.evicts,
            self.rows,
            self.natural_slots,
            self.dense_tokens,
            self.dense_starts,
            self.dense_seq_lens,
            self.dense_requests,
            self.window_requests,
            self.touched_pages,
            self.counts,
        )
        return StepCounts(*self.counts.tolist())


class RocketKVMetadataBuilder(AttentionMetadataBuilder[RocketKVMetadata]):
    """Builds ``RocketKVMetadata``; the dense part is built by vLLM's own CPU builder."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dense_builder = CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
        # Layers of another spec (sliding windows of a mixed model) are computed densely here.
        self.spec = kv_cache_spec if isinstance(kv_cache_spec, RocketKVSpec) else None
        self.config = self.spec.config if self.spec is not None else None
        self.block_size = kv_cache_spec.block_size
        self.queries_per_block = self.spec.queries_per_block if self.spec is not None else 1
        self.planner: StepPlanner | None = None
        if self.config is not None and self.config.policy != "full":
            limits = vllm_config.scheduler_config
            max_model_len = vllm_config.model_config.max_model_len
            prompts = PromptTable(self.config, self.block_size, kv_cache_spec.head_size, max_model_len)
            self.planner = StepPlanner(prompts, limits.max_num_batched_tokens, limits.max_num_seqs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RocketKVMetadata:
        common = common_attn_metadata
        if self.planner is None:
            return self._plain(common)
        prompt_lens, configs = compat.prompt_lens(common), compat.request_configs(common)
        plan_ids = self.planner.prompts.plan_ids(prompt_lens, configs)
        counts = self.planner.plan(common, plan_ids)
        metadata = self._split(common, counts) if counts.num_sparse_tokens else self._plain(common)
        if self.planner.config.accumulates:
            self._sum_up(metadata, common, counts, plan_ids, configs)
        for index in self.planner.window_requests[: counts.num_window_requests].tolist():
            own = configs[index] if configs is not None else None
            self._add_windows(metadata, common, index, own or self.planner.config, int(prompt_lens[index]))
        if counts.num_touched_pages:
            metadata.touched_pages = TouchedPages(self.planner.touched_pages[: counts.num_touched_pages])
        return metadata

    def _plain(self, common: CommonAttentionMetadata) -> RocketKVMetadata:
        """Exactly plain vLLM's step (I6): every token is natural."""
        return RocketKVMetadata(self.spec, common.slot_mapping, self.dense_builder.build(0, common))

    def _split(self, common: CommonAttentionMetadata, counts: StepCounts) -> RocketKVMetadata:
        """A step with tokens beyond a sparse prompt, with or without natural tokens beside them."""
        assert self.planner is not None
        metadata = RocketKVMetadata(self.spec, None, None)
        if counts.num_written and self.planner.config.evicts:
            metadata.natural_slots = self.planner.natural_slots[: common.slot_mapping.shape[0]]
        elif counts.num_written:
            metadata.natural_slots = common.slot_mapping
        if counts.num_rows:
            table = self.planner.rows[: counts.num_rows]
            has_later = bool(counts.has_later)
            phases = [table]
            if counts.num_phases > 1:
                phases = [table[table[:, PHASE] == phase] for phase in range(counts.num_phases)]
            metadata.rows, *metadata.later_rows = (
                Rows(phase, common.block_table_tensor, has_later, counts.max_row_tokens) for phase in phases
            )
        if counts.num_dense_parts:
            metadata.dense = self._dense(common, counts)
            metadata.dense_tokens = self.planner.dense_tokens[: counts.num_dense_tokens]
        return metadata

    def _dense(self, common: CommonAttentionMetadata, counts: StepCounts) -> CPUAttentionMetadata:
        """The natural tokens as a batch of their own. Its slot mapping stays the runner's: vLLM reads it for encoders alone."""
        assert self.planner is not None
        num_parts = counts.num_dense_parts
        starts = self.planner.dense_starts[: num_parts + 1]
        part = common.replace(
            num_reqs=num_parts,
            num_actual_tokens=counts.num_dense_tokens,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=self.planner.dense_seq_lens[:num_parts],
            max_query_len=counts.max_query_len,
            max_seq_len=counts.max_seq_len,
            block_table_tensor=common.block_table_tensor.index_select(0, self.planner.dense_requests[:num_parts]),
        )
        return self.dense_builder.build(0, part)

    def _sum_up(
        self,
        metadata: RocketKVMetadata,
        common: CommonAttentionMetadata,
        counts: StepCounts,
        plan_ids: torch.Tensor,
        configs: Sequence[RocketKVConfig | None] | None,
    ) -> None:
        """Name the queries whose attention is summed up: those of requests under a policy that does, which share no blocks."""
        assert self.planner is not None
        is_summed = plan_ids > 0
        if configs is not None:
            is_summed &= torch.tensor([config is None or config.accumulates for config in configs])
        if metadata.rows is not None:
            for rows in (metadata.rows, *metadata.later_rows):
                rows.score_parts = rows.as_score_parts(is_summed)
        parts = counts.num_dense_parts
        starts, ends = self.planner.dense_starts[: parts + 1], self.planner.dense_seq_lens[:parts]
        requests, first_tokens = self.planner.dense_requests[:parts], self.planner.dense_tokens[starts[:-1].long()]
        # Dummy runs have no slots, whatever prompt lengths another batch has left behind.
        is_part = is_summed[requests.long()] & (common.slot_mapping[first_tokens] >= 0)
        table = torch.stack([first_tokens.int(), starts.diff(), requests, torch.zeros_like(ends), ends], 1)[is_part]
        if len(table):
            metadata.natural_queries = ScoreParts(table, common.block_table_tensor)

    def _add_windows(
        self,
        metadata: RocketKVMetadata,
        common: CommonAttentionMetadata,
        index: int,
        config: RocketKVConfig,
        num_prompt_tokens: int,
    ) -> None:
        first_token, next_token = common.query_start_loc_cpu[index : index + 2].tolist()
        end = int(common.seq_lens[index])
        start, row = end - next_token + first_token, common.block_table_tensor[index]
        layout = config.layout(num_prompt_tokens, self.block_size)
        if start < layout.num_prompt_tokens:
            add_window(metadata, config, layout, row, first_token, start, end)
        if layout.decode_budget is not None:
            add_decode_windows(metadata, config, layout, self.queries_per_block, row, first_token, start, end)
