# SPDX-License-Identifier: Apache-2.0
"""The tables of policies, and ``kernels.reference`` itself against what is worked out by hand or by PyTorch.

The reference is what ``test_cpu_stage1.py`` and ``test_cpu_decode.py`` hold the C++ kernels against.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.policy_oracle import Lengths, Life
from vllm_rocketkv.config import RocketKVConfig
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


@pytest.mark.parametrize(
    ("options", "estimator"), [({"policy": "quest"}, "quest"), ({"preset": "blog"}, "mean"), ({"policy": "hsa"}, "hsa")]
)
def test_estimator_follows_the_configuration(options, estimator):
    config = RocketKVConfig.parse(options)
    found = SELECTION_POLICIES[config.selection](config).decode_options(0.25, 30.0)
    assert found.estimator == estimator
    assert (found.topk_tokens, found.dense_below, found.by_page) == (config.topk_tokens, config.dense_below, True)
    if estimator != "hsa":
        assert (found.sink_tokens, found.recent_tokens) == (0, 0)


def test_no_selection_reads_everything():
    options = Everything(SimpleNamespace()).decode_options(0.25, 30.0)
    assert (options.scale, options.softcap) == (0.25, 30.0)
    assert options.dense_below >= 1 << 30


# ------------------------------------------------------------------------------------------ a request's life, by hand


def make_life(num_prompt, **options):
    config = RocketKVConfig.parse({"prompt_budget": 20, "decode_interval": 16, **options})
    return Life(Lengths(num_prompt, config, block_size=16), num_kv_heads=1, scale=1.0, softcap=0.0)


def positions(*runs):
    return [position for first, last in runs for position in range(first, last + 1)]


@pytest.mark.parametrize(
    ("num_prompt", "kept"),
    [
        # 70 tokens are beyond the budget by 50: 4 blocks go, 6 tokens stay. 36 fit: first at 64 + 36.
        (70, {70: ((0, 3), (68, 69)), 100: ((0, 3), (84, 99)), 116: ((0, 3), (100, 115)), 132: ((0, 3), (116, 131))}),
        # Within the budget: all of 36 tokens first.
        (20, {36: ((0, 3), (20, 35)), 52: ((0, 3), (36, 51)), 68: ((0, 3), (52, 67)), 84: ((0, 3), (68, 83))}),
    ],
)
def test_life_under_streaming_llm(num_prompt, kept):
    life = make_life(num_prompt, policy="streaming_llm", sink_tokens=4)
    assert life.lengths.milestones() == list(kept)
    tokens = torch.zeros(140, 1, 4)
    life.compute(tokens, tokens, 0, 37)
    life.compute(tokens, tokens, 37, 140)
    for length, runs in kept.items():
        assert life.left(length).tolist() == [positions(*runs)]
        assert life.seen(length).tolist() == [positions(*runs, (length, length))]
        assert life.seen(length - 1)[0, -1] == length - 1
    assert life.seen(35).tolist() == [positions((0, 35))]


def test_life_under_h2o_sums_up_what_the_reference_does_until_tokens_go():
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(80, 2, 8, generator=generator), torch.randn(80, 1, 8, generator=generator)
    life = make_life(20, policy="h2o")
    for start, end in ((0, 7), (7, 34), (34, 35)):
        life.compute(query, keys, start, end)
        want = reference.accumulated_scores(query[:end], keys[:end], 1.0)
        torch.testing.assert_close(life.scores, want)
    want = reference.accumulated_scores(query[:36], keys[:36], 1.0)
    life.compute(query, keys, 35, 36)
    kept = reference.keep_heavy(want, 20, 10)
    assert torch.equal(life.left(36), kept)
    torch.testing.assert_close(life.scores, want.gather(1, kept))  # what was received before goes on to count
    life.compute(query, keys, 36, 37)
    seen = torch.cat([kept[0], torch.tensor([36])])
    given = (query[36].double() @ keys[seen, 0].double().T).softmax(-1).sum(0)
    torch.testing.assert_close(life.scores[0], torch.nn.functional.pad(want[0, kept[0]], (0, 1)) + given)


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
