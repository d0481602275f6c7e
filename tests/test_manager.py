# SPDX-License-Identifier: Apache-2.0
"""The block manager inside vLLM's real ``KVCacheManager``, driven by ``scheduler_model``: random schedules, then exact cases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.scheduler_model import Model
from tests.scheduler_parts import (
    LOADING,
    Live,
    Setting,
    ceil_div,
    fake_vllm_config,
    make_request,
    plain_spec,
    small_config,
    startup_pool,
)
from vllm_rocketkv.cache.manager import Form
from vllm_rocketkv.cache.spec import rocketkv_spec
from vllm_rocketkv.config import RocketKVConfig

B, M = 16, 144


ROCKETKV = small_config("rocketkv")
TIGHT = small_config("rocketkv", prompt_budget=24)  # P = W + B
UNALIGNED = small_config("snapkv", prompt_budget=43, window_size=5)
ONE_QUERY = small_config("rocketkv", prompt_budget=17, window_size=1)
WIDE_WINDOW = small_config("rocketkv", prompt_budget=40, window_size=24)  # the window spans blocks
HSA = small_config("hsa", prompt_budget=24)
FULL = small_config("full")
ADAPTIVE = RocketKVConfig.parse(
    {"policy": "rocketkv", "preset": "reference", "token_budget": 40, "max_new_tokens": 8, "window_size": 8}
)

EVICTING = (ROCKETKV, TIGHT, UNALIGNED, ONE_QUERY, WIDE_WINDOW, ADAPTIVE)
NAMES = ("rocketkv", "tight", "unaligned", "one_query", "wide_window", "adaptive")

# --- random schedules ------------------------------------------------------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """Any order of what users, the scheduler and the pipeline can do. ``Model`` checks after each action."""

    configs: tuple[RocketKVConfig, ...] = EVICTING
    own: tuple[RocketKVConfig | None, ...] = (None,)
    """Configurations of single requests."""
    speculates = True
    mirror = False
    longest = M - 1

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        depth = data.draw(st.integers(0, 2), "depth")
        self.model = Model(
            Setting(
                config=data.draw(st.sampled_from(self.configs), "config"),
                block_size=B,
                max_model_len=data.draw(st.sampled_from([M, M - 3]), "max_model_len"),
                spare_blocks=data.draw(st.sampled_from([0, 1, 3, 8, 60]), "spare blocks"),
                depth=depth,
                async_scheduling=data.draw(st.booleans(), "async"),
                lookahead=data.draw(st.integers(0, 3), "lookahead") if self.speculates else 0,
                num_drafts=data.draw(st.sampled_from([0, 0, 2]), "drafts") if self.speculates and not depth else 0,
                caching=data.draw(st.sampled_from([True, True, True, False]), "caching"),
                full_sequence_must_fit=data.draw(st.booleans(), "full sequence must fit"),
                mirror=self.mirror,
            )
        )

    @precondition(lambda self: len(self.model.live) < 6)
    @rule(
        length=st.one_of(st.integers(1, M), st.sampled_from([16, 24, 32, 33, 48, 63, 64, 65, 80, 96, 128])),
        max_tokens=st.sampled_from([1, 2, 3, 20, 40, 70]),
        stream=st.integers(1, 2),
        shared=st.one_of(st.just(10**9), st.integers(0, M)),
        external=st.sampled_from([0, 0, 0, 5, 16, 40, 100]),
        own=st.integers(0, 11),
    )
    def add(self, length: int, max_tokens: int, stream: int, shared: int, external: int, own: int) -> None:
        length = min(length, self.longest, self.model.M - 1)
        max_tokens = min(max_tokens, self.model.M - length)
        config = self.own[own % len(self.own)]
        if not self.model.setting.caching or (config or self.model.config).accumulates:  # which takes no tokens unseen
            external = 0
        self.model.add(length, max_tokens, stream, shared, external, config)

    @rule(budget=st.one_of(st.integers(1, 24), st.sampled_from([1, 7, 32, 64, 200])), accept=st.integers(0, 2))
    def step(self, budget: int, accept: int) -> None:
        self.model.step(budget, accept)

    @rule(budget=st.integers(20, 200), steps=st.integers(2, 24))
    def steps(self, budget: int, steps: int) -> None:
        for _ in range(steps):
            self.model.step(budget, accept=1)

    @precondition(lambda self: self.model.in_flight)
    @rule(accept=st.integers(0, 2))
    def process(self, accept: int) -> None:
        self.model.process(accept)

    @precondition(lambda self: self.model.running)
    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        self.model.preempt(self.model.running[index % len(self.model.running)])

    @precondition(lambda self: self.model.live)
    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        live = self.model.live[index % len(self.model.live)]
        if live.state != "aborted while loading":
            self.model.abort(live)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish_all()


class HsaSchedules(Schedules):
    """Nothing is evicted, but nothing that was decoded sparsely may be hashed."""

    configs = (HSA,)


class FullSchedules(Schedules):
    """Policy full gives the very blocks that vLLM's own manager gives (I6)."""

    configs = (FULL,)
    mirror = True


class ShortSchedules(Schedules):
    """So does every policy for prompts within the budget (I6)."""

    configs = (ROCKETKV, HSA, ADAPTIVE)
    mirror = True
    longest = 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "examples"), [(Schedules, 200), (HsaSchedules, 40), (FullSchedules, 30), (ShortSchedules, 30)]
)
def test_random_schedules(machine: type[Schedules], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- exact cases -------------------------------------------------------------------------------------------------------------


def form_of(model: Model, live: Live) -> Form:
    return model.ours._sparse_requests[live.request.request_id].form


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_life(depth: int) -> None:
    """N = 76, P = 32, B = 16: n = 5, s = 3, e = 2; the prompt in three chunks, the second of which ends inside the window."""
    model = Model(Setting(ROCKETKV, depth=depth, async_scheduling=True, spare_blocks=30))
    live = model.add(76, 8)
    name = live.request.request_id
    model.step(64)
    assert (form_of(model, live), len(live.row)) == (Form.NATURAL, 4)
    model.step(8)  # tokens 64 to 71; the window begins at 68
    assert (form_of(model, live), len(live.row)) == (Form.EXTENDED, 5 + 2)
    model.step(8)
    assert (form_of(model, live), len(live.row)) == (Form.EXTENDED, 5 + 2)
    row = list(live.row)
    for _ in range(depth):  # the crossing step is in flight
        model.step(8)
        assert form_of(model, live) is Form.EXTENDED
    model.step(8)
    assert form_of(model, live) is Form.COMPACT
    assert model.manager.get_block_ids(name)[0] == [0, 0, 0, *row[5:]]
    assert live.row == row
    assert model.counts.blocks_freed == 3
    model.abort(live)
    model.check_idle()


@pytest.mark.parametrize("config", EVICTING, ids=NAMES)
@pytest.mark.parametrize("gate", [True, False])
def test_every_length_is_admitted_to_the_pool_of_the_startup_check(config: RocketKVConfig, gate: bool) -> None:
    model = Model(Setting(config, lookahead=3, full_sequence_must_fit=gate))
    for length in range(1, M):
        model.add(length, M - length if length % 9 == 0 or length > M - 3 else 2, stream=length)
        model.finish_all(budget=M if length % 2 else 40)


@pytest.mark.parametrize("config", EVICTING, ids=NAMES)
def test_startup_pool_is_plain_vllm_plus_the_private_blocks(config: RocketKVConfig) -> None:
    spec = rocketkv_spec(plain_spec(B), config)
    most = max(ceil_div(config.prompt_budget_for(N, B), B) for N in range(1, M))
    extra = startup_pool(spec, M) - startup_pool(plain_spec(B), M)
    assert most <= extra <= most + (1 if config.is_adaptive else 0)
    assert spec.max_num_blocks_per_req(fake_vllm_config(M), M) == ceil_div(M, B) + extra + 1


@pytest.mark.parametrize("config", [HSA, FULL], ids=["hsa", "full"])
def test_policies_that_do_not_evict_need_the_pool_of_plain_vllm(config: RocketKVConfig) -> None:
    assert startup_pool(rocketkv_spec(plain_spec(B), config), M) == startup_pool(plain_spec(B), M)


@pytest.mark.parametrize("config", EVICTING, ids=NAMES)
def test_hits_of_every_length_leave_the_window_even_after_eviction(config: RocketKVConfig) -> None:
    """The first prompt is evicted and its blocks are in the pool again; they still are hits."""
    model = Model(Setting(config, spare_blocks=100))
    first = model.add(M - 2, 2)
    model.finish_all()
    assert first.compact
    for length, shared in itertools.product([33, 64, 65, 72, 73, 96, 127], range(0, 128, 5)):
        live = model.add(length, 1, shared=shared)
        hit = min(shared, length - 1) // B * B
        if live.evictable:
            hit = min(hit, (length - config.window_size) // B * B)
        found, _ = model._lookup(live)
        assert found >= hit if shared >= length else found == hit
        model.abort(live)
    model.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_own_outputs_do_not_lengthen_the_hit_of_a_preempted_request(depth: int) -> None:
    """N = 100 with 30 outputs, all of which stand in a longer prompt of the cache: an uncapped hit is 128 > N."""
    model = Model(Setting(ROCKETKV, depth=depth, async_scheduling=True, spare_blocks=100))
    live = model.add(100, 40)
    for _ in range(32 + depth):
        model.step(200)
    model.add(140, 1)
    model.step(200)
    model.preempt(live)
    while model.in_flight:
        model.process()
    assert live.request.num_tokens > 128
    hit, _ = model._lookup(live)
    assert hit == (100 - 8) // B * B == 80
    model.finish_all()


@pytest.mark.parametrize("external", [1, 16, 40, 72, 200])
@pytest.mark.parametrize("length", [20, 80, 96])
def test_two_allocations_before_the_first_dispatch(length: int, external: int) -> None:
    """An asynchronous KV load: blocks for the loaded tokens, then, steps later, those to compute."""
    model = Model(Setting(ROCKETKV, spare_blocks=20, lookahead=3))
    live = model.add(length, 3, external=external)
    model.step(64)
    assert live.row is None
    assert live.state in (LOADING, "loaded")
    if live.evictable:
        assert form_of(model, live) is Form.NATURAL
    model.finish_all()


@pytest.mark.parametrize("stop", ["waiting", "loading", "natural", "window", "crossing", "compact"])
def test_abort_returns_every_block(stop: str) -> None:
    model = Model(Setting(ROCKETKV, depth=2, async_scheduling=True))
    live = model.add(76, 8, external=20 if stop == "loading" else 0)
    steps = {"waiting": [], "loading": [64], "natural": [64], "window": [64, 8], "crossing": [64, 12]}
    for budget in steps.get(stop, [64, 12, 8, 8, 8]):
        model.step(budget)
    assert live.compact == (stop == "compact")
    model.abort(live)
    model.finish_all()


def test_the_gate_counts_private_blocks() -> None:
    """Pool of 11: 4 blocks are taken, N = 96 needs 6 + 2. A first chunk would fit; the whole request does not."""
    model = Model(Setting(ROCKETKV))
    occupant = model.add(32, 40)  # within the budget: no private blocks
    for _ in range(18):
        model.step(100)
    assert model.pool.get_num_free_blocks() == 11 - 4
    live = model.add(96, 2, stream=2)
    model.step(40)
    assert live.state == "waiting"
    model.abort(occupant)
    model.step(40)
    assert live.state == "running"
    model.finish_all()


def test_lookahead_neither_extends_nor_takes_the_place_of_private_blocks() -> None:
    """N = 64, W = 1: the first chunk ends one token before the window and looks three ahead, beyond the prompt."""
    model = Model(Setting(ONE_QUERY, lookahead=3))
    live = model.add(64, 4)
    model.step(63)
    assert (form_of(model, live), len(live.row)) == (Form.NATURAL, 4)
    model.step(63)
    assert (form_of(model, live), len(live.row)) == (Form.EXTENDED, 4 + 1 + 1)
    model.finish_all()


def test_finish_at_the_prefill_step() -> None:
    model = Model(Setting(ROCKETKV))
    model.add(100, 1)
    model.step(200)
    assert not model.live
    model.check_idle()


def test_refused_lookup_leaves_nothing_behind() -> None:
    """A request that waits for room has been looked up; aborting it must forget it."""
    model = Model(Setting(ROCKETKV))
    model.add(140, 4)
    waiting = model.add(140, 4, stream=2)
    model.step(200)
    assert waiting.state == "waiting"
    assert waiting.request.request_id in model.ours._sparse_requests
    model.abort(waiting)
    assert waiting.request.request_id not in model.ours._sparse_requests
    model.finish_all()


def test_short_requests_are_not_tracked() -> None:
    model = Model(Setting(ROCKETKV))
    manager = model.manager
    request = make_request("short", list(range(32)), 4, B)
    manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 32) is not None
    assert not model.ours._sparse_requests
