# SPDX-License-Identifier: Apache-2.0
"""Speed of vllm_rocketkv against plain vLLM: `python -m benchmarks.run --help`."""
