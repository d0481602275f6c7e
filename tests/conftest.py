# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: the demo model, its tokenizer, engines in processes of their own, and hypothesis' profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest


def _choose_tritons_interpreter() -> None:
    """Triton's kernels run in its interpreter here, which is chosen while Triton is imported and while a kernel is decorated; for
    this process alone: engines that it starts must not see the variable."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


_choose_tritons_interpreter()

ROOT = Path(__file__).parent.parent
DEMO_MODEL = Path(os.environ.get("ROCKETKV_DEMO_MODEL", ROOT / ".cache" / "demo-model"))

# Machines that run the tests are small and shared: no deadline on one example.
hypothesis.settings.register_profile("rocketkv", deadline=None, print_blob=True)
hypothesis.settings.load_profile("rocketkv")

# The pool's size is an option of each engine; this variable, which the Makefile sets for servers, would win over it.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
# Both cores compute; vLLM keeps one for its API otherwise.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def demo_model() -> str:
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.fail(f"{DEMO_MODEL} is missing: run `make model`")
    return str(DEMO_MODEL)


@pytest.fixture(scope="session")
def tokenizer(demo_model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="session")
def make_engine(demo_model: str) -> Iterator[Callable[..., Any]]:
    """Starts an engine, on the demo model unless told otherwise; the one that runs is given again for the same options, and
    stopped for others: one is alive at a time."""
    running: dict[str, Any] = {}

    def stop() -> None:
        for engine in running.values():
            engine.llm_engine.engine_core.shutdown()
        running.clear()

    def start(rocketkv: dict[str, Any] | None = None, **options: Any) -> Any:
        from vllm import LLM

        if rocketkv is not None:
            options |= {"attention_backend": "rocketkv", "additional_config": {"rocketkv": rocketkv}}
        defaults = {
            "model": demo_model,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,
            "disable_log_stats": False,
        }
        options = defaults | options
        key = repr(options)
        if key not in running:
            stop()
            running[key] = LLM(**options)
        assert running[key].reset_prefix_cache(), "blocks were left in use"
        return running[key]

    yield start
    stop()
