# SPDX-License-Identifier: Apache-2.0
"""The GPU path in the real engine without a GPU: model runner V2, vLLM's Triton attention and this package's Triton kernels, all
in Triton's interpreter, against the CPU kernels on the same random model of two layers.

The interpreter is slow: few engines, few tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.random_models import save_llama
from tests.test_v2_runner import OPTIONS, run_engine
from vllm_rocketkv import compat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("random-model"), head_dim=64)


@pytest.mark.engine
@pytest.mark.slow
def test_gpu_path_gives_the_tokens_of_the_cpu_kernels(model: str) -> None:
    """Prompts cut by chunk borders, one of k * chunk + 1 tokens, one below the budget, decoded in one batch."""
    gpu = run_engine(model, OPTIONS, use_v2=True, kernels="triton")
    cpu = run_engine(model, OPTIONS, use_v2=False)
    assert gpu["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert gpu["tokens"] == cpu["tokens"]
    assert gpu["freed"]


SUMS = {
    "quest": {"policy": "quest", "prompt_budget": 64, "topk_tokens": 48},
    "blog": {"preset": "blog", "prompt_budget": 64, "window_size": 16, "topk_tokens": 48, "sink_tokens": 4},
}
"""Policies that rank pages by sums."""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_pages_ranked_by_sums_give_the_tokens_of_the_cpu_kernels(model: str, name: str) -> None:
    options = {"lengths": (300, 129)}
    gpu = run_engine(model, SUMS[name], use_v2=True, kernels="triton", **options)
    cpu = run_engine(model, SUMS[name], use_v2=False, **options)
    assert gpu["tokens"] == cpu["tokens"]
    assert gpu["freed"]


@pytest.mark.engine
@pytest.mark.slow
def test_preempted_requests_give_the_same_tokens(model: str) -> None:
    """A pool in which not all can grow: some request is preempted and computes its outputs again, as rows of one step."""
    options = OPTIONS | {"policy": "hsa"}
    lengths = (156, 157, 158, 159)
    tight = {"lengths": lengths, "kv_cache_memory_bytes": 22 * 2 * 36864, "max_model_len": 256}
    gpu = run_engine(model, options, use_v2=True, kernels="triton", **tight)
    cpu = run_engine(model, options, use_v2=False, lengths=lengths)
    assert gpu["preemptions"]
    assert not cpu["preemptions"]
    assert gpu["tokens"] == cpu["tokens"]
    assert gpu["freed"]


@pytest.mark.engine
@pytest.mark.slow
def test_fp8_cache_read_by_our_kernels_is_the_one_vllm_wrote(model: str) -> None:
    """Selecting every token gives plain attention's tokens, on an fp8 cache that vLLM's Triton attention writes. (The CPU's own
    fp8 attention rounds elsewhere, so its tokens are no oracle.)"""
    options = OPTIONS | {"topk_tokens": 512}
    fp8 = {"kernels": "triton", "kv_cache_dtype": "fp8", "lengths": (300, 129)}
    ours = run_engine(model, options | {"policy": "hsa"}, use_v2=True, **fp8)
    theirs = run_engine(model, options | {"policy": "full"}, use_v2=True, **fp8)
    assert ours["tokens"] == theirs["tokens"]


# --- CUDA graphs: what can be told without a GPU ----------------------------------------------------------------------


def runner_and_state(num_prompt: int, start: int, num_decoded: int = 5) -> tuple[Any, Any]:
    """A batch of one decode and one request that is being prefilled, as model runner V2 has gathered it."""
    from vllm.v1.worker.gpu.model_runner import BatchReqState

    states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.array([300, num_prompt])),
        num_computed_tokens_np=np.array([num_decoded, start]),
    )
    states.num_computed_tokens_np[0] += 300
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config={"rocketkv": OPTIONS},
            cache_config=SimpleNamespace(block_size=32),
            model_config=SimpleNamespace(max_model_len=32768),
        ),
        req_states=states,
    )
    state = BatchReqState(
        req_ids=["decode", "prefill"],
        num_scheduled_tokens=np.array([1, 1]),
        num_tokens=2,
        num_draft_tokens_np=None,
        idx_mapping_np=np.array([0, 1]),
        prefill_len_np=np.array([300, num_prompt]),
        num_computed_prefill_tokens_np=np.array([300, start]),
        is_prefilling_np=np.array([False, True]),
        max_seq_len_np=None,
        has_prefill=True,
        prefill_runs_as_decode_np=np.array([False, True]),
        decode_graph_eligible=True,
    )
    return runner, state


@pytest.mark.parametrize(
    ("num_prompt", "start", "num_decoded", "is_eligible"),
    [
        (129, 128, 5, False),  # the crossing step: stage 1 runs
        (129, 112, 5, True),  # one token before the window of 16
        (129, 113, 5, False),  # the window's first token, whose query is parked
        (64, 63, 5, True),  # within the budget: nothing but a decode
        (64, 63, 1500, True),  # 64 kept and 1500 decoded: the fused kernel has room for 2048
        (64, 63, 2048, False),  # the decode has outgrown it
    ],
)
def test_what_no_cuda_graph_holds_is_no_decode_for_them(
    num_prompt: int, start: int, num_decoded: int, is_eligible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner, state = runner_and_state(num_prompt, start, num_decoded)
    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", lambda self, *args: (state, 1))
    compat.choose_steps_for_cuda_graphs()
    gathered, uniform_token_count = GPUModelRunner.gather_batch_req_state(runner, None, False)  # type: ignore[arg-type]
    assert gathered is not None
    assert gathered.decode_graph_eligible is is_eligible
    assert uniform_token_count == (1 if is_eligible else None)
