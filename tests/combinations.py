# SPDX-License-Identifier: Apache-2.0
"""Cases for tests with many parameters."""

from __future__ import annotations

import itertools
import random
from typing import Any


def combined(axes: dict[str, list[Any]], count: int, draw: random.Random) -> list[dict[str, Any]]:
    """``count`` combinations at random, with every value of every axis as often as the others of its axis."""
    columns = []
    for values in axes.values():
        columns.append(list(itertools.islice(itertools.cycle(values), count)))
        draw.shuffle(columns[-1])
    return [dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)]
