# SPDX-License-Identifier: Apache-2.0
"""Sums of attention in the cache and the choice by them against ``kernels.reference``, for each instruction set.

Whatever a test does not write is NaN: keys that no query sees yet, sums that no query started, blocks of others.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.combinations import combined
from tests.kernel_fixtures import isa, one_thread  # noqa: F401  (used by all tests)
from tests.stage1_layer import KT_TYPES, LAYOUTS, MODEL_TYPES, TYPES, Case, Layer, draw_prompt
from vllm_rocketkv.eviction import H2O, StreamingLLM
from vllm_rocketkv.kernels import reference

# --------------------------------------------------------------------------------------------- cases


def generated_cases(count: int) -> list[Case]:
    """Every value of every axis several times, combined at random."""
    draw = random.Random(2306)
    axes = {
        "dtype": TYPES,
        "model_dtype": MODEL_TYPES,
        "head_size": [32, 48, 64, 80, 96, 112, 128, 160, 192, 256],
        "num_kv_heads": [1, 2, 3],
        "group": [1, 3, 4, 7],
        "block_size": [32, 128, 48, 16],
        "layout": LAYOUTS,
        "num_tokens": [1, 15, 64, 65, 127, 128, 180],
        "softcap": [0.0, 0.0, 2.0, 30.0],
        "page_size": [0, 1, 4],
        "kt_dtype": KT_TYPES,
    }
    return [
        legal(Case(**values, num_kept=1, accumulates=True, seed=i))
        for i, values in enumerate(combined(axes, count, draw))
    ]


def legal(case: Case) -> Case:
    """With a query for each token, and types and block sizes that go together."""
    if case.dtype.itemsize > 1:
        case = replace(case, model_dtype=case.dtype)
    if case.layout == "amx" and case.block_size % 32:
        case = replace(case, block_size=64)
    return replace(case, window=case.num_tokens)


CASES = generated_cases(40)
LONG = [
    legal(Case(num_kv_heads=1, group=2, num_tokens=1200, head_size=32, num_kept=1, accumulates=True)),
    legal(Case(torch.float32, torch.float32, num_kv_heads=1, group=1, num_tokens=1025, num_kept=1, accumulates=True)),
]
BASE = legal(Case(num_tokens=200, num_kept=1, accumulates=True))


def empty_layer(case: Case) -> Layer:
    """Without a single number."""
    layer = Layer(case, *(torch.empty(0, case.num_kv_heads, case.head_size, dtype=case.dtype) for _ in range(2)))
    layer.bytes.fill_(0xFF)  # NaN in every type
    return layer


@cache
def expected_sums(case: Case) -> Tensor:
    query, keys, _ = draw_prompt(case)
    real_keys = keys.double() * torch.tensor(case.key_scale, dtype=torch.float32).double()
    return reference.accumulated_scores(query, real_keys, case.scale, case.softcap)


def borders_of(case: Case, num_chunks: int) -> list[int]:
    """Where the chunks of the case's tokens start, and their end."""
    draw = random.Random(case.seed)
    inner = draw.sample(range(1, case.num_tokens), min(num_chunks, case.num_tokens) - 1)
    return [0, *sorted(inner), case.num_tokens]


def read_sums(layer: Layer, blocks: Tensor, num_tokens: int) -> Tensor:
    """``[H, n]``."""
    token, B = torch.arange(num_tokens), layer.case.block_size
    return layer.sums(layer.bytes)[blocks.long()[token // B], :, token % B].T


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def table_of(*rows: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1)


# --------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 400])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_the_references_wherever_a_prompt_is_cut(case: Case, num_chunks: int) -> None:
    query, keys, values = draw_prompt(case)
    layer = empty_layer(case)
    for start, end in itertools.pairwise(borders_of(case, num_chunks)):
        layer.write(layer.prompt_blocks, start, keys[start:end], values[start:end])
        layer.accumulate(query[start:end], [(0, end - start, 0, 0, end)], layer.prompt_blocks[None])
    assert_close(read_sums(layer, layer.prompt_blocks, case.num_tokens), expected_sums(case))

    untouched = empty_layer(case)  # nothing else was written
    untouched.write(untouched.prompt_blocks, 0, keys, values)
    token, B = torch.arange(case.num_tokens), case.block_size
    places = layer.prompt_blocks.long()[token // B], slice(None), token % B
    untouched.sums(untouched.bytes)[places] = layer.sums(layer.bytes)[places]
    assert torch.equal(layer.bytes, untouched.bytes)


@pytest.mark.parametrize("layout", ["vec", "private"])
@pytest.mark.parametrize("case", LONG, ids=str)
def test_sums_of_long_prompts(case: Case, layout: str) -> None:
    """More rows than are normalised at once, more keys than are summed up at once."""
    query, keys, values = draw_prompt(case)
    layer = Layer(replace(case, layout=layout), keys, values)
    for start, end in itertools.pairwise([0, 700, 701, case.num_tokens]):
        layer.accumulate(query, [(start, end - start, 0, 0, end)], layer.prompt_blocks[None])
    assert_close(read_sums(layer, layer.prompt_blocks, case.num_tokens), expected_sums(case))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_parts_of_a_batch_keep_apart(dtype: torch.dtype, layout: str) -> None:
    """Decoded tokens and chunks of several requests in one call, whose queries are a slice of something wider."""
    model = dtype if dtype.itemsize > 1 else torch.float16
    base = replace(BASE, dtype=dtype, model_dtype=model, layout=layout, num_tokens=400, softcap=8.0)
    cases = [legal(replace(base, num_tokens=n, seed=n)) for n in (70, 33, 1, 140)]
    layer = empty_layer(base)
    spare = iter(layer.prompt_blocks.split(1))
    prompts, blocks = [], []
    for case in cases:
        prompts.append(draw_prompt(case))
        blocks.append(torch.cat([next(spare) for _ in range(case.num_prompt_blocks)]))
        layer.write(blocks[-1], 0, *prompts[-1][1:])
    table = table_of(*(torch.cat([torch.full((1 + i,), -1, dtype=torch.int32), row]) for i, row in enumerate(blocks)))
    wide = torch.full((300, 2 * base.num_kv_heads * base.group, base.head_size), torch.nan, dtype=model)
    query = wide[:, : base.num_kv_heads * base.group]
    for chunks in (
        [(0, 69), (0, 32), (0, 1), (0, 20)],
        [(69, 70), (32, 33), None, (20, 139)],
        [None] * 3 + [(139, 140)],
    ):
        parts, row = [], 3
        for i, chunk in reversed(list(enumerate(chunks))):
            if chunk is not None:
                start, end = chunk
                query[row : row + end - start] = prompts[i][0][start:end]
                parts.append((row, end - start, i, 1 + i, end))
                row += end - start + 2  # rows between them are nobody's
        layer.accumulate(query, parts, table)
        wide.fill_(torch.nan)
    for case, row in zip(cases, blocks, strict=True):
        assert_close(read_sums(layer, row, case.num_tokens), expected_sums(case))


def test_no_parts_change_nothing() -> None:
    layer = empty_layer(BASE)
    layer.accumulate(draw_prompt(BASE)[0], [], layer.prompt_blocks[None])
    assert (layer.bytes == 0xFF).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    model = dtype if dtype.itemsize > 1 else torch.bfloat16
    case = legal(replace(BASE, dtype=dtype, model_dtype=model, num_tokens=1100, head_size=32))
    query, keys, values = draw_prompt(case)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        layer = Layer(case, keys, values)
        for start, end in itertools.pairwise([0, 130, 1099, 1100]):
            layer.accumulate(query, [(start, end - start, 0, 0, end)], layer.prompt_blocks[None])
        results.append((layer.bytes, layer.keep_heavy(1100, 300, 150)))
    torch.set_num_threads(1)
    for raw, kept in results[1:]:
        assert torch.equal(raw, results[0][0])
        assert torch.equal(kept, results[0][1])


@pytest.mark.parametrize("dtype", MODEL_TYPES, ids=str)
def test_a_query_that_is_not_a_number_spoils_what_it_sees_and_nothing_else(dtype: torch.dtype) -> None:
    case = replace(BASE, dtype=dtype, model_dtype=dtype)
    query, keys, values = draw_prompt(case)
    query[77, 0] = torch.nan  # of the first KV head
    layer = Layer(case, keys, values)
    layer.accumulate(query, [(0, 200, 0, 0, 200)], layer.prompt_blocks[None])
    found = read_sums(layer, layer.prompt_blocks, 200)
    assert found[0, :78].isnan().all()
    assert_close(found[0, 78:], expected_sums(case)[0, 78:])
    assert_close(found[1], expected_sums(case)[1])


# --------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 100, 333])
@pytest.mark.parametrize("kind", ["distinct", "ties", "numbers"])
def test_keeps_the_tokens_that_the_reference_keeps(kind: str, num_tokens: int) -> None:
    case = replace(BASE, num_tokens=num_tokens)
    layer = empty_layer(case)
    draw = torch.Generator().manual_seed(num_tokens)
    sums = torch.rand(2, num_tokens, generator=draw) * 1e3
    if kind == "ties":
        sums = (sums / 400).floor()
    elif kind == "numbers":
        odd = torch.tensor([0.0, torch.inf, torch.nan, 1e-40, 3e38, 1.0])
        sums = odd[torch.randint(0, 6, sums.shape, generator=draw)]
    token, B = torch.arange(num_tokens), case.block_size
    layer.sums(layer.bytes)[layer.prompt_blocks.long()[token // B], :, token % B] = sums.T
    before = layer.bytes.clone()
    for num_kept in {0, 1, num_tokens // 3, num_tokens - 1, num_tokens}:
        for num_recent in {0, num_kept // 2, num_kept}:
            kept = layer.keep_heavy(num_tokens, num_kept, num_recent)
            assert kept.dtype == torch.int32
            assert torch.equal(kept, reference.keep_heavy(sums.double(), num_kept, num_recent).int())
    assert torch.equal(layer.keep_heavy(num_tokens, num_tokens + 7, 3), token.int().repeat(2, 1))
    assert torch.equal(layer.bytes, before)


def test_references_by_hand() -> None:
    sums = torch.tensor([[5.0, 1.0, 4.0, 4.0, 0.0], [0.0, 0.0, torch.nan, 2.0, 9.0]])
    assert reference.keep_heavy(sums, 3, 1).tolist() == [[0, 2, 4], [0, 3, 4]]
    assert reference.keep_sinks_and_recent(10, 5, 2, 2).tolist() == [[0, 1, 7, 8, 9]] * 2
    keys = torch.eye(2)[:, None]
    found = reference.accumulated_scores(torch.zeros(2, 2, 2), keys, 1.0)  # two heads of no preference
    assert found.tolist() == [[3.0, 1.0]]


# --------------------------------------------------------------------------------------------- policies


def test_h2o_keeps_the_share_of_recent_tokens_that_is_configured() -> None:
    calls = []
    cache = SimpleNamespace(keep_heavy=lambda *args: calls.append(args) or "kept")
    policy = H2O(SimpleNamespace(num_recent=lambda num_kept: num_kept // 4))
    assert policy.keep("query", cache, "blocks", 99, 40, 0.25, 30.0, is_private=True) == "kept"
    assert calls == [("blocks", 99, 40, 10)]


@pytest.mark.parametrize("is_private", [False, True])
def test_streaming_llm_keeps_sinks_and_recent_tokens(is_private: bool) -> None:
    policy, blocks = StreamingLLM(SimpleNamespace(sink_tokens=4)), torch.arange(10, dtype=torch.int32)
    for num_tokens, num_kept in ((100, 4), (100, 5), (100, 99), (100, 100)):
        kept = policy.keep(None, SimpleNamespace(num_kv_heads=3), blocks, num_tokens, num_kept, 1.0, 0.0, is_private)
        assert kept.dtype == torch.int32
        assert kept.is_contiguous()
        assert kept.tolist() == reference.keep_sinks_and_recent(num_tokens, num_kept, 4, 3).tolist()
    kept = policy.keep(None, SimpleNamespace(num_kv_heads=3), blocks, 50, 60, 1.0)
    assert kept.tolist() == [list(range(50))] * 3


# --------------------------------------------------------------------------------------------- refusals


def test_refuses_what_would_leave_the_cache() -> None:
    query, keys, values = draw_prompt(BASE)
    layer = Layer(BASE, keys, values)
    before, table = layer.bytes.clone(), torch.stack([layer.prompt_blocks] * 2)
    whole = (0, 200, 0, 0, 200)
    for part in (
        (-1, 200, 0, 0, 200),
        (1, 200, 0, 0, 200),  # a row too many
        (0, 0, 0, 0, 200),
        (0, 200, 2, 0, 200),  # no such request
        (0, 200, -1, 0, 200),
        (0, 200, 0, -1, 200),
        (0, 200, 0, 1, 200),  # a block too many
        (0, 200, 0, 0, 199),  # more queries than tokens
        (0, 1, 0, 0, 225),
    ):
        with pytest.raises(RuntimeError, match="part 0 leaves the batch, its sequence or the block table"):
            layer.accumulate(query, [part], table)
    with pytest.raises(RuntimeError, match="of part 1 belongs to two places"):
        layer.accumulate(query, [whole, (0, 200, 1, 0, 200)], table)
    for block in (-1, len(layer.bytes)):
        wrong = table.clone()
        wrong[0, 3] = block
        with pytest.raises(RuntimeError, match=f"part 0 reads block {block} of {len(layer.bytes)}"):
            layer.accumulate(query, [whole], wrong)
    with pytest.raises(RuntimeError, match="query must be float32, bfloat16 or float16"):
        layer.accumulate(query.double(), [whole], table)
    with pytest.raises(RuntimeError, match="with adjacent heads"):
        layer.accumulate(query.transpose(0, 1).contiguous().transpose(0, 1), [whole], table)
    with pytest.raises(RuntimeError, match="block_table must be int32"):
        layer.accumulate(query, [whole], table.long())
    with pytest.raises(RuntimeError, match="cannot keep 11 recent tokens in a budget of 10"):
        layer.keep_heavy(200, 10, 11)
    with pytest.raises(RuntimeError, match="at least 8 elements"):
        layer.keep_heavy(225, 10, 5)
    layer.score_offset = 0
    with pytest.raises(RuntimeError, match="kv_cache has no sums of attention"):
        layer.accumulate(query, [whole], table)
    with pytest.raises(RuntimeError, match="kv_cache has no sums of attention"):
        layer.keep_heavy(200, 10, 5)
    assert torch.equal(layer.bytes, before)
