# SPDX-License-Identifier: Apache-2.0
"""Dense vLLM against rocketkv, offline, on long documents with a fact planted in each.

    python examples/demo.py [--requests 4] [--tokens 7000] [--rocketkv '{"prompt_budget": 512}']

Prints, side by side: the answers, the KV cache blocks held while decoding, the prompt tokens kept, and the time per output
token. Each engine runs in a process of its own, one after the other, on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples import demo_document
from vllm_rocketkv.config import RocketKVConfig

MAX_MODEL_LEN = 8192
POOL_BYTES = 1 << 30


@dataclass
class Outcome:
    """What one engine did with the prompts."""

    answers: list[str]
    prompt_lengths: list[int]
    blocks_after_prefill: int
    blocks_while_decoding: int
    block_size: int
    mib_per_block: float
    seconds_per_token: float


def run(options: argparse.Namespace, backend: str | None) -> Outcome:
    """Answer the prompts with one backend; None for vLLM's own choice."""
    from vllm import LLM

    ours: dict[str, Any] = {}
    if backend:
        ours = {"attention_backend": backend, "additional_config": {"rocketkv": options.rocketkv}}
    engine = LLM(
        options.model,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        enforce_eager=True,
        kv_cache_memory_bytes=POOL_BYTES,
        disable_log_stats=False,
        **ours,
    )
    depths = demo_document.needle_depths()
    prompts = [
        demo_document.needle_prompt(engine.get_tokenizer(), options.tokens, depths[fact % len(depths)], fact)[0]
        for fact in _fact_numbers(options.requests)
    ]
    try:
        return _answer(engine, prompts, options.output_tokens)
    finally:
        engine.llm_engine.engine_core.shutdown()  # this process waits for the engine's before it ends


def _fact_numbers(requests: int) -> range:
    """Facts spread over the documents' depths."""
    return range(2, 2 + 3 * requests, 3)


def _answer(engine: Any, prompts: list[str], output_tokens: int) -> Outcome:
    """Drive the engine step by step, so that its block usage can be read between steps."""
    from vllm import SamplingParams

    core = engine.llm_engine
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(str(number), prompt, params)
    outputs: dict[str, Any] = {}
    held: list[int] = []
    step_seconds: list[float] = []
    while core.has_unfinished_requests():
        started = time.perf_counter()
        outputs |= {output.request_id: output for output in core.step()}
        if len(outputs) == len(prompts) and core.has_unfinished_requests():  # every prompt is computed
            step_seconds.append(time.perf_counter() - started)
            held.append(_blocks_in_use(engine))
    ordered = [outputs[str(number)] for number in range(len(prompts))]
    return Outcome(
        answers=[output.outputs[0].text.strip().split()[0].strip(".") for output in ordered],
        prompt_lengths=[len(output.prompt_token_ids) for output in ordered],
        blocks_after_prefill=held[0],
        blocks_while_decoding=held[2],  # two steps later the last prompt is compacted, and no request has ended
        block_size=core.vllm_config.cache_config.block_size,
        mib_per_block=POOL_BYTES / core.vllm_config.cache_config.num_gpu_blocks / 2**20,
        # The first step of the timed ones still holds the last prompt.
        seconds_per_token=statistics.median(step_seconds[1:]),
    )


def _blocks_in_use(engine: Any) -> int:
    usage = next(metric.value for metric in engine.get_metrics() if metric.name == "vllm:kv_cache_usage_perc")
    return round(usage * (engine.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1))


def _in_own_process(options: argparse.Namespace, backend: str | None) -> Outcome:
    print(f"==> {backend or 'plain vLLM'}: {options.requests} documents of {options.tokens} tokens ...", flush=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, options, backend).result()


def report(options: argparse.Namespace, plain: Outcome, ours: Outcome) -> str:
    """The comparison as a Markdown table."""
    config = RocketKVConfig.parse(options.rocketkv)
    layouts = [config.layout(n, ours.block_size) for n in ours.prompt_lengths]
    expected = [demo_document.make_fact(fact, 0.0).number for fact in _fact_numbers(options.requests)]
    found = [sum(a == e for a, e in zip(outcome.answers, expected, strict=True)) for outcome in (plain, ours)]
    speed = plain.seconds_per_token / ours.seconds_per_token
    rows = [
        ("answers", ", ".join(plain.answers), ", ".join(ours.answers)),
        ("facts found", f"{found[0]} of {len(expected)}", f"{found[1]} of {len(expected)}"),
        (
            "prompt tokens kept per KV head, all documents",
            f"{sum(plain.prompt_lengths)}",
            f"{sum(layout.num_kept_tokens for layout in layouts)}",
        ),
        ("KV blocks held, last prompt just computed", *(_size(o, o.blocks_after_prefill) for o in (plain, ours))),
        ("KV blocks held, decoding", *(_size(o, o.blocks_while_decoding) for o in (plain, ours))),
        (
            f"time per output token, batch {options.requests}",
            f"{plain.seconds_per_token * 1e3:.0f} ms",
            f"{ours.seconds_per_token * 1e3:.0f} ms ({speed:.2f} x plain's speed)",
        ),
    ]
    lines = ["| | plain vLLM | rocketkv |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {left} | {right} |" for name, left, right in rows])


def _size(outcome: Outcome, blocks: int) -> str:
    return f"{blocks} ({blocks * outcome.mib_per_block:.0f} MiB)"


def main() -> None:
    """Parse the options, run both engines, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / ".cache" / "demo-model"))
    parser.add_argument("--requests", type=int, default=4, help="documents answered in one batch")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of each prompt")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rocketkv", type=json.loads, default={"prompt_budget": 512}, help="options, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the pool's size given to the engine
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    plain, ours = _in_own_process(options, None), _in_own_process(options, "rocketkv")
    from vllm import __version__ as vllm_version

    print(report(options, plain, ours))
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, vLLM {vllm_version}")
    print(f"rocketkv options: {json.dumps(options.rocketkv)}")


if __name__ == "__main__":
    main()
