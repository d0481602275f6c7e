# SPDX-License-Identifier: Apache-2.0
"""The tables of policies, and ``kernels.reference`` itself against what is worked out by hand or by PyTorch.

The reference is what ``test_cpu_stage1.py`` and ``test_cpu_decode.py`` hold the C++ kernels against.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_rocketkv.eviction import EVICTION_POLICIES, EvictionPolicy, SnapKV
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import DecodeOptions
from vllm_rocketkv.selection import SELECTION_POLICIES, Everything, HybridSparseAttention, SelectionPolicy

# ------------------------------------------------------------------------------------------------------- policies


def test_tables_hold_complete_policies():
    assert EVICTION_POLICIES["none"] is None
    evictions = [policy for policy in EVICTION_POLICIES.values() if policy]
    for policies, base in ((evictions, EvictionPolicy), (SELECTION_POLICIES.values(), SelectionPolicy)):
        for policy in policies:
            assert isinstance(policy(SimpleNamespace()), base)


@pytest.mark.parametrize("softmax", ["all", "prefix"])
def test_snapkv_hands_its_options_to_the_op(softmax):
    calls = []
    cache = SimpleNamespace(keep_tokens=lambda *args, **options: calls.append((args, options)) or "kept")
    policy = SnapKV(SimpleNamespace(window_softmax=softmax, kernel_size=63, sink_tokens=4))
    assert policy.keep("query", cache, "blocks", 99, 50, 0.25, 30.0, is_private=True) == "kept"
    options = {"softmax_over_all": softmax == "all", "kernel_size": 63, "sink_tokens": 4, "is_private": True}
    assert calls == [(("query", "blocks", 99, 50, 0.25, 30.0), options)]


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("temperature", ["adaptive", "constant"])
def test_hsa_hands_its_options_to_the_op(granularity, temperature):
    options = {"topk_for_step": 64, "dense_below": 80, "sink_tokens": 4, "recent_tokens": 8}
    policy = HybridSparseAttention(SimpleNamespace(granularity=granularity, temperature=temperature, **options))
    assert policy.decode_options(0.25, 30.0) == DecodeOptions(
        scale=0.25,
        softcap=30.0,
        dense_below=80,
        topk_tokens=64,
        sink_tokens=4,
        recent_tokens=8,
        by_page=granularity == "page",
        adaptive=temperature == "adaptive",
    )


def test_no_selection_reads_everything():
    options = Everything(SimpleNamespace()).decode_options(0.25, 30.0)
    assert (options.scale, options.softcap) == (0.25, 30.0)
    assert options.dense_below >= 1 << 30


# ------------------------------------------------------------------------------------------------------ the reference


def test_ties_go_to_the_lower_index_and_what_is_not_a_number_ranks_last():
    assert reference.best([1.0, 2.0, 1.0, 2.0, 1.0], 3) == [0, 1, 3]
    assert reference.best([torch.nan, 0.0, torch.inf, torch.nan, 0.0], 4) == [0, 1, 2, 4]


def test_keep_tokens_by_hand():
    scores = torch.tensor([[0.0, 3.0, 1.0, 3.0, 0.0], [5.0, 0.0, 0.0, 0.0, 4.0]]).double()
    assert reference.keep_tokens(scores, 4, 2).tolist() == [[1, 3, 5, 6], [0, 4, 5, 6]]
    assert reference.keep_tokens(scores, 4, 2, sink_tokens=1).tolist() == [[0, 1, 5, 6], [0, 4, 5, 6]]


@pytest.mark.parametrize(("softmax", "visible"), [("all", (4, 5)), ("prefix", (3, 3))])
def test_window_scores_by_hand(softmax, visible):
    """One head, keys of zeros: every visible token has the same weight. The pool widens a token that stands out."""
    scores = reference.window_scores(torch.ones(2, 1, 4), torch.zeros(5, 1, 4), 1.0, softmax, kernel_size=1)
    assert scores.tolist() == [[pytest.approx(sum(1 / n for n in visible))] * 3]
    keys = torch.zeros(100, 1, 32)
    keys[50, 0, 0] = 8.0
    query = torch.zeros(4, 2, 32)
    query[..., 0] = 1.0
    scores = reference.window_scores(query, keys, 1.0, softmax, kernel_size=5)
    assert reference.keep_tokens(scores, 4 + 5, 4)[0, :5].tolist() == [48, 49, 50, 51, 52]


@pytest.mark.parametrize(
    ("x", "low", "high"),
    [
        (0.0, 0.0, 0.0),
        (-0.0, 0.0, 0.0),
        (1e-30, 0.0, 2.0**-16),
        (-1e-30, -(2.0**-16), 0.0),
        (1.1, 1.0, 1.25),
        (-1.1, -1.25, -1.0),
        (57344.0, 57344.0, 57344.0),
        (57345.0, 57344.0, torch.inf),
        (-1e38, -torch.inf, -57344.0),
        (torch.inf, torch.inf, torch.inf),
    ],
)
def test_float8_rounding_by_hand(x, low, high):
    assert reference.round_down(torch.tensor(x), torch.float8_e5m2).item() == low
    assert reference.round_up(torch.tensor(x), torch.float8_e5m2).item() == high


def test_hsa_by_hand():
    """Two heads of one group, three pages of two tokens, two dimensions; worked out on paper.

    Sums of q are +1 and -2: bounds are max of d0 and min of d1. Mean |q| is 1.5 and 1: topr 1 reads d0 only.
    """
    query = torch.tensor([[2.0, -1.0], [-1.0, -1.0]])
    keys = torch.tensor([[1.0, 5.0], [0.0, 4.0], [3.0, 0.0], [2.0, 1.0], [-9.0, -9.0]]).unsqueeze(1)
    low, high = reference.page_summaries(keys, 2, torch.float32)
    logits = torch.tensor([[2.0, 6.0, -18.0], [-1.0, -3.0, 9.0]]).double()
    logits = logits / (2 * torch.tensor([[2 / 3], [1 / 2]]).double()).sqrt()
    weights = logits.exp()
    weights = weights / (weights * torch.tensor([2, 2, 1])).sum(1, keepdim=True)
    want = weights.mean(0, keepdim=True)
    got = reference.hsa_scores(query, low, high, 5, 2, topr=1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)
    # the lone token of the last page, then the first of page 1
    assert reference.hsa_select(query, low, high, 5, 2, topk_tokens=2, topr=1) == [[2, 4]]
    assert reference.hsa_select(query, low, high, 5, 2, topk_tokens=4, topr=1, granularity="page") == [[2, 3, 4]]
    assert reference.hsa_select(query, low, high, 5, 2, topk_tokens=2, topr=1, sink_tokens=1) == [[0, 4]]
    assert reference.hsa_select(query, low, high, 5, 2, topk_tokens=2, topr=1, recent_tokens=3) == [[2, 3, 4]]
    low[0, 2], high[0, 2] = torch.inf, torch.inf  # an infinite bound is only a very large one
    assert 4 in reference.hsa_select(query, low, high, 5, 2, topk_tokens=2, topr=2)[0]


def test_dense_attention_is_sdpa():
    generator = torch.Generator().manual_seed(6)
    query, keys, values = (torch.randn(7, heads, 32, generator=generator) for heads in (6, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (query, keys, values)), is_causal=True, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(reference.dense_attention(query, keys, values, 0.2), want.transpose(0, 1))
