# SPDX-License-Identifier: Apache-2.0
"""What one request computes in one attention layer, and, unpaged and from ``kernels.reference``, what the layer must answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import reference

KT_DTYPES = {"bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
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
    computed: int = 0
    next_step: int = 0
    row: list[int] = field(default_factory=list)
    """The worker's append-only block table row."""
    has_private: bool = False
    is_compact: bool = False
    kept_keys: Tensor | None = None
    kept_values: Tensor | None = None

    def __post_init__(self) -> None:
        B, N = self.shape.block_size, self.num_prompt
        P = self.config.prompt_budget_for(N, B)
        self.is_sparse = self.config.policy != "full" and N > P
        self.is_evicted = self.is_sparse and self.config.evicts
        # Design section 2, written out again.
        self.num_natural = math.ceil(N / B)
        self.num_dropped = math.ceil((N - P) / B) if self.is_evicted else 0
        self.num_private = self.num_natural - self.num_dropped if self.is_evicted else 0
        self.window = self.config.window_size
        self.last = self.num_hit + sum(step.num_tokens for step in self.steps)
        self.computed = self.num_hit
        self.random = torch.Generator().manual_seed(self.seed)
        shape, dtype = self.shape, self.shape.dtype
        # Sharp enough that a wrong token is seen beyond the tolerance; with a soft cap, sharp enough to meet it.
        sharpness = 8.0 if shape.softcap else 2.5
        draw = torch.randn(4, self.last, shape.num_heads, shape.head_size, generator=self.random)
        self.query = (draw[0] * sharpness).to(dtype)
        self.sharer_query = (draw[3] * sharpness).to(dtype)
        key, value = draw[1:3, :, : shape.num_kv_heads].to(dtype)
        self.key, self.value = shape.stored(key, shape.key_scale), shape.stored(value, shape.value_scale)
        if self.prefix_of is not None:
            self.key[: self.num_hit] = self.prefix_of.key[: self.num_hit]
            self.value[: self.num_hit] = self.prefix_of.value[: self.num_hit]

    @property
    def scale(self) -> float:
        return self.shape.head_size**-0.5

    def redraw_from(self, position: int) -> None:
        """Other tokens stand where drafts were rejected."""
        for tensor in (self.query, self.sharer_query, self.key, self.value):
            fresh = torch.randn(tensor[position:].shape, generator=self.random)
            factor = 8.0 if self.shape.softcap else 2.5
            tensor[position:] = (fresh * (factor if tensor.shape[1] == self.shape.num_heads else 1)).to(tensor.dtype)
        self.key[position:] = self.shape.stored(self.key[position:], self.shape.key_scale)
        self.value[position:] = self.shape.stored(self.value[position:], self.shape.value_scale)

    def private_sequence(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a token at ``end`` - 1 may read: ``[n, Hkv, D]`` each."""
        if not self.is_evicted:
            return self.key[:end], self.value[:end]
        assert self.kept_keys is not None
        assert self.kept_values is not None
        N = self.num_prompt
        return torch.cat([self.kept_keys, self.key[N:end]]), torch.cat([self.kept_values, self.value[N:end]])

    def evict(self) -> None:
        N, W, config = self.num_prompt, self.window, self.config
        num_kept = N - self.num_dropped * self.shape.block_size
        scores = reference.window_scores(
            self.query[N - W : N],
            self.key[:N],
            self.scale,
            config.window_softmax,
            config.kernel_size,
            self.shape.softcap,
        )
        kept = reference.keep_tokens(scores, num_kept, W, config.sink_tokens)
        index = kept.T[..., None].expand(-1, -1, self.shape.head_size)
        self.kept_keys, self.kept_values = self.key[:N].gather(0, index), self.value[:N].gather(0, index)

    def expected(self, query: Tensor, start: int, end: int) -> Tensor:
        """What tokens ``start`` to ``end`` - 1 must get: float64 ``[tokens, Hq, D]``."""
        border = min(max(self.num_prompt, start), end) if self.is_sparse else end
        rows = [causal(query[start:border], self.key[:border], self.value[:border], self.scale, self.shape.softcap)]
        if self.is_evicted and self.kept_keys is None and end >= self.num_prompt:
            self.evict()
        page_size = self.config.page_size
        settled, summaries = 0, None
        if self.config.selects and border < end:  # pages that are full before this step, the same for all its tokens
            keys, _ = self.private_sequence(border)
            settled = len(keys) // page_size * page_size
            summaries = self.summarise(keys[:settled])
        for position in range(border, end):
            keys, values = self.private_sequence(position + 1)
            selected: Sequence[Sequence[int]] = [range(len(keys))] * self.shape.num_kv_heads
            if self.config.selects and len(keys) > self.config.dense_below:
                selected = self.select(query[position], keys, settled, summaries)
            rows.append(reference.attend(query[position], keys, values, selected, self.scale, self.shape.softcap)[None])
        return torch.cat(rows)

    def summarise(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return reference.page_summaries(keys, self.config.page_size, KT_DTYPES[self.config.resolved_kt_dtype])

    def select(self, query: Tensor, keys: Tensor, settled: int, summaries: Any) -> list[list[int]]:
        """``keys`` end with the query's own token: a page's bounds never know of later ones."""
        config = self.config
        low, high = (torch.cat(pair, 1) for pair in zip(summaries, self.summarise(keys[settled:]), strict=True))
        return reference.hsa_select(
            query,
            low,
            high,
            num_tokens=len(keys),
            page_size=config.page_size,
            topk_tokens=config.topk_for_step,
            topr=config.topr_for(self.num_prompt, self.shape.head_size),
            granularity=config.granularity,
            temperature=config.temperature,
            sink_tokens=config.sink_tokens,
            recent_tokens=config.recent_tokens,
        )


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float) -> Tensor:
    """``reference.dense_attention`` in one piece: float64 ``[M, Hq, D]``."""
    (M, Hq, _), (N, Hkv, _) = query.shape, keys.shape
    k, v = (tensor.double().repeat_interleave(Hq // Hkv, 1) for tensor in (keys, values))
    logits = reference.capped(torch.einsum("mhd,nhd->hmn", query.double(), k) * scale, softcap)
    hidden = torch.ones(M, N, dtype=torch.bool).triu(N - M + 1)
    return torch.einsum("hmn,nhd->mhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)
