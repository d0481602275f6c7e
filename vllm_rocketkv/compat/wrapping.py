# SPDX-License-Identifier: Apache-2.0
"""How a method of vLLM is replaced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace method ``owner.name`` by ``make(original)``, once per process. A class method is replaced by a static one, since
    its original is already bound to the class."""
    original = getattr(owner, name)
    if getattr(original, "_rocketkv", False):
        return
    wrapper: Any = functools.wraps(original)(make(original))
    wrapper._rocketkv = True
    setattr(owner, name, staticmethod(wrapper) if inspect.ismethod(original) else wrapper)
