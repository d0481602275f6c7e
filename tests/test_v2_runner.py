# SPDX-License-Identifier: Apache-2.0
"""Model runner V2 and its Triton kernels in the real engine, in Triton's interpreter, against V1 on the same model.

V2 is what runs on GPUs by default. The interpreter is slow, so the model is a random one of two layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.random_models import save_llama
from vllm_rocketkv.options import USED_BY

HARNESS = Path(__file__).parent / "v2_runner"
OPTIONS = {"prompt_budget": 64, "window_size": 16, "topk_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}


def is_used(name: str, policy: str) -> bool:
    return name not in USED_BY or policy in USED_BY[name]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("random-model"))


def run_engine(
    model: str, rocketkv: dict[str, Any], use_v2: bool, kernels: str = "cpu", **options: Any
) -> dict[str, Any]:
    rocketkv = {name: value for name, value in rocketkv.items() if is_used(name, rocketkv.get("policy", "rocketkv"))}
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(use_v2)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc sends a function
        "ROCKETKV_KERNELS": kernels,
    }
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if use_v2:
        path = [str(HARNESS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, str(HARNESS / "engine.py"), model, json.dumps({"rocketkv": rocketkv} | options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-9000:] + done.stderr[-3000:]
    return dict(json.loads(results[0].removeprefix("RESULT ")))


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["rocketkv", "hsa"])
def test_v2_runner_gives_the_tokens_of_v1(random_model: str, policy: str) -> None:
    v1 = run_engine(random_model, OPTIONS | {"policy": policy}, use_v2=False)
    v2 = run_engine(random_model, OPTIONS | {"policy": policy}, use_v2=True)
    assert v1["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert v2["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert v2["tokens"] == v1["tokens"]
    assert v1["freed"]
    assert v2["freed"]
