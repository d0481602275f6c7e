# SPDX-License-Identifier: Apache-2.0
"""The truth: RocketKV (arXiv 2502.14051) in plain PyTorch, one request at a time, unpaged, straight from the formulas.

Nothing here is fast and nothing here is shared with the implementations that are tested against it. All arithmetic is
float64, so that a score's error is far below that of the float32 code under test. What is stored is the exception: its last bit
is part of the format, so ``page_means`` says in which order float32 adds.

======  =================================================================================
``N``   keys of the request, tokens (``n``: keys cached at a decode step)
``W``   rows of the observation window, the last W tokens of the N
``D``   head size
``Hq``  query heads; ``Hkv`` KV heads; KV head h serves the query heads hG .. hG+G-1, with G = Hq / Hkv
======  =================================================================================

Two rules hold everywhere: ties go to the lower index, and a score that is not a number ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

KT_BITS = {torch.float8_e5m2: torch.int8, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""KT dtypes and the integer type of the same width. float32 is one too, and rounds nothing."""


def best(scores: Sequence[float], count: int) -> list[int]:
    """Ascending indices of the ``count`` highest scores."""
    ranking = sorted(range(len(scores)), key=lambda i: (math.inf if math.isnan(scores[i]) else -scores[i], i))
    return sorted(ranking[:count])


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits soft-capped to +-``softcap`` as the model does in its own attention; 0 means no cap."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# --------------------------------------------------------------------------------------------- attention


def attend(
    query: Tensor, keys: Tensor, values: Tensor, selected: Sequence[Sequence[int]], scale: float, softcap: float = 0.0
) -> Tensor:
    """Exact attention of one token over the tokens selected for each KV head: softmax(q K^T * scale) V.

    ``query`` [Hq, D]; ``keys``, ``values`` [n, Hkv, D]; ``selected`` token indices of each KV head. Returns float64
    [Hq, D]; a head with nothing selected gives zeros.
    """
    group = query.shape[0] // keys.shape[1]
    out = torch.zeros(query.shape[0], values.shape[-1], dtype=torch.float64)
    for head in range(query.shape[0]):
        tokens = torch.as_tensor(selected[head // group], dtype=torch.long)
        if len(tokens):
            logits = keys[tokens, head // group].double() @ query[head].double() * scale
            out[head] = capped(logits, softcap).softmax(0) @ values[tokens, head // group].double()
    return out


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Causal attention of the last M tokens over all N: ``query`` [M, Hq, D], ``keys`` and ``values`` [N, Hkv, D].

    Returns float64 [M, Hq, D].
    """
    first = keys.shape[0] - query.shape[0]
    rows = [
        attend(row, keys, values, [range(first + i + 1)] * keys.shape[1], scale, softcap) for i, row in enumerate(query)
    ]
    return torch.stack(rows)


# ------------------------------------------------------------------- stage 1: eviction (section 3.3 of the paper)


def window_scores(
    window_query: Tensor,
    keys: Tensor,
    scale: float,
    softmax: str = "all",
    kernel_size: int = 63,
    softcap: float = 0.0,
) -> Tensor:
    """Importance of each prompt token before the observation window, as the window's queries see it.

    ``window_query`` [W, Hq, D], ``keys`` [N, Hkv, D]; returns float64 [Hkv, N - W]:
    max_pool( sum over window rows and the group's query heads of softmax(q K^T * scale) ), the pool centred, stride 1.
    ``softmax="all"`` normalises row i over the keys it sees causally, 0 .. N-W+i; ``"prefix"`` over 0 .. N-W-1 only.
    """
    W, Hq, _ = window_query.shape
    N, Hkv, _ = keys.shape
    prefix = N - W
    scores = torch.zeros(Hkv, prefix, dtype=torch.float64)
    for head in range(Hq):
        kv_head = head // (Hq // Hkv)
        for row in range(W):
            visible = prefix + row + 1 if softmax == "all" else prefix
            logits = keys[:visible, kv_head].double() @ window_query[row, head].double() * scale
            scores[kv_head] += capped(logits, softcap).softmax(0)[:prefix]
    pooled = torch.empty_like(scores)
    for token in range(prefix):
        first = token - kernel_size // 2
        pooled[:, token] = scores[:, max(first, 0) : first + kernel_size].amax(1)
    return pooled


def keep_tokens(scores: Tensor, num_kept: int, window_size: int, sink_tokens: int = 0) -> Tensor:
    """Positions of the prompt tokens to keep: the W window tokens, the first ``sink_tokens``, and the best of the rest.

    ``scores`` [Hkv, N - W]; ``num_kept`` in W .. N counts all three kinds. Returns int64 [Hkv, num_kept], ascending.
    """
    prefix = scores.shape[1]
    window = list(range(prefix, prefix + window_size))
    kept = []
    for head_scores in scores.tolist():
        forced = [math.inf] * min(sink_tokens, prefix)
        kept.append(best(forced + head_scores[len(forced) :], num_kept - window_size) + window)
    return torch.tensor(kept, dtype=torch.long).reshape(scores.shape[0], num_kept)


def accumulated_scores(query: Tensor, keys: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Attention that each token has received (H2O, arXiv 2306.14048): the sum, over all N queries that see it causally and over
    the group's query heads, of softmax(q K^T * scale).

    ``query`` [N, Hq, D], ``keys`` [N, Hkv, D]; returns float64 [Hkv, N].
    """
    N, Hq, _ = query.shape
    Hkv = keys.shape[1]
    scores = torch.zeros(Hkv, N, dtype=torch.float64)
    for head in range(Hq):
        kv_head = head // (Hq // Hkv)
        for row in range(N):
            logits = keys[: row + 1, kv_head].double() @ query[row, head].double() * scale
            scores[kv_head, : row + 1] += capped(logits, softcap).softmax(0)
    return scores


def keep_heavy(scores: Tensor, num_kept: int, num_recent: int) -> Tensor:
    """Positions of the tokens to keep (H2O): the newest ``num_recent``, and the best of the others by ``scores`` [Hkv, N].

    ``num_kept`` in num_recent .. N counts both kinds. Returns int64 [Hkv, num_kept], ascending.
    """
    older = scores.shape[1] - num_recent
    recent = list(range(older, scores.shape[1]))
    kept = [best(head_scores[:older], num_kept - num_recent) + recent for head_scores in scores.tolist()]
    return torch.tensor(kept, dtype=torch.long).reshape(scores.shape[0], num_kept)


def keep_sinks_and_recent(num_tokens: int, num_kept: int, sink_tokens: int, num_kv_heads: int) -> Tensor:
    """Positions of the tokens to keep (StreamingLLM, arXiv 2309.17453): the first ``sink_tokens`` and the newest others.

    ``num_kept`` in sink_tokens .. N counts both kinds. Returns int64 [Hkv, num_kept], ascending, the same for each head.
    """
    first_recent = num_tokens - (num_kept - sink_tokens)
    kept = [t for t in range(num_tokens) if t < sink_tokens or t >= first_recent]
    return torch.tensor([kept] * num_kv_heads, dtype=torch.long)


# --------------------------------------------------- stage 2: hybrid sparse attention (section 3.4 of the paper)


@lru_cache
def representable(dtype: torch.dtype) -> Tensor:
    """Every value of a KT dtype but the NaNs, infinities included, ascending; float64."""
    width = torch.finfo(dtype).bits
    codes = torch.arange(-(2 ** (width - 1)), 2 ** (width - 1)).to(KT_BITS[dtype])
    numbers = codes.view(dtype).double()
    return numbers[~numbers.isnan()].unique()


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest value of ``dtype`` that is <= x (float16, bfloat16 or float32)."""
    if dtype == torch.float32:
        return x.float()
    numbers = representable(dtype)
    return numbers[torch.searchsorted(numbers, x.double().contiguous(), right=True) - 1].to(dtype)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Smallest value of ``dtype`` that is >= x (float16, bfloat16 or float32)."""
    if dtype == torch.float32:
        return x.float()
    numbers = representable(dtype)
    return numbers[torch.searchsorted(numbers, x.double().contiguous())].to(dtype)


def page_summaries(keys: Tensor, page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Element-wise bounds of the keys of each page of ``page_size`` tokens; the last page may be partly filled (I8).

    ``keys`` [n, Hkv, D]; returns (minima rounded down, maxima rounded up), each [Hkv, ceil(n / page_size), D] of
    ``dtype``.
    """
    n, Hkv, D = keys.shape
    num_pages = -(-n // page_size)
    low, high = keys.new_empty(Hkv, num_pages, D), keys.new_empty(Hkv, num_pages, D)
    for page in range(num_pages):
        of_page = keys[page * page_size : (page + 1) * page_size]
        low[:, page], high[:, page] = of_page.amin(0), of_page.amax(0)
    return round_down(low, dtype), round_up(high, dtype)


def hsa_scores(
    query: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    num_tokens: int,
    page_size: int,
    topr: int | None = None,
    temperature: str = "adaptive",
) -> Tensor:
    """Estimated attention weight of *one token* of each page, the mean over the group's query heads.

    ``query`` [Hq, D]; ``page_min``, ``page_max`` [Hkv, pages, D]; returns float64 [Hkv, ceil(num_tokens / page_size)].
    For each KV head, with i1 the ``topr`` dimensions of the largest mean |q| over the group (None: all of them):

    * bound_d = max_d if the group's q_d sum to more than 0, else min_d; an infinite bound (a key beyond the KT dtype's
      range) counts as 2^64, so that sums stay finite
    * logit of a page for a query head = q[i1] . bound[i1] / temperature
    * temperature = sqrt(D |q[i1]|_1 / |q|_1) if "adaptive" (a head with q[i1] = 0 has only zero logits: any will do),
      or sqrt(D)
    * softmax over *tokens*: every token has its page's logit, so that a partly filled page weighs less in the
      denominator
    """
    Hkv, _, D = page_min.shape
    num_pages = -(-num_tokens // page_size)
    tokens_of_page = [min(page_size, num_tokens - page * page_size) for page in range(num_pages)]
    scores = torch.zeros(Hkv, num_pages, dtype=torch.float64)
    for kv_head, group in enumerate(query.double().chunk(Hkv)):
        sums = group.sum(0)
        i1 = best(group.abs().mean(0).tolist(), D if topr is None else topr)
        bounds = torch.where(sums > 0, page_max[kv_head].double(), page_min[kv_head].double()).clamp(
            -(2.0**64), 2.0**64
        )
        for q in group:
            read, total = q[i1].abs().sum().item(), q.abs().sum().item()
            share = read / total if temperature == "adaptive" and read > 0 else 1.0
            logits = bounds[:num_pages, i1] @ q[i1] / math.sqrt(D * share)
            of_tokens = logits.repeat_interleave(torch.tensor(tokens_of_page, dtype=torch.long)).softmax(0)
            scores[kv_head] += of_tokens[::page_size] / len(group)
    return scores


def hsa_choose(
    scores: Tensor,
    num_tokens: int,
    page_size: int,
    topk_tokens: int,
    granularity: str = "token",
    sink_tokens: int = 0,
    recent_tokens: int = 0,
) -> list[list[int]]:
    """Tokens that one decode step reads, for each KV head, ascending, from ``hsa_scores``' result.

    "token": the best ``topk_tokens`` tokens; "page": the tokens of the best ceil(topk_tokens / page_size) pages. The
    first ``sink_tokens`` and the newest ``recent_tokens`` (rounded outward to whole pages under "page") are always
    selected and count against the budget; if they alone exceed it, they are the selection.
    """
    selected = []
    for head_scores in scores.tolist():
        forced = {t for t in range(num_tokens) if t < sink_tokens or t >= num_tokens - recent_tokens}
        if granularity == "token":
            of_tokens = [math.inf if t in forced else head_scores[t // page_size] for t in range(num_tokens)]
            selected.append(best(of_tokens, max(topk_tokens, len(forced))))
        else:
            forced_pages = {t // page_size for t in forced}
            of_pages = [math.inf if p in forced_pages else score for p, score in enumerate(head_scores)]
            pages = best(of_pages, max(-(-topk_tokens // page_size), len(forced_pages)))
            selected.append([t for t in range(num_tokens) if t // page_size in pages])
    return selected


def hsa_select(
    query: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    num_tokens: int,
    page_size: int,
    topk_tokens: int,
    topr: int | None = None,
    granularity: str = "token",
    temperature: str = "adaptive",
    sink_tokens: int = 0,
    recent_tokens: int = 0,
) -> list[list[int]]:
    """Both halves of hybrid sparse attention's selection: ``hsa_scores``, then ``hsa_choose``."""
    scores = hsa_scores(query, page_min, page_max, num_tokens, page_size, topr, temperature)
    return hsa_choose(scores, num_tokens, page_size, topk_tokens, granularity, sink_tokens, recent_tokens)


# ------------------------------------------------------- other ways to rank pages; ``hsa_choose`` takes their scores, too


def quest_scores(query: Tensor, page_min: Tensor, page_max: Tensor, num_tokens: int, page_size: int) -> Tensor:
    """Quest (arXiv 2406.10774, section 3.2): the largest q . k that a page's bounds allow, summed over the group's heads.

    ``query`` [Hq, D]; ``page_min``, ``page_max`` [Hkv, pages, D]; returns float64 [Hkv, ceil(num_tokens / page_size)], of any
    sign. A page's bound for one query head is sum over all dimensions of max(q_d min_d, q_d max_d). The paper chooses pages for
    each query head; the sum chooses them for a KV head, whose keys are read once for the group. Bounds are clamped to +-2^64
    as in ``hsa_scores``. Quest takes the best ceil(topk_tokens / page_size) pages and forces none.
    """
    Hkv = page_min.shape[0]
    num_pages = -(-num_tokens // page_size)
    scores = torch.zeros(Hkv, num_pages, dtype=torch.float64)
    for kv_head, group in enumerate(query.double().chunk(Hkv)):
        low, high = (x[kv_head, :num_pages].double().clamp(-(2.0**64), 2.0**64) for x in (page_min, page_max))
        for q in group:
            scores[kv_head] += torch.maximum(q * low, q * high).sum(1)
    return scores


def page_means(keys: Tensor, page_size: int, dtype: torch.dtype) -> Tensor:
    """Mean of the keys of each page of ``page_size`` tokens, of its real tokens if the last page is partly filled.

    ``keys`` [n, Hkv, D]; returns [Hkv, ceil(n / page_size), D] of ``dtype``. The sum is float32's, from the first token to the
    last, divided by their number and rounded to nearest in ``dtype``.
    """
    n, Hkv, D = keys.shape
    num_pages = -(-n // page_size)
    means = torch.empty(Hkv, num_pages, D, dtype=dtype)
    for page in range(num_pages):
        first, *others = keys[page * page_size : (page + 1) * page_size].float()
        total = first
        for key in others:
            total = total + key
        means[:, page] = (total / (1 + len(others))).to(dtype)
    return means


def mean_scores(query: Tensor, page_mean: Tensor, num_tokens: int, page_size: int) -> Tensor:
    """The tutorial's estimate (preset ``blog``): the group's mean query times the mean of a page's keys, all dimensions.

    ``query`` [Hq, D]; ``page_mean`` [Hkv, pages, D] (``page_means``); returns float64 [Hkv, ceil(num_tokens / page_size)], of
    any sign. A mean beyond +-2^64 counts as that, as bounds do in ``hsa_scores``. No page is forced.
    """
    Hkv = page_mean.shape[0]
    num_pages = -(-num_tokens // page_size)
    means = page_mean[:, :num_pages].double().clamp(-(2.0**64), 2.0**64)
    return torch.stack([means[h] @ group.mean(0) for h, group in enumerate(query.double().chunk(Hkv))])
