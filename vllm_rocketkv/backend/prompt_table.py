# SPDX-License-Identifier: Apache-2.0
"""What the configuration says about each length of prompt, as a table that kernels can look things up in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_rocketkv.config import RocketKVConfig

NEVER = 1 << 30
"""A length that no request reaches, a number of tokens that none has."""
COLUMNS = (
    "is_sparse",
    "natural_length",
    "num_dropped_blocks",
    "topr",
    "topk_tokens",
    "dense_below",
    "window_size",
    "first_limit",
    "interval",
)
"""As ``PromptPlan`` in ``csrc/cpu/plan.h``, which says what they mean."""


class PromptTable:
    """One row a *plan*, int32 ``[plans, len(COLUMNS)]``: plan N is that of prompts of N tokens under the server's options; behind
    those come plans of requests with options of their own.

    Scheduler and worker must agree on every layout (I3), so no formula of ``RocketKVConfig`` is written again in C++: a row is
    filled in when it is first asked for.
    """

    UNKNOWN = -1
    OWN_PLANS = 4096
    """Plans of requests with options of their own, all forgotten when there is no room for another."""

    def __init__(self, config: RocketKVConfig, block_size: int, head_size: int, max_model_len: int) -> None:
        self.config, self.block_size, self.head_size = config, block_size, head_size
        self.max_model_len = max_model_len
        self.tensor = torch.full((max_model_len + 1 + self.OWN_PLANS, len(COLUMNS)), self.UNKNOWN, dtype=torch.int32)
        self._values = self.tensor.numpy()  # shares memory; stores without a dispatch and in any inference mode
        self._values[0] = 0  # padded rows and dummy runs
        self._own: dict[tuple[RocketKVConfig, int], int] = {}

    def plan_ids(self, prompt_lens: torch.Tensor, configs: Sequence[RocketKVConfig | None] | None) -> torch.Tensor:
        """Row of each request, int32 ``[num_reqs]``, for ``prompt_lens`` of the same form; ``configs`` of requests with options
        of their own, or None if there is none."""
        if configs is None:
            return prompt_lens
        if len(self._own) + len(configs) > self.OWN_PLANS:
            self._own.clear()
        ids = prompt_lens.clone()
        for index, config in enumerate(configs):
            if config is not None and ids[index] > 0:
                ids[index] = self._own_plan(config, int(prompt_lens[index]))
        return ids

    def _own_plan(self, config: RocketKVConfig, num_prompt_tokens: int) -> int:
        plan = self._own.get((config, num_prompt_tokens))
        if plan is None:
            plan = self.max_model_len + 1 + len(self._own)
            self._own[config, num_prompt_tokens] = plan
            self._set(plan, config, num_prompt_tokens)
        return plan

    def fill(self, num_prompt_tokens: int) -> None:
        """Set the row of one length.

        Raises:
            IndexError: if the model allows no prompt of that length.
        """
        if num_prompt_tokens > self.max_model_len:
            raise IndexError(
                f"rocketkv: a prompt of {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len}"
            )
        self._set(num_prompt_tokens, self.config, num_prompt_tokens)

    def _set(self, plan: int, config: RocketKVConfig, num_prompt_tokens: int) -> None:
        layout = config.layout(num_prompt_tokens, self.block_size)
        self._values[plan] = (
            config.is_sparse(num_prompt_tokens, self.block_size),
            layout.num_prompt_tokens,
            layout.num_dropped_blocks,
            config.topr_for(num_prompt_tokens, self.head_size),
            config.topk_for_step if config.selects else NEVER,
            config.dense_below if config.selects else NEVER,
            config.eviction_window,
            NEVER if layout.first_limit is None else layout.first_limit,
            layout.decode_interval,
        )

    def rows(self, prompt_lens: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        """The columns of each length, ``[num_reqs]`` each."""
        for unknown in np.unique(prompt_lens[self._values[prompt_lens, 0] == self.UNKNOWN]):
            self.fill(int(unknown))
        return dict(zip(COLUMNS, self._values[prompt_lens].T, strict=True))
