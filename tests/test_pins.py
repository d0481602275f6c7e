# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations stay in the prefix cache before all others (option ``pinned_tokens``)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler_model import Model
from tests.scheduler_parts import Live, Setting, small_config
from tests.test_manager import Schedules
from vllm_rocketkv.config import RocketKVConfig

B, M = 16, 144


def pinning(pinned_tokens: int) -> RocketKVConfig:
    return small_config("rocketkv_mt", pinned_tokens=pinned_tokens)


def serve(model: Model, num_prompt_tokens: int, stream: int, max_tokens: int = 2) -> Live:
    """One turn of conversation ``stream``, from first to last."""
    live = model.add(num_prompt_tokens, max_tokens, stream)
    model.finish_all(budget=200)
    return live


def flood(model: Model, first_stream: int = 1_000) -> None:
    """Other traffic, unpinned, that takes every block of the pool more than once."""
    pins, model.ours._pins.limit = model.ours._pins.limit, 0
    for stream in range(first_stream, first_stream + 2 * model.num_blocks // 6 + 2):
        serve(model, 96, stream)
    model.ours._pins.limit = pins


def hit(model: Model, num_prompt_tokens: int, stream: int) -> int:
    """Tokens that the next turn of a conversation finds."""
    live = model.add(num_prompt_tokens, 2, stream)
    found, _ = model._lookup(live)
    model.abort(live)
    return found


@pytest.mark.parametrize(("pinned_tokens", "found"), [(0, 0), (96, 96), (50, 48), (10_000, 96)])
def test_a_pinned_history_outlives_other_traffic(pinned_tokens: int, found: int) -> None:
    """Of a history longer than the limit its head stays."""
    model = Model(Setting(pinning(pinned_tokens), spare_blocks=20))
    serve(model, 100, stream=1)
    assert hit(model, 140, stream=1) == 96
    flood(model)
    assert hit(model, 140, stream=1) == found


def test_the_oldest_conversation_goes_first_its_tail_before_its_head() -> None:
    model = Model(Setting(pinning(12 * B), spare_blocks=30))
    serve(model, 100, stream=1)  # 6 full blocks
    serve(model, 100, stream=2)
    serve(model, 70, stream=3)  # 4, for which conversation 1 gives up as many
    flood(model)
    assert [hit(model, 140, stream) for stream in (1, 2, 3)] == [2 * B, 6 * B, 4 * B]


def test_the_next_turn_refreshes_its_conversation() -> None:
    model = Model(Setting(pinning(14 * B), spare_blocks=30))
    serve(model, 100, stream=1)
    serve(model, 100, stream=2)
    serve(model, 120, stream=1)  # hits 6 blocks and adds 1
    serve(model, 70, stream=3)
    flood(model)
    assert [hit(model, 140, stream) for stream in (1, 2, 3)] == [7 * B, 3 * B, 4 * B]


def test_pins_are_given_up_before_an_allocation_fails() -> None:
    """Pool of the start-up check and one more block: the longest request needs nearly all of it, pins or not."""
    model = Model(Setting(pinning(10_000), spare_blocks=1))
    serve(model, 70, stream=1)
    assert len(model.ours._pins) == 4
    assert model.pool.get_usage() == 0
    serve(model, M - 2, stream=2)
    for block_id, block_hash in model.ours._pins._hashes.items():
        assert model.pool.blocks[block_id].block_hash == block_hash, "a block is pinned that the pool has reused"
    assert hit(model, 140, stream=1) < 4 * B
    model.check_idle()


def test_others_go_first() -> None:
    """Hashed or not, every other free block is reused before a pinned one."""
    model = Model(Setting(pinning(4 * B), spare_blocks=20))
    serve(model, 70, stream=1)
    pinned = set(model.ours._pins._hashes)
    flood(model)
    model.ours._pins.limit = 0
    num_others = model.num_blocks - 1 - 4
    model.ours._pins.protect(num_others)
    taken = model.pool.get_new_blocks(num_others)
    assert pinned.isdisjoint(block.block_id for block in taken)
    model.ours._pins.protect(1)
    assert len(model.ours._pins) == 3
    (one,) = model.pool.get_new_blocks(1)
    assert one.block_id in pinned
    model.pool.free_blocks([*taken, one])


def test_reset_of_the_prefix_cache_forgets_pins() -> None:
    model = Model(Setting(pinning(10_000), spare_blocks=20))
    serve(model, 100, stream=1)
    assert model.manager.reset_prefix_cache()
    assert hit(model, 140, stream=1) == 0
    flood(model)
    assert not model.ours._pins._hashes


def test_work_of_a_step_is_bounded() -> None:
    """With 64 pinned blocks and a few others, blocks taken one by one move pinned ones at most 16 times their number."""
    model = Model(Setting(pinning(64 * B), spare_blocks=64))
    pins, pool = model.ours._pins, model.pool
    for stream in range(11):
        serve(model, 100, stream)
    assert len(pins) == 64
    moved = 0

    def append(block: Any) -> None:
        nonlocal moved
        moved += 1
        original(block)

    queue = pool.free_block_queue
    original, queue.append = queue.append, append  # type: ignore[method-assign]
    taken = pool.get_new_blocks(queue.num_free_blocks - 64 - 1)
    for _ in range(200):
        pins.protect(1)
        (block,) = pool.get_new_blocks(1)
        block.set_block_hash(b"x" * 36, num_tokens=B)  # type: ignore[arg-type]
        pool.cached_block_hash_to_block.insert(b"x" * 36, block)  # type: ignore[arg-type]
        pool.free_blocks([block])
    assert moved <= 16 * 200
    assert len(pins) >= 60
    pool.free_blocks(taken)


def test_nothing_is_pinned_without_a_prefix_cache() -> None:
    model = Model(Setting(pinning(10_000), caching=False))
    serve(model, 100, stream=1)
    assert len(model.ours._pins) == 0


class PinningSchedules(Schedules):
    """Pins change which blocks are taken, and nothing else."""

    configs = (pinning(5 * B), pinning(10_000))


@pytest.mark.slow
def test_random_schedules() -> None:
    run_state_machine_as_test(
        PinningSchedules,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
