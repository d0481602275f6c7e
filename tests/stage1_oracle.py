# SPDX-License-Identifier: Apache-2.0
"""Cases of stage 1, for the tests of all its kernels, and when a choice of tokens is as good as the reference's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

NEAR = 1e-5
"""Relative difference of two float64 scores that float32 need not tell apart."""


@dataclass(frozen=True)
class Stage1Case:
    """One layer's prompt and what stage 1 is asked."""

    dtype: torch.dtype = torch.bfloat16  # of the cache
    model_dtype: torch.dtype = torch.bfloat16
    head_size: int = 64
    num_kv_heads: int = 2
    group: int = 3
    block_size: int = 32
    num_tokens: int = 333
    window: int = 32
    num_kept: int = 101
    kernel_size: int = 7
    sinks: int = 0
    softcap: float = 0.0
    softmax: str = "all"
    seed: int = 0

    def __str__(self) -> str:
        names = [str(x).removeprefix("torch.") for x in (self.dtype, self.model_dtype)]
        return "-".join([*names, f"D{self.head_size}", f"G{self.group}", self.detail, f"N{self.num_tokens}"])

    @property
    def detail(self) -> str:
        """What else its name tells."""
        return f"W{self.window}"

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def key_scale(self) -> float:
        return 0.37 if self.dtype.itemsize == 1 else 1.0


def assert_equally_good(kept: Tensor, expected: Tensor, scores: Tensor) -> None:
    """Both keep the same tokens of each head, but for tokens whose reference scores are as good as equal."""
    assert kept.shape == expected.shape
    for head, (ours, theirs) in enumerate(zip(kept.tolist(), expected.tolist(), strict=True)):
        assert ours == sorted(set(ours)), "positions must be ascending"
        swapped_in, swapped_out = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        for token, other in itertools.product(swapped_in, swapped_out):
            a, b = float(scores[head, token]), float(scores[head, other])
            assert a == b or abs(a - b) <= NEAR * max(a, b), f"head {head} keeps {token} ({a}), not {other} ({b})"
