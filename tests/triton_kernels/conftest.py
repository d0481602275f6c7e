# SPDX-License-Identifier: Apache-2.0
"""Makes the interpreter bearable (``tests/conftest.py`` chooses it)."""

from tests.v2_runner.fast_interpreter import speed_up

speed_up()
