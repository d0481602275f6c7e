# SPDX-License-Identifier: Apache-2.0
"""What ``scheduler_model`` and ``worker_model`` pass between them, and vLLM's classes in the sizes that they use."""

from __future__ import annotations

from dataclasses import dataclass
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

init_none_hash(sha256)

UNIT = 1_000_000  # token ids of stream or request k start at k * UNIT
LOADING = "loading"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
    sparse: bool
    n: int = 0
    s: int = 0
    e: int = 0
    """Layout; all 0 when nothing is evicted."""
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

    @property
    def evictable(self) -> bool:
        return self.n > 0

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
