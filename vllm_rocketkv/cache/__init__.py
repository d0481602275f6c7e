# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: the KV cache spec and the block manager."""
