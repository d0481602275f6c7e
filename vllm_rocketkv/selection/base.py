# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vllm_rocketkv.config import RocketKVConfig


class SelectionPolicy(ABC):
    """Stage 2: decides, at every decode step, which cached tokens each KV head of one layer reads."""

    def __init__(self, config: RocketKVConfig):
        self.config = config

    @abstractmethod
    def select(
        self, query: Tensor, page_min: Tensor, page_max: Tensor, num_tokens: Tensor, topr: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the tokens of one decode step, one row a query token.

        ``query`` [R, Hq, D]; ``page_min``, ``page_max`` [R, Hkv, pages, D] in the KT dtype, see ``page_summary``;
        ``num_tokens`` int64 [R]: tokens cached for the row, at most pages * page_size, 0 for padding (pages beyond are
        garbage, perhaps NaN); ``topr`` int64 [R]: dimensions to estimate with, None for all D.

        Returns (token_index int64 [R, Hkv, K], valid bool [R, Hkv, K]): ascending indices, K the largest number of
        tokens selected for any row and head of this batch, valid entries first, the others with index 0.
        """
