# SPDX-License-Identifier: Apache-2.0
"""Table and heat maps of ``benchmarks.methods``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.machine import summary
from benchmarks.report import table
from benchmarks.store import Results, without_checkout

Entry = dict[str, Any]


def write(results: Results) -> str:
    """Write Markdown and picture beside the JSON; returns the Markdown."""
    entries = results.measured("methods")
    picture = results.path.with_suffix(".png")
    problem = draw(entries, picture)
    commands = list(dict.fromkeys(" ".join(entry["command"]) for entry in entries))
    text = "\n".join(
        [
            "# Every method at equal token budgets",
            "",
            "Facts found of those planted, over all lengths and depths; KV bytes held by one request and tokens read by one "
            "decode step (estimation included) at the greatest length measured; time per output token of a batch with a fact at "
            "each depth, dense (policy full, measured just before in the same engine) over the method's.",
            "",
            "KV held counts whole blocks of 32 tokens with all that lies behind them: the engine that serves full, "
            "streaming_llm, snapkv and rocketkv side by side holds rocketkv's key table there for all of them (a quarter more). "
            "The budget of quest and hsa is what they attend to: with nothing evicted, estimation comes on top and grows with "
            "the prompt.",
            "",
            problem or f"![facts found by length and depth, for each method and budget]({picture.name})",
            "",
            table("## Methods", ("policy", "budget", "facts found", "KV held", "tokens read", "speed"), rows(entries)),
            table("## By length", ("policy", "budget", *lengths_header(entries)), rows_by_length(entries)),
            "",
            "## Machine",
            "",
            *(f"- {line}" for line in summary(results.data["machine"]).splitlines()),
            *(f"- command: `python -m benchmarks.methods {command}`" for command in commands),
            "",
        ]
    )
    results.path.with_suffix(".md").write_text(without_checkout(text))
    return text


def groups(entries: list[Entry]) -> Iterable[tuple[str, int, list[Entry]]]:
    """Entries of one policy and budget, by length."""
    keys = dict.fromkeys((entry["policy"], entry["budget"]) for entry in entries)
    order = {policy: place for place, policy in enumerate(dict.fromkeys(entry["policy"] for entry in entries))}
    for policy, budget in sorted(keys, key=lambda key: (key[1], order[key[0]])):
        of_key = [entry for entry in entries if (entry["policy"], entry["budget"]) == (policy, budget)]
        yield policy, budget, sorted(of_key, key=lambda entry: entry["length"])


def rows(entries: list[Entry]) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []
    for policy, budget, of_key in groups(entries):
        found = [hit for entry in of_key for hit in entry["found"]]
        longest = of_key[-1]
        made.append(
            (
                policy,
                str(budget or "all"),
                f"{sum(found)} of {len(found)}",
                _mib(longest["kv_bytes_per_request"]),
                f"{longest['tokens_read']:.0f}",
                f"{longest['dense_seconds_per_step'] / longest['seconds_per_step']:.2f}",
            )
        )
    return made


def _mib(size: float | None) -> str:
    return "not measured" if size is None else f"{size / 2**20:.1f} MiB"


def lengths_header(entries: list[Entry]) -> list[str]:
    return [f"{length} tokens" for length in lengths(entries)]


def lengths(entries: list[Entry]) -> list[int]:
    return sorted({entry["length"] for entry in entries})


def rows_by_length(entries: list[Entry]) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []
    for policy, budget, of_key in groups(entries):
        by_length = {entry["length"]: entry for entry in of_key}
        cells = []
        for length in lengths(entries):
            entry = by_length.get(length)
            cells.append("" if entry is None else f"{sum(entry['found'])} of {len(entry['found'])}")
        made.append((policy, str(budget or "all"), *cells))
    return made


def draw(entries: list[Entry], path: Any) -> str:
    """One heat map for each policy and budget: lengths across, depths down. Returns why there is no picture, or ""."""
    try:
        import matplotlib
    except ImportError:
        return "No picture: `make bench` installs what draws it."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = list(dict.fromkeys(entry["policy"] for entry in entries if entry["policy"] != "full"))
    budgets = sorted({entry["budget"] for entry in entries if entry["budget"]})
    if not policies:
        return "No picture: nothing was measured."
    figure, axes = pyplot.subplots(
        len(policies),
        len(budgets),
        figsize=(2.6 * len(budgets) + 1, 1.9 * len(policies) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for row, policy in enumerate(policies):
        for column, budget in enumerate(budgets):
            of_key = [entry for entry in entries if (entry["policy"], entry["budget"]) == (policy, budget)]
            _heat_map(axes[row][column], of_key, lengths(entries))
            axes[row][column].set_title(f"{policy}, {budget} tokens", fontsize=9)
    figure.suptitle("Facts found (green) by length of the prompt and depth of the fact", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return ""


def _heat_map(axis: Any, entries: list[Entry], all_lengths: list[int]) -> None:
    by_length = {entry["length"]: entry for entry in entries}
    depths = entries[0]["depths"] if entries else []
    shares = []
    for place in range(len(depths)):
        of_depth = []
        for length in all_lengths:
            found = by_length[length]["found"][place :: len(depths)] if length in by_length else []
            of_depth.append(sum(found) / len(found) if found else float("nan"))
        shares.append(of_depth)
    if shares:
        axis.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(all_lengths)), [f"{length / 1000:g}K" for length in all_lengths], fontsize=8)
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
