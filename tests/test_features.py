# SPDX-License-Identifier: Apache-2.0
"""vLLM features beside rocketkv on a small random model in float32: each must give the tokens of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.random_models import save_llama

pytestmark = pytest.mark.engine

OPTIONS = {"prompt_budget": 64, "window_size": 16, "topk_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}
ENGINE = {"max_model_len": 512, "block_size": 32, "dtype": "float32", "skip_tokenizer_init": True}
POOL = {"kv_cache_memory_bytes": 8 << 20}
MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.05)  # repeats itself, as n-grams need


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    """Longer than the budget, with a short period, so that an n-gram drafter finds something to propose."""
    return [
        {"prompt_token_ids": [(i * i) % period + 3 for i in range(n)]}
        for n, period in ((300, 41), (129, 17), (200, 61))
    ]


def greedy(engine: Any, prompts: list[dict[str, list[int]]], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, detokenize=False, **sampling)
    return list(engine.generate(prompts, params, use_tqdm=False))


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine, model: str, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    return tokens_of(greedy(make_engine(OPTIONS, model=model, **ENGINE, **POOL), prompts))


def test_ngram_speculation(
    make_engine: MakeEngine, model: str, prompts: list[dict[str, list[int]]], alone: list[list[int]]
) -> None:
    """Drafts are accepted and rejected across page and block borders: rejected slots are overwritten, their pages summed up
    again."""
    speculative = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = make_engine(OPTIONS, model=model, speculative_config=speculative, **ENGINE, **POOL)
    assert tokens_of(greedy(engine, prompts)) == alone
    drafted = sum(m.value for m in engine.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")
    accepted = sum(m.value for m in engine.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafted
    assert engine.reset_prefix_cache(), "blocks were left in use"


def test_tensor_parallel(
    make_engine: MakeEngine,
    model: str,
    prompts: list[dict[str, list[int]]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers with one KV head each: eviction and selection are per KV head, so nothing may differ."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")  # one core, in case there is only one
    engine = make_engine(OPTIONS, model=model, tensor_parallel_size=2, **ENGINE, **POOL)
    assert tokens_of(greedy(engine, prompts)) == alone


def test_prompt_logprobs_are_those_of_plain_vllm(
    make_engine: MakeEngine, model: str, prompts: list[dict[str, list[int]]]
) -> None:
    """Prefill stays dense and exact, in chunks too."""
    chunked = ENGINE | {"max_num_batched_tokens": 128, "max_num_seqs": 16}
    ours = greedy(make_engine(OPTIONS, model=model, **chunked, **POOL), prompts, prompt_logprobs=1)
    plain = greedy(make_engine(model=model, **chunked, **POOL), prompts, prompt_logprobs=1)
    for our_output, plain_output in zip(ours, plain, strict=True):
        pairs = zip(our_output.prompt_logprobs[1:], plain_output.prompt_logprobs[1:], strict=True)
        for our_position, plain_position in pairs:
            assert our_position.keys() == plain_position.keys()
            for token, entry in our_position.items():
                assert entry.logprob == pytest.approx(plain_position[token].logprob, abs=1e-4)
