# SPDX-License-Identifier: Apache-2.0
"""Eviction by position alone (StreamingLLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_rocketkv.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from vllm_rocketkv.backend.paged_cache import PagedCache


class StreamingLLM(EvictionPolicy):
    """Keeps the first ``sink_tokens`` and the newest tokens (arXiv 2309.17453).

    The truth is ``kernels/reference.py``, ``keep_sinks_and_recent``.
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
        """See ``EvictionPolicy.keep``. No query and no key is looked at."""
        kept = torch.arange(min(num_kept, num_tokens), dtype=torch.int32, device=blocks.device)
        kept[self.config.sink_tokens :] += num_tokens - len(kept)
        return kept.repeat(cache.num_kv_heads, 1)
