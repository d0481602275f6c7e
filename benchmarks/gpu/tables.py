# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.gpu_check`` prints and writes: one table, the targets, the machine."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.resources import tool_versions
from benchmarks.report import table
from benchmarks.store import without_checkout

Row = dict[str, Any]
PACKAGES = ("flash-attn", "flashinfer-python", "xformers")


def describe(device: torch.device) -> dict[str, Any]:
    """This machine, its GPU, and the versions of everything that is compared."""
    found = machine.describe() | {"versions": dict(tool_versions())}
    found["versions"] |= {name: machine.version(name) for name in PACKAGES}
    found["versions"]["CUDA of torch"] = torch.version.cuda or ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "sms": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size >> 20,
        }
    return found


def summary(described: dict[str, Any]) -> str:
    """The description in a few lines."""
    gpu = described.get("gpu")
    words = ", ".join(f"{name} {value}" for name, value in gpu.items()) if gpu else "none: kernels are interpreted"
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in described["versions"].items())
    return f"GPU: {words}\n{machine.summary(described)}\n{versions}"


# ---- rows ----


def sentence(row: Row, copy: float) -> str:
    """One row in words."""
    return ", ".join(part for part in (times(row), share(row, copy), verdict(row)) if part) or "done"


def times(row: Row) -> str:
    """How long it took."""
    if "token_seconds" in row:
        return f"{row['token_seconds'] * 1e3:.2f} ms a token, prefill {row['prefill_seconds']:.2f} s"
    if "ratio" in row:
        return f"{row['ratio']:.2f} x plain vLLM's speed"
    if "seconds" not in row:
        return ""
    return f"{row['seconds'] * 1e6:.1f} µs"


def share(row: Row, copy: float) -> str:
    """Achieved bandwidth on the bytes that must be moved."""
    if not row.get("bandwidth"):
        return ""
    of_copy = f" ({row['bandwidth'] / copy:.0%} of copy)" if copy else ""
    return f"{row['bandwidth'] / 1e9:.0f} GB/s{of_copy}"


def verdict(row: Row) -> str:
    """Whether it is right, or was left out."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if row.get("failure"):
        return f"**failed**: {row['failure']}"
    words = ["ok"] if "failure" in row else []
    if row.get("note"):
        words.append(str(row["note"]))
    if row.get("graph") is not None:
        words.append(f"in a graph; {row['eager'] * 1e6:.1f} µs eager")
    return ", ".join(words)


def shape(row: Row) -> str:
    """What it was measured on."""
    words = [f"batch {row['batch']}"] if "batch" in row else []
    if "tokens" in row:
        words.append(f"{row['tokens']} tokens")
    if "block_size" in row:
        words.append(f"blocks of {row['block_size']}, KT {'fp8' if row['kt_itemsize'] == 1 else 'bf16'}")
    if "capacity" in row:
        words.append(f"capacity {row['capacity']}")
    if row.get("topr"):
        words.append(f"top-r {row['topr']}")
    return ", ".join(words)


# ---- targets ----


def targets(rows: Sequence[Row], copy: float) -> list[tuple[str, str, float | None, bool]]:
    """Each target of the issue: what, the bar, the value if it was measured, whether it is met."""
    fused = value_of(rows, "decode", "fused decode", batch=32, tokens=2048, block_size=128, kt_itemsize=1, topr=None)
    step = value_of(rows, "decode", "fused decode", batch=8, tokens=2048, block_size=128, kt_itemsize=1)
    dense = [r["seconds"] for r in rows if r["part"] == "dense" and "seconds" in r and point(r) == (8, 128 << 10)]
    stage1 = [value_of(rows, "stage 1", name) for name in ("stage 1: scores and choice", "compaction")]
    prefill = [value_of(rows, "stage 1", name) for name in ("prefill: attention", "prefill: products with weights")]
    bandwidth = fused["bandwidth"] / copy if fused and copy else None
    faster = min(dense) / step["seconds"] if dense and step else None
    of_prefill = None
    if all(stage1) and all(prefill):
        of_prefill = sum(r["seconds"] for r in stage1 if r) / sum(r["seconds"] for r in prefill if r)
    return [
        at_least("fused decode at batch 32: bandwidth on its least bytes over copy bandwidth", 0.8, bandwidth),
        at_least("dense decode attention (the fastest of all) over fused decode, 128K, batch 8", 20, faster),
        at_most("stage 1 and compaction over dense prefill of a layer (attention and products), 32K", 0.03, of_prefill),
    ]


def point(row: Row) -> tuple[int, int]:
    """Where a dense row was measured."""
    return row["batch"], row["tokens"]


def value_of(rows: Sequence[Row], part: str, name: str, **fields: Any) -> Row | None:
    """The measured row that has all these fields."""
    for row in rows:
        is_it = (row["part"], row["name"]) == (part, name) and "seconds" in row
        if is_it and all(row.get(field) == value for field, value in fields.items()):
            return row
    return None


def at_least(what: str, bar: float, value: float | None) -> tuple[str, str, float | None, bool]:
    """A target from below."""
    return what, f">= {bar:g}", value, value is not None and value >= bar


def at_most(what: str, bar: float, value: float | None) -> tuple[str, str, float | None, bool]:
    """A target from above."""
    return what, f"<= {bar:g}", value, value is not None and value <= bar


def targets_table(rows: Sequence[Row], copy: float) -> str:
    """The targets."""
    cells = [
        (what, bar, "" if value is None else f"{value:.3g}", "not measured" if value is None else met_or_not(met))
        for what, bar, value, met in targets(rows, copy)
    ]
    return table("## Targets", ("figure", "target", "measured", ""), cells)


def met_or_not(met: bool) -> str:
    """In words."""
    return "met" if met else "**not met**"


# ---- the report ----


def render(rows: Sequence[Row], copy: float, described: dict[str, Any]) -> str:
    """The whole report."""
    cells = [
        (row["part"], row["name"], shape(row), times(row), share(row, copy), verdict(row).replace("|", "\\|"))
        for row in rows
    ]
    heads = ("part", "what", "on", "time of a call", "bandwidth on least bytes", "result")
    failed = sum(bool(row.get("failure")) for row in rows)
    skipped = sum("skipped" in row for row in rows)
    lines = [f"# GPU check: {described['gpu']['name'] if 'gpu' in described else 'no GPU, interpreted on the CPU'}", ""]
    if "gpu" not in described:
        lines += [f"**{NO_GPU}**", ""]
    lines += [f"{len(rows)} rows, {failed} failed, {skipped} skipped (each says why).", ""]
    lines += [table("## Results", heads, cells), targets_table(rows, copy), NOTES, "", "## Machine", ""]
    lines += [*(f"- {line}" for line in summary(described).splitlines())]
    return "\n".join([*lines, f"- command: `{' '.join(['python -m benchmarks.gpu_check', *sys.argv[1:]])}`", ""])


NO_GPU = (
    "Nothing here ran on a GPU: kernels were interpreted on the CPU in tiny shapes, so that their formulas are checked, but "
    "neither their machine code nor their speed nor CUDA graphs nor vLLM on a GPU."
)
NOTES = (
    "One layer of Llama-3.1-8B: 32 query and 8 KV heads of 128, bf16. Least bytes: for our decode the KT numbers that are asked "
    "for and the selected tokens' keys and values, each once; for dense attention every key and value. Times are a share of a "
    "replayed CUDA graph where calls could be captured. Calls rotate over copies of the data that no second-level cache holds "
    "together; dense attention has one copy, which a cache may hold at 8K and batch 1."
)


def write(name: str, rows: Sequence[Row], copy: float, described: dict[str, Any]) -> None:
    """Markdown and JSON."""
    if not name:
        slug = re.sub(r"[^a-z0-9]+", "-", described["gpu"]["name"].lower()).strip("-")
        name = f"gpu-{slug}"
    path = machine.ROOT / "benchmarks" / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": described,
        "command": sys.argv[1:],
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "copy_bandwidth": copy,
        "targets": [dict(zip(("figure", "target", "value", "met"), t, strict=True)) for t in targets(rows, copy)],
        "rows": list(rows),
    }
    path.with_name(path.name + ".md").write_text(without_checkout(render(rows, copy, described)))
    path.with_name(path.name + ".json").write_text(without_checkout(json.dumps(data, indent=1)) + "\n")
