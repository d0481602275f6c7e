# SPDX-License-Identifier: Apache-2.0
"""A user's mapping, under our names or another system's, and the sentences with which it is refused.

Every refusal is a ValueError of exactly one sentence that names the option as it was written and says the way out.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from vllm_rocketkv.options import ALIASES, MAX_TOKENS, POLICIES, PRESETS, USED_BY, used_options

_MOST_SHOWN = 100  # characters
_METHOD_NAMES = {"algorithm": "rocket", "sparse_attention_type": "RocketKV"}


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """What the user gave, under our names."""

    values: dict[str, Any]
    written_as: dict[str, str]
    """By which alias an option was written, of those that were."""

    def name(self, option: str) -> str:
        """The option's name as the user wrote it."""
        return self.written_as.get(option, option)


def resolve(options: Mapping[str, Any] | None, fields: Mapping[str, FieldInfo]) -> GivenOptions:
    """The options under the names of ``fields``; unknown names and options given twice are refused."""
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        refuse("rocketkv", f'is {show(options)}, but must be a JSON object such as {{"prompt_budget": 2048}}')
    for name in options:
        if name not in fields and name not in ALIASES:
            nearest = difflib.get_close_matches(str(name).lower(), [*fields, *ALIASES], n=1, cutoff=0.0)[0]
            refuse(" ".join(str(name).split()), f"is unknown: the nearest known name is '{nearest}'")
    given = GivenOptions({name: value for name, value in options.items() if name not in ALIASES}, {})
    for alias, name in ALIASES.items():
        if alias in options and alias != "enable_multiturn":
            _add(given, name, alias, options[alias])
    if "enable_multiturn" in options:
        _apply_multiturn(given, options["enable_multiturn"])
    if given.written_as.get("topk_tokens") == "topk":
        given.values["topk_tokens"] = _pages_to_tokens(given.values, fields)
    return given


def _add(given: GivenOptions, name: str, alias: str, value: Any) -> None:
    if name in given.values:
        refuse(alias, f"means the same as '{given.name(name)}': give only one of the two")
    if alias in _METHOD_NAMES:
        if value != _METHOD_NAMES[alias]:
            only = _METHOD_NAMES[alias]
            refuse(alias, f"is {show(value)}, but must be '{only}': use 'policy' to choose another method")
        value = "rocketkv"
    given.written_as[name] = alias
    given.values[name] = value


def _apply_multiturn(given: GivenOptions, value: Any) -> None:
    """``enable_multiturn``, which names the policy together with the name of the method."""
    alias = "enable_multiturn"
    if type(value) is not bool:
        refuse(alias, f"is {show(value)}, but must be true or false")
    policy = given.values.get("policy", "rocketkv")
    if value and policy not in ("rocketkv", "rocketkv_mt"):
        refuse(alias, f"is of policy 'rocketkv_mt', not of {show(policy)}: set it to false or drop it")
    if not value and policy == "rocketkv_mt":
        refuse(alias, "is false, but true under policy 'rocketkv_mt': drop it or choose policy 'rocketkv'")
    if value:
        given.values["policy"], given.written_as["policy"] = "rocketkv_mt", alias


def _pages_to_tokens(values: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> int:
    page_size = values.get("page_size", preset_defaults(values).get("page_size", fields["page_size"].default))
    if type(page_size) is not int or page_size < 1:
        page_size = 1  # the model will refuse it
    pages, most = values["topk_tokens"], MAX_TOKENS // page_size
    if type(pages) is not int or not 1 <= pages <= most:
        refuse("topk", f"is {show(pages)}, but must be an integer from 1 to {most}, in KT pages")
    return pages * page_size


def preset_defaults(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the preset named in ``options`` puts in place of the fields' defaults."""
    preset = options.get("preset")
    return PRESETS.get(preset, {}) if isinstance(preset, str) else {}


def refuse_unused(given: GivenOptions) -> None:
    """Refuse what was given and means nothing to the policy: first, as whatever else is wrong with it is then of no matter."""
    policy = given.values.get("policy", "rocketkv")
    if policy not in tuple(POLICIES):
        return  # the model will refuse it
    defaults = preset_defaults(given.values)
    if defaults and policy not in USED_BY["token_budget"] | {"full"}:
        way_out = f"drop it or choose policy {_either_of(USED_BY['token_budget'])}"
        refuse("preset", f"'{given.values['preset']}' says nothing of policy '{policy}': {way_out}")
    used = used_options(policy, given.values.get("kt_summary", defaults.get("kt_summary", "bounds")))
    for option in given.values:
        used_by = USED_BY.get(option)
        if used_by is None or option in used:
            continue
        if policy in used_by:
            refuse(given.name(option), "means nothing with kt_summary 'mean': drop it or set kt_summary 'bounds'")
        way_out = f"drop it or choose policy {_either_of(used_by)}"
        refuse(given.name(option), f"means nothing to policy '{policy}': {way_out}")


def _either_of(policies: Collection[str]) -> str:
    return either(tuple(policy for policy in POLICIES if policy in policies))


# --- sentences -------------------------------------------------------------------------------------------------------


def refuse(option: str, why_and_way_out: str) -> NoReturn:
    """Raise the sentence."""
    raise ValueError(f"rocketkv: option '{option}' {why_and_way_out}")


def refuse_value(given: GivenOptions, option: str, field: FieldInfo) -> NoReturn:
    """Refuse a value of the wrong type or out of bounds, saying what the field accepts."""
    refuse(given.name(option), f"is {show(given.values[option])}, but must be {accepted(field)}")


def accepted(field: FieldInfo) -> str:
    """What values a field takes, in words."""
    if get_origin(field.annotation) is tuple:
        return "a list of integers from 0"
    if get_origin(field.annotation) is Literal:
        return either(get_args(field.annotation))
    bounds = {k: getattr(item, k) for item in field.metadata for k in ("gt", "ge", "lt", "le") if hasattr(item, k)}
    if field.annotation is float:
        upper = f"at most {bounds['le']}" if "le" in bounds else f"below {bounds['lt']}"
        return f"a number above {bounds['gt']} and {upper}"
    or_null = " or null" if type(None) in get_args(field.annotation) else ""
    return f"an integer from {bounds['ge']} to {bounds['le']}{or_null}"


def show(value: Any) -> str:
    """A value on one line, shortened."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def either(choices: tuple[str, ...]) -> str:
    """Quoted and joined by commas and "or"."""
    quoted = [f"'{choice}'" for choice in choices]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
