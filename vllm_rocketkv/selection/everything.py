# SPDX-License-Identifier: Apache-2.0
"""No selection: a decode step reads every cached token."""

from __future__ import annotations

from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.selection.base import SelectionPolicy


class Everything(SelectionPolicy):
    """Dense attention over what eviction has kept."""

    def decode_options(self, scale: float, softcap: float) -> DecodeOptions:
        """See ``SelectionPolicy.decode_options``."""
        return DecodeOptions(scale, softcap, 1 << 30, 0, 0, 0, by_page=False, adaptive=False)
