# SPDX-License-Identifier: Apache-2.0
"""Options under the names of other systems."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.refusals import refusal
from vllm_rocketkv.config import RocketKVConfig

parse = RocketKVConfig.parse
FIELDS = RocketKVConfig.model_fields


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Messages of our logger, whatever vLLM did to its handlers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.rocketkv.config")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("options", "canonical", "logged"),
    [
        (
            {"algorithm": "rocket", "prompt_budget": 1024, "topk": 32, "kt_cache_dtype": "float8_e5m2"},
            {"policy": "rocketkv", "prompt_budget": 1024, "topk_tokens": 128, "kt_dtype": "float8_e5m2"},
            "algorithm -> policy=rocketkv, topk -> topk_tokens=128, kt_cache_dtype -> kt_dtype=float8_e5m2",
        ),
        ({"topk": 64, "page_size": 8}, {"topk_tokens": 512, "page_size": 8}, "topk -> topk_tokens=512"),
        (
            {"topk": 64, "kernel_downsample": 2},
            {"topk_tokens": 128, "page_size": 2},
            "topk -> topk_tokens=128, kernel_downsample -> page_size=2",
        ),
        (
            {"topk": 64, "preset": "reference", "prompt_budget": 512},
            {"topk_tokens": 128, "preset": "reference", "prompt_budget": 512},
            "topk -> topk_tokens=128",
        ),
        (
            {
                "sparse_attention_type": "RocketKV",
                "prompt_budget": 1024,
                "observation_window": 16,
                "sink_token_size": 16,
                "top_k_tokens": 128,
                "kernel_downsample": 4,
                "enable_multiturn": False,
            },
            {"prompt_budget": 1024, "window_size": 16, "sink_tokens": 16, "topk_tokens": 128, "page_size": 4},
            "sparse_attention_type -> policy=rocketkv, observation_window -> window_size=16, "
            "sink_token_size -> sink_tokens=16, top_k_tokens -> topk_tokens=128, kernel_downsample -> page_size=4",
        ),
        ({"topk": 16, "preset": "blog"}, {"topk_tokens": 64, "preset": "blog"}, "topk -> topk_tokens=64"),
        ({"enable_multiturn": True}, {"policy": "rocketkv_mt"}, "enable_multiturn -> policy=rocketkv_mt"),
        (
            {"enable_multiturn": True, "policy": "rocketkv"},
            {"policy": "rocketkv_mt"},
            "enable_multiturn -> policy=rocketkv_mt",
        ),
        (
            {"sparse_attention_type": "RocketKV", "enable_multiturn": True, "top_k_tokens": 64},
            {"policy": "rocketkv_mt", "topk_tokens": 64},
            "enable_multiturn -> policy=rocketkv_mt, top_k_tokens -> topk_tokens=64",
        ),
        (
            {"algorithm": "rocket", "enable_multiturn": True, "pinned_tokens": 4096},
            {"policy": "rocketkv_mt", "pinned_tokens": 4096},
            "enable_multiturn -> policy=rocketkv_mt",
        ),
    ],
)
def test_aliases_mean_their_option_and_are_logged_once(
    options: dict[str, Any], canonical: dict[str, Any], logged: str, log_lines: list[str]
) -> None:
    assert parse(options) == parse(canonical)
    assert log_lines == [f"rocketkv: options accepted under another system's name: {logged}"]


def test_own_names_log_nothing(log_lines: list[str]) -> None:
    parse({"window_size": 16, "enable_multiturn": False})
    parse({"policy": "quest", "enable_multiturn": False})
    assert log_lines == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"observation_window": 32, "window_size": 32}, "'observation_window' means the same as 'window_size'"),
        ({"topk": 64, "topk_tokens": 256}, "'topk' means the same as 'topk_tokens'"),
        ({"topk": 64, "top_k_tokens": 256}, "'top_k_tokens' means the same as 'topk'"),
        ({"algorithm": "rocket", "policy": "rocketkv"}, "'algorithm' means the same as 'policy'"),
        ({"kt_cache_dtype": "bfloat16", "kt_dtype": "auto"}, "'kt_cache_dtype' means the same as 'kt_dtype'"),
        ({"sink_token_size": 1, "sink_tokens": 1}, "'sink_token_size' means the same as 'sink_tokens'"),
        ({"kernel_downsample": 4, "page_size": 4}, "'kernel_downsample' means the same as 'page_size'"),
    ],
)
def test_an_option_given_twice(options: dict[str, Any], text: str) -> None:
    assert refusal(options) == f"rocketkv: option {text}: give only one of the two"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "dsa"}, "'algorithm' is 'dsa', but must be 'rocket': use 'policy' to choose another method"),
        (
            {"sparse_attention_type": "rocketkv"},
            "'sparse_attention_type' is 'rocketkv', but must be 'RocketKV': use 'policy' to choose another method",
        ),
        (
            {"enable_multiturn": True, "policy": "quest"},
            "'enable_multiturn' is of policy 'rocketkv_mt', not of 'quest': set it to false or drop it",
        ),
        (
            {"enable_multiturn": True, "policy": []},
            "'enable_multiturn' is of policy 'rocketkv_mt', not of []: set it to false or drop it",
        ),
        (
            {"enable_multiturn": False, "policy": "rocketkv_mt"},
            "'enable_multiturn' is false, but true under policy 'rocketkv_mt': drop it or choose policy 'rocketkv'",
        ),
        (
            {"observation_window": 32, "policy": "hsa"},
            "'observation_window' means nothing to policy 'hsa': drop it or choose policy 'snapkv', 'rocketkv' or "
            "'rocketkv_mt'",
        ),
        (
            {"kernel_downsample": 4, "policy": "h2o"},
            "'kernel_downsample' means nothing to policy 'h2o': drop it or choose policy 'quest', 'hsa', 'rocketkv' or "
            "'rocketkv_mt'",
        ),
        ({"enable_multiturn": 0}, "'enable_multiturn' is 0, but must be true or false"),
        ({"topk": 0}, "'topk' is 0, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": True}, "'topk' is True, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": 4194305}, "'topk' is 4194305, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": 64, "page_size": "4"}, "'page_size' is '4', but must be an integer from 1 to 256"),
        ({"topk": 64, "preset": []}, "'preset' is [], but must be 'default', 'reference', 'trtllm' or 'blog'"),
        ({"observation_window": "32"}, "'observation_window' is '32', but must be an integer from 1 to 1024"),
        (
            {"kt_cache_dtype": "fp8"},
            "'kt_cache_dtype' is 'fp8', but must be 'auto', 'bfloat16', 'float8_e4m3fn' or 'float8_e5m2'",
        ),
    ],
)
def test_refused_aliases_are_named_as_written(options: dict[str, Any], text: str) -> None:
    assert refusal(options) == f"rocketkv: option {text}"
