# SPDX-License-Identifier: Apache-2.0
"""Eviction by observation window (RocketKV's first stage: SnapKV with a large pooling kernel and grouped scores)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vllm_rocketkv.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from vllm_rocketkv.backend.paged_cache import PagedCache


class SnapKV(EvictionPolicy):
    """Keeps the tokens that the last W queries attend to most (arXiv 2502.14051, section 3.3).

    scores = max_pool(sum over window rows and the group's query heads of softmax(q K^T * scale)); the window's own W tokens and
    the first ``sink_tokens`` are always kept. The truth is ``kernels/reference.py``, ``window_scores`` and ``keep_tokens``.
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
        """See ``EvictionPolicy.keep``."""
        config = self.config
        return cache.keep_tokens(
            window_query,
            blocks,
            num_tokens,
            num_kept,
            scale,
            softcap,
            softmax_over_all=config.window_softmax == "all",
            kernel_size=config.kernel_size,
            sink_tokens=config.sink_tokens,
            is_private=is_private,
        )
