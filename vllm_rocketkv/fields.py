# SPDX-License-Identifier: Apache-2.0
"""Every option: its default, its bounds, what it means, and what the chosen policy therefore does. No torch and no vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from vllm_rocketkv.layout import default_decode_interval, dense_below
from vllm_rocketkv.options import MAX_TOKENS, POLICIES, used_options

Policy = Literal["full", "streaming_llm", "h2o", "snapkv", "quest", "hsa", "rocketkv", "rocketkv_mt"]
Preset = Literal["default", "reference", "trtllm", "blog"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Options(pydantic.BaseModel):
    """The fields of :class:`vllm_rocketkv.config.RocketKVConfig`."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: Policy = Field("rocketkv", description="What is evicted after the prompt and what a decode step reads.")
    preset: Preset = Field("default", description="Where the defaults of all other options come from.")
    prompt_budget: int = Field(
        2048, ge=1, le=MAX_TOKENS, description="Most prompt tokens kept for each KV head of each layer (P)."
    )
    token_budget: int | None = Field(
        None,
        ge=2,
        le=MAX_TOKENS,
        description="Tokens of memory traffic per decode step and KV head, from which both budgets follow for each "
        "prompt length (t of the paper); preset reference only, in place of prompt_budget and topk_tokens.",
    )
    max_new_tokens: int = Field(
        256, ge=1, le=MAX_TOKENS, description="Most tokens a reply is expected to have; used with token_budget only."
    )
    window_size: int = Field(
        32,
        ge=1,
        le=1024,
        description="Newest tokens whose queries score all others when tokens are evicted; always kept (W).",
    )
    kernel_size: int = Field(63, ge=1, le=1023, description="Tokens of the max-pool over the scores of stage 1; odd.")
    sink_tokens: int = Field(
        4,
        ge=0,
        le=4096,
        description="Oldest tokens that are always kept and, with kt_summary bounds, always read; 4 to 32 under streaming_llm.",
    )
    recent_tokens: int = Field(32, ge=0, le=4096, description="Newest tokens that stage 2 always reads.")
    page_size: int = Field(
        4, ge=1, le=256, description="Tokens summarised by one KT page; a power of two that divides the block size."
    )
    recent_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="Share of the budget that policy h2o keeps for the newest tokens; the rest is for heavy hitters.",
    )
    decode_budget: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Tokens kept when decoded ones are evicted as well; null: prompt_budget under policies "
        "streaming_llm and h2o, under the others decoded tokens are never evicted.",
    )
    decode_interval: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Tokens decoded between two such evictions, whole blocks; null: 128, or one block if that is longer.",
    )
    pinned_tokens: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Tokens whose blocks stay in the prefix cache before all others: those of the newest conversations.",
    )
    skip_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Numbers of the layers that stay dense and keep every token, from 0."
    )
    topk_tokens: int = Field(
        256, ge=1, le=MAX_TOKENS, description="Tokens that one decode step attends to, for each KV head."
    )
    topr: int | None = Field(
        None, ge=1, le=1024, description="Head dimensions that the estimation of stage 2 reads; null: every dimension."
    )
    kt_dtype: Literal["auto", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = Field(
        "auto", description="Element type of the KT table; auto: bfloat16. float8_e4m3fn is for GPUs."
    )
    kt_summary: Literal["bounds", "mean"] = Field(
        "bounds",
        description="What a KT page holds: the bounds of its keys, or their mean, which is met with the mean query.",
    )
    window_softmax: Literal["all", "prefix"] = Field(
        "all", description="Keys that the softmax of stage 1 runs over: all, or only those before the window."
    )
    granularity: Literal["page", "token"] = Field(
        "page", description="What the top-k of stage 2 ranks: whole KT pages or single tokens."
    )
    temperature: Literal["adaptive", "constant"] = Field(
        "adaptive", description="Softmax temperature of the estimation: by the query mass that topr covers, or sqrt(D)."
    )
    log_interval_seconds: float = Field(
        10.0, gt=0, le=86400, allow_inf_nan=False, description="Seconds between two log lines of the counters."
    )

    # --- what the policy does -------------------------------------------------------------------------------------

    @property
    def eviction(self) -> str:
        """Name of the policy's first stage in ``eviction.EVICTION_POLICIES``."""
        return POLICIES[self.policy][0]

    @property
    def selection(self) -> str:
        """Name of the policy's second stage in ``selection.SELECTION_POLICIES``."""
        selection = POLICIES[self.policy][1]
        return "mean" if selection == "hsa" and self.kt_summary == "mean" else selection

    @property
    def evicts(self) -> bool:
        """Whether stage 1 runs: prompt tokens beyond the budget are evicted."""
        return self.eviction != "none"

    @property
    def selects(self) -> bool:
        """Whether stage 2 runs: a decode step reads only selected pages."""
        return self.selection != "none"

    @property
    def eviction_window(self) -> int:
        """Newest tokens whose queries an eviction needs. Policies that need none still need the step that ends with it."""
        return self.window_size if self.eviction == "snapkv" else 1

    @property
    def ranks_pages(self) -> bool:
        """Whether the top-k of stage 2 ranks whole pages; else tokens."""
        return self.selection != "hsa" or self.granularity == "page"

    @property
    def accumulates(self) -> bool:
        """Whether every token's attention is summed up in the cache, which takes every query of a request."""
        return self.eviction == "h2o"

    @property
    def used_options(self) -> tuple[str, ...]:
        """Names of the options that mean something to the policy, in the order in which they are shown."""
        return used_options(self.policy, self.kt_summary)

    def num_recent(self, num_kept: int) -> int:
        """Newest tokens among ``num_kept`` that policy h2o keeps; always the newest one."""
        return max(1, round(self.recent_share * num_kept))

    @property
    def decode_budget_for_step(self) -> int | None:
        """Tokens that an eviction of decoded tokens leaves; None if they are not evicted."""
        if self.decode_budget is None and self.eviction in ("streaming_llm", "h2o"):
            return self.prompt_budget
        return self.decode_budget if self.evicts else None

    def decode_interval_for(self, block_size: int) -> int:
        """Tokens between two evictions of decoded tokens."""
        return self.decode_interval or default_decode_interval(block_size)

    @property
    def resolved_kt_dtype(self) -> str:
        """``kt_dtype`` with auto resolved: bfloat16, which every key dtype rounds into closely and every device has."""
        return "bfloat16" if self.kt_dtype == "auto" else self.kt_dtype

    @property
    def is_adaptive(self) -> bool:
        """Whether both budgets come from ``token_budget`` and the prompt's length."""
        return self.token_budget is not None

    @property
    def topk_for_step(self) -> int:
        """Tokens that one decode step attends to, for each KV head."""
        return self.topk_tokens if self.token_budget is None else self.token_budget // 2

    @property
    def dense_below(self) -> int:
        """Cached tokens up to which a decode step reads all of them: see ``layout.dense_below``."""
        return dense_below(self.topk_for_step)
