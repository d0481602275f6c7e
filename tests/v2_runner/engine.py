# SPDX-License-Identifier: Apache-2.0
"""One engine, a few prompts, the tokens it gives: run by test_v2_runner.py and test_gpu_engine.py in a process of its own."""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

PROMPT_LENGTHS = (300, 129, 40, 257)
"""Longer than the budget and cut by chunk borders; chunk size + 1; below the budget."""


def runner_of(worker: Any) -> str:
    return type(worker.model_runner).__module__


def allow_fp8(worker: Any) -> None:
    """vLLM's Triton attention asks the device whether it has fp8 conversions; the interpreter has."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops

    ops._is_supported_kv_cache_dtype = lambda kv_cache_dtype: True


def main(model: str, rocketkv: dict[str, Any], lengths: tuple[int, ...] = PROMPT_LENGTHS, **options: Any) -> None:
    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 8 << 20,
        "dtype": "float32",
        "disable_log_stats": False,
    }
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        attention_backend="rocketkv",
        additional_config={"rocketkv": rocketkv},
        **(defaults | options),
    )
    if "kv_cache_dtype" in options:
        llm.collective_rpc(allow_fp8)
    prompts = [[(7 * i + i * i * seed) % 997 for i in range(n)] for seed, n in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    result = {
        "runner": llm.collective_rpc(runner_of)[0],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "preemptions": sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"),  # type: ignore[union-attr]
        "freed": llm.reset_prefix_cache(),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
