# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels against ``kernels/reference.py``, in Triton's interpreter (``tests/conftest.py``)."""
