# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm_rocketkv.kernels.options import DecodeOptions, Estimator

if TYPE_CHECKING:
    from vllm_rocketkv.config import RocketKVConfig


class SelectionPolicy(ABC):
    """Stage 2: decides, at every decode step, which cached tokens each KV head of one layer reads."""

    def __init__(self, config: RocketKVConfig):
        self.config = config

    @abstractmethod
    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """What the fused decode op of one layer is told. ``scale`` multiplies q.k, ``softcap`` > 0 caps it."""

    def _best_pages(self, scale: float, softcap: float, estimator: Estimator) -> DecodeOptions:
        """Whole pages, ranked by ``estimator`` alone: none is forced."""
        return DecodeOptions(
            scale,
            softcap,
            dense_below=self.config.dense_below,
            topk_tokens=self.config.topk_for_step,
            sink_tokens=0,
            recent_tokens=0,
            by_page=True,
            adaptive=False,
            estimator=estimator,
        )
