# SPDX-License-Identifier: Apache-2.0
"""Eviction by the attention that tokens have received (H2O)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vllm_rocketkv.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from vllm_rocketkv.backend.paged_cache import PagedCache


class H2O(EvictionPolicy):
    """Keeps the newest tokens and those that all queries so far attended to most (arXiv 2306.14048).

    The sums of attention lie in the cache; ``PagedCache.accumulate_scores`` adds to them after every step. The truth is
    ``kernels/reference.py``, ``accumulated_scores`` and ``keep_heavy``.
    """

    def keep(
        self,
        window_query: Tensor,
        cache: PagedCache,
        blocks: Tensor,
        num_tokens: int,
        num_kept: int,
        scale: float,
        softcap: float = 0.0,
        is_private: bool = False,
    ) -> Tensor:
        """See ``EvictionPolicy.keep``. The window is not looked at."""
        return cache.keep_heavy(blocks, num_tokens, num_kept, self.config.num_recent(num_kept))
