# SPDX-License-Identifier: Apache-2.0
"""The layout arithmetic against the definitions of the design, worked out independently."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rocketkv.layout import (
    PromptLayout,
    adaptive_split,
    adaptive_topr,
    ceil_div,
    max_private_blocks,
)

settings.register_profile("shared-machine", deadline=None)  # other processes may hold the cores for a while
settings.load_profile("shared-machine")

BLOCK_SIZES = st.sampled_from([1, 2, 8, 16, 32, 48, 64, 128])


@st.composite
def layouts(draw: st.DrawFn, evictable: bool | None = None) -> tuple[PromptLayout, int]:
    """A layout and its window, with P >= W + B as start-up demands."""
    B = draw(BLOCK_SIZES)
    W = draw(st.integers(1, 64))
    P = W + B + draw(st.integers(0, 300))
    corner = st.sampled_from([W - 1, W, W + 1, P - 1, P, P + 1, P + B - 1, P + B, P + B + 1])
    N = max(1, draw(st.one_of(corner, st.integers(1, 3000))))
    if evictable is True:
        N = max(N, P + 1)
    elif evictable is False:
        N = min(N, P)
    return PromptLayout(N, P, B), W


def chunked(draw: st.DrawFn, end: int) -> list[tuple[int, int]]:
    """Cut [0, end) into steps, as a scheduler might."""
    cuts = sorted(draw(st.sets(st.integers(1, end - 1), max_size=8))) if end > 1 else []
    return list(zip([0, *cuts], [*cuts, end], strict=True))


@given(st.integers(0, 10**9), st.integers(1, 10**4))
def test_ceil_div(numerator: int, denominator: int) -> None:
    assert ceil_div(numerator, denominator) == math.ceil(Fraction(numerator, denominator))


@given(layouts())
def test_definitions(case: tuple[PromptLayout, int]) -> None:
    layout, _ = case
    N, P, B = layout.num_prompt_tokens, layout.prompt_budget, layout.block_size
    n, s = math.ceil(Fraction(N, B)), max(0, math.ceil(Fraction(N - P, B)))
    assert layout.is_evictable is (N > P)
    assert layout.num_natural_blocks == n
    assert layout.num_dropped_blocks == s
    assert layout.num_private_blocks == (n - s if N > P else 0)
    assert layout.num_dropped_tokens == s * B
    assert layout.num_kept_tokens == N - s * B
    assert layout.num_hashable_tokens == max(k for k in range(0, N + 1, B))


@given(layouts(evictable=False))
def test_below_the_budget_nothing_changes(case: tuple[PromptLayout, int]) -> None:
    layout, _ = case
    assert layout.num_private_blocks == layout.num_dropped_blocks == layout.num_dropped_tokens == 0
    assert layout.num_kept_tokens == layout.num_prompt_tokens
    for position in range(layout.num_prompt_tokens + 2 * layout.block_size):
        assert layout.block_index(position) == position // layout.block_size


@given(layouts(evictable=True))
def test_kept_tokens_fit_the_budget_and_the_private_blocks(case: tuple[PromptLayout, int]) -> None:
    layout, W = case
    P, B, kept, e = layout.prompt_budget, layout.block_size, layout.num_kept_tokens, layout.num_private_blocks
    assert P - B < kept <= P
    assert kept > W  # at least one token besides the window
    assert (e - 1) * B < kept <= e * B  # exactly the blocks needed
    # Right-aligned to N: the last kept token has the offset of position N - 1, and the first one the offset 0.
    assert (kept - 1) % B == (layout.num_prompt_tokens - 1) % B
    assert e * B >= P - B + 1


@given(layouts(), st.integers(1, 200), st.data())
def test_every_position_is_written_once_inside_the_row(
    case: tuple[PromptLayout, int], num_decoded: int, data: st.DataObject
) -> None:
    """Run the request in arbitrary steps, one of which may cross N, and record every write."""
    layout, _ = case
    N, B, n, e = layout.num_prompt_tokens, layout.block_size, layout.num_natural_blocks, layout.num_private_blocks
    owner: dict[tuple[int, int], int] = {}
    for start, end in chunked(data.draw, N + num_decoded):
        extended = layout.is_evictable and end >= N
        row_length = math.ceil(Fraction(end, B)) + (e if extended else 0)  # the manager's blocks at this step
        for position in range(start, end):
            block, offset = layout.block_index(position), position % B
            assert 0 <= block < row_length
            assert owner.setdefault((block, offset), position) == position, "two positions share a slot"
            if layout.is_evictable:
                assert (block < n) is (position < N)  # prompt blocks are never written after the prompt (I1)
    assert len(owner) == N + num_decoded


@given(layouts(evictable=True), st.integers(1, 200))
def test_after_the_prompt_the_request_is_a_shorter_sequence(case: tuple[PromptLayout, int], num_decoded: int) -> None:
    """Table row[n:], length seq_len - s*B: kept prompt tokens and decoded tokens fill slots 0, 1, 2, ... of it."""
    layout, _ = case
    N, B, n = layout.num_prompt_tokens, layout.block_size, layout.num_natural_blocks
    kept_slots = list(range(layout.num_kept_tokens))
    decode_slots = []
    for position in range(N, N + num_decoded):
        slot = (layout.block_index(position) - n) * B + position % B
        assert slot == position - layout.num_dropped_tokens
        seq_len = position + 1
        assert slot == seq_len - layout.num_dropped_tokens - 1  # the newest token is the last of the effective length
        decode_slots.append(slot)
    assert kept_slots + decode_slots == list(range(layout.num_kept_tokens + num_decoded))


@given(layouts(evictable=True))
def test_compact_form_shortens_the_request_by_whole_blocks(case: tuple[PromptLayout, int]) -> None:
    """[null]*s + [c | rest], indexed by position // B, finds the same block as the worker's append-only row."""
    layout, _ = case
    B, n, s, e = layout.block_size, layout.num_natural_blocks, layout.num_dropped_blocks, layout.num_private_blocks
    assert s + e == n
    assert s >= 1
    assert e >= 1
    row = [f"p{i}" for i in range(n)] + [f"c{i}" for i in range(e)] + [f"r{i}" for i in range(3)]
    compact = ["null"] * s + row[n:]
    for position in range(layout.num_prompt_tokens, (n + 3) * B):
        assert compact[position // B] == row[layout.block_index(position)]


@given(st.integers(1, 200), BLOCK_SIZES)
def test_number_of_private_blocks_is_bounded_tightly(P: int, B: int) -> None:
    P += B
    seen = {
        PromptLayout(N, P, B).num_private_blocks for N in range(P + 1, P + 2 * B + 1)
    }  # periodic in N with period B
    assert max(seen) <= max_private_blocks(P, B) == math.ceil(Fraction(P, B))
    assert min(seen) == P // B
    if B > 1:
        assert max(seen) == max_private_blocks(P, B)


@given(layouts(evictable=True))
def test_prefix_hit_leaves_the_whole_window(case: tuple[PromptLayout, int]) -> None:
    layout, W = case
    N, B, hit = layout.num_prompt_tokens, layout.block_size, layout.max_prefix_hit(W)
    assert hit % B == 0
    assert 0 <= hit <= layout.num_hashable_tokens
    assert N - hit >= W
    assert N - (hit + B) < W  # and no block more would


# --- budget split ----------------------------------------------------------------------------------------------------


def exact_capacity(N: int, t: int, max_new: int) -> Fraction:
    """S / c**r with 60 digits, by the formula of ``layout.adaptive_split``."""
    getcontext().prec = 60
    S = Decimal(N + max_new)
    c = max(Decimal(1), S / t)
    r = min(Decimal("0.2") + Decimal("0.06") * (c.ln() / Decimal(2).ln()), Decimal("0.8"))
    return Fraction(S / (r * c.ln()).exp())


@pytest.mark.parametrize(
    ("N", "t", "max_new", "prompt_budget", "topk", "page", "c2"),
    [
        # S=4096, c=8, r=0.38: 4096 / 2**1.14 = 1858.6; c2 = 1858/512 = 3.63, sqrt 1.90 -> 2
        (3840, 512, 256, 1858 - 256, 256, 2, Fraction(1858, 512)),
        # S=4096, c=16, r=0.44: 4096 / 2**1.76 = 1209.3; c2 = 4.72, sqrt 2.17 -> 3
        (3840, 256, 256, 1209 - 256, 128, 3, Fraction(1209, 256)),
        # S=512, c=1, r=0.2: capacity = S, nothing to evict; c2 = 1
        (256, 512, 256, 256, 256, 1, Fraction(1)),
        # S=256 below t: c and c2 are 1, capacity = S
        (192, 512, 64, 192, 256, 1, Fraction(1)),
        # S=1024, c=2, r=0.26: 1024 / 2**0.26 = 855.1; c2 = 1.67, sqrt 1.29 -> 2 > c2 -> 1
        (960, 512, 64, 855 - 64, 256, 1, Fraction(855, 512)),
        # S=2**20, c=2**11, r=0.8 (0.86 before the cap): 2**20 / 2**8.8 = 2352.5; c2 = 4.59, sqrt 2.14 -> 3
        (2**20 - 256, 512, 256, 2352 - 256, 256, 3, Fraction(2352, 512)),
        # S=2**15, c=2**6, r=0.56: 2**(15 - 3.36) = 3191.5, but 2*max_new = 4096 is more; c2 = 8, sqrt 2.83 -> 3
        (2**15 - 2048, 512, 2048, 2048, 256, 3, Fraction(8)),
        # S=3000 < 2*max_new: capacity = S, P = N
        (1000, 512, 2000, 1000, 256, 3, Fraction(3000, 512)),
        # S=112, c=16: 112 / 2**1.76 = 33.07; c2 = 4.71; an odd t: topk rounds down
        (108, 7, 4, 33 - 4, 3, 3, Fraction(33, 7)),
    ],
)
def test_adaptive_split_by_hand(
    N: int, t: int, max_new: int, prompt_budget: int, topk: int, page: int, c2: Fraction
) -> None:
    split = adaptive_split(N, t, max_new)
    assert (split.prompt_budget, split.topk_tokens, split.page_size) == (prompt_budget, topk, page)
    assert split.estimation_ratio == pytest.approx(float(c2))


@given(st.integers(1, 1 << 20), st.integers(2, 1 << 14), st.integers(1, 1 << 12))
@settings(max_examples=300)
def test_adaptive_split_against_exact_arithmetic(N: int, t: int, max_new: int) -> None:
    split = adaptive_split(N, t, max_new)
    S = N + max_new
    exact = exact_capacity(N, t, max_new)
    capacity = split.prompt_budget + max_new
    floor = min(2 * max_new, S)
    tolerance = Fraction(S, 10**12)  # of float powers: an exact integer may round down to the one below
    assert max(int(exact - tolerance), floor) <= capacity <= max(int(exact + tolerance), floor)
    assert 1 <= split.prompt_budget <= N
    assert split.topk_tokens == t // 2
    assert split.estimation_ratio == pytest.approx(max(1.0, capacity / t))
    root = next(k for k in range(1, 1 << 12) if k * k * t >= max(capacity, t))  # ceil(sqrt(c2)) in integers
    assert split.page_size == (root if root * t <= max(capacity, t) else 1)


@given(st.integers(1, 1 << 16), st.integers(2, 1 << 12), st.integers(1, 1 << 10))
def test_adaptive_split_evicts_only_what_does_not_fit(N: int, t: int, max_new: int) -> None:
    split = adaptive_split(N, t, max_new)
    if N + max_new <= max(t, 2 * max_new):
        assert split.prompt_budget == N
    else:
        assert split.prompt_budget >= max(t, 2 * max_new) - max_new


@pytest.mark.parametrize(
    ("D", "page", "c2", "topr"),
    [(64, 2, 1858 / 512, 35), (64, 3, 1209 / 256, 40), (128, 4, 1.0, 128), (128, 2, 8.0, 32), (64, 1, 100.0, 1)],
)
def test_adaptive_topr_by_hand(D: int, page: int, c2: float, topr: int) -> None:
    assert adaptive_topr(D, page, c2) == topr


@given(st.sampled_from([32, 64, 80, 96, 128, 256]), st.integers(1, 64), st.floats(1, 100), st.floats(1, 100))
def test_adaptive_topr_is_bounded_and_falls_with_the_ratio(D: int, page: int, c2: float, other: float) -> None:
    assert 1 <= adaptive_topr(D, page, c2) <= D
    if c2 <= other:
        assert adaptive_topr(D, page, c2) >= adaptive_topr(D, page, other)
    assert adaptive_topr(D, page + 1, c2) >= adaptive_topr(D, page, c2)
