# SPDX-License-Identifier: Apache-2.0
"""Stage 1, scoring: how much the observation window's queries attend to each earlier token of a prompt, over paged keys.

``scores[h, t]`` is the sum, over the W window rows and the G query heads of KV head h, of the softmax weight of token t
(``kernels/reference.py``, ``window_scores``, before its pooling). No ``[heads, W, N]`` logits are ever in memory.

A *row* is one window query of one query head: R = W * G rows for each KV head, row w * G + g. Rows are summed only after each was
divided by its own denominator, which takes all of its keys: so the keys are read twice, once for the denominators and once for
the weights (and the logits computed twice: 4 R N D operations a KV head). Three launches:

1. ``_row_statistics``: running maximum and sum of exponentials of each row over one split of the keys (online softmax).
2. ``_row_norms``: the splits' statistics become one maximum and one reciprocal sum for each row. It is tiny, but a launch of its
   own: each program of the third needs all rows, and would read more statistics than keys.
3. ``_summed_weights``: logits again, of one tile of keys against all rows, and the sum of their weights.

Bytes of a KV head, with keys of b bytes: 2 N D b of keys (the first launch reads them once for each tile of 64 or 128 rows, from
the second-level cache but for the first time), 8 R splits of statistics written and read, 4 (N - W) of scores. Values are not
read.

Every key's logits and weights come out of the same instructions in the same order wherever it lies: equal keys tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.cache import CacheView
from vllm_rocketkv.kernels.triton.launch import INTERPRET, MIN_DOT, NUM_STAGES, CompileCase, dot, padded
from vllm_rocketkv.kernels.triton.numbers import CODES, KINDS, as_codes, decode_number

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Maximum of no logits; finite, so that a difference of two is 0 and not NaN."""

PROGRAMS = 512
"""Programs that the first launch is split into where there are keys enough: a few for each multiprocessor of any GPU."""
MIN_SPLIT_TILES = 4
"""Tiles of keys that a split has at least."""
_WARPS = 4
_FP8 = (KINDS[torch.float8_e4m3fn], KINDS[torch.float8_e5m2])
_CODE_TYPES = {torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}


# ------------------------------------------------------------------------------------------------ operands and logits


@triton.jit
def _operand(code, KIND: tl.constexpr, OPERAND_KIND: tl.constexpr):
    """Stored codes as numbers of the type that the product takes; exact."""
    if KIND != OPERAND_KIND:
        number = decode_number(code, KIND)
        if OPERAND_KIND == 1:
            return number.to(tl.bfloat16)
        elif OPERAND_KIND == 2:
            return number.to(tl.float16)
        else:
            return number
    elif KIND == 1:
        return code.to(tl.bfloat16, bitcast=True)
    elif KIND == 2:
        return code.to(tl.float16, bitcast=True)
    else:
        return code.to(tl.float32, bitcast=True)


@triton.jit
def _query_tile(
    query, kv_head, first_row, first_dim,
    NUM_ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    QUERY_TOKEN_STRIDE: tl.constexpr, QUERY_HEAD_STRIDE: tl.constexpr,
    QUERY_KIND: tl.constexpr, OPERAND_KIND: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Rows from ``first_row`` on, [ROWS, DIMS] of the dimensions from ``first_dim`` on; zeros beyond the last of either."""
    row = first_row + tl.arange(0, ROWS)
    dim = first_dim + tl.arange(0, DIMS)
    start = (row // GROUP) * QUERY_TOKEN_STRIDE + (kv_head * GROUP + row % GROUP) * QUERY_HEAD_STRIDE
    inside = (row < NUM_ROWS)[:, None] & (dim < HEAD_SIZE)[None, :]
    code = tl.load(query + start[:, None] + dim[None, :], mask=inside, other=0)
    return _operand(code, QUERY_KIND, OPERAND_KIND)


@triton.jit
def _key_tile(
    kv, start, inside, first_dim,
    HEAD_SIZE: tl.constexpr, KV_KIND: tl.constexpr, OPERAND_KIND: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Keys that begin at ``start`` [KEYS], transposed: [DIMS, KEYS]; zeros where not ``inside`` and beyond the last dimension."""
    dim = first_dim + tl.arange(0, DIMS)
    inside = (dim < HEAD_SIZE)[:, None] & inside[None, :]
    code = tl.load(kv + start[None, :] + dim[:, None], mask=inside, other=0)
    return _operand(code, KV_KIND, OPERAND_KIND)


@triton.jit
def _key_starts(
    blocks, token, inside, kv_head,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """Where the prompt's tokens have their keys, in elements of the cache; int64."""
    block = tl.load(blocks + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_STRIDE + tl.cast(kv_head, tl.int64) * HEAD_STRIDE + (token % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def _tanh(x):
    """Within a few units of float32's last place; the interpreter knows no other."""
    square = x * x
    series = -0.05396825396825397 + square * 0.02186948853615520
    series = -0.3333333333333333 + square * (0.13333333333333333 + square * series)
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    quotient = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, x + x * square * series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _binary_logits(product, factor, cap, CAPPED: tl.constexpr):
    """Logits times log2(e), of which powers of two are the softmax's exponentials."""
    if CAPPED:
        return cap * _tanh(product * factor)
    else:
        return product * factor


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["num_prefix", "num_scored", "split_tokens"])
def _row_statistics(
    query, kv, blocks, statistics, num_prefix, num_scored, split_tokens, factor, cap,
    NUM_ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    QUERY_TOKEN_STRIDE: tl.constexpr, QUERY_HEAD_STRIDE: tl.constexpr,
    KV_KIND: tl.constexpr, QUERY_KIND: tl.constexpr, OPERAND_KIND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    CAPPED: tl.constexpr, OVER_ALL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of ROWS rows over one split of the keys, each row over those that it sees.

    Grid (splits, row tiles, Hkv). ``query`` [W, Hq, D] codes, ``kv`` as in ``CacheView``, ``blocks`` int32 [N / block_size],
    ``statistics`` float32 [Hkv, splits, 2, padded rows]. Reads (split_tokens + ROWS) * D numbers.
    """
    split, row_tile, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    visible = num_prefix + (row // GROUP + 1 if OVER_ALL else tl.zeros_like(row))
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    WHOLE: tl.constexpr = DIMS >= HEAD_SIZE
    if WHOLE:
        whole_rows = _query_tile(
            query, kv_head, row_tile * ROWS, 0, NUM_ROWS, GROUP, HEAD_SIZE,
            QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, QUERY_KIND, OPERAND_KIND, ROWS, DIMS,
        )  # fmt: skip
    for first in range(split * split_tokens, tl.minimum((split + 1) * split_tokens, num_scored), KEYS):
        token = first + tl.arange(0, KEYS)
        inside = token < num_scored
        start = _key_starts(blocks, token, inside, kv_head, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
        if WHOLE:
            product = dot(
                whole_rows, _key_tile(kv, start, inside, 0, HEAD_SIZE, KV_KIND, OPERAND_KIND, DIMS), INTERPRETED
            )
        else:
            product = tl.zeros([ROWS, KEYS], tl.float32)
            for dim in range(0, HEAD_SIZE, DIMS):
                rows = _query_tile(
                    query, kv_head, row_tile * ROWS, dim, NUM_ROWS, GROUP, HEAD_SIZE,
                    QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, QUERY_KIND, OPERAND_KIND, ROWS, DIMS,
                )  # fmt: skip
                keys = _key_tile(kv, start, inside, dim, HEAD_SIZE, KV_KIND, OPERAND_KIND, DIMS)
                product += dot(rows, keys, INTERPRETED)
        logits = _binary_logits(product, factor, cap, CAPPED)
        logits = tl.where(inside[None, :] & (token[None, :] < visible[:, None]), logits, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        total = total * tl.exp2(maximum - larger) + tl.sum(tl.exp2(logits - larger[:, None]), 1)
        maximum = larger
    padded_rows = tl.num_programs(1) * ROWS
    out = statistics + (tl.cast(kv_head, tl.int64) * tl.num_programs(0) + split) * 2 * padded_rows
    tl.store(out + row, maximum)
    tl.store(out + padded_rows + row, total)


@triton.jit(do_not_specialize=["num_splits"])
def _row_norms(statistics, norms, num_splits, ROWS: tl.constexpr):
    """The splits' statistics of ROWS rows in one: maximum, 1 / sum of exponentials.

    Grid (row tiles, Hkv). ``statistics`` float32 [Hkv, splits, 2, padded rows], ``norms`` float32 [Hkv, 2, padded rows]. A row
    one of whose logits is not a number gets a sum that is none.
    """
    padded_rows = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1).to(tl.int64)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    of_split = statistics + kv_head * num_splits * 2 * padded_rows + row
    for _ in range(num_splits):
        of_these, sum_of_these = tl.load(of_split), tl.load(of_split + padded_rows)
        larger = tl.maximum(maximum, of_these)
        total = total * tl.exp2(maximum - larger) + sum_of_these * tl.exp2(of_these - larger)
        maximum = larger
        of_split += 2 * padded_rows
    out = norms + kv_head * 2 * padded_rows + row
    tl.store(out, maximum)
    tl.store(out + padded_rows, 1.0 / total)


@triton.jit(do_not_specialize=["num_prefix"])
def _summed_weights(
    query, kv, blocks, norms, scores, num_prefix, factor, cap,
    NUM_ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    QUERY_TOKEN_STRIDE: tl.constexpr, QUERY_HEAD_STRIDE: tl.constexpr,
    KV_KIND: tl.constexpr, QUERY_KIND: tl.constexpr, OPERAND_KIND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Softmax weights of KEYS tokens, summed over all rows of a KV head: every row sees every token of the prefix.

    Grid (key tiles, Hkv). ``norms`` float32 [Hkv, 2, padded rows], ``scores`` float32 [Hkv, N - W]; the rest as in
    ``_row_statistics``. Reads (KEYS + R) * D numbers, the rows from the second-level cache.
    """
    kv_head = tl.program_id(1)
    token = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside = token < num_prefix
    start = _key_starts(blocks, token, inside, kv_head, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
    WHOLE: tl.constexpr = DIMS >= HEAD_SIZE
    if WHOLE:
        whole_keys = _key_tile(kv, start, inside, 0, HEAD_SIZE, KV_KIND, OPERAND_KIND, DIMS)
    padded_rows: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS * ROWS
    norms += kv_head * 2 * padded_rows
    weights = tl.zeros([KEYS], tl.float32)
    for first_row in range(0, NUM_ROWS, ROWS):
        if WHOLE:
            rows = _query_tile(
                query, kv_head, first_row, 0, NUM_ROWS, GROUP, HEAD_SIZE,
                QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, QUERY_KIND, OPERAND_KIND, ROWS, DIMS,
            )  # fmt: skip
            product = dot(rows, whole_keys, INTERPRETED)
        else:
            product = tl.zeros([ROWS, KEYS], tl.float32)
            for dim in range(0, HEAD_SIZE, DIMS):
                rows = _query_tile(
                    query, kv_head, first_row, dim, NUM_ROWS, GROUP, HEAD_SIZE,
                    QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, QUERY_KIND, OPERAND_KIND, ROWS, DIMS,
                )  # fmt: skip
                keys = _key_tile(kv, start, inside, dim, HEAD_SIZE, KV_KIND, OPERAND_KIND, DIMS)
                product += dot(rows, keys, INTERPRETED)
        row = first_row + tl.arange(0, ROWS)
        maximum, reciprocal = tl.load(norms + row), tl.load(norms + padded_rows + row)
        weight = tl.exp2(_binary_logits(product, factor, cap, CAPPED) - maximum[:, None]) * reciprocal[:, None]
        weights += tl.sum(tl.where((row < NUM_ROWS)[:, None], weight, 0.0), 0)
    tl.store(scores + tl.cast(kv_head, tl.int64) * num_prefix + token, weights, mask=inside)


# ------------------------------------------------------------------------------------------------ launching


def _configuration(
    num_rows: int,
    group: int,
    head_size: int,
    block_size: int,
    kv_strides: tuple[int, ...],
    query_strides: tuple[int, ...],
    kv_kind: int,
    query_kind: int,
    capped: bool,
) -> dict[str, Any]:
    """Constants that both kernels over the keys share."""
    # fp8 numbers are exact in either 16-bit type; other mixtures are multiplied as float32.
    operand_kind = query_kind if kv_kind in (query_kind, *_FP8) else 0
    dims = padded(head_size, MIN_DOT)
    rows = min(padded(num_rows, MIN_DOT), 128 if dims <= 128 else 64)
    keys = 64
    if operand_kind == 0:  # no tensor cores: operands lie in registers
        dims, rows, keys = min(dims, 32), 16, 32
    return {
        "NUM_ROWS": num_rows,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": kv_strides[0],
        "HEAD_STRIDE": kv_strides[1],
        "TOKEN_STRIDE": kv_strides[2],
        "QUERY_TOKEN_STRIDE": query_strides[0],
        "QUERY_HEAD_STRIDE": query_strides[1],
        "KV_KIND": kv_kind,
        "QUERY_KIND": query_kind,
        "OPERAND_KIND": operand_kind,
        "ROWS": rows,
        "KEYS": keys,
        "DIMS": dims,
        "CAPPED": capped,
        "INTERPRETED": INTERPRET,
    }


def window_scores(
    window_query: torch.Tensor,
    cache: CacheView,
    prompt_blocks: torch.Tensor,
    num_prompt_tokens: int,
    scale: float,
    softcap: float = 0.0,
    softmax_over_all: bool = True,
) -> torch.Tensor:
    """Sums of softmax weights of the tokens before the window: float32 [Hkv, N - W].

    ``window_query`` [W, Hq, D], the queries of the last W of the N tokens (float32, bfloat16 or float16); ``prompt_blocks`` int32
    [at least ceil(N / block_size)]. ``softmax_over_all``: row i's softmax runs over tokens 0 .. N - W + i; else over the N - W.
    """
    W, Hq, D = window_query.shape
    Hkv, prefix = cache.num_kv_heads, num_prompt_tokens - W
    scored = num_prompt_tokens if softmax_over_all else prefix
    scores = torch.empty(Hkv, prefix, dtype=torch.float32, device=window_query.device)
    if prefix == 0:
        return scores
    query = as_codes(window_query)
    constants = _configuration(
        W * Hq // Hkv, Hq // Hkv, D, cache.block_size, cache.kv.stride(), query.stride(),
        cache.kv_kind, KINDS[window_query.dtype], softcap > 0,
    )  # fmt: skip
    factor = scale * cache.key_scale * (1 / softcap if softcap else LOG2_E.value)
    cap = softcap * LOG2_E.value
    row_tiles, keys = triton.cdiv(constants["NUM_ROWS"], constants["ROWS"]), constants["KEYS"]
    key_tiles = triton.cdiv(scored, keys)
    split_tiles = max(MIN_SPLIT_TILES, triton.cdiv(key_tiles, max(1, PROGRAMS // (Hkv * row_tiles))))
    splits = triton.cdiv(key_tiles, split_tiles)
    statistics = scores.new_empty(Hkv, splits, 2, row_tiles * constants["ROWS"])
    norms = scores.new_empty(Hkv, 2, row_tiles * constants["ROWS"])
    _row_statistics[(splits, row_tiles, Hkv)](
        query, cache.kv, prompt_blocks, statistics, prefix, scored, split_tiles * keys, factor, cap,
        **constants, OVER_ALL=softmax_over_all, num_warps=_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    _row_norms[(row_tiles, Hkv)](
        statistics, norms, splits, ROWS=constants["ROWS"], num_warps=_WARPS, num_stages=NUM_STAGES
    )
    _summed_weights[(triton.cdiv(prefix, keys), Hkv)](
        query, cache.kv, prompt_blocks, norms, scores, prefix, factor, cap,
        **constants, num_warps=_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return scores


def compile_cases() -> Iterator[CompileCase]:
    """Head sizes, ratios and types for a window of 32, and what else makes other code."""
    bf16, fp16, fp32 = KINDS[torch.bfloat16], KINDS[torch.float16], KINDS[torch.float32]
    e4m3, e5m2 = _FP8
    for head_size in (64, 128, 256):
        for group in (1, 4, 8):
            for kv_kind in (bf16, e5m2):
                yield from _cases(head_size, group, 32, kv_kind, bf16)
    yield from _cases(80, 4, 1, bf16, bf16, over_all=False)
    yield from _cases(96, 3, 32, fp16, fp16)
    yield from _cases(128, 48, 128, bf16, bf16)
    yield from _cases(128, 4, 32, e4m3, bf16, over_all=False)
    yield from _cases(128, 4, 32, e4m3, fp16, capped=True)
    yield from _cases(256, 8, 32, bf16, bf16, capped=True)
    yield from _cases(128, 4, 32, fp32, fp32, capped=True)
    yield from _cases(256, 8, 32, fp32, fp32, over_all=False)
    for rows in (16, 32, 64, 128):
        signature = {"statistics": "*fp32", "norms": "*fp32", "num_splits": "i32"}
        yield CompileCase(f"row_norms rows {rows}", _row_norms, signature, {"ROWS": rows}, _WARPS)


def _cases(
    head_size: int, group: int, window: int, kv_kind: int, query_kind: int, capped: bool = False, over_all: bool = True
) -> Iterator[CompileCase]:
    heads, block_size = 8, 16
    kv_strides = (heads * block_size * 2 * head_size, block_size * 2 * head_size, 2 * head_size, 1)
    query_strides = (heads * group * head_size, head_size, 1)
    constants = _configuration(
        window * group, group, head_size, block_size, kv_strides, query_strides, kv_kind, query_kind, capped
    )
    constants["INTERPRETED"] = False
    operands = {"query": _CODE_TYPES[CODES[query_kind]], "kv": _CODE_TYPES[CODES[kv_kind]], "blocks": "*i32"}
    counts = {"num_prefix": "i32", "num_scored": "i32", "split_tokens": "i32"}
    factors = {"factor": "fp32", "cap": "fp32"}
    name = f"D{head_size} G{group} W{window} kv{kv_kind} q{query_kind}"
    name += "" if over_all else " prefix"
    name += " capped" if capped else ""
    signature = operands | {"statistics": "*fp32"} | counts | factors
    yield CompileCase(f"row_statistics {name}", _row_statistics, signature, constants | {"OVER_ALL": over_all}, _WARPS)
    signature = operands | {"norms": "*fp32", "scores": "*fp32", "num_prefix": "i32"} | factors
    yield CompileCase(f"summed_weights {name}", _summed_weights, signature, constants, _WARPS)
