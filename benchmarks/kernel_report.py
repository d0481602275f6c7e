# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel in every configuration for sm_80, sm_90 and sm_100, without a GPU, and predicts step times from bytes.

    python -m benchmarks.kernel_report                    # all of it, into benchmarks/results/kernels-sm80-90-100.md and .json
    python -m benchmarks.kernel_report --only decode      # configurations whose name holds "decode"; written to no file
    python -m benchmarks.kernel_report --predict-only     # no compilation; printed, written to no file

Ends with 1 if a configuration does not compile, spills registers or cannot be launched. Predictions are arithmetic over published
figures, stated in the report, and measurements of nothing: `python -m benchmarks.gpu_check` measures, on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engines import say
from benchmarks.gpu import hardware, kernel_tables, predict, resources
from benchmarks.gpu.resources import Compiled
from benchmarks.store import without_checkout

OUTPUT = "kernels-sm80-90-100"


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="configurations whose module and name hold this; writes no file")
    made.add_argument("--predict-only", action="store_true", help="compile nothing; writes no file")
    made.add_argument("--output", default=OUTPUT, help="name of the files in benchmarks/results/, without an ending")
    made.add_argument("--jobs", type=int, default=machine.cores(), help="processes that compile")
    made.add_argument(
        "--architectures", type=int, nargs="+", choices=resources.ARCHITECTURES, default=resources.ARCHITECTURES
    )
    group = made.add_argument_group("assumptions of the predictions")
    for field in fields(predict.Assumptions):
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    return made


def main() -> None:
    """Compile, predict, write."""
    options = parser().parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it.")
    os.environ.setdefault("TRITON_CACHE_DIR", str(machine.ROOT / ".cache" / "triton"))
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of 3.9, said aloud so that it does not warn
    assumptions = predict.Assumptions(**{f.name: getattr(options, f.name) for f in fields(predict.Assumptions)})
    described = machine.describe()
    versions = dict(resources.tool_versions())
    print(machine.summary(described))
    print(", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()))
    started = time.perf_counter()
    compiled = [] if options.predict_only else compile_all(options)
    say(f"{len(compiled)} configurations compiled in {time.perf_counter() - started:.0f} s")
    text = kernel_tables.render(compiled, assumptions, described, versions)
    if options.only or options.predict_only:
        print(text)
    else:
        write(options.output, text, compiled, assumptions, described, versions)
    bad = [entry for entry in compiled if entry.problem]
    for entry in bad:
        print(f"FAILED: {entry.module} {entry.name} sm_{entry.compute_capability}: {entry.problem}")
    if not compiled and not options.predict_only:
        sys.exit("no configuration was found")
    sys.exit(1 if bad else 0)


def compile_all(options: argparse.Namespace) -> list[Compiled]:
    """Triton's kernels in all configurations, then CUDA's."""
    found: list[Compiled] = []
    with resources.make_pool(options.jobs) as pool:
        for module in resources.kernel_modules():
            of_module = []
            for entry in resources.compile_module(module, options.architectures, options.only, pool):
                of_module.append(entry)
                if len(of_module) % 50 == 0 or entry.problem:
                    say(
                        f"{module}: {len(of_module)} so far, {entry.name} sm_{entry.compute_capability} {entry.problem or 'ok'}"
                    )
            if of_module:
                say(f"{module}: {len(of_module)}, {sum(bool(entry.problem) for entry in of_module)} failed")
            found += of_module
    found += resources.compile_cuda(options.architectures, options.only)
    return found


def write(
    name: str,
    text: str,
    compiled: Sequence[Compiled],
    assumptions: predict.Assumptions,
    described: dict[str, Any],
    versions: dict[str, str],
) -> None:
    """Markdown and JSON."""
    path = machine.ROOT / "benchmarks" / "results" / name
    data = {
        "machine": described,
        "versions": versions,
        "command": sys.argv[1:],
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "limits": [asdict(limits) for limits in hardware.LIMITS.values()],
        "gpus": [asdict(gpu) for gpu in hardware.GPUS],
        "compiled": [entry.as_json() for entry in compiled],
        "assumptions": asdict(assumptions),
        "predictions": [point.as_json() for point in predict.points(assumptions)],
        "granularity": [asdict(entry) | {"total": entry.total} for entry in predict.granularities()],
    }
    save(path, text, data)
    print(f"written: {path}.md, .json")


def save(path: Path, text: str, data: dict[str, Any]) -> None:
    """Both files, without this checkout's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".md").write_text(without_checkout(text))
    path.with_name(path.name + ".json").write_text(without_checkout(json.dumps(data, indent=1)) + "\n")


if __name__ == "__main__":
    main()
