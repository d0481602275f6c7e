# SPDX-License-Identifier: Apache-2.0
"""``csrc/cuda`` built for the host, for tests: its launches with tensors in place of pointers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_rocketkv.kernels import cuda
from vllm_rocketkv.kernels.triton.cache import CacheView

SOURCES = Path(__file__).parent.parent / "csrc" / "cuda"
COMPILE = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}"]


def build(folder: Path, name: str, *arguments: str) -> Path:
    library = folder / f"{name}.so"
    result = subprocess.run([*COMPILE, *arguments, "-o", str(library)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return library


def unpack(packed: torch.Tensor, count: int, page_size: int) -> list[tuple[int, int]]:
    """A list of pages as (page, tokens taken); -7 must be left behind it."""
    assert 0 <= count < len(packed)
    assert (packed[count:] == -7).all(), "written beyond the length"
    return [divmod(number, page_size + 1) for number in packed[:count].tolist()]


class Model:
    """The C interface of ``host_model.cpp``, with tensors in place of pointers."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.rocketkv_encode_bound.restype = ctypes.c_uint32
        self.library.rocketkv_most_listed.restype = ctypes.c_int64

    def run(self, name: str, *arguments: Any, threads: int = 0, order: int = 0) -> None:
        """Arguments are tensors and integers; tuples of integers are strides, 64 bits wide."""
        flat: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                flat.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, tuple):
                flat += [ctypes.c_int64(stride) for stride in argument]
            else:
                flat.append(ctypes.c_int(argument))
        self.library.rocketkv_model(ctypes.c_int(threads), ctypes.c_uint64(order))
        function = getattr(self.library, f"rocketkv_{name}")
        function.restype = ctypes.c_char_p
        failure = function(*flat)
        assert failure is None, failure.decode()

    def top_tokens(
        self, keys: torch.Tensor, k: int, threads: int = 0, order: int = 0, num_last: int = 0
    ) -> torch.Tensor:
        heads, size = keys.shape
        count = min(k, size) + num_last
        row = torch.full((heads, count + 3), -7, dtype=torch.int32)
        sizes = heads, size, count - num_last, num_last
        self.run("top_tokens", keys, (keys.stride(0),), *sizes, row, (row.stride(0),), threads=threads, order=order)
        assert (row[:, count:] == -7).all(), "written beyond k"
        return row[:, :count]

    def select_pages(
        self,
        keys: torch.Tensor,
        num_tokens: Sequence[int],
        page_size: int,
        topk: int,
        sinks: int,
        recent: int,
        by_page: bool,
        dense_below: int = 0,
        threads: int = 0,
        order: int = 0,
    ) -> list[list[list[tuple[int, int]]]]:
        """``[row][head]``: (page, unforced tokens taken)."""
        rows, heads, pages = keys.shape
        capacity = min(pages, cuda.most_listed(page_size, topk, sinks, recent))
        lists = torch.full((rows, heads, capacity + 1), -7, dtype=torch.int32)
        lengths = torch.full((rows, heads, 3), -7, dtype=torch.int32)
        table = torch.zeros(rows, 6, dtype=torch.int32)  # the column of a larger table, as in Rows.table
        table[:, 3] = torch.tensor(num_tokens, dtype=torch.int32)
        lengths_of_rows = table[:, 3]
        strides = (keys.stride(0), keys.stride(1))
        self.run(
            *("select_pages", keys, strides, lengths_of_rows, (6,), rows, heads, pages, page_size, dense_below),
            *(topk, sinks, recent, by_page, lists, (lists.stride(0), lists.stride(1)), lengths, lengths.shape[2]),
            threads=threads,
            order=order,
        )
        assert (lengths[:, :, 1:] == 0).all()
        return [
            [unpack(lists[row, head], int(lengths[row, head, 0]), page_size) for head in range(heads)]
            for row in range(rows)
        ]

    def compact(
        self,
        cache: CacheView,
        prompt_blocks: torch.Tensor,
        private_blocks: torch.Tensor,
        kept: torch.Tensor,
        threads: int = 0,
        order: int = 0,
    ) -> None:
        size, kt_size = cache.kv.element_size(), cache.kt.element_size()
        kv_strides = tuple(stride * size for stride in cache.kv.stride()[:3])
        kt_strides = tuple(stride * kt_size for stride in cache.kt.stride()[:2])
        self.run(
            *("compact", cache.kv, kv_strides, cache.kt, kt_strides, cache.kv_kind, cache.kt_kind),
            *(cache.num_kv_heads, cache.head_size, cache.block_size, cache.page_size, prompt_blocks, private_blocks),
            *(prompt_blocks.dtype == torch.int64, kept, (kept.stride(0),), kept.shape[1]),
            threads=threads,
            order=order,
        )
