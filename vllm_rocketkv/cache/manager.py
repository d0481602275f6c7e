# SPDX-License-Identifier: Apache-2.0
"""The block manager: a sparse request goes once through natural -> extended -> compact, and its prompt blocks go back.

See docs/life_of_a_request.md. Everything is a function of (prompt length, budgets, block size) and of how many tokens the
scheduler has had computed; workers follow the same arithmetic (I3). "Prompt" here means the tokens up to the first eviction:
with decode-time eviction, of a prompt within the budget, decoded ones too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheSpec, iter_layer_specs
from vllm.v1.request import Request

from vllm_rocketkv.cache.pins import PinnedBlocks
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import PromptLayout, ceil_div
from vllm_rocketkv.metrics import Counts
from vllm_rocketkv.request_options import request_config

logger = init_logger("vllm.rocketkv.manager")


class Form(Enum):
    """The three forms of a request's block list."""

    NATURAL = auto()
    """``[p_0 .. p_k]``: as in plain vLLM."""
    EXTENDED = auto()
    """``[p_0 .. p_{n-1} | c_0 .. c_{e-1} | rest]``: equals the worker's append-only row. With decode-time eviction the rest ends
    with the private blocks that the first limit fills, and the parking blocks."""
    COMPACT = auto()
    """``[null] * s + [c_0 .. c_{e-1} | rest]``: the prompt blocks are back in the pool."""


@dataclass
class SparseRequest:
    """A request that is longer than the budget, or may become so."""

    config: RocketKVConfig
    layout: PromptLayout
    num_parking_blocks: int
    form: Form = Form.NATURAL
    extends: bool = False
    """Whether the allocation being made is the one that appends the private blocks."""
    num_computed_tokens: int = 0
    """Tokens computed before the allocation being made."""


class RocketKVManager(FullAttentionManager):
    """Full attention whose prompts shrink once computed (``docs/life_of_a_request.md``)."""

    # A hit that ends inside a block is copied without the KT bytes behind it.
    supports_fine_grained_hash_lookup = False

    def __init__(self, kv_cache_spec: KVCacheSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        layer_spec: Any = next(iter(iter_layer_specs(kv_cache_spec)))
        self._layer_spec = layer_spec
        self.config: RocketKVConfig = layer_spec.config
        self.config.check_block_size(self.block_size)
        self._own_configs: dict[str, RocketKVConfig] = {}
        self._sparse_requests: dict[str, SparseRequest] = {}
        self._pins = PinnedBlocks(self.block_pool, self.config.pinned_tokens // self.block_size)
        self._counts = Counts()
        self._totals = Counts()
        self._logged = Counts()
        self._last_log = -math.inf

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False

    def admit(self, request_id: str, num_prompt_tokens: int, config: RocketKVConfig | None = None) -> int | None:
        """Note a request that may be allocated next; ``config`` is its own, or None for the server's.

        Returns the longest prefix-cache hit it may use, in tokens, or None when any hit will do. A resumed request must not hit
        beyond its prompt: its own tokens were computed sparsely, another's longer prompt was not.
        """
        if config is not None:
            self._own_configs[request_id] = config
        config = self._own_configs.get(request_id, self.config)
        if not config.is_sparse(num_prompt_tokens, self.block_size):
            return None
        request = self._sparse_requests.get(request_id)
        if request is None:
            layout = config.layout(num_prompt_tokens, self.block_size)
            request = SparseRequest(config, layout, self._layer_spec.num_parking_blocks(config))
            self._sparse_requests[request_id] = request
        if config.accumulates:  # needs every query
            return 0
        layout = request.layout
        return layout.max_prefix_hit(config.eviction_window) if layout.is_evictable else layout.num_hashable_tokens

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        request = self._sparse_requests.get(request_id)
        if request is not None:
            extends = self._extends(request, total_computed_tokens, num_tokens_main_model)
            if not apply_admission_cap:  # the admission gate asks about the whole sequence and allocates nothing
                request.extends = extends
                request.num_computed_tokens = total_computed_tokens
            num_tokens = self._num_slots(request, num_tokens, extends)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        request = self._sparse_requests.get(request_id)
        if request is not None:
            if request.extends and request.form is Form.NATURAL:
                request.form = Form.EXTENDED
            num_tokens = self._num_slots(request, num_tokens, request.extends)
            self._count_step(request, num_tokens_main_model)
        self._protect_pins(request_id, num_tokens)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        self._protect_pins(request_id, num_local_computed_tokens + num_external_computed_tokens)
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing
        )

    def _protect_pins(self, request_id: str, num_tokens: int) -> None:
        self._pins.protect(ceil_div(num_tokens, self.block_size) - len(self.req_to_blocks[request_id]))

    def _extends(self, request: SparseRequest, num_computed_tokens: int, num_tokens_main_model: int) -> bool:
        """Private blocks are appended by the step that computes the first token of the observation window: they carry its
        queries should the window be cut by a chunk border (I7). A pure KV load computes nothing and lookahead does not count."""
        layout = request.layout
        window_start = layout.num_prompt_tokens - request.config.eviction_window
        return layout.is_evictable and num_tokens_main_model > max(window_start, num_computed_tokens)

    def _num_slots(self, request: SparseRequest, num_tokens: int, extends: bool) -> int:
        """Token slots for which the block list must have room, given that ``num_tokens`` tokens need one."""
        layout = request.layout
        if not layout.is_evictable:
            return num_tokens
        if request.form is Form.NATURAL and not extends:
            # Lookahead slots beyond the prompt would stand where the private blocks must.
            return min(num_tokens, layout.num_prompt_tokens)
        num_slots = layout.num_slots(num_tokens, request.config.eviction_window, request.num_parking_blocks)
        if request.form is Form.COMPACT:
            return num_slots
        return max(num_slots, layout.num_prompt_tokens) + layout.num_private_blocks * self.block_size

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        if num_prompt_tokens is not None:
            self.admit(request_id, num_prompt_tokens)
        request = self._sparse_requests.get(request_id)
        if request is None or request.form is not Form.EXTENDED:
            return
        # Only processed tokens count: steps in flight still read the prompt blocks (I4).
        if processed_computed_tokens >= request.layout.num_prompt_tokens:
            self._compact(request_id, request)

    def _compact(self, request_id: str, request: SparseRequest) -> None:
        layout = request.layout
        blocks = self.req_to_blocks[request_id]
        prompt_blocks = blocks[: layout.num_natural_blocks]
        blocks[: layout.num_natural_blocks] = [self._null_block] * layout.num_dropped_blocks
        if request.config.pinned_tokens:
            self._pins.add(prompt_blocks)
        # Tail first, as vLLM frees: the head of a prompt is the likelier prefix hit.
        self.block_pool.free_blocks(reversed(prompt_blocks))
        request.form = Form.COMPACT
        self._count_eviction(request_id, layout)

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None, **kwargs: Any
    ) -> None:
        sparse_request = self._sparse_requests.get(request.request_id)
        if sparse_request is None:
            super().cache_blocks(request, num_tokens, retention_interval, **kwargs)
        elif sparse_request.form is not Form.COMPACT:
            # Only full blocks of the prompt, which were computed densely (I2); FullAttentionManager would also hash its tail.
            num_tokens = min(num_tokens, sparse_request.layout.num_hashable_tokens)
            super(FullAttentionManager, self).cache_blocks(request, num_tokens, retention_interval, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._sparse_requests.pop(request_id, None)
        config = self._own_configs.pop(request_id, self.config)
        blocks = super().pop_blocks_for_free(request_id)
        if config.pinned_tokens:  # a request of another policy is no turn of a conversation
            self._pins.add(blocks)
        return blocks

    # --- counts --------------------------------------------------------------------------------------------------------

    def take_counts(self, others: Sequence[RocketKVManager] = ()) -> Counts:
        """Counts since the last call, after every step; totals are logged now and then, and when the last request ended.

        ``others`` manage further KV cache groups: the same requests, and blocks of their own.
        """
        counts, self._counts = self._counts, Counts()
        for other in others:
            counts.blocks_freed += other._counts.blocks_freed
            other._counts = Counts()
        self._totals += counts
        if self._totals.requests_evicted and self._totals != self._logged:
            is_due = time.monotonic() - self._last_log >= self.config.log_interval_seconds
            if is_due or not self._sparse_requests:
                self._log_totals()
        return counts

    def _count_step(self, request: SparseRequest, num_tokens_main_model: int) -> None:
        """Count what the step being allocated does to tokens beyond the prompt."""
        config, layout = request.config, request.layout
        first = max(request.num_computed_tokens, layout.num_prompt_tokens)
        if first >= num_tokens_main_model:
            return
        if config.selects:
            for position in range(first, num_tokens_main_model):
                num_cached = position + 1 - layout.dropped_tokens_at(position)
                self._counts.pages_selected += config.num_selected_pages(num_cached)
        num_evictions = layout.num_decode_evictions(num_tokens_main_model) - layout.num_decode_evictions(first)
        self._counts.decode_evictions += num_evictions
        self._counts.decode_tokens_dropped += num_evictions * layout.decode_interval

    def _count_eviction(self, request_id: str, layout: PromptLayout) -> None:
        logger.debug(
            "RocketKV: request %s kept %d of %d prompt tokens per KV head and gave back %d of %d blocks",
            request_id,
            layout.num_kept_tokens,
            layout.num_prompt_tokens,
            layout.num_dropped_blocks,
            layout.num_natural_blocks,
        )
        self._counts += Counts(
            requests_evicted=1,
            prompt_tokens_kept=layout.num_kept_tokens,
            prompt_tokens_dropped=layout.num_dropped_tokens,
            blocks_freed=layout.num_dropped_blocks,
        )

    def _log_totals(self) -> None:
        self._last_log = time.monotonic()
        totals = self._logged = replace(self._totals)
        logger.info(
            "RocketKV: requests evicted: %d, prompt tokens kept: %d, dropped: %d, blocks freed: %d, "
            "decoded tokens dropped: %d in %d evictions, pages selected: %d",
            totals.requests_evicted,
            totals.prompt_tokens_kept,
            totals.prompt_tokens_dropped,
            totals.blocks_freed,
            totals.decode_tokens_dropped,
            totals.decode_evictions,
            totals.pages_selected,
        )


class DenseLayersManager(FullAttentionManager):
    """The layers of option ``skip_layers``: full attention that keeps every token."""

    def __init__(self, kv_cache_spec: KVCacheSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        layer_spec: Any = next(iter(iter_layer_specs(kv_cache_spec)))
        self.config: RocketKVConfig = layer_spec.config

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None, **kwargs: Any
    ) -> None:
        # What comes beyond a sparse prompt was computed from what the sparse layers gave: it is shared as little as theirs (I2).
        params = request.sampling_params
        config = request_config(self.config, params.extra_args if params is not None else None) or self.config
        if config.is_sparse(request.num_prompt_tokens, self.block_size):
            layout = config.layout(request.num_prompt_tokens, self.block_size)
            num_tokens = min(num_tokens, layout.num_hashable_tokens)
        super(FullAttentionManager, self).cache_blocks(request, num_tokens, retention_interval, **kwargs)
