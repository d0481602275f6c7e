# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of decode-time eviction against a list of private slots that is filled and cut token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_layout import chunked
from vllm_rocketkv.layout import PromptLayout, default_decode_interval, parking_blocks


@dataclass
class Simulation:
    """What happens to a request that grows to ``length`` tokens, one by one."""

    layout: PromptLayout
    W: int
    length: int
    slots: dict[int, int] = field(default_factory=dict)
    """Private slot of each position from X on."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Tokens that are gone when the token at a position is computed."""
    evictions: list[int] = field(default_factory=list)
    """Lengths at which decoded tokens are evicted."""

    def __post_init__(self) -> None:
        layout = self.layout
        budget, interval = layout.decode_budget, layout.decode_interval
        assert budget is not None
        tokens = list(range(layout.num_prompt_tokens))
        while len(tokens) > layout.prompt_budget:  # which of them go does not matter here
            del tokens[: layout.block_size]
        for position in range(layout.num_prompt_tokens, self.length):
            self.dropped[position] = position - len(tokens)
            self.slots[position] = len(tokens)
            tokens.append(position)
            if len(tokens) == budget + interval:
                self.evictions.append(len(tokens) + self.dropped[position])
                del tokens[:interval]
                assert len(tokens) == budget


@st.composite
def cases(draw: st.DrawFn) -> Simulation:
    """Budgets and windows as start-up lets them pass, for a prompt beyond the budget and for one within it."""
    B = draw(st.sampled_from([1, 2, 8, 16, 32]))
    W = draw(st.integers(1, 40))
    P = W + B + draw(st.integers(0, 60))
    budget = P + draw(st.sampled_from([0, 0, 1, 7, 32, 100]))
    interval = -(-W // B) * B + B * draw(st.integers(0, 4))
    if draw(st.booleans()):
        layout = PromptLayout(P + draw(st.integers(1, 300)), P, B, budget, interval)
    else:
        layout = PromptLayout(budget + interval, budget, B, budget, interval)
    return Simulation(layout, W, layout.num_prompt_tokens + draw(st.integers(1, 500)))


@given(cases())
def test_slots_and_dropped_tokens(case: Simulation) -> None:
    layout, B = case.layout, case.layout.block_size
    for position, slot in case.slots.items():
        assert layout.dropped_tokens_at(position) == case.dropped[position]
        assert layout.block_index(position) == layout.num_natural_blocks + slot // B
        assert slot % B == position % B  # the offset inside a block is that of the position
        assert layout.num_decode_evictions(position) == sum(length <= position for length in case.evictions)
    for position in range(layout.num_prompt_tokens):
        assert layout.block_index(position) == position // B


@given(cases(), st.data())
def test_evictions_between(case: Simulation, data: st.DataObject) -> None:
    """Those that a step takes part in: it computes a token of the window. Each is completed by one step, the window of each is
    computed from first to last however the steps are cut."""
    layout, W = case.layout, case.W
    X, seen = layout.num_prompt_tokens, dict.fromkeys(case.evictions, 0)
    for start, end in chunked(data.draw, case.length - X):
        found = list(layout.evictions_between(X + start, X + end, W))
        positions = range(X + start, X + end)
        upcoming = [*case.evictions, *(n for n in found if n > case.length)]
        wanted = [n for n in upcoming if not set(range(n - W, n)).isdisjoint(positions)]
        assert found == wanted
        for length in found:
            if length in seen:
                seen[length] += len(set(range(length - W, length)).intersection(positions))
    assert set(seen.values()) <= {W}
    assert layout.first_limit is not None
    after = layout.evictions_between(case.length, case.length + 1, W)
    assert all(length > case.length for length in after)


@given(cases())
def test_first_limit_and_window(case: Simulation) -> None:
    """The window of an eviction begins after the eviction before, so its queries are all of decoded tokens."""
    layout = case.layout
    assert layout.first_limit is not None
    assert layout.first_limit - case.W >= layout.num_prompt_tokens
    if case.evictions:
        assert case.evictions[0] == layout.first_limit
        assert set(map(int.__sub__, case.evictions[1:], case.evictions)) <= {layout.decode_interval}
        assert layout.decode_interval >= case.W


@given(cases(), st.integers(1, 9))
def test_num_slots_is_what_the_row_needs(case: Simulation, queries_per_block: int) -> None:
    layout, W, B = case.layout, case.W, case.layout.block_size
    num_parking = parking_blocks(W, queries_per_block)
    assert (num_parking - 1) * queries_per_block < W - 1 <= num_parking * queries_per_block
    X, e = layout.num_prompt_tokens, layout.num_private_blocks
    most = parked = 0
    limits = [*case.evictions, *layout.evictions_between(case.length - 1, case.length, W)]
    windows = {position for length in limits for position in range(length - W, length)}
    before = 0
    for position in range(X, case.length):
        most = max(most, layout.block_index(position) + 1)
        parked = max(parked, num_parking if position in windows else 0)
        num_slots = layout.num_slots(position + 1, W, num_parking)
        row = -(-max(num_slots, X) // B) + e
        if position in windows or parked:
            assert row == layout.parking_index + num_parking  # and grows no more
            assert most <= layout.parking_index
        else:
            assert row == most
        assert num_slots >= before
        before = num_slots


@given(st.integers(1, 3000), st.integers(1, 100), st.integers(0, 500))
def test_without_decode_budget_nothing_is_evicted_again(N: int, P: int, more: int) -> None:
    layout = PromptLayout(N, P, 16)
    assert layout.first_limit is None
    assert layout.num_decode_evictions(N + more) == 0
    assert layout.dropped_tokens_at(N + more) == layout.num_dropped_tokens
    assert layout.num_slots(N + more, 8, 3) == N + more
    assert not layout.evictions_between(N, N + more, 8)


def test_by_hand() -> None:
    """B 16, budget 45, interval 16, W 5, prompt of 20 tokens: X 61, s 1; private slots 45 to 60 hold positions 61 to 76."""
    layout = PromptLayout(61, 45, 16, 45, 16)
    assert (layout.num_natural_blocks, layout.num_dropped_blocks, layout.num_private_blocks) == (4, 1, 3)
    assert (layout.num_kept_tokens, layout.first_limit, layout.parking_index) == (45, 77, 8)
    assert [layout.dropped_tokens_at(position) for position in (61, 76, 77, 92, 93)] == [16, 16, 32, 32, 48]
    assert [layout.block_index(position) for position in (60, 61, 76, 77, 92)] == [3, 6, 7, 6, 7]
    assert [layout.num_slots(length, 5, 2) for length in (61, 72, 73, 77, 10_000)] == [61, 72, 109, 109, 109]
    assert list(layout.evictions_between(72, 73, 5)) == [77]
    assert list(layout.evictions_between(71, 72, 5)) == []
    assert list(layout.evictions_between(76, 110, 5)) == [77, 93, 109]
    assert list(layout.evictions_between(77, 88, 5)) == []


@pytest.mark.parametrize(("block_size", "interval"), [(1, 128), (16, 128), (48, 144), (128, 128), (256, 256)])
def test_default_interval(block_size: int, interval: int) -> None:
    assert default_decode_interval(block_size) == interval
