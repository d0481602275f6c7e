# SPDX-License-Identifier: Apache-2.0
"""Options: defaults, presets, bounds and every refusal."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest

from tests.refusals import refusal
from vllm_rocketkv.config import ALIASES, PRESETS, RocketKVConfig

parse = RocketKVConfig.parse
FIELDS = RocketKVConfig.model_fields


# --- defaults and presets --------------------------------------------------------------------------------------------

DEFAULT = {
    "policy": "rocketkv",
    "preset": "default",
    "prompt_budget": 2048,
    "token_budget": None,
    "max_new_tokens": 256,
    "window_size": 32,
    "kernel_size": 63,
    "sink_tokens": 4,
    "recent_tokens": 32,
    "page_size": 4,
    "recent_share": 0.5,
    "decode_budget": None,
    "decode_interval": None,
    "pinned_tokens": 0,
    "skip_layers": (),
    "topk_tokens": 256,
    "topr": None,
    "kt_dtype": "auto",
    "kt_summary": "bounds",
    "window_softmax": "all",
    "granularity": "page",
    "temperature": "adaptive",
    "log_interval_seconds": 10.0,
}
REFERENCE = {
    **DEFAULT,
    "preset": "reference",
    "token_budget": 512,
    "sink_tokens": 0,
    "recent_tokens": 0,
    "page_size": 2,
    "granularity": "token",
}
TRTLLM = {
    **DEFAULT,
    "preset": "trtllm",
    "sink_tokens": 0,
    "recent_tokens": 0,
    "kt_dtype": "float8_e5m2",
    "window_softmax": "prefix",
    "temperature": "constant",
}
BLOG = {
    **DEFAULT,
    "preset": "blog",
    "prompt_budget": 1024,
    "sink_tokens": 16,
    "recent_tokens": 0,
    "topk_tokens": 128,
    "kt_summary": "mean",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, DEFAULT),
        ({}, DEFAULT),
        ({"preset": "default"}, DEFAULT),
        ({"preset": "reference"}, REFERENCE),
        ({"preset": "trtllm"}, TRTLLM),
        ({"preset": "blog"}, BLOG),
        (
            {"preset": "blog", "prompt_budget": 512, "kt_summary": "bounds", "topr": 8},
            {**BLOG, "prompt_budget": 512, "kt_summary": "bounds", "topr": 8},
        ),
        ({"preset": "reference", "token_budget": 1024}, {**REFERENCE, "token_budget": 1024}),
        (
            {"preset": "reference", "prompt_budget": 1024},
            {**REFERENCE, "prompt_budget": 1024, "token_budget": None},
        ),
        (
            {"preset": "reference", "prompt_budget": 1024, "topk_tokens": 100},
            {**REFERENCE, "prompt_budget": 1024, "topk_tokens": 100, "token_budget": None},
        ),
        ({"preset": "reference", "token_budget": None}, {**REFERENCE, "token_budget": None}),
        ({"preset": "trtllm", "kt_dtype": "bfloat16", "topr": 32}, {**TRTLLM, "kt_dtype": "bfloat16", "topr": 32}),
        ({"log_interval_seconds": 1}, {**DEFAULT, "log_interval_seconds": 1.0}),
        ({"policy": "hsa", "prompt_budget": 16}, {**DEFAULT, "policy": "hsa", "prompt_budget": 16}),
        ({"skip_layers": [1, 0]}, {**DEFAULT, "skip_layers": (1, 0)}),
        # A preset may set what the policy does not use.
        ({"policy": "snapkv", "preset": "blog"}, {**BLOG, "policy": "snapkv"}),
        ({"policy": "hsa", "preset": "trtllm"}, {**TRTLLM, "policy": "hsa"}),
    ],
)
def test_effective_options(options: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert parse(options).model_dump() == expected


def test_presets_name_only_fields_and_are_the_choices() -> None:
    assert tuple(PRESETS) == get_args(FIELDS["preset"].annotation)
    for defaults in PRESETS.values():
        assert set(defaults) <= set(FIELDS)
    assert set(ALIASES.values()) <= set(FIELDS)
    assert not set(ALIASES) & set(FIELDS)
    assert all(field.description for field in FIELDS.values())


def test_hash_equality_and_pickle() -> None:
    for options in ({}, {"preset": "reference"}, {"preset": "trtllm", "topr": 8}, {"skip_layers": [0, 1]}):
        config, again = parse(options), parse(options)
        copy = pickle.loads(pickle.dumps(config))
        assert config == again == copy
        assert hash(config) == hash(again) == hash(copy)
        assert copy.describe() == config.describe()
    assert parse({}) == RocketKVConfig()
    assert parse({"topr": 8}) != parse({})
    with pytest.raises(pydantic.ValidationError):
        parse({}).topr = 3  # type: ignore[misc]


def test_module_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_rocketkv.config; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# --- bounds, generated from the fields -------------------------------------------------------------------------------


INTEGERS = [name for name, field in FIELDS.items() if field.annotation in (int, int | None)]
FRACTIONS = {"recent_share": (0.001, 0.999, "above 0 and below 1"), "log_interval_seconds": (0.001, 86400.0, "86400")}
CHOICES = [name for name, field in FIELDS.items() if get_origin(field.annotation) is Literal]

CARRIERS: dict[str, dict[str, Any]] = {
    "prompt_budget": {"policy": "quest"},
    "token_budget": {"policy": "snapkv", "preset": "reference"},
    "max_new_tokens": {"preset": "reference"},
    "sink_tokens": {"policy": "hsa", "topk_tokens": 8192},
    "recent_tokens": {"policy": "hsa", "topk_tokens": 8192},
    "page_size": {"policy": "quest"},
    "recent_share": {"policy": "h2o"},
    "decode_budget": {"policy": "snapkv", "prompt_budget": 2, "window_size": 1, "sink_tokens": 0},
    "decode_interval": {"policy": "h2o"},
    "pinned_tokens": {"policy": "rocketkv_mt"},
    "topk_tokens": {"policy": "quest", "page_size": 1},
}
"""Options beside which another option's bounds alone decide, where the defaults are in the way."""

LEAST = {"decode_budget": 2}
"""Least accepted values above the field's own bound."""


def test_every_field_is_a_number_a_choice_or_the_list_of_layers() -> None:
    assert sorted([*INTEGERS, *FRACTIONS, *CHOICES, "skip_layers"]) == sorted(FIELDS)


@pytest.mark.parametrize("name", INTEGERS)
def test_bounds_of_integers(name: str) -> None:
    bounds = {k: getattr(item, k) for item in FIELDS[name].metadata for k in ("ge", "le") if hasattr(item, k)}
    low, high = bounds["ge"], bounds["le"]
    carrier = CARRIERS.get(name, {})
    for value in (LEAST.get(name, low), high - (name == "kernel_size") * (1 - high % 2)):
        assert getattr(parse({**carrier, name: value}), name) == value
    wrong = [low - 1, high + 1, True, False, str(high), [low], {}, 1.0, 1.5]
    if type(None) in get_args(FIELDS[name].annotation):
        assert getattr(parse({**carrier, name: None}), name) is None
    else:
        wrong.append(None)
    for value in wrong:
        text = refusal({**carrier, name: value})
        assert text.startswith(f"rocketkv: option '{name}' is {value!r}, but must be an integer from {low} to {high}")


@pytest.mark.parametrize("name", FRACTIONS)
def test_bounds_of_fractions(name: str) -> None:
    low, high, words = FRACTIONS[name]
    carrier = CARRIERS.get(name, {})
    for value in (low, high):
        assert getattr(parse({**carrier, name: value}), name) == value
    for value in (0, -1, high + 1, float("nan"), float("inf"), True, "1", None, [low]):
        text = refusal({**carrier, name: value})
        assert text.startswith(f"rocketkv: option '{name}' is {value!r}, but must be a number above 0 and ")
        assert words in text


@pytest.mark.parametrize("value", [-1, [-1], [0, -1], ["0"], [True], [0.0], "0,1", 0, None, {}, [[0]]])
def test_skip_layers_is_a_list_of_integers(value: Any) -> None:
    assert refusal({"skip_layers": value}) == (
        f"rocketkv: option 'skip_layers' is {value!r}, but must be a list of integers from 0"
    )


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    choices = get_args(FIELDS[name].annotation)
    for choice in choices:
        assert getattr(parse({name: choice}), name) == choice
    for value in ("nonsense", choices[0].upper(), 1, None, [choices[0]], {}, True):
        text = refusal({name: value})
        assert text.startswith(f"rocketkv: option '{name}' is {value!r}, but must be ")
        assert all(f"'{choice}'" in text for choice in choices)


# --- rules between options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"policy": "quest", "topk_tokens": 10},
            "rocketkv: option 'topk_tokens' is 10, but a step reads whole pages of page_size 4: use 12",
        ),
        (
            {"preset": "blog", "topk_tokens": 10},
            "rocketkv: option 'topk_tokens' is 10, but a step reads whole pages of page_size 4: use 12",
        ),
        # Nothing is forced into what these read.
        ({"policy": "quest", "topk_tokens": 4}, None),
        ({"preset": "blog", "topk_tokens": 4}, None),
        ({"kernel_size": 64}, "rocketkv: option 'kernel_size' is 64, but must be odd: use 65"),
        ({"page_size": 12}, "rocketkv: option 'page_size' is 12, but must be a power of two: use 8 or 16"),
        (
            {"prompt_budget": 16},
            "rocketkv: option 'prompt_budget' is 16, less than window_size 32, which is always kept: "
            "raise prompt_budget or lower window_size",
        ),
        (
            {"topk_tokens": 102},
            "rocketkv: option 'topk_tokens' is 102, but a step reads whole pages of page_size 4: use 104",
        ),
        (  # 4 sinks: 1 page; 32 newest: 8 pages, and they may begin inside a ninth
            {"topk_tokens": 36},
            "rocketkv: option 'topk_tokens' is 36, but sink_tokens 4 and recent_tokens 32 need 40: "
            "raise topk_tokens to at least 40 or lower those",
        ),
        (
            {"topk_tokens": 32, "page_size": 16, "sink_tokens": 1, "recent_tokens": 0, "policy": "hsa"},
            None,
        ),
        (
            {"topk_tokens": 16, "page_size": 16, "sink_tokens": 1, "recent_tokens": 0, "policy": "hsa"},
            "rocketkv: option 'topk_tokens' is 16, but sink_tokens 1 and recent_tokens 0 need 32: "
            "raise topk_tokens to at least 32 or lower those",
        ),
        ({"topk_tokens": 40}, None),
        ({"topk_tokens": 37, "granularity": "token"}, None),
        (
            {"topk_tokens": 36, "granularity": "token"},
            "rocketkv: option 'topk_tokens' is 36, but sink_tokens 4 and recent_tokens 32 need 37: "
            "raise topk_tokens to at least 37 or lower those",
        ),
        (
            {"preset": "reference", "token_budget": 20, "sink_tokens": 10},
            "rocketkv: option 'token_budget' is 20, which lets a step read 10 tokens, but sink_tokens 10 and "
            "recent_tokens 0 need 11: raise token_budget to at least 22 or lower those",
        ),
        (
            {"preset": "reference", "token_budget": 1022, "granularity": "page"},
            "rocketkv: option 'token_budget' is 1022, which lets a step read 511 tokens, but a step reads "
            "whole pages of page_size 2: use 1024",
        ),
        (
            {"token_budget": 512},
            "rocketkv: option 'token_budget' needs preset 'reference': set it, or give prompt_budget and topk_tokens "
            "instead",
        ),
        (
            {"preset": "trtllm", "token_budget": 512},
            "rocketkv: option 'token_budget' needs preset 'reference': set it, or give prompt_budget and topk_tokens "
            "instead",
        ),
        (
            {"preset": "reference", "token_budget": 512, "prompt_budget": 2048},
            "rocketkv: option 'token_budget' already sets 'prompt_budget': give only one of the two",
        ),
        (
            {"preset": "reference", "token_budget": 512, "topk_tokens": 256},
            "rocketkv: option 'token_budget' already sets 'topk_tokens': give only one of the two",
        ),
        (
            {"preset": "reference", "topk_tokens": 256},
            "rocketkv: option 'topk_tokens' is already set by token_budget 512 of preset 'reference': "
            "give prompt_budget as well or drop 'topk_tokens'",
        ),
    ],
)
def test_rules_between_options(options: dict[str, Any], text: str | None) -> None:
    if text is None:
        parse(options)
    else:
        assert refusal(options) == text
        with pytest.raises(pydantic.ValidationError):  # the rules hold for direct construction as well
            RocketKVConfig(**options)


@pytest.mark.parametrize("options", ["rocketkv", 7, ["policy"], True, 1.5])
def test_options_that_are_no_mapping(options: Any) -> None:
    assert refusal(options) == (
        f"rocketkv: option 'rocketkv' is {options!r}, but must be a JSON object such as {{\"prompt_budget\": 2048}}"
    )


def test_long_values_are_shown_in_part() -> None:
    value = {str(i): {str(j): {str(k): "x" * 50 for k in range(9)} for j in range(9)} for i in range(9)}
    assert len(refusal({"prompt_budget": value})) < 200
    assert refusal({"prompt_budget": "x" * 1000}).startswith("rocketkv: option 'prompt_budget' is 'xxx")


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("promt_budget", "prompt_budget"),
        ("prompt-budget", "prompt_budget"),
        ("token_budgets", "token_budget"),
        ("Window_Size", "window_size"),
        ("windowsize", "window_size"),
        ("kernel", "kernel_size"),
        ("sinks_tokens", "sink_tokens"),
        ("pagesize", "page_size"),
        ("top_r", "topr"),
        ("top_k", "topk"),
        ("KT_DTYPE", "kt_dtype"),
        ("polcy", "policy"),
        ("observation_windows", "observation_window"),
        ("enable_multi_turn", "enable_multiturn"),
        ("log_interval", "log_interval_seconds"),
    ],
)
def test_unknown_names_get_the_nearest_known_one(unknown: str, nearest: str) -> None:
    assert refusal({unknown: 1}) == f"rocketkv: option '{unknown}' is unknown: the nearest known name is '{nearest}'"


@pytest.mark.parametrize("unknown", ["zzz", "", 5, None])
def test_any_unknown_name_gets_some_known_one(unknown: Any) -> None:
    with pytest.raises(ValueError, match="is unknown: the nearest known name is '") as caught:
        parse({unknown: 1})
    assert str(caught.value).split("'")[-2] in {*FIELDS, *ALIASES}
