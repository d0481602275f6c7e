# SPDX-License-Identifier: Apache-2.0
"""An end-to-end run in vLLM: plain and with rocketkv, each in a process of its own.

    python -m benchmarks.gpu.engine plain|rocketkv MODEL   # the child; prints one line of JSON

Without a model, one with random weights and a layer like Llama-3.1-8B's is made up: its text means nothing, its times do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

LAYERS = 8
LONG, SHORT, BATCH, STEPS = 32_000, 700, 4, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MARK = "RESULT "


def engine_series(model: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Both engines one after the other, then what they say together."""
    deadline = time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not model:
            model = folder
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for which in ("plain", "rocketkv"):
            found[which] = run_child(which, model, deadline - time.monotonic())
            yield {"part": "engine", "name": which} | found[which]
    if all("token_seconds" in entry for entry in found.values()):
        yield {"part": "engine", "name": "together"} | together(found["plain"], found["rocketkv"])


def together(plain: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Whether prompts below the budget gave the same tokens, and how much faster long ones decode."""
    same = plain["short_tokens"] == ours["short_tokens"]
    failure = "" if same else "prompts below the budget gave other tokens than plain vLLM"
    return {"failure": failure, "ratio": plain["token_seconds"] / ours["token_seconds"]}


def run_child(which: str, model: str, seconds: float) -> dict[str, Any]:
    """What the child found, or why it found nothing."""
    if seconds < 30:
        return {"skipped": f"only {seconds:.0f} s of this part's time are left"}
    command = [sys.executable, "-m", "benchmarks.gpu.engine", which, model]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"not ready after {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    return {"failure": f"ended with {done.returncode}: {' '.join(done.stderr[-400:].split())}"}


def child(which: str, model: str) -> dict[str, Any]:
    """Start an engine and time it."""
    from vllm import LLM, SamplingParams

    is_random = not any(Path(model).glob("*.safetensors"))
    options: dict[str, Any] = {
        "model": model, "max_model_len": LONG + 2 * STEPS, "max_num_seqs": 16, "seed": 0, "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.8,
    }  # fmt: skip
    if is_random:
        options |= {"load_format": "dummy"}
    else:
        positions = json.loads(Path(model, "config.json").read_text())["max_position_embeddings"]
        options["max_model_len"] = min(positions, options["max_model_len"])
    if which == "rocketkv":
        options |= {"attention_backend": "rocketkv", "additional_config": {"rocketkv": {"prompt_budget": 2048}}}
    started = time.perf_counter()
    engine = LLM(**options)
    ready = time.perf_counter() - started
    length = min(LONG, options["max_model_len"] - 2 * STEPS)

    def generate(tokens: int, count: int, max_tokens: int) -> tuple[float, list[list[int]]]:
        prompts = [
            {"prompt_token_ids": [1000 + (7919 * i + 31 * j * j) % 20000 for j in range(tokens)]} for i in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began, [list(output.outputs[0].token_ids) for output in outputs]

    short_tokens = generate(SHORT, 2, 32)[1]
    prefill = generate(length, BATCH, 1)[0]
    first = generate(length, BATCH, 1)[0]  # what the prefix cache holds is not computed again, here and in the next
    whole, long_tokens = generate(length, BATCH, 1 + STEPS)
    assert all(len(tokens) == 1 + STEPS for tokens in long_tokens)
    return {
        "model": "random weights" if is_random else Path(model).name, "layers": LAYERS if is_random else None,
        "tokens": length, "batch": BATCH, "start_seconds": ready, "prefill_seconds": prefill,
        "token_seconds": (whole - first) / STEPS, "short_tokens": short_tokens,
    }  # fmt: skip


if __name__ == "__main__":
    print(MARK + json.dumps(child(sys.argv[1], sys.argv[2])), flush=True)
