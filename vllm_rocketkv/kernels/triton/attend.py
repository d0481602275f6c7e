# SPDX-License-Identifier: Apache-2.0
"""Attention in the fused decode kernel: online softmax over a few tokens after the others."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.launch import dot
from vllm_rocketkv.kernels.triton.numbers import decode_number


@triton.jit
def operand(codes, KIND: tl.constexpr, DOT_TYPE: tl.constexpr):
    """Stored codes as numbers of the products' type; exact (``dot_type``)."""
    if (KIND == 1 and DOT_TYPE.is_bf16()) or (KIND == 2 and DOT_TYPE.is_fp16()):
        return codes.to(DOT_TYPE, bitcast=True)
    else:
        return decode_number(codes, KIND).to(DOT_TYPE)


@triton.jit
def attend_tokens(
    state, q, kv, key, is_read, scale, softcap,
    D: tl.constexpr, D_PAD: tl.constexpr, KV_KIND: tl.constexpr, DOT_TYPE: tl.constexpr, SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Online softmax over a few tokens more. ``state``: maximum and sum ``[heads]``, accumulator ``[heads, D_PAD]``; ``key``
    int64 ``[tokens]``: where in ``kv`` each key begins, its value behind it."""
    largest, total, accumulator = state
    d = tl.arange(0, D_PAD)
    mask = is_read[:, None] & (d < D)[None, :]
    where = kv + key[:, None] + d[None, :]
    keys = operand(tl.load(where, mask=mask, other=0), KV_KIND, DOT_TYPE)
    values = operand(tl.load(where + D, mask=mask, other=0), KV_KIND, DOT_TYPE)
    logits = dot(q, tl.trans(keys), INTERPRETED) * scale
    if SOFTCAP:
        logits = softcap * (1.0 - 2.0 / (1.0 + tl.exp(logits * (2.0 / softcap))))  # softcap * tanh(logits / softcap)
    logits = tl.where(is_read[None, :], logits, float("-inf"))
    now = tl.maximum(largest, tl.max(logits, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # until a token is read
    weights = tl.exp(logits - base[:, None])
    decay = tl.exp(largest - base)
    total = total * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None] + dot(weights.to(DOT_TYPE), values, INTERPRETED)
    return now, total, accumulator
