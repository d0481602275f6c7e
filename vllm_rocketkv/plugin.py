# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (group ``vllm.general_plugins``), run in the API process, the engine core and every worker.

It makes the name ``rocketkv`` known and nothing else; what changes vLLM's behaviour is installed only where the backend is
selected (``compat.activate``), so that an installed but unselected package leaves vLLM as it is.
"""

from __future__ import annotations


def register() -> None:
    """Make ``--attention-backend rocketkv`` selectable. Safe to call more than once."""
    from vllm_rocketkv import compat

    compat.register_backend_name()
    compat.check_configuration_at_startup()
    compat.let_cpu_platform_select_us()
