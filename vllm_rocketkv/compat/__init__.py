# SPDX-License-Identifier: Apache-2.0
"""Every place where vLLM 0.32/0.33 has no hook for what this package needs, one function each, by the process that it is for.

Each docstring says which vLLM, what was observed, and when the function can go. Wrappers call the original and only add to it.
What metadata builders ask of a batch is here; the model runners' hooks in ``worker.py`` note it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_rocketkv.compat.api_process import activate
from vllm_rocketkv.compat.engine_core import activate_scheduler_hooks
from vllm_rocketkv.compat.every_process import (
    BACKEND_NAME,
    BACKEND_PATH,
    check_configuration_at_startup,
    is_selected,
    let_cpu_platform_select_us,
    register_backend_name,
)
from vllm_rocketkv.compat.worker import activate_worker_hooks, choose_steps_for_cuda_graphs

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_rocketkv.config import RocketKVConfig

__all__ = [
    "BACKEND_NAME",
    "BACKEND_PATH",
    "activate",
    "activate_scheduler_hooks",
    "activate_worker_hooks",
    "check_configuration_at_startup",
    "choose_steps_for_cuda_graphs",
    "is_selected",
    "let_cpu_platform_select_us",
    "prompt_lens",
    "register_backend_name",
    "request_configs",
]

_v1_prompt_lens: torch.Tensor | None = None
"""Model runner V1: prompt lengths of the batch whose attention metadata is being built."""

_batch_configs: tuple[torch.Tensor | None, list[RocketKVConfig | None]] | None = None
"""Options of the requests of a batch, None for the server's, after the ``rswa_prefix_lens`` that the batch is known by (None
under model runner V1, which sets this only while it builds). None if no live request has options of its own."""


def prompt_lens(common_attn_metadata: CommonAttentionMetadata) -> torch.Tensor:
    """Prompt length of each request of the batch: int32 ``[num_reqs]`` on the host, 0 for padded rows and dummy runs.

    A view of what the runner has, except in padded batches and dummy runs.
    """
    import torch

    num_reqs = common_attn_metadata.num_reqs
    lens = common_attn_metadata.rswa_prefix_lens
    if lens is None:
        lens = _v1_prompt_lens
    if lens is None:
        return torch.zeros(num_reqs, dtype=torch.int32)
    lens = lens[:num_reqs].to(torch.int32)
    missing = num_reqs - lens.shape[0]
    return torch.nn.functional.pad(lens, (0, missing)) if missing else lens


def request_configs(common_attn_metadata: CommonAttentionMetadata) -> list[RocketKVConfig | None] | None:
    """Options of each request of the batch, in its order, None for the server's; None if no live request has its own."""
    if _batch_configs is None:
        return None
    batch, configs = _batch_configs
    if batch is not common_attn_metadata.rswa_prefix_lens:  # a dummy run after that batch
        return None
    num_reqs = common_attn_metadata.num_reqs
    return configs[:num_reqs] + [None] * (num_reqs - len(configs))
