# SPDX-License-Identifier: Apache-2.0
"""Every option of the extension: its default, its bounds and what it means, parsed once from ``--additional-config``.

Options arrive as ``--additional-config '{"rocketkv": {...}}'`` and become one frozen :class:`RocketKVConfig`. Scheduler
and workers parse the same mapping, so they agree on every layout without messages. Whatever is refused here is refused
with one sentence that names the option and the way out. No torch and no vLLM in this module.
"""

from __future__ import annotations

import difflib
import logging
import multiprocessing
import reprlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NoReturn, Self, get_args, get_origin

import pydantic
from pydantic import BeforeValidator, Field

from vllm_rocketkv.layout import (
    BudgetSplit,
    PromptLayout,
    adaptive_split,
    adaptive_topr,
    ceil_div,
    default_decode_interval,
    dense_below,
    max_private_blocks,
)
from vllm_rocketkv.options import ALIASES, POLICIES, PRESETS, USED_BY

logger = logging.getLogger("vllm.rocketkv.config")  # a child of vLLM's logger: the same handlers and format

Policy = Literal["full", "streaming_llm", "h2o", "snapkv", "quest", "hsa", "rocketkv", "rocketkv_mt"]
Preset = Literal["default", "reference", "trtllm", "blog"]

_METHOD_NAMES = {"algorithm": "rocket", "sparse_attention_type": "RocketKV"}

_MAX_TOKENS = 1 << 24
_PEAK_RATIO = 2.0 ** (20 / 3)  # see RocketKVConfig.max_prompt_budget


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_cached_split = lru_cache(maxsize=1 << 14)(adaptive_split)


class RocketKVConfig(pydantic.BaseModel):
    """The effective options of one server; frozen, hashable and picklable.

    Build it from a user's mapping with :meth:`parse`, whose refusals are single sentences. An unset option takes its
    preset's value. Options that the chosen policy does not use are refused, unless they come from a preset.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: Policy = Field("rocketkv", description="What is evicted after the prompt and what a decode step reads.")
    preset: Preset = Field("default", description="Where the defaults of all other options come from.")
    prompt_budget: int = Field(
        2048, ge=1, le=_MAX_TOKENS, description="Most prompt tokens kept for each KV head of each layer (P)."
    )
    token_budget: int | None = Field(
        None,
        ge=2,
        le=_MAX_TOKENS,
        description="Tokens of memory traffic per decode step and KV head, from which both budgets follow for each "
        "prompt length (t of the paper); preset reference only, in place of prompt_budget and topk_tokens.",
    )
    max_new_tokens: int = Field(
        256, ge=1, le=_MAX_TOKENS, description="Most tokens a reply is expected to have; used with token_budget only."
    )
    window_size: int = Field(
        32, ge=1, le=1024, description="Newest prompt tokens whose queries score the prompt; always kept (W)."
    )
    kernel_size: int = Field(63, ge=1, le=1023, description="Tokens of the max-pool over the scores of stage 1; odd.")
    sink_tokens: int = Field(4, ge=0, le=4096, description="Oldest tokens that both stages always keep.")
    recent_tokens: int = Field(32, ge=0, le=4096, description="Newest tokens that stage 2 always reads.")
    page_size: int = Field(
        4, ge=1, le=256, description="Tokens summarised by one KT page; a power of two that divides the block size."
    )
    recent_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the budget that policy h2o keeps for the newest tokens; the rest is for heavy hitters.",
    )
    decode_budget: int | None = Field(
        None,
        ge=1,
        le=_MAX_TOKENS,
        description="Tokens kept when decoded ones are evicted as well; null: prompt_budget for policies streaming_llm and h2o, "
        "never evict decoded tokens for all others.",
    )
    decode_interval: int | None = Field(
        None,
        ge=1,
        le=_MAX_TOKENS,
        description="Tokens decoded between two such evictions, whole blocks; null: 128, rounded up to whole blocks.",
    )
    pinned_tokens: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Prompt tokens of conversations that stay in the prefix cache before all others, the newest.",
    )
    skip_layers: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Numbers of the layers that stay dense and keep every token, from 0."
    )
    topk_tokens: int = Field(
        256, ge=1, le=_MAX_TOKENS, description="Tokens that one decode step attends to, for each KV head."
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

    # --- parsing --------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Self:
        """Build the configuration from the user's mapping; every refusal is a ValueError of exactly one sentence."""
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            _refuse("rocketkv", f'is {_show(options)}, but must be a JSON object such as {{"prompt_budget": 2048}}')
        for name in options:
            if name not in cls.model_fields and name not in ALIASES:
                _refuse(
                    " ".join(str(name).split()),
                    f"is unknown: the nearest known name is '{cls._nearest_name(str(name))}'",
                )
        canonical, written_as = cls._resolve_aliases(options)
        try:
            config = cls.model_validate(canonical)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":  # raised by this class, already a sentence
                raise ValueError(str(first["ctx"]["error"])) from None
            name = str(first["loc"][0])
            cls._refuse_value(name, written_as.get(name, name), canonical[name])
        config._refuse_unused(canonical, written_as)
        if (
            written_as and multiprocessing.parent_process() is None
        ):  # once: engine and workers parse the same mapping again
            pairs = ", ".join(f"{alias} -> {name}={getattr(config, name)}" for name, alias in written_as.items())
            logger.info("rocketkv: options accepted under another system's name: %s", pairs)
        return config

    @classmethod
    def _nearest_name(cls, name: str) -> str:
        known = [*cls.model_fields, *ALIASES]
        return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]

    @classmethod
    def _resolve_aliases(cls, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The options under our names, and by which alias each was written."""
        canonical = {name: value for name, value in options.items() if name not in ALIASES}
        written_as: dict[str, str] = {}
        for alias, name in ALIASES.items():
            if alias not in options:
                continue
            value = options[alias]
            if alias == "enable_multiturn":
                if type(value) is not bool:
                    _refuse(alias, f"is {_show(value)}, but must be true or false")
                if value and canonical.setdefault("policy", "rocketkv") not in ("rocketkv", "rocketkv_mt"):
                    _refuse(
                        alias, f"is of policy 'rocketkv_mt', not of '{canonical['policy']}': set it to false or drop it"
                    )
                if value:
                    canonical["policy"] = "rocketkv_mt"
                continue
            if name in canonical:
                _refuse(alias, f"means the same as '{written_as.get(name, name)}': give only one of the two")
            written_as[name] = alias
            if alias in _METHOD_NAMES:
                if value != _METHOD_NAMES[alias]:
                    only = _METHOD_NAMES[alias]
                    _refuse(alias, f"is {_show(value)}, but must be '{only}': use 'policy' to choose another method")
                value = "rocketkv"
            canonical[name] = value
        if written_as.get("topk_tokens") == "topk":
            canonical["topk_tokens"] = cls._pages_to_tokens(canonical)
        return canonical, written_as

    @classmethod
    def _pages_to_tokens(cls, canonical: Mapping[str, Any]) -> int:
        own_default = cls.model_fields["page_size"].default
        page_size = canonical.get("page_size", _preset_defaults(canonical).get("page_size", own_default))
        if type(page_size) is not int or page_size < 1:
            page_size = 1  # the model will refuse it
        pages, most = canonical["topk_tokens"], _MAX_TOKENS // page_size
        if type(pages) is not int or not 1 <= pages <= most:
            _refuse("topk", f"is {_show(pages)}, but must be an integer from 1 to {most}, in KT pages")
        return pages * page_size

    @classmethod
    def _refuse_value(cls, name: str, written: str, value: Any) -> NoReturn:
        """Refuse a value of the wrong type or out of bounds, saying what the field accepts."""
        _refuse(written, f"is {_show(value)}, but must be {cls._accepted(name)}")

    def _refuse_unused(self, given: Mapping[str, Any], written_as: Mapping[str, str]) -> None:
        for name in given:
            used_by = USED_BY.get(name)
            if used_by is None or self.policy in used_by:
                continue
            choices = tuple(policy for policy in POLICIES if policy in used_by)
            _refuse(
                written_as.get(name, name),
                f"means nothing to policy '{self.policy}': drop it or choose policy {_either(choices)}",
            )
        if self.preset != "default" and self.policy not in USED_BY["token_budget"] | {"full"}:
            _refuse(
                "preset", f"'{self.preset}' says nothing of policy '{self.policy}': drop it or choose another policy"
            )

    @classmethod
    def _accepted(cls, name: str) -> str:
        field = cls.model_fields[name]
        if name == "skip_layers":
            return "a list of layer numbers from 0"
        if get_origin(field.annotation) is Literal:
            return _either(get_args(field.annotation))
        bounds = {k: getattr(item, k) for item in field.metadata for k in ("gt", "ge", "lt", "le") if hasattr(item, k)}
        if field.annotation is float:
            upper = f"at most {bounds['le']}" if "le" in bounds else f"below {bounds['lt']}"
            return f"a number above {bounds['gt']} and {upper}"
        or_null = " or null" if type(None) in get_args(field.annotation) else ""
        return f"an integer from {bounds['ge']} to {bounds['le']}{or_null}"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        merged = {**_preset_defaults(data), **data}
        if "prompt_budget" in data and "token_budget" not in data:
            merged["token_budget"] = None
        if merged.get("token_budget") is not None:
            for explicit in ("prompt_budget", "topk_tokens"):
                if explicit not in data:
                    continue
                if "token_budget" in data:
                    _refuse("token_budget", f"already sets '{explicit}': give only one of the two")
                _refuse(
                    explicit,
                    f"is already set by token_budget {merged['token_budget']} of preset '{data['preset']}': "
                    f"give prompt_budget as well or drop '{explicit}'",
                )
        return merged

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.is_adaptive and self.preset != "reference":
            _refuse("token_budget", "needs preset 'reference': set it, or give prompt_budget and topk_tokens instead")
        if self.kernel_size % 2 == 0:
            _refuse("kernel_size", f"is {self.kernel_size}, but must be odd: use {self.kernel_size + 1}")
        if self.page_size & (self.page_size - 1):
            power = 1 << (self.page_size.bit_length() - 1)
            _refuse("page_size", f"is {self.page_size}, but must be a power of two: use {power} or {2 * power}")
        if any(layer < 0 for layer in self.skip_layers):
            _refuse("skip_layers", f"is {_show(list(self.skip_layers))}, but must be a list of layer numbers from 0")
        if self.evicts:
            self._check_eviction()
        if self.selects:
            self._check_topk()
        return self

    def _check_eviction(self) -> None:
        if self.is_adaptive:
            if self.decode_budget is not None:
                _refuse(
                    "decode_budget",
                    "needs a fixed prompt_budget: give that instead of token_budget, or drop decode_budget",
                )
            return
        window, budget = self.eviction_window, self.prompt_budget
        if self.eviction == "streaming_llm" and not 4 <= self.sink_tokens <= 32:
            _refuse("sink_tokens", f"is {self.sink_tokens}, but policy 'streaming_llm' takes from 4 to 32")
        if budget < window:
            _refuse(
                "prompt_budget",
                f"is {budget}, less than window_size {window}, which is always kept: "
                "raise prompt_budget or lower window_size",
            )
        if self.eviction != "h2o" and budget <= window + self.sink_tokens:
            _refuse(
                "sink_tokens",
                f"is {self.sink_tokens}: with window_size {window} it leaves nothing of prompt_budget "
                f"{budget} to choose, lower it or raise prompt_budget",
            )
        if self.eviction == "h2o" and not 0 < self.num_recent(budget) < budget:
            _refuse(
                "recent_share",
                f"is {self.recent_share}, which leaves nothing of prompt_budget {budget}: raise prompt_budget",
            )
        if self.decode_budget is not None and self.decode_budget < budget:
            _refuse(
                "decode_budget",
                f"is {self.decode_budget}, less than prompt_budget {budget}: raise it or lower prompt_budget",
            )
        if self.decode_interval is not None and self.decode_budget_for_step is None:
            _refuse("decode_interval", "needs decode_budget: give both or neither")

    def _check_topk(self) -> None:
        topk = self.topk_for_step
        if self.is_adaptive:
            option, given, scale = "token_budget", f"is {self.token_budget}, which lets a step read {topk} tokens", 2
        else:
            option, given, scale = "topk_tokens", f"is {topk}", 1
        unit = self.page_size if self.ranks_pages else 1
        if topk % unit:
            _refuse(
                option,
                f"{given}, but with granularity 'page' a step reads a multiple of page_size {unit}: "
                f"use {ceil_div(topk, unit) * unit * scale}",
            )
        # The newest tokens may begin inside a page, hence one page more than they fill.
        least = (ceil_div(self.sink_tokens, unit) + ceil_div(self.recent_tokens, unit) + 1) * unit
        if self.selection == "hsa" and topk < least:
            _refuse(
                option,
                f"{given}, but sink_tokens {self.sink_tokens} and recent_tokens {self.recent_tokens} need {least}: "
                f"raise {option} to at least {least * scale} or lower those",
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

    def num_recent(self, num_kept: int) -> int:
        """Newest tokens among ``num_kept`` that policy h2o keeps."""
        return round(self.recent_share * num_kept)

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

    # --- budgets and layout of one request ------------------------------------------------------------------------

    def _split(self, num_prompt_tokens: int) -> BudgetSplit:
        assert self.token_budget is not None
        return _cached_split(num_prompt_tokens, self.token_budget, self.max_new_tokens)

    def prompt_budget_for(self, num_prompt_tokens: int, block_size: int) -> int:
        """P in tokens for a prompt of N; when adaptive, never below W + B, which the layout needs."""
        if not self.is_adaptive:
            return self.prompt_budget
        return max(self._split(num_prompt_tokens).prompt_budget, self.window_size + block_size)

    def natural_length(self, num_prompt_tokens: int, block_size: int) -> int:
        """Tokens that lie in natural blocks before anything is evicted: those of the prompt; with decode-time eviction, of a
        prompt within the budget, as many more as the budget and one interval allow."""
        budget = self.decode_budget_for_step
        if budget is None or num_prompt_tokens > self.prompt_budget:
            return num_prompt_tokens
        return budget + self.decode_interval_for(block_size)

    def layout(self, num_prompt_tokens: int, block_size: int) -> PromptLayout:
        """Where this request's tokens live; natural (never evictable) under a policy that does not evict."""
        if not self.evicts:
            return PromptLayout(num_prompt_tokens, num_prompt_tokens, block_size)
        prompt_budget = self.prompt_budget_for(num_prompt_tokens, block_size)
        budget = self.decode_budget_for_step
        if budget is None:
            return PromptLayout(num_prompt_tokens, prompt_budget, block_size)
        length = self.natural_length(num_prompt_tokens, block_size)
        kept = prompt_budget if length == num_prompt_tokens else budget
        return PromptLayout(length, kept, block_size, budget, self.decode_interval_for(block_size))

    def is_sparse(self, num_prompt_tokens: int, block_size: int) -> bool:
        """Whether a request with this prompt ever differs from dense attention (I6): N > P, or decoded tokens are evicted,
        under a policy other than full."""
        if self.policy == "full":
            return False
        if self.decode_budget_for_step is not None:
            return True
        return num_prompt_tokens > self.prompt_budget_for(num_prompt_tokens, block_size)

    def topr_for(self, num_prompt_tokens: int, head_size: int) -> int:
        """Head dimensions that the estimation reads: ``topr``, else when adaptive int(D * page / c2), else all D."""
        if self.topr is not None:
            return min(self.topr, head_size)
        if not self.is_adaptive:
            return head_size
        return adaptive_topr(head_size, self.page_size, self._split(num_prompt_tokens).estimation_ratio)

    def num_selected_pages(self, num_cached_tokens: int) -> int:
        """Pages that one decode step reads for one KV head with so many tokens cached; 0 without stage 2.

        Up to ``dense_below`` tokens it reads all of them.
        """
        if not self.selects:
            return 0
        if num_cached_tokens <= self.dense_below:
            return ceil_div(num_cached_tokens, self.page_size)
        return ceil_div(self.topk_for_step, self.page_size)

    # --- bounds over every prompt length --------------------------------------------------------------------------

    def min_prompt_budget(self, block_size: int) -> int:
        """Smallest P, in tokens, of any evictable prompt.

        Adaptive: an evictable prompt has c > 1 and S > 2 max_new (else P = N), so capacity >= max(t, 2 max_new), since
        S / c**r = t c**(1 - r) grows with c from t, its value at c = 1, and never falls back to it (1 - r >= 0.2).
        """
        if self.token_budget is None:
            return self.prompt_budget
        spare = self.token_budget - self.max_new_tokens
        return max(spare, self.max_new_tokens, self.window_size + block_size)

    def max_prompt_budget(self, max_model_len: int, block_size: int) -> int:
        """Upper bound of P, in tokens, over every prompt of at most ``max_model_len`` tokens.

        With L = log2 c the adaptive capacity is t * 2**(L (0.8 - 0.06 L)) until r reaches 0.8 at L = 10, then
        t * 2**(0.2 L): it grows up to L = 20/3, falls up to L = 10 and grows again. The other terms never fall as N
        grows. So the maximum is at ``max_model_len`` or at an integer beside the peak; one token more covers the
        rounding of floats.
        """
        if self.token_budget is None:
            return self.prompt_budget
        peak = int(self.token_budget * _PEAK_RATIO) - self.max_new_tokens
        lengths = (1, peak, peak + 1, max_model_len)
        return 1 + max(self.prompt_budget_for(min(max(n, 1), max_model_len), block_size) for n in lengths)

    def max_private_blocks(self, max_model_len: int, block_size: int) -> int:
        """Upper bound of e, private blocks of one request, over every prompt length; 0 if nothing can be evicted."""
        if not self.evicts or (not self.is_adaptive and self.prompt_budget >= max_model_len):
            return 0
        budget = self.max_prompt_budget(max_model_len, block_size)
        if self.decode_budget_for_step is not None:
            budget = self.decode_budget_for_step + self.decode_interval_for(block_size)
        return max_private_blocks(budget, block_size)

    # --- start-up checks that need the engine's numbers -----------------------------------------------------------

    def check_block_size(self, block_size: int) -> None:
        """Refuse, with a ValueError of one sentence, options that do not fit the block size vLLM has resolved."""
        if block_size % self.page_size:
            largest = block_size & -block_size
            raise ValueError(
                f"rocketkv: page_size {self.page_size} does not divide the block size {block_size}: "
                f"lower page_size to at most {largest} or start vLLM with a --block-size that is a multiple of it"
            )
        least = self.eviction_window + block_size
        if self.evicts and not self.is_adaptive and self.prompt_budget < least:
            raise ValueError(
                f"rocketkv: prompt_budget {self.prompt_budget} is less than window_size {self.eviction_window} + "
                f"block size {block_size}: raise prompt_budget to at least {least} "
                "or start vLLM with a smaller --block-size"
            )
        interval = self.decode_interval_for(block_size)
        if self.decode_budget_for_step is None:
            return
        if interval % block_size:
            raise ValueError(
                f"rocketkv: decode_interval {interval} is not a multiple of the block size {block_size}: "
                f"use {ceil_div(interval, block_size) * block_size} or start vLLM with a smaller --block-size"
            )
        if interval < self.eviction_window:
            raise ValueError(
                f"rocketkv: decode_interval {interval} is less than window_size {self.eviction_window}, whose queries all come "
                "after the eviction before: raise decode_interval or lower window_size"
            )

    def check_window_fits(self, block_size: int, num_query_heads_per_kv_head: int, query_to_kv_bytes: int = 1) -> None:
        """Refuse, with a ValueError of one sentence, a window whose queries do not fit into the private blocks.

        While a prompt is still chunked, all but the newest query of its window may have to be parked in the K and V bytes of
        its private blocks, of which a request has at least floor(P / B). A query of all heads takes as many bytes as the K and
        V of ``group / 2`` tokens, times ``query_to_kv_bytes``, by which one of its elements is larger than one of the cache (1
        unless K and V are stored in fp8), and is never split over two blocks.
        """
        if self.eviction_window == 1:
            return
        queries_per_block = 2 * block_size // (num_query_heads_per_kv_head * query_to_kv_bytes)
        parked, offered = self.window_size - 1, self.min_prompt_budget(block_size) // block_size * queries_per_block
        if parked <= offered:
            return
        option, extra = ("token_budget", self.max_new_tokens) if self.is_adaptive else ("prompt_budget", 0)
        way_out = "start vLLM with a larger --block-size"
        if queries_per_block:
            least = ceil_div(parked, queries_per_block) * block_size + extra
            way_out = f"raise {option} to at least {least} or lower window_size"
        if query_to_kv_bytes > 1:
            way_out += " or use --kv-cache-dtype auto"
        raise ValueError(
            f"rocketkv: window_size {self.window_size} with {num_query_heads_per_kv_head} query heads per KV head "
            f"parks up to {parked} queries, but the private blocks of {option} {getattr(self, option)} hold {offered}: {way_out}"
        )

    # --- what the user is told ------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The effective configuration in one line: the options that the policy uses."""
        names = ["policy", "preset", *(name for name, policies in USED_BY.items() if self.policy in policies)]
        hidden = {"prompt_budget", "topk_tokens"} if self.is_adaptive else {"token_budget", "max_new_tokens"}
        unset = {"decode_budget": None, "decode_interval": None, "skip_layers": (), "pinned_tokens": 0}
        hidden |= {name for name, value in unset.items() if getattr(self, name) == value}
        if self.selection == "mean":
            hidden |= {"recent_tokens", "topr", "temperature", "granularity"}
        names = [name for name in names if name not in hidden]
        values = {name: getattr(self, name) for name in names}
        if "topr" in values and self.topr is None:
            values["topr"] = "by token_budget" if self.is_adaptive else "all"
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def savings(self, max_model_len: int, block_size: int, bytes_per_block: int) -> str:
        """What eviction saves on one prompt of ``max_model_len`` tokens.

        ``bytes_per_block``: bytes of one block of the pool, summed over the layers of one worker.
        """
        layout = self.layout(max_model_len, block_size)
        natural = layout.num_natural_blocks
        if not layout.is_evictable:
            return f"a prompt of {max_model_len} tokens keeps all of its {natural} blocks"
        freed = layout.num_dropped_blocks
        return (
            f"a prompt of {max_model_len} tokens keeps {layout.num_private_blocks} of {natural} blocks "
            f"and frees {freed} ({freed * bytes_per_block / 2**20:.1f} MiB)"
        )


def _refuse(option: str, why_and_way_out: str) -> NoReturn:
    raise ValueError(f"rocketkv: option '{option}' {why_and_way_out}")


def _preset_defaults(options: Mapping[str, Any]) -> Mapping[str, Any]:
    preset = options.get("preset")
    return PRESETS.get(preset, {}) if isinstance(preset, str) else {}


def _show(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def _either(choices: tuple[str, ...]) -> str:
    quoted = [f"'{choice}'" for choice in choices]
    if len(quoted) == 1:
        return quoted[0]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
