# SPDX-License-Identifier: Apache-2.0
"""Quest's query-aware choice of pages (arXiv 2406.10774)."""

from __future__ import annotations

from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.selection.base import SelectionPolicy


class Quest(SelectionPolicy):
    """Takes the pages whose bounds allow the largest q . k over all dimensions; no page is forced.

    The bounds of a group's query heads add up, so that they share the pages of their KV head. The truth is
    ``kernels/reference.py``, ``quest_scores`` and ``hsa_choose``.
    """

    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """See ``SelectionPolicy.decode_options``."""
        return self._best_pages(scale, softcap, "quest")
