# SPDX-License-Identifier: Apache-2.0
"""What this package uses of vLLM, as one table that any version's sources can be held against.

``tests/test_vllm_contract.py`` does so for the installed one; for another, unpack its wheel and run

    python -m tests.vllm_contract PATH/TO/site-packages/vllm
"""

from __future__ import annotations

from pathlib import Path

from tests.vllm_contract.checks import Entry
from tests.vllm_contract.engine_core import ENGINE_CORE
from tests.vllm_contract.gpu import GPU
from tests.vllm_contract.source import Package
from tests.vllm_contract.start_up import START_UP
from tests.vllm_contract.worker import WORKER

TABLE: list[Entry] = [*START_UP, *ENGINE_CORE, *WORKER, *GPU]


def problems(root: Path) -> list[str]:
    """A sentence for each thing of the vLLM in ``root`` that is not as the table says."""
    package = Package(root)
    return [problem for entry in TABLE for problem in entry.problems(package)]
