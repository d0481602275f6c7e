# SPDX-License-Identifier: Apache-2.0
"""A step's metadata against a plain loop over every token: random batches, every output compared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_rocketkv import compat
from vllm_rocketkv.backend.metadata import PromptTable, RocketKVMetadata, RocketKVMetadataBuilder, StepPlanner
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import cpu  # noqa: F401  (registers the op)

B, HEAD_SIZE, MAX_LEN, WINDOW = 32, 64, 1024, 16
FIXED = {"window_size": WINDOW, "kernel_size": 7, "prompt_budget": 85, "topk_tokens": 32, "recent_tokens": 6}
ADAPTIVE = {"preset": "reference", "window_size": WINDOW, "kernel_size": 7, "token_budget": 64, "max_new_tokens": 16}
CONFIGS = {
    "rocketkv": RocketKVConfig.parse(FIXED | {"policy": "rocketkv"}),
    "rocketkv-topr": RocketKVConfig.parse(FIXED | {"policy": "rocketkv", "topr": 9}),
    "rocketkv-adaptive": RocketKVConfig.parse(ADAPTIVE | {"policy": "rocketkv"}),
    "snapkv": RocketKVConfig.parse(FIXED | {"policy": "snapkv"}),
    "snapkv-adaptive": RocketKVConfig.parse(ADAPTIVE | {"policy": "snapkv"}),
    "hsa": RocketKVConfig.parse(FIXED | {"policy": "hsa"}),
    "hsa-page-1": RocketKVConfig.parse(FIXED | {"policy": "hsa", "page_size": 1}),
    "hsa-adaptive": RocketKVConfig.parse(ADAPTIVE | {"policy": "hsa", "page_size": 8}),
    "full": RocketKVConfig.parse({"policy": "full"}),
}


@dataclass(frozen=True)
class Request:
    """Positions ``start`` to ``end`` - 1 of one request are computed in this step."""

    num_prompt: int
    start: int
    end: int
    is_dummy: bool = False


class DenseBuilder:
    """In place of vLLM's: answers with what it was given."""

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert common_prefix_len == 0
        return common


def make_builder(config: RocketKVConfig, num_tokens: int = 4096, num_reqs: int = 8) -> RocketKVMetadataBuilder:
    """A builder without an engine; its buffers hold garbage, as those of a previous step do."""
    builder = object.__new__(RocketKVMetadataBuilder)
    builder.dense_builder = DenseBuilder()  # type: ignore[assignment]
    builder.spec, builder.config, builder.block_size, builder.planner = None, config, B, None
    if config.policy != "full":
        builder.planner = StepPlanner(PromptTable(config, B, HEAD_SIZE, MAX_LEN), num_tokens, num_reqs)
        spoil(builder.planner)
    return builder


def buffers_of(planner: StepPlanner) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(planner).items() if isinstance(value, torch.Tensor)}


def spoil(planner: StepPlanner) -> None:
    for buffer in buffers_of(planner).values():
        buffer.fill_(-77)


def make_common(requests: list[Request], num_padded: int, num_padded_tokens: int, seed: int) -> CommonAttentionMetadata:
    """As a runner builds it: natural slots for all tokens, padded rows and padded tokens at the end."""
    width = -(-MAX_LEN // B) + 8
    order = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(len(requests) * width, generator=order).to(torch.int32) + 1
    table = torch.zeros(len(requests) + num_padded, width + 3, dtype=torch.int32)
    table[: len(requests), :width] = blocks.view(len(requests), width)
    table = table[:, :width]  # the runner's rows are wider than what it shows
    slots: list[int] = []
    for index, request in enumerate(requests):
        for position in range(request.start, request.end):
            slots.append(-1 if request.is_dummy else int(table[index, position // B]) * B + position % B)
    slots += [-1] * num_padded_tokens
    lens = [request.end - request.start for request in requests] + [0] * num_padded
    start_loc = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([request.end for request in requests] + [0] * num_padded, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=start_loc,
        query_start_loc_cpu=start_loc,
        seq_lens=seq_lens,
        num_reqs=len(lens),
        num_actual_tokens=len(slots),
        max_query_len=max(lens),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


def build(
    builder: RocketKVMetadataBuilder, common: CommonAttentionMetadata, requests: list[Request], runner: int = 1
) -> RocketKVMetadata:
    """With the prompts' lengths where model runner V1 or V2 leaves them."""
    lens = torch.tensor([request.num_prompt for request in requests], dtype=torch.int32)
    if runner == 2:
        common.rswa_prefix_lens = lens
        return builder.build(0, common)
    compat._v1_prompt_lens = torch.nn.functional.pad(lens, (0, 5))[: common.num_reqs]
    try:
        return builder.build(0, common)
    finally:
        compat._v1_prompt_lens = None


# --- the oracle -----------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a loop over every token finds."""

    slots: list[int] = field(default_factory=list)
    num_sparse: int = 0
    dense_tokens: list[int] = field(default_factory=list)
    dense_parts: list[tuple[int, int, int]] = field(default_factory=list)
    """(request, tokens, length) of each request with natural tokens."""
    rows: list[list[int]] = field(default_factory=list)
    own_slots: list[int] = field(default_factory=list)
    """Where each row's own token lives."""
    window_parts: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    crossings: list[tuple[list[int], list[int], list[int], list[int]]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)


def expect(config: RocketKVConfig, common: CommonAttentionMetadata, requests: list[Request]) -> Expected:
    found = Expected()
    for index, request in enumerate(requests):
        expect_tokens(found, config, common.block_table_tensor[index].tolist(), index, request)
        if request.is_dummy:
            continue
        first = int(common.query_start_loc_cpu[index])
        expect_window(found, config, common.block_table_tensor[index].tolist(), first, request)
        if config.selects and not config.evicts:
            expect_pages(found, config, common.block_table_tensor[index].tolist(), request)
    found.slots += [-1] * (common.num_actual_tokens - len(found.slots))
    return found


def expect_tokens(found: Expected, config: RocketKVConfig, table: list[int], index: int, request: Request) -> None:
    N = request.num_prompt
    layout = config.layout(N, B)
    natural, rows = [], []
    for position in range(request.start, request.end):
        token = len(found.slots)
        slot = table[layout.block_index(position)] * B + position % B
        is_sparse = config.is_sparse(N, B) and position >= N
        found.slots.append(-1 if request.is_dummy or (is_sparse and config.evicts) else slot)
        found.num_sparse += is_sparse
        if not is_sparse:
            natural.append(position)
            found.dense_tokens.append(token)
        elif not request.is_dummy:
            num_tokens = (layout.num_kept_tokens if config.evicts else N) + position + 1 - N
            first_block = layout.num_natural_blocks if config.evicts else 0
            rows.append([token, index, first_block, num_tokens, config.topr_for(N, HEAD_SIZE), 1])
            found.own_slots.append(slot)
    if rows:
        rows[-1][-1] = 0
    found.rows += rows
    if natural:
        found.dense_parts.append((index, len(natural), natural[-1] + 1))


def expect_window(found: Expected, config: RocketKVConfig, table: list[int], first: int, request: Request) -> None:
    N, W = request.num_prompt, config.window_size
    layout = config.layout(N, B)
    if not (config.evicts and layout.is_evictable):
        return
    window = range(N - W, N)
    computed = [position for position in window if request.start <= position < request.end]
    if not computed:
        return
    tokens = [first + position - request.start for position in computed]
    n, e = layout.num_natural_blocks, layout.num_private_blocks
    private = table[n : n + e]
    if computed[-1] == N - 1:
        parked = [place for place, position in enumerate(window) if position < request.start]
        found.crossings.append((table[:n], private, tokens, parked))
    else:
        found.window_parts.append((tokens, [position - (N - W) for position in computed], private))


def expect_pages(found: Expected, config: RocketKVConfig, table: list[int], request: Request) -> None:
    size = config.page_size
    for page in sorted({position // size for position in range(request.start, request.end)}):
        on_page = [position for position in range(page * size, page * size + size) if position < request.end]
        found.pages.append([table[page * size // B], page * size % B // size, len(on_page)])


def check(
    config: RocketKVConfig, common: CommonAttentionMetadata, requests: list[Request], actual: RocketKVMetadata
) -> Expected:
    wanted = expect(config, common, requests)
    check_natural(config, common, wanted, actual)
    if wanted.rows:
        assert actual.rows is not None
        assert actual.rows.table.dtype == torch.int32
        assert actual.rows.table.tolist() == wanted.rows
        assert actual.rows.block_table is common.block_table_tensor
        assert actual.rows.has_later is any(row[-1] for row in wanted.rows)
        assert actual.rows.max_num_tokens == max(row[3] for row in wanted.rows)
        for (_, index, first_block, num_tokens, *_), slot in zip(wanted.rows, wanted.own_slots, strict=True):
            last = num_tokens - 1  # the sequence that a row reads ends with its own token
            assert int(common.block_table_tensor[index, first_block + last // B]) * B + last % B == slot
    else:
        assert actual.rows is None
    parts = [(p.tokens.tolist(), p.index.tolist(), p.private_blocks.tolist()) for p in actual.window_parts]
    assert parts == wanted.window_parts
    crossings = [
        (c.prompt_blocks.tolist(), c.private_blocks.tolist(), c.window_tokens.tolist(), c.parked.tolist())
        for c in actual.crossings
    ]
    assert crossings == wanted.crossings
    if wanted.pages:
        touched = actual.touched_pages
        assert touched is not None
        assert touched.table.dtype == torch.int32
        assert touched.table.tolist() == wanted.pages
        columns = torch.stack([touched.block, touched.page, touched.num_valid], 1)
        assert torch.equal(columns, touched.table)
    else:
        assert actual.touched_pages is None
    return wanted


def check_natural(
    config: RocketKVConfig, common: CommonAttentionMetadata, wanted: Expected, actual: RocketKVMetadata
) -> None:
    if not wanted.num_sparse:  # exactly plain vLLM's step
        assert actual.natural_slots is common.slot_mapping
        assert actual.dense is common  # type: ignore[comparison-overlap]
        assert actual.dense_tokens is None
        assert actual.natural_slots.tolist() == wanted.slots
        return
    if any(slot >= 0 for slot in wanted.slots):
        assert actual.natural_slots is not None
        assert actual.natural_slots.dtype == torch.int64
        assert actual.natural_slots.tolist() == wanted.slots
    else:
        assert actual.natural_slots is None
    dense: Any = actual.dense
    if not wanted.dense_parts:
        assert dense is None
        assert actual.dense_tokens is None
        return
    requests, query_lens, seq_lens = zip(*wanted.dense_parts, strict=True)
    assert actual.dense_tokens is not None
    assert actual.dense_tokens.dtype == torch.int64
    assert actual.dense_tokens.tolist() == wanted.dense_tokens
    starts = [sum(query_lens[:count]) for count in range(len(query_lens) + 1)]
    for tensor in (dense.query_start_loc, dense.query_start_loc_cpu, dense.seq_lens, dense.block_table_tensor):
        assert tensor.dtype == torch.int32
    assert dense.query_start_loc.tolist() == dense.query_start_loc_cpu.tolist() == starts
    assert dense.seq_lens.tolist() == list(seq_lens)
    assert torch.equal(dense.block_table_tensor, common.block_table_tensor[list(requests)])
    assert dense.num_reqs == len(requests)
    assert dense.num_actual_tokens == len(wanted.dense_tokens)
    assert (dense.max_query_len, dense.max_seq_len) == (max(query_lens), max(seq_lens))


# --- random batches -------------------------------------------------------------------------------------------------


@st.composite
def a_request(draw: st.DrawFn, config: RocketKVConfig) -> Request:
    P = config.prompt_budget_for(100, B) if config.policy != "full" else 100
    borders = [P - 1, P, P + 1, P + B, 4 * B - 1, 4 * B, 4 * B + 1, 3 * 48 + 1, 6 * B + 5]
    N = draw(st.one_of(st.sampled_from(borders), st.integers(1, 420)))
    W = config.window_size
    in_prompt = st.one_of(st.integers(0, N - 1), st.integers(max(N - W - 2, 0), N - 1))
    beyond = st.integers(0, 40)
    kind = draw(st.sampled_from(["chunk", "crossing", "last token", "resumed", "decode", "drafts", "idle"]))
    if kind == "chunk":
        start = draw(in_prompt)
        end = draw(st.integers(start + 1, N))
    elif kind in ("crossing", "resumed"):
        start = draw(in_prompt)
        end = N + (draw(beyond) if kind == "resumed" else 0)
    elif kind == "last token":  # N = k * chunk + 1
        start, end = N - 1, N
    elif kind == "idle":  # a row without tokens, as padding is
        start = end = draw(in_prompt)
    else:
        start = N + draw(beyond)
        end = start + (draw(st.integers(2, 7)) if kind == "drafts" else 1)
    return Request(N, start, end, is_dummy=draw(st.integers(0, 9)) == 0)


@pytest.mark.parametrize("name", CONFIGS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_metadata_is_the_loop_over_every_token(name: str, data: st.DataObject) -> None:
    config = CONFIGS[name]
    builder = make_builder(config)
    for _ in range(2):  # the second step finds the first one's buffers
        requests = data.draw(st.lists(a_request(config), min_size=1, max_size=6))
        num_padded, num_padded_tokens = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
        common = make_common(requests, num_padded, num_padded_tokens, seed=len(requests))
        check(config, common, requests, build(builder, common, requests, data.draw(st.sampled_from([1, 2]))))


@pytest.mark.parametrize("name", CONFIGS)
@given(num_prompt=st.integers(1, 400), chunk=st.integers(20, 150), num_cached=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_a_request_from_its_first_chunk_on(name: str, num_prompt: int, chunk: int, num_cached: int) -> None:
    """Whatever the chunks, each token of the window is computed once, and stage 1 runs once, with all of them."""
    config = CONFIGS[name]
    assume(num_cached < num_prompt - WINDOW)
    builder = make_builder(config)
    places: list[int] = []
    num_crossings = 0
    borders = [*range(num_cached, num_prompt, chunk), num_prompt, num_prompt + 1, num_prompt + 4]
    for start, end in itertools.pairwise(borders):
        requests = [Request(num_prompt, start, end)]
        common = make_common(requests, 0, 0, seed=start)
        metadata = build(builder, common, requests)
        check(config, common, requests, metadata)
        for part in metadata.window_parts:
            places += part.index.tolist()
        for crossing in metadata.crossings:
            num_crossings += 1
            assert crossing.parked.tolist() == places
            assert len(crossing.parked) + len(crossing.window_tokens) == config.window_size
            assert crossing.layout == config.layout(num_prompt, B)
    assert num_crossings == (config.evicts and config.is_sparse(num_prompt, B))


# --- single properties ----------------------------------------------------------------------------------------------


def test_batch_with_everything_in_it() -> None:
    config = CONFIGS["rocketkv"]
    requests = [
        Request(50, 0, 50),
        Request(145, 144, 145),
        Request(200, 150, 190),
        Request(200, 190, 204),
        Request(300, 305, 306),
        Request(300, 300, 304),
        Request(60, 70, 71),
        Request(300, 310, 312, is_dummy=True),
    ]
    common = make_common(requests, 2, 2, seed=1)
    wanted = check(config, common, requests, build(make_builder(config, num_reqs=10), common, requests))
    assert [row[1] for row in wanted.rows] == [3] * 4 + [4] + [5] * 4
    assert [part[0] for part in wanted.dense_parts] == [0, 1, 2, 3, 6]
    assert (len(wanted.window_parts), len(wanted.crossings)) == (1, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_dummy_run_is_plain(name: str) -> None:
    requests = [Request(0, 0, 40, is_dummy=True), Request(0, 99, 100, is_dummy=True)]
    common = make_common(requests, 1, 3, seed=0)
    actual = make_builder(CONFIGS[name]).build(0, common)  # no runner left any prompt lengths
    assert actual == RocketKVMetadata(None, common.slot_mapping, common)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rocketkv", "snapkv", "hsa"])
def test_steady_decode_reuses_its_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    builder = make_builder(config)
    assert builder.planner is not None
    filled: list[int] = []
    fill = builder.planner.prompts.fill
    monkeypatch.setattr(builder.planner.prompts, "fill", lambda n: (filled.append(n), fill(n)))
    before = {name: buffer.data_ptr() for name, buffer in buffers_of(builder.planner).items()}
    for step in range(5):
        requests = [Request(N, N + step, N + step + 1) for N in (300, 301, 300, 302)]
        common = make_common(requests, 0, 0, seed=step)
        metadata = build(builder, common, requests)
        check(config, common, requests, metadata)
        assert metadata.dense is None
        assert metadata.rows is not None
        assert metadata.rows.table.data_ptr() == before["rows"]
    assert filled == [300, 301, 302], "Python worked on a length that was known"
    assert {name: buffer.data_ptr() for name, buffer in buffers_of(builder.planner).items()} == before


def test_buffers_grow_for_a_batch_larger_than_the_limits() -> None:
    config = CONFIGS["hsa"]
    builder = make_builder(config, num_tokens=8, num_reqs=2)
    small = [Request(200, 205, 206)]
    common_of_small = make_common(small, 0, 0, seed=3)
    earlier = build(builder, common_of_small, small)
    large = [Request(200, 100, 204), Request(90, 92, 93), Request(300, 310, 316)]
    common = make_common(large, 1, 2, seed=4)
    check(config, common, large, build(builder, common, large))
    check(config, common_of_small, small, earlier)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_holds_what_the_configuration_says(name: str) -> None:
    config = CONFIGS[name]
    table = PromptTable(config, B, HEAD_SIZE, MAX_LEN)
    assert table.tensor.tolist() == [[0, 0, 0]] + [[PromptTable.UNKNOWN] * 3] * MAX_LEN
    for N in range(1, MAX_LEN + 1):
        table.fill(N)
    for N, row in enumerate(table.tensor.tolist()[1:], start=1):
        s = config.layout(N, B).num_dropped_blocks
        assert row == [config.is_sparse(N, B), s, config.topr_for(N, HEAD_SIZE)]


def test_prompt_longer_than_the_model_allows_is_refused() -> None:
    requests = [Request(MAX_LEN + 1, 0, 10)]
    with pytest.raises(IndexError):
        build(make_builder(CONFIGS["rocketkv"]), make_common(requests, 0, 0, seed=0), requests)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start_loc_cpu", torch.tensor([0, 1, 2]), "Int"),
        ("query_start_loc_cpu", torch.tensor([0, 1], dtype=torch.int32), "query_start_loc"),
        ("query_start_loc_cpu", torch.tensor([0, 3, 2], dtype=torch.int32), "never fall"),
        ("query_start_loc_cpu", torch.tensor([0, 1, 3], dtype=torch.int32), "slot_mapping"),
        ("seq_lens", torch.tensor([301], dtype=torch.int32), "seq_lens"),
        ("seq_lens", torch.zeros(4, dtype=torch.int32)[::2], "seq_lens"),
        ("slot_mapping", torch.zeros(2, dtype=torch.int32), "Long"),
        ("block_table_tensor", torch.zeros(1, 40, dtype=torch.int32), "block_table"),
        ("block_table_tensor", torch.zeros(40, 2, dtype=torch.int32).T, "block_table"),
        ("block_table_tensor", torch.zeros(2, 40), "Int"),
    ],
)
def test_op_refuses_what_it_cannot_read(name: str, value: torch.Tensor, message: str) -> None:
    requests = [Request(300, 300, 301), Request(300, 305, 306)]
    common = make_common(requests, 0, 0, seed=0)
    setattr(common, name, value)
    with pytest.raises(RuntimeError, match=message):
        build(make_builder(CONFIGS["rocketkv"]), common, requests)


@pytest.mark.parametrize("name", ["rows", "natural_slots", "dense_tokens", "dense_starts", "window_requests", "counts"])
def test_op_refuses_buffers_that_are_too_small(name: str) -> None:
    requests = [Request(300, 300, 301), Request(300, 305, 306)]
    common = make_common(requests, 0, 0, seed=0)
    builder = make_builder(CONFIGS["rocketkv"])
    setattr(builder.planner, name, getattr(builder.planner, name)[:1])
    with pytest.raises(RuntimeError, match=f"plan_step: {name} must"):
        build(builder, common, requests)
