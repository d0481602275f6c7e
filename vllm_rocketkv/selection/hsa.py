# SPDX-License-Identifier: Apache-2.0
"""Hybrid sparse attention, RocketKV's second stage (arXiv 2502.14051, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocketkv.kernels.topk import best_mask, mask_to_index
from vllm_rocketkv.layout import ceil_div
from vllm_rocketkv.selection.base import SelectionPolicy
from vllm_rocketkv.selection.page_summary import KT_BITS

LARGEST_BOUND = 2.0**64
"""What an infinite page bound (a key beyond the KT dtype's range) counts as: above any real key, and its sums stay
finite."""


class HybridSparseAttention(SelectionPolicy):
    """Estimates attention from page bounds on the strongest dimensions, then takes the best tokens or pages."""

    def select(
        self, query: Tensor, page_min: Tensor, page_max: Tensor, num_tokens: Tensor, topr: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``SelectionPolicy.select``.

        The first ``sink_tokens`` and the newest ``recent_tokens`` are always selected and count against
        ``topk_for_step``; under page granularity all three round outward to whole pages. Should the forced tokens alone
        exceed the budget, they are it.
        """
        config = self.config
        unit = config.page_size if config.granularity == "page" else 1  # tokens that are taken or left together
        scores = self.score(query, page_min, page_max, num_tokens, topr)
        scores = scores.repeat_interleave(config.page_size // unit, dim=-1)  # [R, Hkv, units]

        units = torch.arange(scores.shape[-1], device=scores.device)
        num_units = -(-num_tokens // unit)
        real = units < num_units.unsqueeze(-1)  # [R, units]; a partly filled page ends in slots that are no tokens
        forced = units < ceil_div(config.sink_tokens, unit)
        if config.recent_tokens:
            forced = forced | (units >= ((num_tokens - config.recent_tokens) // unit).unsqueeze(-1))
        forced = forced & real
        budget = forced.sum(-1).clamp(min=ceil_div(config.topk_for_step, unit))
        count = torch.minimum(budget, num_units)  # [R]

        scores = scores.masked_fill(~real.unsqueeze(1), -torch.inf).masked_fill(forced.unsqueeze(1), torch.inf)
        chosen = best_mask(scores, count.unsqueeze(-1))
        chosen = chosen.repeat_interleave(unit, dim=-1)  # [R, Hkv, tokens]
        tokens = torch.arange(chosen.shape[-1], device=chosen.device)
        chosen &= (tokens < num_tokens.unsqueeze(-1)).unsqueeze(1)
        width = int(chosen.sum(-1).max()) if chosen.numel() else 0
        return mask_to_index(chosen, width)

    def score(
        self, query: Tensor, page_min: Tensor, page_max: Tensor, num_tokens: Tensor, topr: Tensor | None = None
    ) -> Tensor:
        """Estimated attention weight of one token of each page, the mean over the group; -inf beyond ``num_tokens``.

        Shapes as in ``select``; returns float32 [R, Hkv, pages].
        """
        (R, Hq, D), (Hkv, num_pages) = query.shape, page_min.shape[1:3]
        page_size = self.config.page_size
        q = query.reshape(R, Hkv, Hq // Hkv, D).float()
        positive = (q.sum(2) > 0).unsqueeze(2)  # [R, Hkv, 1, D]; one sign for the group, or it would read both bounds
        bits = KT_BITS[page_min.dtype]
        bound = torch.where(positive, page_max.view(bits), page_min.view(bits)).view(page_min.dtype)
        bound = bound.float().clamp(-LARGEST_BOUND, LARGEST_BOUND)

        magnitude = q.abs()
        read = q
        if topr is not None:
            read = q * best_mask(magnitude.mean(2), topr.unsqueeze(-1)).unsqueeze(2)
        logits = read @ bound.transpose(-1, -2)  # [R, Hkv, G, pages]
        if self.config.temperature == "adaptive":
            share = read.abs().sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
            share = share.masked_fill(~(share > 0), 1.0)  # q[i1] = 0: all logits are 0 and any temperature will do
            logits = logits / (D * share).sqrt()
        else:
            logits = logits / D**0.5

        first_token = torch.arange(num_pages, device=query.device) * page_size
        page_tokens = (num_tokens.unsqueeze(-1) - first_token).clamp(0, page_size)[:, None, None]  # [R, 1, 1, pages]
        empty = page_tokens == 0
        logits = logits.masked_fill(empty, -torch.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp().masked_fill(empty, 0.0)
        weights = weights / (weights * page_tokens).sum(-1, keepdim=True)
        # In float64, where the order of the heads is lost in rounding: equal pages tie wherever they lie.
        return weights.mean(2, dtype=torch.float64).float().masked_fill(empty.squeeze(1), -torch.inf)
