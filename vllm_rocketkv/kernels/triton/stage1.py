# SPDX-License-Identifier: Apache-2.0
"""Stage 1: the prompt tokens that each KV head keeps (arXiv 2502.14051, section 3.3), of one request and one layer.

Three steps, each usable alone; the truth of all is ``kernels/reference.py``, ``window_scores`` and ``keep_tokens``:

1. ``window_scores.window_scores``: how much the observation window attends to each earlier token, float32 [Hkv, N - W]
2. ``pool_scores`` (here): the best score near each token, as an integer that ranks as the score does, int32 [Hkv, N - W]
3. ``top_tokens.top_tokens``: the best of these, ascending, and the window, int32 [Hkv, num_kept]

It runs in the step that computes the last token of a prompt, outside CUDA graphs: it allocates its working memory. Nothing waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.launch import NUM_STAGES, CompileCase
from vllm_rocketkv.kernels.triton.top_tokens import top_tokens
from vllm_rocketkv.kernels.triton.window_scores import window_scores

_CONSTANTS = {"BLOCK": 1024}
_WARPS = 4

LOWEST_RANK = tl.constexpr(-(2**31))
"""What is not a number; less than the rank of any number."""
HIGHEST_RANK = tl.constexpr(2**31 - 1)
"""Tokens that are always kept; more than the rank of infinity."""


@triton.jit(do_not_specialize=["num_tokens", "half", "num_sinks"])
def _pool(scores, ranks, num_tokens, half, num_sinks, BLOCK: tl.constexpr):
    """Ranks of the maxima of the 2 half + 1 scores around each token, cut off at the ends.

    Grid (blocks of tokens, Hkv). ``scores`` float32 [Hkv, num_tokens], ``ranks`` int32 [Hkv, num_tokens]. Bytes: 4 read and 4
    written a token; neighbours come from the first-level cache.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * num_tokens
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for offset in range(-half, half + 1):
        near = token + offset
        score = tl.load(scores + first + near, mask=(near >= 0) & (near < num_tokens), other=float("-inf"))
        highest = tl.maximum(highest, score)  # of a number and NaN, the number
    bits = (highest + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative numbers' magnitudes rank the other way round
    rank = tl.where(highest == float("-inf"), LOWEST_RANK, rank)
    rank = tl.where(token < num_sinks, HIGHEST_RANK, rank)
    tl.store(ranks + first + token, rank, mask=token < num_tokens)


def pool_scores(scores: torch.Tensor, kernel_size: int, sink_tokens: int = 0) -> torch.Tensor:
    """Integers that rank as the centred maxima of ``kernel_size`` (odd) scores do: int32 [Hkv, n].

    ``scores`` float32 [Hkv, n], contiguous, none of them negative infinity. Maxima ignore NaN; where there is nothing else, it
    ranks last (one key that is not a number makes all of its head's scores such). The first ``sink_tokens`` rank highest.
    """
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, not {kernel_size}")
    Hkv, num_tokens = scores.shape
    ranks = torch.empty(Hkv, num_tokens, dtype=torch.int32, device=scores.device)
    if ranks.numel():
        grid = (triton.cdiv(num_tokens, _CONSTANTS["BLOCK"]), Hkv)
        half = min(kernel_size // 2, num_tokens - 1)
        _pool[grid](scores, ranks, num_tokens, half, sink_tokens, **_CONSTANTS, num_warps=_WARPS, num_stages=NUM_STAGES)
    return ranks


def keep_tokens(
    window_query: torch.Tensor,
    cache: CacheView,
    prompt_blocks: torch.Tensor,
    num_prompt_tokens: int,
    num_kept: int,
    scale: float,
    softcap: float = 0.0,
    softmax_over_all: bool = True,
    kernel_size: int = 63,
    sink_tokens: int = 0,
    choose: Callable[[torch.Tensor, int, int], torch.Tensor] = top_tokens,
) -> torch.Tensor:
    """Positions of the prompt tokens that each KV head keeps, ascending: int32 [Hkv, min(num_kept, N)].

    The W tokens of the window, the first ``sink_tokens``, and those that the window attends to most; ``num_kept``, at least W,
    counts all three. ``window_query`` [W, Hq, D]: the queries of the last W of the N tokens; ``prompt_blocks`` int32
    [at least ceil(N / block_size)]: where the prompt lies. ``choose`` does what ``top_tokens`` does.
    """
    W, Hq, D = window_query.shape
    if num_kept >= num_prompt_tokens:
        everything = torch.arange(num_prompt_tokens, dtype=torch.int32, device=window_query.device)
        return everything.repeat(cache.num_kv_heads, 1)
    if num_kept < W:
        raise ValueError(f"cannot keep a window of {W} tokens in a budget of {num_kept}")
    if cache.head_size != D or Hq % cache.num_kv_heads or window_query.stride(2) != 1:
        raise ValueError(f"queries {tuple(window_query.shape)} do not fit keys {tuple(cache.kv.shape)}")
    if len(prompt_blocks) * cache.block_size < num_prompt_tokens:
        raise ValueError(f"{len(prompt_blocks)} blocks of {cache.block_size} do not hold {num_prompt_tokens} tokens")
    scores = window_scores(window_query, cache, prompt_blocks, num_prompt_tokens, scale, softcap, softmax_over_all)
    return choose(pool_scores(scores, kernel_size, sink_tokens), num_kept - W, W)


def compile_cases() -> Iterator[CompileCase]:
    """The pool; the other steps' modules have their own."""
    counts = {"num_tokens": "i32", "half": "i32", "num_sinks": "i32"}
    yield CompileCase("pool", _pool, {"scores": "*fp32", "ranks": "*i32"} | counts, _CONSTANTS, _WARPS)
