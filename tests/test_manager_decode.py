# SPDX-License-Identifier: Apache-2.0
"""The block manager under decode-time eviction and per-request configurations: random schedules, then exact cases."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.scheduler_model import Model
from tests.scheduler_parts import Live, Setting, ceil_div, small_config
from tests.test_manager import HSA, ROCKETKV, TIGHT, Schedules, form_of
from vllm_rocketkv.cache.manager import Form
from vllm_rocketkv.config import RocketKVConfig

B, M = 16, 144

STREAMING = small_config("streaming_llm")
H2O = small_config("h2o")
SNAPKV = small_config("snapkv", decode_budget=48, decode_interval=16)
ROCKETKV_D = small_config(
    "rocketkv", topk_tokens=32, decode_budget=32, decode_interval=32
)  # reads up to 48 tokens densely
UNALIGNED = small_config("snapkv", prompt_budget=43, window_size=5, decode_budget=45, decode_interval=16)
WIDE_WINDOW = small_config("rocketkv", prompt_budget=40, window_size=24, decode_budget=41, decode_interval=32)
FULL = small_config("full")

CONFIGS = (STREAMING, H2O, SNAPKV, ROCKETKV_D, UNALIGNED, WIDE_WINDOW)
NAMES = ("streaming_llm", "h2o", "snapkv", "rocketkv", "unaligned", "wide_window")

# --- random schedules ------------------------------------------------------------------------------------------------------


class DecodeSchedules(Schedules):
    """Generations long enough to be evicted several times, preempted and resumed across several limits at once."""

    configs = CONFIGS
    speculates = False

    @precondition(lambda self: len(self.model.live) < 6)
    @rule(length=st.integers(1, 70), stream=st.integers(1, 2), shared=st.one_of(st.just(10**9), st.integers(0, M)))
    def add_long(self, length: int, stream: int, shared: int) -> None:
        self.model.add(length, self.model.M - length, stream, shared)


class StreamingSchedules(DecodeSchedules):
    configs = (STREAMING,)


class H2OSchedules(DecodeSchedules):
    configs = (H2O,)


class SnapKVSchedules(DecodeSchedules):
    configs = (SNAPKV, UNALIGNED)


class RocketKVSchedules(DecodeSchedules):
    configs = (ROCKETKV_D, WIDE_WINDOW)


class OwnSchedules(DecodeSchedules):
    """Requests that bring their own configuration, side by side."""

    configs = (ROCKETKV, ROCKETKV_D)
    own = (None, None, FULL, TIGHT, STREAMING, H2O, HSA)


MACHINES = [
    (StreamingSchedules, 60),
    (H2OSchedules, 60),
    (SnapKVSchedules, 80),
    (RocketKVSchedules, 80),
    (OwnSchedules, 80),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "examples"), MACHINES)
def test_random_schedules(machine: type[Schedules], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- exact cases -------------------------------------------------------------------------------------------------------------


def held(model: Model, live: Live) -> int:
    return len(model._held(live))


def test_blocks_of_a_short_prompt_step_by_step() -> None:
    """snapkv, budget 48, interval 16, W 8: natural up to X = 64, then s = 1; limits 80, 96, ...; 7 queries in 3 blocks."""
    model = Model(Setting(SNAPKV, spare_blocks=30))
    live = model.add(20, 124)
    assert (live.X, live.s, live.limit, live.num_parking_blocks) == (64, 1, 80, 3)
    seen = {}
    while live.state != "finished":
        model.step(100)
        if live.state != "finished":
            seen[live.request.num_computed_tokens] = (form_of(model, live), held(model, live))
    assert seen[20] == (Form.NATURAL, 2)
    assert seen[56] == (Form.NATURAL, 4)
    assert seen[57] == (Form.EXTENDED, 4 + 3)  # the window begins: parked in the private blocks
    assert seen[64] == (Form.EXTENDED, 4 + 3)
    assert seen[65] == (Form.COMPACT, 3 + 1)
    assert seen[72] == (Form.COMPACT, 4)
    assert {seen[length] for length in range(73, 143)} == {(Form.COMPACT, 4 + 3)}
    assert model.counts.decode_evictions == 4  # at 80, 96, 112, 128
    assert model.counts.decode_tokens_dropped == 64
    assert model.counts.prompt_tokens_kept == 48
    model.check_idle()


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("budget", [7, 40, 400])
def test_resumption_across_the_natural_length_and_several_limits(config: RocketKVConfig, budget: int) -> None:
    model = Model(Setting(config, spare_blocks=20))
    live = model.add(10, M - 10)
    while live.request.num_computed_tokens < 130:
        model.step(400)
    before = held(model, live)
    model.preempt(live)
    while live.request.num_computed_tokens < 130:
        model.step(budget)
    assert live.request.num_preemptions == 1
    assert (live.num_hit > 0) == (config is not H2O)
    model.step(budget)  # sees that the resumed chunk was processed
    assert held(model, live) == before
    model.finish_all()


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("gate", [True, False])
def test_every_length_is_admitted_to_the_pool_of_the_startup_check(config: RocketKVConfig, gate: bool) -> None:
    model = Model(Setting(config, full_sequence_must_fit=gate))
    for length in range(1, M, 3):
        live = model.add(length, M - length, stream=length)
        for _ in range(M - length - 3):
            model.step(M if length % 2 else 40)
        if live.state == "running":
            model.preempt(live)
        model.finish_all(budget=M if length % 2 else 40)


def test_blocks_are_a_function_of_lengths_alone() -> None:
    """However the steps were cut, a request of the same length holds as many blocks."""
    for config in CONFIGS:
        counts: dict[int, set[int]] = {}
        for chunk in (1, 5, 16, 200):
            model = Model(Setting(config, spare_blocks=60))
            live = model.add(50, 90)
            while live.state != "finished":
                model.step(chunk)
                if live.compact and live.state == "running":
                    counts.setdefault(live.request.num_computed_tokens, set()).add(held(model, live))
        assert all(len(values) == 1 for values in counts.values())


@pytest.mark.parametrize("policy", ["snapkv", "streaming_llm"])
def test_fifty_thousand_tokens(policy: str) -> None:
    """Block count flat from the first limit on, with a preemption and a prefix hit in the middle; every slot read is checked."""
    options = {"window_size": 4, "decode_budget": 24, "decode_interval": 16} if policy == "snapkv" else {}
    config, N, generated = small_config(policy, prompt_budget=24, **options), 100, 50_000
    model = Model(Setting(config, max_model_len=N + generated, depth=1, async_scheduling=True, checked_steps=97))
    live = model.add(N, generated)
    other = model.add(N, 30, shared=80)
    steps, flat = 0, set()
    while live.state != "finished":
        model.step(2048)
        steps += 1
        if steps == 25_000:
            assert other.state == "finished"
            model.preempt(live)
        elif live.state == "running" and live.compact and live.request.num_computed_tokens >= live.limit:
            flat.add(held(model, live))
    assert live.request.num_output_tokens == generated
    assert live.request.num_preemptions == 1
    assert live.num_hit == (N - live.W) // B * B > 0
    budget, interval = config.decode_budget_for_step, live.interval
    assert flat == {ceil_div(budget + interval, B) + live.num_parking_blocks}
    assert model.counts.decode_evictions > 1.4 * generated // interval
    model.check_idle()


# --- prefix hits and own configurations --------------------------------------------------------------------------------------


def test_h2o_takes_no_hits_but_leaves_some() -> None:
    """It needs the attention of every query; what it computed is exact and serves others, up to its natural length."""
    model = Model(Setting(H2O, spare_blocks=60))
    model.add(100, 10)
    model.finish_all()
    again = model.add(100, 2)
    assert model._lookup(again)[0] == 0
    other = model.add(100, 2, config=STREAMING)
    assert model._lookup(other)[0] == 96
    model.finish_all()


def test_dense_decoded_tokens_of_a_short_prompt_are_hits() -> None:
    """streaming_llm evicts nothing before X = 48, so the tokens up to there are exact; those after are not."""
    model = Model(Setting(STREAMING, spare_blocks=60))
    model.add(10, 100)
    model.finish_all()
    other = model.add(120, 2)
    assert model._lookup(other)[0] == 48
    model.finish_all()


def test_own_configuration_is_kept_until_the_request_ends() -> None:
    """``remove_skipped_blocks`` admits again without one; a plain request must stay plain."""
    model = Model(Setting(ROCKETKV, spare_blocks=60))
    plain, sparse = model.add(100, 20, config=FULL), model.add(100, 20, stream=2)
    for _ in range(5):
        model.step(300)
    assert set(model.ours._sparse_requests) == {sparse.request.request_id}
    assert set(model.ours._own_configs) == {plain.request.request_id}
    assert held(model, plain) == ceil_div(104, B)
    model.preempt(plain)
    assert not model.ours._own_configs
    model.finish_all()
