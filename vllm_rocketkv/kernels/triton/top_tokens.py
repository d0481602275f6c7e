# SPDX-License-Identifier: Apache-2.0
"""Stage 1, choice: the exact best k of n integer keys of each KV head, ascending; ties go to the lower index.

Radix selection. Four passes count the digits (8 bits, the highest first) of the keys that share the threshold's higher digits;
each count gives the threshold, the k-th largest key, one digit more. Then every key above it is written, and the first of those
that equal it. Whatever the keys are, the work is the same.

A head of up to ``CHUNK`` keys is one program's and all of it one launch. Longer ones are cut into chunks, a program each, and
passes are launches: they share counts through integer additions, whose order cannot matter.

Bytes of a KV head: keys are read 5 times (6 by chunks, but for the first time from the second-level cache: 24 n), 4 k written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_rocketkv.kernels.triton.launch import NUM_STAGES, CompileCase

DIGITS = tl.constexpr(4)
BINS = tl.constexpr(256)

CHUNK = 16384
"""Keys that one program works on."""
_CONSTANTS = {"BLOCK": 2048}
"""Keys held in registers at a time: 8 for each thread."""
_WARPS = 8


# ------------------------------------------------------------------------------------------------ steps


@triton.jit
def _count_digits(keys, begin, end, known, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the keys whose higher digits are ``known`` have each value of digit ``DIGIT``: int32 [BINS].

    The first digit is signed and counted from -128, so that digits order as keys do.
    """
    counts = tl.zeros([BINS], tl.int32)
    for first in range(begin, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        key = tl.load(keys + index, mask=inside, other=0)
        if DIGIT == 0:
            digit = (key >> 24) + 128
        else:
            digit = (key >> (24 - 8 * DIGIT)) & 255
            inside = inside & ((key >> (32 - 8 * DIGIT)) == known)
        counts += tl.histogram(digit, BINS, mask=inside)
    return counts


@triton.jit
def _narrow(counts, known, wanted, DIGIT: tl.constexpr):
    """The threshold's next digit appended to ``known``, and how many of the keys that have it, too, are still wanted."""
    digit = tl.arange(0, BINS)
    at_least = tl.cumsum(counts, 0, reverse=True)
    chosen = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    wanted -= tl.sum(tl.where(digit > chosen, counts, 0), 0)
    known = chosen - 128 if DIGIT == 0 else known * 256 + chosen
    return known, wanted


@triton.jit
def _threshold(counts, wanted, KNOWN_DIGITS: tl.constexpr):
    """``_narrow`` by the counts [KNOWN_DIGITS, BINS] of the passes so far."""
    known = wanted * 0
    for digit in tl.static_range(KNOWN_DIGITS):
        known, wanted = _narrow(tl.load(counts + digit * BINS + tl.arange(0, BINS)), known, wanted, digit)
    return known, wanted


@triton.jit
def _write_chosen(keys, out, begin, end, threshold, wanted, above, equal, BLOCK: tl.constexpr):
    """Write the indices of the chosen keys of [begin, end), before which ``above`` and ``equal`` keys are of either kind."""
    for first in range(begin, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        key = tl.load(keys + index, mask=inside, other=0)
        is_above = (inside & (key > threshold)).to(tl.int32)
        is_equal = (inside & (key == threshold)).to(tl.int32)
        num_above = above + tl.cumsum(is_above, 0)  # so far, this key included
        num_equal = equal + tl.cumsum(is_equal, 0)
        chosen = (is_above == 1) | ((is_equal == 1) & (num_equal <= wanted))
        place = num_above + tl.minimum(num_equal, wanted) - 1
        tl.store(out + place, index, mask=chosen)
        above += tl.sum(is_above, 0)
        equal += tl.sum(is_equal, 0)


@triton.jit
def _write_last(out, num_keys, num_best, num_last, BLOCK: tl.constexpr):
    """Write the ``num_last`` indices behind the keys."""
    for first in range(0, num_last, BLOCK):
        last = first + tl.arange(0, BLOCK)
        tl.store(out + num_best + last, num_keys + last, mask=last < num_last)


# ------------------------------------------------------------------------------------------------ kernels

_COUNTS = ["num_keys", "num_best", "num_last"]


@triton.jit(do_not_specialize=_COUNTS)
def _choose(keys, out, num_keys, num_best, num_last, BLOCK: tl.constexpr):
    """All of a head's choice. Grid (Hkv). ``keys`` int32 [Hkv, num_keys], ``out`` int32 [Hkv, num_best + num_last]."""
    head = tl.program_id(0).to(tl.int64)
    keys += head * num_keys
    out += head * (num_best + num_last)
    known, wanted = num_best * 0, num_best
    for digit in tl.static_range(DIGITS):
        counts = _count_digits(keys, 0, num_keys, known, digit, BLOCK)
        known, wanted = _narrow(counts, known, wanted, digit)
    none_yet = num_best * 0  # a plain 0 would be a constant, which a loop cannot count up
    _write_chosen(keys, out, 0, num_keys, known, wanted, none_yet, none_yet, BLOCK)
    _write_last(out, num_keys, num_best, num_last, BLOCK)


@triton.jit(do_not_specialize=["num_keys", "num_best", "chunk_size"])
def _count_chunk(keys, counts, num_keys, num_best, chunk_size, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    """Add a chunk's digits to its head's. Grid (chunks, Hkv). ``counts`` int32 [Hkv, DIGITS, BINS], zeros at first."""
    head = tl.program_id(1).to(tl.int64)
    counts += head * DIGITS * BINS
    known, _ = _threshold(counts, num_best, DIGIT)
    begin = tl.program_id(0) * chunk_size
    of_chunk = _count_digits(
        keys + head * num_keys, begin, tl.minimum(begin + chunk_size, num_keys), known, DIGIT, BLOCK
    )
    place = counts + DIGIT * BINS + tl.arange(0, BINS)
    tl.atomic_add(place, of_chunk, mask=of_chunk > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_keys", "num_best", "chunk_size"])
def _split_chunk(keys, counts, splits, num_keys, num_best, chunk_size, BLOCK: tl.constexpr):
    """How many keys of a chunk are above the threshold, and how many equal it.

    Grid (chunks, Hkv). ``counts`` of all digits; ``splits`` int32 [Hkv, 2, chunks].
    """
    head = tl.program_id(1).to(tl.int64)
    threshold, _ = _threshold(counts + head * DIGITS * BINS, num_best, DIGITS)
    begin = tl.program_id(0) * chunk_size
    end = tl.minimum(begin + chunk_size, num_keys)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        key = tl.load(keys + head * num_keys + index, mask=inside, other=0)
        above += (inside & (key > threshold)).to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    place = splits + head * 2 * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.sum(above, 0))
    tl.store(place + tl.num_programs(0), tl.sum(equal, 0))


@triton.jit(do_not_specialize=[*_COUNTS, "chunk_size"])
def _write_chunk(keys, counts, splits, out, num_keys, num_best, num_last, chunk_size, BLOCK: tl.constexpr):
    """Write a chunk's chosen indices behind those of the chunks before it. Grid (chunks, Hkv)."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    threshold, wanted = _threshold(counts + head * DIGITS * BINS, num_best, DIGITS)
    of_head = splits + head * 2 * tl.num_programs(0)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for first in range(0, chunk, BLOCK):
        before = first + tl.arange(0, BLOCK)
        above += tl.load(of_head + before, mask=before < chunk, other=0)
        equal += tl.load(of_head + tl.num_programs(0) + before, mask=before < chunk, other=0)
    begin = chunk * chunk_size
    end = tl.minimum(begin + chunk_size, num_keys)
    out += head * (num_best + num_last)
    _write_chosen(keys + head * num_keys, out, begin, end, threshold, wanted, tl.sum(above, 0), tl.sum(equal, 0), BLOCK)
    if chunk == 0:
        _write_last(out, num_keys, num_best, num_last, BLOCK)


# ------------------------------------------------------------------------------------------------ launching


def top_tokens(keys: torch.Tensor, num_best: int, num_last: int = 0) -> torch.Tensor:
    """Indices of the ``num_best`` largest ``keys`` of each head, ascending, then the ``num_last`` indices behind the keys.

    ``keys`` int32 [Hkv, n], contiguous; ``num_best`` in 0 .. n. Returns int32 [Hkv, num_best + num_last]. Ties go to the lower
    index.
    """
    Hkv, num_keys = keys.shape
    if not 0 <= num_best <= num_keys:
        raise ValueError(f"cannot choose {num_best} of {num_keys} keys")
    out = torch.empty(Hkv, num_best + num_last, dtype=torch.int32, device=keys.device)
    if out.numel() == 0:
        return out
    options: dict[str, Any] = {**_CONSTANTS, "num_warps": _WARPS, "num_stages": NUM_STAGES}
    if num_keys <= CHUNK:
        _choose[(Hkv,)](keys, out, num_keys, num_best, num_last, **options)
        return out
    chunks = triton.cdiv(num_keys, CHUNK)
    grid = (chunks, Hkv)
    counts = torch.zeros(Hkv, DIGITS.value, BINS.value, dtype=torch.int32, device=keys.device)
    splits = counts.new_empty(Hkv, 2, chunks)
    for digit in range(DIGITS.value):
        _count_chunk[grid](keys, counts, num_keys, num_best, CHUNK, DIGIT=digit, **options)
    _split_chunk[grid](keys, counts, splits, num_keys, num_best, CHUNK, **options)
    _write_chunk[grid](keys, counts, splits, out, num_keys, num_best, num_last, CHUNK, **options)
    return out


def compile_cases() -> Iterator[CompileCase]:
    """All of them: nothing but the number of keys differs between layers and models."""
    sizes = {"num_keys": "i32", "num_best": "i32"}
    last, chunk = {"num_last": "i32"}, {"chunk_size": "i32"}
    keys, counts, splits, out = ({name: "*i32"} for name in ("keys", "counts", "splits", "out"))
    yield CompileCase("choose", _choose, keys | out | sizes | last, _CONSTANTS, _WARPS)
    for digit in range(DIGITS.value):
        constants = _CONSTANTS | {"DIGIT": digit}
        yield CompileCase(f"count_chunk {digit}", _count_chunk, keys | counts | sizes | chunk, constants, _WARPS)
    yield CompileCase("split_chunk", _split_chunk, keys | counts | splits | sizes | chunk, _CONSTANTS, _WARPS)
    signature = keys | counts | splits | out | sizes | last | chunk
    yield CompileCase("write_chunk", _write_chunk, signature, _CONSTANTS, _WARPS)
