# SPDX-License-Identifier: Apache-2.0
"""A step's metadata on GPUs against the plain loop over every token that the CPU's is tested against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.plan_oracle import HEAD_SIZE, MAX_LEN, WINDOW, B, Expected, Request, expect
from tests.test_plan import CONFIGS, DenseBuilder, a_request, make_common
from vllm_rocketkv.backend.gpu_metadata import RocketKVGPUMetadataBuilder
from vllm_rocketkv.backend.metadata import RocketKVMetadata
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels.triton.plan import compile_cases

SPARSE = {
    name: config
    for name, config in CONFIGS.items()
    if config.policy != "full" and config.decode_budget_for_step is None  # which is refused on GPUs
}
QUERY_LEN = 3


class GPUDenseBuilder(DenseBuilder):
    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


def make_builder(config: RocketKVConfig) -> RocketKVGPUMetadataBuilder:
    """A builder without an engine; its buffers hold garbage, as those of a previous step do."""
    builder: Any = object.__new__(RocketKVGPUMetadataBuilder)
    builder.dense_builder = GPUDenseBuilder()
    builder.spec, builder.config, builder.device = None, config, torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace(block_size=B, head_size=HEAD_SIZE)
    builder.uniform_query_len = QUERY_LEN
    builder._allocate(MAX_LEN, 4096, 8)
    for buffer in (builder.rows, builder.natural_slots, builder.dense_seq_lens, builder.touched):
        buffer.fill_(-77)
    return builder


def prepare(
    requests: list[Request], num_padded: int, num_padded_tokens: int, draw_rejected: Any
) -> CommonAttentionMetadata:
    """A batch as model runner V2 prepares it: what the host knows of a decode's length assumes that all drafts were accepted."""
    common = make_common(requests, num_padded, num_padded_tokens, seed=len(requests))
    common.rswa_prefix_lens = torch.tensor([request.num_prompt for request in requests], dtype=torch.int32)
    upper_bound = common.seq_lens.clone()
    for index, request in enumerate(requests):
        if request.start >= request.num_prompt:
            upper_bound[index] += draw_rejected()
    common.seq_lens_cpu_upper_bound = upper_bound
    return common


def check(
    config: RocketKVConfig, common: CommonAttentionMetadata, requests: list[Request], actual: RocketKVMetadata
) -> None:
    wanted = expect(config, common, requests)
    assert actual.natural_slots is not None
    assert actual.natural_slots.tolist() == wanted.slots
    real = [] if actual.rows is None else [row for row in actual.rows.table.tolist() if row[3]]
    assert real == [row[:6] for row in wanted.rows]
    assert len(actual.window_parts) == len(wanted.window_parts)
    for part, (tokens, places, private) in zip(actual.window_parts, wanted.window_parts, strict=True):
        assert (part.tokens.tolist(), part.index.tolist(), part.parking_blocks.tolist()) == (tokens, places, private)
    crossings = [
        (c.prompt_blocks.tolist(), c.private_blocks.tolist(), c.window_tokens.tolist(), c.parked.tolist())
        for c in actual.crossings
    ]
    assert crossings == wanted.crossings
    check_dense(config, common, requests, wanted, actual)
    touched = [] if actual.touched_pages is None else actual.touched_pages.table.tolist()
    full_pages = [page for page in wanted.pages if page[2] == config.page_size]
    assert sorted(page for page in touched if page[2]) == sorted(full_pages)


def check_dense(
    config: RocketKVConfig,
    common: CommonAttentionMetadata,
    requests: list[Request],
    wanted: Expected,
    actual: RocketKVMetadata,
) -> None:
    """Every natural token is covered, and sees what it should."""
    dense: Any = actual.dense
    if dense is None:
        assert not wanted.dense_tokens
        return
    covered = list(range(int(common.query_start_loc_cpu[-1])))
    if actual.dense_tokens is not None:
        covered = actual.dense_tokens.tolist()
        assert covered == wanted.dense_tokens
    starts = dense.query_start_loc_cpu.tolist()
    assert dense.query_start_loc.tolist() == starts
    for index, count, length in wanted.dense_parts:
        first, num_computed = int(common.query_start_loc_cpu[index]), starts[index + 1] - starts[index]
        assert covered[starts[index] : starts[index + 1]] == list(range(first, first + num_computed))
        assert num_computed >= count
        if num_computed > count:  # tokens beyond the prompt, which the rows' kernel will overwrite
            assert not config.evicts
        # The last of n queries sees as many keys as there are: each natural token sees itself and what is before it.
        assert int(dense.seq_lens[index]) == length + num_computed - count
    natural = {index for index, _, _ in wanted.dense_parts}
    if actual.rows is not None:  # others must cost vLLM's kernel nothing
        assert all(int(dense.seq_lens[i]) == 0 for i in range(common.num_reqs) if i not in natural)


@pytest.mark.parametrize("name", SPARSE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_metadata_is_the_loop_over_every_token(name: str, data: st.DataObject) -> None:
    config = SPARSE[name]
    builder = make_builder(config)
    for _ in range(2):
        requests = data.draw(st.lists(a_request(config), min_size=1, max_size=6))
        requests = [Request(r.num_prompt, r.start, r.end) for r in requests if r.end > r.start]
        if not requests:
            continue
        padding = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
        common = prepare(requests, *padding, lambda: data.draw(st.integers(0, 2)))
        check(config, common, requests, builder.build(0, common))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("query_len", [1, QUERY_LEN])
def test_shapes_of_a_uniform_step_follow_from_its_size(name: str, query_len: int) -> None:
    """What a CUDA graph was captured with is what every later batch of the size fills: the same tensors in the same places."""
    config = SPARSE[name]
    builder = make_builder(config)

    def shapes(metadata: RocketKVMetadata) -> list[Any]:
        assert metadata.rows is not None
        dense: Any = metadata.dense
        tensors = [metadata.natural_slots, dense.seq_lens, metadata.rows.table]
        tensors += [] if metadata.touched_pages is None else [metadata.touched_pages.table]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]  # type: ignore[union-attr]

    dummy = make_common([Request(0, 0, query_len, is_dummy=True)] * 4, 0, 0, seed=0)
    dummy.seq_lens_cpu_upper_bound = dummy.seq_lens
    captured = builder.build_for_cudagraph_capture(dummy)
    assert captured.rows is not None
    assert not captured.rows.table[:, 3].any(), "rows of a capture must be inert"
    for prompts in ([300, 301, 302, 303], [20, 30, 40, 50], [300, 20, 400, 30]):
        requests = [Request(N, N + 7, N + 7 + query_len) for N in prompts]
        common = prepare(requests, 0, 0, lambda: 1)
        metadata = builder.build(0, common)
        check(config, common, requests, metadata)
        assert shapes(metadata) == shapes(captured)
        assert metadata.dense_tokens is None
    padded = prepare([Request(300, 310, 310 + query_len)] * 3, 1, query_len, lambda: 0)
    assert shapes(builder.build(0, padded)) == shapes(captured)


def test_a_window_of_one_token_is_no_uniform_step() -> None:
    """N = k * chunk + 1: one token, and yet stage 1."""
    config = SPARSE["rocketkv"]
    metadata = make_builder(config).build(0, prepare([Request(145, 144, 145)], 0, 0, lambda: 0))
    assert len(metadata.crossings) == 1
    assert len(metadata.crossings[0].parked) == WINDOW - 1
    assert metadata.rows is None


def test_compile_cases_are_what_is_launched() -> None:
    cases = list(compile_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kernel.__name__ for case in cases} == {"finish_rows_kernel", "touched_pages_kernel"}
    for case in cases:
        assert set(case.signature) | set(case.constants) == set(case.kernel.arg_names)
