# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of benchmarks.kernel_report and benchmarks.traffic against numbers worked out by hand."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import machine, traffic
from benchmarks.gpu import kernel_tables, predict, resources
from benchmarks.gpu.hardware import GPUS, occupancy
from benchmarks.gpu.resources import Compiled
from benchmarks.traffic import Attention, Selection

KIB, MIB = 1 << 10, 1 << 20
LLAMA = Attention(num_heads=32, num_kv_heads=8, head_size=128)


# ---- traffic ----


def test_traffic_is_that_of_the_design():
    # Section 4: 512 pages x 128 dimensions x 1 byte; 256 tokens x (K and V) x 128 x 2 bytes; 131,072 tokens of the same.
    assert traffic.estimate_floor(128, Selection()) == 64 * KIB
    assert traffic.attend_bytes(LLAMA, 256) == 128 * KIB
    assert traffic.decode_floor(LLAMA, Selection()) == 192 * KIB
    assert traffic.dense_bytes(LLAMA, 131072) == 64 * MIB


@pytest.mark.parametrize(
    ("block_size", "kt_itemsize", "kib"),
    [
        (128, 1, 64),  # 32 pages of a byte: a run is a sector
        (64, 1, 128),  # 16 bytes: a sector holds min and max of a dimension
        (16, 1, 128),  # 4 bytes: a sector holds 4 dimensions
        (256, 1, 64),
        (128, 2, 128),
        (64, 2, 128),
        (16, 2, 256),  # 8 bytes: 2 dimensions
    ],
)
def test_short_runs_waste_sectors(block_size, kt_itemsize, kib):
    selection = Selection(block_size=block_size, kt_itemsize=kt_itemsize)
    assert traffic.estimate_bytes(128, selection) == pytest.approx(kib * KIB)


def test_topr_saves_what_the_layout_lets_it():
    # 64 of 128 dimensions; at block size 16 a sector (4 dimensions) is spared only if none of its four is read: about 1 in 16.
    assert traffic.estimate_bytes(128, Selection(topr=64)) == 32 * KIB
    spared = (64 * 63 * 62 * 61) / (128 * 127 * 126 * 125)
    assert traffic.estimate_bytes(128, Selection(block_size=16, topr=64)) == pytest.approx(128 * KIB * (1 - spared))


@pytest.mark.parametrize(
    ("D", "page", "block", "itemsize", "topr", "n"),
    [
        (64, 2, 48, 1, 20, 100),  # runs of 24 bytes: sectors hold parts of two dimensions
        (80, 2, 48, 1, 80, 96),
        (80, 8, 16, 2, 3, 70),
        (96, 4, 64, 1, 20, 201),
        (64, 4, 48, 2, 64, 61),
    ],
)
def test_expected_sectors_are_the_mean_of_random_choices(D, page, block, itemsize, topr, n):
    rng = random.Random(0)
    selection = Selection(num_tokens=n, page_size=page, block_size=block, kt_itemsize=itemsize, topr=topr)

    def one_choice() -> int:
        touched = set()
        for d in rng.sample(range(D), topr):
            side = rng.randrange(2)
            for p in range(n // page):
                tile, inside = divmod(p, block // page)
                byte = ((2 * d + side) * (block // page) + inside) * itemsize
                touched.add((tile, byte // 32))
        return 32 * len(touched)

    mean = sum(one_choice() for _ in range(300)) / 300
    assert traffic.estimate_bytes(D, selection) == pytest.approx(mean, rel=0.02)


def test_small_extras_are_counted():
    # 2,049 tokens: one key of the newest page (256 bytes), query and output of 4 heads (2 KiB), 17 blocks of the table.
    selection = Selection(num_tokens=2049)
    assert traffic.decode_bytes(LLAMA, selection) == 192 * KIB + 256 + 2 * 4 * 128 * 2 + 17 * 4
    # K and V of a token read and written; a quarter of 4 keys read and of a min and a max (a byte each) written.
    assert traffic.update_bytes(LLAMA, selection) == 2 * 512 + (4 * 256 + 256) / 4


def test_few_tokens_are_all_read():
    assert traffic.selected_tokens(Selection(num_tokens=10)) == 10
    assert traffic.decode_floor(LLAMA, Selection(num_tokens=10)) == 2 * 128 + 10 * 512


def test_memory_of_a_cache():
    assert traffic.cache_bytes(LLAMA, 32, 1) == 128 * KIB  # Llama-3.1-8B
    assert traffic.cache_bytes(LLAMA, 32, 4, Selection()) == 4 * 128 * KIB + 32 * 8 * 256


def test_stage_one():
    assert traffic.window_bytes(LLAMA, 1000) == 8 * (1000 * 256 + 8000)
    assert traffic.compact_bytes(LLAMA, Selection()) == 8 * (2 * 2048 * 512 + 512 * 256)


# ---- occupancy ----


@pytest.mark.parametrize(
    ("cc", "registers", "shared", "warps", "blocks", "limiter"),
    [
        (80, 32, 0, 4, 16, "registers"),  # 65,536 / (32 x 32) = 64 warps: as many as an SM holds
        (90, 128, 0, 4, 4, "registers"),  # 16 warps
        (80, 40, 0, 4, 12, "registers"),  # 1,280 of a warp: 51 warps, 12 blocks of 4
        (80, 33, 0, 4, 12, "registers"),  # rounded up to 40: 8 x 32 = 256
        (80, 255, 0, 8, 1, "registers"),
        (90, 32, 100 << 10, 4, 2, "shared memory"),  # 2 x 101 KiB of 228
        (80, 32, 100 << 10, 4, 1, "shared memory"),
        (80, 32, 164 << 10, 4, 0, "shared memory"),  # 163 is the most
        (100, 32, 227 << 10, 4, 1, "shared memory"),
        (90, 16, 0, 1, 32, "blocks"),
    ],
)
def test_occupancy(cc, registers, shared, warps, blocks, limiter):
    found = occupancy(cc, registers, shared, warps)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.share == blocks * warps / 64


# ---- machine code ----

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _decode:
  REG:168 STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:612 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

PTXAS = """
ptxas info    : Compiling entry function '_Z6gatherPfi' for 'sm_90a'
ptxas info    : Function properties for _Z6gatherPfi
    24 bytes stack frame, 20 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function '_Z4topkPf' for 'sm_90a'
ptxas info    : Function properties for _Z4topkPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_local_memory_is_a_problem():
    (clean,) = resources.parse_usage(USAGE.format(stack=0))
    (spilled,) = resources.parse_usage(USAGE.format(stack=16))
    assert (clean.name, clean.registers, clean.local) == ("_decode", 168, 0)
    assert spilled.local == 16
    clean, spilled = (Compiled("m", "c", 90, 4, 2, 168, k.local) for k in (clean, spilled))
    assert not clean.problem
    assert "16 bytes of local memory" in spilled.problem
    with pytest.raises(ValueError, match="no resource usage"):
        resources.parse_usage("cuobjdump info: nothing")


def test_ptxas_output():
    gather, topk = resources.parse_ptxas(PTXAS, {"_Z6gatherPfi": 256})
    assert (gather.num_warps, topk.num_warps) == (8, 32)
    assert (gather.registers, gather.local, gather.shared) == (255, 40, 4096)
    assert (topk.registers, topk.local, topk.shared) == (40, 0, 0)


def test_too_much_shared_memory_is_a_problem():
    assert "cannot be launched" in Compiled("m", "c", 80, 4, 2, 64, 0, 200 << 10).problem
    assert not Compiled("m", "c", 90, 4, 2, 64, 0, 200 << 10).problem


COMPILE = """
import triton, triton.language as tl
from benchmarks.gpu import resources
from vllm_rocketkv.kernels.triton.launch import CompileCase

@triton.jit
def double(x, y, n, x_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i * x_stride, mask=i < n) * 2, mask=i < n)

case = CompileCase("double", double, {"x": "*fp32", "y": "*fp32", "n": "i32", "x_stride": "i32"}, {"BLOCK": 1024}, 4)
for architecture in (80, 100):
    compiled = resources.compile_for(case, architecture)
    usage = resources.read_cubin(compiled.asm["cubin"])[0]
    print(usage.name, usage.registers > 8, usage.local)
"""


def test_a_kernel_compiles_without_a_gpu(tmp_path: Path):
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "PYTHONPATH": str(machine.ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["double True 0"] * 2


def test_a_module_that_cannot_be_imported_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def broken(module: str) -> None:
        raise ImportError(f"no {module}")

    monkeypatch.setattr(resources, "cases_of", broken)
    (failed,) = resources.compile_module("decode", (80,), "", None)  # type: ignore[arg-type]
    assert failed.problem == "ImportError: no decode"


def test_modules_are_found_without_being_registered():
    assert {"launch", "cache", "numbers"} <= set(resources.kernel_modules())
    assert resources.cases_of("cache") == []


# ---- predictions and the report ----


def test_a_prediction_by_hand():
    # 2 kernels a layer, 32 layers of 8 KV heads.
    h200 = GPUS[2]
    a = predict.Assumptions(share=0.5, launch=1e-6, idle=1e-7, latency=1e-7)
    of_head = 192 * KIB + 2 * 4 * 128 * 2 + 16 * 4 + (2 * 512 + (4 * 256 + 256) / 4)
    expected = 32 * (2e-6 + 32 * 8 * of_head / (0.5 * 4.8e12))
    point = predict.predict(h200, 131072, 32, "fp8 e5m2", 128, a)
    assert point.sparse_attention == pytest.approx(expected)
    # 2 kernels more without work; a batch of 32 gives every SM some, and its round trips are shorter than its bytes.
    assert point.sparse_waiting == pytest.approx(expected + 32 * 0.2e-6)
    dense_head = 64 * MIB + 2 * 4 * 128 * 2 + 2 * 512
    assert point.dense_attention == pytest.approx(32 * (2e-6 + 32 * 8 * dense_head / (0.5 * 4.8e12)))
    assert point.weights == pytest.approx(16e9 / 2.4e12)


def test_small_batches_wait_for_memory():
    # 25 round trips of 2 us; 132 SMs of two programs each hold those of 33 requests.
    h200 = GPUS[2]
    a = predict.Assumptions(launch=0, idle=0, latency=2e-6, programs_of_sm=2)
    for batch, waves in ((1, 1), (33, 1), (34, 2)):
        assert predict.waiting_seconds(h200, Selection(), batch, a) == pytest.approx(32 * waves * 50e-6)
    # Without latency: 8 SMs at 64 bytes a clock.
    a = predict.Assumptions(launch=0, idle=0, latency=0)
    moved = traffic.decode_layer_bytes(LLAMA, Selection(), 1)
    assert predict.waiting_seconds(h200, Selection(), 1, a) == pytest.approx(32 * moved / (0.8 * 8 * 64 * 1.98e9))


def test_what_does_not_fit_is_marked():
    a100, b200 = GPUS[0], GPUS[3]
    a = predict.Assumptions()

    def fits(gpu, context, batch):
        point = predict.predict(gpu, context, batch, "fp8 e5m2", 128, a)
        return point.dense_fits, point.sparse_fits, point.prompt_fits

    assert fits(a100, 32768, 8) == (True, True, True)
    assert fits(a100, 131072, 8) == (False, True, True)  # 8 x 17 GB dense; one prompt and 8 x 0.3 GB
    assert fits(a100, 1 << 20, 1) == (False, False, False)  # 137 GB
    # 137 GB and 16 GB of weights fit 162 GB; room for KT tables behind the prompt's blocks, an eighth more, does not.
    assert fits(b200, 1 << 20, 1) == (True, False, True)


def test_report_says_what_it_is():
    compiled = [
        Compiled("decode", "D=128", 80, 4, 2, 128, 0, 4096),
        Compiled("decode", "D=128", 90, 4, 2, 255, 8, 4096),
        Compiled("decode", "D=256", 80, error="CompilationError: a | b"),
    ]
    text = kernel_tables.render(compiled, predict.Assumptions(), machine.describe(), {"triton": "3.9.0", "nvcc": ""})
    assert "No kernel ran for this report" in text
    assert "3 configurations, 2 with a problem" in text
    assert "8 bytes of local memory a thread (spills)" in text
    assert "nvcc missing" in text
    assert text.count("| A100 80GB | 1024K") == 3
    for line in text.splitlines():
        if line.startswith("| A100 80GB | 1024K"):
            assert line.endswith("✗ |")
