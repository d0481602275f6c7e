# SPDX-License-Identifier: Apache-2.0
"""Computations without policy: ``reference`` is the truth, everything else must agree with it."""
