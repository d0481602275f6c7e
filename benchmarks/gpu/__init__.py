# SPDX-License-Identifier: Apache-2.0
"""Parts of ``benchmarks.kernel_report`` and ``benchmarks.gpu_check``: what GPUs are, what kernels move, how they are timed."""
