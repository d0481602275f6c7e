# SPDX-License-Identifier: Apache-2.0
"""Dense decode attention by others, over the same keys and values: what is installed, and one call of each.

Keys and values are ``[batch, N, Hkv, D]``, contiguous; libraries with paged caches see them as pages of ``PAGE`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from benchmarks.traffic import Attention

PAGE = 64
WORKSPACE = 256 << 20


@dataclass(frozen=True)
class DenseStep:
    """One decode step of dense attention."""

    shape: Attention
    query: torch.Tensor
    """``[batch, Hq, D]``."""
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(self.query.shape[-1] ** -0.5)


Call = Callable[[], torch.Tensor]


def make_dense_step(shape: Attention, batch: int, num_tokens: int, device: torch.device) -> DenseStep:
    """Random bfloat16 numbers."""
    D = shape.head_size
    query = torch.randn(batch, shape.num_heads, D, dtype=torch.bfloat16, device=device)
    cache = torch.empty(2, batch, num_tokens, shape.num_kv_heads, D, dtype=torch.bfloat16, device=device).normal_()
    return DenseStep(shape, query, cache[0], cache[1])


def sdpa(step: DenseStep) -> Call:
    """``torch.nn.functional.scaled_dot_product_attention``."""
    q = step.query.unsqueeze(2)
    k, v = step.keys.transpose(1, 2), step.values.transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, scale=step.scale, enable_gqa=True).squeeze(2)


def flash_attention(step: DenseStep) -> Call:
    """The package flash-attn."""
    attend = import_module("flash_attn").flash_attn_with_kvcache
    q, lengths = step.query.unsqueeze(1), lengths_of(step)
    return lambda: attend(
        q, step.keys, step.values, cache_seqlens=lengths, softmax_scale=step.scale, causal=True
    ).squeeze(1)


def vllm_flash_attention(step: DenseStep) -> Call:
    """vLLM's own build of FlashAttention on a paged cache, as plain vLLM decodes."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version()
    keys, values, table = paged(step)
    batch, num_tokens = step.keys.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=step.query.device)
    lengths, output = lengths_of(step), torch.empty_like(step.query)

    def call() -> torch.Tensor:
        flash_attn_varlen_func(
            q=step.query, k=keys, v=values, out=output, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=num_tokens,
            seqused_k=lengths, softmax_scale=step.scale, causal=True, block_table=table, fa_version=version,
        )  # fmt: skip
        return output

    return call


def flashinfer(step: DenseStep) -> Call:
    """FlashInfer's batched decode on a paged cache."""
    batch, num_tokens = step.keys.shape[:2]
    keys, values, table = paged(step)
    pages_each = table.shape[1]
    device = step.query.device
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
    )
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages_each
    last = torch.full((batch,), num_tokens - (pages_each - 1) * PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, table.flatten(), last, step.shape.num_heads, step.shape.num_kv_heads, step.shape.head_size, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=step.scale,
    )  # fmt: skip
    return lambda: wrapper.run(step.query, (keys, values))


def xformers_split(step: DenseStep) -> Call:
    """xformers' split-K decode."""
    fmha = import_module("xformers.ops.fmha")
    batch, _, Hkv, D = step.keys.shape
    q = step.query.view(batch, 1, Hkv, -1, D)
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, q.shape[3], -1) for t in (step.keys, step.values))
    attention, operator = fmha.memory_efficient_attention_forward, fmha.triton_splitk.FwOp
    return lambda: attention(q, k, v, scale=step.scale, op=operator).reshape(batch, -1, D)


RIVALS: dict[str, Callable[[DenseStep], Call]] = {
    "torch SDPA": sdpa,
    "FlashAttention": flash_attention,
    "FlashAttention of vLLM": vllm_flash_attention,
    "FlashInfer": flashinfer,
    "xformers split-K": xformers_split,
}


def lengths_of(step: DenseStep) -> torch.Tensor:
    """Tokens of each request."""
    batch, num_tokens = step.keys.shape[:2]
    return torch.full((batch,), num_tokens, dtype=torch.int32, device=step.query.device)


def paged(step: DenseStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values as pages, and a table of them."""
    batch, num_tokens, Hkv, D = step.keys.shape
    assert num_tokens % PAGE == 0
    pages = torch.arange(batch * num_tokens // PAGE, dtype=torch.int32, device=step.query.device)
    return step.keys.view(-1, PAGE, Hkv, D), step.values.view(-1, PAGE, Hkv, D), pages.view(batch, -1)


def expected(step: DenseStep, request: int) -> torch.Tensor:
    """One request's attention in float32, ``[Hq, D]``."""
    group = step.shape.num_heads // step.shape.num_kv_heads
    q = step.query[request].float().view(-1, group, step.shape.head_size)
    keys, values = step.keys[request].float(), step.values[request].float()
    weights = (torch.einsum("hgd,nhd->hgn", q, keys) * step.scale).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)


def prepare(name: str, step: DenseStep) -> tuple[Call | None, str]:
    """A call that gives the right answer, or why there is none."""
    try:
        call = RIVALS[name](step)
        found: Any = call()
    except (ImportError, AttributeError) as error:
        return None, f"not installed: {' '.join(str(error).split())[:100]}"
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    request = len(step.query) - 1
    truth = expected(step, request)
    error_of = float((found[request].float() - truth).abs().max() / truth.abs().max())
    return (call, "") if error_of < 0.03 else (None, f"wrong: error {error_of:.2g} of the largest number")
