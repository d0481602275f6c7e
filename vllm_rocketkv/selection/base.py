# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_rocketkv.config import RocketKVConfig
    from vllm_rocketkv.kernels.options import DecodeOptions


class SelectionPolicy(ABC):
    """Stage 2: decides, at every decode step, which cached tokens each KV head of one layer reads."""

    def __init__(self, config: RocketKVConfig):
        self.config = config

    @abstractmethod
    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """What the fused decode op of one layer is told. ``scale`` multiplies q.k, ``softcap`` > 0 caps it."""
