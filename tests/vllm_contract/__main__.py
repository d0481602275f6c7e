# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.vllm_contract PATH/TO/site-packages/vllm``: the table against a vLLM that need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.vllm_contract import TABLE, problems
from tests.vllm_contract.source import Package


def main(arguments: list[str]) -> int:
    """Print what is not as expected. Returns the exit status."""
    if len(arguments) != 1 or not (root := Path(arguments[0]).resolve()).joinpath("__init__.py").is_file():
        print("usage: python -m tests.vllm_contract PATH/TO/site-packages/vllm", file=sys.stderr)
        return 2
    found = problems(root)
    for problem in found:
        print(problem)
    version = Package(root).version or "of unknown version"
    print(f"vLLM {version}: {len(found)} problems, {len(TABLE)} entries")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
