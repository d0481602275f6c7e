# SPDX-License-Identifier: Apache-2.0
"""A step's metadata as a plain loop over every token finds it, and the comparison with what was built."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_rocketkv.backend.metadata import RocketKVMetadata, Rows
from vllm_rocketkv.backend.prompt_table import NEVER
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import PromptLayout

B, HEAD_SIZE, MAX_LEN, WINDOW = 32, 64, 1024, 16
QUERIES_PER_BLOCK = 6


@dataclass(frozen=True)
class Request:
    """Positions ``start`` to ``end`` - 1 of one request are computed in this step."""

    num_prompt: int
    start: int
    end: int
    is_dummy: bool = False


@dataclass
class Expected:
    """What a loop over every token finds."""

    slots: list[int] = field(default_factory=list)
    num_sparse: int = 0
    dense_tokens: list[int] = field(default_factory=list)
    dense_parts: list[tuple[int, int, int]] = field(default_factory=list)
    """(request, tokens, length) of each request with natural tokens."""
    rows: list[list[int]] = field(default_factory=list)
    """In the order of the batch, of all phases."""
    own_slots: list[int] = field(default_factory=list)
    """Where each row's own token lives."""
    window_parts: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    crossings: list[tuple[list[int], list[int], list[int], list[int]]] = field(default_factory=list)
    evictions: list[tuple[int, list[int], int, list[int], list[int], list[int]]] = field(default_factory=list)
    """(phase, blocks, tokens, window tokens, parking blocks, parked) of each eviction of decoded tokens."""
    pages: list[list[int]] = field(default_factory=list)


def expect(config: RocketKVConfig, common: CommonAttentionMetadata, requests: list[Request]) -> Expected:
    found = Expected()
    for index, request in enumerate(requests):
        expect_tokens(found, config, common.block_table_tensor[index].tolist(), index, request)
        if request.is_dummy:
            continue
        first = int(common.query_start_loc_cpu[index])
        expect_window(found, config, common.block_table_tensor[index].tolist(), first, request)
        expect_decode_windows(found, config, common.block_table_tensor[index].tolist(), first, request)
        if config.selects and not config.evicts:
            expect_pages(found, config, common.block_table_tensor[index].tolist(), request)
    found.slots += [-1] * (common.num_actual_tokens - len(found.slots))
    return found


def expect_tokens(found: Expected, config: RocketKVConfig, table: list[int], index: int, request: Request) -> None:
    layout = config.layout(request.num_prompt, B)
    N = layout.num_prompt_tokens
    natural, rows = [], []
    limits = evictions_of(layout, request.start, request.end)
    for position in range(request.start, request.end):
        token = len(found.slots)
        slot = table[layout.block_index(position)] * B + position % B
        is_sparse = config.is_sparse(request.num_prompt, B) and position >= N
        found.slots.append(-1 if request.is_dummy or (is_sparse and config.evicts) else slot)
        found.num_sparse += is_sparse
        if not is_sparse:
            natural.append(position)
            found.dense_tokens.append(token)
        elif not request.is_dummy:
            # One eviction after another, as the formulas tell it, not as the layout computes it.
            evictions = sum(limit <= position for limit in limits)
            num_tokens = (layout.num_kept_tokens if config.evicts else N) + position + 1 - N
            num_tokens -= evictions * layout.decode_interval
            first_block = layout.num_natural_blocks if config.evicts else 0
            phase = sum(max(request.start, N) < limit <= position for limit in limits)
            topk = (config.topk_for_step, config.dense_below) if config.selects else (NEVER, NEVER)
            topr = config.topr_for(request.num_prompt, HEAD_SIZE)
            rows.append([token, index, first_block, num_tokens, topr, 0, *topk, phase])
            found.own_slots.append(slot)
    for row, next_row in itertools.pairwise(rows):
        row[5] = int(row[-1] == next_row[-1])
    found.rows += rows
    if natural:
        found.dense_parts.append((index, len(natural), natural[-1] + 1))


def evictions_of(layout: PromptLayout, start: int, end: int) -> list[int]:
    """Lengths up to ``end + WINDOW`` at which decoded tokens are evicted: when they fill budget and interval."""
    if layout.decode_budget is None or not layout.is_evictable:
        return []
    limits, cached = [], layout.num_kept_tokens
    for length in range(layout.num_prompt_tokens + 1, end + WINDOW):
        cached += 1
        if cached == layout.decode_budget + layout.decode_interval:
            limits.append(length)
            cached = layout.decode_budget
    return limits


def expect_decode_windows(
    found: Expected, config: RocketKVConfig, table: list[int], first: int, request: Request
) -> None:
    layout, W = config.layout(request.num_prompt, B), config.eviction_window
    limits = evictions_of(layout, request.start, request.end)
    for limit in limits:
        window = range(limit - W, limit)
        computed = [position for position in window if request.start <= position < request.end]
        if not computed:
            continue
        tokens = [first + position - request.start for position in computed]
        n, filled = layout.num_natural_blocks, -(-(layout.decode_budget + layout.decode_interval) // B)
        parking = table[n + filled :][: -(-(W - 1) // QUERIES_PER_BLOCK)]
        if computed[-1] < limit - 1:
            found.window_parts.append((tokens, [position - window[0] for position in computed], parking))
            continue
        before = max(request.start, layout.num_prompt_tokens)
        phase = sum(before < other < limit for other in limits)
        parked = [place for place, position in enumerate(window) if position < request.start]
        num_tokens = layout.decode_budget + layout.decode_interval
        found.evictions.append((phase, table[n : n + filled], num_tokens, tokens, parking, parked))


def expect_window(found: Expected, config: RocketKVConfig, table: list[int], first: int, request: Request) -> None:
    layout, W = config.layout(request.num_prompt, B), config.eviction_window
    N = layout.num_prompt_tokens
    if not (config.evicts and layout.is_evictable):
        return
    window = range(N - W, N)
    computed = [position for position in window if request.start <= position < request.end]
    if not computed:
        return
    tokens = [first + position - request.start for position in computed]
    n, e = layout.num_natural_blocks, layout.num_private_blocks
    private = table[n : n + e]
    if computed[-1] == N - 1:
        parked = [place for place, position in enumerate(window) if position < request.start]
        found.crossings.append((table[:n], private, tokens, parked))
    else:
        found.window_parts.append((tokens, [position - (N - W) for position in computed], private))


def expect_pages(found: Expected, config: RocketKVConfig, table: list[int], request: Request) -> None:
    size = config.page_size
    for page in sorted({position // size for position in range(request.start, request.end)}):
        on_page = [position for position in range(page * size, page * size + size) if position < request.end]
        found.pages.append([table[page * size // B], page * size % B // size, len(on_page)])


def check(
    config: RocketKVConfig, common: CommonAttentionMetadata, requests: list[Request], actual: RocketKVMetadata
) -> Expected:
    wanted = expect(config, common, requests)
    check_natural(config, common, wanted, actual)
    if wanted.rows:
        assert actual.rows is not None
        for phase, rows in enumerate([actual.rows, *actual.later_rows]):
            check_rows(common, [row for row in wanted.rows if row[-1] == phase], rows, config.accumulates)
            assert rows.has_later is any(row[5] for row in wanted.rows)
            assert rows.max_num_tokens == max(row[3] for row in wanted.rows)
        assert len(actual.later_rows) == max(row[-1] for row in wanted.rows)
        for (_, index, first_block, num_tokens, *_), slot in zip(wanted.rows, wanted.own_slots, strict=True):
            last = num_tokens - 1  # the sequence that a row reads ends with its own token
            assert int(common.block_table_tensor[index, first_block + last // B]) * B + last % B == slot
    else:
        assert actual.rows is None
        assert actual.later_rows == []
    parts = [(p.tokens.tolist(), p.index.tolist(), p.parking_blocks.tolist()) for p in actual.window_parts]
    assert parts == wanted.window_parts
    crossings = [
        (c.prompt_blocks.tolist(), c.private_blocks.tolist(), c.window_tokens.tolist(), c.parked.tolist())
        for c in actual.crossings
    ]
    assert crossings == wanted.crossings
    evictions = [
        (
            e.phase,
            e.blocks.tolist(),
            e.num_tokens,
            e.window_tokens.tolist(),
            e.parking_blocks.tolist(),
            e.parked.tolist(),
        )
        for e in actual.decode_evictions
    ]
    assert evictions == wanted.evictions
    assert all(e.num_kept == config.decode_budget_for_step for e in actual.decode_evictions)
    check_natural_queries(config, common, requests, wanted, actual)
    if wanted.pages:
        touched = actual.touched_pages
        assert touched is not None
        assert touched.table.dtype == torch.int32
        assert touched.table.tolist() == wanted.pages
        columns = torch.stack([touched.block, touched.page, touched.num_valid], 1)
        assert torch.equal(columns, touched.table)
    else:
        assert actual.touched_pages is None
    return wanted


def check_rows(common: CommonAttentionMetadata, wanted: list[list[int]], rows: Rows, accumulates: bool) -> None:
    assert rows.table.dtype == torch.int32
    assert rows.table.tolist() == wanted
    assert rows.block_table is common.block_table_tensor
    by_request = [list(part) for _, part in itertools.groupby(wanted, key=lambda row: row[1])]
    parts = rows.as_score_parts(torch.ones(common.num_reqs, dtype=torch.bool))
    assert parts is not None
    assert parts.table.tolist() == [[part[0][0], len(part), *part[-1][1:4]] for part in by_request]
    if not accumulates:
        assert rows.score_parts is None
    else:
        assert rows.score_parts is not None
        assert torch.equal(rows.score_parts.table, parts.table)


def check_natural_queries(
    config: RocketKVConfig,
    common: CommonAttentionMetadata,
    requests: list[Request],
    wanted: Expected,
    actual: RocketKVMetadata,
) -> None:
    parts, first_token = [], 0
    for index, num_tokens, length in wanted.dense_parts:
        request = requests[index]
        if request.num_prompt and not request.is_dummy and config.is_sparse(request.num_prompt, B):
            parts.append([wanted.dense_tokens[first_token], num_tokens, index, 0, length])
        first_token += num_tokens
    if not (config.accumulates and parts):
        assert actual.natural_queries is None
        return
    assert actual.natural_queries is not None
    assert actual.natural_queries.table.dtype == torch.int32
    assert actual.natural_queries.table.tolist() == parts


def check_natural(
    config: RocketKVConfig, common: CommonAttentionMetadata, wanted: Expected, actual: RocketKVMetadata
) -> None:
    if not wanted.num_sparse:  # exactly plain vLLM's step
        assert actual.natural_slots is common.slot_mapping
        assert actual.dense is common  # type: ignore[comparison-overlap]
        assert actual.dense_tokens is None
        assert actual.natural_slots.tolist() == wanted.slots
        return
    if any(slot >= 0 for slot in wanted.slots):
        assert actual.natural_slots is not None
        assert actual.natural_slots.dtype == torch.int64
        assert actual.natural_slots.tolist() == wanted.slots
    else:
        assert actual.natural_slots is None
    dense: Any = actual.dense
    if not wanted.dense_parts:
        assert dense is None
        assert actual.dense_tokens is None
        return
    requests, query_lens, seq_lens = zip(*wanted.dense_parts, strict=True)
    assert actual.dense_tokens is not None
    assert actual.dense_tokens.dtype == torch.int64
    assert actual.dense_tokens.tolist() == wanted.dense_tokens
    starts = [sum(query_lens[:count]) for count in range(len(query_lens) + 1)]
    for tensor in (dense.query_start_loc, dense.query_start_loc_cpu, dense.seq_lens, dense.block_table_tensor):
        assert tensor.dtype == torch.int32
    assert dense.query_start_loc.tolist() == dense.query_start_loc_cpu.tolist() == starts
    assert dense.seq_lens.tolist() == list(seq_lens)
    assert torch.equal(dense.block_table_tensor, common.block_table_tensor[list(requests)])
    assert dense.num_reqs == len(requests)
    assert dense.num_actual_tokens == len(wanted.dense_tokens)
    assert (dense.max_query_len, dense.max_seq_len) == (max(query_lens), max(seq_lens))
