# SPDX-License-Identifier: Apache-2.0
"""The configuration of one server, parsed once from ``--additional-config``, and the rules between its options.

Options arrive as ``--additional-config '{"rocketkv": {...}}'`` and become one frozen :class:`RocketKVConfig`. Scheduler
and workers parse the same mapping, so they agree on every layout without messages. Whatever is refused here is refused
with one sentence that names the option and the way out. No torch and no vLLM in this module.

The options themselves are in ``fields.py``, what follows from them in ``budgets.py``, names and presets in ``options.py``.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any, Self

import pydantic

from vllm_rocketkv.budgets import Budgets
from vllm_rocketkv.fields import Policy, Preset
from vllm_rocketkv.layout import ceil_div
from vllm_rocketkv.options import ALIASES, POLICIES, PRESETS, USED_BY
from vllm_rocketkv.parsing import preset_defaults, refuse, refuse_unused, refuse_value, resolve

__all__ = ["ALIASES", "POLICIES", "PRESETS", "USED_BY", "Policy", "Preset", "RocketKVConfig"]

logger = logging.getLogger("vllm.rocketkv.config")  # a child of vLLM's logger: the same handlers and format


class RocketKVConfig(Budgets):
    """The effective options of one server; frozen, hashable and picklable.

    Build it from a user's mapping with :meth:`parse`, whose refusals are single sentences. An unset option takes its
    preset's value. Options that the chosen policy does not use are refused, unless they come from a preset.
    """

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Self:
        """Build the configuration from the user's mapping; every refusal is a ValueError of exactly one sentence."""
        given = resolve(options, cls.model_fields)
        refuse_unused(given)
        try:
            config = cls.model_validate(given.values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":  # raised by this class, already a sentence
                raise ValueError(str(first["ctx"]["error"])) from None
            name = str(first["loc"][0])
            refuse_value(given, name, cls.model_fields[name])
        # Once: engine and workers parse the same mapping again.
        if given.written_as and multiprocessing.parent_process() is None:
            pairs = ", ".join(f"{alias} -> {name}={getattr(config, name)}" for name, alias in given.written_as.items())
            logger.info("rocketkv: options accepted under another system's name: %s", pairs)
        return config

    def describe(self) -> str:
        """The effective configuration in one line: the options that the policy uses, but those that switch nothing on."""
        hidden = {"prompt_budget", "topk_tokens"} if self.is_adaptive else {"token_budget", "max_new_tokens"}
        if self.decode_budget_for_step is None:
            hidden |= {"decode_budget", "decode_interval"}
        hidden |= {name for name in ("skip_layers", "pinned_tokens") if not getattr(self, name)}
        values = {name: getattr(self, name) for name in ("policy", "preset", *self.used_options) if name not in hidden}
        if "decode_budget" in values:
            values["decode_budget"] = self.decode_budget_for_step
            values["decode_interval"] = self.decode_interval or "by block size"
        if "topr" in values and self.topr is None:
            values["topr"] = "by token_budget" if self.is_adaptive else "all"
        if "skip_layers" in values:
            values["skip_layers"] = " ".join(map(str, self.skip_layers))
        return ", ".join(f"{name} {value}" for name, value in values.items())

    # --- rules between options ------------------------------------------------------------------------------------

    @pydantic.model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        merged = {**preset_defaults(data), **data}
        if "prompt_budget" in data and "token_budget" not in data:
            merged["token_budget"] = None
        if merged.get("token_budget") is not None:
            for explicit in ("prompt_budget", "topk_tokens"):
                if explicit not in data:
                    continue
                if "token_budget" in data:
                    refuse("token_budget", f"already sets '{explicit}': give only one of the two")
                refuse(
                    explicit,
                    f"is already set by token_budget {merged['token_budget']} of preset '{data['preset']}': "
                    f"give prompt_budget as well or drop '{explicit}'",
                )
        return merged

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.is_adaptive and self.preset != "reference":
            refuse("token_budget", "needs preset 'reference': set it, or give prompt_budget and topk_tokens instead")
        if self.kernel_size % 2 == 0:
            refuse("kernel_size", f"is {self.kernel_size}, but must be odd: use {self.kernel_size + 1}")
        if self.page_size & (self.page_size - 1):
            power = 1 << (self.page_size.bit_length() - 1)
            refuse("page_size", f"is {self.page_size}, but must be a power of two: use {power} or {2 * power}")
        if self.evicts:
            self._check_decode_budget()
            if not self.is_adaptive:
                self._check_prompt_budget()
        if self.selects:
            self._check_topk()
        return self

    def _check_decode_budget(self) -> None:
        if self.is_adaptive and self.decode_budget is not None:
            refuse(
                "decode_budget", "needs a fixed prompt_budget: give that instead of token_budget, or drop decode_budget"
            )
        if self.decode_budget is not None and self.decode_budget < self.prompt_budget:
            refuse(
                "decode_budget",
                f"is {self.decode_budget}, less than prompt_budget {self.prompt_budget}: "
                "raise it or lower prompt_budget",
            )
        if self.decode_interval is not None and self.decode_budget_for_step is None:
            refuse("decode_interval", "needs decode_budget: give both or neither")

    def _check_prompt_budget(self) -> None:
        """What is always kept leaves something of the budget to choose."""
        budget, window, sinks = self.prompt_budget, self.window_size, self.sink_tokens
        way_out = "lower it or raise prompt_budget"
        if self.eviction == "streaming_llm":
            if not 4 <= sinks <= 32:
                refuse("sink_tokens", f"is {sinks}, but must be an integer from 4 to 32 under policy 'streaming_llm'")
            if budget <= sinks:
                refuse("sink_tokens", f"is {sinks}, which leaves nothing of prompt_budget {budget}: {way_out}")
        elif self.eviction == "h2o":
            if self.num_recent(budget) >= budget:
                refuse(
                    "recent_share", f"is {self.recent_share}, which leaves nothing of prompt_budget {budget}: {way_out}"
                )
        elif budget < window:
            refuse(
                "prompt_budget",
                f"is {budget}, less than window_size {window}, which is always kept: "
                "raise prompt_budget or lower window_size",
            )
        elif budget <= window + sinks:
            refuse(
                "sink_tokens",
                f"is {sinks}: with window_size {window} it leaves nothing of prompt_budget {budget} to choose, {way_out}",
            )

    def _check_topk(self) -> None:
        topk = self.topk_for_step
        if self.is_adaptive:
            option, given, scale = "token_budget", f"is {self.token_budget}, which lets a step read {topk} tokens", 2
        else:
            option, given, scale = "topk_tokens", f"is {topk}", 1
        unit = self.page_size if self.ranks_pages else 1
        if topk % unit:
            refuse(
                option,
                f"{given}, but a step reads whole pages of page_size {unit}: use {ceil_div(topk, unit) * unit * scale}",
            )
        # The newest tokens may begin inside a page, hence one page more than they fill.
        least = (ceil_div(self.sink_tokens, unit) + ceil_div(self.recent_tokens, unit) + 1) * unit
        if self.selection == "hsa" and topk < least:
            refuse(
                option,
                f"{given}, but sink_tokens {self.sink_tokens} and recent_tokens {self.recent_tokens} need {least}: "
                f"raise {option} to at least {least * scale} or lower those",
            )
