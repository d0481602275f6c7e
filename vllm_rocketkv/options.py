# SPDX-License-Identifier: Apache-2.0
"""Names: which policies and presets there are, and under which other names options are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "full": ("none", "none"),
        "snapkv": ("snapkv", "none"),
        "hsa": ("none", "hsa"),
        "rocketkv": ("snapkv", "hsa"),
    }
)
"""Every policy is a pair: what to keep (eviction) and what to read (selection)."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},  # the defaults of the fields themselves
        # What the authors evaluate (arXiv 2502.14051 and its released settings), with one page size for the server.
        "reference": {
            "token_budget": 512,
            "sink_tokens": 0,
            "recent_tokens": 0,
            "page_size": 2,
            "granularity": "token",
            "temperature": "adaptive",
            "window_softmax": "all",
        },
        # TensorRT-LLM's RocketSparseAttentionConfig.
        "trtllm": {
            "prompt_budget": 2048,
            "window_size": 32,
            "kernel_size": 63,
            "sink_tokens": 0,
            "recent_tokens": 0,
            "page_size": 4,
            "topk_tokens": 256,
            "topr": None,
            "kt_dtype": "float8_e5m2",
            "window_softmax": "prefix",
            "granularity": "page",
            "temperature": "constant",
        },
    }
)
"""Defaults that a preset puts in place of the fields' own; explicit options override them."""

PLANNED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"policy": ("streaming_llm", "h2o", "quest", "rocketkv_mt"), "preset": ("blog",)}
)
"""Values that the design knows and this release does not have yet."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        # TensorRT-LLM's RocketSparseAttentionConfig; the names it shares with us need no alias.
        "algorithm": "policy",
        "topk": "topk_tokens",  # counted in KT pages there
        "kt_cache_dtype": "kt_dtype",
        # The tutorial's names.
        "sparse_attention_type": "policy",
        "observation_window": "window_size",
        "sink_token_size": "sink_tokens",
        "top_k_tokens": "topk_tokens",
        "kernel_downsample": "page_size",  # tokens of one KT entry
        "enable_multiturn": "policy",  # false is what every policy here does
    }
)
"""Other systems' name of an option, and ours."""
