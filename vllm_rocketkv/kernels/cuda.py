# SPDX-License-Identifier: Apache-2.0
"""Binding of ``csrc/cuda``: the selections and the compaction as CUDA C++, where ``setup.py`` could build them.

The kernels of ``kernels/triton`` do the same and need no compiler; these are for NVIDIA GPUs alone, and optional:
``available()`` says whether they can be used. They launch on the current stream and never wait for the device.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_rocketkv.kernels.triton.cache import CacheView

OLDEST_CAPABILITY = (8, 0)
"""Of the GPUs that ``setup.py`` builds for; PTX carries the code to those that came after."""


MOST_PAGES = 16384
"""Pages of a sequence up to which ``select_pages`` should be taken, by estimate: beyond them, one multiprocessor's six or seven
passes take longer than four launches that share the work."""


def load(library: Path) -> None:
    """Register ``torch.ops.rocketkv_cuda.*`` from a library, and their fake implementations; all return nothing."""

    def nothing(*args: Any) -> None:
        return None

    torch.ops.load_library(library)
    for name in ("top_tokens", "select_pages", "compact"):
        torch.library.register_fake(f"rocketkv_cuda::{name}", nothing)


@cache
def available() -> bool:
    """Whether the library was built and the current GPU runs it; loads it then."""
    found = sorted(Path(__file__).parent.glob("_cuda.*"))
    if not found or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        return False
    load(found[0])
    return True


def top_tokens(keys: torch.Tensor, num_best: int, num_last: int = 0) -> torch.Tensor:
    """As ``top_tokens`` of ``kernels/triton/top_tokens.py``, in one launch: int32 ``[Hkv, num_best + num_last]``.

    ``keys`` int32 ``[Hkv, n]``, rows at any stride. Reads them six times as a rule, seven times at most.
    """
    out = torch.empty(keys.shape[0], num_best + num_last, dtype=torch.int32, device=keys.device)
    torch.ops.rocketkv_cuda.top_tokens(keys, num_best, num_last, out)
    return out


def most_listed(page_size: int, topk_tokens: int, sink_tokens: int, recent_tokens: int) -> int:
    """The most pages that ``select_pages`` lists for one row and head, however many its sequence has."""

    def pages(tokens: int) -> int:
        return -(-tokens // page_size)

    return pages(topk_tokens) + 1 + pages(sink_tokens) + pages(recent_tokens) + (recent_tokens > 0)


def select_pages(
    keys: torch.Tensor,
    num_tokens: torch.Tensor,
    page_size: int,
    dense_below: int,
    topk_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    by_page: bool,
    lists: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """List the pages that each row reads: ``hsa_choose`` of ``kernels/reference.py``.

    ==============  ==================================================================================================
    ``keys``        int32 ``[rows, Hkv, max_pages]``: the scores of the pages, as integers of the same order
    ``num_tokens``  int32 ``[rows]``, at any stride; nothing is listed for rows of at most ``dense_below`` or 0 tokens
    ``lists``       int32 ``[rows, Hkv, capacity]``, capacity ``most_listed(...)`` or ``max_pages``: pages, ascending,
                    each as page * (page_size + 1) + how many of its unforced tokens are read, the first ones
    ``lengths``     int32 ``[rows, Hkv, parts]``: how many those are; all parts but the first get 0
    ==============  ==================================================================================================

    Sinks and recent tokens (whole pages of them, if ``by_page``) are forced: read besides, and their pages listed. The lists
    are those that ``attend_kernel`` of ``kernels/triton/combine.py`` takes, parts being its splits: this one launch does the
    work of ``digit_kernel``, three times, and ``gather_kernel``.
    """
    torch.ops.rocketkv_cuda.select_pages(
        keys, num_tokens, page_size, dense_below, topk_tokens, sink_tokens, recent_tokens, by_page, lists, lengths
    )


def compact(cache: CacheView, prompt_blocks: torch.Tensor, private_blocks: torch.Tensor, kept: torch.Tensor) -> None:
    """As ``compact`` of ``kernels/triton/compact.py``: copies are exact, KT bounds rounded outward. A KT table of means
    (``kt_is_mean``) is left to Triton's.

    ``prompt_blocks`` and ``private_blocks`` int32 or int64 ids, ``kept`` int32 ``[Hkv, num_kept]`` positions in the prompt.
    """
    assert not cache.kt_is_mean
    torch.ops.rocketkv_cuda.compact(
        cache.kv, cache.kt, prompt_blocks, private_blocks, kept, cache.kv_kind, cache.kt_kind, cache.page_size
    )
