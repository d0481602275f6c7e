# SPDX-License-Identifier: Apache-2.0
"""Series 3: output tokens per second with a KV pool that holds three full prompts, through vLLM's own scheduler."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import engines
from benchmarks.engines import Engine, EngineSettings, Prompt, Run, last_line, say
from benchmarks.store import Results, spread

SERIES = "throughput"
SEED = 30_000
FULL_PROMPTS = 3
BLOCK = 128


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides whether a stored entry is still the one that is asked for."""
    names = ("model", "ours", "rocketkv", "throughput_repeats", "requests", "max_num_batched_tokens")
    return {name: getattr(options, name) for name in names}


def key_of(options: argparse.Namespace) -> str:
    """The name in the results file."""
    return f"{options.mode} input {options.input} output {options.output_tokens} budget {options.budget}"


def estimate(options: argparse.Namespace, results: Results) -> float:
    """Seconds that this series takes, roughly; as if rocketkv took as long as plain vLLM."""
    if results.done(SERIES, key_of(options), settings_of(options)):
        return 0.0
    prefill = options.requests * engines.prefill_estimate(options.input)
    waves = -(-options.requests // FULL_PROMPTS)
    decode = waves * options.output_tokens * engines.step_estimate(options.input, FULL_PROMPTS)
    return 2 * (engines.start_estimate(options.mode == "eager") + options.throughput_repeats * (prefill + decode))


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure it unless it was; both engines in turn."""
    if results.done(SERIES, key_of(options), settings_of(options)):
        return
    entry = {"mode": options.mode, "budget": options.budget, "input": options.input, "output": options.output_tokens}
    entry |= {"requests": options.requests}
    plain, ours = (engine_settings(options, which) for which in ("plain", options.ours))
    try:
        with engines.running(plain) as first, engines.running(ours) as second:
            entry |= measure(options, first, second)
    except (RuntimeError, MemoryError) as error:
        say(f"FAILED: throughput: {last_line(error)}")
        entry["error"] = str(error)
    results.put(SERIES, key_of(options), settings_of(options), entry)


def pool_blocks(options: argparse.Namespace) -> int:
    """Blocks of plain vLLM's pool: three full prompts and the null block."""
    return FULL_PROMPTS * -(-options.input // BLOCK) + 1


def engine_settings(options: argparse.Namespace, which: str) -> EngineSettings:
    """One side of the pair; both pools have the same bytes."""
    ours = which == "rocketkv"
    return EngineSettings(
        name=f"throughput-{which}-{options.mode}",
        model=options.model,
        max_model_len=options.input + options.output_tokens,
        pool_bytes=pool_blocks(options) * BLOCK * engines.kv_bytes_per_token(options.model),
        eager=options.mode == "eager",
        rocketkv={"prompt_budget": options.budget, **options.rocketkv} if ours else None,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def measure(options: argparse.Namespace, plain: Engine, ours: Engine) -> dict[str, Any]:
    """All requests at once, fresh prompts in each repeat, after one short request for warming up."""
    found = (plain.info["block_size"], plain.info["num_blocks"])
    if found != (BLOCK, pool_blocks(options)):
        raise RuntimeError(
            f"plain vLLM has {found[1]} blocks of {found[0]} tokens, not {pool_blocks(options)} of {BLOCK}"
        )
    sides: list[list[dict[str, Any]]] = [[], []]
    for engine in (plain, ours):
        engine.run([Prompt(SEED - 1, min(options.input, 1024))], 4)
    for repeat in range(options.throughput_repeats):
        prompts = [Prompt(SEED + 1000 * repeat + place, options.input) for place in range(options.requests)]
        for side, engine in zip(sides, (plain, ours), strict=True):
            side.append(figures(engine.run(prompts, options.output_tokens)))
            say(f"{engine.settings.name}, repeat {repeat + 1}: {describe(side[-1])}")
    ratios = [o["output_tokens_per_second"] / p["output_tokens_per_second"] for p, o in zip(*sides, strict=True)]
    say(f"output throughput: {statistics.median(ratios):.2f} x plain's")
    return {
        "pool_bytes": plain.settings.pool_bytes,
        "blocks": {"plain": plain.info["num_blocks"], "ours": ours.info["num_blocks"]},
        "plain": summary(sides[0]),
        "ours": summary(sides[1]),
        "ratio": spread(ratios),
        "engines": {"plain": plain.info, "ours": ours.info},
    }


def figures(run: Run) -> dict[str, Any]:
    """The throughput of one run and what bounds it: steps that hold prompt tokens against steps that only decode."""
    prefill = [step for step in run.steps if step.prefill]
    decode = [step for step in run.steps if not step.prefill]
    decode_seconds = sum(step.seconds for step in decode)
    decoded = sum(step.tokens for step in decode)
    return {
        "seconds": run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "prefill_steps": len(prefill),
        "prefill_step_seconds": sum(step.seconds for step in prefill),
        "prefill_step_tokens": sum(step.tokens for step in prefill),
        "decode_steps": len(decode),
        "decode_step_seconds": decode_seconds,
        "decode_tokens_per_second": decoded / decode_seconds if decode else 0.0,
        "mean_decode_batch": decoded / len(decode) if decode else 0.0,
        "largest_batch": max(step.requests for step in run.steps),
        "cached_prompt_tokens": sum(run.cached_tokens),
        "preemptions": run.preemptions,
    }


def describe(one: dict[str, Any]) -> str:
    """One run in a sentence."""
    return (
        f"{one['output_tokens_per_second']:.1f} output tokens/s; "
        f"{one['prefill_step_seconds']:.0f} s in {one['prefill_steps']} steps with prompt tokens, "
        f"{one['decode_step_seconds']:.0f} s in {one['decode_steps']} steps that decode "
        f"({one['decode_tokens_per_second']:.1f} tokens/s, batch {one['mean_decode_batch']:.1f}); "
        f"{one['preemptions']} preemptions"
    )


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all figures, and each repeat's."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"repeats": runs}
