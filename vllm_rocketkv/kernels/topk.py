# SPDX-License-Identifier: Apache-2.0
"""Top-k with one tie rule: higher score first, then lower index. ``Tensor.topk`` alone leaves ties to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def best_mask(scores: Tensor, count: int | Tensor) -> Tensor:
    """Mark the ``count`` highest ``scores`` [..., n] along the last axis; ties go to the lower index, NaN ranks last.

    ``count`` is one number or an int64 tensor [...] (broadcastable), in 0 .. n. The same set as the head of a stable
    descending sort, without the sort: topk finds only the threshold, whose value does not depend on how it breaks ties.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if isinstance(count, int):
        count = torch.tensor(count, device=scores.device)
    count = count.expand(scores.shape[:-1]).unsqueeze(-1)
    most = int(count.max()) if count.numel() else 0
    if most == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.topk(most).values.gather(-1, (count - 1).clamp(min=0))
    above, level = scores > threshold, scores == threshold
    return above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def mask_to_index(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ascending indices of the marked entries of ``mask`` [..., n], at most ``width`` of them in each row.

    Returns (index int64 [..., width], valid bool [..., width]); what is not valid has index 0. Reads nothing back to
    the host.
    """
    rank = torch.where(mask, mask.cumsum(-1) - 1, width)  # unmarked entries share the dump slot behind the last
    source = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    index = torch.zeros(*mask.shape[:-1], width + 1, dtype=torch.long, device=mask.device).scatter_(-1, rank, source)
    valid = torch.arange(width, device=mask.device) < mask.sum(-1, keepdim=True)
    return index[..., :width], valid
