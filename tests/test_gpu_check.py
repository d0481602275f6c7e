# SPDX-License-Identifier: Apache-2.0
"""benchmarks.gpu_check without a GPU: its checks in Triton's interpreter, and its timed parts with a clock that does not run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, machine
from benchmarks.gpu import correctness, graphs, rivals, speed, tables, timing
from benchmarks.gpu.decode_cases import DECODE_CASES, DecodeStep, compare, make_step
from benchmarks.gpu.timing import Timing
from benchmarks.traffic import Attention, Selection

CPU = torch.device("cpu")
# The kernels have tests of their own over many more shapes; these are the checks that have something of their own.
CHECKS = [
    "decode: float32, top-r 24",
    "decode: quest",
    "decode: float32, mean",
    "split decode: float32, quest",
    "split decode: mean",
    "decode: no KT table",
    "write rows: KV bfloat16, KT float8_e5m2, page 4",
    "write rows: KV float8_e4m3fn, KT float8_e4m3fn, page 4",
    "summarise pages: KV bfloat16, KT float8_e5m2, page 4",
    "compact: KV float32, KT bfloat16, page 16",
    "write rows: KV bfloat16, KT bfloat16, page 4, means",
    "compact: KV float8_e4m3fn, KT float8_e5m2, page 16, means",
    "window scores over the prefix",
    "stage 1: tokens kept",
    "top tokens",
    "plan: rows and lengths",
    "plan: pages that became full",
]
BY_NAME = {check.name: check for check in correctness.checks(small=True)}


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_in_the_interpreter(name):
    assert BY_NAME[name].run(CPU) == ""


def test_there_is_no_csrc_cuda_without_a_gpu():
    for name in ("CUDA top tokens", "CUDA page selection", "CUDA compact: KV bfloat16, KT float8_e5m2, page 4"):
        with pytest.raises(correctness.NotHereError):
            BY_NAME[name].run(CPU)


@pytest.fixture(scope="module")
def decoded() -> DecodeStep:
    """A step that was decoded."""
    case = next(case for case in DECODE_CASES if case.name == "float32, by page").small()
    step = make_step(case, CPU)
    correctness.fused(step)
    assert compare(step) == ""
    return step


def test_a_wrong_decode_is_found(decoded):
    for row, wrong, says in ((0, decoded.output[0] * 1.001, "error"), (1, torch.nan, "error"), (-1, 0, "padding")):
        step = replace(decoded, output=decoded.output.clone())
        step.output[row] = wrong
        assert says in compare(step)


@pytest.mark.parametrize(
    ("field", "value"),
    [("topk_tokens", 20), ("sink_tokens", 12), ("topr", 20), ("softcap", 3.0), ("estimator", "quest")],
)
def test_an_option_that_is_ignored_is_found(decoded, field, value):
    step = replace(decoded, case=replace(decoded.case, **{field: value}), rows=decoded.rows.clone())
    step.rows[:, 4] = min(step.case.topr, step.case.head_size)
    assert "error" in compare(step)


def test_a_wrong_write_is_found(monkeypatch):
    from vllm_rocketkv.kernels.triton import compact as module

    real = module.compact

    def shifted(cache: Any, prompt: Any, private: Any, kept: torch.Tensor) -> None:
        moved = kept.clone()
        moved[0, 0] = (moved[0, 0] + 1) % 7
        real(cache, prompt, private, moved)

    monkeypatch.setattr(module, "compact", shifted)
    assert "differ" in BY_NAME["compact: KV float32, KT bfloat16, page 16"].run(CPU)


# ---- timed parts: every call is made once, by the interpreter ----


@pytest.fixture
def no_clock(monkeypatch):
    def once(call: Callable[[int], Any], copies: int, *_: Any, **__: Any) -> Timing:
        for copy in range(copies):
            call(copy)
        return Timing(2e-6, 1e-6)

    monkeypatch.setattr(timing, "measure", once)
    monkeypatch.setattr(timing, "copies_for", lambda *_: 2)
    monkeypatch.setattr(timing, "capture", lambda work: SimpleNamespace(replay=work))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 << 30, 2 << 30))
    monkeypatch.setattr(speed, "LLAMA_8B", Attention(4, 1, 32))
    monkeypatch.setattr(speed, "PROMPT", 512)
    monkeypatch.setattr(speed, "PRODUCTS", ((32, 64),))
    monkeypatch.setattr(speed, "BATCHES", (1, 3))
    monkeypatch.setattr(speed, "CONTEXTS", (256, 1 << 24))
    monkeypatch.setattr(graphs, "SHAPE", Attention(4, 1, 32))


def test_decode_is_timed(no_clock):
    selection = Selection(num_tokens=152, topk_tokens=32, block_size=64)
    fused, with_update = (speed.time_fused(selection, 2, CPU, with_update) for with_update in (False, True))
    # 38 pages of 32 bytes; 32 tokens of 128; 2 requests, one KV head.
    assert fused["floor"] == 2 * (38 * 32 + 32 * 128)
    assert fused["bandwidth"] == fused["floor"] / 1e-6
    assert with_update["name"] == "update + fused decode"


def test_a_decode_that_cannot_be_launched_is_a_failure_among_others(monkeypatch):
    def fused(selection: Selection, batch: int, **options: Any) -> dict[str, Any]:
        if batch == 8:
            raise RuntimeError("out of resources")
        return {"part": "decode", "name": "fused decode", "batch": batch}

    monkeypatch.setattr(speed, "time_fused", fused)
    monkeypatch.setattr(speed, "time_split", fused)
    rows = list(speed.decode_series(CPU))
    assert len(rows) == 14
    assert sum("out of resources" in row.get("failure", "") for row in rows) == 4


def test_the_engines_capacity_is_timed():
    from vllm_rocketkv.backend import gpu_impl
    from vllm_rocketkv.config import RocketKVConfig

    config = RocketKVConfig.parse({"prompt_budget": 2048})
    assert speed.engine_capacity(Selection()) == gpu_impl.fused_capacity(config, 1 << 17, 128)


def test_dense_attention_is_timed(no_clock):
    rows = list(speed.dense_series(CPU))
    measured = [row for row in rows if "seconds" in row]
    assert {(row["name"], row["batch"]) for row in measured} >= {("torch SDPA", 1), ("torch SDPA", 3)}
    skipped = {(row["name"], row["tokens"]): row["skipped"] for row in rows if "skipped" in row}
    assert "do not fit the memory" in skipped["all", 1 << 24]
    assert "not installed" in skipped["FlashInfer", 256]


def test_a_rival_that_computes_something_else_is_not_timed(monkeypatch):
    step = rivals.make_dense_step(Attention(4, 1, 32), 2, 128, CPU)
    assert rivals.prepare("torch SDPA", step)[1] == ""
    monkeypatch.setitem(rivals.RIVALS, "torch SDPA", lambda step: lambda: step.query)
    call, why = rivals.prepare("torch SDPA", step)
    assert call is None
    assert "wrong" in why


def test_stage_one_is_timed(no_clock, monkeypatch):
    monkeypatch.setattr(speed, "Selection", lambda: Selection(num_tokens=256))
    names = [row["name"] for row in speed.stage1_series(CPU)]
    assert names == ["stage 1: scores and choice", "compaction", "prefill: attention", "prefill: products with weights"]


def test_replays_are_compared(no_clock, monkeypatch):
    assert graphs.replays("fused", CPU, num_tokens=62) == ""
    real = graphs.decoder

    def forgetful(*arguments: Any) -> Any:
        """Leaves out the fourth call: the replay of the second step."""
        decode, calls = real(*arguments), []

        def call(step: Any) -> None:
            calls.append(step)
            if len(calls) != 4:
                decode(step)

        return call

    monkeypatch.setattr(graphs, "decoder", forgetful)
    assert "outputs differ" in graphs.replays("fused", CPU, num_tokens=62)


# ---- the command ----


def test_targets():
    def decode(batch: int, bandwidth: float, seconds: float) -> dict[str, Any]:
        return {
            "part": "decode", "name": "fused decode", "batch": batch, "tokens": 2048, "block_size": 128,
            "kt_itemsize": 1, "topr": None, "seconds": seconds, "bandwidth": bandwidth,
        }  # fmt: skip

    def once(name: str, seconds: float) -> dict[str, Any]:
        return {"part": "stage 1", "name": name, "seconds": seconds}

    dense = [{"part": "dense", "name": n, "batch": 8, "tokens": 131072, "seconds": s} for n, s in (("a", 9), ("b", 6))]
    rows = [decode(32, 3e12, 1), decode(8, 2e12, 0.25), *dense]
    rows += [once("stage 1: scores and choice", 2), once("compaction", 1)]
    rows += [once("prefill: attention", 30), once("prefill: products with weights", 45)]
    assert [(value, met) for _, _, value, met in tables.targets(rows, 4e12)] == [
        (0.75, False),
        (24, True),
        (0.04, False),
    ]
    assert [value for _, _, value, _ in tables.targets([], 0.0)] == [None, None, None]


def context(**options: Any) -> gpu_check.Context:
    given = {"interpret": False, "seconds": 100.0, "only": ""} | options
    return gpu_check.Context(argparse.Namespace(**given), CPU, time.monotonic())


def test_a_part_ends_when_its_time_is_used_up():
    def slow(_: gpu_check.Context) -> Any:
        for number in range(5):
            time.sleep(0.02)
            yield {"part": "p", "name": str(number)}

    run = context()
    gpu_check.run_part(gpu_check.Part("p", 0.05, slow), run)
    assert "used up" in run.rows[-1]["skipped"]
    assert len(run.rows) < 6
    late = context(seconds=1.0)
    gpu_check.run_part(gpu_check.Part("p", 0.05, slow), late)
    assert [row["skipped"] for row in late.rows] == ["1 s are used up"]


def test_an_error_of_a_part_is_a_failure():
    def broken(_: gpu_check.Context) -> Any:
        yield {"part": "p", "name": "first"}
        raise RuntimeError("illegal memory access")

    run = context()
    gpu_check.run_part(gpu_check.Part("p", 1.0, broken), run)
    assert run.rows[-1]["failure"] == "RuntimeError: illegal memory access"


def test_budgets_sum_up_to_less_than_ten_minutes():
    assert sum(part.seconds for part in gpu_check.PARTS) <= gpu_check.TOTAL < 600


def test_the_command_says_what_was_not_run(tmp_path: Path):
    output = tmp_path / "found"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--interpret", "--output", str(output), "--only", "plan"]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Nothing here ran on a GPU" in done.stdout
    rows = json.loads(Path(f"{output}.json").read_text())["rows"]
    assert {row["part"] for row in rows if "skipped" in row} == {
        part.name for part in gpu_check.PARTS if part.needs_gpu
    }
    assert [row["failure"] for row in rows if row["part"] == "correctness"] == ["", ""]
