# SPDX-License-Identifier: Apache-2.0
"""What one step does for each request, from lengths alone: dense on prompt blocks, rows on private blocks, or both.

A request's tokens of this step are cut at its natural length N, the prompt's length or, of a short prompt, the length at which
decoded tokens are first evicted (``docs/life_of_a_request.md``). Tokens below N, and all tokens of requests that are never
evicted or selected from, are *natural*: vLLM's own ops write and read them. Tokens from N on are *rows* of the decode op; of an
evicted request they are *private* as well, that is their keys and values are written by that op, too.

The cut is made for the whole batch at once (``cpu_metadata.py``, ``gpu_metadata.py``); Python handles single requests only where
an eviction's window is computed: once or twice in a prompt's life, and before each eviction of decoded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import PromptLayout, parking_blocks

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    from vllm_rocketkv.cache.spec import RocketKVSpec

PHASE = 8
"""Column of ``Rows.table``."""


@dataclass
class WindowPart:
    """Tokens of an eviction's window computed in this step, while the window is not yet complete."""

    tokens: torch.Tensor
    """Rows of the batch, int64 ``[w]``."""
    index: torch.Tensor
    """Their places in the window, 0 to window_size - 1, int64 ``[w]``."""
    parking_blocks: torch.Tensor
    """Where their queries wait, int64 ``[blocks]``."""


@dataclass
class Crossing:
    """A prompt that becomes complete in this step: stage 1 runs for it."""

    config: RocketKVConfig
    """The request's."""
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
class DecodeEviction:
    """Decoded tokens are evicted in this step, in place, once the rows of ``phase`` are done."""

    config: RocketKVConfig
    """The request's."""
    phase: int
    blocks: torch.Tensor
    """The request's private blocks that hold tokens, int64 ``[blocks]``."""
    num_tokens: int
    """Tokens that they hold."""
    num_kept: int
    window_tokens: torch.Tensor
    """Rows of the batch that hold the newest queries of the window, int64 ``[w]``; older ones were parked."""
    parking_blocks: torch.Tensor
    """int64 ``[blocks]``."""
    parked: torch.Tensor
    """Places in the window, int64 ``[window_size - w]``, of the queries that earlier steps parked."""


@dataclass
class Rows:
    """Tokens that the decode op attends for, one row each, in the order of the batch."""

    table: torch.Tensor
    """int32 ``[R, 9]``: token (row of the batch), request, first_block (the row's sequence has its block i at
    ``block_table[request, first_block + i]``), num_tokens (cached tokens that the row may see, itself included), topr
    (dimensions that the estimation reads), later (1 if the same request has a later row); on CPUs also topk_tokens (tokens it
    attends to), dense_below (with at most so many cached, to all of them), phase (how often decoded tokens are evicted in this
    step before it). On GPUs ``[R, 6]``."""
    block_table: torch.Tensor
    """int32 ``[num_reqs, blocks]``, the runner's."""
    has_later: bool
    """Whether any row has a later one, so that the cache holds tokens which the earlier row must not see."""
    max_num_tokens: int
    score_parts: ScoreParts | None = None
    """Those of the rows whose attention is summed up."""

    def as_score_parts(self, is_summed: torch.Tensor) -> ScoreParts | None:
        """One part a request, whose rows follow one another; of requests that ``is_summed``, bool ``[num_reqs]``, names."""
        table = self.table[is_summed[self.table[:, 1].long()]]
        if not len(table):
            return None
        requests, counts = torch.unique_consecutive(table[:, 1], return_counts=True)
        last = counts.cumsum(0) - 1
        parts = [table[last - counts + 1, 0], counts.int(), requests, table[last, 2], table[last, 3]]
        return ScoreParts(torch.stack(parts, 1), self.block_table)


@dataclass
class TouchedPages:
    """KT pages that hold a token of this step, where keys stay in natural blocks: full ones are summarised."""

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
class ScoreParts:
    """Queries whose attention is summed up in the cache."""

    table: torch.Tensor
    """int32 ``[parts, 5]``: first token (row of the batch), number of tokens, request, first_block, cached tokens that the last
    one sees, itself included."""
    block_table: torch.Tensor
    """int32 ``[num_reqs, blocks]``, the runner's."""


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
    natural_queries: ScoreParts | None = None
    """The natural tokens whose attention is summed up, for policies that do."""
    rows: Rows | None = None
    """Those of phase 0."""
    later_rows: list[Rows] = field(default_factory=list)
    """Those of phases 1 and on, of resumed requests alone."""
    decode_evictions: list[DecodeEviction] = field(default_factory=list)


def add_window(
    metadata: RocketKVMetadata,
    config: RocketKVConfig,
    layout: PromptLayout,
    row: torch.Tensor,
    first_token: int,
    start: int,
    end: int,
) -> None:
    """Add one request of which this step computes a part of the first eviction's window, or all of it.

    Its tokens at positions ``start`` to ``end - 1`` are rows ``first_token`` and on of the batch; ``row`` is its row of the block
    table.
    """
    N, window_size = layout.num_prompt_tokens, config.eviction_window
    if end <= N - window_size:
        return
    blocks = row[: layout.num_natural_blocks + layout.num_private_blocks].to(torch.int64)
    prompt_blocks, private_blocks = blocks[: layout.num_natural_blocks], blocks[layout.num_natural_blocks :]
    window = Window.of(N, window_size, first_token, start, end, row.device)
    if end < N:
        metadata.window_parts.append(WindowPart(window.tokens, window.places, private_blocks))
    else:
        crossing = Crossing(config, layout, prompt_blocks, private_blocks, window.tokens, window.parked)
        metadata.crossings.append(crossing)


def add_decode_windows(
    metadata: RocketKVMetadata,
    config: RocketKVConfig,
    layout: PromptLayout,
    queries_per_block: int,
    row: torch.Tensor,
    first_token: int,
    start: int,
    end: int,
) -> None:
    """Add every eviction of decoded tokens of one request whose window this step computes a part of; arguments as above.

    A block holds ``queries_per_block`` parked queries.
    """
    assert layout.decode_budget is not None
    window_size, first_row = config.eviction_window, max(start, layout.num_prompt_tokens)
    num_parking = parking_blocks(window_size, queries_per_block)
    parking = row[layout.parking_index : layout.parking_index + num_parking].to(torch.int64)
    for limit in layout.evictions_between(start, end, window_size):
        window = Window.of(limit, window_size, first_token, start, end, row.device)
        if end < limit:
            metadata.window_parts.append(WindowPart(window.tokens, window.places, parking))
            continue
        phase = layout.num_decode_evictions(limit - 1) - layout.num_decode_evictions(first_row)
        blocks = row[layout.num_natural_blocks : layout.parking_index].to(torch.int64)
        num_tokens = limit - layout.dropped_tokens_at(limit - 1)
        metadata.decode_evictions.append(
            DecodeEviction(
                config, phase, blocks, num_tokens, layout.decode_budget, window.tokens, parking, window.parked
            )
        )


class Window(NamedTuple):
    """Which queries of an eviction's window a step computes; all int64."""

    tokens: torch.Tensor
    """Rows of the batch, ``[w]``."""
    places: torch.Tensor
    """Their places in the window, ``[w]``."""
    parked: torch.Tensor
    """The places before them."""

    @classmethod
    def of(cls, limit: int, window_size: int, first_token: int, start: int, end: int, device: torch.device) -> Window:
        """Of the ``window_size`` tokens before ``limit``, those at positions ``start`` to ``end - 1``."""
        window_start = limit - window_size
        num_before = max(start - window_start, 0)
        tokens = torch.arange(window_start + num_before, min(end, limit), device=device) - start + first_token
        places = torch.arange(num_before, num_before + len(tokens), device=device)
        return cls(tokens, places, torch.arange(num_before, device=device))
