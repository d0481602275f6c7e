# SPDX-License-Identifier: Apache-2.0
"""Numbers derived from the options: what start-up checks with the engine's sizes, adaptive budgets, and what the user is told."""

from __future__ import annotations

import math

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
    parse({"policy": "hsa", "window_size": 1024, "prompt_budget": 1024}).check_window_fits(16, 64)


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


# --- what the user is told -------------------------------------------------------------------------------------------


def test_describe_is_one_line_of_what_the_policy_uses() -> None:
    assert parse({"policy": "full"}).describe() == "policy full, preset default"
    assert parse({"policy": "snapkv"}).describe() == (
        "policy snapkv, preset default, prompt_budget 2048, window_size 32, kernel_size 63, window_softmax all, "
        "sink_tokens 4"
    )
    assert parse({}).describe() == (
        "policy rocketkv, preset default, prompt_budget 2048, window_size 32, kernel_size 63, window_softmax all, "
        "sink_tokens 4, topk_tokens 256, recent_tokens 32, page_size 4, granularity page, topr all, "
        "temperature adaptive, kt_dtype auto"
    )
    adaptive = parse({"preset": "reference"}).describe()
    assert "token_budget 512, max_new_tokens 256" in adaptive
    assert "topr by token_budget" in adaptive
    assert "prompt_budget" not in adaptive


def test_savings() -> None:
    # 7000 tokens in blocks of 16: n = 438, s = ceil(4952 / 16) = 310, e = 128; 310 * 16 KiB = 4.84 MiB
    assert parse({}).savings(7000, 16, 16384) == (
        "a prompt of 7000 tokens keeps 128 of 438 blocks and frees 310 (4.8 MiB)"
    )
    assert parse({"policy": "hsa"}).savings(7000, 16, 16384) == "a prompt of 7000 tokens keeps all of its 438 blocks"
    assert parse({}).savings(2048, 16, 16384) == "a prompt of 2048 tokens keeps all of its 128 blocks"
