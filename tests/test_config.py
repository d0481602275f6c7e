# SPDX-License-Identifier: Apache-2.0
"""Options: defaults, presets, bounds and every refusal."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest

from tests.refusals import refusal
from vllm_rocketkv.config import ALIASES, PLANNED, PRESETS, RocketKVConfig

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
    "topk_tokens": 256,
    "topr": None,
    "kt_dtype": "auto",
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, DEFAULT),
        ({}, DEFAULT),
        ({"preset": "default"}, DEFAULT),
        ({"preset": "reference"}, REFERENCE),
        ({"preset": "trtllm"}, TRTLLM),
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
        # What the policy does not use is kept, not refused.
        ({"policy": "snapkv", "topk_tokens": 7}, {**DEFAULT, "policy": "snapkv", "topk_tokens": 7}),
        ({"policy": "hsa", "prompt_budget": 16}, {**DEFAULT, "policy": "hsa", "prompt_budget": 16}),
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


@pytest.mark.parametrize(
    ("policy", "evicts", "selects"),
    [("full", False, False), ("snapkv", True, False), ("hsa", False, True), ("rocketkv", True, True)],
)
def test_policies(policy: str, evicts: bool, selects: bool) -> None:
    config = parse({"policy": policy})
    assert (config.evicts, config.selects) == (evicts, selects)
    assert config.layout(5000, 16).is_evictable is evicts
    assert config.layout(2048, 16).is_evictable is False
    assert config.is_sparse(2049, 16) is (policy != "full")
    assert config.is_sparse(2048, 16) is False
    assert config.max_private_blocks(8192, 48) == (math.ceil(2048 / 48) if evicts else 0)
    assert [config.num_selected_pages(n) for n in (0, 1, 4, 5, 255, 256, 99999)] == (
        [0, 1, 1, 2, 64, 64, 64] if selects else [0] * 7
    )


def test_hash_equality_and_pickle() -> None:
    for options in ({}, {"preset": "reference"}, {"preset": "trtllm", "topr": 8}):
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


def bounds(name: str) -> tuple[float, float]:
    found = {k: getattr(m, k) for m in FIELDS[name].metadata for k in ("gt", "ge", "le") if hasattr(m, k)}
    return found.get("ge", found.get("gt")), found["le"]


NUMBERS = [name for name, field in FIELDS.items() if get_origin(field.annotation) is not Literal]
CHOICES = [name for name, field in FIELDS.items() if get_origin(field.annotation) is Literal]


def carrier(name: str) -> dict[str, Any]:
    """A mapping in which the option alone decides: policy full skips the rules between options."""
    return {"policy": "full", "preset": "reference" if name == "token_budget" else "default"}


@pytest.mark.parametrize("name", NUMBERS)
def test_numeric_bounds(name: str) -> None:
    low, high = bounds(name)
    is_float = FIELDS[name].annotation is float
    accepted = [low, high] if not is_float else [0.001, high]
    for value in accepted:
        assert getattr(parse({**carrier(name), name: value}), name) == value
    beyond = [low - 1, high + 1] if not is_float else [low, high + 1, float("nan"), float("inf")]
    wrong = [True, False, str(high), [low], {}] + ([] if is_float else [1.0, 1.5])
    if type(None) not in get_args(FIELDS[name].annotation):
        wrong.append(None)
    for value in [*beyond, *wrong]:
        text = refusal({**carrier(name), name: value})
        assert text.startswith(f"rocketkv: option '{name}' is ")
        assert str(low) in text
        assert str(high) in text
    assert f"is {high + 1}, but must be" in refusal({**carrier(name), name: high + 1})
    assert f"is '{high}', but must be" in refusal({**carrier(name), name: str(high)})


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    choices = get_args(FIELDS[name].annotation)
    for choice in choices:
        assert getattr(parse({name: choice}), name) == choice
    for value in ("nonsense", choices[0].upper(), 1, None, [choices[0]], {}, True):
        text = refusal({name: value})
        assert text.startswith(f"rocketkv: option '{name}' is {value!r}, but must be ")
        assert all(f"'{choice}'" in text for choice in choices)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in PLANNED.items() for value in values])
def test_planned_values_say_so_and_name_the_available(name: str, value: str) -> None:
    text = refusal({name: value})
    assert text.startswith(f"rocketkv: option '{name}' is '{value}', which is not available yet: choose ")
    assert all(f"'{choice}'" in text for choice in get_args(FIELDS[name].annotation))


# --- rules between options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel_size": 64}, "rocketkv: option 'kernel_size' is 64, but must be odd: use 65"),
        ({"page_size": 12}, "rocketkv: option 'page_size' is 12, but must be a power of two: use 8 or 16"),
        (
            {"prompt_budget": 16},
            "rocketkv: option 'prompt_budget' is 16, less than window_size 32, which is always kept: "
            "raise prompt_budget or lower window_size",
        ),
        (
            {"topk_tokens": 102},
            "rocketkv: option 'topk_tokens' is 102, but with granularity 'page' a step reads a multiple of "
            "page_size 4: use 104",
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
            "rocketkv: option 'token_budget' is 1022, which lets a step read 511 tokens, but with granularity 'page' "
            "a step reads a multiple of page_size 2: use 1024",
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
