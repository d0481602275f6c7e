# SPDX-License-Identifier: Apache-2.0
"""What a decode kernel is told, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Estimator = Literal["hsa", "quest", "mean"]
ESTIMATORS: tuple[Estimator, ...] = ("hsa", "quest", "mean")
"""In the order of their codes in the CPU op."""


@dataclass(frozen=True)
class DecodeOptions:
    """What the decode op is told about attention and selection; the same for every step of a layer."""

    scale: float
    softcap: float
    dense_below: int
    """Rows with at most so many tokens read all of them. On CPUs each row says this and ``topk_tokens`` of itself."""
    topk_tokens: int
    sink_tokens: int
    recent_tokens: int
    by_page: bool
    adaptive: bool
    estimator: Estimator = "hsa"
    """How pages are ranked: see ``kernels/reference.py``."""
