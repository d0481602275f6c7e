# SPDX-License-Identifier: Apache-2.0
"""Options of one request: ``vllm_xargs`` in the HTTP body, ``SamplingParams.extra_args`` in Python.

The engine core and the workers call ``request_config`` with the same values, so they agree on a request's layout without messages
(I3). The API process calls ``check_request`` before, so nothing that it refuses ever reaches them. Whatever is refused is refused
with one sentence that names the option and the way out. No torch and no vLLM in this module.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

import pydantic

from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import ceil_div, parking_blocks
from vllm_rocketkv.options import MAX_TOKENS, POLICIES, USED_BY
from vllm_rocketkv.parsing import either, refuse, show

SWITCH, POLICY, PROMPT_BUDGET, TOPK_TOKENS = NAMES = (
    "rocketkv",
    "rocketkv_policy",
    "rocketkv_prompt_budget",
    "rocketkv_topk_tokens",
)
"""Keys of ``extra_args`` that are ours; all others are left to whoever reads them, unless they begin like ours."""

_BY_WINDOW = ("full", "streaming_llm", "snapkv")

POLICIES_WITHIN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "full": ("full",),
        "streaming_llm": _BY_WINDOW,
        "h2o": (*_BY_WINDOW, "h2o"),
        "snapkv": _BY_WINDOW,
        "quest": ("full", "quest"),
        "hsa": ("full", "hsa"),
        "rocketkv": (*_BY_WINDOW, "rocketkv", "rocketkv_mt"),
        "rocketkv_mt": (*_BY_WINDOW, "rocketkv", "rocketkv_mt"),
    }
)
"""Policies that a request may choose, by the server's policy: whose needs its cache holds and its kernels know."""

_Options = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True)
class Engine:
    """The numbers of a running engine that a request has to fit."""

    block_size: int
    max_model_len: int
    query_heads_per_kv_head: int
    query_to_kv_bytes: int = 1
    """By which one element of a query is larger than one of the cache."""
    speculates: bool = False
    shares_kv: bool = False
    """Whether layers share other layers' KV caches."""
    is_gpu: bool = False


def given(extra_args: Mapping[str, Any] | None) -> list[str]:
    """Keys that are ours or begin like ours, known or not."""
    if not isinstance(extra_args, Mapping):
        return []
    return [name for name in extra_args if isinstance(name, str) and name.lower().startswith(SWITCH)]


def request_config(server: RocketKVConfig, extra_args: Mapping[str, Any] | None) -> RocketKVConfig | None:
    """The options of a request with these ``extra_args``; None for the server's own. Equal requests share one object.

    Raises:
        ValueError: with one sentence.
    """
    if not extra_args or not (names := given(extra_args)):
        return None
    return _config(server, _options(server, names, extra_args))


def check_request(server: RocketKVConfig, extra_args: Mapping[str, Any] | None, engine: Engine) -> None:
    """Refuse what ``request_config`` refuses and what does not fit the engine: what start-up checks of the server's own options.

    Raises:
        ValueError: with one sentence.
    """
    if engine.is_gpu and (names := given(extra_args)):
        refuse(_shown(names[0]), "is not supported on GPUs yet: drop it")
    config = request_config(server, extra_args)
    if config is None or not config.evicts:
        return
    assert extra_args is not None
    options = dict(_options(server, given(extra_args), extra_args))
    try:
        config.check_block_size(engine.block_size)
        config.check_window_fits(engine.block_size, engine.query_heads_per_kv_head, engine.query_to_kv_bytes)
    except ValueError as error:
        _refuse_as(options, str(error))
    if engine.speculates and config.decode_budget_for_step is not None:
        refuse(
            POLICY,
            f"is '{config.policy}', which evicts decoded tokens, also for drafts that are rejected: choose another policy or "
            "start vLLM without --speculative-config",
        )
    if engine.shares_kv and config.decode_budget_for_step is not None:
        refuse(
            POLICY,
            f"is '{config.policy}', which evicts decoded tokens before layers that share a KV cache have read them: choose "
            "another policy",
        )
    needed, reserved = _blocks_beside(config, engine), _blocks_reserved(server, engine)
    if needed > reserved and config.decode_budget_for_step is not None and config.eviction_window > 1:
        refuse(
            POLICY,
            f"is '{config.policy}', whose queries wait in blocks of their own, {needed} with the private ones, but this server "
            f"sets {reserved} aside for each request: choose another policy or start vLLM with a larger decode_interval",
        )
    if needed > reserved:
        refuse(
            PROMPT_BUDGET if PROMPT_BUDGET in options else POLICY,
            f"is {options.get(PROMPT_BUDGET, options.get(POLICY))!r}, which takes {needed} private blocks, but this server sets "
            f"{reserved} aside for each request: drop it or start vLLM with a smaller prompt_budget",
        )


def _blocks_reserved(server: RocketKVConfig, engine: Engine) -> int:
    """Blocks that the server counts for one request beside those of a sequence of ``max_model_len`` tokens."""
    private_blocks = server.max_private_blocks(engine.max_model_len, engine.block_size)
    return private_blocks + _parking_blocks(server, engine) if private_blocks else 0


def _blocks_beside(config: RocketKVConfig, engine: Engine) -> int:
    """Blocks that a request may hold beside those of a sequence of ``max_model_len`` tokens.

    After an eviction it holds what was kept instead of the tokens that were computed, so these are no more than the blocks of
    what one eviction leaves; with decode-time eviction, also those of a window by which the row may end beyond
    ``max_model_len``, and those that its queries are parked in.
    """
    block_size, max_model_len = engine.block_size, engine.max_model_len
    if not config.is_adaptive and config.prompt_budget >= max_model_len:
        return 0
    if config.decode_budget_for_step is None:
        return ceil_div(config.max_prompt_budget(max_model_len, block_size), block_size)
    blocks = ceil_div(config.decode_budget_for_step, block_size)
    if config.eviction_window == 1:
        return blocks
    return blocks + ceil_div(config.eviction_window, block_size) + _parking_blocks(config, engine)


def _parking_blocks(config: RocketKVConfig, engine: Engine) -> int:
    if config.decode_budget_for_step is None:
        return 0
    queries_per_block = 2 * engine.block_size // (engine.query_heads_per_kv_head * engine.query_to_kv_bytes)
    return parking_blocks(config.eviction_window, max(queries_per_block, 1))


# --- one request's values ----------------------------------------------------------------------------------------------


def _options(server: RocketKVConfig, names: list[str], extra_args: Mapping[str, Any]) -> _Options:
    """Our options among ``extra_args``, each of its own type, in one order."""
    for name in names:
        if name not in NAMES:
            nearest = difflib.get_close_matches(_shown(name).lower(), NAMES, n=1, cutoff=0.0)[0]
            refuse(_shown(name), f"is unknown: the nearest known name is '{nearest}'")
    options: dict[str, str | int] = {}
    for name in NAMES:
        if name not in extra_args:
            continue
        value = extra_args[name]
        if name == SWITCH:
            known = isinstance(value, str) and value in ("off", "on")
        elif name == POLICY:
            known = isinstance(value, str) and value in POLICIES
        else:
            known = type(value) is int and 1 <= value <= _most(server, name)
        if not known:
            refuse(name, f"is {show(value)}, but must be {_accepted(server, name)}")
        options[name] = value
    return tuple(options.items())


def _shown(name: str) -> str:
    """A name that may be of any length, on one line."""
    return " ".join(name[:64].split())


def _most(server: RocketKVConfig, name: str) -> int:
    """Largest value of an integer option. An adaptive server's prompt_budget means nothing: such requests are refused later."""
    return server.prompt_budget if name == PROMPT_BUDGET and not server.is_adaptive else MAX_TOKENS


def _accepted(server: RocketKVConfig, name: str) -> str:
    if name == SWITCH:
        return "'off' or 'on'"
    if name == POLICY:
        return either(POLICIES_WITHIN[server.policy])
    bound = ", the server's" if name == PROMPT_BUDGET and not server.is_adaptive else ""
    return f"an integer from 1 to {_most(server, name)}{bound}"


@lru_cache(maxsize=1024)
def _config(server: RocketKVConfig, options: _Options) -> RocketKVConfig | None:
    chosen = dict(options)
    if chosen.get(SWITCH) == "off":
        for name in chosen:
            if name != SWITCH:
                refuse(name, f"means nothing beside {SWITCH} 'off': drop one of the two")
        chosen[POLICY] = "full"
    policy = str(chosen.get(POLICY, server.policy))
    within = POLICIES_WITHIN[server.policy]
    if policy not in within:
        refuse(
            POLICY,
            f"is '{policy}', which a server of policy '{server.policy}' does not offer: "
            f"use {either(within)}, or start vLLM with policy '{policy}'",
        )
    _refuse_unused(chosen, policy, within)
    config = _variant(server, policy, chosen)
    return None if config == server else config


def _refuse_unused(chosen: Mapping[str, str | int], policy: str, within: tuple[str, ...]) -> None:
    for name in (PROMPT_BUDGET, TOPK_TOKENS):
        used_by = USED_BY[name.removeprefix("rocketkv_")]
        if name not in chosen or policy in used_by:
            continue
        others = tuple(other for other in within if other in used_by)
        way_out = f"drop it or choose {POLICY} {either(others)}" if others else "drop it"
        refuse(name, f"means nothing to policy '{policy}': {way_out}")


def _variant(server: RocketKVConfig, policy: str, chosen: Mapping[str, str | int]) -> RocketKVConfig:
    """The server's options with this request's in their place, checked as at start-up."""
    values = {name: getattr(server, name) for name in RocketKVConfig.model_fields}
    if server.is_adaptive:
        for name in (PROMPT_BUDGET, TOPK_TOKENS):
            del values[name.removeprefix("rocketkv_")]
            if name in chosen:
                refuse(
                    name,
                    f"cannot be given to a server whose budgets follow from token_budget {server.token_budget}: drop it or start "
                    "vLLM with prompt_budget and topk_tokens instead",
                )
        if policy not in USED_BY["token_budget"] | {"full"}:
            refuse(
                POLICY,
                f"is '{policy}', which needs a fixed prompt_budget, but this server's follows from token_budget "
                f"{server.token_budget}: choose another policy or start vLLM with prompt_budget instead",
            )
    values |= {name.removeprefix("rocketkv_"): value for name, value in chosen.items() if name != SWITCH}
    values["policy"] = policy
    if policy not in USED_BY["pinned_tokens"]:
        values["pinned_tokens"] = 0
    if server.decode_budget is None and policy not in ("streaming_llm", "h2o"):
        values["decode_interval"] = None  # of the server's policy alone
    try:
        return RocketKVConfig.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        _refuse_as(chosen, str(first.get("ctx", {}).get("error", first["msg"])))


# --- sentences ---------------------------------------------------------------------------------------------------------


def _refuse_as(chosen: Mapping[str, str | int], sentence: str) -> NoReturn:
    """Refuse with a sentence about the server's options: under the request's name if it gave the option, else for its policy."""
    for name in (PROMPT_BUDGET, TOPK_TOKENS):
        if name in chosen and re.search(own := rf"\b{name.removeprefix('rocketkv_')}\b", sentence):
            raise ValueError(re.sub(own, name, sentence))
    detail = sentence.removeprefix("rocketkv: ").replace(": ", ", ")
    refuse(
        POLICY,
        f"is '{chosen.get(POLICY)}', which does not fit this server's options ({detail}): choose another policy or start vLLM "
        "with other options",
    )
