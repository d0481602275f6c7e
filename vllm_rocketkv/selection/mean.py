# SPDX-License-Identifier: Apache-2.0
"""Pages by the mean of their keys: the choice of the ``blog`` preset."""

from __future__ import annotations

from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.selection.base import SelectionPolicy


class MeanOfPage(SelectionPolicy):
    """Takes the pages whose mean key the group's mean query meets best, over all dimensions; no page is forced.

    The truth is ``kernels/reference.py``, ``page_means``, ``mean_scores`` and ``hsa_choose``.
    """

    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """See ``SelectionPolicy.decode_options``."""
        return self._best_pages(scale, softcap, "mean")
