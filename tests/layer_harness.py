# SPDX-License-Identifier: Apache-2.0
"""One real attention layer over a real paged cache, without an engine.

``World`` plays scheduler, block pool and model runner for a batch of requests, and holds the layer against what each
``layer_request.Request`` says that it must answer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.layer_request import Request, Shape, Step
from tests.policy_oracle import KT_DTYPES, assert_summaries
from vllm_rocketkv import compat, plugin
from vllm_rocketkv.config import RocketKVConfig

STALE = -1e4
"""What K and V of blocks hold that nobody owns. Not NaN: vLLM's dense kernel multiplies what it masks, so that NaN in
unwritten slots of a last block would break plain vLLM, too. KT tables, paddings and the null block do hold NaN, which
bytes of 0xFF are in every dtype."""
STALE_BYTE = 0xFB
"""The same in both fp8 types: far below zero, and no NaN."""
LAYER = "model.layers.1.self_attn.attn"
SHARER = "model.layers.2.self_attn.attn"


def make_vllm_config(shape: Shape, options: dict[str, Any], path: Path) -> Any:
    from transformers import LlamaConfig
    from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig

    plugin.register()
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=shape.num_heads * shape.head_size,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=8192,
    ).save_pretrained(path)
    model = ModelConfig(
        model=str(path), skip_tokenizer_init=True, dtype=shape.dtype, max_model_len=8192, enforce_eager=True
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=shape.block_size, cache_dtype=shape.kv_cache_dtype),
        attention_config=AttentionConfig(backend="ROCKETKV"),
        additional_config={"rocketkv": options},
    )


class World:
    """The layer, its cache, the block pool and the schedule."""

    def __init__(self, shape: Shape, options: dict[str, Any], path: Path, num_blocks: int, seed: int = 0) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import (
            KVCacheLayout,
            KVCacheTensor,
            compute_layout_strides,
            create_kv_cache_views,
        )

        self.shape, self.random = shape, random.Random(seed)
        self.vllm_config = make_vllm_config(shape, options, path)
        self.layer_names = [LAYER, SHARER] if shape.shares_cache else [LAYER]
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(shape.dtype)
        try:
            with set_current_vllm_config(self.vllm_config):
                self.layers = [
                    Attention(
                        shape.num_heads,
                        shape.head_size,
                        shape.head_size**-0.5,
                        shape.num_kv_heads,
                        cache_config=self.vllm_config.cache_config,
                        logits_soft_cap=shape.softcap or None,
                        prefix=name,
                        kv_sharing_target_layer_name=None if name == LAYER else LAYER,
                    )
                    for name in self.layer_names
                ]
                backend = self.layers[0].attn_backend
                self.spec = backend.customize_spec(self.layers[0].get_kv_cache_spec(self.vllm_config))
                self.builder = backend.get_builder_cls()(
                    self.spec, self.layer_names, self.vllm_config, torch.device("cpu")
                )
        finally:
            torch.set_default_dtype(default_dtype)
        for layer in self.layers:
            layer._k_scale_float, layer._v_scale_float = shape.key_scale, shape.value_scale
        assert self.builder.config is not None
        self.config: RocketKVConfig = self.builder.config
        rows = 2 * shape.block_size // (shape.group * shape.query_to_kv_bytes)  # queries of a block; 0: never cut
        self.num_parking_blocks = -(-(self.config.eviction_window - 1) // rows) if rows else 0
        # As the runner does for three layers; ours is the one in the middle, so that writes beyond its pages are seen.
        page = self.spec.page_size_bytes
        self.num_blocks = num_blocks
        self.buffer = torch.full((3 * num_blocks * page,), -1, dtype=torch.int8)
        layout = KVCacheLayout.LBHNC
        layer_stride, block_stride, *_ = compute_layout_strides(self.spec, num_blocks, 3, layout)
        tensor = KVCacheTensor(len(self.buffer), ["0", "1", "2"], layer_stride, block_stride)
        cache = create_kv_cache_views(self.buffer, self.spec, num_blocks, layout, tensor)[1]
        for layer in self.layers:
            layer.kv_cache = cache
        assert block_stride == page
        self.all_pages = self.buffer.view(3, num_blocks, page)
        self.pages = self.all_pages[1]
        self.stale = STALE_BYTE if shape.is_fp8 else STALE
        cache[1:] = self.stale
        self.free_blocks = list(range(1, num_blocks))
        self.random.shuffle(self.free_blocks)
        self.users: dict[int, int] = {}
        self.steps_run = 0
        self.shared_in_step = 0
        """Requests that started on blocks which another computed in the same step."""

    # --- the block pool ---------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        block = self.free_blocks.pop(self.random.randrange(len(self.free_blocks)))
        assert block not in self.users
        self.users[block] = 1
        return block

    def free(self, blocks: list[int]) -> None:
        """Freed memory is somebody else's at once."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.pages[block] = -1
                self.layers[0].kv_cache[block] = self.stale
                self.free_blocks.append(block)

    def admit(self, request: Request) -> None:
        if request.prefix_of is not None:
            assert request.num_hit % self.shape.block_size == 0
            shared = request.prefix_of.row[: request.num_hit // self.shape.block_size]
            assert not request.prefix_of.is_compact
            for block in shared:
                self.users[block] += 1
            request.row = list(shared)

    def reserve(self, request: Request, start: int, end: int) -> None:
        """Append blocks to the row as ``RocketKVManager`` does."""
        B, X, limit = self.shape.block_size, request.natural_length, request.lengths.first_limit
        if request.is_evicted and end > max(X - request.window, start):
            request.has_private = True
        slots = end
        if request.has_private:
            slots = max(end, X)
            if slots > limit - request.window:
                slots = int(limit) + self.num_parking_blocks * B
            slots += request.num_private * B
        while len(request.row) * B < slots:
            request.row.append(self.allocate())

    def compact(self, request: Request) -> None:
        """All natural tokens are processed: their blocks go back, the row keeps their places and nobody may look there."""
        self.free(request.row[: request.num_natural])
        request.row[: request.num_natural] = [
            self.random.randrange(self.num_blocks) for _ in range(request.num_natural)
        ]
        request.is_compact = True

    def finish(self, request: Request) -> None:
        self.free(request.row[request.num_natural if request.is_compact else 0 :])

    # --- the model runner -------------------------------------------------------------------------------------------

    def common_metadata(
        self, rows: list[tuple[list[int], int, int, int]], num_padded: int, is_dummy: bool = False
    ) -> Any:
        """As a runner builds it from each request's (row, start, end, prompt length)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        B = self.shape.block_size
        width = max([len(row) for row, *_ in rows] + [-(-end // B) for _, _, end, _ in rows]) + self.random.randrange(4)
        table = torch.zeros(len(rows) + num_padded, width, dtype=torch.int32)
        slots: list[int] = []
        for index, (row, start, end, _) in enumerate(rows):
            table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
            # Natural, as all runners do: wrong beyond an evicted prompt.
            slots += [-1 if is_dummy else int(table[index, p // B]) * B + p % B for p in range(start, end)]
        slots += [-1] * num_padded
        lens = [end - start for _, start, end, _ in rows] + [0] * num_padded
        start_loc = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor([end for _, _, end, _ in rows] + [0] * num_padded, dtype=torch.int32)
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

    def forward(self, common: Any, prompt_lens: list[int], data: list[list[Tensor]]) -> list[Tensor]:
        """Build the step's metadata once and run every layer with its queries, keys and values."""
        from vllm.forward_context import set_forward_context

        lens = torch.tensor(prompt_lens, dtype=torch.int32)
        if self.steps_run % 2:  # model runner V2: unpadded, in the metadata
            common.rswa_prefix_lens = lens
        else:  # model runner V1: longer than the batch, beside it
            compat._v1_prompt_lens = torch.nn.functional.pad(lens, (0, common.num_reqs - len(lens) + 2))
        try:
            metadata = self.builder.build(0, common)
        finally:
            compat._v1_prompt_lens = None
        self.steps_run += 1
        slot_mapping = dict.fromkeys(self.layer_names, common.slot_mapping)
        num_tokens = common.num_actual_tokens
        with set_forward_context(
            dict.fromkeys(self.layer_names, metadata),
            self.vllm_config,
            num_tokens=num_tokens,
            slot_mapping=slot_mapping,
        ):
            return [layer(*qkv) for layer, qkv in zip(self.layers, data, strict=True)]

    def step(self, requests: list[Request]) -> float:
        """One step of all ``requests`` in this order. Returns the largest error, in tolerances."""
        plan = []
        for request in requests:
            start = request.computed
            step = request.steps[request.next_step]
            if start < request.last and request.next_step and start > request.num_prompt:
                request.redraw_from(start)
            self.reserve(request, start, start + step.num_tokens)
            plan.append((request, start, start + step.num_tokens, step))
        num_padded = self.random.choice([0, 0, 1, 3])
        common = self.common_metadata([(r.row, start, end, r.num_prompt) for r, start, end, _ in plan], num_padded)
        noise = torch.full((num_padded, self.shape.num_heads, self.shape.head_size), torch.nan, dtype=self.shape.dtype)

        def tokens(name: str) -> Tensor:
            parts = [getattr(r, name)[start:end] for r, start, end, _ in plan]
            return torch.cat([*parts, noise[:, : parts[0].shape[1]]]).flatten(1)

        key, value = tokens("key"), tokens("value")
        data = [[tokens("query"), key, value], [tokens("sharer_query"), key, value]][: len(self.layers)]
        before = self.pages.clone()
        outputs = self.forward(common, [r.num_prompt for r, *_ in plan], data)
        self.check_writes(before, plan)
        for request, start, end, _ in plan:
            request.compute(start, end)
        error = 0.0
        for name, output in zip(("query", "sharer_query"), outputs, strict=False):
            output = output.view(-1, self.shape.num_heads, self.shape.head_size)
            first = 0
            for request, start, end, _ in plan:
                actual = output[first : first + end - start].double()
                first += end - start
                expected = request.expected(getattr(request, name), start, end)
                error = max(error, self.check_output(request, start, actual, expected))
        for request, start, end, step in plan:
            self.check_summaries(request, start, end)
            self.check_scores(request, start, end)
            request.computed = start + step.num_accepted
            request.next_step += 1
        for request, _, end, _ in plan:
            if request.is_evicted and not request.is_compact and end >= request.natural_length:
                self.compact(request)
        return error

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check_output(self, request: Request, start: int, actual: Tensor, expected: Tensor) -> float:
        rtol, atol = {torch.float32: (1e-4, 1e-4), torch.float16: (5e-3, 5e-3), torch.bfloat16: (2e-2, 2e-2)}[
            self.shape.dtype
        ]
        ratio = (actual - expected).abs() / (atol + rtol * expected.abs())
        worst = ratio.nan_to_num(nan=torch.inf).amax((1, 2))
        bad = [start + int(i) for i in (worst > 1).nonzero().flatten()]
        assert not bad, (
            f"N={request.num_prompt} natural={request.num_natural} private={request.num_private} step from {start} to "
            f"{start + len(actual)}: positions {bad[:8]} are wrong ({len(bad)} in all, by {worst.max():.3g} tolerances)"
        )
        return float(worst.max())

    def check_writes(self, before: Tensor, plan: list[tuple[Request, int, int, Step]]) -> None:
        """Only blocks of this step's tokens may change, and private ones when they are filled (I1), null block and free memory
        included. Where attention is summed up, all of a request's blocks may change behind K and V."""
        others, scored = set(range(self.num_blocks)), set[int]()
        for request, start, end, _ in plan:
            others -= self.written_blocks(request, start, end)
            if self.config.accumulates:
                X, n = request.natural_length, request.num_natural
                scored |= set(request.row[:n] if start < X else []) | set(request.row[n:] if end >= X else [])
        scored &= others
        heads = self.spec.score_offset_bytes
        for blocks, what in (
            (others - scored, (slice(None), slice(None))),
            (scored, (slice(None), slice(None, heads))),
        ):
            untouched = torch.tensor(sorted(blocks), dtype=torch.long)
            changed = (self.pages[untouched][what] != before[untouched][what]).any(1).nonzero().flatten()
            assert not len(changed), f"blocks {untouched[changed].tolist()} were written, and are none of this step's"
        if not self.config.evicts:
            return
        # The KT bytes of natural blocks are nobody's.
        tails = (slice(None), slice(self.spec.kt_offset_bytes, self.spec.kt_offset_bytes + self.spec.kt_size_bytes))
        for request, start, end, _ in plan:
            last = min(end, request.natural_length if request.is_evicted else end)
            prompt = (
                request.row[start // self.shape.block_size : -(-last // self.shape.block_size)] if start < last else []
            )
            assert torch.equal(self.pages[prompt][tails], before[prompt][tails]), "KT of a prompt block was written"

    def written_blocks(self, request: Request, start: int, end: int) -> set[int]:
        """Blocks that this step may write keys, values and queries of ``request`` into."""
        B, n, X, lengths = self.shape.block_size, request.num_natural, request.natural_length, request.lengths
        if not request.is_evicted:
            return set(request.row[start // B : -(-end // B)])
        blocks = set(request.row[start // B : -(-min(end, X) // B)] if start < X else [])
        blocks |= {request.row[n + (p - lengths.dropped_at(p)) // B] for p in range(max(start, X), end)}
        if start < X and end > X - request.window:
            blocks |= set(request.row[n : n + request.num_private])
        for length in lengths.evictions(max(start, X), end + request.window - 1):
            held = n + -(-(int(lengths.first_limit) - lengths.dropped) // B)
            # In place, or queries of a window that is not complete yet are parked behind.
            blocks |= set(request.row[n:held] if length <= end else request.row[held:])
        return blocks

    def sequence_blocks(self, request: Request, end: int, num_tokens: int) -> list[int]:
        """Blocks that hold the ``num_tokens`` of the request that are left once ``end`` tokens are computed."""
        first = request.num_natural if request.is_evicted and end >= request.natural_length else 0
        return request.row[first : first + -(-num_tokens // self.shape.block_size)]

    def check_summaries(self, request: Request, start: int, end: int) -> None:
        """The KT table, read by the format's documentation. A partly filled page has no entry yet."""
        config, shape = self.config, self.shape
        if not config.selects or (config.evicts and not (request.is_evicted and end >= request.natural_length)):
            return
        keys = request.gathered(request.key, request.life.left(end))
        dtype = KT_DTYPES[config.resolved_kt_dtype]
        pages = shape.block_size // config.page_size
        num_bytes = shape.num_kv_heads * 2 * pages * shape.head_size * dtype.itemsize
        blocks = self.sequence_blocks(request, end, len(keys))
        table = self.pages[blocks, self.spec.kt_offset_bytes : self.spec.kt_offset_bytes + num_bytes].view(dtype)
        table = table.view(len(blocks), shape.num_kv_heads, shape.head_size, 2, pages).float().permute(3, 1, 0, 4, 2)
        keys = keys[: len(keys) // config.page_size * config.page_size]
        # Of what is stored; real keys are that times the scale.
        low, high = table.flatten(2, 3)[:, :, : len(keys) // config.page_size] * shape.key_scale
        assert_summaries(config, low, high, keys, f"N={request.num_prompt}, step from {start} to {end}")

    def check_scores(self, request: Request, start: int, end: int) -> None:
        """Behind K and V stands, of each token held, all attention that it has received."""
        if not self.config.accumulates:
            return
        shape, first = self.shape, self.spec.score_offset_bytes
        expected = request.life.scores
        blocks = self.sequence_blocks(request, end, expected.shape[1])
        scores = self.pages[blocks, first : first + shape.num_kv_heads * shape.block_size * 4].view(torch.float32)
        scores = scores.view(len(blocks), shape.num_kv_heads, shape.block_size).transpose(0, 1).flatten(1)
        what = f"N={request.num_prompt}, step from {start} to {end}"
        actual = scores[:, : expected.shape[1]].double()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")

    def run(self, requests: list[Request], at_once: int = 6) -> None:
        """Run all ``requests`` to their ends, in shuffled batches; one with a shared prefix starts in the very step in
        which its owner computes it."""
        waiting, running = list(requests), list[Request]()
        while waiting or running:
            batch = [r for r in running if self.random.random() < 0.8] or list(running)
            for request in list(waiting):
                owner = request.prefix_of
                if owner is None:
                    if len(running) >= at_once:
                        continue
                else:
                    # vLLM hashes blocks when it allocates them: they are hits while they are being computed.
                    if owner not in batch:
                        continue
                    end = owner.computed + owner.steps[owner.next_step].num_tokens
                    if not (owner.computed < request.num_hit <= end):
                        continue
                    self.reserve(owner, owner.computed, end)
                    self.shared_in_step += 1
                self.admit(request)
                waiting.remove(request)
                running.append(request)
                batch.append(request)
            self.random.shuffle(batch)
            self.step(batch)
            for request in batch:
                if request.next_step == len(request.steps):
                    running.remove(request)
                    self.finish(request)
        assert not self.users, "the harness itself leaks blocks"
        assert (self.all_pages[[0, 2]] == -1).all(), "another layer's pages were written"
        assert (self.pages[0] == -1).all(), "the null block was written"
