# SPDX-License-Identifier: Apache-2.0
"""Decoded tokens are evicted in the real engine: the same tokens from any batch and after preemption, blocks that stop growing.

The model is a random one of two layers with room for long generations, in float32, so that the same tokens are expected from any
batch. ``ROCKETKV_ENDLESS_TOKENS`` says how many tokens the longest request generates (3,000; 50,000 take about ten minutes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.random_models import save_llama
from tests.test_engine import metric, our_counts
from vllm_rocketkv.config import RocketKVConfig

pytestmark = pytest.mark.engine

MakeEngine = Callable[..., Any]
B = 32
LENGTHS = (40, 97, 150, 300)
"""Of prompts: within the budget, one token beyond it, and longer ones."""
NUM_TOKENS = 260
ENDLESS = int(os.environ.get("ROCKETKV_ENDLESS_TOKENS", "3000"))
BY_WINDOW = {"window_size": 16, "kernel_size": 7, "decode_budget": 96}
POLICIES: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "h2o": {},
    "snapkv": BY_WINDOW,
    "rocketkv": BY_WINDOW | {"topk_tokens": 48, "recent_tokens": 8},
}


def options_of(policy: str) -> dict[str, Any]:
    return {"policy": policy, "prompt_budget": 96, "decode_interval": B, **POLICIES[policy]}


@pytest.fixture(scope="module")
def engine_options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = save_llama(tmp_path_factory.mktemp("long-model"), max_position_embeddings=65536)
    return {
        "model": model,
        "dtype": "float32",
        "block_size": B,
        "max_model_len": max(1024, ENDLESS + 512),
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
    }


def prompt(length: int) -> list[int]:
    return [(7 * length + 31 * place) % 990 + 5 for place in range(length)]


def generate(
    engine: Any, lengths: Sequence[int], num_tokens: int = NUM_TOKENS, own: Sequence[Any] = ()
) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch; ``own`` are the requests' own options."""
    from vllm import SamplingParams

    extra_args = [*own, *[None] * len(lengths)]
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        for extra, _ in zip(extra_args, lengths, strict=False)
    ]
    prompts = [{"prompt_token_ids": prompt(length)} for length in lengths]
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]


def alone(engine: Any, lengths: Sequence[int]) -> list[list[int]]:
    tokens = []
    for length in lengths:
        assert engine.reset_prefix_cache(), "blocks were left in use"
        tokens += generate(engine, [length])
    assert engine.reset_prefix_cache(), "blocks were left in use"
    return tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_and_a_small_pool_give_the_tokens_of_single_requests(
    make_engine: MakeEngine, engine_options: dict[str, Any], policy: str
) -> None:
    """In a pool that is too small for all, some are preempted while they decode: they compute their outputs again as rows of few
    steps, with several evictions in each, on prefix-cache hits of their own (h2o takes none)."""
    engine = make_engine(options_of(policy), **engine_options)
    solo = alone(engine, LENGTHS)
    before = our_counts_of_decoding()
    assert generate(engine, LENGTHS) == solo
    layouts = [RocketKVConfig.parse(options_of(policy)).layout(length, B) for length in LENGTHS]
    last = [length + NUM_TOKENS - 2 for length in LENGTHS]  # the last sampled token is never computed
    evictions = sum(layout.num_decode_evictions(at) for layout, at in zip(layouts, last, strict=True))
    assert our_counts_of_decoding() - before == evictions > 0
    assert generate(engine, LENGTHS) == solo, "prefix-cache hits gave other tokens"
    hits = metric(engine, "vllm:prefix_cache_hits")
    assert (hits > 0) == (policy != "h2o")
    assert engine.reset_prefix_cache(), "blocks were left in use"
    small = engine_options | {
        "num_gpu_blocks_override": 28,
        "max_model_len": 576,
    }  # eight requests hold at least 32 blocks
    engine = make_engine(options_of(policy), **small)
    assert generate(engine, LENGTHS * 2) == solo * 2
    assert metric(engine, "vllm:num_preemptions") > 0
    assert engine.reset_prefix_cache(), "blocks were left in use"


def our_counts_of_decoding() -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("rocketkv:decode_evictions_total", {"engine": "0"}) or 0.0


@pytest.mark.parametrize("policy", ["streaming_llm", "rocketkv"])
def test_an_endless_request_holds_the_same_blocks(
    make_engine: MakeEngine, engine_options: dict[str, Any], policy: str
) -> None:
    from vllm import SamplingParams

    engine = make_engine(options_of(policy), **engine_options)
    core = engine.llm_engine
    params = SamplingParams(temperature=0, max_tokens=ENDLESS, ignore_eos=True, detokenize=False)
    core.add_request("endless", {"prompt_token_ids": prompt(150)}, params)
    held, outputs = [], []
    num_blocks = core.vllm_config.cache_config.num_gpu_blocks - 1
    while core.has_unfinished_requests():
        outputs += core.step()
        usage = next(metric.value for metric in engine.get_metrics() if metric.name == "vllm:kv_cache_usage_perc")
        held.append(round(usage * num_blocks))
    assert len(outputs[-1].outputs[0].token_ids) == ENDLESS
    assert our_counts()["requests_evicted"] > 0
    # Budget and interval, and two blocks in which 15 queries of 512 bytes wait: 32 tokens x 2 heads x 32 x 2 x 4 bytes a block.
    most = 4 if policy == "streaming_llm" else 5
    steady = held[200:-2]
    assert set(steady) == {most}, "the number of blocks is not flat"
    assert engine.reset_prefix_cache(), "blocks were left in use"


def test_requests_choose_their_own_policy(make_engine: MakeEngine, engine_options: dict[str, Any]) -> None:
    """Each gets the tokens that a server of that policy gives, side by side in one batch."""

    def server(policy: str, prompt_budget: int = 96) -> dict[str, Any]:
        once = {name: value for name, value in options_of(policy).items() if not name.startswith("decode_")}
        return once | {"prompt_budget": prompt_budget}

    choices: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
        ({"rocketkv": "off"}, None),
        ({"rocketkv_policy": "streaming_llm", "rocketkv_prompt_budget": 96}, server("streaming_llm")),
        ({"rocketkv_policy": "snapkv", "rocketkv_prompt_budget": 96}, server("snapkv")),
        ({"rocketkv_prompt_budget": 128, "rocketkv_topk_tokens": 64}, server("rocketkv", 128) | {"topk_tokens": 64}),
        (None, server("rocketkv", 256)),
    ]
    wanted = [alone(make_engine(options, **engine_options), [300])[0] for _, options in choices]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the test could not tell them apart"
    engine = make_engine(server("rocketkv", 256), **engine_options)
    own = [extra for extra, _ in choices]
    assert generate(engine, [300] * len(own), own=own) == wanted
    assert generate(engine, [300] * len(own), own=own) == wanted, "prefix-cache hits gave other tokens"
    assert engine.reset_prefix_cache(), "blocks were left in use"
