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
    """Stage 1: decides which tokens each KV head of one layer keeps, once a prompt is computed and, with decode-time eviction,
    whenever the private blocks are full."""

    def __init__(self, config: RocketKVConfig):
        self.config = config

    @abstractmethod
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
        """Positions of the ``num_kept`` tokens to keep.

        ``window_query`` [W, Hq, D]: queries of the last W tokens, W = min(``config.eviction_window``, N). ``cache`` holds the
        keys of all N = ``num_tokens`` tokens in ``blocks`` [ceil(N / block_size)]: a whole prompt's or, with ``is_private``,
        private ones; positions are counted in them. ``scale`` multiplies q.k; ``softcap`` > 0 caps it as the model does. Returns int32
        [Hkv, num_kept], ascending; everything if ``num_kept`` >= N.
        """
