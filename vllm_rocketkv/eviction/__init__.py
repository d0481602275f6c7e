# SPDX-License-Identifier: Apache-2.0
"""What to keep of a prompt: one policy a file, one line in the table."""

from vllm_rocketkv.eviction.base import EvictionPolicy
from vllm_rocketkv.eviction.snapkv import SnapKV

EVICTION_POLICIES: dict[str, type[EvictionPolicy] | None] = {
    "none": None,
    "snapkv": SnapKV,
}

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "SnapKV"]
