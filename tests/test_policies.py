# SPDX-License-Identifier: Apache-2.0
"""Both stages, vectorised, against ``kernels.reference``.

*Exact* cases draw integers, so that dot products are exact in any order and ties are real ties: indices must be equal.
*Random* cases draw floats: a choice may differ from the reference's only between tokens whose reference scores are as
good as equal.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_rocketkv.eviction import EVICTION_POLICIES, EvictionPolicy, SnapKV, snapkv
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.attention import attend_selected
from vllm_rocketkv.kernels.topk import best_mask, mask_to_index
from vllm_rocketkv.selection import SELECTION_POLICIES, HybridSparseAttention, SelectionPolicy
from vllm_rocketkv.selection.page_summary import round_down, round_up, summarise

SOURCE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KT_DTYPES = [torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
HEADS = [
    (2, 2),
    (3, 1),
    (6, 2),
    (8, 2),
    (6, 1),
    (14, 2),
    (8, 1),
]  # (Hq, Hkv): groups of 1, 3, 3, 4, 6, 7, 8; MQA among them
HEAD_SIZES = [32, 64, 80, 96, 128, 256]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**options: Any) -> Any:
    """What the policies read of ``RocketKVConfig``, without its bounds: corner cases lie outside them."""
    defaults = {
        "window_size": 4,
        "kernel_size": 5,
        "sink_tokens": 0,
        "recent_tokens": 0,
        "page_size": 4,
        "granularity": "token",
        "temperature": "adaptive",
        "window_softmax": "all",
        "topk_for_step": 16,
    }
    return SimpleNamespace(**(defaults | options))


def changed(case: Any) -> str:
    """A case's name: what differs from the defaults of its dataclass."""
    values = {
        field.name: getattr(case, field.name) for field in fields(case) if getattr(case, field.name) != field.default
    }
    return (
        ",".join(f"{name}={value}".replace("torch.", "").replace(" ", "") for name, value in values.items())
        or "default"
    )


def draw(*shape: int, exact: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_as_good(got: list[int], want: list[int], scores: Tensor, exact: bool) -> None:
    """``got`` is the reference's choice ``want``, or swaps tokens of (1e-5 relative) the same reference score."""
    if exact or got == want:
        assert got == want
        return
    assert len(got) == len(want)
    assert got == sorted(set(got))
    extra, missing = sorted(set(got) - set(want)), sorted(set(want) - set(got))
    torch.testing.assert_close(scores[extra].sort().values, scores[missing].sort().values, rtol=1e-5, atol=1e-30)


# ------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("table", "base"), [(EVICTION_POLICIES, EvictionPolicy), (SELECTION_POLICIES, SelectionPolicy)], ids=["ev", "sel"]
)
def test_tables_hold_complete_policies(table, base):
    assert table["none"] is None
    for policy in table.values():
        assert policy is None or isinstance(policy(config()), base)


# -------------------------------------------------------------------------------------------------------- top-k


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_best_mask_is_the_head_of_a_stable_sort(data):
    n = data.draw(st.integers(1, 20))
    value = st.sampled_from([-1.0, 0.0, 1.0, 2.0, torch.inf, -torch.inf, torch.nan])
    rows = data.draw(st.lists(st.lists(value, min_size=n, max_size=n), min_size=1, max_size=4))
    counts = data.draw(st.lists(st.integers(0, n), min_size=len(rows), max_size=len(rows)))
    want = [reference.best(row, count) for row, count in zip(rows, counts, strict=True)]
    mask = best_mask(torch.tensor(rows), torch.tensor(counts))
    assert [row.nonzero().flatten().tolist() for row in mask] == want
    width = data.draw(st.integers(max(counts), n + 2))
    index, valid = mask_to_index(mask, width)
    assert index.shape == valid.shape == (len(rows), width)
    assert [i[v].tolist() for i, v in zip(index, valid, strict=True)] == want
    assert not index[~valid].any()
    assert best_mask(torch.tensor(rows), counts[0])[0].nonzero().flatten().tolist() == want[0]


# ----------------------------------------------------------------------------------------------------- eviction


@dataclass(frozen=True)
class Eviction:
    Hq: int = 6
    Hkv: int = 2
    D: int = 32
    N: int = 61
    W: int = 4
    num_kept: int = 20
    kernel_size: int = 5
    sink_tokens: int = 0
    window_softmax: str = "all"
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    exact: bool = False


def eviction_cases() -> list[Eviction]:
    cases = []
    for (Hq, Hkv), D in itertools.product(HEADS, HEAD_SIZES):
        cases.append(Eviction(Hq, Hkv, D, sink_tokens=Hq % 3, window_softmax=["all", "prefix"][D % 32 == 0]))
    W, P = 4, 20
    for N, softmax, exact in itertools.product(
        [1, W - 1, W, W + 1, P - 1, P, P + 1, P + 2, 67], ["all", "prefix"], [False, True]
    ):
        cases.append(Eviction(2, 2, N=N, window_softmax=softmax, exact=exact))
        cases.append(Eviction(N=N, window_softmax=softmax, sink_tokens=3))
    for num_kept, sinks, kernel_size in itertools.product([4, 5, 12, 60], [0, 2, 30], [1, 2, 3, 63]):
        cases.append(Eviction(num_kept=num_kept, sink_tokens=sinks, kernel_size=kernel_size))
        cases.append(Eviction(2, 2, num_kept=num_kept, sink_tokens=sinks, kernel_size=kernel_size, exact=True))
    for dtype, softcap, softmax in itertools.product(SOURCE_DTYPES, [0.0, 2.0], ["all", "prefix"]):
        case = Eviction(dtype=dtype, softcap=softcap, window_softmax=softmax)
        cases += [case, replace(case, Hq=2, exact=True)]
    cases.append(Eviction(14, 2, 64, N=500, W=32, num_kept=128, kernel_size=63, sink_tokens=4))
    return cases


@pytest.mark.parametrize("block", [1 << 23, 97], ids=["one-block", "many-blocks"])
@pytest.mark.parametrize("case", eviction_cases(), ids=changed)
def test_snapkv_keeps_what_the_reference_keeps(case, block, monkeypatch):
    monkeypatch.setattr(snapkv, "MAX_BLOCK_ELEMENTS", block)
    W, scale = min(case.W, case.N), case.D**-0.5
    query = draw(W, case.Hq, case.D, exact=case.exact, dtype=case.dtype, seed=1)
    keys = draw(case.N, case.Hkv, case.D, exact=case.exact, dtype=case.dtype, seed=2)
    if case.exact:  # whole runs of equal keys: the pooled scores tie far and wide
        keys = keys[torch.arange(case.N) // 7 % 3]
    policy = SnapKV(
        config(
            window_size=case.W,
            kernel_size=case.kernel_size,
            sink_tokens=case.sink_tokens,
            window_softmax=case.window_softmax,
        )
    )
    kept = policy.keep(query, keys, case.num_kept, scale, case.softcap)
    assert kept.dtype == torch.int64
    assert kept.shape == (case.Hkv, min(case.num_kept, case.N))
    if case.num_kept >= case.N:
        assert kept.tolist() == [list(range(case.N))] * case.Hkv
        return
    scores = reference.window_scores(query, keys, scale, case.window_softmax, case.kernel_size, case.softcap)
    want = reference.keep_tokens(scores, case.num_kept, W, case.sink_tokens)
    for got_head, want_head, head_scores in zip(kept.tolist(), want.tolist(), scores, strict=True):
        assert_as_good(got_head, want_head, head_scores, case.exact)
        assert got_head[-W:] == list(range(case.N - W, case.N))
        sinks = min(case.sink_tokens, case.num_kept - W)
        assert got_head[:sinks] == list(range(sinks))
    torch.testing.assert_close(policy.score(query, keys, scale, case.softcap).double(), scores, rtol=1e-5, atol=1e-9)


def test_snapkv_ties_go_to_the_lower_position():
    kept = SnapKV(config()).keep(torch.zeros(4, 2, 32), torch.zeros(40, 1, 32), 10, 1.0)
    assert kept.tolist() == [[0, 1, 2, 3, 4, 5, 36, 37, 38, 39]]


def test_snapkv_finds_a_planted_token_and_its_neighbourhood():
    keys = torch.zeros(100, 1, 32)
    keys[50, 0, 0] = 8.0
    query = torch.zeros(4, 2, 32)
    query[..., 0] = 1.0
    assert SnapKV(config()).keep(query, keys, 4 + 5, 1.0)[0, :5].tolist() == [48, 49, 50, 51, 52]


# ----------------------------------------------------------------------------------------- page summaries (I8)


def numbers(dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    """Tensors of any finite or infinite numbers of ``dtype``, drawn by their bits."""
    width = torch.finfo(dtype).bits
    integer = torch.int16 if width == 16 else torch.int32
    edges = [0, 1, -(2 ** (width - 1)), 1 - 2 ** (width - 1)]  # +0, the least subnormal, -0, its negative
    code = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1) | st.sampled_from(edges)
    # around the numbers of float8_e5m2, where rounding turns
    near = st.builds(
        lambda byte, step: (
            torch.tensor([byte], dtype=torch.int16).to(torch.int8).view(torch.float8_e5m2).to(dtype).view(integer)
            + step
        ).item(),
        st.integers(-128, 127),
        st.integers(-1, 1),
    )

    def build(codes: list[int]) -> Tensor:
        wrapped = torch.tensor(codes, dtype=torch.int64).to(integer)
        return wrapped.view(dtype).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    return st.lists(code | near, min_size=1, max_size=64).map(build)


@pytest.mark.parametrize("kt_dtype", KT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
def test_rounding_bounds_every_number_and_is_tight(dtype, kt_dtype):
    @settings(max_examples=80, deadline=None)
    @given(numbers(dtype))
    def check(x: Tensor) -> None:
        low, high = round_down(x, kt_dtype), round_up(x, kt_dtype)
        assert low.dtype == high.dtype == kt_dtype
        assert (low.double() <= x.double()).all()
        assert (high.double() >= x.double()).all()
        assert torch.equal(low.double(), reference.round_down(x, kt_dtype).double())
        assert torch.equal(high.double(), reference.round_up(x, kt_dtype).double())

    check()


@pytest.mark.parametrize("kt_dtype", KT_DTYPES[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_all_65536_numbers(dtype, kt_dtype):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    nan = x.isnan()
    assert round_down(x, kt_dtype)[nan].float().isnan().all()
    assert round_up(x, kt_dtype)[nan].float().isnan().all()
    x = x[~nan]
    assert torch.equal(round_down(x, kt_dtype).double(), reference.round_down(x, kt_dtype).double())
    assert torch.equal(round_up(x, kt_dtype).double(), reference.round_up(x, kt_dtype).double())


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
    assert round_down(torch.tensor(x), torch.float8_e5m2).item() == low
    assert round_up(torch.tensor(x), torch.float8_e5m2).item() == high


@pytest.mark.parametrize("kt_dtype", KT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 4, 7, 16])
def test_summaries_count_only_real_tokens(page_size, dtype, kt_dtype):
    for n in {0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + page_size // 2}:
        pages = 7
        keys = torch.full((pages * page_size, 3, 32), torch.nan, dtype=dtype)
        keys[:n] = draw(n, 3, 32, exact=False, dtype=dtype, seed=n) * 100
        num_valid = (n - torch.arange(pages) * page_size).clamp(0, page_size)
        low, high = summarise(keys.unflatten(0, (pages, page_size)), num_valid, kt_dtype)
        want_low, want_high = reference.page_summaries(keys[:n], page_size, kt_dtype)
        used = want_low.shape[1]
        assert used == -(-n // page_size)
        assert torch.equal(low[:used].float(), want_low.transpose(0, 1).float())
        assert torch.equal(high[:used].float(), want_high.transpose(0, 1).float())
        assert (low[used:].float() == torch.inf).all()
        assert (high[used:].float() == -torch.inf).all()
        of_token = torch.arange(n) // page_size
        assert (low[of_token].float() <= keys[:n].float()).all()
        assert (high[of_token].float() >= keys[:n].float()).all()


# ---------------------------------------------------------------------------------------------------- selection


@dataclass(frozen=True)
class Selection:
    Hq: int = 6
    Hkv: int = 2
    D: int = 32
    page_size: int = 4
    topk: int = 16
    granularity: str = "token"
    temperature: str = "adaptive"
    topr: tuple[int, ...] | None = (1, 5, 8, 16, 31, 32)
    sink_tokens: int = 0
    recent_tokens: int = 0
    kt_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    num_tokens: tuple[int, ...] = (0, 1, 15, 16, 17, 48, 61)
    exact: bool = False
    zero: bool = False


def selection_cases() -> list[Selection]:
    cases = []
    for i, ((Hq, Hkv), D) in enumerate(itertools.product(HEADS, HEAD_SIZES)):
        case = Selection(Hq, Hkv, D, topr=(1, D // 3, D // 2, D), sink_tokens=i % 3, recent_tokens=i % 4)
        cases.append(replace(case, kt_dtype=KT_DTYPES[i % 2], granularity=["token", "page"][i // 2 % 2]))
    for granularity, temperature, exact in itertools.product(
        ["token", "page"], ["adaptive", "constant"], [False, True]
    ):
        base = Selection(granularity=granularity, temperature=temperature, exact=exact, Hq=2 if exact else 6)
        for topr, (sinks, recent) in itertools.product([None, base.topr], [(0, 0), (1, 0), (0, 1), (4, 5), (15, 16)]):
            cases.append(replace(base, topr=topr, sink_tokens=sinks, recent_tokens=recent))
        for page_size, topk in itertools.product([1, 2, 3, 4, 16], [1, 3, 16, 17, 1000]):
            tokens = {0, 1, page_size, page_size + 1, topk - 1, topk, topk + 1, topk + page_size, 2 * topk + 1, 97}
            num_tokens = tuple(sorted(n for n in tokens if n <= 100))
            cases.append(replace(base, page_size=page_size, topk=topk, num_tokens=num_tokens, recent_tokens=topk % 3))
        cases += [replace(base, num_tokens=(0,)), replace(base, num_tokens=(0, 0), sink_tokens=2, recent_tokens=2)]
        cases += [
            replace(base, kt_dtype=kt_dtype, dtype=dtype, num_tokens=(0, 17, 49))
            for kt_dtype in KT_DTYPES
            for dtype in SOURCE_DTYPES
        ]
    cases += [
        Selection(Hq=2, zero=True, granularity=g, temperature=t)
        for g in ("token", "page")
        for t in ("adaptive", "constant")
    ]
    return cases


@dataclass
class Batch:
    """Rows of unequal length, their caches padded with NaN."""

    query: Tensor  # [R, Hq, D]
    keys: Tensor  # [R, capacity, Hkv, D]
    values: Tensor
    page_min: Tensor  # [R, Hkv, pages, D]
    page_max: Tensor
    num_tokens: Tensor  # [R]
    topr: Tensor | None


def make_batch(case: Selection) -> Batch:
    R, pages = len(case.num_tokens), max(case.num_tokens) // case.page_size + 3
    capacity = pages * case.page_size
    shape = (R, capacity, case.Hkv, case.D)
    num_tokens = torch.tensor(case.num_tokens)
    query = draw(R, case.Hq, case.D, exact=case.exact, dtype=case.dtype, seed=3) * (not case.zero)
    keys = draw(*shape, exact=case.exact, dtype=case.dtype, seed=4)
    if case.exact:  # pages repeat: ties between pages, in every head
        keys = keys[:, torch.arange(capacity) % (5 * case.page_size)]
    values = draw(*shape, exact=False, dtype=case.dtype, seed=5)
    beyond = torch.arange(capacity) >= num_tokens.unsqueeze(1)
    keys, values = keys.clone(), values.clone()
    keys[beyond], values[beyond] = torch.nan, torch.nan
    slots = torch.arange(pages) * case.page_size
    num_valid = (num_tokens.unsqueeze(1) - slots).clamp(0, case.page_size)
    low, high = summarise(keys.reshape(R * pages, case.page_size, case.Hkv, case.D), num_valid.flatten(), case.kt_dtype)
    low, high = (x.unflatten(0, (R, pages)).transpose(1, 2).contiguous() for x in (low, high))
    garbage = (num_valid == 0)[:, None, :, None].expand(low.shape)
    low, high = (torch.where(garbage, torch.nan, x.float()).to(case.kt_dtype) for x in (low, high))
    topr = None if case.topr is None else torch.tensor(case.topr).repeat(R)[:R]
    return Batch(query, keys, values, low, high, num_tokens, topr)


def hsa(case: Selection) -> HybridSparseAttention:
    return HybridSparseAttention(
        config(
            page_size=case.page_size,
            topk_for_step=case.topk,
            granularity=case.granularity,
            temperature=case.temperature,
            sink_tokens=case.sink_tokens,
            recent_tokens=case.recent_tokens,
        )
    )


@pytest.mark.parametrize("case", selection_cases(), ids=changed)
def test_hsa_selects_what_the_reference_selects(case):
    batch = make_batch(case)
    policy = hsa(case)
    index, valid = policy.select(batch.query, batch.page_min, batch.page_max, batch.num_tokens, batch.topr)
    assert index.dtype == torch.int64
    assert index.shape == valid.shape
    assert index.shape[2] == valid.sum(-1).max()
    assert not index[~valid].any()
    got_scores = policy.score(batch.query, batch.page_min, batch.page_max, batch.num_tokens, batch.topr)
    choose = (case.page_size, case.topk, case.granularity, case.sink_tokens, case.recent_tokens)
    for row, n in enumerate(case.num_tokens):
        keys = batch.keys[row, :n]
        low, high = reference.page_summaries(keys, case.page_size, case.kt_dtype)
        topr = None if batch.topr is None else int(batch.topr[row])
        scores = reference.hsa_scores(batch.query[row], low, high, n, case.page_size, topr, case.temperature)
        want = reference.hsa_choose(scores, n, *choose)
        torch.testing.assert_close(got_scores[row, :, : scores.shape[1]].double(), scores, rtol=2e-5, atol=1e-9)
        for head in range(case.Hkv):
            got = index[row, head][valid[row, head]].tolist()
            of_tokens = scores[head].repeat_interleave(case.page_size)[:n]
            assert_as_good(got, want[head], of_tokens, case.exact or case.zero)
            assert set(range(min(n, case.sink_tokens))) <= set(got)
            assert set(range(max(0, n - case.recent_tokens), n)) <= set(got)
            if n <= case.topk:
                assert got == list(range(n))


def test_hsa_by_hand():
    """Two heads of one group, three pages of two tokens, two dimensions; worked out on paper.

    Sums of q are +1 and -2: bounds are max of d0 and min of d1. Mean |q| is 1.5 and 1: topr 1 reads d0 only.
    """
    query = torch.tensor([[[2.0, -1.0], [-1.0, -1.0]]])
    keys = torch.tensor([[1.0, 5.0], [0.0, 4.0], [3.0, 0.0], [2.0, 1.0], [-9.0, -9.0]]).unsqueeze(1)
    low, high = reference.page_summaries(keys, 2, torch.float32)
    logits = torch.tensor([[2.0, 6.0, -18.0], [-1.0, -3.0, 9.0]]).double()
    logits = logits / (2 * torch.tensor([[2 / 3], [1 / 2]]).double()).sqrt()
    weights = logits.exp()
    weights = weights / (weights * torch.tensor([2, 2, 1])).sum(1, keepdim=True)
    want = weights.mean(0, keepdim=True)
    got = reference.hsa_scores(query[0], low, high, 5, 2, topr=1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)
    policy = HybridSparseAttention(config(page_size=2, topk_for_step=2))
    index, valid = policy.select(query, low.unsqueeze(0), high.unsqueeze(0), torch.tensor([5]), torch.tensor([1]))
    assert index.tolist() == [[[2, 4]]]  # the lone token of the last page, then the first of page 1
    assert valid.all()
    low[0, 2], high[0, 2] = torch.inf, torch.inf  # an infinite bound is only a very large one
    index, _ = policy.select(query, low.unsqueeze(0), high.unsqueeze(0), torch.tensor([5]), torch.tensor([2]))
    assert 4 in index[0, 0].tolist()


# ---------------------------------------------------------------------------------------------------- attention


def gather(x: Tensor, index: Tensor) -> Tensor:
    """``x`` [R, capacity, Hkv, D] at ``index`` [R, Hkv, K] -> [R, Hkv, K, D]."""
    return x.transpose(1, 2).gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
@pytest.mark.parametrize(("Hq", "Hkv"), HEADS)
def test_attention_over_the_selection(Hq, Hkv, dtype, softcap):
    for D in HEAD_SIZES:
        case = Selection(Hq, Hkv, D, dtype=dtype, granularity="page", recent_tokens=3, topr=(D // 2,))
        case = replace(case, num_tokens=(0, 1, 16, 17, 61))
        batch, scale = make_batch(case), D**-0.5
        index, valid = hsa(case).select(batch.query, batch.page_min, batch.page_max, batch.num_tokens, batch.topr)
        keys, values = gather(batch.keys, index), gather(batch.values, index)
        out = attend_selected(batch.query, keys, values, valid, scale, softcap)
        assert out.dtype == dtype
        for row, n in enumerate(case.num_tokens):
            selected = [index[row, head][valid[row, head]].tolist() for head in range(Hkv)]
            want = reference.attend(
                batch.query[row], batch.keys[row, :n], batch.values[row, :n], selected, scale, softcap
            )
            torch.testing.assert_close(out[row].double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
            if n <= case.topk and n:
                dense = reference.dense_attention(
                    batch.query[row : row + 1], batch.keys[row, :n], batch.values[row, :n], scale, softcap
                )
                torch.testing.assert_close(want, dense[0])
    assert not out[0].any()


def test_dense_attention_is_sdpa():
    query, keys, values = (draw(7, heads, 32, exact=False, seed=heads) for heads in (6, 2, 3))
    values = values[:, :2]
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (query, keys, values)), is_causal=True, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(reference.dense_attention(query, keys, values, 0.2), want.transpose(0, 1))
