# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks and writes JSON, Markdown and a picture to benchmarks/results/.

    python -m benchmarks.run                       # about the bars: compiled, budget 1024
    python -m benchmarks.run --full                # every mode, budget and context
    python -m benchmarks.run --series decode --contexts 7000 --batches 8

Measures plain vLLM and rocketkv in turn on the same prompts. What the results file already holds, under the same settings, is not
measured again; --fresh begins a new file, --estimate says how long it would take, --report draws again from the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType

from benchmarks import decode, kernels, machine, report, throughput, ttft
from benchmarks.engines import last_line, say
from benchmarks.store import Results

SERIES: dict[str, ModuleType] = {"kernels": kernels, "ttft": ttft, "decode": decode, "throughput": throughput}
MODES = ("compiled", "eager")
FULL = {"modes": MODES, "budgets": (512, 1024, 2048), "contexts": decode.CONTEXTS, "throughput_repeats": 3}


def numbers(text: str) -> tuple[int, ...]:
    """`128,1024` as a tuple."""
    return tuple(int(part) for part in text.split(","))


def names(known: tuple[str, ...]) -> object:
    """A parser of comma-separated names."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        return chosen

    return parse


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    series = names(tuple(SERIES))
    made.add_argument("--series", type=series, default=tuple(SERIES), help="of " + ",".join(SERIES))  # type: ignore[arg-type]
    made.add_argument("--output", default="latest", help="name of the files in benchmarks/results/, without an ending")
    made.add_argument("--fresh", action="store_true", help="forget what the results file holds")
    made.add_argument("--estimate", action="store_true", help="say how long it takes, and stop")
    made.add_argument("--report", action="store_true", help="only write Markdown and picture from the results file")
    made.add_argument(
        "--full", action="store_true", help="every mode, budget and context; three repeats of the throughput"
    )
    made.add_argument("--model", default=str(machine.ROOT / ".cache" / "demo-model"))
    made.add_argument(
        "--ours", choices=("rocketkv", "plain"), default="rocketkv", help="the second engine; plain: noise alone"
    )
    made.add_argument(
        "--rocketkv", type=json.loads, default={"topk_tokens": 256}, help="options besides the budget, as JSON"
    )
    made.add_argument("--repeats", type=int, default=3, help="of decode and time to first token")
    made.add_argument("--max-num-batched-tokens", type=int, help="vLLM's own default unless given")

    group = made.add_argument_group("decode: time per output token")
    group.add_argument("--contexts", type=numbers, default=(128, 1024, 2048, 4096, 7000, 32768))
    group.add_argument("--batches", type=numbers, default=(1, 4, 8))
    group.add_argument("--budgets", type=numbers, default=(1024,))
    modes = names(MODES)
    group.add_argument("--modes", type=modes, default=("compiled",), help="of compiled,eager")  # type: ignore[arg-type]
    group.add_argument("--steps", type=int, default=48, help="decode steps that are timed in each repeat")
    group.add_argument(
        "--same-prompt",
        action="store_true",
        help="one prompt for the whole batch, computed once and shared: kind to plain vLLM, whose requests then share keys in "
        "the processor's cache; for contexts whose prompts take minutes each",
    )
    group.add_argument("--max-prompt-tokens-per-engine", type=int, default=131072, help="larger: skipped, and said so")

    group = made.add_argument_group("ttft and throughput")
    group.add_argument("--mode", choices=MODES, default="compiled")
    group.add_argument("--budget", type=int, default=1024)
    group.add_argument(
        "--lengths", type=numbers, default=ttft.LENGTHS, help="prompts whose time to first token is measured"
    )
    group.add_argument("--requests", type=int, default=32)
    group.add_argument("--input", type=int, default=7000)
    group.add_argument("--output-tokens", type=int, default=256)
    group.add_argument("--throughput-repeats", type=int, default=1, help="each takes about ten minutes an engine")

    made.add_argument("--kernels", default="", help="only kernels whose name holds this")
    return made


def main() -> None:
    """Measure what is missing, series by series; the report is written after each."""
    options = parser().parse_args()
    if options.full:
        given = vars(parser().parse_args(sys.argv[1:]))
        defaults = vars(parser().parse_args([]))
        vars(options).update({name: value for name, value in FULL.items() if given[name] == defaults[name]})
    path = machine.ROOT / "benchmarks" / "results" / f"{options.output}.json"
    results = Results(path, options.fresh)
    if options.report:
        print(report.write(results))
        return
    if not (Path(options.model) / "config.json").is_file():
        sys.exit(f"{options.model} holds no model: run `make model`")
    print(machine.summary(machine.describe()))
    print("settings: " + ", ".join(f"{name} {value}" for name, value in vars(options).items()))
    estimates = {name: SERIES[name].estimate(options, results) for name in options.series}
    parts = ", ".join(f"{name} {seconds / 60:.0f}" for name, seconds in estimates.items())
    print(f"estimate: about {sum(estimates.values()) / 60:.0f} minutes on two cores of an EPYC (Zen 4): {parts}")
    for c in decode.plan(options)[1] if "decode" in options.series else []:
        print(f"will be skipped: {c.key} ({c.prompt_tokens} prompt tokens)")
    if options.estimate:
        return
    results.begin(sys.argv[1:])
    for name in options.series:
        started = time.perf_counter()
        say(f"==> {name}")
        try:
            SERIES[name].run(options, results)
        except (RuntimeError, MemoryError) as error:  # what was measured is written; the other series may do better
            say(f"FAILED: {name}: {last_line(error)}")
        report.write(results)
        say(f"==> {name}: {(time.perf_counter() - started) / 60:.1f} minutes")
    print(report.write(results))
    print(f"\nwritten: {path.with_suffix('')}.json, .md, .png")


if __name__ == "__main__":
    main()
