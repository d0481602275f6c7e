# SPDX-License-Identifier: Apache-2.0
"""One layer's paged cache as Triton's kernels see it.

vLLM's GPU backends store a token's key and value side by side, ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` in
either physical order of heads and tokens, so prompt blocks and private blocks have one layout here, and a selected page is one
run of memory where heads come before tokens (HND).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_rocketkv.kernels.triton.numbers import CODES, KINDS


@dataclass(frozen=True)
class CacheView:
    """Tensors over the same pages, as integer codes (``numbers.py``)."""

    kv: torch.Tensor
    """``[num_blocks, num_kv_heads, block_size, 2 * head_size]``: key, then value; the last stride is 1."""
    kt: torch.Tensor
    """``[num_blocks, num_kv_heads, head_size, 2 (min, max), block_size / page_size]``, contiguous within a block: the one of min
    and max that a query's sign asks for is one run of memory over the pages of a block. Both are the mean if ``kt_is_mean``. No
    pages without a KT table."""
    kv_kind: int
    kt_kind: int
    page_size: int
    """Tokens of a KT page; 0 without a KT table."""
    key_scale: float = 1.0
    """A stored key times this is the real one; 1 but for fp8. KT bounds are in stored units, too."""
    value_scale: float = 1.0
    kt_is_mean: bool = False
    """A KT page holds the mean of its keys (float32, rounded to nearest), not their bounds."""

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.kv.shape[1]

    @property
    def block_size(self) -> int:
        """B, tokens."""
        return self.kv.shape[2]

    @property
    def head_size(self) -> int:
        """D."""
        return self.kv.shape[3] // 2

    @property
    def pages_per_block(self) -> int:
        """KT pages of a block."""
        return self.block_size // self.page_size


def cache_view(
    kv_cache: torch.Tensor,
    kv_dtype: torch.dtype,
    kt_dtype: torch.dtype,
    kt_offset_bytes: int,
    page_size: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    kt_is_mean: bool = False,
) -> CacheView:
    """View vLLM's tensor of a layer, and the KT tables ``kt_offset_bytes`` behind the start of each of its blocks.

    ``kv_cache`` as in ``CacheView.kv``, of any dtype of the width of ``kv_dtype``; its storage is at least one page for each
    block, a page being ``kv_cache.stride(0)`` elements.
    """
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    kv_kind, kt_kind = KINDS[kv_dtype], KINDS[kt_dtype]
    kv = kv_cache.view(CODES[kv_kind])
    code = CODES[kt_kind]
    if page_size == 0:
        kt = kv.new_empty(num_blocks, num_kv_heads, width // 2, 2, 0, dtype=code)
        return CacheView(kv, kt, kv_kind, kt_kind, 0, key_scale, value_scale)
    pages = block_size // page_size
    shape = (num_blocks, num_kv_heads, width // 2, 2, pages)
    size = code.itemsize
    block_bytes = kv_cache.stride(0) * kv_cache.element_size()
    start = kv_cache.storage_offset() * kv_cache.element_size() + kt_offset_bytes
    if block_bytes % size or start % size:
        raise ValueError(f"a KT table of {kt_dtype} must start at a multiple of {size} bytes")
    strides = (block_bytes // size, width * pages, 2 * pages, pages, 1)
    storage = torch.empty(0, dtype=code, device=kv_cache.device).set_(kv_cache.untyped_storage())
    kt = storage.as_strided(shape, strides, start // size)
    return CacheView(kv, kt, kv_kind, kt_kind, page_size, key_scale, value_scale, kt_is_mean)
