# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ kernels of ``csrc/`` when they are there; everything else is declared in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.extension import Extension


def cpu_extensions() -> list[Extension]:
    """One shared library per ``csrc/cpu/*.cpp``; an absent ``csrc/`` gives a pure Python package."""
    return [
        Extension(
            name=f"vllm_rocketkv.kernels._{source.stem}",
            sources=[source.as_posix()],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3"],
        )
        for source in sorted(Path("csrc/cpu").glob("*.cpp"))
    ]


setup(ext_modules=cpu_extensions())
