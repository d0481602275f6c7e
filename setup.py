# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ kernels of ``csrc/cpu``; everything else is declared in pyproject.toml.

One library, ``vllm_rocketkv/kernels/_cpu*.so``: ``kernels.cpp`` is compiled once for each instruction set, and the library
picks one when it runs. ``ROCKETKV_SANITIZE=1`` builds ``_cpu_sanitize*.so`` with AddressSanitizer and UndefinedBehaviorSanitizer.

Needs g++ (or what CXX names) and the torch that vLLM pins, so pip must not isolate the build:
``pip install --no-build-isolation -e .``
"""

from __future__ import annotations

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

SOURCES = Path("csrc/cpu")
SANITIZE = os.environ.get("ROCKETKV_SANITIZE") == "1"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ISA_FLAGS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS |= {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}
if "CXX" in os.environ:  # setuptools would link with the compiler that Python was built with
    os.environ.setdefault("LDCXXSHARED", f"{os.environ['CXX']} -shared")


class BuildKernels(build_ext):
    """setuptools gives all sources the same flags; here each instruction set has its own."""

    def build_extension(self, extension: Extension) -> None:
        """Compile every (source, instruction set), then link them into one library."""
        import torch
        from torch.utils import cpp_extension

        program = self.compiler.compiler_so_cxx[0]
        if shutil.which(program) is None:
            raise SystemExit(
                f"rocketkv: its kernels need a C++ compiler, and {program!r} was not found: install g++ or set CXX."
            )

        flags = ["-std=c++20", "-O3", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-uninitialized"]
        flags += ["-g0", "-ffp-contract=off", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if SANITIZE else []
        if SANITIZE:
            flags += ["-O1", "-g", "-fno-omit-frame-pointer", *sanitizers]
        build = Path(self.build_temp) / ("sanitize" if SANITIZE else "release")
        includes = [str(SOURCES), *cpp_extension.include_paths()]

        def compile_one(job: tuple[Path, str, list[str]]) -> list[str]:
            source, folder, own_flags = job
            print(f"    compiling {source} ({folder})", flush=True)
            return self.compiler.compile(
                [str(source)], output_dir=str(build / folder), include_dirs=includes, extra_postargs=flags + own_flags
            )

        plain = [p for p in sorted(SOURCES.glob("*.cpp")) if p.name != "kernels.cpp"]
        jobs = [(SOURCES / "kernels.cpp", isa, [*own, f"-DROCKETKV_ISA={isa}"]) for isa, own in ISA_FLAGS.items()]
        jobs += [(source, "common", []) for source in plain]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, jobs) for name in names]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            libraries=["torch_cpu", "c10", "torch"],
            library_dirs=cpp_extension.library_paths(),
            extra_postargs=["-fopenmp", *sanitizers],
            target_lang="c++",
        )


name = "vllm_rocketkv.kernels._cpu" + ("_sanitize" if SANITIZE else "")
sources = [str(p) for p in sorted(SOURCES.glob("*.cpp"))]
headers = [str(p) for p in sorted(SOURCES.glob("*.h"))]
setup(ext_modules=[Extension(name, sources, depends=headers)], cmdclass={"build_ext": BuildKernels})
