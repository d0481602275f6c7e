# SPDX-License-Identifier: Apache-2.0
"""Decode steps for the correctness part: inputs on a device, and what ``kernels/reference.py`` says must come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tests.triton_kernels import paged
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.options import DecodeOptions, Estimator
from vllm_rocketkv.kernels.triton.cache import CacheView, cache_view

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NEAR_TIE = 1e-5
"""Scores relatively closer than this may be ordered either way by float32 arithmetic: such heads are not compared."""
UNTOUCHED = 7.0
"""What the output holds where nothing may be written."""


@dataclass(frozen=True)
class DecodeCase:
    """A step: one request for each length, rows for the newest ``rows_each`` tokens of each, and two rows of padding."""

    name: str
    head_size: int = 128
    num_kv_heads: int = 2
    group: int = 4
    model_dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    kt_dtype: torch.dtype = E5M2
    page_size: int = 4
    block_size: int = 128
    lengths: tuple[int, ...] = (2048, 2047, 1201, 300, 1)
    rows_each: int = 1
    topk_tokens: int = 256
    dense_below: int = 384
    sink_tokens: int = 4
    recent_tokens: int = 4
    topr: int = 1 << 30
    by_page: bool = False
    softcap: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    is_hnd: bool = True
    estimator: Estimator = "hsa"

    @property
    def options(self) -> DecodeOptions:
        """What the kernels are told."""
        return DecodeOptions(
            self.head_size**-0.5, self.softcap, self.dense_below, self.topk_tokens, self.sink_tokens,
            self.recent_tokens, self.by_page, True, self.estimator,
        )  # fmt: skip

    @property
    def tolerance(self) -> float:
        """Of the largest expected number; a wrong token or page is far beyond it."""
        return {FP32: 1e-4, FP16: 4e-3, BF16: 2e-2}[self.model_dtype]

    def small(self) -> DecodeCase:
        """A step of the same kind for the interpreter and the sanitizer."""
        block_size = min(self.block_size, 32)
        lengths = tuple(dict.fromkeys(min(n, 96 - 7 * i) for i, n in enumerate(self.lengths)))
        return replace(
            self, block_size=block_size, page_size=min(self.page_size, block_size), lengths=lengths[:4],
            num_kv_heads=1, topk_tokens=24, dense_below=40,
        )  # fmt: skip


DECODE_CASES = (
    DecodeCase("bf16, KT e5m2"),
    DecodeCase("bf16, KT bf16, blocks of 16", kt_dtype=BF16, block_size=16),
    DecodeCase("float32, by page", model_dtype=FP32, kv_dtype=FP32, kt_dtype=BF16, by_page=True),
    DecodeCase("float32, top-r 24", model_dtype=FP32, kv_dtype=FP32, topr=24, head_size=64, group=1),
    DecodeCase("fp16, D 256", model_dtype=FP16, kv_dtype=FP16, head_size=256, group=8),
    DecodeCase("fp8 e4m3 KV and KT, scales", kv_dtype=E4M3, kt_dtype=E4M3, key_scale=0.5, value_scale=0.25),
    DecodeCase("fp8 e5m2 KV, D 80, tokens before heads", kv_dtype=E5M2, head_size=80, is_hnd=False, key_scale=2.0),
    DecodeCase("three rows a request", rows_each=3, page_size=16),
    DecodeCase("soft cap, ratio 12", softcap=5.0, group=12, head_size=96),
    DecodeCase("quest", estimator="quest", by_page=True, sink_tokens=0, recent_tokens=0),
    DecodeCase(
        "float32, quest", estimator="quest", by_page=True, model_dtype=FP32, kv_dtype=FP32, head_size=64, group=1
    ),
    DecodeCase("mean", estimator="mean", kt_dtype=BF16, by_page=True, sink_tokens=0, recent_tokens=0),
    DecodeCase(
        "float32, mean", estimator="mean", by_page=True, model_dtype=FP32, kv_dtype=FP32, head_size=256, group=8
    ),
    DecodeCase("no KT table", page_size=0, dense_below=1 << 30),
)


@dataclass
class DecodeStep:
    """A case on a device."""

    case: DecodeCase
    cache: CacheView
    query: torch.Tensor
    output: torch.Tensor
    rows: torch.Tensor
    block_table: torch.Tensor
    sequences: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each request as stored, on the CPU."""

    @property
    def capacity(self) -> int:
        """Tokens that a workspace must have room for."""
        return max(self.case.lengths)


def on_device(cache: paged.PagedCache, device: torch.device) -> CacheView:
    """A copy of the cache; the same view of it."""
    view = cache.view
    storage = cache.storage.to(device, copy=True)
    kv = storage.view(cache.kv_dtype).as_strided(view.kv.shape, view.kv.stride())
    kv_bytes = view.num_kv_heads * view.block_size * 2 * view.head_size * cache.kv_dtype.itemsize
    scales = view.key_scale, view.value_scale
    return cache_view(kv, cache.kv_dtype, cache.kt_dtype, kv_bytes, view.page_size, *scales, view.kt_is_mean)


def make_step(case: DecodeCase, device: torch.device, seed: int = 0) -> DecodeStep:
    """Random keys, values and queries in scattered blocks; whatever must not be read is NaN."""
    blocks = sum(-(-n // case.block_size) for n in case.lengths)
    cache = paged.make_cache(
        blocks, case.num_kv_heads, case.block_size, case.head_size, case.kv_dtype, case.kt_dtype, case.page_size,
        is_hnd=case.is_hnd, key_scale=case.key_scale, value_scale=case.value_scale,
        kt_is_mean=case.estimator == "mean", seed=seed,
    )  # fmt: skip
    sequences, tables = [], []
    rows: list[list[int]] = []
    for request, n in enumerate(case.lengths):
        shape = (n, case.num_kv_heads, case.head_size)
        keys, values = (paged.random_tokens(shape, case.kv_dtype, seed + 2 * request + i) for i in range(2))
        sequences.append((keys, values))
        tables.append(cache.add(keys, values))
        of_request = range(max(n - case.rows_each, 0) + 1, n + 1)
        topr = min(case.topr, case.head_size)
        rows += [[len(rows) + i, request, 1, m, topr, int(m < n)] for i, m in enumerate(of_request)]
    num_tokens = len(rows)
    rows += [[num_tokens, 0, 0, 0, 0, 0]] * 2  # padding
    heads = case.num_kv_heads * case.group
    query = paged.random_tokens((num_tokens + 1, heads, case.head_size), case.model_dtype, seed + 99, 2.0)
    return DecodeStep(
        case,
        on_device(cache, device),
        query.to(device),
        torch.full_like(query, UNTOUCHED, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        paged.block_table(tables, [1] * len(tables)).to(device),
        sequences,
    )


def compare(step: DecodeStep) -> str:
    """What is wrong with ``step.output``; empty if nothing is."""
    output, query = step.output.cpu().double(), step.query.cpu()
    worst, compared = 0.0, 0
    for token, request, _, n, topr, _ in step.rows.tolist():
        if n == 0:
            if not bool((output[token] == UNTOUCHED).all()):
                return "a row of padding was written"
            continue
        keys, values = step.sequences[request]
        expected, is_clear = expected_row(step.case, query[token], keys, values, n, topr)
        heads = is_clear.repeat_interleave(step.case.group)
        compared += int(heads.sum())
        errors = (output[token] - expected).abs().amax(1) / expected.abs().max()
        errors[errors.isnan()] = torch.inf
        worst = max(worst, float(errors[heads].max()) if heads.any() else 0.0)
        if worst > step.case.tolerance:
            return f"row of {n} tokens: error {worst:.2g} of the largest number, tolerance {step.case.tolerance:g}"
    return "" if compared else "nothing could be compared: every selection is a near tie"


def expected_row(
    case: DecodeCase, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, n: int, topr: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output float64 ``[Hq, D]`` of a row, and for each KV head whether float32 arithmetic must select the same tokens."""
    stored = keys[:n].float()
    real_keys, real_values = stored * case.key_scale, values[:n].float() * case.value_scale
    scale, Hkv = case.options.scale, case.num_kv_heads
    is_clear = torch.ones(Hkv, dtype=torch.bool)
    selected: Sequence[Sequence[int]] = [range(n)] * Hkv
    if case.page_size and n > case.dense_below:
        low, high = paged.page_entries(stored, case.page_size, case.kt_dtype, case.estimator == "mean")
        low, high = (paged.bound_values(entries) * case.key_scale for entries in (low, high))
        if case.estimator == "hsa":
            scores = reference.hsa_scores(query, low, high, n, case.page_size, topr)
        elif case.estimator == "quest":
            scores = reference.quest_scores(query, low, high, n, case.page_size)
        else:
            scores = reference.mean_scores(query, low, n, case.page_size)
        selected = reference.hsa_choose(
            scores, n, case.page_size, case.topk_tokens, "page" if case.by_page else "token", case.sink_tokens,
            case.recent_tokens,
        )  # fmt: skip
        is_clear = torch.tensor([is_unambiguous(case, *pair, n) for pair in zip(scores, selected, strict=True)])
    return reference.attend(query, real_keys, real_values, selected, scale, case.softcap), is_clear


def is_unambiguous(case: DecodeCase, scores: torch.Tensor, selected: Sequence[int], n: int) -> bool:
    """Whether no other page's score is near that of the last page chosen by its score."""
    free = [t for t in selected if case.sink_tokens <= t < n - case.recent_tokens]
    if not free:
        return True
    pages = torch.tensor(sorted({t // case.page_size for t in free}))
    edge = scores[pages].min()
    # Sums of terms of both signs are as exact as the largest of them.
    near = NEAR_TIE * (edge if case.estimator == "hsa" else scores.abs().max())
    return int(((scores - edge).abs() <= near).sum()) == 1


def run_case(case: DecodeCase, device: torch.device, decode: Callable[[DecodeStep], None]) -> str:
    """Make, decode, compare."""
    step = make_step(case, device)
    decode(step)
    return compare(step)
