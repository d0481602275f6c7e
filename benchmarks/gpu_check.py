# SPDX-License-Identifier: Apache-2.0
"""The one command for a machine with a GPU: checks and times every kernel, in less than ten minutes.

    python -m benchmarks.gpu_check                                  # everything; writes benchmarks/results/gpu-<name>.*
    python -m benchmarks.gpu_check --parts correctness graphs       # some parts
    TRITON_INTERPRET=1 python -m benchmarks.gpu_check --interpret   # without a GPU: correctness in tiny shapes, on the CPU

Needs torch, triton and this checkout. What is also installed is compared with: FlashAttention, FlashInfer, xformers, vLLM's own
FlashAttention; compute-sanitizer and vLLM are used if they are there. Each part has a budget of time, and says what it left out.
Ends with 1 if anything computed wrong numbers; a target that is not met is only said.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from benchmarks import machine
from benchmarks.engines import say

Row = dict[str, Any]
TOTAL = 590.0
NO_GPU = "not run: there is no GPU here, kernels are interpreted on the CPU"


@dataclass(frozen=True)
class Part:
    """One kind of check."""

    name: str
    seconds: float
    """Its budget; a row that has begun is finished."""
    rows: Callable[[Context], Iterator[Row]]
    needs_gpu: bool = True


@dataclass
class Context:
    """What all parts know."""

    options: argparse.Namespace
    device: Any
    began: float
    copy: float = 0.0
    """Bytes per second of a copy; 0 before it was measured."""
    rows: list[Row] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return float(self.options.seconds) - (time.monotonic() - self.began)


# ---- parts ----


def copy_part(context: Context) -> Iterator[Row]:
    """The bandwidth that all others are shares of."""
    from benchmarks.gpu import timing

    context.copy = timing.copy_bandwidth(context.device)
    seconds = 2 * timing.COPY_BYTES / context.copy
    yield {"part": "copy", "name": "copy of 1 GiB", "seconds": seconds, "bandwidth": context.copy}


def correctness_part(context: Context) -> Iterator[Row]:
    """Every kernel against its reference."""
    from benchmarks.gpu.correctness import NotHereError, checks

    for check in checks(small=context.options.interpret):
        if context.options.only not in check.name:
            continue
        began = time.perf_counter()
        entry: Row = {"part": "correctness", "name": check.name}
        try:
            entry["failure"] = check.run(context.device)
        except NotHereError as reason:
            entry["skipped"] = str(reason)
        except Exception as error:  # one broken kernel does not hide the others
            entry["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield entry | {"check_seconds": time.perf_counter() - began}


def graphs_part(context: Context) -> Iterator[Row]:
    """Capture and replay."""
    from benchmarks.gpu.graphs import graph_series

    yield from graph_series(context.device)


def decode_part(context: Context) -> Iterator[Row]:
    """Our decode kernels against the bytes floor."""
    from benchmarks.gpu.speed import decode_series

    yield from decode_series(context.device)


def dense_part(context: Context) -> Iterator[Row]:
    """Dense decode attention of others."""
    from benchmarks.gpu.speed import dense_series

    yield from dense_series(context.device)


def stage1_part(context: Context) -> Iterator[Row]:
    """Stage 1 and compaction against dense prefill."""
    from benchmarks.gpu.speed import stage1_series

    yield from stage1_series(context.device)


def sanitizer_part(context: Context) -> Iterator[Row]:
    """The correctness part again under compute-sanitizer, as far as the time goes."""
    entry: Row = {"part": "sanitizer", "name": "compute-sanitizer, memcheck"}
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        yield entry | {"skipped": "compute-sanitizer is not on PATH"}
        return
    seconds = SANITIZER_SECONDS
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", "benchmarks.gpu_check"]
    command += ["--parts", "correctness", "--seconds", str(seconds), "--no-write"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor has bounds of its own
    try:
        done = subprocess.run(
            command,
            cwd=machine.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield entry | {"skipped": f"did not end in {seconds + 60:.0f} s"}
        return
    reports = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    failure = "" if done.returncode == 0 else f"ended with {done.returncode}: {' '.join(reports[-3:])[:300]}"
    passed = sum(": ok" in line for line in done.stdout.splitlines())
    yield entry | {"failure": failure, "note": f"{passed} checks within {seconds:.0f} s"}


def engine_part(context: Context) -> Iterator[Row]:
    """vLLM, plain and with rocketkv."""
    from benchmarks.gpu.engine import engine_series

    if find_spec("vllm") is None:
        yield {"part": "engine", "name": "vLLM", "skipped": "vLLM is not installed"}
        return
    yield from engine_series(context.options.model, min(ENGINE_SECONDS, context.left - 5))


SANITIZER_SECONDS, ENGINE_SECONDS = 40.0, 170.0
PARTS = (
    Part("copy", 5, copy_part),
    Part("correctness", 150, correctness_part, needs_gpu=False),
    Part("graphs", 20, graphs_part),
    Part("decode", 60, decode_part),
    Part("dense", 70, dense_part),
    Part("stage 1", 25, stage1_part),
    Part("sanitizer", SANITIZER_SECONDS, sanitizer_part),
    Part("engine", ENGINE_SECONDS, engine_part),
)


def run_part(part: Part, context: Context) -> None:
    """Take a part's rows while its time lasts."""
    if part.needs_gpu and context.options.interpret:
        add(context, {"part": part.name, "name": "all", "skipped": NO_GPU})
        return
    if context.left < 5:
        add(context, {"part": part.name, "name": "all", "skipped": f"{context.options.seconds:.0f} s are used up"})
        return
    budget = context.left if context.options.interpret else min(part.seconds, context.left)
    deadline = time.monotonic() + budget
    try:
        for row in part.rows(context):
            add(context, row)
            if time.monotonic() > deadline:
                add(context, {"part": part.name, "name": "the rest", "skipped": f"its {budget:.0f} s are used up"})
                break
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        add(context, {"part": part.name, "name": "the rest", "failure": failure})
    release_memory(context)


def release_memory(context: Context) -> None:
    """Give the GPU's memory back: the next part may be another process."""
    if context.device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def add(context: Context, row: Row) -> None:
    """Keep a row and say it."""
    from benchmarks.gpu.tables import sentence

    context.rows.append(row)
    say(f"{row['part']}: {row['name']}: {sentence(row, context.copy)}")


# ---- the command ----


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    made.add_argument("--parts", nargs="+", choices=names, default=names)
    made.add_argument("--only", default="", help="only correctness checks whose name holds this")
    made.add_argument("--interpret", action="store_true", help="no GPU: Triton's interpreter, tiny shapes, no times")
    made.add_argument("--seconds", type=float, default=TOTAL, help="for all parts together")
    made.add_argument("--model", default="", help="folder of the model of the end-to-end run; made up if not given")
    made.add_argument("--output", default="", help="file without ending, or name of one in benchmarks/results/")
    made.add_argument("--no-write", action="store_true", help="print only")
    return made


def find_device(options: argparse.Namespace) -> Any:
    """The GPU, or the CPU for the interpreter; the interpreter is chosen before Triton is imported."""
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: unset it, or say --interpret")
    import torch

    if options.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here. --interpret checks the kernels on the CPU in tiny shapes, and times nothing.")
    return torch.device("cuda")


def main() -> None:
    """Run all parts, write what was found after each."""
    options = parser().parse_args()
    device = find_device(options)
    from benchmarks.gpu import tables

    faulthandler.dump_traceback_later(options.seconds + 120, exit=True)  # a kernel that hangs ends the run, too
    described = tables.describe(device)
    print(tables.summary(described), flush=True)
    context = Context(options, device, time.monotonic())
    for part in PARTS:
        if part.name in options.parts:
            say(f"==> {part.name}")
            run_part(part, context)
            if not options.no_write and (options.output or not options.interpret):
                tables.write(options.output, context.rows, context.copy, described)
    print(tables.render(context.rows, context.copy, described))
    faulthandler.cancel_dump_traceback_later()
    failures = [row for row in context.rows if row.get("failure")]
    for row in failures:
        print(f"FAILED: {row['part']}: {row['name']}: {row['failure']}")
    print(f"{time.monotonic() - context.began:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
