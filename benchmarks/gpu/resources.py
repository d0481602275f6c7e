# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels without a GPU and reads what they need from the machine code: registers, local memory, shared memory.

Triton's bundled ``cuobjdump`` reads the machine code, so no CUDA toolkit is needed; ``nvcc`` only for ``csrc/cuda``.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.hardware import LIMITS, Occupancy, occupancy
from benchmarks.machine import ROOT

PACKAGE = "vllm_rocketkv.kernels.triton"
CUDA_SOURCES = ROOT / "csrc" / "cuda"
ALIGNED = 16
"""Triton compiles anew for pointers and integers that are multiples of this."""
FUNCTION = re.compile(r"^\s*Function ([^:]+):\s*$")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
PTXAS_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
PTXAS_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
PTXAS_USED = re.compile(r"Used (\d+) registers")
PTX_BOUNDS = re.compile(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)")
MOST_THREADS = 1024
PTXAS_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Compiled:
    """One configuration of one kernel for one architecture; ``error`` instead of numbers if it could not be compiled."""

    module: str
    name: str
    compute_capability: int
    num_warps: int = 0
    num_stages: int = 0
    registers: int = 0
    local: int = 0
    """Bytes of local memory of a thread: spilled registers and arrays that did not fit registers alike."""
    shared: int = 0
    """Bytes of shared memory of a block."""
    error: str = ""
    seconds: float = 0.0

    @property
    def occupancy(self) -> Occupancy:
        """How many of it one SM holds."""
        return occupancy(self.compute_capability, self.registers, self.shared, self.num_warps)

    @property
    def problem(self) -> str:
        """Why the configuration is not acceptable; empty if it is."""
        if self.error:
            return self.error
        if self.local:
            return f"{self.local} bytes of local memory a thread (spills)"
        if not self.occupancy.blocks:
            return f"cannot be launched: {self.shared} bytes of shared memory, {self.registers} registers a thread"
        return ""

    def as_json(self) -> dict[str, Any]:
        """All fields and what follows from them."""
        entry = asdict(self)
        if not self.error:
            entry["occupancy"] = asdict(self.occupancy)
        return entry | {"problem": self.problem}


# ---- Triton ----


def kernel_modules() -> list[str]:
    """Every module of the kernels' package, in the order of the alphabet."""
    package = importlib.import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


@cache
def cases_of(module: str) -> list[Any]:
    """The configurations that a module says its kernels are launched in; none if it has no kernels of its own."""
    found = importlib.import_module(f"{PACKAGE}.{module}")
    compile_cases = getattr(found, "compile_cases", None)
    distinct: list[Any] = []
    for case in compile_cases() if compile_cases else []:
        if case not in distinct:
            distinct.append(case)
    names = [case.name for case in distinct]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"different configurations have one name: {', '.join(sorted(twice))}")
    return distinct


def compile_module(
    module: str, architectures: Sequence[int], only: str, pool: ProcessPoolExecutor
) -> Iterator[Compiled]:
    """All configurations of a module whose name holds ``only``; a module that cannot be imported is one that failed."""
    try:
        cases = cases_of(module)
    except Exception as error:  # a broken module must not hide the others
        yield Compiled(module, "import", architectures[0], error=one_line(error))
        return
    wanted = [
        (module, index, architecture)
        for index, case in enumerate(cases)
        for architecture in architectures
        if only in f"{module} {case.name}" and architecture in case.compute_capabilities
    ]
    # Neighbours in the list are alike: big chunks would give one process all the slow ones.
    yield from pool.map(compile_case, wanted)


def compile_case(which: tuple[str, int, int]) -> Compiled:
    """Compile one configuration, in a process of the pool: (module, index of its case, compute capability)."""
    module, index, architecture = which
    case = cases_of(module)[index]
    entry = Compiled(module, case.name, architecture, case.num_warps, case.num_stages)
    started = time.perf_counter()
    try:
        compiled = compile_for(case, architecture)
        usage = read_cubin(compiled.asm["cubin"])[0]
    except Exception as error:
        return replace(entry, error=one_line(error), seconds=time.perf_counter() - started)
    shared = compiled.metadata.shared  # asked for at launch, of which the machine code says nothing
    return replace(usage, **identity(entry), shared=shared, seconds=time.perf_counter() - started)


def identity(entry: Compiled) -> dict[str, Any]:
    """The fields that say which configuration it is."""
    names = ("module", "name", "compute_capability", "num_warps", "num_stages")
    return {name: getattr(entry, name) for name in names}


def compile_for(case: Any, architecture: int) -> Any:
    """The compiled kernel. Pointers and strides count as multiples of 16, as Triton finds them to be when it launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", ALIGNED]]
        for name, kind in case.signature.items()
        if kind.startswith("*") or (kind.startswith("i") and "stride" in name.lower())
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def make_pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that compile; started anew, since Triton and torch dislike forks."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


# ---- machine code ----


def cuobjdump() -> str:
    """Triton's own tool, else the CUDA toolkit's."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if tool is None:
        raise FileNotFoundError(f"cuobjdump is neither at {bundled} nor on PATH")
    return tool


def read_cubin(cubin: bytes) -> list[Compiled]:
    """What each kernel of a cubin needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return parse_usage(done.stdout)


def parse_usage(text: str) -> list[Compiled]:
    """From the output of ``cuobjdump --dump-resource-usage``."""
    found, name = [], ""
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            name = match.group(1)
        elif match := USAGE.search(line):
            registers, stack, shared, local = map(int, match.groups())
            found.append(Compiled("", name, 0, registers=registers, local=stack + local, shared=shared))
    if not found:
        raise ValueError(f"no resource usage in: {text[:200]!r}")
    return found


# ---- CUDA C++ ----


def compile_cuda(architectures: Sequence[int], only: str = "") -> Iterator[Compiled]:
    """Every kernel of every ``csrc/cuda/*.cu``; nothing without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return
    for source in sorted(CUDA_SOURCES.glob("*.cu")):
        for architecture in architectures:
            if only in source.name:
                yield from compile_cuda_source(nvcc, source, architecture)


def compile_cuda_source(nvcc: str, source: Path, architecture: int) -> list[Compiled]:
    """One source for one architecture."""
    suffix = "a" if architecture == 90 else ""  # as setup.py builds
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-cubin", f"-arch=sm_{architecture}{suffix}", "-O3", "-std=c++17", "-Xptxas", "-v"]
        command += ["--keep", "--keep-dir", folder]
        command += [f"-I{CUDA_SOURCES}"]
        command += [str(source), "-o", f"{folder}/kernels.cubin"]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        threads = launch_bounds("".join(file.read_text() for file in Path(folder).glob("*.ptx")))
    seconds = time.perf_counter() - started
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
        return [Compiled(source.name, "compilation", architecture, error=complaint.strip(), seconds=seconds)]
    kernels = parse_ptxas(done.stderr, threads)
    kernels = [replace(kernel, module=source.name, compute_capability=architecture) for kernel in kernels]
    return [replace(kernel, seconds=seconds / len(kernels)) for kernel in kernels]


def launch_bounds(ptx: str) -> dict[str, int]:
    """Most threads of a block of each kernel, from ``__launch_bounds__``, by mangled name."""
    return {name: int(threads) for name, threads in PTX_BOUNDS.findall(ptx)}


def parse_ptxas(text: str, threads: Mapping[str, int]) -> list[Compiled]:
    """From the output of ``nvcc -Xptxas -v``, which does not say how many threads a block has."""
    found: list[Compiled] = []
    for line in text.splitlines():
        if match := PTXAS_ENTRY.search(line):
            name = match.group(1)
            found.append(Compiled("", demangle(name), 0, num_warps=threads.get(name, MOST_THREADS) // 32))
        elif found and (match := PTXAS_STACK.search(line)):
            found[-1] = replace(found[-1], local=max(map(int, match.groups())))
        elif found and (match := PTXAS_USED.search(line)):
            shared = PTXAS_SHARED.search(line)
            found[-1] = replace(found[-1], registers=int(match.group(1)), shared=int(shared.group(1)) if shared else 0)
    return found


def demangle(name: str) -> str:
    """The name as it stands in the source, if c++filt is here."""
    if shutil.which("c++filt") is None:
        return name
    return subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=False).stdout.strip() or name


def tool_versions() -> Mapping[str, str]:
    """Triton, its assemblers, and nvcc; empty where one is missing."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tools = {name: str(folder / name) for name in ("ptxas", "ptxas-blackwell")} | {"nvcc": shutil.which("nvcc") or ""}
    return {"triton": triton.__version__} | {name: version_of(path) for name, path in tools.items()}


def version_of(tool: str) -> str:
    """What ``tool --version`` calls its version."""
    if not tool or not os.path.exists(tool):
        return ""
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else text.strip()


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's kind and the start of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


ARCHITECTURES = tuple(LIMITS)
