# SPDX-License-Identifier: Apache-2.0
"""One attention layer against the plain reference, with a real paged cache and no engine (see ``layer_harness``).

Every case runs a dozen requests, whose prompts lie around every border, with all ways in which a scheduler may cut
them, through one layer in mixed batches, and compares every token's output and every byte that must not change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernel_fixtures import one_thread  # noqa: F401  (used by all tests)
from tests.layer_harness import World
from tests.layer_request import Request, Shape, Step, causal, cut
from tests.policy_oracle import Lengths
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.options import USED_BY

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E5M2 = {"kt_dtype": "float8_e5m2"}


@dataclass(frozen=True)
class Case:
    shape: Shape
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        shape, options = self.shape, self.options
        dtype = str(shape.dtype).removeprefix("torch.")
        dtype += f"-kv_{shape.kv_cache_dtype}" if shape.is_fp8 else ""
        rest = "-".join(str(value) for key, value in options.items() if key not in ("policy", "prompt_budget"))
        cap = f"-cap{shape.softcap:g}" if shape.softcap else ""
        return (
            f"{options.get('policy', 'rocketkv')}-{shape.num_kv_heads}x{shape.group}-d{shape.head_size}-{dtype}-"
            f"b{shape.block_size}{cap}-{rest}"
        )


def make_options(policy: str, preset: str, shape: Shape, **extra: Any) -> dict[str, Any]:
    """Options small enough that every prompt length stays short."""
    B, W = shape.block_size, 16
    budget = (
        max(W + B, -(-W * shape.group * shape.query_to_kv_bytes // (2 * B)) * B) + 37
    )  # no multiple of the block size
    options: dict[str, Any] = {"policy": policy, "preset": preset, "window_size": W}
    if preset == "reference":
        options |= {"token_budget": 64, "max_new_tokens": 16, "kernel_size": 7}
        if B == 32 and shape.group > 6:
            options["token_budget"] = 112  # room to park the window
    elif preset in ("trtllm", "blog"):
        options |= {"prompt_budget": budget, "kernel_size": 7, "topk_tokens": 32}
    else:
        options |= {"prompt_budget": budget, "kernel_size": 7, "topk_tokens": 32, "sink_tokens": 3, "recent_tokens": 6}
        if policy == "streaming_llm":
            options["sink_tokens"] = 5
    options = {name: value for name, value in options.items() if policy in USED_BY.get(name, {policy})}
    if preset == "default" and policy in ("streaming_llm", "h2o"):
        options["decode_interval"] = B
    if "decode_budget" in extra:  # given as what it is more than the prompt's
        extra = {"decode_interval": B} | extra | {"decode_budget": budget + extra["decode_budget"]}
    return options | extra


def shaped(num_kv_heads: int, group: int, head_size: int, dtype: torch.dtype, block_size: int, cap: int = 0) -> Shape:
    return Shape(num_kv_heads, group, head_size, dtype, block_size, float(cap))


def in_fp8(
    num_kv_heads: int, group: int, head_size: int, dtype: torch.dtype, block_size: int, kv: str = "fp8"
) -> Shape:
    """Scales are powers of two, so that dividing by one rounds nothing."""
    shape = shaped(num_kv_heads, group, head_size, dtype, block_size)
    return replace(shape, kv_cache_dtype=kv, key_scale=0.5, value_scale=2.0)


def make_cases() -> list[Case]:
    rows: list[tuple[Shape, str, str, dict[str, Any]]] = [
        (shaped(2, 1, 32, F32, 32), "rocketkv", "default", {}),
        (shaped(2, 3, 64, F32, 32), "rocketkv", "default", {"page_size": 1, "granularity": "token"}),
        (shaped(2, 4, 80, F32, 32), "rocketkv", "default", E5M2),
        (shaped(1, 6, 96, F32, 64), "rocketkv", "default", {"page_size": 8}),
        (shaped(2, 7, 64, F32, 64), "rocketkv", "default", {"topr": 9}),
        (shaped(1, 8, 128, F32, 128), "rocketkv", "default", {"page_size": 16, "topk_tokens": 64}),
        (shaped(3, 1, 256, F32, 32), "rocketkv", "default", E5M2 | {"granularity": "token"}),
        (shaped(2, 3, 32, F32, 64, 30), "rocketkv", "default", {"kernel_size": 63}),
        (shaped(2, 2, 32, F32, 32), "rocketkv", "default", {"sink_tokens": 0, "recent_tokens": 0, "page_size": 32}),
        (shaped(1, 4, 32, F32, 32), "rocketkv", "reference", {}),
        (shaped(2, 3, 64, F32, 32), "rocketkv", "reference", {"page_size": 4}),
        (shaped(2, 1, 80, F32, 64), "rocketkv", "reference", E5M2),
        (shaped(1, 7, 96, F32, 32), "rocketkv", "reference", {}),
        (shaped(1, 6, 32, F32, 128, 30), "rocketkv", "reference", {}),
        (shaped(2, 4, 64, F32, 32), "rocketkv", "trtllm", {}),
        (shaped(1, 8, 32, F32, 64, 30), "rocketkv", "trtllm", {}),
        (shaped(3, 1, 128, F32, 128), "rocketkv", "trtllm", {"kt_dtype": "bfloat16"}),
        (shaped(2, 4, 64, BF16, 32), "rocketkv", "default", {}),
        (shaped(1, 6, 80, BF16, 64), "rocketkv", "trtllm", {}),
        (shaped(2, 3, 128, F16, 32), "rocketkv", "reference", {}),
        (shaped(1, 7, 32, F16, 64, 30), "rocketkv", "default", {"page_size": 2}),
        (shaped(2, 1, 64, F32, 32), "snapkv", "default", {}),
        (shaped(2, 4, 32, F32, 64, 30), "snapkv", "default", {"window_softmax": "prefix"}),
        (shaped(1, 7, 80, F32, 32), "snapkv", "trtllm", {}),
        (shaped(1, 3, 128, F32, 128), "snapkv", "reference", {}),
        (shaped(1, 8, 64, BF16, 32), "snapkv", "default", {}),
        (shaped(2, 1, 32, F32, 32), "hsa", "default", {}),
        (shaped(1, 6, 64, F32, 64, 30), "hsa", "default", E5M2 | {"page_size": 2}),
        (shaped(2, 3, 80, F32, 32), "hsa", "reference", {}),
        (shaped(2, 4, 128, F32, 128), "hsa", "trtllm", {}),
        (shaped(1, 8, 32, F16, 32), "hsa", "default", {"granularity": "token", "topr": 5}),
        (shaped(2, 4, 64, F32, 32), "full", "default", {}),
        (shaped(1, 7, 96, F32, 64, 30), "full", "default", {}),
    ]
    rows += [
        (in_fp8(2, 4, 64, BF16, 32), "rocketkv", "default", {}),
        (in_fp8(1, 3, 96, BF16, 64, "fp8_e5m2"), "rocketkv", "trtllm", {}),
        (in_fp8(2, 2, 32, F32, 32, "fp8_e4m3"), "rocketkv", "default", {"granularity": "token"}),
        (in_fp8(2, 2, 64, BF16, 32), "rocketkv", "reference", {}),
        (in_fp8(1, 7, 128, F16, 32, "fp8_e5m2"), "rocketkv", "default", E5M2),
        (in_fp8(2, 4, 64, F32, 32), "snapkv", "default", {}),
        (in_fp8(2, 3, 32, BF16, 64, "fp8_e5m2"), "hsa", "default", {}),
        (in_fp8(2, 4, 64, BF16, 32), "full", "default", {}),
    ]
    rows += [
        (shaped(2, 1, 32, F32, 32), "quest", "default", {}),
        (shaped(1, 6, 64, F32, 64, 30), "quest", "default", E5M2 | {"page_size": 8}),
        (shaped(2, 4, 80, BF16, 32), "quest", "default", {"page_size": 2}),
        (shaped(1, 8, 128, F16, 128), "quest", "default", {"page_size": 16}),
        (in_fp8(2, 3, 64, BF16, 32), "quest", "default", {}),
        (shaped(2, 4, 64, F32, 32), "rocketkv", "blog", {}),
        (shaped(1, 7, 96, BF16, 64), "rocketkv", "blog", E5M2 | {"page_size": 8}),
        (in_fp8(2, 2, 64, BF16, 32), "rocketkv", "blog", {}),
        (shaped(2, 3, 80, F32, 32), "hsa", "blog", {}),
        (shaped(1, 6, 32, F16, 64, 30), "rocketkv_mt", "default", {}),
        (shaped(2, 1, 32, F32, 32), "streaming_llm", "default", {}),
        (shaped(1, 7, 80, BF16, 64), "streaming_llm", "default", {"sink_tokens": 32}),
        (shaped(2, 3, 128, F16, 32, 30), "streaming_llm", "default", {"decode_budget": 11, "decode_interval": 64}),
        (in_fp8(2, 4, 64, BF16, 32), "streaming_llm", "default", {}),
        (shaped(2, 1, 32, F32, 32), "h2o", "default", {}),
        (shaped(1, 6, 64, F32, 64, 30), "h2o", "default", {"recent_share": 0.25}),
        (shaped(2, 4, 80, BF16, 32), "h2o", "default", {"decode_budget": 11, "decode_interval": 64}),
        (shaped(1, 8, 96, F16, 32), "h2o", "default", {"recent_share": 0.9}),
        (shaped(2, 3, 32, F32, 128), "h2o", "default", {}),
        (in_fp8(2, 4, 64, BF16, 32), "h2o", "default", {}),
        (shaped(2, 3, 64, F32, 32), "snapkv", "default", {"decode_budget": 0}),
        (shaped(1, 8, 32, BF16, 64, 30), "snapkv", "trtllm", {"decode_budget": 9}),
        (in_fp8(2, 4, 64, BF16, 32), "snapkv", "default", {"decode_budget": 0, "decode_interval": 64}),
        (shaped(2, 4, 64, F32, 32), "rocketkv", "default", {"decode_budget": 0}),
        (shaped(2, 1, 32, F32, 32), "rocketkv", "default", {"decode_budget": 5, "window_size": 32}),
        (shaped(1, 6, 80, BF16, 64), "rocketkv", "trtllm", {"decode_budget": 0}),
        (shaped(2, 2, 128, F16, 32), "rocketkv", "default", {"decode_budget": 30, "granularity": "token"}),
        (shaped(2, 3, 64, F32, 32), "rocketkv", "blog", {"decode_budget": 0}),
        (in_fp8(2, 4, 64, BF16, 32), "rocketkv", "default", E5M2 | {"decode_budget": 0}),
    ]
    return [Case(shape, make_options(policy, preset, shape, **extra)) for shape, policy, preset, extra in rows]


CASES = make_cases()


def prompt_lengths(config: RocketKVConfig, block_size: int) -> list[int]:
    """Around every border. An adaptive budget grows with the prompt: its own is the fixed point."""
    B, W = block_size, config.eviction_window
    N = 1
    while config.prompt_budget_for(N, B) >= N and N < 2000:
        N += 1
    P = N - 1 if N < 2000 else 2 * B
    some = -(-(P + B) // B)  # blocks of a prompt that is surely beyond the budget
    lengths = [W - 1 or 3, W, W + 1, P - 1, P, P + 1, P + B, some * B - 1, some * B, some * B + 1]
    return [*lengths, 3 * 48 + 1, some * B + 2 * B + 5, 2 * P + 3 * B + 7]


def prefill(style: int, N: int, W: int, start: int, chance: random.Random, most_outputs: int = 40) -> list[Step]:
    """Ways in which a scheduler may cut a prompt; from style 5 on, of a preempted request with outputs to recompute."""
    chunk = chance.choice([33, 48])
    if style == 0:
        return cut(N, start=start)
    if style == 1:
        return cut(N, *range(start + chunk, N, chunk), start=start)
    if style == 2:
        return cut(N, N - 1, start=start)
    if style == 3:
        return cut(N, N - W + 1, N - W + 6, N - W + 7, N - 1, start=start)
    if style == 4:
        return cut(N, N - W, N - W // 2, start=start)
    outputs = chance.randrange(1, most_outputs)
    if style == 5:
        return cut(N + outputs, start=start)
    if style == 6:
        return cut(N + outputs, N - W // 2, start=start)
    return cut(N + outputs, N - W, start=start)


def decode(chance: random.Random, num_steps: int) -> list[Step]:
    """Single tokens and verified drafts, of which some are rejected."""
    steps = []
    for _ in range(num_steps):
        num_tokens = chance.choice([1, 1, 1, 2, 4, 6])
        steps.append(Step(num_tokens, chance.randint(1, num_tokens)))
    return steps


def live_on(
    N: int, style: int, config: RocketKVConfig, block_size: int, start: int, chance: random.Random
) -> list[Step]:
    """A life that ends around an eviction of decoded tokens: most of it recomputed, as after preemption, in steps that
    may cross several evictions, the rest token by token."""
    W, lengths = config.eviction_window, Lengths(N, config, block_size)
    milestones = lengths.milestones()
    end = max(chance.choice(milestones) + chance.choice([-1, 0, 1, 5]), N + 1)
    singles = min(chance.choice([0, 4, W + 3, end if style == 5 else 2]), end - N)
    borders = {
        0: [],
        1: range(start + 48, end, 48),
        2: [m - W + border for m in milestones for border in (0, 6, 7)],
        3: [m + border for m in milestones for border in (-1, 0, 1)],
        4: [m - W // 2 for m in milestones],
        5: [N - W // 2, N],
    }[style]
    return cut(end - singles, *borders, start=start) + [Step(1, 1)] * singles


def make_requests(world: World, seed: int) -> list[Request]:
    chance = random.Random(seed)
    shape, config = world.shape, world.config
    B, W = shape.block_size, config.eviction_window
    is_long = config.decode_budget_for_step is not None
    most_outputs = 36 if B == 32 and shape.head_size <= 64 else 9  # the reference takes its time
    requests: list[Request] = []
    for index, N in enumerate(prompt_lengths(config, B)):
        if is_long:
            steps = live_on(N, (seed + index) % 6, config, B, 0, chance)
        else:
            steps = prefill((seed + 3 * index) % 8, N, W, 0, chance, most_outputs) + decode(chance, 3 + 2 * (N % 3))
        requests.append(Request(N, steps, shape, config, 1000 * seed + index))
    # Two that are admitted onto the blocks that the longest computes, in the step that computes them (I7 caps the hit).
    owner = requests[-1]
    for extra, style in ((0, 0), (2 * B + 9, 6)):
        N = owner.num_prompt - B + extra
        first_end = owner.steps[0].num_tokens
        hit = 0 if config.accumulates else min(first_end, owner.num_prompt, N - W) // B * B
        if is_long:
            steps = live_on(N, style % 5, config, B, hit, chance)
        else:
            steps = prefill(style, N, W, hit, chance, most_outputs) + decode(chance, 3)
        seed_of = 1000 * seed + 500 + extra
        requests.append(Request(N, steps, shape, config, seed_of, prefix_of=owner if hit else None, num_hit=hit))
    return requests


def make_world(case: Case, path: Path, seed: int) -> World:
    return World(case.shape, case.options, path, num_blocks=72 if case.shape.block_size == 32 else 40, seed=seed)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_layer_is_the_reference(index: int, tmp_path: Path) -> None:
    world = make_world(CASES[index], tmp_path, index)
    requests = make_requests(world, index)
    world.run(requests, at_once=4)
    assert world.shared_in_step == sum(request.prefix_of is not None for request in requests)


@pytest.mark.parametrize(
    ("policy", "preset", "extra"),
    [
        ("quest", "default", {}),
        ("rocketkv", "blog", {}),
        ("streaming_llm", "default", {}),
        ("h2o", "default", {}),
        ("snapkv", "default", {"decode_budget": 0}),
        ("rocketkv", "default", {"decode_budget": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_hard_numbers(policy: str, preset: str, extra: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Equal keys, one key that all want, queries that want nothing, and norms beyond every softmax."""
    shape = shaped(2, 3, 64, dtype, 32)
    world = make_world(Case(shape, make_options(policy, preset, shape, **extra)), tmp_path, 0)
    chance = random.Random(0)
    requests = []
    for index, numbers in enumerate(("ties", "dominating", "zero", "huge") * 2):
        N = (70, 200)[index // 4]
        if world.config.decode_budget_for_step is None:
            steps = prefill(index, N, world.config.eviction_window, 0, chance) + decode(chance, 5)
        else:
            steps = live_on(N, index % 6, world.config, shape.block_size, 0, chance)
        requests.append(Request(N, steps, shape, world.config, index, numbers=numbers))
    world.run(requests, at_once=4)


def test_guests_on_blocks_that_their_owner_computes_in_the_same_step(tmp_path: Path) -> None:
    """I11, with the owner's prompt completed, and therefore compacted, in that step."""
    world = make_world(CASES[0], tmp_path, 0)
    owner = Request(200, [*cut(200), Step(1, 1), Step(1, 1)], world.shape, world.config, 1)
    guest = Request(150, [*cut(150, start=128), Step(1, 1)], world.shape, world.config, 2, prefix_of=owner, num_hit=128)
    later = Request(180, [*cut(180 + 3, start=160)], world.shape, world.config, 3, prefix_of=owner, num_hit=160)
    world.run([owner, guest, later])
    assert world.shared_in_step == 2


@pytest.mark.parametrize("policy", ["rocketkv", "snapkv", "hsa", "quest"])
def test_layer_that_shares_a_cache_reads_what_its_owner_wrote(policy: str, tmp_path: Path) -> None:
    shape = Shape(num_kv_heads=2, group=3, head_size=32, shares_cache=True)
    world = make_world(Case(shape, make_options(policy, "default", shape)), tmp_path, 5)
    world.run(make_requests(world, 5), at_once=4)


@pytest.mark.parametrize("group", [3, 5, 6, 7])
@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_largest_window_that_start_up_accepts_can_be_parked(
    group: int, blocks: int, kv_cache_dtype: str, tmp_path: Path
) -> None:
    shape = Shape(num_kv_heads=1, group=group, kv_cache_dtype=kv_cache_dtype)
    B = shape.block_size
    budget = blocks * B

    def is_accepted(window: int) -> bool:
        config = RocketKVConfig.parse({"prompt_budget": budget, "window_size": window})
        try:
            config.check_block_size(B)
            config.check_window_fits(B, group, shape.query_to_kv_bytes)
        except ValueError:
            return False
        return True

    window = max(filter(is_accepted, range(1, budget - B + 1)))
    options = {"prompt_budget": budget, "window_size": window, "kernel_size": 7, "topk_tokens": 48}
    world = World(shape, options, tmp_path, num_blocks=40)
    steps = cut(4 * B, 4 * B - window + 1, 4 * B - 1)
    world.run([Request(4 * B, [*steps, Step(1, 1)], shape, world.config, group)])


@pytest.mark.parametrize("policy", ["rocketkv", "snapkv", "hsa", "full", "quest", "streaming_llm", "h2o"])
@pytest.mark.parametrize("is_stale", [False, True], ids=["no-lens", "stale-lens"])
def test_dummy_run_writes_nothing(policy: str, is_stale: bool, tmp_path: Path) -> None:
    """Whatever prompt lengths the runner's buffers still hold from another batch."""
    shape = Shape(num_kv_heads=2, group=2)
    world = make_world(Case(shape, make_options(policy, "default", shape)), tmp_path, 7)
    N = 3 * world.config.prompt_budget
    for rows in (
        [(0, N), (N - 9, N - 2), (N, N + 1), (N - 3, N + 2), (0, 40)],
        [(N + 7, N + 8)] * 5,
        [(0, 1)],
    ):
        common = world.common_metadata([([0] * 20, start, end, N) for start, end in rows], 2, is_dummy=True)
        before = world.buffer.clone()
        data = [torch.randn(common.num_actual_tokens, heads * shape.head_size) for heads in (4, 2, 2)]
        world.forward(common, [N if is_stale else 0] * len(rows), [data])
        assert torch.equal(world.buffer, before)


def test_vectorised_dense_oracle_is_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, h, 32, generator=generator) for n, h in ((7, 6), (40, 2), (40, 2)))
    for softcap in (0.0, 3.0):
        expected = reference.dense_attention(query, keys, values, 0.5, softcap)
        torch.testing.assert_close(causal(query, keys, values, 0.5, softcap), expected)
