# SPDX-License-Identifier: Apache-2.0
"""The worker half of ``scheduler_model``: append-only block table rows, and a *content* for every token slot of the pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from tests.scheduler_parts import Part, ceil_div


class Worker:
    """Executes steps by writing tags into the slots that the design names and checking those that attention would read."""

    B: int
    W: int
    memory: list[list[Any]]
    pool: Any

    def _block(self, part: Part, position: int) -> int:
        """Block of the token at ``position``, by the design's formula on the worker's row."""
        live, block = part.live, position // self.B
        if live.evictable and position >= live.request.num_prompt_tokens:
            block += live.n - live.s
        return part.row[block]

    def _tag(self, part: Part, *key: Any) -> Any:
        return (*key[:1], part.live.uid, part.incarnation, *key[1:])

    def _content(self, part: Part, position: int) -> Any:
        """What the slot of ``position`` must hold: exact K and V are named by the token, for it fixes all before it."""
        if part.live.sparse and position >= max(part.live.request.num_prompt_tokens, part.num_hit):
            return self._tag(part, "sparse", position)
        return part.live.token(position)

    def _private(self, part: Part) -> list[int]:
        blocks = part.row[part.live.n : part.live.n + part.live.e]
        assert len(blocks) == part.live.e
        return blocks

    def _window(self, part: Part) -> range:
        """Places in the observation window that this step computes."""
        live = part.live
        if not live.evictable:
            return range(0)
        first = live.request.num_prompt_tokens - self.W
        return range(max(part.start - first, 0), max(min(part.end, first + self.W) - first, 0))

    @staticmethod
    def _crosses(part: Part) -> bool:
        return part.live.evictable and part.start < part.live.request.num_prompt_tokens <= part.end

    def _execute(self, parts: list[Part]) -> None:
        """One layer: all K and V of the batch, every dense read, parked queries or compaction, the sparse reads (I11)."""
        B = self.B
        for part in parts:
            for position in range(part.start, part.end):
                self.memory[self._block(part, position)][position % B] = self._content(part, position)
        for part in parts:
            N = part.live.request.num_prompt_tokens
            if not part.live.evictable or part.start < N:
                end = min(part.end, N) if part.live.evictable else part.end
                self._read(part.row, [self._content(part, position) for position in range(end)])
        for part in parts:
            live, N = part.live, part.live.request.num_prompt_tokens
            window = self._window(part)
            if self._crosses(part):
                blocks = self._private(part)
                parked = [self._tag(part, "query", place) for place in range(window.start)]
                self._read(blocks, parked)
                for slot in range(N - live.s * B):
                    self.memory[blocks[slot // B]][slot % B] = self._tag(part, "kept", slot)
            elif window:
                blocks = self._private(part)
                for place in window:
                    self.memory[blocks[place // B]][place % B] = self._tag(part, "query", place)
        for part in parts:
            live, N = part.live, part.live.request.num_prompt_tokens
            if live.evictable and part.end > N:
                kept = [self._tag(part, "kept", slot) for slot in range(N - live.s * B)]
                decoded = [self._content(part, position) for position in range(N, part.end)]
                self._read(part.row[live.n :], kept + decoded)

    def _read(self, blocks: list[int], wanted: list[Any]) -> None:
        for index in range(ceil_div(len(wanted), self.B)):
            here = wanted[index * self.B : (index + 1) * self.B]
            found = self.memory[blocks[index]][: len(here)]
            assert found == here, f"block {blocks[index]} holds {found}, not {here}"

    def _check_writes(self, parts: list[Part]) -> None:
        """Before a step is dispatched: nothing is written twice, nothing to a hashed block but what the hash promises."""
        written: Counter[tuple[int, int]] = Counter()
        for part in parts:
            live, N = part.live, part.live.request.num_prompt_tokens
            private = set(part.row[live.n :]) if live.extended else set()
            for position in range(part.start, part.end):
                block = self.pool.blocks[self._block(part, position)]
                assert not block.is_null
                assert block.ref_cnt > 0
                assert (block.block_id in private) == (live.evictable and position >= N)
                if block.block_hash is not None:
                    assert not live.sparse or position < N, "a block of sparse decoding is hashed"
                    assert get_block_hash(block.block_hash) == live.request.block_hashes[position // self.B]
                written[block.block_id, position % self.B] += 1
            if self._window(part):
                for block_id in self._private(part):
                    assert self.pool.blocks[block_id].block_hash is None
        assert not written or max(written.values()) == 1, "two requests write one slot"
