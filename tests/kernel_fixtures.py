# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernels' tests: a module that imports them has them for all of its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_rocketkv.kernels.cpu import ops


@pytest.fixture(params=ops.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this processor has kernels for."""
    before = ops.isa()
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
