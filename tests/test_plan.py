# SPDX-License-Identifier: Apache-2.0
"""A step's metadata against a plain loop over every token: random batches, every output compared."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.plan_oracle import (
    HEAD_SIZE,
    MAX_LEN,
    QUERIES_PER_BLOCK,
    WINDOW,
    B,
    Expected,
    Request,
    check,
    evictions_of,
    expect_tokens,
)
from vllm_rocketkv import compat
from vllm_rocketkv.backend.cpu_metadata import RocketKVMetadataBuilder, StepPlanner
from vllm_rocketkv.backend.metadata import RocketKVMetadata
from vllm_rocketkv.backend.prompt_table import COLUMNS, NEVER, PromptTable
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import cpu  # noqa: F401  (registers the op)

FIXED = {"window_size": WINDOW, "kernel_size": 7, "prompt_budget": 85, "topk_tokens": 32, "recent_tokens": 6}
ADAPTIVE = {"preset": "reference", "window_size": WINDOW, "kernel_size": 7, "token_budget": 64, "max_new_tokens": 16}
HSA = {"policy": "hsa", "prompt_budget": 85, "topk_tokens": 32, "recent_tokens": 6}
CONFIGS = {
    "rocketkv": RocketKVConfig.parse(FIXED | {"policy": "rocketkv"}),
    "rocketkv-topr": RocketKVConfig.parse(FIXED | {"policy": "rocketkv", "topr": 9}),
    "rocketkv-adaptive": RocketKVConfig.parse(ADAPTIVE | {"policy": "rocketkv"}),
    "snapkv": RocketKVConfig.parse(
        {k: FIXED[k] for k in ("window_size", "kernel_size", "prompt_budget")} | {"policy": "snapkv"}
    ),
    "snapkv-adaptive": RocketKVConfig.parse(ADAPTIVE | {"policy": "snapkv"}),
    "hsa": RocketKVConfig.parse(HSA),
    "hsa-page-1": RocketKVConfig.parse(HSA | {"page_size": 1}),
    "hsa-adaptive": RocketKVConfig.parse(
        {"preset": "reference", "policy": "hsa", "token_budget": 64, "max_new_tokens": 16, "page_size": 8}
    ),
    "quest": RocketKVConfig.parse({"policy": "quest", "prompt_budget": 85, "topk_tokens": 32}),
    "streaming": RocketKVConfig.parse({"policy": "streaming_llm", "prompt_budget": 85, "decode_interval": 32}),
    "h2o": RocketKVConfig.parse({"policy": "h2o", "prompt_budget": 85, "decode_budget": 100, "decode_interval": 64}),
    "snapkv-decode": RocketKVConfig.parse(
        {k: FIXED[k] for k in ("window_size", "kernel_size", "prompt_budget")}
        | {"policy": "snapkv", "decode_budget": 90, "decode_interval": 32}
    ),
    "rocketkv-decode": RocketKVConfig.parse(FIXED | {"policy": "rocketkv", "decode_budget": 85, "decode_interval": 64}),
    "full": RocketKVConfig.parse({"policy": "full"}),
}


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
    builder.queries_per_block = QUERIES_PER_BLOCK
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
        end = N + (draw(st.one_of(beyond, st.integers(0, 300))) if kind == "resumed" else 0)
    elif kind == "last token":  # N = k * chunk + 1
        start, end = N - 1, N
    elif kind == "idle":  # a row without tokens, as padding is
        start = end = draw(in_prompt)
    else:
        start = N + draw(st.one_of(beyond, st.integers(0, 300)))
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
@settings(max_examples=30, deadline=None)
def test_a_request_from_its_first_chunk_on(name: str, num_prompt: int, chunk: int, num_cached: int) -> None:
    """Whatever the chunks, each token of a window is computed once, and each eviction runs once, with all of its window."""
    config = CONFIGS[name]
    assume(num_cached < num_prompt - WINDOW)
    builder, layout = make_builder(config), config.layout(num_prompt, B)
    num_decoded = 300 if config.decode_budget_for_step is not None else 4
    places: list[int] = []
    num_crossings = num_evictions = 0
    decodes = range(num_prompt, num_prompt + num_decoded + 1)
    for start, end in itertools.pairwise([*range(num_cached, num_prompt, chunk), *decodes]):
        requests = [Request(num_prompt, start, end)]
        common = make_common(requests, 0, 0, seed=start)
        metadata = build(builder, common, requests)
        check(config, common, requests, metadata)
        for part in metadata.window_parts:
            places += part.index.tolist()
        for done in [*metadata.crossings, *metadata.decode_evictions]:
            assert done.parked.tolist() == places
            assert len(done.parked) + len(done.window_tokens) == config.eviction_window
            places = []
        num_crossings += len(metadata.crossings)
        num_evictions += len(metadata.decode_evictions)
        assert all(crossing.layout == layout for crossing in metadata.crossings)
    last = num_prompt + num_decoded
    assert num_crossings == (config.evicts and config.is_sparse(num_prompt, B) and layout.num_prompt_tokens <= last)
    assert num_evictions == sum(limit <= last for limit in evictions_of(layout, 0, last))


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
    unknown = [PromptTable.UNKNOWN] * len(COLUMNS)
    assert table.tensor.tolist() == [[0] * len(COLUMNS)] + [unknown] * (MAX_LEN + PromptTable.OWN_PLANS)
    for N in range(1, MAX_LEN + 1):
        table.fill(N)
    for N, values in enumerate(table.tensor.tolist()[1 : MAX_LEN + 1], start=1):
        row = dict(zip(COLUMNS, values, strict=True))
        layout = config.layout(N, B)
        assert (row["is_sparse"], row["topr"]) == (config.is_sparse(N, B), config.topr_for(N, HEAD_SIZE))
        assert (row["natural_length"], row["num_dropped_blocks"]) == (
            layout.num_prompt_tokens,
            layout.num_dropped_blocks,
        )
        topk = (config.topk_for_step, config.dense_below) if config.selects else (NEVER, NEVER)
        assert (row["topk_tokens"], row["dense_below"], row["window_size"]) == (*topk, config.eviction_window)
        assert (row["first_limit"], row["interval"]) == (layout.first_limit or NEVER, layout.decode_interval)


def test_requests_with_options_of_their_own_have_their_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    server = CONFIGS["rocketkv"]
    own = [None, CONFIGS["full"], CONFIGS["snapkv"], server.model_copy(update={"topk_tokens": 64, "prompt_budget": 70})]
    requests = [Request(300, 310, 311)] * 4
    monkeypatch.setattr(PromptTable, "OWN_PLANS", 5)  # room for one step's, so that they are forgotten now and then
    builder = make_builder(server)
    for decoded in range(6):
        requests = [Request(300 + decoded, 310 + decoded, 311 + decoded) for _ in own]
        common = make_common(requests, 0, 0, seed=decoded)
        monkeypatch.setattr(compat, "request_configs", lambda common: own)
        actual = build(builder, common, requests)
        assert actual.rows is not None
        wanted = []
        for index, config in enumerate(own):
            alone = Expected()
            row = common.block_table_tensor[index].tolist()
            alone.slots = [0] * index
            expect_tokens(alone, config or server, row, index, requests[index])
            wanted += alone.rows
        assert actual.rows.table.tolist() == wanted
        assert [row[1] for row in wanted] == [0, 2, 3], "the request under policy full is natural"


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
