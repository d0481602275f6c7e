# SPDX-License-Identifier: Apache-2.0
"""Numbers derived from the options: what start-up checks with the engine's sizes, adaptive budgets, and what the user is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import adaptive_split

parse = RocketKVConfig.parse


# --- start-up checks -------------------------------------------------------------------------------------------------


def test_block_size() -> None:
    parse({"prompt_budget": 160}).check_block_size(128)
    parse({"policy": "hsa", "prompt_budget": 64}).check_block_size(128)
    parse({"preset": "reference", "token_budget": 64}).check_block_size(128)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse({"prompt_budget": 159}).check_block_size(128)
    assert str(caught.value) == (
        "rocketkv: prompt_budget 159 is less than window_size 32 + block size 128: "
        "raise prompt_budget to at least 160 or start vLLM with a smaller --block-size"
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse({"page_size": 32}).check_block_size(48)
    assert str(caught.value) == (
        "rocketkv: page_size 32 does not divide the block size 48: "
        "lower page_size to at most 16 or start vLLM with a --block-size that is a multiple of it"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "streaming_llm", "sink_tokens": 32, "prompt_budget": 160}, None),
        (
            {"policy": "streaming_llm", "sink_tokens": 32, "prompt_budget": 159},
            "prompt_budget 159 is less than sink_tokens 32 + block size 128: raise prompt_budget to at least 160 or start "
            "vLLM with a smaller --block-size",
        ),
        ({"policy": "h2o", "prompt_budget": 129}, None),
        (
            {"policy": "h2o", "prompt_budget": 128},
            "prompt_budget 128 is less than the newest token, 1 + block size 128: raise prompt_budget to at least 129 or "
            "start vLLM with a smaller --block-size",
        ),
        ({"policy": "quest", "prompt_budget": 1}, None),
        ({"policy": "snapkv", "preset": "trtllm"}, None),
        ({"decode_budget": 2048}, None),
        ({"decode_budget": 2048, "decode_interval": 256}, None),
        (
            {"decode_budget": 2048, "decode_interval": 192},
            "decode_interval 192 is not a multiple of the block size 128: use 256 or start vLLM with a smaller --block-size",
        ),
        (
            {"policy": "h2o", "decode_interval": 1},
            "decode_interval 1 is not a multiple of the block size 128: use 128 or start vLLM with a smaller --block-size",
        ),
        ({"decode_budget": 2048, "window_size": 128}, None),
        (
            {"decode_budget": 2048, "window_size": 129},
            "decode_interval 128 is less than window_size 129, whose queries all come after the eviction before: give a "
            "decode_interval of at least 256 or lower window_size",
        ),
        ({"decode_budget": 2048, "window_size": 129, "decode_interval": 256}, None),
    ],
)
def test_block_size_of_128(options: dict[str, Any], text: str | None) -> None:
    config = parse(options)
    if text is None:
        config.check_block_size(128)
        return
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        config.check_block_size(128)
    assert str(caught.value) == f"rocketkv: {text}"


def test_page_size_is_of_no_matter_to_policies_that_select_nothing() -> None:
    for policy in ("full", "streaming_llm", "h2o", "snapkv"):
        parse({"policy": policy}).check_block_size(18)
    with pytest.raises(ValueError, match="page_size 4 does not divide the block size 18"):
        parse({"policy": "quest"}).check_block_size(18)


@pytest.mark.parametrize("block_size", [16, 64, 100])
@pytest.mark.parametrize("group", [1, 3, 8, 48])
@pytest.mark.parametrize("window", [1, 32, 64])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_window_fits(block_size: int, group: int, window: int, ratio: int) -> None:
    """The check says exactly whether the fewest private blocks, over every N, can hold the window's queries."""
    for budget in range(window + block_size, window + 3 * block_size, 7):
        config = parse({"prompt_budget": budget, "window_size": window})
        fewest = min(config.layout(budget + k, block_size).num_private_blocks for k in range(1, block_size + 1))
        if window - 1 <= fewest * (2 * block_size // (group * ratio)):
            config.check_window_fits(block_size, group, ratio)
            continue
        with pytest.raises(ValueError, match=rf"\Arocketkv: window_size {window} with {group} query heads") as caught:
            config.check_window_fits(block_size, group, ratio)
        if group * ratio > 2 * block_size:
            assert "--block-size" in str(caught.value)
            continue
        least = int(str(caught.value).split("at least ")[1].split(" ")[0])
        parse({"prompt_budget": least, "window_size": window}).check_window_fits(block_size, group, ratio)
        with pytest.raises(ValueError, match="window_size"):
            parse({"prompt_budget": max(window, least - 1), "window_size": window}).check_window_fits(
                block_size, group, ratio
            )


def test_window_fits_only_matters_when_evicting() -> None:
    for policy in ("full", "streaming_llm", "h2o", "quest", "hsa"):
        parse({"policy": policy}).check_window_fits(16, 64)


def test_a_window_of_decoded_tokens_needs_a_query_to_fit_into_a_block() -> None:
    """Its blocks are as many as it needs, so nothing else about it can fail."""
    for window in (1, 16):
        config = parse({"window_size": window, "decode_budget": 2048})
        config.check_window_fits(16, 32)
        config.check_window_fits(16, 8, 4)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            config.check_window_fits(16, 33)
        sentence = (
            "rocketkv: decode_budget parks queries of decoded tokens, and one of 33 query heads per KV head does not fit into "
            "a block of 16 tokens: drop decode_budget or start vLLM with a larger --block-size"
        )
        assert str(caught.value) == sentence
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            config.check_window_fits(16, 9, 4)
        assert str(caught.value) == sentence.replace("33", "9") + " or use --kv-cache-dtype auto"
    parse({"window_size": 1}).check_window_fits(16, 33)


def test_window_fits_adaptive_names_token_budget() -> None:
    options = {"preset": "reference", "token_budget": 128, "max_new_tokens": 64}
    with pytest.raises(ValueError, match="raise token_budget to at least 320 or lower window_size") as caught:
        parse(options).check_window_fits(16, 16)
    assert "\n" not in str(caught.value)
    parse({**options, "token_budget": 320}).check_window_fits(16, 16)


# --- adaptive budgets ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(2, 96),
    max_new=st.integers(1, 200),
    window=st.integers(1, 16),
    block_size=st.sampled_from([2, 8, 16, 64]),
    max_model_len=st.integers(1, 4000),
)
def test_adaptive_bounds_hold_for_every_prompt(
    t: int, max_new: int, window: int, block_size: int, max_model_len: int
) -> None:
    """Small budgets: c passes the peak (L = 6.7), the kink (L = 10) and climbs again within reach of brute force."""
    config = parse(
        {"preset": "reference", "policy": "snapkv", "token_budget": t, "max_new_tokens": max_new, "window_size": window}
    )
    budgets, blocks = [], []
    for N in range(1, max_model_len + 1):
        budget = config.prompt_budget_for(N, block_size)
        assert budget == max(adaptive_split(N, t, max_new).prompt_budget, window + block_size)
        layout = config.layout(N, block_size)
        assert layout.prompt_budget == budget
        assert config.is_sparse(N, block_size) is layout.is_evictable is (budget < N)
        budgets.append(budget)
        if layout.is_evictable:
            blocks.append(layout.num_private_blocks)
            assert budget >= config.min_prompt_budget(block_size)
            assert layout.num_private_blocks >= config.min_prompt_budget(block_size) // block_size
    assert config.max_prompt_budget(max_model_len, block_size) - max(budgets) in (0, 1)
    bound = config.max_private_blocks(max_model_len, block_size)
    if blocks:
        assert max(blocks) <= bound


def test_adaptive_bound_beyond_the_peak_and_for_a_million_tokens() -> None:
    config = parse({"preset": "reference", "token_budget": 512})
    peak = 512 * 2 ** (20 / 3) - 256  # N = 51763: capacity 512 * 2**(8/3) = 3250.99
    assert config.prompt_budget_for(int(peak), 16) == 3250 - 256
    assert config.max_private_blocks(1 << 20, 16) == math.ceil((3250 - 256 + 1) / 16)
    assert config.prompt_budget_for(1 << 20, 16) < 3250 - 256
    sampled = max(config.layout(N, 16).num_private_blocks for N in range(3000, 1 << 20, 1009))
    assert config.max_private_blocks(1 << 20, 16) - 1 <= sampled <= config.max_private_blocks(1 << 20, 16)


def test_adaptive_selection() -> None:
    config = parse({"preset": "reference", "token_budget": 512})  # N=3840: c2 = 1858/512
    assert config.topk_for_step == 256
    assert config.topr_for(3840, 64) == 35
    assert config.topr_for(100, 64) == 64
    assert parse({"preset": "reference", "page_size": 4}).topr_for(3840, 64) == 64  # int(64 * 4 / 3.63) = 70, capped
    assert parse({"preset": "reference", "topr": 10}).topr_for(3840, 64) == 10
    assert parse({"topr": 96}).topr_for(3840, 64) == 64
    assert parse({}).topr_for(3840, 64) == 64
    assert config.num_selected_pages(10_000) == 128


# --- decode-time eviction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "streaming_llm", "prompt_budget": 64},
        {"policy": "h2o", "prompt_budget": 64, "decode_budget": 80},
        {"policy": "snapkv", "prompt_budget": 64, "window_size": 16, "decode_budget": 100, "decode_interval": 48},
    ],
)
@pytest.mark.parametrize("num_prompt_tokens", [1, 63, 64, 65, 80, 200, 1000])
def test_private_blocks_stay_within_their_bound_for_ever(options: dict[str, Any], num_prompt_tokens: int) -> None:
    config, block_size = parse(options), 16
    budget, interval = config.decode_budget_for_step, config.decode_interval_for(block_size)
    assert budget is not None
    layout = config.layout(num_prompt_tokens, block_size)
    natural = config.natural_length(num_prompt_tokens, block_size)
    assert natural == layout.num_prompt_tokens == (num_prompt_tokens if num_prompt_tokens > 64 else budget + interval)
    assert layout.is_evictable
    assert layout.num_private_blocks <= config.max_private_blocks(4096, block_size)
    most = config.max_private_blocks(4096, block_size) * block_size
    for position in range(natural, natural + 10 * interval):
        slot = position - layout.dropped_tokens_at(position)
        assert 0 <= slot < budget + interval <= most
        assert slot % block_size == position % block_size
    last = layout.first_limit
    assert last is not None
    assert last - 1 - layout.dropped_tokens_at(last - 1) == budget + interval - 1, "full, so the next one evicts"
    assert last - layout.dropped_tokens_at(last) == budget
    # The queries of an eviction's window are all decoded since the eviction before, or are the prompt's own.
    assert natural == num_prompt_tokens or natural - config.eviction_window >= num_prompt_tokens


# --- what the user is told -------------------------------------------------------------------------------------------


def test_savings() -> None:
    # 7000 tokens in blocks of 16: n = 438, s = ceil(4952 / 16) = 310, e = 128; 310 * 16 KiB = 4.84 MiB
    assert parse({}).savings(7000, 16, 16384) == (
        "a prompt of 7000 tokens keeps 128 of 438 blocks and frees 310 (4.8 MiB)"
    )
    assert parse({"policy": "hsa"}).savings(7000, 16, 16384) == "a prompt of 7000 tokens keeps all of its 438 blocks"
    for options in ({}, {"decode_budget": 2048}, {"policy": "h2o"}, {"policy": "full"}):
        assert parse(options).savings(2048, 16, 16384) == "a prompt of 2048 tokens keeps all of its 128 blocks"
    assert parse({"policy": "h2o"}).savings(7000, 16, 16384) == parse({}).savings(7000, 16, 16384)
