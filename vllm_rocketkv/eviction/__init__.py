# SPDX-License-Identifier: Apache-2.0
"""What to keep: one policy a file, one line in the table."""

from vllm_rocketkv.eviction.base import EvictionPolicy
from vllm_rocketkv.eviction.h2o import H2O
from vllm_rocketkv.eviction.snapkv import SnapKV
from vllm_rocketkv.eviction.streaming_llm import StreamingLLM

EVICTION_POLICIES: dict[str, type[EvictionPolicy] | None] = {
    "none": None,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
}

__all__ = ["EVICTION_POLICIES", "H2O", "EvictionPolicy", "SnapKV", "StreamingLLM"]
