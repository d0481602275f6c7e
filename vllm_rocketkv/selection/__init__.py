# SPDX-License-Identifier: Apache-2.0
"""What a decode step reads of the cache: one policy a file, one line in the table."""

from vllm_rocketkv.selection.base import SelectionPolicy
from vllm_rocketkv.selection.everything import Everything
from vllm_rocketkv.selection.hsa import HybridSparseAttention
from vllm_rocketkv.selection.mean import MeanOfPage
from vllm_rocketkv.selection.quest import Quest

SELECTION_POLICIES: dict[str, type[SelectionPolicy]] = {
    "none": Everything,
    "hsa": HybridSparseAttention,
    "quest": Quest,
    "mean": MeanOfPage,
}

__all__ = ["SELECTION_POLICIES", "Everything", "HybridSparseAttention", "MeanOfPage", "Quest", "SelectionPolicy"]
