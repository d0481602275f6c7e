# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs, one a file; they run on CPUs in Triton's interpreter."""
