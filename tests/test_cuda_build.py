# SPDX-License-Identifier: Apache-2.0
"""``csrc/cuda`` as a library: as ``setup.py`` builds it, and its ops over the host's model of threads.

Nothing here needs a GPU. What only a GPU can show (that launches run, and how fast) is in ``benchmarks/gpu_check.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.cuda_model import SOURCES, build
from vllm_rocketkv.kernels import cuda
from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.kernels.triton.cache import cache_view
from vllm_rocketkv.kernels.triton.compact import compact
from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split
from vllm_rocketkv.kernels.triton.top_tokens import top_tokens

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent

# ------------------------------------------------------------------------------------------- setup.py and nvcc

BUILD = """
import sys
import setuptools, torch
from setuptools import Distribution
from torch.utils import cpp_extension
given = {}
setuptools.setup = lambda **options: given.update(options)
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__name__": "setup"})
torch.version.cuda = sys.argv[2] or None
cpp_extension.CUDA_HOME = sys.argv[3]
distribution = Distribution({"name": "rocketkv", "ext_modules": [], "cmdclass": given["cmdclass"]})
command = distribution.get_command_obj("build_ext")
command.build_lib, command.build_temp = sys.argv[1] + "/lib", sys.argv[1] + "/temp"
command.ensure_finalized()
command.run()
"""
"""Builds the extensions that setup.py adds to none, for a torch that says it is of a CUDA."""

LOAD = """
import sys, torch
from pathlib import Path
from vllm_rocketkv.kernels import cuda
cuda.load(Path(sys.argv[1]))
for name in ("top_tokens", "select_pages", "compact"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rocketkv_cuda::{name}", "CUDA")
"""


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def cuda_toolkit() -> tuple[Path, str]:
    """Where nvcc is, and the version of CUDA that it is of."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    nvcc = shutil.which("nvcc") or str(home / "bin" / "nvcc")
    if not Path(nvcc).exists():
        pytest.skip("nvcc is not installed: csrc/cuda is not compiled for GPUs here")
    if not list(home.glob("lib64/libcudart.so")):
        pytest.skip(f"{home} has no CUDA runtime to link with")
    release = re.search(
        r"release (\d+\.\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    assert release is not None
    return home, release[1]


def run_setup(folder: Path, version: str, home: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder), version, home],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_setup_builds_a_library_for_every_gpu_without_spills(tmp_path: Path) -> None:
    home, version = cuda_toolkit()
    output = run_setup(tmp_path, version, str(home), NVCC_APPEND_FLAGS="--resource-usage")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert len(spills) == 3 * 7, output  # kernels for sm_80, sm_90a, sm_100
    assert set(spills) == {("0", "0")}, output
    assert set(re.findall(r"for '(sm_\w+)'", output)) == {"sm_80", "sm_90a", "sm_100"}
    (library,) = (tmp_path / "lib").rglob("_cuda.*")
    path = f"{home / 'lib64'}:{os.environ.get('LD_LIBRARY_PATH', '')}"  # torch for CUDA brings its own
    subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], check=True, cwd=ROOT, env=os.environ | {"LD_LIBRARY_PATH": path}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "home", "environment", "reason"),
    [
        ("", "/usr/local/cuda", {}, "without CUDA"),
        ("13.0", "", {}, "nvcc was not found"),
        ("13.0", "/usr/local/cuda", {"ROCKETKV_CUDA": "0"}, "ROCKETKV_CUDA is 0"),
    ],
)
def test_setup_says_why_it_builds_none(
    tmp_path: Path, version: str, home: str, environment: dict[str, str], reason: str
) -> None:
    output = run_setup(tmp_path, version, home, **environment)
    assert reason in output
    assert output.count("\n") == 1
    assert not list(tmp_path.rglob("_cuda.*"))


# ------------------------------------------------------------------------------------------- the ops, on the host


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``torch.ops.rocketkv_cuda`` for CPU tensors, from the same bindings."""
    if cuda.available():
        pytest.skip("the library for GPUs has registered these ops")
    flags = ["-DROCKETKV_HOST_MODEL", "-std=c++20", "-fvisibility=hidden", f"-isystem{TORCH / 'include'}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    sources = [str(SOURCES / "bindings.cpp"), str(SOURCES / "host_model.cpp")]
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    cuda.load(build(tmp_path_factory.mktemp("ops"), "ops", *flags, *sources, *libraries))
    return torch.ops.rocketkv_cuda


def test_top_tokens_is_tritons(ops: Any) -> None:
    keys = torch.randint(-50, 50, (3, 700), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    for num_best, num_last in [(0, 0), (0, 5), (256, 32), (700, 1)]:
        assert torch.equal(cuda.top_tokens(keys, num_best, num_last), top_tokens(keys, num_best, num_last))
    torch.library.opcheck(ops.top_tokens, (keys, 4, 2, torch.empty(3, 6, dtype=torch.int32)))


@pytest.mark.parametrize("by_page", [False, True])
def test_selected_pages_are_tritons(ops: Any, by_page: bool) -> None:
    """``select_pages`` in place of the launches of split decode that come to the lists of pages."""
    generator = torch.Generator().manual_seed(2)
    Hkv, group, D, page_size, lengths = 2, 2, 64, 4, [200, 33, 0, 129]
    blocks = torch.randperm(60, generator=generator).to(torch.int32).reshape(4, 15)
    kv_bytes, kt_bytes = Hkv * 16 * 2 * D * 2, Hkv * D * 2 * 4 * 2
    storage = torch.randn(60, (kv_bytes + kt_bytes) // 2, generator=generator).bfloat16()
    kv = storage.as_strided((60, Hkv, 16, 2 * D), (storage.stride(0), 16 * 2 * D, 2 * D, 1))
    cache = cache_view(kv, torch.bfloat16, torch.bfloat16, kv_bytes, page_size)
    rows = torch.tensor([[i, i, 0, n, D, 0] for i, n in enumerate(lengths)], dtype=torch.int32)
    query = torch.randn(4, Hkv * group, D, generator=generator).bfloat16()
    options = DecodeOptions(
        scale=0.125, softcap=0.0, dense_below=40, topk_tokens=37, sink_tokens=5, recent_tokens=6, by_page=by_page, adaptive=True
    )  # fmt: skip
    workspace = SplitWorkspace(4, Hkv * group, Hkv, D, 240, page_size, 3, "cpu", page_tile=16, select_tile=16)
    output, with_ours = torch.zeros_like(query), torch.zeros_like(query)
    decode_split(query, cache, output, rows, blocks, options, workspace)

    pages, parts = workspace.page_capacity, 3
    keys = workspace.tensors["keys"].view(4, Hkv, pages)
    theirs, their_lengths = (
        workspace.tensors["page_lists"].view(4, Hkv, group, pages),
        workspace.tensors["list_lengths"],
    )
    ours, our_lengths = torch.zeros_like(keys), torch.full((4, Hkv, parts), -1, dtype=torch.int32)
    arguments = (keys, rows[:, 3], page_size, 40, 37, 5, 6, by_page, ours, our_lengths)
    cuda.select_pages(*arguments)
    assert our_lengths[:, :, 1:].eq(0).all()
    assert our_lengths[1:3].eq(0).all(), "a dense row and an inert one list nothing"
    for row in (0, 3):
        region = ceil_div(ceil_div(ceil_div(lengths[row], page_size), parts), 16) * 16  # pages of a split
        for head in range(Hkv):
            ends = their_lengths.view(4, Hkv, parts)[row, head].tolist()
            expected = [theirs[row, head, 0, i * region :][:n] for i, n in enumerate(ends)]
            assert torch.equal(ours[row, head, : our_lengths[row, head, 0]], torch.cat(expected))
    torch.library.opcheck(ops.select_pages, arguments)
    decode_split(query, cache, with_ours, rows, blocks, options, workspace, select=cuda.select_pages)
    torch.testing.assert_close(with_ours, output, atol=0.01, rtol=0.01)  # the same tokens, in other portions


@pytest.mark.parametrize(
    "name", ["CUDA top tokens", "CUDA page selection", "CUDA compact: KV bfloat16, KT float8_e5m2, page 4"]
)
def test_gpu_checks_pass_on_the_host(ops: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``benchmarks/gpu_check.py`` does with them on a GPU."""
    from benchmarks.gpu import correctness

    monkeypatch.setattr(correctness, "cuda_kernels", lambda: cuda)
    (check,) = (check for check in correctness.checks(small=True) if check.name == name)
    assert check.run(torch.device("cpu")) == ""


def test_compaction_is_tritons(ops: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randperm(12, generator=generator).to(torch.int32)
    kept = torch.stack([torch.randperm(6 * 32, generator=generator)[:75].sort().values for _ in range(2)]).int()
    kv_bytes, kt_bytes = 2 * 32 * 2 * 64, 2 * 64 * 2 * 8
    start = torch.randn(12, kv_bytes + kt_bytes, generator=generator).to(torch.float8_e4m3fn)
    results = []
    for op in (compact, cuda.compact):
        storage = start.clone()
        kv = storage.as_strided((12, 2, 32, 128), (storage.stride(0), 32 * 128, 128, 1))
        cache = cache_view(kv, torch.float8_e4m3fn, torch.float8_e4m3fn, kv_bytes, 4)
        op(cache, blocks[:6], blocks[6:9], kept)
        cache.kt[cache.kt == 0x80] = 0  # a bound of 0 may have either sign
        results.append(storage.view(torch.uint8))
    assert torch.equal(*results)
    assert not torch.equal(results[0], start.view(torch.uint8))


def test_wrong_arguments_are_refused(ops: Any) -> None:
    keys = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cannot choose 9 of 8"):
        cuda.top_tokens(keys, 9)
    with pytest.raises(RuntimeError, match="must be Int of 2 dimensions"):
        cuda.top_tokens(keys.float(), 3)
    with pytest.raises(RuntimeError, match="last dimension of keys must be contiguous"):
        cuda.top_tokens(keys.t().contiguous().t(), 3)
    lists = torch.zeros(1, 2, 3, dtype=torch.int32)
    lengths, parts = torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="4 pages of each"):
        cuda.select_pages(keys[None], lengths, 4, 0, 9, 0, 0, False, lists, parts)
    kv, kt = torch.zeros(3, 1, 16, 64, dtype=torch.int16), torch.zeros(3, 1, 32, 2, 4, dtype=torch.int16)
    ids, kept = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 17, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"kept .* does not fit"):
        ops.compact(kv, kt, ids, ids, kept, 1, 1, 4)
    with pytest.raises(RuntimeError, match="kind 0 does not fit kv"):
        ops.compact(kv, kt, ids, ids, kept, 0, 1, 4)
    shifted = torch.zeros(3, 1, 16, 65, dtype=torch.int16)[..., :64]
    with pytest.raises(RuntimeError, match=r"stride of .* not a multiple of 16"):
        ops.compact(shifted, kt, ids, ids, kept[:, :4], 1, 1, 4)


def test_ops_have_fakes(ops: Any) -> None:
    with FakeTensorMode():
        chosen = cuda.top_tokens(torch.empty(2, 100, dtype=torch.int32), 10, 4)
    assert chosen.shape == (2, 14)
