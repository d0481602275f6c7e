# SPDX-License-Identifier: Apache-2.0
"""The interface of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vllm_rocketkv.backend.paged_cache import PagedCache
    from vllm_rocketkv.config import RocketKVConfig


class EvictionPolicy(ABC):
    """Stage 1: decides, once a prompt is computed, which of its tokens each KV head of one layer keeps."""

    def __init__(self, config: RocketKVConfig):
        self.config = config

    @abstractmethod
    def keep(
        self,
        window_query: Tensor,
        cache: PagedCache,
        prompt_blocks: Tensor,
        num_prompt_tokens: int,
        num_kept: int,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor:
        """Positions of the ``num_kept`` tokens to keep.

        ``window_query`` [W, Hq, D]: queries of the prompt's last W tokens, W = min(window_size, N). ``cache`` holds the keys of
        the whole prompt, N = ``num_prompt_tokens``, in ``prompt_blocks`` [ceil(N / block_size)]. ``scale`` multiplies q.k;
        ``softcap`` > 0 caps it as the model does. Returns int32 [Hkv, num_kept], ascending; everything if ``num_kept`` >= N.
        """
