# SPDX-License-Identifier: Apache-2.0
"""One layer's cache for the tests of stage 1's C++ kernels.

Whatever a test does not write is random bytes, NaNs among them: what lies behind the tokens must not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.stage1_oracle import Stage1Case
from vllm_rocketkv.backend.paged_cache import private_layout, probe_block_layout
from vllm_rocketkv.kernels.cpu import ops

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]  # by csrc/cpu's enum
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
MODEL_TYPES = TYPES[:3]
KT_TYPES = [torch.float8_e5m2, torch.bfloat16]
LAYOUTS = ["vec", "vec16", "amx", "rows", "private"]


@dataclass(frozen=True)
class Case(Stage1Case):
    layout: str = "vec"
    page_size: int = 4  # 0: no KT table
    kt_dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0  # of keys and values
    accumulates: bool = False  # whether there are sums of attention
    in_place: bool = False  # whether private blocks are the first of the prompt's

    @property
    def detail(self) -> str:
        return self.layout

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)


def layout_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets of the blocks' layout: of vLLM's op itself where it has one for the dtype and size, else by its formulas."""
    B, D = case.block_size, case.head_size
    if case.layout.startswith("vec") and case.dtype.itemsize > 1 and B % 32 == 0:
        probed = probe_block_layout(case.layout, case.dtype, B, D)
        return probed.key_token, probed.key_dim, probed.value_token, probed.value_dim
    if case.layout == "private":
        return tuple(private_layout(B, D).split([B, D, B, D]))
    t, d = torch.arange(B), torch.arange(D)
    if case.layout == "amx":
        key = t // 16 * 16 * D + t % 16 * 2, d // 2 * 32 + d % 2
        value = B * D + t // 2 * 32 + t % 2, d // 16 * 16 * B + d % 16 * 2
    elif case.layout == "rows":  # none of vLLM's: neither contiguous nor pairs
        key, value = (t * D, d), (B * D + t * D, d)
    else:
        key, value = (t, d * B), (B * D + t * D, d)
    return *key, *value


class Layer:
    """A cache of random bytes that holds ``keys`` and ``values`` in ``prompt_blocks``, laid out as the case says."""

    def __init__(self, case: Case, keys: Tensor, values: Tensor) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)
        n, B, D, H = case.num_prompt_blocks, case.block_size, case.head_size, case.num_kv_heads
        self.num_private = -(-case.num_kept // B)
        num_blocks = n + self.num_private + 3
        kv_bytes = H * 2 * B * D * case.dtype.itemsize
        self.kt_offset = (kv_bytes + 63) // 64 * 64
        self.kt_shape = (H, D, 2, B // case.page_size if case.page_size else 0)
        kt_bytes = torch.Size(self.kt_shape).numel() * case.kt_dtype.itemsize
        self.behind_kt = self.kt_offset + (kt_bytes + 127) // 64 * 64
        self.score_offset = self.behind_kt if case.accumulates else 0
        block_bytes = self.behind_kt + (4 * H * B + 64 if case.accumulates else 0)
        self.bytes = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=draw)
        order = torch.randperm(num_blocks, generator=draw).int()
        self.prompt_blocks, self.private_blocks = order[:n].clone(), order[n : n + self.num_private].clone()
        if case.in_place:
            self.private_blocks = self.prompt_blocks[: self.num_private].clone()
        self.offsets = layout_of(case)
        self.native_layout = torch.cat(self.offsets).int()
        self.kv_cache = self.bytes[:, :kv_bytes].view(case.dtype).unflatten(1, (H, B, 2 * D))
        if case.dtype.itemsize == 1:
            self.kv_cache = self.kv_cache.view(torch.uint8)
        self.write(self.prompt_blocks, 0, keys, values)

    def write(self, blocks: Tensor, first: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values ``[n, H, D]`` of positions ``first`` to ``first + n - 1``."""
        heads, B = self.heads(self.bytes), self.case.block_size
        tokens = torch.arange(first, first + len(keys))
        block, offset = blocks.long()[tokens // B], tokens % B
        for token, dim, what in ((*self.offsets[:2], keys), (*self.offsets[2:], values)):
            where = token.long()[offset][:, None] + dim
            for h in range(self.case.num_kv_heads):
                heads[block[:, None], h, where] = what[:, h].contiguous().view(heads.dtype)

    def heads(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, 2 * B * D]`` elements as integers."""
        H, size = self.case.num_kv_heads, 2 * self.case.block_size * self.case.head_size
        itemsize = self.case.dtype.itemsize
        return raw[:, : H * size * itemsize].view(INTEGERS[itemsize]).unflatten(1, (H, size))

    def kt(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, D, 2, pages]`` of the KT dtype."""
        size = torch.Size(self.kt_shape).numel() * self.case.kt_dtype.itemsize
        return raw[:, self.kt_offset : self.kt_offset + size].view(self.case.kt_dtype).unflatten(1, self.kt_shape)

    def sums(self, raw: Tensor) -> Tensor:
        """``[num_blocks, H, B]`` sums of attention."""
        H, B = self.case.num_kv_heads, self.case.block_size
        return raw[:, self.score_offset : self.score_offset + 4 * H * B].view(torch.float32).unflatten(1, (H, B))

    @property
    def format(self) -> tuple[Any, ...]:
        case = self.case
        types = TYPES.index(case.dtype), TYPES.index(case.kt_dtype)
        return types[0], case.key_scale, 1.0, self.kt_offset, types[1], case.page_size, False, self.score_offset

    def keep(self, query: Tensor, num_kept: int | None = None, **other: Any) -> Tensor:
        case = self.case
        options = {
            "scale": case.scale,
            "softcap": case.softcap,
            "softmax_over_all": case.softmax == "all",
            "kernel_size": case.kernel_size,
            "sink_tokens": case.sinks,
        }
        arguments = (query, self.kv_cache, other.pop("prompt_blocks", self.prompt_blocks), case.num_tokens)
        num_kept = case.num_kept if num_kept is None else num_kept
        return ops.keep_tokens(*arguments, num_kept, *self.format, self.native_layout, **(options | other))

    def compact(self, kept: Tensor) -> None:
        blocks, place = (self.prompt_blocks, self.private_blocks), (self.native_layout, self.case.in_place)
        ops.compact(self.kv_cache, *blocks, kept, *self.format, *place)

    def accumulate(self, query: Tensor, parts: list[tuple[int, ...]], table: Tensor) -> None:
        case, rows = self.case, torch.tensor(parts, dtype=torch.int32).reshape(-1, 5)
        arguments = (*self.format, self.native_layout, case.scale, case.softcap)
        ops.accumulate_scores(query, self.kv_cache, rows, table, *arguments)

    def keep_heavy(self, num_tokens: int, num_kept: int, num_recent: int) -> Tensor:
        return ops.keep_heavy(self.kv_cache, self.prompt_blocks, num_tokens, num_kept, num_recent, *self.format)


def draw_prompt(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The window's queries ``[W, Hq, D]``, keys and values ``[N, Hkv, D]`` as stored."""
    draw = torch.Generator().manual_seed(case.seed)
    heads, shape = case.num_kv_heads * case.group, (case.num_tokens, case.num_kv_heads, case.head_size)
    query = torch.randn(case.window, heads, case.head_size, generator=draw) * 2
    keys, values = (torch.randn(shape, generator=draw) * case.magnitude for _ in range(2))
    return query.to(case.model_dtype), keys.to(case.dtype), values.to(case.dtype)
