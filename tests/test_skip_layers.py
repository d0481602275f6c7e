# SPDX-License-Identifier: Apache-2.0
"""Option ``skip_layers``: dense layers in KV cache groups of their own, beside sparse ones.

The random model has five layers of which 0 and 3 stay dense, so there are three groups of two layers' pages: one of dense layers,
two of sparse ones (0, 3 | 1, 4 | 2 and padding). It runs in float32, so that the same tokens are expected from any batch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.random_models import save_llama
from tests.scheduler_parts import ceil_div, make_request, plain_spec, startup_pool
from tests.test_engine import metric, needle
from tests.test_plugin import configure
from tests.test_v2_runner import run_engine
from vllm_rocketkv import plugin
from vllm_rocketkv.cache.manager import DenseLayersManager, RocketKVManager
from vllm_rocketkv.cache.spec import DenseLayerSpec, RocketKVSpec, dense_layer_spec, rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.options import USED_BY

MakeEngine = Callable[..., Any]
Prompts = Sequence[dict[str, list[int]]]
SMALL = {"prompt_budget": 64, "window_size": 16, "topk_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}
DENSE_LAYERS = (0, 3)
SKIPPING = SMALL | {"skip_layers": list(DENSE_LAYERS)}
B = 16


def options_of(policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those that mean something to the policy; all others are refused."""
    return {"policy": policy} | {
        n: v for n, v in options.items() if n != "policy" and policy in USED_BY.get(n, (policy,))
    }


def config(policy: str = "rocketkv", **options: Any) -> RocketKVConfig:
    return RocketKVConfig.parse(options_of(policy, {"skip_layers": [0], **SMALL, **options}))


# --- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"policy": "snapkv"}, {"kt_dtype": "float8_e5m2"}])
def test_pages_of_dense_layers_are_as_large_as_those_of_sparse_ones(options: dict[str, Any], block_size: int) -> None:
    """Page size 1 makes a sparse page exactly twice a plain one, for which vLLM would double the dense layers' block size."""
    policy = {"policy": "snapkv"} if "policy" in options else {}
    parsed = RocketKVConfig.parse({"skip_layers": [0], "prompt_budget": 256, **options, **policy})
    dense, sparse = dense_layer_spec(plain_spec(32), parsed), rocketkv_spec(plain_spec(32), parsed)
    dense, sparse = dense.copy_with_new_block_size(block_size), sparse.copy_with_new_block_size(block_size)
    assert dense.page_size_bytes == sparse.page_size_bytes >= plain_spec(block_size).page_size_bytes
    specs = {"a": dense, "b": sparse}
    assert unify_kv_cache_spec_page_size(specs) is specs


def groups_of(num_layers: int, dense_layers: Sequence[int]) -> list[KVCacheGroupSpec]:
    specs = {
        f"layers.{i}": (dense_layer_spec if i in dense_layers else rocketkv_spec)(plain_spec(B), config())
        for i in range(num_layers)
    }
    vllm_config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        ),
        speculative_config=None,
    )
    return get_kv_cache_groups(vllm_config, dict(specs))  # type: ignore[arg-type]


@pytest.mark.parametrize("dense_layers", [(0, 3), (1, 4), (0, 1), (4,)])
def test_no_group_holds_layers_of_both_kinds(dense_layers: tuple[int, ...]) -> None:
    """vLLM goes by the spec of layer 0: were that a plain ``FullAttentionSpec``, all layers would land in its group."""
    groups = groups_of(5, dense_layers)
    of_type = defaultdict(set)
    for group in groups:
        of_type[type(group.kv_cache_spec)] |= set(group.layer_names)
        assert len(group.layer_names) <= len(dense_layers)
    assert of_type == {
        DenseLayerSpec: {f"layers.{i}" for i in dense_layers},
        RocketKVSpec: {f"layers.{i}" for i in range(5) if i not in dense_layers},
    }


@pytest.mark.parametrize("num_dense", [0, 5])
def test_layers_of_one_kind_are_one_group(num_dense: int) -> None:
    assert len(groups_of(5, range(num_dense))) == 1


# --- blocks ------------------------------------------------------------------------------------------------------------

M, N, NUM_OUTPUTS = 256, 100, 40
"""Longest sequence; a prompt of 7 blocks, the last one partly filled, and outputs that fill it and two more."""


class Pool:
    """vLLM's manager of one dense and two sparse groups, and one request at a time that goes through it; as many blocks as
    vLLM's start-up check demands."""

    def __init__(self, policy: str) -> None:
        self.config = config(policy, **({} if policy == "hsa" else {"prompt_budget": 40, "window_size": 8}))
        dense, sparse = dense_layer_spec(plain_spec(B), self.config), rocketkv_spec(plain_spec(B), self.config)
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate((dense, sparse, sparse))]
        num_blocks = 1 + sum(startup_pool(group.kv_cache_spec, M) - 1 for group in groups)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], groups),
            max_model_len=M,
            scheduler_block_size=B,
            hash_block_size=B,
            enable_caching=True,
        )
        self.pool = self.manager.block_pool
        self.num_free_at_start = self.pool.get_num_free_blocks()

    @property
    def num_used(self) -> int:
        return self.num_free_at_start - self.pool.get_num_free_blocks()

    def hit(self, request: Any) -> int:
        return int(self.manager.get_computed_blocks(request)[1])

    def start(self, request: Any) -> int:
        blocks, num_hit = self.manager.get_computed_blocks(request)[:2]
        assert self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is not None
        request.num_computed_tokens = request.num_tokens
        return int(num_hit)

    def decode(self, request: Any, num_tokens: int) -> None:
        for token in range(num_tokens):
            request.append_output_token_ids(token + 1)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1


@pytest.mark.parametrize("policy", ["rocketkv", "snapkv", "hsa"])
def test_dense_groups_hold_every_block_and_sparse_ones_give_theirs_back(policy: str) -> None:
    pool = Pool(policy)
    kinds = [type(manager) for manager in pool.manager.coordinator.single_type_managers]
    assert kinds == [DenseLayersManager, RocketKVManager, RocketKVManager]
    request = make_request("a", list(range(N)), 60, B)
    layout = pool.config.layout(N, B)
    natural = ceil_div(N, B)
    assert pool.start(request) == 0
    assert pool.num_used == 3 * natural + 2 * layout.num_private_blocks
    pool.decode(request, NUM_OUTPUTS)
    blocks = ceil_div(N + NUM_OUTPUTS, B)
    assert pool.num_used == blocks + 2 * (blocks - layout.num_dropped_blocks)
    assert (layout.num_dropped_blocks > 0) == (policy != "hsa")
    pool.manager.free(request)
    assert pool.num_used == 0


@pytest.mark.parametrize("policy", ["rocketkv", "hsa"])
def test_no_group_shares_what_was_computed_beyond_a_sparse_prompt(policy: str) -> None:
    """The dense layers' K and V of decoded tokens follow from sparse attention in the layers between: a later prompt with the
    same tokens must compute its own."""
    pool = Pool(policy)
    request = make_request("a", list(range(N)), 60, B)
    pool.start(request)
    pool.decode(request, NUM_OUTPUTS)
    pool.manager.free(request)
    longer = make_request("b", list(request.all_token_ids) + list(range(500, 540)), 60, B)
    hashes = longer.block_hashes
    assert [bool(pool.pool.get_cached_block(h, [0])) for h in hashes] == [i < N // B for i in range(len(hashes))]
    assert pool.hit(longer) == N // B * B
    again = make_request("c", list(range(N)), 60, B)
    cap = pool.config.layout(N, B).max_prefix_hit(pool.config.window_size) if pool.config.evicts else N // B * B
    assert pool.start(again) == cap
    pool.manager.free(again)
    assert pool.num_used == 0


@pytest.mark.parametrize("policy", ["rocketkv", "hsa"])
def test_a_longest_request_fits_where_vllm_starts(policy: str) -> None:
    pool = Pool(policy)
    request = make_request("a", list(range(M - 1)), 1, B)
    assert pool.start(request) == 0
    pool.manager.free(request)
    assert pool.num_used == 0


def test_counts_are_of_requests_once_and_of_the_blocks_of_all_groups() -> None:
    pool = Pool("rocketkv")
    request = make_request("a", list(range(N)), 60, B)
    pool.start(request)
    pool.decode(request, 3)
    layout = pool.config.layout(N, B)
    first, second = (m for m in pool.manager.coordinator.single_type_managers if isinstance(m, RocketKVManager))
    counts = first.take_counts([second])
    assert (counts.requests_evicted, counts.prompt_tokens_dropped) == (1, layout.num_dropped_tokens)
    assert counts.blocks_freed == 2 * layout.num_dropped_blocks
    assert first.take_counts([second]).blocks_freed == 0


# --- start-up ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    plugin.register()
    return save_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=5)


@pytest.mark.parametrize(
    ("layers", "options", "words"),
    [
        ([0, 5], {}, ("'skip_layers'", "layer 5", "0 to 4")),
        ([0, 3], {"disable_hybrid_kv_cache_manager": True}, ("'skip_layers'", "--disable-hybrid-kv-cache-manager")),
    ],
)
def test_refused_in_one_sentence(
    model: str, layers: list[int], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    startable = {"prompt_budget": 256, "window_size": 16, "topk_tokens": 64, "recent_tokens": 8}
    configure(model, startable, **options)
    configure(model, startable | {"skip_layers": [0, 3]})
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(model, startable | {"skip_layers": layers}, **options)
    (sentence,) = [line for line in str(refusal.value).splitlines() if "rocketkv: " in line]
    assert all(word in sentence for word in words), sentence


# --- the engine ----------------------------------------------------------------------------------------------------------

ENGINE = {"max_model_len": 512, "block_size": 32, "dtype": "float32", "skip_tokenizer_init": True}
BLOCK_BYTES = 2 * 2 * 32 * (32 * 2 * 4 + 8 * 2 * 2)
"""Two layers of 2 KV heads, 32 dimensions: K and V of 32 tokens in float32, minimum and maximum of 8 pages in bfloat16."""
LENGTHS = (300, 129, 40, 201)
"""Longer than the budget, a block border + 1, below the budget."""


def prompts_of(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(7 * i + i * i * seed) % 997 for i in range(n)]}
        for seed, n in enumerate(lengths, start=1)
    ]


def tokens(engine: Any, prompts: Prompts, max_tokens: int = 60) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return [list(o.outputs[0].token_ids) for o in engine.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def start(make_engine: MakeEngine, model: str) -> Iterator[MakeEngine]:
    """Engines that run functions of this module in their workers."""
    before = os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    yield lambda rocketkv, **options: make_engine(
        rocketkv, **({"model": model, "kv_cache_memory_bytes": 16 << 20} | ENGINE | options)
    )
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION")
    if before is not None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = before


@pytest.fixture(scope="module")
def alone(start: MakeEngine) -> list[list[int]]:
    """Each prompt by itself, in one chunk, without any hit."""
    engine = start(SKIPPING)
    results = []
    for prompt in prompts_of(LENGTHS):
        assert engine.reset_prefix_cache()
        results += tokens(engine, [prompt])
    assert engine.reset_prefix_cache()
    return results


@pytest.mark.engine
def test_all_layers_skipped_is_plain_vllm(start: MakeEngine) -> None:
    plain = tokens(start(None), prompts_of(LENGTHS))
    skipping_all = tokens(start(SMALL | {"skip_layers": list(range(5))}), prompts_of(LENGTHS))
    assert skipping_all == plain


@pytest.mark.engine
def test_what_was_in_the_batch_and_the_cache_changes_nothing(start: MakeEngine, alone: list[list[int]]) -> None:
    engine, prompts = start(SKIPPING), prompts_of(LENGTHS)
    assert tokens(engine, prompts) == alone
    hits = metric(engine, "vllm:prefix_cache_hits")
    assert tokens(engine, prompts) == alone
    parsed = RocketKVConfig.parse(SKIPPING)
    caps = [parsed.layout(n, 32).max_prefix_hit(16) if n > 64 else n // 32 * 32 for n in LENGTHS]
    assert metric(engine, "vllm:prefix_cache_hits") - hits == sum(caps)
    assert engine.reset_prefix_cache()


@pytest.mark.engine
def test_blocks_in_use_while_a_request_decodes(start: MakeEngine) -> None:
    from vllm import SamplingParams

    llm = start(SKIPPING)
    engine = llm.llm_engine
    num_blocks = engine.vllm_config.cache_config.num_gpu_blocks
    assert num_blocks == (16 << 20) // BLOCK_BYTES
    (prompt,) = prompts_of(LENGTHS[:1])
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False))
    used = []
    while engine.has_unfinished_requests():
        engine.step()
        used.append(round(metric(llm, "vllm:kv_cache_usage_perc") * (num_blocks - 1)))
    layout = RocketKVConfig.parse(SKIPPING).layout(LENGTHS[0], 32)
    natural, private = layout.num_natural_blocks, layout.num_private_blocks
    assert used[5] == natural + 2 * private < 3 * natural
    assert llm.reset_prefix_cache()


# What layers 0 to 4 were given and gave, in the worker.
_seen: dict[str, list[tuple[torch.Tensor, ...]]] = defaultdict(list)


def watch_layers(worker: Any) -> None:
    from vllm_rocketkv.backend.impl import RocketKVImplBase

    original = RocketKVImplBase.forward

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
        output = original(self, layer, query, key, value, *others, **options)
        _seen[layer.layer_name].append(tuple(x.clone() for x in (query, key, value, output)))
        return output

    RocketKVImplBase.forward = forward  # type: ignore[method-assign]


def distance_to_full_attention(worker: Any) -> dict[str, tuple[float, float]]:
    """Of each layer, over the request that was watched: the largest error of its prompt tokens and the largest error of its
    decoded tokens, against full causal attention over every key the layer has seen."""
    distances = {}
    for name, steps in _seen.items():
        query, key, value, output = (torch.cat(parts).transpose(0, 1).double() for parts in zip(*steps, strict=True))
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        errors = (output - want).abs().amax((0, 2))
        prompt = len(steps[0][0])
        distances[name] = (errors[:prompt].max().item(), errors[prompt:].max().item())
    _seen.clear()
    return distances


@pytest.mark.engine
@pytest.mark.parametrize("options", [SKIPPING, options_of("hsa", SKIPPING)], ids=["rocketkv", "hsa"])
def test_skipped_layers_attend_to_everything_and_the_others_do_not(start: MakeEngine, options: dict[str, Any]) -> None:
    engine = start(options)
    engine.collective_rpc(watch_layers)
    tokens(engine, prompts_of((300,)), max_tokens=20)
    (distances,) = engine.collective_rpc(distance_to_full_attention)
    assert len(distances) == 5
    for name, (of_prompt, of_decoded) in distances.items():
        layer = int(name.split(".")[2])
        assert of_prompt < 1e-4
        assert (of_decoded < 1e-4) == (layer in DENSE_LAYERS), (name, of_decoded)


@pytest.mark.engine
def test_chunks_and_preemption_without_prefix_caching(start: MakeEngine, alone: list[list[int]]) -> None:
    """Chunk borders inside prompts and windows, in a pool where a request that grows puts another out."""
    tight = {"max_model_len": 384, "kv_cache_memory_bytes": 60 * BLOCK_BYTES, "max_num_batched_tokens": 72}
    engine = start(SKIPPING, enable_prefix_caching=False, **tight)
    prompts = prompts_of(LENGTHS)
    assert tokens(engine, prompts) == alone
    others = tokens(engine, prompts_of((150, 157, 158, 159, 60, 61, 62)), max_tokens=120)
    assert metric(engine, "vllm:num_preemptions") > 0
    assert [len(t) for t in others] == [120] * 7
    assert tokens(engine, prompts_of((150, 157))[1:], max_tokens=120) == others[1:2]
    assert engine.reset_prefix_cache()


@pytest.mark.engine
@pytest.mark.slow
def test_gpu_path_gives_the_tokens_of_the_cpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Model runner V2, which has its own block tables for several groups, and the Triton kernels, in Triton's interpreter."""
    model = save_llama(tmp_path_factory.mktemp("llama-64"), head_dim=64)
    options = SMALL | {"skip_layers": [1]}
    gpu = run_engine(model, options, use_v2=True, kernels="triton")
    cpu = run_engine(model, options, use_v2=False)
    assert gpu["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert gpu["tokens"] == cpu["tokens"]
    assert gpu["freed"]


@pytest.mark.engine
def test_the_demo_model_finds_needles(make_engine: MakeEngine, tokenizer: Any) -> None:
    engine = make_engine({"prompt_budget": 512, "skip_layers": [0, 1]}, max_model_len=4096, max_num_batched_tokens=1024)
    tests = [needle(tokenizer, length, index) for length, index in ((3000, 2), (2000, 7))]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in tests], params, use_tqdm=False)
    for output, (_, answer) in zip(outputs, tests, strict=True):
        assert answer in output.outputs[0].text
    assert engine.reset_prefix_cache()
