# SPDX-License-Identifier: Apache-2.0
"""Every kernel on a device against ``kernels/reference.py``, written out in plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.decode_cases import (
    BF16,
    DECODE_CASES,
    E4M3,
    E5M2,
    FP32,
    DecodeStep,
    on_device,
    run_case,
)
from tests.triton_kernels import paged
from vllm_rocketkv.kernels import reference
from vllm_rocketkv.kernels.triton.cache import CacheView


@dataclass(frozen=True)
class Check:
    """One comparison; ``run`` returns what is wrong, or nothing."""

    name: str
    run: Callable[[torch.device], str]


class NotHereError(Exception):
    """What a check raises where this build or machine has no such kernel."""


def checks(small: bool) -> Iterator[Check]:
    """All of them; ``small``: shapes for the interpreter and the sanitizer."""
    for case in DECODE_CASES:
        sized = case.small() if small else case
        yield Check(f"decode: {case.name}", partial(run_case, sized, decode=fused))
        yield Check(f"split decode: {case.name}", partial(run_case, sized, decode=split))
    formats = (
        (BF16, E5M2, 4, False), (FP32, BF16, 16, False), (E4M3, E4M3, 4, False), (E5M2, BF16, 1, False),
        (BF16, BF16, 4, True), (E4M3, E5M2, 16, True),
    )  # fmt: skip
    for kv, kt, page, is_mean in formats:
        name = f"KV {short(kv)}, KT {short(kt)}, page {page}{', means' if is_mean else ''}"
        written = kv, kt, page, is_mean, small
        yield Check(f"write rows: {name}", partial(check_update, *written))
        yield Check(f"summarise pages: {name}", partial(check_summaries, *written))
        yield Check(f"compact: {name}", partial(check_compact, *written, cuda=False))
        if not is_mean:
            yield Check(f"CUDA compact: {name}", partial(check_compact, *written, cuda=True))
    for all_keys in (True, False):
        name = "all keys" if all_keys else "the prefix"
        yield Check(f"window scores over {name}", partial(check_scores, all_keys, small))
    yield Check("stage 1: tokens kept", partial(check_keep, small))
    yield Check("top tokens", partial(check_top_tokens, small, cuda=False))
    yield Check("CUDA top tokens", partial(check_top_tokens, small, cuda=True))
    yield Check("CUDA page selection", check_select_pages)
    yield Check("plan: rows and lengths", check_finish_rows)
    yield Check("plan: pages that became full", check_touched_pages)


def short(dtype: torch.dtype) -> str:
    """The dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


# ---- decode ----


def fused(step: DecodeStep) -> None:
    """``decode.py`` with a workspace of its own."""
    from vllm_rocketkv.kernels.triton.decode import DecodeWorkspace, decode

    case = step.case
    heads = case.num_kv_heads * case.group
    workspace = DecodeWorkspace.allocate(
        len(step.rows), heads, case.num_kv_heads, case.head_size, step.capacity, case.page_size, step.query.device,
        case.estimator,
    )  # fmt: skip
    decode(step.query, step.cache, step.output, step.rows, step.block_table, case.options, workspace)


def split(step: DecodeStep, num_splits: int = 4) -> None:
    """``decode_split.py`` with a workspace of its own."""
    from vllm_rocketkv.kernels.triton.decode_split import SplitWorkspace, decode_split

    case = step.case
    workspace = SplitWorkspace(
        len(step.rows), case.num_kv_heads * case.group, case.num_kv_heads, case.head_size, step.capacity,
        case.page_size, num_splits, step.query.device,
    )  # fmt: skip
    decode_split(step.query, step.cache, step.output, step.rows, step.block_table, case.options, workspace)


# ---- writes ----

Sizes = tuple[int, int, int, int]
"""num_kv_heads, head_size, block_size, tokens of a sequence."""


def sizes(small: bool) -> Sizes:
    """Of the caches that writes are checked on."""
    return (2, 64, 32, 75) if small else (8, 128, 128, 2000)


def check_update(kv: torch.dtype, kt: torch.dtype, page: int, is_mean: bool, small: bool, device: torch.device) -> str:
    """Append the last tokens of two sequences, several in one step, and compare all codes with a cache built at once."""
    from vllm_rocketkv.kernels.triton.update import write_rows

    Hkv, D, block, n = sizes(small)
    before = paged.make_cache(4 * (n // block + 1), Hkv, block, D, kv, kt, page, kt_is_mean=is_mean)
    keys, values = (paged.random_tokens((2, n, Hkv, D), kv, seed) for seed in (0, 1))
    new = (6, 1)  # tokens of this step
    tables = [before.add(keys[i, : n - new[i]], values[i, : n - new[i]]) for i in range(2)]
    view = on_device(before, device)
    rows: list[list[int]] = []
    model_keys, model_values = [], []
    for i, count in enumerate(new):
        for j in range(count):
            at = n - count + j
            rows.append([len(rows), i, 0, at + 1, D, int(j + 1 < count)])
            model_keys.append(keys[i, at].float())
            model_values.append(values[i, at].float())
        before.write(tables[i], keys[i, n - count :], values[i, n - count :], first=n - count)
        before.write_kt(tables[i], keys[i])
    rows.append([0, 0, 0, 0, 0, 0])
    model = kv if kv.itemsize > 1 else BF16  # as fp8 caches are written: any of its numbers is exact in bfloat16
    token_keys, token_values = (torch.stack(list_).to(model).to(device) for list_ in (model_keys, model_values))
    table = paged.block_table(tables).to(device)
    write_rows(view, token_keys, token_values, torch.tensor(rows, dtype=torch.int32, device=device), table)
    return differences(view, before)


def check_summaries(
    kv: torch.dtype, kt: torch.dtype, page: int, is_mean: bool, small: bool, device: torch.device
) -> str:
    """Rebuild all KT entries of a sequence from its keys."""
    from vllm_rocketkv.kernels.triton.update import summarise_pages

    Hkv, D, block, n = sizes(small)
    cache = paged.make_cache(n // block + 1, Hkv, block, D, kv, kt, page, kt_is_mean=is_mean)
    keys, values = (paged.random_tokens((n, Hkv, D), kv, seed) for seed in (0, 1))
    blocks = cache.add(keys, values, with_kt=False)
    view = on_device(cache, device)
    pages = [
        [int(blocks[p * page // block]), p % (block // page), min(page, n - p * page)] for p in range(-(-n // page))
    ]
    summarise_pages(view, torch.tensor([*pages, [0, 0, 0]], dtype=torch.int32, device=device))
    cache.write_kt(blocks, keys)
    return differences(view, cache)


def check_compact(
    kv: torch.dtype, kt: torch.dtype, page: int, is_mean: bool, small: bool, device: torch.device, cuda: bool
) -> str:
    """Move kept tokens to private blocks, with their KT entries."""
    from vllm_rocketkv.kernels.triton.compact import compact

    Hkv, D, block, n = sizes(small)
    num_kept = n // 2 + 1
    cache = paged.make_cache(2 * (n // block + 2), Hkv, block, D, kv, kt, page, kt_is_mean=is_mean)
    keys, values = (paged.random_tokens((n, Hkv, D), kv, seed) for seed in (0, 1))
    prompt, private = cache.add(keys, values, with_kt=False), cache.take_blocks(num_kept)
    generator = torch.Generator().manual_seed(0)
    kept = torch.stack([torch.randperm(n, generator=generator)[:num_kept].sort().values for _ in range(Hkv)])
    view = on_device(cache, device)
    arguments = [t.to(device, torch.int32) for t in (prompt, private, kept)]
    if cuda:
        cuda_kernels().compact(view, *arguments)
    else:
        compact(view, *arguments)
    # By numbers: gathering fp8 tensors is not implemented everywhere.
    chosen = [torch.stack([t.float()[kept[h], h] for h in range(Hkv)], 1).to(kv) for t in (keys, values)]
    cache.write(private, *chosen)
    cache.write_kt(private, chosen[0])
    return differences(view, cache)


def differences(view: CacheView, expected: paged.PagedCache) -> str:
    """Where two caches differ: codes of keys and values exactly, KT entries by number, since zeros have two codes."""
    codes, bounds = view.kv.cpu(), view.kt.cpu()
    if not torch.equal(codes, expected.view.kv):
        return f"{int((codes != expected.view.kv).sum())} of {codes.numel()} keys and values differ"
    found, wanted = (paged.bound_values(t.contiguous().view(expected.kt_dtype)) for t in (bounds, expected.view.kt))
    wrong = (found != wanted) & ~(found.isnan() & wanted.isnan())
    return f"{int(wrong.sum())} of {wrong.numel()} KT entries differ" if wrong.any() else ""


# ---- stage 1 ----


def prompt_on(
    device: torch.device, small: bool, W: int = 32
) -> tuple[torch.Tensor, torch.Tensor, CacheView, torch.Tensor]:
    """Window queries, keys, cache and blocks of a prompt, in bfloat16."""
    Hkv, D, block, n = sizes(small)
    n, Hkv = (n, 1) if small else (4000, 2)
    W = 8 if small else W
    cache = paged.make_cache(n // block + 1, Hkv, block, D, BF16, E5M2, 4)
    keys, values = (paged.random_tokens((n, Hkv, D), BF16, seed) for seed in (0, 1))
    blocks = cache.add(keys, values, with_kt=False)
    query = paged.random_tokens((W, 4 * Hkv, D), BF16, 2)
    return query, keys, on_device(cache, device), blocks.to(device)


def check_scores(all_keys: bool, small: bool, device: torch.device) -> str:
    """Summed softmax weights, before they are pooled."""
    from vllm_rocketkv.kernels.triton.window_scores import window_scores

    query, keys, cache, blocks = prompt_on(device, small)
    scale = query.shape[-1] ** -0.5
    found = window_scores(query.to(device), cache, blocks, len(keys), scale, 0.0, all_keys).cpu()
    expected = reference.window_scores(query, keys, scale, "all" if all_keys else "prefix", kernel_size=1)
    error = float(((found - expected).abs() / expected).max())
    return "" if error < 1e-3 else f"relative error {error:.2g}"


def check_keep(small: bool, device: torch.device) -> str:
    """Kept positions; those whose scores are within float32's error of the edge may go either way."""
    from vllm_rocketkv.kernels.triton.stage1 import keep_tokens

    query, keys, cache, blocks = prompt_on(device, small)
    n, W, num_kept, sinks, pool = len(keys), len(query), len(keys) // 3, 4, 7
    scale = query.shape[-1] ** -0.5
    found = keep_tokens(query.to(device), cache, blocks, n, num_kept, scale, 0.0, True, pool, sinks).cpu()
    scores = reference.window_scores(query, keys, scale, "all", pool)
    expected = reference.keep_tokens(scores, num_kept, W, sinks)
    if found.shape != expected.shape:
        return f"kept {tuple(found.shape)}, expected {tuple(expected.shape)}"
    for head, (mine, truth) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
        if mine != sorted(set(mine)):
            return f"head {head}: positions are not ascending"
        # Of what only one of them kept: the pool makes runs of equal scores, of which the lower indices come first.
        edge = min(float(scores[head, t]) for t in truth if sinks <= t < n - W)
        odd = [t for t in set(mine) ^ set(truth) if t >= n - W or abs(float(scores[head, t]) / edge - 1) > 1e-4]
        if odd:
            return f"head {head}: {len(odd)} positions are wrong, the first {min(odd)}"
    return ""


def check_top_tokens(small: bool, device: torch.device, cuda: bool) -> str:
    """The best of integer keys, with many ties; in several chunks where there is time for it."""
    n, k = (300, 70) if small else (100_000, 2016)
    keys = torch.randint(-50, 50, (2, n), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    keys[:, ::97] = 1 << 30
    from vllm_rocketkv.kernels.triton.top_tokens import top_tokens

    choose = cuda_kernels().top_tokens if cuda else top_tokens
    found = choose(keys.to(device), k)
    expected = torch.tensor([reference.best(of_head, k) for of_head in keys.tolist()], dtype=torch.int32)
    return "" if torch.equal(found.cpu(), expected) else "wrong indices"


def check_select_pages(device: torch.device) -> str:
    """csrc/cuda's choice of pages against ``hsa_choose``."""
    cuda = cuda_kernels()
    page, dense_below, topk, sinks, recent = 4, 100, 64, 4, 4
    lengths = [510, 300, 90, 0]
    scores = torch.rand(len(lengths), 2, 128, generator=torch.Generator().manual_seed(0))
    lists = torch.full((len(lengths), 2, 128), -1, dtype=torch.int32, device=device)
    counts = torch.full((len(lengths), 2, 3), -7, dtype=torch.int32, device=device)
    num_tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    keys = scores.view(torch.int32).to(device)
    cuda.select_pages(keys, num_tokens, page, dense_below, topk, sinks, recent, True, lists, counts)
    if bool(counts[2:].any()) or bool(counts[:, :, 1:].any()):
        return f"counts of a short row, of padding and of other parts: {counts.tolist()}"
    for row, n in enumerate(lengths[:2]):
        used = scores[row, :, : -(-n // page)].double()
        for head, tokens in enumerate(reference.hsa_choose(used, n, page, topk, "page", sinks, recent)):
            listed = [entry // (page + 1) for entry in lists[row, head, : int(counts[row, head, 0])].tolist()]
            if listed != sorted({t // page for t in tokens}):
                return f"row {row}, head {head}: {len(listed)} pages, not those of the reference"
    return ""


def cuda_kernels() -> Any:
    """The binding of ``csrc/cuda``."""
    from vllm_rocketkv.kernels import cuda

    if not cuda.available():
        raise NotHereError(
            "csrc/cuda needs an NVIDIA GPU and nvcc while this package is installed; tests/ runs it on the host"
        )
    return cuda


# ---- plan ----


def check_finish_rows(device: torch.device) -> str:
    """Lengths that only the device knows."""
    from vllm_rocketkv.kernels.triton.plan import finish_rows

    rows = torch.tensor([[0, 0, 3, 0, 64, 0], [2, 1, 1, 5, 64, 1], [3, -1, 0, 9, 0, 0]], dtype=torch.int32)
    seq_lens, slots = torch.tensor([100, 40], dtype=torch.int32), torch.arange(5)
    found, found_slots = rows.to(device), slots.to(device)
    finish_rows(found, seq_lens.to(device), found_slots, True)
    if found[:, 3].tolist() != [100, 35, 0]:
        return f"lengths {found[:, 3].tolist()}"
    return "" if found_slots.tolist() == [-1, 1, -1, 3, 4] else f"slots {found_slots.tolist()}"


def check_touched_pages(device: torch.device) -> str:
    """Where tokens fill pages of 4 in blocks of 16: the entry is block, page inside it, 4 tokens; else no tokens."""
    from vllm_rocketkv.kernels.triton.plan import find_touched_pages

    tokens = torch.tensor([[0, 1], [0, 2], [1, 1], [-1, 0]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([40, 23], dtype=torch.int32, device=device)
    table = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]], dtype=torch.int32, device=device)
    touched = torch.full((4, 3), -1, dtype=torch.int32, device=device)
    find_touched_pages(tokens, seq_lens, table, touched, 16, 4)
    found = touched.tolist()
    # Token 39 is the last of page 1 of the third block; tokens 38 and 22 fill nothing.
    return "" if found[0] == [7, 1, 4] and [entry[2] for entry in found] == [4, 0, 0, 0] else f"entries {found}"
