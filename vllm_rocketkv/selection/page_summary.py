# SPDX-License-Identifier: Apache-2.0
"""The KT table: bounds of the keys of each page, rounded outward (I8), in a small dtype."""

from __future__ import annotations

import torch
from torch import Tensor

KT_BITS = {
    torch.float8_e5m2: torch.int8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
"""KT dtypes and the integer type of the same width. All are sign and magnitude and have infinities."""


def _round(x: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """Round to nearest, then step the bits of what landed on the wrong side of x to its neighbour.

    One more in the bits is one step away from zero, whatever the sign. Rounding keeps the sign, so a value that became
    zero has the zero of its own sign and steps to the right subnormal; the largest number steps to infinity, and back.
    NaN stays.
    """
    if x.dtype == dtype:
        return x
    x = x.float()
    rounded = x.to(dtype)
    wrong = rounded.float() < x if up else rounded.float() > x
    away = (x > 0) if up else (x < 0)
    bits = rounded.view(KT_BITS[dtype])
    return torch.where(wrong, torch.where(away, bits + 1, bits - 1), bits).view(dtype)


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest value of the KT ``dtype`` that is <= x (float16, bfloat16 or float32), element by element."""
    return _round(x, dtype, up=False)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Smallest value of the KT ``dtype`` that is >= x (float16, bfloat16 or float32), element by element."""
    return _round(x, dtype, up=True)


def summarise(keys: Tensor, num_valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Element-wise bounds of the first ``num_valid`` keys of every page: min <= key <= max, always, as tight as
    ``dtype`` allows.

    ``keys`` [pages, page_size, H, D]; ``num_valid`` int64 [pages] in 0 .. page_size. Returns (min, max), each [pages,
    H, D] of ``dtype``; an empty page gives (+inf, -inf), the neutral elements of both.
    """
    slots = torch.arange(keys.shape[1], device=keys.device)
    beyond = (slots >= num_valid.unsqueeze(1))[:, :, None, None]
    return (
        round_down(keys.masked_fill(beyond, torch.inf).amin(1), dtype),
        round_up(keys.masked_fill(beyond, -torch.inf).amax(1), dtype),
    )
