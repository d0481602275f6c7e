# SPDX-License-Identifier: Apache-2.0
"""Worker side: the attention backend, its metadata and its implementation."""
