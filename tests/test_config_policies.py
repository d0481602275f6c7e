# SPDX-License-Identifier: Apache-2.0
"""What each policy does with the options, and which options are refused because a policy has no use for them."""

from __future__ import annotations

import math
from typing import Any

import pydantic
import pytest

from tests.refusals import refusal
from vllm_rocketkv.config import POLICIES, USED_BY, RocketKVConfig
from vllm_rocketkv.layout import ceil_div

parse = RocketKVConfig.parse

BLOCK_SIZE = 16

#         policy           stages                     window  decode  accumulates
TABLE = [
    ("full", "none", "none", 1, None, False),
    ("streaming_llm", "streaming_llm", "none", 1, 2048, False),
    ("h2o", "h2o", "none", 1, 2048, True),
    ("snapkv", "snapkv", "none", 32, None, False),
    ("quest", "none", "quest", 1, None, False),
    ("hsa", "none", "hsa", 1, None, False),
    ("rocketkv", "snapkv", "hsa", 32, None, False),
    ("rocketkv_mt", "snapkv", "hsa", 32, None, False),
]


def test_the_table_has_every_policy() -> None:
    assert {policy: (eviction, selection) for policy, eviction, selection, *_ in TABLE} == dict(POLICIES)


@pytest.mark.parametrize(("policy", "eviction", "selection", "window", "decode_budget", "accumulates"), TABLE)
def test_what_a_policy_does(
    policy: str, eviction: str, selection: str, window: int, decode_budget: int | None, accumulates: bool
) -> None:
    config = parse({"policy": policy})
    evicts, selects = eviction != "none", selection != "none"
    assert (config.eviction, config.selection) == (eviction, selection)
    assert (config.evicts, config.selects) == (evicts, selects)
    assert config.eviction_window == window
    assert config.accumulates is accumulates
    assert config.decode_budget_for_step == decode_budget
    assert config.layout(5000, BLOCK_SIZE).is_evictable is evicts
    assert config.layout(2048, BLOCK_SIZE).is_evictable is (decode_budget is not None)
    assert config.is_sparse(2049, BLOCK_SIZE) is (policy != "full")
    assert config.is_sparse(2048, BLOCK_SIZE) is (decode_budget is not None)
    most_private = 0 if not evicts else 2048 if decode_budget is None else 2048 + 128
    assert config.max_private_blocks(8192, 48) == math.ceil((most_private + (decode_budget is not None) * 16) / 48)
    assert [config.num_selected_pages(n) for n in (0, 1, 4, 5, 255, 256, 99999)] == (
        [0, 1, 1, 2, 64, 64, 64] if selects else [0] * 7
    )


@pytest.mark.parametrize("policy", ["full", "quest", "hsa"])
def test_policies_that_keep_everything_evict_no_decoded_tokens(policy: str) -> None:
    """A request may choose such a policy on a server with a ``decode_budget``."""
    config = RocketKVConfig(policy=policy, decode_budget=4096)
    assert config.decode_budget_for_step is None
    assert config.layout(2048, BLOCK_SIZE) == parse({"policy": policy}).layout(2048, BLOCK_SIZE)
    assert not config.is_sparse(2048, BLOCK_SIZE)


def test_kt_summary_mean_selects_otherwise() -> None:
    config = parse({"preset": "blog"})
    assert (config.eviction, config.selection, config.eviction_window) == ("snapkv", "mean", 32)
    assert parse({"policy": "hsa", "kt_summary": "mean"}).selection == "mean"
    assert parse({"policy": "snapkv", "preset": "blog"}).selection == "none"
    assert config.num_selected_pages(10_000) == 128 / 4
    assert config.ranks_pages
    assert parse({"preset": "reference", "kt_summary": "mean"}).ranks_pages, "whatever the preset's granularity"
    assert not parse({"preset": "reference"}).ranks_pages


def test_only_hsa_leaves_dimensions_out() -> None:
    assert parse({"preset": "reference"}).topr_for(3840, 64) == 35
    assert parse({"preset": "reference", "kt_summary": "mean"}).topr_for(3840, 64) == 64
    assert parse({"policy": "quest"}).topr_for(3840, 64) == 64


# --- options that a policy has no use for ----------------------------------------------------------------------------

EXAMPLES: dict[str, Any] = {
    "prompt_budget": 2048,
    "token_budget": 512,
    "max_new_tokens": 256,
    "window_size": 32,
    "kernel_size": 63,
    "window_softmax": "all",
    "sink_tokens": 4,
    "recent_share": 0.5,
    "decode_budget": 2048,
    "decode_interval": 128,
    "pinned_tokens": 4096,
    "topk_tokens": 256,
    "recent_tokens": 32,
    "page_size": 4,
    "granularity": "page",
    "topr": 8,
    "temperature": "adaptive",
    "kt_summary": "bounds",
    "kt_dtype": "bfloat16",
    "skip_layers": [0, 1],
}
"""A value of each option; the defaults, too, are refused where they mean nothing."""

TOGETHER = {"token_budget": {"preset": "reference"}, "decode_interval": {"decode_budget": 2048}}
"""What an option is only accepted with."""


def test_every_option_is_of_some_policies() -> None:
    assert (
        set(EXAMPLES) == set(USED_BY) == set(RocketKVConfig.model_fields) - {"policy", "preset", "log_interval_seconds"}
    )


@pytest.mark.parametrize("option", EXAMPLES)
@pytest.mark.parametrize("policy", POLICIES)
def test_options_are_refused_where_they_mean_nothing(policy: str, option: str) -> None:
    options = {"policy": policy, option: EXAMPLES[option]}
    if policy in USED_BY[option]:
        parse(options | TOGETHER.get(option, {}))
        return
    text = refusal(options)
    assert text.startswith(f"rocketkv: option '{option}' means nothing to policy '{policy}': drop it or choose policy ")
    choices = text.split("choose policy ")[1]
    assert {word.strip("',") for word in choices.split() if word != "or"} == USED_BY[option]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"preset": "blog"}, ["recent_tokens", "granularity", "topr", "temperature"]),
        ({"kt_summary": "mean"}, ["recent_tokens", "granularity", "topr", "temperature"]),
        (
            {"policy": "hsa", "kt_summary": "mean"},
            ["sink_tokens", "recent_tokens", "granularity", "topr", "temperature"],
        ),
    ],
)
def test_mean_pages_have_no_use_for_what_shapes_an_estimated_softmax(options: dict[str, Any], names: list[str]) -> None:
    for name in EXAMPLES:
        if name in names:
            assert refusal({**options, name: EXAMPLES[name]}) == (
                f"rocketkv: option '{name}' means nothing with kt_summary 'mean': drop it or set kt_summary 'bounds'"
            )
        assert (name in parse(options).used_options) is (name not in names and parse(options).policy in USED_BY[name])


@pytest.mark.parametrize("preset", ["reference", "trtllm", "blog"])
@pytest.mark.parametrize("policy", POLICIES)
def test_presets_are_refused_for_policies_they_say_nothing_about(policy: str, preset: str) -> None:
    options = {"policy": policy, "preset": preset}
    if policy in ("snapkv", "hsa", "rocketkv", "rocketkv_mt", "full"):
        assert parse(options).preset == preset
        return
    assert refusal(options) == (
        f"rocketkv: option 'preset' '{preset}' says nothing of policy '{policy}': drop it or choose policy "
        "'snapkv', 'hsa', 'rocketkv' or 'rocketkv_mt'"
    )


# --- rules of single policies ----------------------------------------------------------------------------------------

STREAMING, H2O = {"policy": "streaming_llm"}, {"policy": "h2o"}
MUST_BE_4_TO_32 = "but must be an integer from 4 to 32 under policy 'streaming_llm'"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (STREAMING | {"sink_tokens": 3}, f"'sink_tokens' is 3, {MUST_BE_4_TO_32}"),
        (STREAMING | {"sink_tokens": 33}, f"'sink_tokens' is 33, {MUST_BE_4_TO_32}"),
        (STREAMING | {"sink_tokens": 4}, None),
        (STREAMING | {"sink_tokens": 32}, None),
        (
            STREAMING | {"sink_tokens": 32, "prompt_budget": 32},
            "'sink_tokens' is 32, which leaves nothing of prompt_budget 32: lower it or raise prompt_budget",
        ),
        (STREAMING | {"sink_tokens": 32, "prompt_budget": 33}, None),
        (
            H2O | {"recent_share": 0.99, "prompt_budget": 40},
            "'recent_share' is 0.99, which leaves nothing of prompt_budget 40: lower it or raise prompt_budget",
        ),
        (H2O | {"recent_share": 0.9, "prompt_budget": 40}, None),
        (
            {"policy": "snapkv", "window_size": 32, "prompt_budget": 36},
            "'sink_tokens' is 4: with window_size 32 it leaves nothing of prompt_budget 36 to choose, lower it or raise "
            "prompt_budget",
        ),
        # Decode-time eviction.
        ({"decode_budget": 2048, "decode_interval": 256}, None),
        (
            {"decode_budget": 2047},
            "'decode_budget' is 2047, less than prompt_budget 2048: raise it or lower prompt_budget",
        ),
        (
            H2O | {"decode_budget": 100},
            "'decode_budget' is 100, less than prompt_budget 2048: raise it or lower prompt_budget",
        ),
        ({"decode_interval": 256}, "'decode_interval' needs decode_budget: give both or neither"),
        (
            {"decode_interval": 256, "preset": "reference"},
            "'decode_interval' needs decode_budget: give both or neither",
        ),
        (STREAMING | {"decode_interval": 256}, None),
        (H2O | {"decode_interval": 256}, None),
        (
            {"preset": "reference", "decode_budget": 4096},
            "'decode_budget' needs a fixed prompt_budget: give that instead of token_budget, or drop decode_budget",
        ),
        ({"preset": "reference", "prompt_budget": 1024, "decode_budget": 4096}, None),
    ],
)
def test_rules_of_single_policies(options: dict[str, Any], text: str | None) -> None:
    if text is None:
        assert RocketKVConfig(**options) == parse(options)
        return
    assert refusal(options) == f"rocketkv: option {text}"
    with pytest.raises(pydantic.ValidationError):  # the rules hold for direct construction as well
        RocketKVConfig(**options)


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.5, 0.9])
def test_h2o_always_keeps_the_newest_token_and_some_heavy_hitter(share: float) -> None:
    config = parse(H2O | {"recent_share": share})
    for num_kept in (2, 3, 10, 2048):
        recent = config.num_recent(num_kept)
        assert recent == max(1, round(share * num_kept))
        assert 1 <= recent <= num_kept
    assert parse(H2O).num_recent(2048) == 1024


def test_decode_interval_is_whole_blocks_of_at_least_128_tokens() -> None:
    config = parse(STREAMING)
    for block_size in (16, 32, 48, 128, 256):
        interval = config.decode_interval_for(block_size)
        assert interval == ceil_div(128, block_size) * block_size
        config.check_block_size(block_size)
    assert parse(STREAMING | {"decode_interval": 256}).decode_interval_for(128) == 256


# --- what the user is told -------------------------------------------------------------------------------------------

SNAPKV_WORDS = "prompt_budget 2048, window_size 32, kernel_size 63, window_softmax all, sink_tokens 4"
HSA_WORDS = "topk_tokens 256, recent_tokens 32, page_size 4, granularity page, topr all, temperature adaptive"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "full"}, "preset default"),
        (
            STREAMING,
            "preset default, prompt_budget 2048, sink_tokens 4, decode_budget 2048, decode_interval by block size",
        ),
        (
            H2O | {"decode_budget": 4096, "decode_interval": 256},
            "preset default, prompt_budget 2048, recent_share 0.5, decode_budget 4096, decode_interval 256",
        ),
        ({"policy": "snapkv"}, f"preset default, {SNAPKV_WORDS}"),
        ({"policy": "snapkv", "skip_layers": [0, 1]}, f"preset default, {SNAPKV_WORDS}, skip_layers 0 1"),
        (
            {"policy": "quest", "skip_layers": [0]},
            "preset default, prompt_budget 2048, topk_tokens 256, page_size 4, kt_dtype auto, skip_layers 0",
        ),
        (
            {"policy": "hsa"},
            f"preset default, prompt_budget 2048, sink_tokens 4, {HSA_WORDS}, kt_summary bounds, kt_dtype auto",
        ),
        (
            {"policy": "hsa", "kt_summary": "mean"},
            "preset default, prompt_budget 2048, topk_tokens 256, page_size 4, kt_summary mean, kt_dtype auto",
        ),
        (
            {"policy": "rocketkv"},
            f"preset default, {SNAPKV_WORDS}, {HSA_WORDS}, kt_summary bounds, kt_dtype auto",
        ),
        (
            {"policy": "rocketkv", "decode_budget": 2048},
            f"preset default, {SNAPKV_WORDS}, decode_budget 2048, decode_interval by block size, {HSA_WORDS}, "
            "kt_summary bounds, kt_dtype auto",
        ),
        (
            {"policy": "rocketkv_mt", "pinned_tokens": 4096},
            f"preset default, {SNAPKV_WORDS}, pinned_tokens 4096, {HSA_WORDS}, kt_summary bounds, kt_dtype auto",
        ),
        (
            {"policy": "rocketkv", "preset": "blog"},
            "preset blog, prompt_budget 1024, window_size 32, kernel_size 63, window_softmax all, sink_tokens 16, "
            "topk_tokens 128, page_size 4, kt_summary mean, kt_dtype auto",
        ),
        (
            {"policy": "rocketkv", "preset": "reference", "skip_layers": [0, 1]},
            "preset reference, token_budget 512, max_new_tokens 256, window_size 32, kernel_size 63, window_softmax all, "
            "sink_tokens 0, recent_tokens 0, page_size 2, granularity token, topr by token_budget, temperature adaptive, "
            "kt_summary bounds, kt_dtype auto, skip_layers 0 1",
        ),
    ],
)
def test_describe_is_one_line_of_what_the_policy_uses(options: dict[str, Any], words: str) -> None:
    assert parse(options).describe() == f"policy {options['policy']}, {words}"
