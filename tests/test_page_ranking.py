# SPDX-License-Identifier: Apache-2.0
"""Quest and pages by their means: the policies, and their references against what is worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import ESTIMATORS, DecodeOptions
from vllm_rocketkv.selection import SELECTION_POLICIES


@pytest.mark.parametrize("name", ["quest", "mean"])
def test_hands_its_options_to_the_op_and_forces_no_page(name: str) -> None:
    options = {"topk_for_step": 64, "dense_below": 80, "sink_tokens": 4, "recent_tokens": 8, "granularity": "token"}
    policy = SELECTION_POLICIES[name](SimpleNamespace(**options))
    assert policy.decode_options(0.25, 30.0) == DecodeOptions(
        scale=0.25,
        softcap=30.0,
        dense_below=80,
        topk_tokens=64,
        sink_tokens=0,
        recent_tokens=0,
        by_page=True,
        adaptive=False,
        estimator=name,
    )
    assert name in ESTIMATORS


def test_quest_scores_by_hand() -> None:
    """Two heads share a KV head; two pages of two dimensions."""
    low = torch.tensor([[[-1.0, 2.0], [0.0, -3.0]]])
    high = torch.tensor([[[4.0, 5.0], [1.0, torch.inf]]])
    query = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
    # Page 0: (4 - 4) + (3 + 2.5). Page 1: (1 + 6) + (0 + 2^63).
    assert reference.quest_scores(query, low, high, 7, 4).tolist() == [[5.5, 7 + 2.0**63]]
    assert reference.quest_scores(query, low, high, 4, 4).tolist() == [[5.5]]


def test_quest_bounds_what_a_token_can_score() -> None:
    draw = torch.Generator().manual_seed(4)
    keys, query = torch.randn(37, 2, 16, generator=draw), torch.randn(6, 16, generator=draw)
    scores = reference.quest_scores(query, *reference.page_summaries(keys, 4, torch.bfloat16), 37, 4)
    best = torch.einsum("hgd,nhd->hng", query.double().unflatten(0, (2, 3)), keys.double()).sum(-1)
    assert (scores[:, torch.arange(37) // 4] >= best).all()


def test_page_means_by_hand() -> None:
    """The last page has one token; bfloat16 has eight digits, so that 1.00390625 is halfway and rounds to even."""
    keys = torch.tensor([1.0, 1.0078125, 3.0, -4.0, 0.1]).reshape(5, 1, 1)
    means = reference.page_means(keys, 2, torch.bfloat16)
    assert means.flatten().tolist() == [1.0, -0.5, torch.tensor(0.1).bfloat16().item()]
    assert reference.page_means(keys, 2, torch.float32).flatten().tolist()[0] == 1.00390625
    assert reference.page_means(keys[:4] * 1e6, 4, torch.float8_e5m2).float().item() == torch.inf


def test_mean_scores_by_hand() -> None:
    """Four heads, two KV heads. An infinite mean counts as 2^64."""
    means = torch.tensor([[[1.0, 2.0], [-1.0, 0.0]], [[torch.inf, 0.0], [1.0, 1.0]]])
    query = torch.tensor([[1.0, 0.0], [3.0, 2.0], [1.0, 1.0], [0.0, 1.0]])
    assert reference.mean_scores(query, means, 8, 4).tolist() == [[4.0, -2.0], [2.0**63, 1.5]]


def test_what_is_chosen_are_whole_pages_of_which_none_is_forced() -> None:
    scores = torch.tensor([[-3.0, -1.0, -2.0, -1.0]])
    assert reference.hsa_choose(scores, 7, 2, 3, granularity="page") == [[2, 3, 6]]
