# SPDX-License-Identifier: Apache-2.0
"""Sizes that the GPU path decides by: plain arithmetic, for the worker and for the hooks that choose CUDA graphs."""

from __future__ import annotations

from vllm_rocketkv.config import RocketKVConfig

FUSED_TOKENS = 8192
"""Most cached tokens that one program can hold the scores of in registers."""
DECODED_TOKENS = 1024
"""Decoded tokens that the fused kernel has room for beside what eviction keeps."""


def fused_capacity(config: RocketKVConfig, max_model_len: int, block_size: int) -> int:
    """Cached tokens that one program has registers for: what eviction keeps and ``DECODED_TOKENS`` more, if that is possible.

    Longer rows go to the split kernels: a program pays for its capacity, however short its row is.
    """
    kept = config.max_private_blocks(max_model_len, block_size) * block_size if config.evicts else max_model_len
    capacity = 1 << (kept + DECODED_TOKENS - 1).bit_length()
    return min(FUSED_TOKENS, capacity, max_model_len)
