# SPDX-License-Identifier: Apache-2.0
"""What one step does for each request, from lengths alone: dense on prompt blocks, rows on private blocks, or both.

A request's tokens of this step are cut at N, the prompt's length (``docs/life_of_a_request.md``). Tokens below N, and all
tokens of requests within the budget, are *natural*: vLLM's own ops write and read them. Tokens from N on are *rows* of the
decode op; of an evicted request they are *private* as well, that is their keys and values are written by that op, too.

The cut is made by one C++ op for the whole batch (``csrc/cpu/plan.h``); Python handles single requests only where a prompt's
observation window is computed, once or twice in its life.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_rocketkv import compat
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import cpu as _ops  # noqa: F401  (registers torch.ops.rocketkv_cpu)
from vllm_rocketkv.layout import PromptLayout


@dataclass
class WindowPart:
    """Tokens of a prompt's observation window computed in this step, while the prompt is not yet complete."""

    tokens: torch.Tensor
    """Rows of the batch, int64 ``[w]``."""
    index: torch.Tensor
    """Their places in the window, 0 to window_size - 1, int64 ``[w]``."""
    private_blocks: torch.Tensor
    """int64 ``[num_private_blocks]``."""


@dataclass
class Crossing:
    """A prompt that becomes complete in this step: stage 1 runs for it."""

    layout: PromptLayout
    prompt_blocks: torch.Tensor
    """int64 ``[num_natural_blocks]``."""
    private_blocks: torch.Tensor
    """int64 ``[num_private_blocks]``."""
    window_tokens: torch.Tensor
    """Rows of the batch that hold the newest queries of the window, int64 ``[w]``; older ones were parked."""
    parked: torch.Tensor
    """Places in the window, int64 ``[window_size - w]``, of the queries that earlier steps parked."""


@dataclass
class Rows:
    """Tokens that the decode op attends for, one row each, in the order of the batch."""

    table: torch.Tensor
    """int32 ``[R, 6]``: token (row of the batch), request, first_block (the row's sequence has its block i at
    ``block_table[request, first_block + i]``), num_tokens (cached tokens that the row may see, itself included), topr
    (dimensions that the estimation reads), later (1 if the same request has a later row)."""
    block_table: torch.Tensor
    """int32 ``[num_reqs, blocks]``, the runner's."""
    has_later: bool
    """Whether any row has a later one, so that the cache holds tokens which the earlier row must not see."""
    max_num_tokens: int


@dataclass
class TouchedPages:
    """KT pages that hold a token of this step, where keys stay in natural blocks: their summaries are recomputed."""

    table: torch.Tensor
    """int32 ``[pages, 3]``: block, page inside the block, real tokens on it."""

    @property
    def block(self) -> torch.Tensor:
        """``[pages]``."""
        return self.table[:, 0]

    @property
    def page(self) -> torch.Tensor:
        """``[pages]``."""
        return self.table[:, 1]

    @property
    def num_valid(self) -> torch.Tensor:
        """``[pages]``."""
        return self.table[:, 2]


@dataclass
class RocketKVMetadata:
    """What every layer of the group does in this step."""

    spec: RocketKVSpec | None
    """The format of the group's cache; None for layers that are not ours to compress."""
    natural_slots: torch.Tensor | None
    """Slot of each token whose K and V vLLM's op writes, int64 ``[tokens]``, negative for all others; None if there is none.
    The runner's own tensor unless the step has private tokens."""
    dense: CPUAttentionMetadata | None
    """The natural tokens, for vLLM's dense op; None if there is none."""
    dense_tokens: torch.Tensor | None = None
    """Rows of the batch that ``dense`` covers, int64; None for all of them, in order."""
    window_parts: list[WindowPart] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    touched_pages: TouchedPages | None = None
    rows: Rows | None = None


class PromptTable:
    """What the configuration says about each length of prompt, for the op to look up, int32 ``[max_model_len + 1, 3]``.

    Scheduler and worker must agree on every layout (I3), so no formula of ``RocketKVConfig`` is written again in C++: a length
    is filled in when it first occurs.
    """

    UNKNOWN = -1

    def __init__(self, config: RocketKVConfig, block_size: int, head_size: int, max_model_len: int) -> None:
        self.config, self.block_size, self.head_size = config, block_size, head_size
        self.tensor = torch.full((max_model_len + 1, 3), self.UNKNOWN, dtype=torch.int32)
        self._values = self.tensor.numpy()  # shares memory; stores without a dispatch and in any inference mode
        self._values[0] = 0  # padded rows and dummy runs

    def fill(self, num_prompt_tokens: int) -> None:
        """Set ``(is_sparse, num_dropped_blocks, topr)`` of one length."""
        is_sparse = self.config.is_sparse(num_prompt_tokens, self.block_size)
        layout = self.config.layout(num_prompt_tokens, self.block_size)
        topr = self.config.topr_for(num_prompt_tokens, self.head_size)
        self._values[num_prompt_tokens] = (is_sparse, layout.num_dropped_blocks, topr)

    def rows(self, prompt_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """``(is_sparse, num_dropped_blocks, topr)`` of each length, ``[num_reqs, 3]``."""
        for unknown in np.unique(prompt_lens[self._values[prompt_lens, 0] == self.UNKNOWN]):
            self.fill(int(unknown))
        return self._values[prompt_lens]


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
        self.rows = torch.empty(num_tokens, 6, dtype=torch.int32)
        self.natural_slots = torch.empty(num_tokens, dtype=torch.int64)
        self.dense_tokens = torch.empty(num_tokens, dtype=torch.int64)
        self.dense_starts = torch.empty(num_reqs + 1, dtype=torch.int32)
        self.dense_seq_lens = torch.empty(num_reqs, dtype=torch.int32)
        self.dense_requests = torch.empty(num_reqs, dtype=torch.int32)
        self.window_requests = torch.empty(num_reqs, dtype=torch.int32)
        self.touched_pages = torch.empty(num_tokens if self._touched_page_size else 0, 3, dtype=torch.int32)

    def plan(self, common: CommonAttentionMetadata, prompt_lens: torch.Tensor) -> StepCounts:
        """Fill the buffers for a step; ``prompt_lens`` int32 ``[num_reqs]``."""
        num_tokens, num_reqs = common.slot_mapping.shape[0], common.num_reqs
        if num_tokens > self.num_tokens or num_reqs > self.num_reqs:  # more padding than the limits let expect
            self._allocate(max(num_tokens, self.num_tokens), max(num_reqs, self.num_reqs))
        while True:
            counts = self._run(common, prompt_lens)
            if counts.unknown_request < 0:
                return counts
            self.prompts.fill(int(prompt_lens[counts.unknown_request]))

    def _run(self, common: CommonAttentionMetadata, prompt_lens: torch.Tensor) -> StepCounts:
        torch.ops.rocketkv_cpu.plan_step(
            common.query_start_loc_cpu,
            common.seq_lens,
            prompt_lens,
            common.slot_mapping,
            common.block_table_tensor,
            self.prompts.tensor,
            common.num_reqs,
            self.prompts.block_size,
            self.config.window_size,
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
        prompt_lens = compat.prompt_lens(common)
        counts = self.planner.plan(common, prompt_lens)
        metadata = self._split(common, counts) if counts.num_sparse_tokens else self._plain(common)
        for index in self.planner.window_requests[: counts.num_window_requests].tolist():
            self._add_window(metadata, common, index, int(prompt_lens[index]))
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
            metadata.rows = Rows(table, common.block_table_tensor, has_later, counts.max_row_tokens)
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

    def _add_window(self, metadata: RocketKVMetadata, common: CommonAttentionMetadata, index: int, N: int) -> None:
        assert self.config is not None
        first_token, next_token = common.query_start_loc_cpu[index : index + 2].tolist()
        end = int(common.seq_lens[index])
        layout, row = self.config.layout(N, self.block_size), common.block_table_tensor[index]
        add_window(metadata, layout, self.config.window_size, row, first_token, end - next_token + first_token, end)


def add_window(
    metadata: RocketKVMetadata,
    layout: PromptLayout,
    window_size: int,
    row: torch.Tensor,
    first_token: int,
    start: int,
    end: int,
) -> None:
    """Add one request of which this step computes a part of the observation window, or all of it.

    Its tokens at positions ``start`` to ``end - 1`` are rows ``first_token`` and on of the batch; ``row`` is its row of the block
    table.
    """
    N = layout.num_prompt_tokens
    blocks = row[: layout.num_natural_blocks + layout.num_private_blocks].to(torch.int64)
    prompt_blocks, private_blocks = blocks[: layout.num_natural_blocks], blocks[layout.num_natural_blocks :]
    window_start = N - window_size
    num_before = max(start - window_start, 0)
    from_position = window_start + num_before
    tokens = torch.arange(from_position, min(end, N), device=row.device) - start + first_token
    if end < N:
        places = torch.arange(num_before, num_before + len(tokens), device=row.device)
        metadata.window_parts.append(WindowPart(tokens, places, private_blocks))
    else:
        parked = torch.arange(num_before, device=row.device)
        metadata.crossings.append(Crossing(layout, prompt_blocks, private_blocks, tokens, parked))
