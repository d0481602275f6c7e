# SPDX-License-Identifier: Apache-2.0
"""A small model of vLLM's scheduler and worker around vLLM's real ``KVCacheManager``: no engine, no tensors.

The scheduler half follows ``vllm.v1.core.sched`` 0.32: what it hands to ``allocate_slots``, when it preempts, what it counts
as in flight. The worker half keeps append-only block table rows and a *content* for every token slot of the pool: a step that
executes writes tags into the slots that the design names and checks the tags that attention would read.

Everything that the package computes is computed here a second time, from the design's formulas; ``vllm_rocketkv.layout`` is
only held against it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from tests.scheduler_parts import (
    LOADING,
    UNIT,
    Live,
    Part,
    Setting,
    Step,
    ceil_div,
    fake_vllm_config,
    make_manager,
    make_request,
    plain_spec,
    startup_pool,
)
from tests.worker_model import Worker
from vllm_rocketkv.cache.manager import RocketKVManager
from vllm_rocketkv.cache.spec import RocketKVSpec, rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.metrics import Counts


@dataclass
class Model(Worker):
    """Scheduler, worker and memory of one engine. Every action ends in :meth:`check`."""

    setting: Setting
    waiting: deque[Live] = field(default_factory=deque)
    running: list[Live] = field(default_factory=list)
    in_flight: deque[Step] = field(default_factory=deque)
    counts: Counts = field(default_factory=Counts)
    num_added: int = 0
    num_actions: int = 0

    def __post_init__(self) -> None:
        s = self.setting
        self.B, self.M, self.config = s.block_size, s.max_model_len, s.config
        query_bytes = plain_spec(self.B).page_size_bytes // s.queries_per_block
        self.spec: RocketKVSpec = rocketkv_spec(plain_spec(self.B), s.config, query_bytes=query_bytes)
        self.num_blocks = startup_pool(self.spec, self.M) + s.spare_blocks
        self.manager = make_manager(self.spec, self.num_blocks, self.M, s.caching)
        self.plain = make_manager(plain_spec(self.B), self.num_blocks, self.M, s.caching) if s.mirror else None
        (self.ours,) = self.manager.coordinator.single_type_managers
        assert type(self.ours) is RocketKVManager
        self.pool = self.manager.block_pool
        self.num_free_at_start = self.pool.get_num_free_blocks()
        self.memory: list[list[Any]] = [[None] * self.B for _ in range(self.num_blocks)]

    # --- what users do -------------------------------------------------------------------------------------------------

    def add(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        stream: int = 1,
        shared: int = 10**9,
        external: int = 0,
        config: RocketKVConfig | None = None,
    ) -> Live:
        """A new request; ``config`` is its own, or None for the server's."""
        self.num_added += 1
        uid = 100 + self.num_added
        N, B = num_prompt_tokens, self.B
        if shared < N:
            tokens = [(stream if p < shared else uid) * UNIT + p for p in range(N)]
        else:
            shared, tokens = 10**9, [stream * UNIT + p for p in range(N)]
        live = Live.new(
            self.setting,
            make_request(f"r{uid}", tokens, max_tokens, B),
            config or self.config,
            uid=uid,
            stream=stream,
            shared=shared,
            max_tokens=max_tokens,
            external=external,
        )
        self.waiting.append(live)
        self.check()
        return live

    def abort(self, live: Live) -> None:
        """As ``finish_requests``: blocks go back at once, unless a load is still writing them."""
        if live.state == LOADING:
            live.state = "aborted while loading"
        else:
            self._finish(live, RequestStatus.FINISHED_ABORTED)
        self.check()

    def preempt(self, live: Live) -> None:
        """As ``_preempt_request``."""
        request = live.request
        self.running.remove(live)
        self._free(live)
        live.reset()
        live.state = "waiting"
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.appendleft(live)
        self.check()

    @property
    def live(self) -> list[Live]:
        return [*self.running, *self.waiting]

    def finish_all(self, budget: int = 64) -> None:
        """Run until every request has finished; nobody may starve."""
        for _ in range(5_000):
            if not self.live and not self.in_flight:
                break
            self.step(budget, accept=1)
        assert not self.live, "a request never finishes"
        self.check_idle()

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def step(self, budget: int, accept: int = 0) -> None:
        """Schedule one step; process the oldest one when the pipeline is full or there is nothing to schedule."""
        parts: list[Part] = []
        preempted = self._schedule_running(parts, budget)
        budget -= sum(part.end - part.start for part in parts)
        if not preempted:
            self._schedule_waiting(parts, budget)
        assert parts or preempted or self.in_flight or not self.live, "nothing can be scheduled: the engine hangs"
        if parts:
            self._check_writes(parts)
            for part in parts:
                self._update_after_schedule(part)
            self.in_flight.append(Step(parts))
        self.check()
        if len(self.in_flight) > self.setting.depth or not parts:
            self.process(accept)

    def _schedule_running(self, parts: list[Part], budget: int) -> bool:
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            live = self.running[index]
            request = live.request
            placeholders, computed = request.num_output_placeholders, request.num_computed_tokens
            num_new = min(request.num_tokens_with_spec + placeholders - computed, budget, self.M - computed - 1)
            is_last = placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + live.max_tokens
            if is_last or num_new <= 0:
                index += 1
                continue
            while (new_ids := self._allocate(live, num_new)) is None:
                victim = self.running[-1]
                preempted = True
                self.preempt(victim)
                if victim is live:
                    return True
            assert live.row is not None
            live.row.extend(new_ids)
            parts.append(self._part(live, num_new))
            budget -= num_new
            index += 1
        return preempted

    def _schedule_waiting(self, parts: list[Part], budget: int) -> None:
        holding = [live for live in self.waiting if live.state == "loaded"]
        for live in [*holding, *(live for live in self.waiting if live.state == "waiting")]:
            request = live.request
            if budget <= 0:
                return
            if request.num_stale_output_tokens:
                continue
            hit, blocks, external = 0, (None, None), 0
            if live.state == "waiting":
                hit, blocks = self._lookup(live)
                if live.external and self._may_load():
                    last = min(request.num_prompt_tokens - 1, live.X - live.W)
                    external = max(0, min(live.external, last - hit))
            num_new = 0 if external else min(request.num_tokens - request.num_computed_tokens - hit, budget)
            if self._allocate(live, num_new, hit, blocks, external) is None:
                return
            request.num_computed_tokens += hit + external
            live.num_hit = max(live.num_hit, hit)
            if external:
                live.external = 0
                live.state = LOADING
                row = self.manager.get_block_ids(request.request_id)[0]
                end = request.num_computed_tokens
                load = Part(live, live.incarnation, row, hit, end - external, end)
                self.in_flight.append(Step([], load))
                continue
            self.waiting.remove(live)
            self.running.append(live)
            live.state, request.status = "running", RequestStatus.RUNNING
            live.row = list(self.manager.get_block_ids(request.request_id)[0])
            parts.append(self._part(live, num_new))
            budget -= num_new

    def _may_load(self) -> bool:
        return not any(live.state in (LOADING, "loaded", "aborted while loading") for live in self.waiting)

    def _part(self, live: Live, num_new: int) -> Part:
        assert live.row is not None
        start = live.request.num_computed_tokens
        return Part(live, live.incarnation, list(live.row), live.num_hit, start, start + num_new)

    def _lookup(self, live: Live) -> tuple[int, tuple[Any, Any]]:
        """Prefix hit of a new or resumed request, which must be the longest that leaves the window to compute (I7)."""
        request = live.request
        if live.config is not self.config:
            self.ours.admit(request.request_id, request.num_prompt_tokens, live.config)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        _, longest, _ = self.manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        if not self.setting.caching:
            longest = 0
        if live.config.policy == "h2o":
            longest = 0
        elif live.evictable:
            longest = min(longest, (live.X - live.W) // self.B * self.B)
            assert live.X - hit >= live.W, "a hit leaves less than the window"
        elif live.sparse:  # its own tokens were computed sparsely, a longer prompt that begins with them was not
            longest = min(longest, live.X // self.B * self.B)
        assert hit == longest == len(blocks.blocks[0]) * self.B
        if self.plain is None:
            return hit, (blocks, None)
        plain_blocks, plain_hit, _ = self.plain.get_computed_blocks(request)
        assert plain_hit == hit
        return hit, (blocks, plain_blocks)

    def _allocate(
        self, live: Live, num_new: int, hit: int = 0, blocks: tuple[Any, Any] = (None, None), external: int = 0
    ) -> list[int] | None:
        request, X, M = live.request, live.X, self.M
        computed = request.num_computed_tokens + hit + external
        if live.extended and not live.compact and computed - request.num_in_flight_tokens >= X:
            live.compact = True
            self.counts += Counts(1, X - live.s * self.B, live.s * self.B, live.s)
        lookahead = 0 if external else self.setting.lookahead
        arguments: dict[str, Any] = {"num_lookahead_tokens": lookahead}
        if live.row is None:
            arguments |= {
                "num_new_computed_tokens": hit,
                "num_external_computed_tokens": external,
                "delay_cache_blocks": external > 0,
                "full_sequence_must_fit": self.setting.full_sequence_must_fit,
                "has_scheduled_reqs": bool(self.running),
            }
        new = self.manager.allocate_slots(request, num_new, new_computed_blocks=blocks[0], **arguments)
        if self.plain is not None:
            plain_new = self.plain.allocate_slots(request, num_new, new_computed_blocks=blocks[1], **arguments)
            assert (new is None) == (plain_new is None)
            assert new is None or new.get_block_ids() == plain_new.get_block_ids()
        if new is None:
            others = [other for other in self.live if other is not live and self._held(other)]
            assert others, "a request that has the pool for itself was refused"
            return None
        end = computed + num_new
        live.extended |= live.evictable and end > max(X - live.W, computed)
        need = min(end + lookahead, M)
        if live.evictable:
            need = max(live.slots_for(need), X) if live.extended else min(need, X)
        live.num_slots = max(live.num_slots, need)
        self._count_step(live, computed, end)
        return new.get_block_ids()[0]

    def _count_step(self, live: Live, computed: int, end: int) -> None:
        evictions = live.generation(end) - live.generation(computed)
        if evictions:
            self.counts += Counts(decode_evictions=evictions, decode_tokens_dropped=evictions * live.interval)
        if live.sparse and live.config.selects:
            for position in range(max(computed, live.X), end):
                cached = live.slot(position) + 1
                page, topk = live.config.page_size, live.config.topk_for_step
                pages = math.ceil((cached if cached <= topk + topk // 2 else topk) / page)
                self.counts += Counts(pages_selected=pages)

    def _update_after_schedule(self, part: Part) -> None:
        request, num_new = part.live.request, part.end - part.start
        part.samples = part.end >= request.num_tokens + request.num_output_placeholders
        part.num_drafts = max(0, part.end - request.num_tokens - request.num_output_placeholders)
        request.num_computed_tokens += num_new
        request.num_in_flight_tokens += num_new
        request.spec_token_ids = []
        if self.setting.async_scheduling and part.samples:
            request.num_output_placeholders += 1 + part.num_drafts

    def process(self, accept: int = 0) -> None:
        """Execute the oldest step in flight and let the scheduler see its output."""
        if not self.in_flight:
            return
        step = self.in_flight.popleft()
        if step.load is not None:
            self._execute_load(step.load)
        else:
            self._execute(step.parts)
        for part in step.parts:
            self._update_from_output(part, accept)
        self.check()

    def _update_from_output(self, part: Part, accept: int) -> None:
        live, request = part.live, part.live.request
        if request.is_finished():
            return
        num_scheduled = part.end - part.start
        request.num_in_flight_tokens -= num_scheduled
        stale = request.num_stale_output_tokens > 0
        request.num_stale_output_tokens -= num_scheduled if stale else 0
        if not part.samples:
            return
        accepted = min(accept, part.num_drafts)
        if not stale:
            request.num_computed_tokens -= part.num_drafts - accepted
            if self.setting.async_scheduling:
                request.num_output_placeholders -= part.num_drafts - accepted
        num_output = min(1 + accepted, live.max_tokens - request.num_output_tokens)
        for _ in range(num_output):
            request.append_output_token_ids(live.token(request.num_tokens))
        if self.setting.async_scheduling:
            request.num_output_placeholders -= 0 if stale else num_output
            if request.status == RequestStatus.RUNNING:
                for manager in self._managers():
                    manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        if request.num_output_tokens >= live.max_tokens:
            self._finish(live, RequestStatus.FINISHED_LENGTH_CAPPED)
        elif self.setting.num_drafts and live.state == "running":
            request.spec_token_ids = [-1] * self.setting.num_drafts

    def _finish(self, live: Live, status: RequestStatus) -> None:
        live.request.status = status
        (self.running if live in self.running else self.waiting).remove(live)
        live.state = "finished"
        self._free(live)

    def _free(self, live: Live) -> None:
        for manager in self._managers():
            manager.free(live.request)

    def _managers(self) -> list[KVCacheManager]:
        return [self.manager] if self.plain is None else [self.manager, self.plain]

    def _execute_load(self, load: Part) -> None:
        live, request = load.live, load.live.request
        for position in range(load.start, load.end):
            self.memory[load.row[position // self.B]][position % self.B] = live.token(position)
        if live.state == LOADING:
            live.state = "loaded"
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            for manager in self._managers():
                manager.cache_blocks(request, request.num_computed_tokens)
        else:
            self._finish(live, RequestStatus.FINISHED_ABORTED)

    # --- what always holds -----------------------------------------------------------------------------------------------

    def _held(self, live: Live) -> list[int]:
        return [
            block.block_id for block in self.ours.req_to_blocks.get(live.request.request_id, ()) if not block.is_null
        ]

    def check(self) -> None:
        self.num_actions += 1
        if self.num_actions % self.setting.checked_steps:
            return
        holders: Counter[int] = Counter()
        for live in self.live:
            self._check_blocks(live)
            holders.update(self._held(live))
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == holders[block.block_id]
            assert block.ref_cnt < 2 or block.block_hash is not None, "an unhashed block has two owners"
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1 - len(holders)
        for step in self.in_flight:
            for part in step.parts:
                if part.is_current:
                    self._check_not_freed(part)
        ids = {live.request.request_id for live in self.live}
        assert set(self.ours._sparse_requests) <= ids
        assert set(self.ours._own_configs) <= ids
        assert set(self.ours.req_to_blocks) <= ids
        if self.plain is not None:
            for live in self.live:
                name = live.request.request_id
                assert self.manager.get_block_ids(name) == self.plain.get_block_ids(name)
            assert self.pool.get_num_free_blocks() == self.plain.block_pool.get_num_free_blocks()

    def _check_blocks(self, live: Live) -> None:
        """The manager's list is the form that the arithmetic says, and the worker's row is the design's (I3)."""
        n, s, e, B, name = live.n, live.s, live.e, self.B, live.request.request_id
        ids = self.manager.get_block_ids(name)[0]
        num_natural = max(ceil_div(live.num_slots, B), n if live.extended else 0)
        num_in_row = num_natural + (e if live.extended else 0)
        assert len(ids) == num_in_row - (n - s if live.compact else 0)
        assert num_in_row <= self.spec.max_num_blocks_per_req(fake_vllm_config(self.M), self.M)
        if live.row is not None:
            assert len(live.row) == num_in_row, "the worker's row has another length than the design's"
            assert ids == ([0] * s + live.row[n:] if live.compact else live.row)
            assert len(set(live.row[n:] if live.compact else live.row)) == len(live.row) - (n if live.compact else 0)
        blocks = self.ours.req_to_blocks.get(name, [])
        assert all(not block.is_null for block in blocks[s if live.compact else 0 :])
        first = max(live.X, live.num_hit) // B if live.sparse else len(blocks)
        if live.evictable:
            first = s if live.compact else n if live.extended else first
        for block in blocks[first:]:  # private, or decoded sparsely
            assert block.block_hash is None, "a block that is not all prompt is hashed"
            assert block.ref_cnt == 1

    def _check_not_freed(self, part: Part) -> None:
        """Blocks that a step in flight reads or writes are still its request's (I4)."""
        held = set(self._held(part.live))
        assert held.issuperset(self._used(part)), "blocks went back while a step in flight reads them"

    def check_idle(self) -> None:
        """Every request has ended, whatever ended it (I9)."""
        assert self.pool.get_num_free_blocks() == self.num_free_at_start
        assert not self.ours._sparse_requests
        assert not self.ours._own_configs
        assert not self.ours.req_to_blocks
        assert not self.ours.num_cached_block
        counts, self.counts = self.counts, Counts()
        assert self.ours.take_counts() == counts
        assert self.ours.take_counts() == Counts()
