# SPDX-License-Identifier: Apache-2.0
"""What one request computes in one attention layer, and, unpaged, what the layer must answer (``policy_oracle``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.policy_oracle import Lengths, Life, Pages
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import reference

FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Shape:
    """What the model fixes."""

    num_kv_heads: int = 2
    group: int = 2
    head_size: int = 32
    dtype: torch.dtype = torch.float32
    block_size: int = 32
    softcap: float = 0.0
    shares_cache: bool = False
    kv_cache_dtype: str = "auto"
    """By vLLM's names: fp8 types are stored, by the scales below, in bytes."""
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype in FP8_DTYPES

    @property
    def query_to_kv_bytes(self) -> int:
        return self.dtype.itemsize if self.is_fp8 else 1

    def stored(self, tensor: Tensor, scale: float) -> Tensor:
        """What a read of the cache gives back of ``tensor``."""
        if not self.is_fp8:
            return tensor
        return ((tensor / scale).to(FP8_DTYPES[self.kv_cache_dtype]).float() * scale).to(tensor.dtype)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True)
class Step:
    """One scheduled step of a request: ``num_tokens`` are computed, of which the first ``num_accepted`` stay."""

    num_tokens: int
    num_accepted: int


def cut(length: int, *borders: int, start: int = 0) -> list[Step]:
    """Steps from ``start`` to ``length`` with chunk borders at ``borders``; those outside are ignored."""
    ends = [start, *sorted({border for border in borders if start < border < length}), length]
    return [Step(end - begin, end - begin) for begin, end in itertools.pairwise(ends)]


@dataclass
class Request:
    """One request: its lengths, what it will compute, and the plain sequence it stands for."""

    num_prompt: int
    steps: list[Step]
    shape: Shape
    config: RocketKVConfig
    seed: int
    prefix_of: Request | None = None
    """Another request with the same first ``num_hit`` tokens, whose blocks this one is admitted onto."""
    num_hit: int = 0
    numbers: str = "random"
    """Kind of queries and keys: see ``draw``."""
    computed: int = 0
    next_step: int = 0
    row: list[int] = field(default_factory=list)
    """The worker's append-only block table row."""
    has_private: bool = False
    is_compact: bool = False

    def __post_init__(self) -> None:
        shape = self.shape
        self.lengths = Lengths(self.num_prompt, self.config, shape.block_size)
        self.natural_length = self.lengths.natural
        self.is_sparse, self.is_evicted = self.lengths.is_sparse, self.lengths.is_evicted
        self.num_natural, self.num_private = self.lengths.num_natural, self.lengths.num_private
        self.window = self.config.eviction_window
        self.last = self.num_hit + sum(step.num_tokens for step in self.steps)
        self.computed = self.num_hit
        self.life = Life(self.lengths, shape.num_kv_heads, self.scale, shape.softcap)
        self.random = torch.Generator().manual_seed(self.seed)
        self.query, self.sharer_query, self.key, self.value = self.draw(self.last)
        if self.prefix_of is not None:
            self.key[: self.num_hit] = self.prefix_of.key[: self.num_hit]
            self.value[: self.num_hit] = self.prefix_of.value[: self.num_hit]

    @property
    def scale(self) -> float:
        return self.shape.head_size**-0.5

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries of both layers, keys and values of ``count`` tokens.

        Random ones are sharp enough that a wrong token is seen beyond the tolerance; with a soft cap, sharp enough to meet it.
        The others are cases: equal keys (``ties``), one key that nearly all queries want (``dominating``), queries that want
        nothing (``zero``), and norms so large that a softmax is one token's or a tie (``huge``; integers, so that all dtypes
        compute them exactly, and two logits are equal or differ by 32 at head size 64).
        """
        shape = self.shape
        query, key, value, sharer = torch.randn(4, count, shape.num_heads, shape.head_size, generator=self.random)
        sharpness = 8.0 if shape.softcap else 2.5
        query, sharer, key, value = query * sharpness, sharer * sharpness, key[:, : shape.num_kv_heads], value
        value = value[:, : shape.num_kv_heads]
        if self.numbers == "ties":
            key = key[:4][torch.randint(min(count, 4), (count,), generator=self.random)]
        elif self.numbers == "dominating":
            direction = torch.ones(shape.head_size)
            query, sharer = query + direction, sharer + direction
            key[torch.randint(count, (1,), generator=self.random)] = 4 * direction
        elif self.numbers == "zero":
            query, sharer = torch.zeros_like(query), torch.zeros_like(sharer)
        elif self.numbers == "huge":
            query, sharer, key = 256 * query.round(), 256 * sharer.round(), (4 * key).round()
        else:
            assert self.numbers == "random"
        key, value = (
            shape.stored(key.to(shape.dtype), shape.key_scale),
            shape.stored(value.to(shape.dtype), shape.value_scale),
        )
        return query.to(shape.dtype), sharer.to(shape.dtype), key, value

    def redraw_from(self, position: int) -> None:
        """Other tokens stand where drafts were rejected."""
        fresh = self.draw(self.last - position)
        for tensor, other in zip((self.query, self.sharer_query, self.key, self.value), fresh, strict=True):
            tensor[position:] = other

    def gathered(self, tensor: Tensor, positions: Tensor) -> Tensor:
        """Of keys or values, what each KV head holds at ``positions`` [Hkv, n]: ``[n, Hkv, D]``."""
        return tensor.gather(0, positions.T[..., None].expand(-1, -1, self.shape.head_size))

    def compute(self, start: int, end: int) -> None:
        """Let tokens ``start`` to ``end`` - 1 be computed: before ``expected``."""
        self.life.compute(self.query, self.key, start, end)

    def expected(self, query: Tensor, start: int, end: int) -> Tensor:
        """What tokens ``start`` to ``end`` - 1 must get: float64 ``[tokens, Hq, D]``."""
        border = min(max(self.natural_length, start), end) if self.is_sparse else end
        rows = [causal(query[start:border], self.key[:border], self.value[:border], self.scale, self.shape.softcap)]
        # Between two evictions, pages that are full before this step are the same for all its tokens.
        borders = [border, *(length for length in self.lengths.evictions(border, end) if length < end), end]
        for first, last in itertools.pairwise(borders):
            if first < last:
                rows.append(self.sparse_rows(query, first, last))
        return torch.cat(rows)

    def sparse_rows(self, query: Tensor, first: int, last: int) -> Tensor:
        config, page_size = self.config, self.config.page_size
        positions = self.life.seen(last - 1)
        all_keys, all_values = self.gathered(self.key, positions), self.gathered(self.value, positions)
        num_before = positions.shape[1] - (last - first)
        settled = num_before // page_size * page_size
        pages = Pages(config, all_keys[:settled]) if config.selects else None
        topr = config.topr_for(self.num_prompt, self.shape.head_size)
        rows = []
        for index, row in enumerate(query[first:last], num_before + 1):
            keys, values = all_keys[:index], all_values[:index]
            selected: Sequence[Sequence[int]] = [range(index)] * self.shape.num_kv_heads
            if pages is not None and index > config.dense_below:
                selected = pages.select(row, keys[settled:], index, topr)
            rows.append(reference.attend(row, keys, values, selected, self.scale, self.shape.softcap))
        return torch.stack(rows)


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float) -> Tensor:
    """``reference.dense_attention`` in one piece: float64 ``[M, Hq, D]``."""
    (M, Hq, _), (N, Hkv, _) = query.shape, keys.shape
    k, v = (tensor.double().repeat_interleave(Hq // Hkv, 1) for tensor in (keys, values))
    logits = reference.capped(torch.einsum("mhd,nhd->hmn", query.double(), k) * scale, softcap)
    hidden = torch.ones(M, N, dtype=torch.bool).triu(N - M + 1)
    return torch.einsum("hmn,nhd->mhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)
