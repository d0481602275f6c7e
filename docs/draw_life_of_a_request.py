# SPDX-License-Identifier: Apache-2.0
"""Draws life_of_a_request.svg: `python docs/draw_life_of_a_request.py`. The numbers are those of a real layout."""

from __future__ import annotations

from pathlib import Path

from vllm_rocketkv.layout import PromptLayout

LAYOUT = PromptLayout(num_prompt_tokens=1100, prompt_budget=512, block_size=128)
CELL, GAP, LEFT, ROW, TOP, TEXT = 38, 4, 150, 84, 40, "font-family='sans-serif' font-size='13'"
COLOURS = {
    "prompt": "#9ecae1",
    "private": "#fdae6b",
    "decoded": "#a1d99b",
    "free": "#ffffff",
    "null": "#eeeeee",
}


def text(x: float, y: float, words: str, weight: str = "normal", size: int = 13) -> str:
    """One line of text."""
    return f"<text x='{x}' y='{y}' font-family='sans-serif' font-size='{size}' font-weight='{weight}'>{words}</text>"


def cells(y: float, entries: list[tuple[str, str]], start: int = 0) -> str:
    """A row of blocks: (label, kind) each."""
    parts = []
    for i, (label, kind) in enumerate(entries):
        x = LEFT + (start + i) * (CELL + GAP)
        dash = " stroke-dasharray='4 3'" if kind in ("free", "null") else ""
        parts.append(
            f"<rect x='{x}' y='{y}' width='{CELL}' height='{CELL}' rx='4' fill='{COLOURS[kind]}' stroke='#444'{dash}/>"
            f"<text x='{x + CELL / 2}' y='{y + 24}' {TEXT} text-anchor='middle'>{label}</text>"
        )
    return "".join(parts)


def main() -> None:
    """Write the picture beside this file."""
    n, s, e = LAYOUT.num_natural_blocks, LAYOUT.num_dropped_blocks, LAYOUT.num_private_blocks
    prompt = [(f"p{i}", "prompt") for i in range(n)]
    private = [(f"c{i}", "private") for i in range(e)]
    rows = [
        ("1 natural", "prompt chunks run as in plain vLLM", cells(TOP + ROW, prompt[: n // 2])),
        ("2 extended", "the window is computed; stage 1 fills c", cells(TOP + 2 * ROW, [*prompt, *private])),
        (
            "3 compact",
            "p goes back, still a prefix hit",
            cells(TOP + 3 * ROW, [*[("null", "null")] * s, *private, ("d0", "decoded")]),
        ),
        (
            "worker's row",
            "append-only; reads from c on",
            cells(TOP + 4 * ROW, [*[("", "free")] * n, *private, ("d0", "decoded")]),
        ),
    ]
    width, height = LEFT + (n + e + 2) * (CELL + GAP) + 20, TOP + 5 * ROW - 20
    body = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        text(20, 34, "Life of a request: the block list of one KV cache group", "bold", 17),
        text(
            20,
            58,
            f"N = {LAYOUT.num_prompt_tokens} prompt tokens, budget P = {LAYOUT.prompt_budget}, block size B = "
            f"{LAYOUT.block_size}",
        ),
        text(
            20,
            76,
            f"n = {n} prompt blocks, s = {s} fewer, e = {e} private, P' = {LAYOUT.num_kept_tokens} tokens kept per KV head",
        ),
    ]
    for index, (name, note, drawn) in enumerate(rows, start=1):
        body += [text(20, TOP + index * ROW + 24, name, "bold", 15), text(LEFT, TOP + index * ROW - 8, note), drawn]
    body.append("</svg>")
    (Path(__file__).parent / "life_of_a_request.svg").write_text("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
