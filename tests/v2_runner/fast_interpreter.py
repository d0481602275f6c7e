# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, without what takes most of its time."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the language once a launch for each module that functions know it as.

    Triton 3.9 patches it anew in every call of a jitted function by another.
    """
    patched: set[int] = set()
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        names = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if names <= patched:
            return None
        patched.update(names)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
