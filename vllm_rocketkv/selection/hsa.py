# SPDX-License-Identifier: Apache-2.0
"""Hybrid sparse attention, RocketKV's second stage (arXiv 2502.14051, section 3.4)."""

from __future__ import annotations

from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.selection.base import SelectionPolicy


class HybridSparseAttention(SelectionPolicy):
    """Estimates attention from page bounds on the strongest dimensions, then takes the best tokens or pages.

    The first ``sink_tokens`` and the newest ``recent_tokens`` are always selected and count against ``topk_for_step``; under
    page granularity all three round outward to whole pages. Should the forced tokens alone exceed the budget, they are it. The
    truth is ``kernels/reference.py``, ``hsa_scores`` and ``hsa_choose``.
    """

    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """See ``SelectionPolicy.decode_options``."""
        config = self.config
        return DecodeOptions(
            scale,
            softcap,
            dense_below=config.dense_below,
            topk_tokens=config.topk_for_step,
            sink_tokens=config.sink_tokens,
            recent_tokens=config.recent_tokens,
            by_page=config.granularity == "page",
            adaptive=config.temperature == "adaptive",
        )
