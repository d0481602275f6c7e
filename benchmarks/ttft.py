# SPDX-License-Identifier: Apache-2.0
"""Series 2: time to first token against prompt length, on prompts that nothing has seen before, one at a time."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import engines
from benchmarks.engines import Engine, EngineSettings, Prompt, last_line, say
from benchmarks.store import Results, spread

SERIES = "ttft"
SEED = 20_000
LENGTHS = (1024, 2048, 4096, 7000)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides whether a stored entry is still the one that is asked for."""
    names = ("model", "ours", "rocketkv", "repeats", "max_num_batched_tokens")
    return {name: getattr(options, name) for name in names}


def key_of(options: argparse.Namespace, length: int) -> str:
    """The name in the results file."""
    return f"{options.mode} prompt {length} budget {options.budget}"


def pending(options: argparse.Namespace, results: Results) -> list[int]:
    """The lengths that the results file lacks."""
    return [n for n in sorted(options.lengths) if not results.done(SERIES, key_of(options, n), settings_of(options))]


def estimate(options: argparse.Namespace, results: Results) -> float:
    """Seconds that this series takes, roughly."""
    todo = pending(options, results)
    runs = sum((options.repeats + (n == todo[0])) * engines.prefill_estimate(n) for n in todo)
    return 2 * (runs + engines.start_estimate(options.mode == "eager")) if todo else 0.0


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure the lengths that are missing, with one pair of engines."""
    todo = pending(options, results)
    if not todo:
        return
    plain, ours = (engine_settings(options, which, max(todo)) for which in ("plain", options.ours))
    try:
        with engines.running(plain) as first, engines.running(ours) as second:
            for number, length in enumerate(todo):
                results.put(
                    SERIES,
                    key_of(options, length),
                    settings_of(options),
                    measure(options, length, number, first, second),
                )
    except (RuntimeError, MemoryError) as error:
        say(f"FAILED: time to first token: {last_line(error)}")
        for length in pending(options, results):
            entry = {"mode": options.mode, "budget": options.budget, "length": length, "error": str(error)}
            results.put(SERIES, key_of(options, length), settings_of(options), entry)


def engine_settings(options: argparse.Namespace, which: str, longest: int) -> EngineSettings:
    """One side of the pair; its pool holds two of the longest prompts."""
    ours = which == "rocketkv"
    return EngineSettings(
        name=f"ttft-{which}-{options.mode}",
        model=options.model,
        max_model_len=longest + 8,
        pool_bytes=engines.kv_bytes_per_token(options.model) * (2 * longest + 2 * options.budget + 2048) * 5 // 4,
        eager=options.mode == "eager",
        rocketkv={"prompt_budget": options.budget, **options.rocketkv} if ours else None,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def measure(options: argparse.Namespace, length: int, number: int, plain: Engine, ours: Engine) -> dict[str, Any]:
    """Both engines in turn, `repeats` fresh prompts each; before the first length each engine computes one for warming up."""
    seconds: list[list[float]] = [[], []]
    for repeat in range(-1 if number == 0 else 0, options.repeats):
        prompt = Prompt(SEED + 1000 * length + repeat + 1, length)
        for side, engine in enumerate((plain, ours)):
            run = engine.run([prompt], 1)
            if any(run.cached_tokens):
                raise RuntimeError(f"{run.cached_tokens} tokens of a fresh prompt were cached")
            if repeat >= 0:
                seconds[side].append(run.first_token_seconds[0])
    ratios = [o / p for p, o in zip(*seconds, strict=True)]
    times = " against ".join(f"{statistics.median(side):.3f}" for side in seconds)
    say(f"time to first token, {length} tokens: {times} s, {statistics.median(ratios):.3f} x plain's")
    return {
        "mode": options.mode,
        "budget": options.budget,
        "length": length,
        "plain": spread(seconds[0]),
        "ours": spread(seconds[1]),
        "ratio": spread(ratios),
        "engines": {"plain": plain.info, "ours": ours.info},
    }
