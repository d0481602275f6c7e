# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations that stay in the prefix cache before all others (option ``pinned_tokens``)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_LEAST_SHARE = 16


class PinnedBlocks:
    """Hashed blocks that the pool hands out last.

    A block that no request holds stays in the prefix cache until the pool reuses it, and the pool reuses blocks in the order in
    which they became free: without pins, as much traffic as the pool is large pushes out the history of every conversation that
    is waiting for its next turn. Pinned blocks are free blocks like any other (for the scheduler's checks, the usage that is
    reported and ``reset_prefix_cache``); they only go back to the end of the queue whenever it is their turn.
    """

    def __init__(self, pool: BlockPool, limit: int) -> None:
        self.pool = pool
        self.limit = limit
        """Most blocks pinned at once."""
        self._hashes: dict[int, BlockHashWithGroupId] = {}
        """Hash of each pinned block, by its id, in the order in which they are given up: oldest conversation first, its tail
        first. A block that another turn uses again counts as that turn's."""

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Pin those of ``blocks``, the blocks of a request from its first token on, that are in the prefix cache."""
        if not self.limit:
            return
        for block in reversed(blocks):
            if block.block_hash is not None:
                self._hashes.pop(block.block_id, None)
                self._hashes[block.block_id] = block.block_hash
        for block_id in list(self._hashes)[: max(0, len(self) - self.limit)]:
            del self._hashes[block_id]

    def protect(self, num_blocks: int) -> None:
        """Before ``num_blocks`` blocks are taken from the pool: let the pinned ones go last.

        When fewer others are free than that, or than a sixteenth of the pinned ones (which bounds the work of a step), as many
        pinned blocks are given up.
        """
        queue = self.pool.free_block_queue
        if not self._hashes or not self._comes_up_within(num_blocks):
            return
        free = [block for block in map(self.pool.blocks.__getitem__, self._hashes) if block.ref_cnt == 0]
        stale = [block for block in free if block.block_hash != self._hashes[block.block_id]]
        num_others = queue.num_free_blocks - len(free) + len(stale)
        pinned = [block for block in free if block.block_hash == self._hashes[block.block_id]]
        num_given_up = max(0, min(max(num_blocks, len(pinned) // _LEAST_SHARE) - num_others, len(pinned)))
        for block in stale + pinned[:num_given_up]:
            del self._hashes[block.block_id]
        for block in pinned[num_given_up:]:
            queue.remove(block)
            queue.append(block)

    def _comes_up_within(self, num_blocks: int) -> bool:
        """Whether one of the next ``num_blocks`` free blocks is pinned."""
        queue = self.pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(min(num_blocks, queue.num_free_blocks)):
            assert block is not None
            if block.block_id in self._hashes:
                return True
            block = block.next_free_block
        return False
