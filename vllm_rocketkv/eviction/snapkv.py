# SPDX-License-Identifier: Apache-2.0
"""Eviction by observation window (RocketKV's first stage: SnapKV with a large pooling kernel and grouped scores)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_rocketkv.eviction.base import EvictionPolicy
from vllm_rocketkv.kernels.topk import best_mask, mask_to_index

MAX_BLOCK_ELEMENTS = 1 << 23
"""Attention weights held at once, float32 (32 MiB; softmax and mask hold about three times that for a moment)."""


class SnapKV(EvictionPolicy):
    """Keeps the tokens that the last W queries of the prompt attend to most (arXiv 2502.14051, section 3.3)."""

    def keep(self, window_query: Tensor, keys: Tensor, num_kept: int, scale: float, softcap: float = 0.0) -> Tensor:
        """See ``EvictionPolicy.keep``; the window's own W tokens and the first ``sink_tokens`` are always kept."""
        W, (N, Hkv, _) = window_query.shape[0], keys.shape
        if num_kept >= N:
            return torch.arange(N, device=keys.device).expand(Hkv, N)
        assert num_kept >= W, f"cannot keep a window of {W} tokens in a budget of {num_kept}"
        scores = self.score(window_query, keys, scale, softcap)
        scores[:, : self.config.sink_tokens] = torch.inf
        kept, _ = mask_to_index(best_mask(scores, num_kept - W), num_kept - W)
        window = torch.arange(N - W, N, device=keys.device).expand(Hkv, W)
        return torch.cat([kept, window], dim=1)

    def score(self, window_query: Tensor, keys: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
        """max_pool(sum over window rows and the group's query heads of softmax(q K^T * scale)), float32 [Hkv, N - W].

        Shapes as in ``keep``. Works on as many KV heads, or on as many rows of one KV head, as fit
        ``MAX_BLOCK_ELEMENTS``.
        """
        (W, Hq, D), (N, Hkv, _) = window_query.shape, keys.shape
        num_rows, prefix = Hq // Hkv * W, N - W
        over_all = self.config.window_softmax == "all"
        queries = window_query.reshape(W, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3).reshape(Hkv, num_rows, D)
        heads_at_once = max(1, MAX_BLOCK_ELEMENTS // (num_rows * N))
        rows_at_once = max(1, min(num_rows, MAX_BLOCK_ELEMENTS // N))
        hidden = torch.ones(W, W, dtype=torch.bool, device=keys.device).triu(1)  # window row i sees window columns <= i
        hidden = hidden.repeat(Hq // Hkv, 1)

        # Summed in float64 and then rounded, the order of the rows is lost: equal keys tie wherever they lie.
        scores = torch.zeros(Hkv, prefix, dtype=torch.float64, device=keys.device)
        for first in range(0, Hkv, heads_at_once):
            heads = slice(first, first + heads_at_once)
            keys_t = keys[: N if over_all else prefix, heads].permute(1, 2, 0).float()  # [h, D, N or N - W]
            for start in range(0, num_rows, rows_at_once):
                rows = slice(start, start + rows_at_once)
                logits = torch.matmul(queries[heads, rows].float(), keys_t).mul_(scale)
                if softcap:
                    logits = logits.div_(softcap).tanh_().mul_(softcap)
                if over_all:
                    logits[..., prefix:].masked_fill_(hidden[rows], -torch.inf)
                scores[heads] += logits.softmax(-1)[..., :prefix].sum(1, dtype=torch.float64)
        kernel_size = self.config.kernel_size
        return functional.max_pool1d(scores.float(), kernel_size, stride=1, padding=kernel_size // 2)[:, :prefix]
