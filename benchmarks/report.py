# SPDX-License-Identifier: Apache-2.0
"""From the results file: the bars, a table of each series, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import summary
from benchmarks.store import Results, without_checkout

Entry = dict[str, Any]

# The kernels' bar looks for these words in a name of `benchmarks.kernels`.
FUSED_DECODE = ("fused decode", "batch 8", "P 2048")
PLAIN_COLOUR, OURS_COLOURS = "#888888", ("#1f77b4", "#d62728", "#2ca02c")
STYLES = ("-", "--", ":")


def write(results: Results) -> str:
    """Write Markdown and picture beside the JSON; returns the Markdown."""
    picture = results.path.with_suffix(".png")
    problem = draw(results, picture)
    text = "\n".join(
        [
            f"# Benchmarks: {results.path.stem}",
            "",
            *(["Plain vLLM was measured against itself: this shows the noise.", ""] if _is_control(results) else []),
            problem or f"![time per output token, speed ratio, time to first token]({picture.name})",
            "",
            bars_table(results),
            *decode_tables(results),
            *ttft_table(results),
            *throughput_table(results),
            *kernel_table(results),
            "",
            "## Machine",
            "",
            *(f"- {line}" for line in summary(results.data["machine"]).splitlines()),
            *(f"- command: `python -m benchmarks.run {command}`" for command in results.commands()),
            f"- commits measured: {', '.join(_commits(results)) or 'none'}",
            "",
        ]
    )
    results.path.with_suffix(".md").write_text(without_checkout(text))
    return text


# ---- bars ----


def bars(results: Results) -> list[tuple[str, str, float | None, bool]]:
    """Each bar of issue 3: what, the bar, the value if it was measured, whether it is met."""
    tpot = {(e["mode"], e["context"], e["batch"], e["budget"]): e for e in results.measured("decode") if _top_256(e)}
    at_7k, at_32k = tpot.get(("compiled", 7000, 8, 1024)), tpot.get(("compiled", 32768, 4, 1024))
    at_1k = tpot.get(("compiled", 1024, 4, 1024))
    flat = _own(at_32k) / _own(at_1k) if at_32k and at_1k else None
    first = [e["ratio"]["median"] for e in results.measured("ttft") if 1000 <= e["length"] <= 7000]
    full_size = [
        e for e in results.measured("throughput") if (e["requests"], e["input"], e["output"]) == (32, 7000, 256)
    ]
    short = [e["ratio"]["median"] for e in tpot.values() if 128 <= e["context"] <= 1024]
    fused = [
        e for name, e in results.entries("kernels").items() if all(w in name for w in FUSED_DECODE) and "bandwidth" in e
    ]

    def least(what: str, bar: float, value: float | None) -> tuple[str, str, float | None, bool]:
        return what, f">= {bar:g}", value, value is not None and value >= bar

    def most(what: str, bar: float, value: float | None) -> tuple[str, str, float | None, bool]:
        return what, f"<= {bar:g}", value, value is not None and value <= bar

    return [
        least(
            "time per output token, plain / rocketkv, 7K, batch 8, budget 1024, top-k 256, compiled", 3.7, _ratio(at_7k)
        ),
        least("the same at 32K, batch 4", 8, _ratio(at_32k)),
        most("rocketkv's time per output token at 32K over its own at 1K, batch 4", 1.15, flat),
        most("time to first token, rocketkv / plain, 1K to 7K (worst)", 1.05, max(first, default=None)),
        least(
            "output throughput with the small pool, rocketkv / plain", 3, _ratio(full_size[-1] if full_size else None)
        ),
        least("at 128 to 1K context, any batch, plain / rocketkv (worst)", 0.98, min(short, default=None)),
        least(
            "fused decode op: achieved bandwidth over copy bandwidth, batch 8, P 2048",
            0.7,
            min((e["share_of_copy"] for e in fused), default=None),
        ),
    ]


def _top_256(entry: Entry) -> bool:
    return int(entry["settings"]["rocketkv"].get("topk_tokens", 256)) == 256


def bars_table(results: Results) -> str:
    """The bars as a table."""
    rows = [
        (
            what,
            bar,
            "" if value is None else f"{value:.3g}",
            "not measured" if value is None else "met" if met else "**not met**",
        )
        for what, bar, value, met in bars(results)
    ]
    return table("## Bars", ("figure", "bar", "measured", ""), rows)


def _ratio(entry: Entry | None) -> float | None:
    return float(entry["ratio"]["median"]) if entry else None


def _own(entry: Entry) -> float:
    return float(entry["ours"]["tpot"]["median"])


# ---- tables ----


def decode_tables(results: Results) -> list[str]:
    """A table of times per output token for each mode, and what is missing."""
    out = []
    measured = results.measured("decode")
    for mode in sorted({e["mode"] for e in measured}):
        chosen = sorted(
            (e for e in measured if e["mode"] == mode), key=lambda e: (e["budget"], e["batch"], e["context"])
        )
        rows = [
            (
                e["budget"],
                f"{e['batch']} (same prompt)" if e.get("same_prompt") else e["batch"],
                e["context"],
                *(_times(e[side]["tpot"], e[side]["fastest_step"]) for side in ("plain", "ours")),
                f"**{e['ratio']['median']:.2f}** ({e['ratio']['min']:.2f} to {e['ratio']['max']:.2f})",
                f"{e['plain']['fill_seconds']:.1f} / {e['ours']['fill_seconds']:.1f}",
            )
            for e in chosen
        ]
        heads = (
            "budget",
            "batch",
            "context",
            "plain vLLM, ms",
            "rocketkv, ms",
            "plain / rocketkv",
            "prefill of what was new, s",
        )
        out.append(table(f"## Time per output token, {mode}", heads, rows))
    if out:
        out.append(
            "Median over the steps of a repeat, then over repeats; ± half their range; in brackets the fastest step. "
            "Only steps in which all requests decode count. The ratio is the median of the repeats' ratios, each of a pair "
            "measured back to back.\n"
        )
    missing = [
        (key, e.get("skipped") or e.get("error")) for key, e in results.entries("decode").items() if e not in measured
    ]
    out += (
        [table("### Not measured", ("combination", "why"), [(k, _one_line(str(w))) for k, w in missing])]
        if missing
        else []
    )
    return out


def _times(tpot: Entry, fastest: float) -> str:
    half = (tpot["max"] - tpot["min"]) / 2
    return f"{tpot['median'] * 1e3:.1f} ± {half * 1e3:.1f} ({fastest * 1e3:.1f})"


def ttft_table(results: Results) -> list[str]:
    """Time to first token against prompt length."""
    entries = sorted(results.measured("ttft"), key=lambda e: (e["mode"], e["budget"], e["length"]))
    rows = [
        (
            e["mode"],
            e["budget"],
            e["length"],
            *(f"{e[s]['median']:.3f} ± {(e[s]['max'] - e[s]['min']) / 2:.3f}" for s in ("plain", "ours")),
            f"**{e['ratio']['median']:.3f}** ({e['ratio']['min']:.3f} to {e['ratio']['max']:.3f})",
        )
        for e in entries
    ]
    heads = ("mode", "budget", "prompt tokens", "plain vLLM, s", "rocketkv, s", "rocketkv / plain")
    return [table("## Time to first token", heads, rows)] if rows else []


def throughput_table(results: Results) -> list[str]:
    """Throughput with a small pool, and what bounds it."""
    figures: list[tuple[str, Callable[[Entry], str]]] = [
        ("output tokens/s", lambda s: f"{s['output_tokens_per_second']:.2f}"),
        ("seconds", lambda s: f"{s['seconds']:.1f}"),
        (
            "in steps with prompt tokens, s",
            lambda s: f"{s['prefill_step_seconds']:.1f} ({s['prefill_steps']:.0f} steps)",
        ),
        ("in steps that only decode, s", lambda s: f"{s['decode_step_seconds']:.1f} ({s['decode_steps']:.0f} steps)"),
        (
            "decode tokens/s in those",
            lambda s: f"{s['decode_tokens_per_second']:.1f} (mean batch {s['mean_decode_batch']:.1f})",
        ),
        ("most requests in a step", lambda s: f"{s['largest_batch']:.0f}"),
        ("preemptions", lambda s: f"{s['preemptions']:.0f}"),
    ]
    out = []
    for e in results.measured("throughput"):
        title = (
            f"## Throughput, {e['mode']}: {e['requests']} requests of {e['input']} + {e['output']} tokens, budget {e['budget']}, "
            f"pool of {e['pool_bytes'] / 2**20:.0f} MiB"
        )
        rows: list[Sequence[object]] = [(name, show(e["plain"]), show(e["ours"])) for name, show in figures]
        rows.append(("blocks in the pool", e["blocks"]["plain"], e["blocks"]["ours"]))
        rows.append(("rocketkv / plain", "", f"**{e['ratio']['median']:.2f}** ({len(e['ratio']['repeats'])} repeats)"))
        out.append(table(title, ("", "plain vLLM", "rocketkv"), rows))
    return out


def kernel_table(results: Results) -> list[str]:
    """Each kernel alone."""
    rows: list[Sequence[object]] = []
    for name, e in results.entries("kernels").items():
        if failure := e.get("skipped") or e.get("error"):
            rows.append((name, "", "", "", _one_line(failure)))
        else:
            mib, speed = f"{e['bytes'] / 2**20:.1f}", f"{e['bandwidth'] / 1e9:.1f}"
            rows.append((name, f"{e['seconds'] * 1e3:.3f}", mib, speed, f"{e['share_of_copy']:.2f}"))
    return [table("## Kernels", ("kernel", "ms", "MiB moved", "GB/s", "share of copy"), rows)] if rows else []


def table(title: str, heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table under a title."""
    lines = [title, "", *(f"| {' | '.join(str(cell) for cell in row)} |" for row in (heads, *rows)), ""]
    lines.insert(3, "|---" * len(heads) + "|")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return text.strip().splitlines()[-1].replace("|", "\\|")[:200] if text.strip() else ""


def _commits(results: Results) -> list[str]:
    every = [entry for series in results.data["series"].values() for entry in series.values()]
    return sorted({e["commit"] + (" (with changes)" if e["dirty"] else "") for e in every})


def _is_control(results: Results) -> bool:
    every = [entry for series in results.data["series"].values() for entry in series.values()]
    return any(e["settings"].get("ours") == "plain" for e in every)


# ---- picture ----


def draw(results: Results, path: Path) -> str:
    """Three panels; returns why there is no picture, or nothing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "(no picture: matplotlib is not installed)"
    figure, (times, ratios, others) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    measured = results.measured("decode")
    mode = "compiled" if any(e["mode"] == "compiled" for e in measured) else "eager"
    budgets = sorted({e["budget"] for e in measured if e["mode"] == mode})
    middle = 1024 if 1024 in budgets else (budgets or [0])[0]
    batches = sorted({e["batch"] for e in measured if e["mode"] == mode})
    every = sorted({e["context"] for e in measured if e["mode"] == mode})
    for number, batch in enumerate(batches):
        colour = OURS_COLOURS[number % 3]
        for budget in budgets:
            line = sorted(
                (e for e in measured if (e["mode"], e["batch"], e["budget"]) == (mode, batch, budget)), key=_context
            )
            contexts = [e["context"] for e in line]
            if budget == middle:
                plain, ours = ([e[side]["tpot"]["median"] * 1e3 for e in line] for side in ("plain", "ours"))
                times.plot(
                    contexts, plain, "--o", color=colour, markerfacecolor="none", label=f"plain vLLM, batch {batch}"
                )
                times.plot(contexts, ours, "-o", color=colour, label=f"rocketkv, batch {batch}")
            style, name = STYLES[budgets.index(budget) % 3], f"batch {batch}, budget {budget}"
            ratios.plot(contexts, [e["ratio"]["median"] for e in line], style, marker="o", color=colour, label=name)
    _finish(times, f"Time per output token, {mode}, budget {middle}", "ms", every)
    ratios.axhline(1, color=PLAIN_COLOUR, linewidth=1)
    _finish(ratios, f"Speed against plain vLLM, {mode}", "plain / rocketkv", every)
    _draw_others(results, others)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return ""


def _context(entry: Entry) -> int:
    return int(entry["context"])


def _finish(axes: Any, title: str, y: str, contexts: list[int]) -> None:
    axes.set(title=title, xlabel="context, tokens", ylabel=y)
    axes.grid(alpha=0.3)
    if contexts:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts], rotation=45)
        axes.legend(fontsize="small")
    axes.set_ylim(bottom=0)


def _draw_others(results: Results, axes: Any) -> None:
    entries = sorted(results.measured("ttft"), key=lambda e: (e["mode"], e["budget"], e["length"]))
    entries = [e for e in entries if (e["mode"], e["budget"]) == (entries[0]["mode"], entries[0]["budget"])]
    sides = (("plain", "plain vLLM", PLAIN_COLOUR), ("ours", "rocketkv", OURS_COLOURS[0]))
    for side, name, colour in sides:
        axes.plot([e["length"] for e in entries], [e[side]["median"] for e in entries], "-o", color=colour, label=name)
    axes.set(title="Time to first token; inset: throughput, small pool", xlabel="prompt, tokens", ylabel="s")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    if found := results.measured("throughput"):
        inset = axes.inset_axes((0.2, 0.68, 0.5, 0.2))
        values = [found[-1][side]["output_tokens_per_second"] for side, _, _ in sides]
        drawn = inset.barh([1, 0], values, color=[colour for _, _, colour in sides])
        inset.bar_label(drawn, labels=[f"{value:.1f} tokens/s" for value in values], fontsize="small", padding=3)
        inset.set(yticks=[], xticks=[], xlim=(0, 1.6 * max(values)))
