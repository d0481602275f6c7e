# SPDX-License-Identifier: Apache-2.0
"""What one step does for each request, from lengths alone: dense on prompt blocks, sparse on private blocks, or both.

A request's tokens of this step are cut at N, the prompt's length, into at most two parts: positions below N run densely on
the natural block table, positions from N on are a shorter sequence on the private one (design section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_rocketkv import compat
from vllm_rocketkv.cache.spec import RocketKVSpec
from vllm_rocketkv.layout import PromptLayout

_NEVER = 1 << 60
"""A position that no token reaches: where the private part of a request below the budget starts."""


@dataclass
class WindowPart:
    """Tokens of a prompt's observation window computed in this step, while the prompt is not yet complete."""

    tokens: torch.Tensor
    """Rows of the batch, ``[w]``."""
    index: torch.Tensor
    """Their places in the window, 0 to window_size - 1, ``[w]``."""
    private_blocks: torch.Tensor


@dataclass
class Crossing:
    """A prompt that becomes complete in this step: stage 1 runs for it."""

    layout: PromptLayout
    prompt_blocks: torch.Tensor
    private_blocks: torch.Tensor
    window_tokens: torch.Tensor
    """Rows of the batch that hold the newest queries of the window, ``[w]``; older ones were parked."""
    parked: torch.Tensor
    """Places in the window, ``[window_size - w]``, of the queries that earlier steps parked."""


@dataclass
class SparseRows:
    """Query tokens that attend to what selection chooses; one row a token."""

    tokens: torch.Tensor
    """Rows of the batch, ``[R]``."""
    block_table: torch.Tensor
    """``[R, blocks]``, blocks of the sequence each row attends to."""
    num_tokens: torch.Tensor
    """``[R]``, cached tokens that each row may see, itself included."""
    topr: torch.Tensor | None
    """``[R]``, dimensions that the estimation reads; None for all."""
    has_later_tokens: bool
    """Whether some request has more than one row, so that the cache holds tokens which the earlier rows must not see."""

    def part(self, start: int, stop: int) -> SparseRows:
        """Rows ``start`` to ``stop``."""
        topr = self.topr[start:stop] if self.topr is not None else None
        return SparseRows(
            self.tokens[start:stop],
            self.block_table[start:stop],
            self.num_tokens[start:stop],
            topr,
            self.has_later_tokens,
        )


@dataclass
class TouchedPages:
    """KT pages whose summary must be recomputed after this step's writes, ``[pages]`` each."""

    block: torch.Tensor
    page: torch.Tensor
    """Page inside the block."""
    num_valid: torch.Tensor
    """Real tokens on the page."""


@dataclass
class RocketKVMetadata:
    """What every layer of the group does in this step."""

    spec: RocketKVSpec | None
    """The format of the group's cache; None for layers that are not ours to compress."""
    slot_mapping: torch.Tensor
    dense: CPUAttentionMetadata | None
    dense_tokens: torch.Tensor | None = None
    """Rows of the batch that ``dense`` covers; None for all of them, in order."""
    window_parts: list[WindowPart] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    touched_pages: TouchedPages | None = None
    sparse: SparseRows | None = None


@dataclass
class _Batch:
    """The step's requests, ``[num_reqs]`` each, on the CPU in int64."""

    first: torch.Tensor
    """Row of the batch where the request's tokens start."""
    start: torch.Tensor
    """Position of its first token of this step."""
    end: torch.Tensor
    """Position after its last one."""
    prompt_lens: torch.Tensor
    is_sparse: torch.Tensor
    is_evictable: torch.Tensor
    num_natural_blocks: torch.Tensor
    num_dropped_blocks: torch.Tensor
    boundary: torch.Tensor
    """N where the request is sparse, else never: positions from here on are private."""
    private_table: torch.Tensor
    """``[num_reqs, width]``, block table of the private sequence."""


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
        self.head_size = kv_cache_spec.head_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RocketKVMetadata:
        batch = self._batch(common_attn_metadata)
        if batch is None:
            dense = self.dense_builder.build(0, common_attn_metadata)
            metadata = RocketKVMetadata(self.spec, common_attn_metadata.slot_mapping, dense)
        else:
            metadata = self._build_split(common_attn_metadata, batch)
        if self.config is not None and self.config.selects and (batch is not None or not self.config.evicts):
            metadata.touched_pages = self._touched_pages(
                common_attn_metadata, batch or self._whole_batch(common_attn_metadata)
            )
        return metadata

    def _batch(self, common: CommonAttentionMetadata) -> _Batch | None:
        """The step's requests, or None when none of them is longer than the budget: then the step is plain vLLM's (I6)."""
        if self.config is None or self.config.policy == "full":
            return None
        lens = compat.prompt_lens(common)
        is_sparse = [self.config.is_sparse(n, self.block_size) for n in lens.tolist()]
        return self._make_batch(common, lens, torch.tensor(is_sparse)) if any(is_sparse) else None

    def _whole_batch(self, common: CommonAttentionMetadata) -> _Batch:
        lens = compat.prompt_lens(common)
        return self._make_batch(common, lens, torch.zeros_like(lens, dtype=torch.bool))

    def _make_batch(self, common: CommonAttentionMetadata, lens: torch.Tensor, is_sparse: torch.Tensor) -> _Batch:
        assert self.config is not None
        first = common.query_start_loc_cpu[: common.num_reqs + 1].to(torch.int64)
        end = common.seq_lens[: common.num_reqs].to(torch.int64)
        layouts = [self.config.layout(n, self.block_size) for n in lens.tolist()]
        is_evictable = torch.tensor([layout.is_evictable for layout in layouts]) & is_sparse
        num_natural = torch.tensor([layout.num_natural_blocks for layout in layouts]) * is_evictable
        num_dropped = torch.tensor([layout.num_dropped_blocks for layout in layouts]) * is_evictable
        table = common.block_table_tensor.to(torch.int64)
        column = torch.arange(table.shape[1]) + num_natural[:, None]
        return _Batch(
            first=first[:-1],
            start=end - (first[1:] - first[:-1]),
            end=end,
            prompt_lens=lens,
            is_sparse=is_sparse,
            is_evictable=is_evictable,
            num_natural_blocks=num_natural,
            num_dropped_blocks=num_dropped,
            boundary=torch.where(is_sparse, lens, _NEVER),
            private_table=table.gather(1, column.clamp(max=table.shape[1] - 1)),
        )

    def _build_split(self, common: CommonAttentionMetadata, batch: _Batch) -> RocketKVMetadata:
        assert self.config is not None
        num_tokens = int(common.query_start_loc_cpu[-1])
        request = torch.repeat_interleave(batch.end - batch.start)
        position = torch.arange(num_tokens) + (batch.start - batch.first)[request]
        is_private = position >= batch.boundary[request]
        slots = self._slots(common, batch, request, position, is_private)
        is_row = is_private if self.config.selects else torch.zeros_like(is_private)
        metadata = RocketKVMetadata(
            spec=self.spec,
            slot_mapping=slots,
            dense=self._dense(common, batch, slots),
            dense_tokens=(~is_row).nonzero().flatten() if is_row.any() else None,
        )
        if is_row.any():
            metadata.sparse = self._sparse_rows(batch, is_row.nonzero().flatten(), request, position)
        if self.config.evicts:
            self._add_windows(metadata, common, batch, slots)
        return metadata

    def _slots(
        self,
        common: CommonAttentionMetadata,
        batch: _Batch,
        request: torch.Tensor,
        position: torch.Tensor,
        is_private: torch.Tensor,
    ) -> torch.Tensor:
        """Slot of every token, ``[num_actual_tokens]``; negative wherever the runner's is."""
        block = position // self.block_size - batch.num_dropped_blocks[request] * is_private
        natural = common.block_table_tensor.to(torch.int64)[
            request, block.clamp(max=common.block_table_tensor.shape[1] - 1)
        ]
        private = batch.private_table[request, block]
        slots = torch.where(is_private, private, natural) * self.block_size + position % self.block_size
        mapping = torch.full_like(common.slot_mapping, -1)
        mapping[: slots.shape[0]] = slots
        return torch.where(common.slot_mapping < 0, -1, mapping)

    def _dense(
        self, common: CommonAttentionMetadata, batch: _Batch, slots: torch.Tensor
    ) -> CPUAttentionMetadata | None:
        """The parts that run on vLLM's dense kernel: all prompt parts and, without selection, the private ones too."""
        assert self.config is not None
        cut = torch.minimum(torch.maximum(batch.boundary, batch.start), batch.end)
        natural, private = cut - batch.start, batch.end - cut
        if self.config.selects:
            private = torch.zeros_like(private)
        query_lens = torch.stack([natural, private], dim=1).flatten()
        shrunk = batch.end - batch.num_dropped_blocks * self.block_size
        seq_lens = torch.stack([cut, shrunk], dim=1).flatten()
        tables = torch.stack([common.block_table_tensor.to(torch.int64), batch.private_table], dim=1).flatten(0, 1)
        is_present = query_lens > 0
        query_lens, seq_lens = query_lens[is_present], seq_lens[is_present]
        if not len(query_lens):
            return None
        query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).to(torch.int32)
        num_tokens = int(query_start_loc[-1])
        part = common.replace(
            num_reqs=len(query_lens),
            num_actual_tokens=num_tokens,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens.to(torch.int32),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables[is_present].to(torch.int32),
            slot_mapping=slots[:num_tokens],
        )
        return self.dense_builder.build(0, part)

    def _sparse_rows(
        self, batch: _Batch, rows: torch.Tensor, request: torch.Tensor, position: torch.Tensor
    ) -> SparseRows:
        assert self.config is not None
        owner = request[rows]
        num_tokens = position[rows] + 1 - batch.num_dropped_blocks[owner] * self.block_size
        width = -(-int(num_tokens.max()) // self.block_size)
        topr = None
        if self.config.is_adaptive or self.config.topr is not None:
            topr_of = torch.tensor([self.config.topr_for(n, self.head_size) for n in batch.prompt_lens.tolist()])
            topr = topr_of[owner]
        has_later_tokens = bool((owner[1:] == owner[:-1]).any())
        return SparseRows(rows, batch.private_table[owner, :width], num_tokens, topr, has_later_tokens)

    def _add_windows(
        self, metadata: RocketKVMetadata, common: CommonAttentionMetadata, batch: _Batch, slots: torch.Tensor
    ) -> None:
        """Requests whose observation window is computed in this step, wholly or in part."""
        assert self.config is not None
        window_size = self.config.window_size
        lens = batch.prompt_lens
        in_window = batch.is_evictable & (batch.start < lens) & (batch.end > lens - window_size)
        for index in in_window.nonzero().flatten().tolist():
            n, start, end = int(lens[index]), int(batch.start[index]), int(batch.end[index])
            first_row = int(batch.first[index])
            if slots[first_row] < 0:
                continue  # a dummy run
            layout = self.config.layout(n, self.block_size)
            num_natural, num_private = layout.num_natural_blocks, layout.num_private_blocks
            row = common.block_table_tensor[index].to(torch.int64)
            private_blocks = row[num_natural : num_natural + num_private]
            from_position = max(start, n - window_size)
            tokens = torch.arange(from_position, min(end, n)) - start + first_row
            window_index = from_position - (n - window_size)
            if end < n:
                places = torch.arange(window_index, window_index + len(tokens))
                metadata.window_parts.append(WindowPart(tokens, places, private_blocks))
            else:
                parked = torch.arange(window_index)
                metadata.crossings.append(Crossing(layout, row[:num_natural], private_blocks, tokens, parked))

    def _touched_pages(self, common: CommonAttentionMetadata, batch: _Batch) -> TouchedPages | None:
        """Pages written in this step: of private blocks where prompts are evicted, of all blocks otherwise."""
        assert self.config is not None
        page_size = self.config.page_size
        dropped = batch.num_dropped_blocks * self.block_size
        is_real = common.slot_mapping[batch.first.clamp(max=max(len(common.slot_mapping) - 1, 0))] >= 0
        is_real &= batch.end > batch.start
        if self.config.evicts:
            is_real &= batch.is_evictable & (batch.end >= batch.prompt_lens)
            start = torch.where(batch.start < batch.prompt_lens, 0, batch.start - dropped)  # stage 1 fills every page
        else:
            start = batch.start
        first_page = start // page_size
        num_pages = torch.where(is_real, -(-(batch.end - dropped) // page_size) - first_page, 0)
        if not int(num_pages.sum()):
            return None
        owner = torch.repeat_interleave(num_pages)
        nth = torch.arange(len(owner)) - (num_pages.cumsum(0) - num_pages)[owner]
        page = first_page[owner] + nth
        first_token = page * page_size
        return TouchedPages(
            block=batch.private_table[owner, first_token // self.block_size],
            page=first_token % self.block_size // page_size,
            num_valid=((batch.end - dropped)[owner] - first_token).clamp(max=page_size),
        )
