# SPDX-License-Identifier: Apache-2.0
"""The worker half of ``scheduler_model``: append-only block table rows, and a *content* for every token slot of the pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from tests.scheduler_parts import Part, Setting, ceil_div


class Worker:
    """Executes steps by writing tags into the slots that the design names and checking those that attention would read."""

    B: int
    setting: Setting
    memory: list[list[Any]]
    pool: Any

    def _index(self, part: Part, position: int) -> int:
        """Index in the row of the block of the token at ``position``; the package must say the same."""
        live, index = part.live, position // self.B
        if live.evictable and position >= live.X:
            index = live.n + live.slot(position) // self.B
        assert index == live.layout.block_index(position)
        return index

    def _tag(self, part: Part, *key: Any) -> Any:
        return (*key[:1], part.live.uid, part.incarnation, *key[1:])

    def _content(self, part: Part, position: int) -> Any:
        """What the slot of ``position`` must hold: exact K and V are named by the token, for it fixes all before it."""
        if part.live.sparse and position >= max(part.live.X, part.num_hit):
            return self._tag(part, "sparse", position)
        return part.live.token(position)

    def _private(self, part: Part) -> list[int]:
        blocks = part.row[part.live.n : part.live.n + part.live.e]
        assert len(blocks) == part.live.e
        return blocks

    def _parking(self, part: Part) -> list[int]:
        first = part.live.first_parking
        blocks = part.row[first : first + part.live.num_parking_blocks]
        assert len(blocks) == part.live.num_parking_blocks
        return blocks

    @staticmethod
    def _window(part: Part, end: int) -> range:
        """Places in the window before length ``end`` that this step computes."""
        live = part.live
        if not live.evictable:
            return range(0)
        first = end - live.W
        return range(max(part.start - first, 0), max(min(part.end, end) - first, 0))

    @staticmethod
    def _crosses(part: Part) -> bool:
        return part.live.evictable and part.start < part.live.X <= part.end

    def _execute(self, parts: list[Part]) -> None:
        """One layer: all natural K and V of the batch, every dense read, parked queries or compaction, then for each request the
        private slots, from one eviction of decoded tokens to the next (I11)."""
        for part in parts:
            for position in range(part.start, min(part.end, part.live.X) if part.live.evictable else part.end):
                self.memory[part.row[self._index(part, position)]][position % self.B] = self._content(part, position)
        for part in parts:
            if not part.live.evictable or part.start < part.live.X:
                end = min(part.end, part.live.X) if part.live.evictable else part.end
                self._read(part.row, [self._content(part, position) for position in range(end)])
        for part in parts:
            window = self._window(part, part.live.X)
            if self._crosses(part):
                self._unpark(part, self._private(part), self.B, part.live.X, window.start)
                self._compact(part, 0, part.live.X - part.live.s * self.B)
            elif window:
                self._park(part, self._private(part), self.B, part.live.X, window)
        for part in parts:
            if part.live.evictable:
                for start, end in part.live.segments(max(part.start, part.live.X), part.end):
                    self._decode(part, start, end)

    def _decode(self, part: Part, start: int, end: int) -> None:
        """Tokens between two evictions: they read what the last one kept and what was decoded since. Then comes the next one,
        or queries that it will need are parked."""
        live, generation = part.live, part.live.generation(start)
        for position in range(start, end):
            self.memory[part.row[self._index(part, position)]][position % self.B] = self._content(part, position)
        first = live.X
        if live.limit is not None and generation:
            first = live.limit + (generation - 1) * live.interval
        kept = [self._tag(part, "kept", generation, slot) for slot in range(live.slot(first))]
        self._read(part.row[live.n :], kept + [self._content(part, position) for position in range(first, end)])
        if live.limit is None:
            return
        limit = live.limit + generation * live.interval
        window, size = self._window(part, limit), self.setting.queries_per_block
        if end == limit:
            self._unpark(part, self._parking(part), size, limit, window.start)
            assert live.config.decode_budget_for_step is not None
            self._compact(part, generation + 1, live.config.decode_budget_for_step)
        elif window:
            self._park(part, self._parking(part), size, limit, window)

    def _compact(self, part: Part, generation: int, num_kept: int) -> None:
        """Keep so many tokens; whatever else the private blocks hold may not be read any more."""
        live = part.live
        last = part.row[live.n : live.first_parking if generation else live.n + live.e]
        for slot in range(len(last) * self.B):
            tag = self._tag(part, "kept", generation, slot) if slot < num_kept else None
            self.memory[last[slot // self.B]][slot % self.B] = tag

    def _park(self, part: Part, blocks: list[int], size: int, limit: int, places: range) -> None:
        for place in places:
            self.memory[blocks[place // size]][place % size] = self._tag(part, "query", limit, place)

    def _unpark(self, part: Part, blocks: list[int], size: int, limit: int, num_places: int) -> None:
        for place in range(num_places):
            found = self.memory[blocks[place // size]][place % size]
            assert found == self._tag(part, "query", limit, place), f"a query was not parked: {found}"

    def _read(self, blocks: list[int], wanted: list[Any]) -> None:
        for index in range(ceil_div(len(wanted), self.B)):
            here = wanted[index * self.B : (index + 1) * self.B]
            found = self.memory[blocks[index]][: len(here)]
            assert found == here, f"block {blocks[index]} holds {found}, not {here}"

    def _used(self, part: Part) -> list[int]:
        """Blocks that the step reads or writes."""
        live, used = part.live, []
        if not live.evictable or part.start < live.X:
            used += part.row[: ceil_div(min(part.end, live.X) if live.evictable else part.end, self.B)]
        if self._window(part, live.X):
            used += self._private(part)
        for start, end in live.segments(max(part.start, live.X), part.end) if live.evictable else ():
            used += part.row[live.n : live.n + live.slot(end - 1) // self.B + 1]
            if live.limit is not None and self._window(part, live.limit + live.generation(start) * live.interval):
                used += self._parking(part)
        return used

    def _check_writes(self, parts: list[Part]) -> None:
        """Before a step is dispatched: nothing is written twice, nothing to a hashed block but what the hash promises."""
        written: Counter[tuple[int, int, int]] = Counter()
        for part in parts:
            live = part.live
            private = set(part.row[live.n :]) if live.extended else set()
            for position in range(part.start, part.end):
                block = self.pool.blocks[part.row[self._index(part, position)]]
                assert not block.is_null
                assert block.ref_cnt > 0
                assert (block.block_id in private) == (live.evictable and position >= live.X)
                if block.block_hash is not None:
                    assert not live.sparse or position < live.X, "a block of sparse decoding is hashed"
                    assert get_block_hash(block.block_hash) == live.request.block_hashes[position // self.B]
                written[block.block_id, position % self.B, live.generation(position)] += 1
            for block_id in private.intersection(self._used(part)):
                assert self.pool.blocks[block_id].block_hash is None
        assert not written or max(written.values()) == 1, "two requests write one slot"
