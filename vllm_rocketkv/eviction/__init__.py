# SPDX-License-Identifier: Apache-2.0
"""What to keep: one policy a file, one line in the table."""

from vllm_rocketkv.config import RocketKVConfig
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


def eviction_policy(config: RocketKVConfig) -> EvictionPolicy:
    """What decides under ``config``, the server's or a request's own, whose policy evicts."""
    kind = EVICTION_POLICIES[config.eviction]
    assert kind is not None
    return kind(config)


__all__ = ["EVICTION_POLICIES", "H2O", "EvictionPolicy", "SnapKV", "StreamingLLM", "eviction_policy"]
