# SPDX-License-Identifier: Apache-2.0
"""The KV cache format: bytes of a page, room for private and parking blocks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.scheduler_parts import fake_vllm_config, make_manager, plain_spec, small_config, startup_pool
from vllm_rocketkv.cache.spec import RocketKVSpec, rocketkv_spec

B, M = 16, 144
ROCKETKV = small_config("rocketkv")
TIGHT = small_config("rocketkv", prompt_budget=24)  # P = W + B


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("policy", "options", "size"), [("rocketkv", {}, 2), ("hsa", {"kt_dtype": "float8_e5m2"}, 1), ("snapkv", {}, 0)]
)
def test_page_bytes(block_size: int, policy: str, options: dict[str, Any], size: int) -> None:
    spec = rocketkv_spec(plain_spec(block_size), small_config(policy, prompt_budget=128, **options))
    kv = 2 * 2 * block_size * 16 * 2  # K and V, heads, tokens, dimensions, bfloat16
    kt = 2 * 2 * (block_size // 4) * 16 * size  # heads, minimum and maximum, pages, dimensions
    assert (spec.kt_offset_bytes, spec.kt_size_bytes) == (kv, kt)
    assert spec.page_size_bytes == kv + kt
    larger = spec.copy_with_new_block_size(2 * block_size)
    assert type(larger) is RocketKVSpec
    assert larger.page_size_bytes == 2 * (kv + kt)
    assert larger.copy_with_new_block_size(block_size) == spec


def test_page_bytes_are_aligned() -> None:
    base = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=9, dtype=torch.int8)
    spec = rocketkv_spec(base, small_config("rocketkv", page_size=16, topk_tokens=32, kt_dtype="float8_e5m2"))
    assert spec.unpadded_page_size_bytes == 2 * 16 * 9
    assert (spec.kt_offset_bytes, spec.kt_size_bytes, spec.page_size_bytes) == (320, 64, 384)


def test_padding_of_vllm_is_kept() -> None:
    spec = rocketkv_spec(plain_spec(B), ROCKETKV)
    assert replace(spec, page_size_padded=2 * spec.page_size_bytes).page_size_bytes == 2 * spec.page_size_bytes


def test_merge_refuses_every_mixture() -> None:
    spec = rocketkv_spec(plain_spec(B), ROCKETKV)
    assert RocketKVSpec.merge([spec, rocketkv_spec(plain_spec(B), ROCKETKV)]) == spec
    others = [plain_spec(B), rocketkv_spec(plain_spec(B), TIGHT), rocketkv_spec(plain_spec(2 * B), ROCKETKV)]
    for other in others:
        with pytest.raises(AssertionError):
            RocketKVSpec.merge([spec, other])
        with pytest.raises(AssertionError):
            RocketKVSpec.merge([other, spec])


def test_blocks_too_large_for_the_budget_are_refused() -> None:
    spec = rocketkv_spec(plain_spec(2 * B), TIGHT)
    with pytest.raises(ValueError, match="prompt_budget 24 is less than"):
        make_manager(spec, 50, M)


def test_bytes_of_a_policy_that_sums_up_attention() -> None:
    spec = rocketkv_spec(plain_spec(B), small_config("h2o"))
    assert spec.page_size_bytes == spec.unpadded_page_size_bytes + 2 * B * 4
    assert spec.score_offset_bytes == spec.unpadded_page_size_bytes


@pytest.mark.parametrize(("query_bytes", "queries"), [(None, 1), (2048, 1), (1000, 2), (64, 32), (4096, 1)])
def test_queries_per_block(query_bytes: int | None, queries: int) -> None:
    """K and V of a block of two heads of 16 dimensions are 2,048 bytes, and those of a larger one hold more queries."""
    config = small_config("snapkv", decode_budget=48, decode_interval=32)
    spec = rocketkv_spec(plain_spec(B), config, query_bytes=query_bytes)
    assert spec.queries_per_block == queries
    assert spec.num_parking_blocks(config) == -(-7 // queries)
    assert spec.num_parking_blocks(ROCKETKV) == spec.num_parking_blocks(small_config("h2o")) == 0
    assert replace(spec, block_size=4 * B).queries_per_block == 4 * 2048 // (query_bytes or 2048)


@pytest.mark.parametrize("query_bytes", [128, 700, 2048])
def test_parking_blocks_are_in_the_bounds(query_bytes: int) -> None:
    config = small_config("snapkv", decode_budget=48, decode_interval=32)
    spec = rocketkv_spec(plain_spec(B), config, query_bytes=query_bytes)
    extra = (48 + 32) // B + spec.num_parking_blocks(config)
    assert startup_pool(spec, M) == startup_pool(plain_spec(B), M) + extra
    assert spec.max_num_blocks_per_req(fake_vllm_config(M), M) == M // B + extra + 1
    # Nothing is ever evicted when the budget is as long as the longest request.
    assert startup_pool(spec, 32) == startup_pool(plain_spec(B), 32)
