# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ kernels of ``csrc/cpu`` and, where it can, those of ``csrc/cuda``; all else is declared in pyproject.toml.

One library, ``vllm_rocketkv/kernels/_cpu*.so``: ``kernels.cpp`` is compiled once for each instruction set, and the library
picks one when it runs. ``ROCKETKV_SANITIZE=1`` builds ``_cpu_sanitize*.so`` with AddressSanitizer and UndefinedBehaviorSanitizer.

Needs g++ (or what CXX names) and the torch that vLLM pins, so pip must not isolate the build:
``pip install --no-build-isolation -e .``

With nvcc and a torch for CUDA it also builds ``vllm_rocketkv/kernels/_cuda*.so``; ``ROCKETKV_CUDA=0`` leaves it out.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
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


# ------------------------------------------------------------------------------------------------ csrc/cuda

CUDA_SOURCES = Path("csrc/cuda")
CUDA_NAME = "vllm_rocketkv.kernels._cuda"
CUDA_TARGETS = {"sm_90": "arch=compute_90a,code=sm_90a", "sm_100": "arch=compute_100,code=sm_100"}
CUDA_TARGETS |= {"sm_80": "arch=compute_80,code=[sm_80,compute_80]"}  # with PTX, for every GPU that is not named


def ask_nvcc(home: Path, option: str) -> str:
    """What nvcc says."""
    return subprocess.run([home / "bin" / "nvcc", option], capture_output=True, text=True, check=True).stdout


def cuda_home() -> Path | None:
    """Where CUDA is, if its library can be built: it is optional, since the Triton kernels do the same. Says why if not."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:  # a source distribution needs no torch
        return None
    home = Path(cpp_extension.CUDA_HOME or "")
    if os.environ.get("ROCKETKV_CUDA") == "0":
        reason = "ROCKETKV_CUDA is 0"
    elif torch.version.cuda is None:
        reason = "the installed torch is one without CUDA"
    elif not (home / "bin" / "nvcc").exists():
        reason = "nvcc was not found (set CUDA_HOME)"
    else:
        if f"release {torch.version.cuda.split('.')[0]}." in ask_nvcc(home, "--version"):
            return home
        reason = f"nvcc is not of torch's CUDA {torch.version.cuda}"
    print(f"rocketkv: csrc/cuda is not built, GPUs will use the Triton kernels: {reason}", flush=True)
    return None


class BuildAllKernels(BuildKernels):
    """Adds the CUDA library where it can be built."""

    cuda_home: Path | None = None

    def finalize_options(self) -> None:
        """Declare the library; it must be known before setuptools works out where each one goes."""
        modules = self.distribution.ext_modules
        if all(extension.name != CUDA_NAME for extension in modules):
            self.cuda_home = cuda_home()
            if self.cuda_home is not None:
                sources = [str(CUDA_SOURCES / name) for name in ("kernels.cu", "bindings.cpp")]
                depends = [str(p) for p in sorted(CUDA_SOURCES.glob("*.h"))]
                modules.append(Extension(CUDA_NAME, sources, depends=depends))
        super().finalize_options()

    def build_extension(self, extension: Extension) -> None:
        """Compile the kernels with nvcc and the bindings, which need no header of CUDA, with the C++ compiler."""
        if extension.name != CUDA_NAME:
            return super().build_extension(extension)
        import torch
        from torch.utils import cpp_extension

        home = self.cuda_home or Path(cpp_extension.CUDA_HOME)
        build = Path(self.build_temp) / "cuda"
        build.mkdir(parents=True, exist_ok=True)
        kernels = str(build / "kernels.o")
        known = ask_nvcc(home, "--list-gpu-code").split()  # CUDA 12.8 is the first that knows sm_100
        flags = [f"-gencode={target}" for code, target in CUDA_TARGETS.items() if code in known]
        flags += ["-std=c++17", "-O3", "--threads=3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        print(f"    compiling {CUDA_SOURCES / 'kernels.cu'}", flush=True)
        subprocess.run([home / "bin" / "nvcc", *flags, "-c", CUDA_SOURCES / "kernels.cu", "-o", kernels], check=True)
        flags = ["-std=c++20", "-O2", "-fvisibility=hidden", "-g0"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        includes = [str(CUDA_SOURCES), *cpp_extension.include_paths()]
        source = str(CUDA_SOURCES / "bindings.cpp")
        print(f"    compiling {source}", flush=True)
        bindings = self.compiler.compile([source], output_dir=str(build), include_dirs=includes, extra_postargs=flags)
        self.compiler.link_shared_object(
            [kernels, *bindings],
            self.get_ext_fullpath(extension.name),
            libraries=["torch_cpu", "c10", "torch", "cudart"],
            library_dirs=[*cpp_extension.library_paths(), str(home / "lib64")],
            target_lang="c++",
        )


name = "vllm_rocketkv.kernels._cpu" + ("_sanitize" if SANITIZE else "")
sources = [str(p) for p in sorted(SOURCES.glob("*.cpp"))]
headers = [str(p) for p in sorted(SOURCES.glob("*.h"))]
setup(ext_modules=[Extension(name, sources, depends=headers)], cmdclass={"build_ext": BuildAllKernels})
