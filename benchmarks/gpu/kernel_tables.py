# SPDX-License-Identifier: Apache-2.0
"""The Markdown of ``benchmarks.kernel_report``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import machine
from benchmarks.gpu import hardware, predict
from benchmarks.gpu.resources import Compiled
from benchmarks.report import table

NOT_RUN = (
    "No kernel ran for this report: registers, spills and shared memory are read from machine code, occupancy is computed from "
    "them, and times are predicted from bytes. `python -m benchmarks.gpu_check` runs, checks and times the kernels on a GPU."
)


def render(
    compiled: Sequence[Compiled], a: predict.Assumptions, described: dict[str, Any], versions: dict[str, str]
) -> str:
    """The whole report."""
    parts = ["# GPU kernels: what they need and what they should take", "", f"**{NOT_RUN}**", ""]
    if compiled:
        parts += resource_tables(compiled)
    parts += prediction_tables(a)
    parts += ["## Machine that compiled", "", *(f"- {line}" for line in machine.summary(described).splitlines())]
    parts += ["- " + ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())]
    return "\n".join([*parts, f"- command: `{' '.join(['python -m benchmarks.kernel_report', *sys.argv[1:]])}`", ""])


# ---- registers, spills, shared memory, occupancy ----


def resource_tables(compiled: Sequence[Compiled]) -> list[str]:
    """A summary of all kernels, what failed, then every configuration."""
    bad = [entry for entry in compiled if entry.problem]
    heads = ("kernel", "architecture", "configurations", "registers", "local bytes", "shared KiB", "occupancy")
    rows = [summary_row(*key, entries) for key, entries in grouped(compiled).items()]
    verdict = (
        f"{len(compiled)} configurations, {len(bad)} with a problem (spills, no compilation, too much shared memory)."
    )
    parts = [table("## Registers, spills, shared memory, occupancy", heads, rows), verdict, "", LEGEND, ""]
    if bad:
        failed = [(e.module, e.name, f"sm_{e.compute_capability}", e.problem.replace("|", "\\|")) for e in bad]
        parts.append(table("### Problems", ("module", "configuration", "architecture", "problem"), failed))
    return [*parts, every_configuration(compiled)]


LEGEND = (
    "Ranges over configurations. Registers of a thread; local bytes of a thread, that is spilled registers and arrays that did "
    "not fit (must be 0); shared memory of a block; occupancy: warps of this kernel that an SM holds, of all that it can hold. "
    "Pointers and strides are compiled as multiples of 16, as Triton finds them at launch."
)


def grouped(compiled: Iterable[Compiled]) -> dict[tuple[str, int], list[Compiled]]:
    """By module and architecture."""
    groups: dict[tuple[str, int], list[Compiled]] = {}
    for entry in compiled:
        groups.setdefault((entry.module, entry.compute_capability), []).append(entry)
    return groups


def summary_row(module: str, architecture: int, entries: Sequence[Compiled]) -> tuple[Any, ...]:
    """One kernel on one architecture."""
    good = [entry for entry in entries if not entry.error]
    if not good:
        return module, f"sm_{architecture}", len(entries), "", "", "", "failed"
    return (
        module,
        f"sm_{architecture}",
        len(entries),
        extent([entry.registers for entry in good]),
        max(entry.local for entry in good),
        extent([entry.shared / 1024 for entry in good], "{:.1f}"),
        extent([100 * entry.occupancy.share for entry in good], "{:.0f}") + " %",
    )


def extent(values: Sequence[float], form: str = "{}") -> str:
    """`least to greatest`, or the one value."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def every_configuration(compiled: Sequence[Compiled]) -> str:
    """One row a configuration, a cell an architecture."""
    architectures = sorted({entry.compute_capability for entry in compiled})
    rows: dict[tuple[str, str], dict[int, Compiled]] = {}
    for entry in compiled:
        rows.setdefault((entry.module, entry.name), {})[entry.compute_capability] = entry
    cells = [
        (
            module,
            name,
            warps_and_stages(next(iter(found.values()))),
            *(cell(found[a]) if a in found else "" for a in architectures),
        )
        for (module, name), found in rows.items()
    ]
    heads = ("module", "configuration", "warps, stages", *(f"sm_{a}" for a in architectures))
    note = "Registers / local bytes / shared bytes / occupancy (blocks of an SM, limited by)."
    body = table("### Every configuration", heads, cells)
    return f"<details><summary>Every configuration ({len(cells)})</summary>\n\n{body}\n{note}\n\n</details>\n"


def warps_and_stages(entry: Compiled) -> str:
    """As launched; nvcc's kernels have no stages."""
    return f"{entry.num_warps}, {entry.num_stages}" if entry.num_stages else str(entry.num_warps)


def cell(entry: Compiled) -> str:
    """One configuration on one architecture."""
    if entry.error:
        return "failed"
    fits = entry.occupancy
    local = f"**{entry.local}**" if entry.local else "0"
    return f"{entry.registers} / {local} / {entry.shared} / {fits.share:.0%} ({fits.blocks}, {fits.limiter})"


# ---- predictions ----


def prediction_tables(a: predict.Assumptions) -> list[str]:
    """Bytes by block size, times by GPU, assumptions."""
    parts = ["## Predicted time of a decode step: Llama-3.1-8B", "", *assumption_lines(a), ""]
    parts.append(step_table(a))
    parts.append(STEP_NOTE)
    parts += ["", *(f"- {mark} {meaning}" for mark, meaning in MARKS.items()), ""]
    parts += [block_size_table(a), granularity_table(), GRANULARITY_NOTE, ""]
    return parts


STEP_NOTE = (
    "Times in ms for one step of the whole batch, predicted; KT in fp8 e5m2, block size 128. Ranges go from *waiting* to bytes "
    "alone. At small batches waiting decides, and it is a guess: only a GPU can say. Marks:"
)
MARKS = {
    "†": "the batch's cache does not fit the memory in dense attention: its time is what the bytes would take",
    "‡": "the same for rocketkv, whose cache is one prompt whole (with room for KT tables) and the batch's private blocks",
    "✗": "not even one request's prompt fits beside the weights, so that neither runs on one such GPU",
}
GRANULARITY_NOTE = (
    "For one KV head and row, D = 128, 2,048 tokens, top-k 256, page 4, bf16 KV; KT read in sectors of 32 bytes, expected over "
    "random signs and dimensions. Where a run of a block's pages is shorter than a sector, min and max and neighbouring "
    "dimensions come with it: `topr` then saves little, and half of what is read is not asked for. GPUs may fetch 64 bytes from "
    "memory for a sector of 32 (`cudaLimitMaxL2FetchGranularity`): the column of pieces of 64 is what that would cost; times "
    "assume 32."
)


def assumption_lines(a: predict.Assumptions) -> list[str]:
    """Everything that the times depend on."""
    stated = "; ".join(
        f"{g.name} {g.bandwidth / 1e12:g} TB/s, {g.memory / 1e9:g} GB, {g.sms} SMs at {g.clock / 1e9:g} GHz"
        for g in hardware.GPUS
    )
    return [
        f"- Published figures, not measured: {stated}.",
        f"- Every kernel achieves {a.share:.0%} of the stated bandwidth (`--share`): ours, dense attention and the products with "
        "the weights alike. Our target on a GPU is just that share; nothing here shows that it is reached.",
        f"- {a.launch * 1e6:g} µs for each kernel inside a CUDA graph (`--launch`); dense {a.dense_launches} and rocketkv "
        f"{a.sparse_launches} kernels a layer: cache update, attention.",
        f"- *Waiting*: rocketkv launches {a.idle_launches} kernels more of {a.idle * 1e6:g} µs (`--idle-launches`, `--idle`), "
        "vLLM's cache update and attention for tokens within the budget, which find nothing to do. One program computes for "
        f"each request and KV head, {a.programs_of_sm} on an SM at once (`--programs-of-sm`, see occupancy at capacity 4096). An "
        f"SM takes at most {hardware.SM_BYTES_PER_CLOCK} bytes a clock. A program makes {a.round_trips} round trips to memory of "
        f"{a.latency * 1e6:g} µs one after another (`--round-trips`, `--latency`), a guess from the kernel's loops. Dense "
        "attention is taken to have none of these limits.",
        "- 32 layers, 32 query and 8 KV heads of 128, bf16 KV; rocketkv with prompt_budget 2048, page 4, top-k 256, topr = D, "
        "right after the prompt (nothing decoded yet). Dense: FlashAttention's bytes, every key and value once.",
        f"- A whole step adds {predict.WEIGHTS / 1e9:g} GB of weights, read once; activations, sampling, the host are left out.",
        f"- Memory: weights and caches may take {a.memory_share:.0%} of it (`--memory-share`).",
    ]


def step_table(a: predict.Assumptions) -> str:
    """All GPUs, contexts and batches."""
    rows = []
    for gpu in hardware.GPUS:
        for context in predict.CONTEXTS:
            for batch in predict.BATCHES:
                point, bf16 = (predict.predict(gpu, context, batch, kt, 128, a) for kt in predict.KT_TYPES)
                rows.append(step_row(point, bf16))
    heads = (
        "GPU", "context", "batch", "attention: dense", "rocketkv: bytes (KT bf16)", "waiting", "ratio", "step: dense",
        "rocketkv", "ratio", "",
    )  # fmt: skip
    return table("### Time per step, ms", heads, rows)


def step_row(point: predict.Point, bf16: predict.Point) -> tuple[str, ...]:
    """One combination."""
    marks = "" if point.dense_fits else "†"
    marks += "" if point.sparse_fits else "‡"
    return (
        point.gpu,
        f"{point.context >> 10}K",
        str(point.batch),
        f"{point.dense_attention * 1e3:.2f}",
        f"{point.sparse_attention * 1e3:.2f} ({bf16.sparse_attention * 1e3:.2f})",
        f"{point.sparse_waiting * 1e3:.2f}",
        "{:.1f} to {:.1f}".format(*point.attention_ratios),
        f"{(point.weights + point.dense_attention) * 1e3:.2f}",
        f"{(point.weights + point.sparse_waiting) * 1e3:.2f} to {(point.weights + point.sparse_attention) * 1e3:.2f}",
        "{:.2f} to {:.2f}".format(*point.step_ratios),
        marks if point.prompt_fits else "✗",
    )


def block_size_table(a: predict.Assumptions) -> str:
    """Attention's time by block size and KT type; it does not depend on the context."""
    rows = []
    for gpu in hardware.GPUS:
        for batch in predict.BATCHES:
            times = [
                predict.predict(gpu, predict.CONTEXTS[0], batch, kt, block_size, a).sparse_attention * 1e3
                for kt in predict.KT_TYPES
                for block_size in predict.BLOCK_SIZES
            ]
            rows.append((gpu.name, batch, *(f"{value:.3f}" for value in times)))
    columns = [f"{kt}, {size}" for kt in predict.KT_TYPES for size in predict.BLOCK_SIZES]
    return table(
        "### rocketkv's attention per step, ms, from bytes, by KT type and block size", ("GPU", "batch", *columns), rows
    )


def granularity_table() -> str:
    """Bytes by block size, KT type and topr."""
    rows = [
        (
            e.kt,
            e.block_size,
            e.topr,
            *(f"{b / 1024:.1f}" for b in (e.floor, e.total, e.estimate, e.estimate_64, e.attend)),
        )
        for e in predict.granularities()
    ]
    heads = ("KT", "block size", "topr", "needed", "read", "of it KT", "KT in pieces of 64", "K and V")
    return table("### KiB read in a step for one KV head", heads, rows)
