# SPDX-License-Identifier: Apache-2.0
"""What ``scheduler_model`` and ``worker_model`` pass between them, and vLLM's classes in the sizes that they use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.request import Request

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import PromptLayout
from vllm_rocketkv.options import USED_BY

init_none_hash(sha256)

UNIT = 1_000_000  # token ids of stream or request k start at k * UNIT
LOADING = "loading"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def small_config(policy: str, **options: Any) -> RocketKVConfig:
    """A configuration in the tests' small sizes, of the options that mean something to ``policy``."""
    small = {"window_size": 8, "prompt_budget": 32, "topk_tokens": 16, "sink_tokens": 0, "recent_tokens": 4}
    if policy == "streaming_llm":
        small["sink_tokens"] = 4
    if policy in ("streaming_llm", "h2o"):
        small["decode_interval"] = 16
    used = {name: value for name, value in small.items() if policy in USED_BY[name]}
    return RocketKVConfig.parse({"policy": policy, **used, **options})


def plain_spec(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)


def fake_vllm_config(max_model_len: int) -> Any:
    """As much of a ``VllmConfig`` as the start-up check reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def startup_pool(spec: KVCacheSpec, max_model_len: int) -> int:
    """Smallest ``num_blocks`` that vLLM's start-up check lets pass; one of them becomes the null block."""
    return ceil_div(spec.max_memory_usage_bytes(fake_vllm_config(max_model_len)), spec.page_size_bytes) + 1


def make_manager(spec: KVCacheSpec, num_blocks: int, max_model_len: int, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=max_model_len,
        scheduler_block_size=spec.block_size,
        hash_block_size=spec.block_size,
        enable_caching=caching,
    )


def make_request(name: str, tokens: list[int], max_tokens: int, block_size: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    hasher = get_request_block_hasher(block_size, sha256)
    return Request(name, tokens, params, None, block_hasher=hasher)


@dataclass(frozen=True)
class Setting:
    """What stays the same for a whole schedule."""

    config: RocketKVConfig
    block_size: int = 16
    max_model_len: int = 144
    spare_blocks: int = 0
    """Blocks beyond what the start-up check demands."""
    depth: int = 0
    """Steps that are scheduled before the oldest one is processed."""
    async_scheduling: bool = False
    """Whether decode steps are scheduled before their input token is known; else depth is pipeline parallelism."""
    lookahead: int = 0
    num_drafts: int = 0
    """Draft tokens of a decode step, at depth 0."""
    caching: bool = True
    full_sequence_must_fit: bool = True
    queries_per_block: int = 3
    """Queries that are parked in one block."""
    checked_steps: int = 1
    """Every how many actions everything is checked."""
    mirror: bool = False
    """Whether a plain ``FullAttentionSpec`` manager gets the same calls and must give the same blocks."""


@dataclass(eq=False)
class Live:
    """One request, as the scheduler (``request``) and as the worker (``row``) know it."""

    request: Request
    uid: int
    stream: int
    shared: int
    """Leading tokens taken from the stream; a request that shares its whole prompt goes on to sample from the stream."""
    max_tokens: int
    config: RocketKVConfig
    B: int
    sparse: bool
    X: int
    """Natural length: tokens of the prompt, or up to the first eviction."""
    W: int
    """Window, of whose tokens an eviction needs the queries."""
    n: int = 0
    s: int = 0
    e: int = 0
    """Layout; all 0 when nothing is evicted."""
    limit: int | None = None
    """Length at which decoded tokens are first evicted."""
    num_parking_blocks: int = 0
    external: int = 0
    """Tokens that a connector offers at the next admission."""
    incarnation: int = 0
    row: list[int] | None = None
    num_hit: int = 0
    """Tokens of the prefix hit. Without eviction it may reach beyond the prompt, into a longer one that was computed densely."""
    num_slots: int = 0
    """Most token slots asked for, in this incarnation."""
    extended: bool = False
    compact: bool = False
    state: str = "waiting"

    @classmethod
    def new(cls, setting: Setting, request: Request, config: RocketKVConfig, **values: Any) -> Live:
        """Work out where the design puts the tokens of ``request``."""
        N, B = request.num_prompt_tokens, setting.block_size
        P, budget = config.prompt_budget_for(N, B), config.decode_budget_for_step
        sparse = config.policy != "full" and (N > P or budget is not None)
        W = config.window_size if config.eviction == "snapkv" else 1
        live = cls(request=request, config=config, B=B, sparse=sparse, X=N, W=W, **values)
        if not sparse or not config.evicts:
            return live
        kept = P
        if budget is not None and N <= P:
            live.X, kept = budget + live.interval, budget
        live.n, live.s = ceil_div(live.X, B), ceil_div(live.X - kept, B)
        live.e = live.n - live.s
        if budget is not None:
            live.limit = live.s * B + budget + live.interval
            live.num_parking_blocks = ceil_div(W - 1, setting.queries_per_block)
        return live

    @cached_property
    def layout(self) -> PromptLayout:
        """What the package says, to be held against all this."""
        return self.config.layout(self.request.num_prompt_tokens, self.B)

    @property
    def evictable(self) -> bool:
        return self.n > 0

    @cached_property
    def interval(self) -> int:
        return self.config.decode_interval or ceil_div(128, self.B) * self.B

    def generation(self, position: int) -> int:
        """Evictions of decoded tokens before the token at ``position`` is computed."""
        if self.limit is None or position < self.limit:
            return 0
        return 1 + (position - self.limit) // self.interval

    def slot(self, position: int) -> int:
        """Private slot of a token beyond the natural ones."""
        return position - self.s * self.B - self.generation(position) * self.interval

    def slots_for(self, num_tokens: int) -> int:
        """Slots asked for, once private blocks are held: all up to the limit when its window begins, and none beyond."""
        if self.limit is None or num_tokens <= self.limit - self.W:
            return num_tokens
        return self.limit + self.num_parking_blocks * self.B

    def segments(self, start: int, end: int) -> list[tuple[int, int]]:
        """Positions ``start`` to ``end`` cut where decoded tokens are evicted."""
        cuts = [p for p in range(start + 1, end) if self.generation(p) > self.generation(p - 1)]
        return list(zip([start, *cuts], [*cuts, end], strict=True)) if start < end else []

    @property
    def first_parking(self) -> int:
        """Index in the row of the first parking block."""
        assert self.limit is not None
        return ceil_div(self.limit, self.B) + self.e

    def token(self, position: int) -> int:
        return (self.stream if position < self.shared else self.uid) * UNIT + position

    def reset(self) -> None:
        self.incarnation += 1
        self.row, self.num_hit, self.num_slots, self.extended, self.compact = None, 0, 0, False, False


@dataclass
class Part:
    """What one step computes of one request: positions ``start`` to ``end``."""

    live: Live
    incarnation: int
    row: list[int]
    num_hit: int
    start: int
    end: int
    samples: bool = False
    num_drafts: int = 0

    @property
    def is_current(self) -> bool:
        return self.incarnation == self.live.incarnation and self.live.state == "running"


@dataclass
class Step:
    parts: list[Part]
    load: Part | None = None
