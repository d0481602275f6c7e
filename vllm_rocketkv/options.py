# SPDX-License-Identifier: Apache-2.0
"""Names: which policies and presets there are, and under which other names options are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MAX_TOKENS = 1 << 24
"""Upper bound of every option that counts tokens without a tighter one."""

POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "full": ("none", "none"),
        "streaming_llm": ("streaming_llm", "none"),
        "h2o": ("h2o", "none"),
        "snapkv": ("snapkv", "none"),
        "quest": ("none", "quest"),
        "hsa": ("none", "hsa"),
        "rocketkv": ("snapkv", "hsa"),
        "rocketkv_mt": ("snapkv", "hsa"),
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
        # The tutorial's code: its scores are the mean over the group, which ranks as our sum does.
        "blog": {
            "prompt_budget": 1024,
            "window_size": 32,
            "sink_tokens": 16,
            "recent_tokens": 0,
            "page_size": 4,
            "topk_tokens": 128,
            "kt_summary": "mean",
            "granularity": "page",
        },
    }
)
"""Defaults that a preset puts in place of the fields' own; explicit options override them."""

_ANY = frozenset(POLICIES) - {"full"}
_EVICTING = frozenset(name for name, (eviction, _) in POLICIES.items() if eviction != "none")
_BY_WINDOW = frozenset(name for name, (eviction, _) in POLICIES.items() if eviction == "snapkv")
_SELECTING = frozenset(name for name, (_, selection) in POLICIES.items() if selection != "none")
_HYBRID = frozenset(name for name, (_, selection) in POLICIES.items() if selection == "hsa")

USED_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "prompt_budget": _ANY,
        "token_budget": _BY_WINDOW | _HYBRID,
        "max_new_tokens": _BY_WINDOW | _HYBRID,
        "window_size": _BY_WINDOW,
        "kernel_size": _BY_WINDOW,
        "window_softmax": _BY_WINDOW,
        "sink_tokens": _BY_WINDOW | _HYBRID | {"streaming_llm"},
        "recent_share": frozenset({"h2o"}),
        "decode_budget": _EVICTING,
        "decode_interval": _EVICTING,
        "pinned_tokens": frozenset({"rocketkv_mt"}),
        "topk_tokens": _SELECTING,
        "recent_tokens": _HYBRID,
        "page_size": _SELECTING,
        "granularity": _HYBRID,
        "topr": _HYBRID,
        "temperature": _HYBRID,
        "kt_summary": _HYBRID,
        "kt_dtype": _SELECTING,
        "skip_layers": _ANY,
    }
)
"""Policies that an option means something to, in the order in which options are shown; one given to another is refused."""

_OF_BOUNDS = frozenset({"recent_tokens", "granularity", "topr", "temperature"})


def used_options(policy: str, kt_summary: str) -> tuple[str, ...]:
    """Names of the options that mean something to ``policy``, in the order in which they are shown."""
    names = tuple(name for name, policies in USED_BY.items() if policy in policies)
    if kt_summary != "mean" or policy not in _HYBRID:
        return names
    # No token is forced into what is read by mean keys, and there is no estimated softmax.
    unused = _OF_BOUNDS if policy in _EVICTING else _OF_BOUNDS | {"sink_tokens"}
    return tuple(name for name in names if name not in unused)


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
        "enable_multiturn": "policy",  # true is policy rocketkv_mt
    }
)
"""Other systems' name of an option, and ours."""
