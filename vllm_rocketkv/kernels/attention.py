# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered tokens in portable PyTorch: what runs where no faster kernel does."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_selected(
    query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float, softcap: float = 0.0
) -> Tensor:
    """softmax(q K^T * scale) V over the valid ones of K gathered tokens.

    ``query`` [R, Hq, D]; ``keys``, ``values`` [R, Hkv, K, D]; ``valid`` [R, Hkv, K]. Float32 inside; returns [R, Hq, D]
    in the query's dtype. What lies at invalid entries never matters, NaN included; a head with nothing valid gives
    zeros.
    """
    R, Hq, D = query.shape
    Hkv = keys.shape[1]
    grouped = query.reshape(R, Hkv, Hq // Hkv, D).float()
    logits = grouped @ keys.float().transpose(-1, -2) * scale  # [R, Hkv, G, K]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    valid = valid.unsqueeze(-2)
    weights = logits.masked_fill(~valid, -torch.inf).softmax(-1).masked_fill(~valid, 0.0)
    out = weights @ values.float().masked_fill(~valid.transpose(-1, -2), 0.0)
    return out.reshape(R, Hq, values.shape[-1]).to(query.dtype)
