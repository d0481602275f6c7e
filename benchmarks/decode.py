# SPDX-License-Identifier: Apache-2.0
"""Series 1: time per output token against context, batch, budget and mode, plain vLLM and rocketkv in turn.

Prompt i of a long context continues prompt i of a shorter one, and a batch begins with the prompts of a smaller one: with prefix
caching each engine computes every prompt token once, whatever the number of combinations and repeats.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import engines
from benchmarks.engines import DECODE_MARGIN, Engine, EngineSettings, Prompt, Run, last_line, say
from benchmarks.store import Results, spread

SERIES = "decode"
SEED = 10_000
BLOCK = 128
CONTEXTS = (128, 1024, 2048, 4096, 7000, 16384, 32768)
# Of a rocketkv block over a plain one: the key table of page size 4 in bfloat16 adds a quarter.
BLOCK_GROWTH = 1.25


@dataclass(frozen=True)
class Combination:
    """One point of the series."""

    mode: str
    budget: int
    context: int
    batch: int
    same_prompt: bool = False
    """Whether all requests of the batch have the same prompt, which then is computed once."""

    @property
    def key(self) -> str:
        """The name in the results file."""
        same = " same prompt" if self.same_prompt else ""
        return f"{self.mode} context {self.context} batch {self.batch} budget {self.budget}{same}"

    @property
    def prompts(self) -> list[Prompt]:
        """The batch."""
        return [Prompt(SEED + (0 if self.same_prompt else place), self.context) for place in range(self.batch)]

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts of the batch."""
        return self.context * self.batch


def plan(options: argparse.Namespace) -> tuple[list[Combination], list[Combination]]:
    """All combinations in the order of measurement, and those too large to be measured."""
    every = [
        Combination(mode, budget, context, batch, options.same_prompt)
        for mode in options.modes
        for budget in options.budgets
        for context in sorted(options.contexts)
        for batch in sorted(options.batches)
    ]
    limit = options.max_prompt_tokens_per_engine
    return [c for c in every if c.prompt_tokens <= limit], [c for c in every if c.prompt_tokens > limit]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides whether a stored entry is still the one that is asked for."""
    names = ("model", "ours", "rocketkv", "repeats", "steps", "max_num_batched_tokens")
    return {name: getattr(options, name) for name in names}


def pending(options: argparse.Namespace, results: Results) -> list[Combination]:
    """The combinations that the results file lacks."""
    return [c for c in plan(options)[0] if not results.done(SERIES, c.key, settings_of(options))]


def estimate(options: argparse.Namespace, results: Results) -> float:
    """Seconds that this series takes, roughly."""
    todo = pending(options, results)
    seconds = 0.0
    for mode in dict.fromkeys(c.mode for c in todo):
        of_mode = [c for c in todo if c.mode == mode]
        of_budget = [[c for c in of_mode if c.budget == budget] for budget in dict.fromkeys(c.budget for c in of_mode)]
        for prefilled in [of_mode, *of_budget]:  # plain vLLM, then an engine for each budget
            seconds += engines.start_estimate(mode == "eager")
            seconds += sum(engines.prefill_estimate(n) for n in longest_prompts(prefilled))
    for c in todo:
        again = c.batch * engines.prefill_estimate(c.context, max(0, c.context - BLOCK))
        seconds += 2 * options.repeats * (again + options.steps * engines.step_estimate(c.context, c.batch))
    return seconds


def longest_prompts(combinations: Iterable[Combination]) -> list[int]:
    """For each place in a batch, the longest prompt that it gets."""
    longest: dict[int, int] = {}
    for c in combinations:
        for place in range(1 if c.same_prompt else c.batch):
            longest[place] = max(longest.get(place, 0), c.context)
    return [longest[place] for place in sorted(longest)]


def pool_bytes(options: argparse.Namespace, combinations: list[Combination], growth: float) -> int:
    """A pool in which every prompt of the series stays cached while the largest batch decodes."""
    cached = sum(-(-n // BLOCK) for n in longest_prompts(combinations))
    batch = max(c.batch for c in combinations)
    own = max(c.budget for c in combinations) // BLOCK + (options.steps + DECODE_MARGIN) // BLOCK + 3
    # A block that decoding fills is cached too, and pushes an older one out.
    filled = sum(
        c.batch * options.repeats for c in combinations if c.context % BLOCK + options.steps + DECODE_MARGIN >= BLOCK
    )
    # vLLM's start-up check: one request of the greatest length, with what stage 1 adds.
    return int((cached + batch * own + filled + 2) * BLOCK * engines.kv_bytes_per_token(options.model) * growth)


def engine_settings(
    options: argparse.Namespace, which: str, mode: str, budget: int, own: list[Combination]
) -> EngineSettings:
    """The engine of one side of a pair, with a pool for the combinations `own`."""
    ours = which == "rocketkv"
    longest = max(c.context for c in own)
    return EngineSettings(
        name=f"{which}-{mode}" + (f"-{budget}" if ours else ""),
        model=options.model,
        max_model_len=longest + options.steps + DECODE_MARGIN + 8,
        pool_bytes=pool_bytes(options, own, BLOCK_GROWTH if ours else 1.0),
        eager=mode == "eager",
        rocketkv={"prompt_budget": budget, **options.rocketkv} if ours else None,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure what is missing, mode by mode and budget by budget; plain vLLM stays alive through all budgets of a mode."""
    for c in plan(options)[1]:
        say(f"skipped: {c.key}: {c.prompt_tokens} prompt tokens")
        reason = f"{c.prompt_tokens} prompt tokens exceed --max-prompt-tokens-per-engine {options.max_prompt_tokens_per_engine}"
        if not results.done(SERIES, c.key, settings_of(options)):
            results.put(SERIES, c.key, settings_of(options), point(c) | {"skipped": reason})
    for mode in options.modes:
        of_mode = [c for c in pending(options, results) if c.mode == mode]
        if not of_mode:
            continue
        longest = max(of_mode, key=lambda c: c.context).context
        with engines.running(engine_settings(options, "plain", mode, 0, of_mode)) as plain:
            for budget in dict.fromkeys(c.budget for c in of_mode):
                own = [c for c in of_mode if c.budget == budget]
                settings = engine_settings(options, options.ours, mode, budget, own)
                # The same flags for both, also where another budget had longer contexts.
                settings = EngineSettings(**(settings.__dict__ | {"max_model_len": plain.settings.max_model_len}))
                assert longest < settings.max_model_len
                _measure_budget(options, results, plain, settings, own)


def _measure_budget(
    options: argparse.Namespace,
    results: Results,
    plain: Engine,
    settings: EngineSettings,
    combinations: list[Combination],
) -> None:
    """One rocketkv engine against the plain one; an error ends this engine's combinations and is stored."""
    left = list(combinations)
    try:
        with engines.running(settings) as ours:
            while left:
                entry = measure(options, left[0], plain, ours)
                results.put(SERIES, left[0].key, settings_of(options), entry)
                del left[0]
    except (RuntimeError, MemoryError) as error:
        if not plain_alive(plain):
            raise
        say(f"FAILED: {settings.name}: {last_line(error)}")
        for c in left:
            results.put(SERIES, c.key, settings_of(options), point(c) | {"error": str(error)})


def plain_alive(plain: Engine) -> bool:
    """Whether the plain engine still answers."""
    try:
        plain.run([Prompt(SEED - 1, 8)], 1)
    except (RuntimeError, OSError):
        return False
    return True


def measure(options: argparse.Namespace, c: Combination, plain: Engine, ours: Engine) -> dict[str, Any]:
    """Compute the prompts where they are not cached, then decode them with both engines, one after the other, `repeats` times."""
    prompts = c.prompts
    say(f"{c.key}: {c.batch} prompts")
    fills = [sum(engine.run([prompt], 1).seconds for prompt in dict.fromkeys(prompts)) for engine in (plain, ours)]
    runs: list[list[Run]] = [[], []]
    idle: list[float] = []
    max_tokens = options.steps + DECODE_MARGIN
    for _ in range(options.repeats):
        for side, (engine, other) in enumerate([(plain, ours), (ours, plain)]):
            before = other.cpu_seconds()
            runs[side].append(engine.run(prompts, max_tokens, options.steps))
            idle.append((other.cpu_seconds() - before) / runs[side][-1].seconds)
    sides = [side_summary(c, side_runs, fill) for side_runs, fill in zip(runs, fills, strict=True)]
    ratios = [p / o for p, o in zip(sides[0]["tpot"]["repeats"], sides[1]["tpot"]["repeats"], strict=True)]
    times = " against ".join(f"{side['tpot']['median'] * 1e3:.1f}" for side in sides)
    say(
        f"{c.key}: {times} ms a token, {statistics.median(ratios):.2f} x plain's speed; prefill {fills[0]:.1f}, {fills[1]:.1f} s"
    )
    if max(idle) > 0.05:
        say(f"    the idle engine used {max(idle):.0%} of a core")
    for name, summary in zip(("plain vLLM", "rocketkv"), sides, strict=True):
        if (again := summary["prompt_tokens_computed_again"]) > c.batch * 3 * BLOCK:
            say(f"    {name} computed {again} cached prompt tokens again")
    pair = {"plain": sides[0], "ours": sides[1], "ratio": spread(ratios), "idle_engine_cpu_share": max(idle)}
    return point(c) | pair | {"engines": {"plain": plain.info, "ours": ours.info}}


def side_summary(c: Combination, runs: list[Run], fill_seconds: float) -> dict[str, Any]:
    """One engine's figures of one combination."""
    steps = [[step.seconds for step in run.full_decode_steps(c.batch)] for run in runs]
    if not all(steps):
        raise RuntimeError(f"{c.key}: no step held all {c.batch} requests: the pool is too small")
    return {
        "tpot": spread([statistics.median(times) for times in steps]),
        "fastest_step": min(min(times) for times in steps),
        "steps": [len(times) for times in steps],
        "fill_seconds": fill_seconds,
        "first_tokens_cached_seconds": [max(run.first_token_seconds) for run in runs],
        "prompt_tokens_computed_again": max(c.prompt_tokens - sum(run.cached_tokens) for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
    }


def point(c: Combination) -> dict[str, Any]:
    """The coordinates of an entry."""
    coordinates = {"mode": c.mode, "budget": c.budget, "context": c.context, "batch": c.batch}
    return coordinates | ({"same_prompt": True} if c.same_prompt else {})
