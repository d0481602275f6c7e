# SPDX-License-Identifier: Apache-2.0
"""The real engine on the real model: oracles are plain vLLM's tokens, planted facts, and counts that follow from lengths.

Where two runs must give the same tokens although batches differ in shape, the model runs in float32: in bfloat16 even plain
vLLM's argmax may flip between two shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from examples import demo_document
from vllm_rocketkv.config import RocketKVConfig

pytestmark = pytest.mark.engine

MakeEngine = Callable[..., Any]
BUDGET = 512
BLOCK_SIZE = 128  # vLLM's default on CPUs
SMALL = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "dtype": "float32"}
NEEDLE_LENGTHS = [1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000, 6000, 6500, 7000]


def needle(tokenizer: Any, num_tokens: int, index: int) -> tuple[list[int], str]:
    """Prompt number ``index`` of 12, each with its fact at another depth: (token ids, answer)."""
    depth = demo_document.needle_depths(demo_document.NUM_NEEDLES)[index % 12]
    prompt, answer = demo_document.needle_prompt(tokenizer, num_tokens, depth, index)
    return tokenizer.encode(prompt, add_special_tokens=False), answer


def prompt_of(tokenizer: Any, num_tokens: int, index: int = 0) -> list[int]:
    """A prompt of exactly ``num_tokens`` tokens; its middle is cut so that document and question both stay."""
    tokens, _ = needle(tokenizer, num_tokens + 200, index)
    head = num_tokens // 2
    return tokens[:head] + tokens[head - num_tokens :]


def generate(engine: Any, prompts: Sequence[list[int]], max_tokens: int = 12, **sampling: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(**({"temperature": 0, "max_tokens": max_tokens} | sampling))
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def one_by_one(engine: Any, prompts: Sequence[list[int]], max_tokens: int = 12) -> list[list[int]]:
    """Each prompt alone, on an empty prefix cache."""
    tokens = []
    for prompt in prompts:
        assert engine.reset_prefix_cache(), "blocks were left in use"
        tokens += generate(engine, [prompt], max_tokens)
    assert engine.reset_prefix_cache(), "blocks were left in use"
    return tokens


def metric(engine: Any, name: str) -> float:
    return sum(m.value for m in engine.get_metrics() if m.name == name)


def our_counts() -> dict[str, float]:
    """This package's Prometheus counters in this process."""
    from prometheus_client import REGISTRY

    names = ("requests_evicted", "prompt_tokens_kept", "prompt_tokens_dropped", "blocks_freed", "pages_selected")
    return {name: REGISTRY.get_sample_value(f"rocketkv:{name}_total", {"engine": "0"}) or 0.0 for name in names}


# --- plain vLLM, and what must not differ from it ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed_prompts(tokenizer: Any) -> list[list[int]]:
    return [prompt_of(tokenizer, n, i) for i, n in enumerate((40, 300, BUDGET, 1000, 1900))]


@pytest.fixture(scope="module")
def plain_tokens(make_engine: MakeEngine, mixed_prompts: list[list[int]]) -> list[list[int]]:
    engine = make_engine(**SMALL)
    return generate(engine, mixed_prompts, max_tokens=48)


def test_policy_full_gives_the_tokens_of_plain_vllm(
    make_engine: MakeEngine, plain_tokens: list[list[int]], mixed_prompts: list[list[int]]
) -> None:
    engine = make_engine({"policy": "full"}, **SMALL)
    assert generate(engine, mixed_prompts, max_tokens=48) == plain_tokens
    assert engine.reset_prefix_cache()


def test_selecting_everything_gives_the_tokens_of_plain_vllm(
    make_engine: MakeEngine, plain_tokens: list[list[int]], mixed_prompts: list[list[int]]
) -> None:
    """hsa with room for every token: the sparse path, its page gathering and its attention, against vLLM's dense kernel."""
    options = {"policy": "hsa", "prompt_budget": BUDGET, "topk_tokens": 2048}
    engine = make_engine(options, **SMALL)
    assert generate(engine, mixed_prompts, max_tokens=48) == plain_tokens


def test_below_the_budget_nothing_changes(
    make_engine: MakeEngine, plain_tokens: list[list[int]], mixed_prompts: list[list[int]]
) -> None:
    engine = make_engine({"prompt_budget": BUDGET}, **SMALL)
    short = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) <= BUDGET]
    before = our_counts()["requests_evicted"]
    tokens = generate(engine, [mixed_prompts[i] for i in short], max_tokens=48)
    assert tokens == [plain_tokens[i] for i in short]
    assert our_counts()["requests_evicted"] == before


# --- one request, however it is computed -------------------------------------------------------------------------------

EDGE_LENGTHS = (513, 530, 1025, 1536, 2049, 2300)
"""Among them chunk size + 1 of both chunk sizes below, and windows that a chunk border cuts."""
EDGE = SMALL | {"max_model_len": 2560, "max_num_batched_tokens": 2560}


@pytest.fixture(scope="module")
def edge_prompts(tokenizer: Any) -> list[list[int]]:
    return [prompt_of(tokenizer, n, i) for i, n in enumerate(EDGE_LENGTHS)]


@pytest.fixture(scope="module")
def solo_tokens(make_engine: MakeEngine, edge_prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone, in one chunk, under the default policy."""
    engine = make_engine({"prompt_budget": BUDGET}, **EDGE)
    return one_by_one(engine, edge_prompts, max_tokens=24)


def test_reading_all_that_was_kept_gives_snapkvs_tokens(
    make_engine: MakeEngine, edge_prompts: list[list[int]], solo_tokens: list[list[int]]
) -> None:
    """rocketkv with room for everything kept: sparse attention on private blocks against vLLM's dense kernel on them."""
    del solo_tokens  # only keeps this test behind the fixture's engine
    everything = make_engine({"prompt_budget": BUDGET, "topk_tokens": 1024}, **EDGE)
    tokens = generate(everything, edge_prompts, 24)
    assert tokens == generate(make_engine({"policy": "snapkv", "prompt_budget": BUDGET}, **EDGE), edge_prompts, 24)


def test_batch_hits_and_same_step_blocks(
    make_engine: MakeEngine, edge_prompts: list[list[int]], solo_tokens: list[list[int]]
) -> None:
    """In one batch; the same prompt twice in one batch, of which one is admitted onto blocks that the other computes in that
    step; and again, on prefix-cache hits of an evicted prompt."""
    engine = make_engine({"prompt_budget": BUDGET}, **EDGE)
    assert generate(engine, edge_prompts, 24) == solo_tokens
    assert engine.reset_prefix_cache()
    twice = [edge_prompts[-1], edge_prompts[-1]]
    assert generate(engine, twice, 24) == [solo_tokens[-1]] * 2
    hits_before = metric(engine, "vllm:prefix_cache_hits")
    assert generate(engine, [edge_prompts[-1]], 24) == [solo_tokens[-1]]
    layout = RocketKVConfig(prompt_budget=BUDGET).layout(len(edge_prompts[-1]), BLOCK_SIZE)
    assert metric(engine, "vllm:prefix_cache_hits") - hits_before == layout.max_prefix_hit(32) > 0
    assert engine.reset_prefix_cache(), "blocks were left in use"


def test_seeded_samples_differ_and_repeat(make_engine: MakeEngine, edge_prompts: list[list[int]]) -> None:
    engine = make_engine({"prompt_budget": BUDGET}, **EDGE)
    sampling = {"n": 4, "temperature": 1.0, "seed": 7}
    first = generate(engine, [edge_prompts[-1]], 24, **sampling)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert generate(engine, [edge_prompts[-1]], 24, **sampling) == first


def test_counts_follow_from_lengths(make_engine: MakeEngine, edge_prompts: list[list[int]]) -> None:
    config = RocketKVConfig(prompt_budget=BUDGET)
    engine = make_engine({"prompt_budget": BUDGET}, **EDGE)
    before = our_counts()
    num_output_tokens = 10
    generate(engine, edge_prompts, num_output_tokens, ignore_eos=True)
    layouts = [config.layout(len(prompt), BLOCK_SIZE) for prompt in edge_prompts]
    # The last sampled token is never computed; token j of the others sees all that was kept and j decoded ones.
    decoded = range(1, num_output_tokens)
    expected = {
        "requests_evicted": len(layouts),
        "prompt_tokens_kept": sum(layout.num_kept_tokens for layout in layouts),
        "prompt_tokens_dropped": sum(layout.num_dropped_tokens for layout in layouts),
        "blocks_freed": sum(layout.num_dropped_blocks for layout in layouts),
        "pages_selected": sum(config.num_selected_pages(x.num_kept_tokens + j) for x in layouts for j in decoded),
    }
    assert {name: value - before[name] for name, value in our_counts().items()} == expected


@pytest.mark.parametrize("chunk_size", [512, 2048])
def test_chunk_size_does_not_matter(
    make_engine: MakeEngine, edge_prompts: list[list[int]], solo_tokens: list[list[int]], chunk_size: int
) -> None:
    engine = make_engine({"prompt_budget": BUDGET}, **(EDGE | {"max_num_batched_tokens": chunk_size}))
    assert one_by_one(engine, edge_prompts, 24) == solo_tokens
    assert generate(engine, edge_prompts, 24) == solo_tokens


def test_chunk_size_does_not_matter_to_seeds(make_engine: MakeEngine, edge_prompts: list[list[int]]) -> None:
    """Plain vLLM 0.32 dies on CPUs of a seeded prompt that takes two steps (``compat.take_back_discarded_samples_on_cpu``)."""
    samples = []
    for chunk_size in (2048, 512):
        engine = make_engine({"prompt_budget": BUDGET}, **(EDGE | {"max_num_batched_tokens": chunk_size}))
        assert engine.reset_prefix_cache()
        samples.append(generate(engine, [edge_prompts[-1]], 24, temperature=1.0, seed=7))
    assert samples[0] == samples[1]


def test_preempted_requests_give_the_same_tokens(make_engine: MakeEngine, tokenizer: Any) -> None:
    """A pool in which five requests do not fit to their end: some are preempted while decoding, and resume by recomputing their
    prompt and their outputs, in one step, on prefix-cache hits of their own."""
    prompts = [prompt_of(tokenizer, n, i) for i, n in enumerate((290, 297, 300, 310, 320))]
    options = SMALL | {"max_model_len": 448, "block_size": 32}
    rocketkv = {"prompt_budget": 256}
    sampling = {"max_tokens": 110, "ignore_eos": True}
    solo = [generate(make_engine(rocketkv, **options), [prompt], **sampling)[0] for prompt in prompts]
    # Of 30 layers: 32 tokens, 3 KV heads, 64 dimensions of K and V in float32, bounds of 8 pages in bfloat16.
    bytes_per_block = 30 * 3 * 64 * (32 * 2 * 4 + 8 * 2 * 2)
    engine = make_engine(rocketkv, kv_cache_memory_bytes=44 * bytes_per_block, **options)
    assert generate(engine, prompts, **sampling) == solo
    assert metric(engine, "vllm:num_preemptions") > 0
    assert engine.reset_prefix_cache(), "blocks were left in use"


# --- what it is for ----------------------------------------------------------------------------------------------------


def test_needles_are_found(make_engine: MakeEngine, tokenizer: Any) -> None:
    """Facts at 12 places of documents of 1K to 7K tokens, with 512 tokens kept."""
    engine = make_engine({"prompt_budget": BUDGET})
    needles = [needle(tokenizer, n, i) for i, n in enumerate(NEEDLE_LENGTHS)]
    outputs = generate(engine, [tokens for tokens, _ in needles], demo_document.ANSWER_TOKENS)
    found = [answer in tokenizer.decode(output) for output, (_, answer) in zip(outputs, needles, strict=True)]
    assert all(found), found
    assert engine.reset_prefix_cache(), "blocks were left in use"


def test_with_keys_and_values_in_fp8(make_engine: MakeEngine, tokenizer: Any) -> None:
    """Against plain vLLM with the same cache: equal tokens below the budget, one prompt at a time since the model is in bfloat16,
    and no fact found less."""
    short = [prompt_of(tokenizer, n, i) for i, n in enumerate((40, 300, BUDGET))]
    needles = [needle(tokenizer, n, i) for i, n in enumerate(NEEDLE_LENGTHS) if i % 2]
    results = []
    for rocketkv in (None, {"prompt_budget": BUDGET}):
        engine = make_engine(rocketkv, kv_cache_dtype="fp8")
        below = one_by_one(engine, short, 24)
        outputs = generate(engine, [tokens for tokens, _ in needles], demo_document.ANSWER_TOKENS)
        found = [answer in tokenizer.decode(output) for output, (_, answer) in zip(outputs, needles, strict=True)]
        results.append((below, found))
    (plain_below, plain_found), (our_below, our_found) = results
    assert our_below == plain_below
    assert sum(our_found) >= sum(plain_found) > 0, (our_found, plain_found)
    assert our_counts()["requests_evicted"] >= len(needles)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": "snapkv", "prompt_budget": BUDGET}, id="snapkv"),
        pytest.param({"preset": "reference"}, id="reference"),
        pytest.param({"preset": "trtllm"}, id="trtllm"),
        pytest.param({"policy": "hsa"}, id="hsa"),
    ],
)
def test_presets_and_policies_find_needles(make_engine: MakeEngine, tokenizer: Any, options: dict[str, Any]) -> None:
    engine = make_engine(options)
    needles = [needle(tokenizer, n, i) for i, n in enumerate((2500, 3000, 3500, 4000))]
    outputs = generate(engine, [tokens for tokens, _ in needles], demo_document.ANSWER_TOKENS)
    found = [answer in tokenizer.decode(output) for output, (_, answer) in zip(outputs, needles, strict=True)]
    assert all(found), found
