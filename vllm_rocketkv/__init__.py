# SPDX-License-Identifier: Apache-2.0
"""RocketKV for vLLM: two-stage KV cache compression as a native attention backend (arXiv 2502.14051)."""

__version__ = "0.1.0"
