# SPDX-License-Identifier: Apache-2.0
"""Options: defaults, presets, aliases, every refusal, and the numbers derived from them."""

from __future__ import annotations

import logging
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rocketkv.config import ALIASES, PLANNED, PRESETS, RocketKVConfig
from vllm_rocketkv.layout import adaptive_split

parse = RocketKVConfig.parse
FIELDS = RocketKVConfig.model_fields


def refusal(options: Any) -> str:
    with pytest.raises(ValueError, match=r"\Arocketkv: option '[^']+' ") as caught:
        parse(options)
    text = str(caught.value)
    assert type(caught.value) is ValueError, "pydantic's own error is several lines long"
    assert "\n" not in text, text
    assert not text.endswith(".")
    assert ". " not in text
    return text


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Messages of our logger, whatever vLLM did to its handlers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.rocketkv.config")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


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


# --- aliases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "canonical", "logged"),
    [
        (
            {"algorithm": "rocket", "prompt_budget": 1024, "topk": 32, "kt_cache_dtype": "float8_e5m2"},
            {"policy": "rocketkv", "prompt_budget": 1024, "topk_tokens": 128, "kt_dtype": "float8_e5m2"},
            "algorithm -> policy=rocketkv, topk -> topk_tokens=128, kt_cache_dtype -> kt_dtype=float8_e5m2",
        ),
        ({"topk": 64, "page_size": 8}, {"topk_tokens": 512, "page_size": 8}, "topk -> topk_tokens=512"),
        (
            {"topk": 64, "kernel_downsample": 2},
            {"topk_tokens": 128, "page_size": 2},
            "topk -> topk_tokens=128, kernel_downsample -> page_size=2",
        ),
        (
            {"topk": 64, "preset": "reference", "prompt_budget": 512},
            {"topk_tokens": 128, "preset": "reference", "prompt_budget": 512},
            "topk -> topk_tokens=128",
        ),
        (
            {
                "sparse_attention_type": "RocketKV",
                "prompt_budget": 1024,
                "observation_window": 16,
                "sink_token_size": 16,
                "top_k_tokens": 128,
                "kernel_downsample": 4,
                "enable_multiturn": False,
            },
            {"prompt_budget": 1024, "window_size": 16, "sink_tokens": 16, "topk_tokens": 128, "page_size": 4},
            "sparse_attention_type -> policy=rocketkv, observation_window -> window_size=16, "
            "sink_token_size -> sink_tokens=16, top_k_tokens -> topk_tokens=128, kernel_downsample -> page_size=4",
        ),
    ],
)
def test_aliases_mean_their_option_and_are_logged_once(
    options: dict[str, Any], canonical: dict[str, Any], logged: str, log_lines: list[str]
) -> None:
    assert parse(options) == parse(canonical)
    assert log_lines == [f"rocketkv: options accepted under another system's name: {logged}"]


def test_own_names_log_nothing(log_lines: list[str]) -> None:
    parse({"window_size": 16, "enable_multiturn": False})
    assert log_lines == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"observation_window": 32, "window_size": 32}, "'observation_window' means the same as 'window_size'"),
        ({"topk": 64, "topk_tokens": 256}, "'topk' means the same as 'topk_tokens'"),
        ({"topk": 64, "top_k_tokens": 256}, "'top_k_tokens' means the same as 'topk'"),
        ({"algorithm": "rocket", "policy": "rocketkv"}, "'algorithm' means the same as 'policy'"),
        ({"kt_cache_dtype": "bfloat16", "kt_dtype": "auto"}, "'kt_cache_dtype' means the same as 'kt_dtype'"),
        ({"sink_token_size": 1, "sink_tokens": 1}, "'sink_token_size' means the same as 'sink_tokens'"),
        ({"kernel_downsample": 4, "page_size": 4}, "'kernel_downsample' means the same as 'page_size'"),
    ],
)
def test_an_option_given_twice(options: dict[str, Any], text: str) -> None:
    assert refusal(options) == f"rocketkv: option {text}: give only one of the two"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "dsa"}, "'algorithm' is 'dsa', but must be 'rocket': use 'policy' to choose another method"),
        (
            {"sparse_attention_type": "rocketkv"},
            "'sparse_attention_type' is 'rocketkv', but must be 'RocketKV': use 'policy' to choose another method",
        ),
        (
            {"enable_multiturn": True},
            "'enable_multiturn' needs policy 'rocketkv_mt', which is not available yet: set it to false or drop it",
        ),
        ({"enable_multiturn": 0}, "'enable_multiturn' is 0, but must be true or false"),
        ({"topk": 0}, "'topk' is 0, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": True}, "'topk' is True, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": 4194305}, "'topk' is 4194305, but must be an integer from 1 to 4194304, in KT pages"),
        ({"topk": 64, "page_size": "4"}, "'page_size' is '4', but must be an integer from 1 to 256"),
        ({"topk": 64, "preset": []}, "'preset' is [], but must be 'default', 'reference' or 'trtllm'"),
        ({"observation_window": "32"}, "'observation_window' is '32', but must be an integer from 1 to 1024"),
        ({"kt_cache_dtype": "fp8"}, "'kt_cache_dtype' is 'fp8', but must be 'auto', 'bfloat16' or 'float8_e5m2'"),
    ],
)
def test_refused_aliases_are_named_as_written(options: dict[str, Any], text: str) -> None:
    assert refusal(options) == f"rocketkv: option {text}"


# --- start-up checks -------------------------------------------------------------------------------------------------


def test_block_size() -> None:
    parse({"prompt_budget": 160}).check_block_size(128)
    parse({"policy": "hsa", "prompt_budget": 64}).check_block_size(128)
    parse({"preset": "reference", "token_budget": 64}).check_block_size(128)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse({"prompt_budget": 159}).check_block_size(128)
    assert str(caught.value) == (
        "rocketkv: prompt_budget 159 is less than window_size 32 + block size 128: "
        "raise prompt_budget to at least 160 or start vLLM with a smaller --block-size"
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse({"page_size": 32}).check_block_size(48)
    assert str(caught.value) == (
        "rocketkv: page_size 32 does not divide the block size 48: "
        "lower page_size to at most 16 or start vLLM with a --block-size that is a multiple of it"
    )


@pytest.mark.parametrize("block_size", [16, 64, 100])
@pytest.mark.parametrize("group", [1, 3, 8, 48])
@pytest.mark.parametrize("window", [1, 32, 64])
def test_window_fits(block_size: int, group: int, window: int) -> None:
    """The check says exactly whether the fewest private blocks, over every N, can hold the window's queries."""
    for budget in range(window + block_size, window + 3 * block_size, 7):
        config = parse({"prompt_budget": budget, "window_size": window})
        fewest = min(config.layout(budget + k, block_size).num_private_blocks for k in range(1, block_size + 1))
        if window - 1 <= fewest * (2 * block_size // group):
            config.check_window_fits(block_size, group)
            continue
        with pytest.raises(ValueError, match=rf"\Arocketkv: window_size {window} with {group} query heads") as caught:
            config.check_window_fits(block_size, group)
        if group > 2 * block_size:
            assert "--block-size" in str(caught.value)
            continue
        least = int(str(caught.value).split("at least ")[1].split(" ")[0])
        parse({"prompt_budget": least, "window_size": window}).check_window_fits(block_size, group)
        with pytest.raises(ValueError, match="window_size"):
            parse({"prompt_budget": max(window, least - 1), "window_size": window}).check_window_fits(block_size, group)


def test_window_fits_only_matters_when_evicting() -> None:
    parse({"policy": "hsa", "window_size": 1024, "prompt_budget": 1024}).check_window_fits(16, 64)


def test_window_fits_adaptive_names_token_budget() -> None:
    options = {"preset": "reference", "token_budget": 128, "max_new_tokens": 64}
    with pytest.raises(ValueError, match="raise token_budget to at least 320 or lower window_size") as caught:
        parse(options).check_window_fits(16, 16)
    assert "\n" not in str(caught.value)
    parse({**options, "token_budget": 320}).check_window_fits(16, 16)


# --- adaptive budgets ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(2, 96),
    max_new=st.integers(1, 200),
    window=st.integers(1, 16),
    block_size=st.sampled_from([2, 8, 16, 64]),
    max_model_len=st.integers(1, 4000),
)
def test_adaptive_bounds_hold_for_every_prompt(
    t: int, max_new: int, window: int, block_size: int, max_model_len: int
) -> None:
    """Small budgets: c passes the peak (L = 6.7), the kink (L = 10) and climbs again within reach of brute force."""
    config = parse(
        {"preset": "reference", "policy": "snapkv", "token_budget": t, "max_new_tokens": max_new, "window_size": window}
    )
    budgets, blocks = [], []
    for N in range(1, max_model_len + 1):
        budget = config.prompt_budget_for(N, block_size)
        assert budget == max(adaptive_split(N, t, max_new).prompt_budget, window + block_size)
        layout = config.layout(N, block_size)
        assert layout.prompt_budget == budget
        assert config.is_sparse(N, block_size) is layout.is_evictable is (budget < N)
        budgets.append(budget)
        if layout.is_evictable:
            blocks.append(layout.num_private_blocks)
            assert budget >= config.min_prompt_budget(block_size)
            assert layout.num_private_blocks >= config.min_prompt_budget(block_size) // block_size
    assert config.max_prompt_budget(max_model_len, block_size) - max(budgets) in (0, 1)
    bound = config.max_private_blocks(max_model_len, block_size)
    if blocks:
        assert max(blocks) <= bound


def test_adaptive_bound_beyond_the_peak_and_for_a_million_tokens() -> None:
    config = parse({"preset": "reference", "token_budget": 512})
    peak = 512 * 2 ** (20 / 3) - 256  # N = 51763: capacity 512 * 2**(8/3) = 3250.99
    assert config.prompt_budget_for(int(peak), 16) == 3250 - 256
    assert config.max_private_blocks(1 << 20, 16) == math.ceil((3250 - 256 + 1) / 16)
    assert config.prompt_budget_for(1 << 20, 16) < 3250 - 256
    sampled = max(config.layout(N, 16).num_private_blocks for N in range(3000, 1 << 20, 1009))
    assert config.max_private_blocks(1 << 20, 16) - 1 <= sampled <= config.max_private_blocks(1 << 20, 16)


def test_adaptive_selection() -> None:
    config = parse({"preset": "reference", "token_budget": 512})  # N=3840: c2 = 1858/512
    assert config.topk_for_step == 256
    assert config.topr_for(3840, 64) == 35
    assert config.topr_for(100, 64) == 64
    assert parse({"preset": "reference", "page_size": 4}).topr_for(3840, 64) == 64  # int(64 * 4 / 3.63) = 70, capped
    assert parse({"preset": "reference", "topr": 10}).topr_for(3840, 64) == 10
    assert parse({"topr": 96}).topr_for(3840, 64) == 64
    assert parse({}).topr_for(3840, 64) == 64
    assert config.num_selected_pages(10_000) == 128


# --- what the user is told -------------------------------------------------------------------------------------------


def test_describe_is_one_line_of_what_the_policy_uses() -> None:
    assert parse({"policy": "full"}).describe() == "policy full, preset default"
    assert parse({"policy": "snapkv"}).describe() == (
        "policy snapkv, preset default, prompt_budget 2048, window_size 32, kernel_size 63, window_softmax all, "
        "sink_tokens 4"
    )
    assert parse({}).describe() == (
        "policy rocketkv, preset default, prompt_budget 2048, window_size 32, kernel_size 63, window_softmax all, "
        "sink_tokens 4, topk_tokens 256, recent_tokens 32, page_size 4, granularity page, topr all, "
        "temperature adaptive, kt_dtype auto"
    )
    adaptive = parse({"preset": "reference"}).describe()
    assert "token_budget 512, max_new_tokens 256" in adaptive
    assert "topr by token_budget" in adaptive
    assert "prompt_budget" not in adaptive


def test_savings() -> None:
    # 7000 tokens in blocks of 16: n = 438, s = ceil(4952 / 16) = 310, e = 128; 310 * 16 KiB = 4.84 MiB
    assert parse({}).savings(7000, 16, 16384) == (
        "a prompt of 7000 tokens keeps 128 of 438 blocks and frees 310 (4.8 MiB)"
    )
    assert parse({"policy": "hsa"}).savings(7000, 16, 16384) == "a prompt of 7000 tokens keeps all of its 438 blocks"
    assert parse({}).savings(2048, 16, 16384) == "a prompt of 2048 tokens keeps all of its 128 blocks"
