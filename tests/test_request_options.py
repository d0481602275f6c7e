# SPDX-License-Identifier: Apache-2.0
"""Options of one request: what they make of the server's, and what is refused with which sentence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from vllm_rocketkv import compat
from vllm_rocketkv.compat import worker
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.options import POLICIES
from vllm_rocketkv.request_options import NAMES, POLICIES_WITHIN, Engine, check_request, request_config

ENGINE = Engine(block_size=32, max_model_len=8192, query_heads_per_kv_head=3)
SERVER = RocketKVConfig.parse({"prompt_budget": 512})


def server(**options: Any) -> RocketKVConfig:
    return RocketKVConfig.parse(options)


def config(of: RocketKVConfig = SERVER, engine: Engine = ENGINE, **extra_args: Any) -> RocketKVConfig | None:
    check_request(of, extra_args, engine)
    return request_config(of, extra_args)


def refused_line(extra_args: dict[Any, Any], of: RocketKVConfig = SERVER, engine: Engine = ENGINE) -> str:
    """The one line with which a request is refused."""
    with pytest.raises(ValueError, match=r"\Arocketkv: ") as caught:
        check_request(of, extra_args, engine)
    text = str(caught.value)
    assert type(caught.value) is ValueError, "pydantic's own error is several lines long"
    assert len(text.splitlines()) == 1, text
    assert len(text) < 500
    return text


def refusal(extra_args: dict[Any, Any], of: RocketKVConfig = SERVER, engine: Engine = ENGINE) -> str:
    """The one sentence with which a request is refused."""
    text = refused_line(extra_args, of, engine)
    assert ". " not in text
    assert not text.endswith(".")
    assert ": " in text.removeprefix("rocketkv: ") or "but must be " in text, "no way out: " + text
    return text


# --- what a request gets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra_args", [None, {}, {"other": [1, {"rocketkv": 2}]}, {1: 2}, "rocketkv", ["rocketkv"]])
def test_a_request_without_ours_has_the_servers(extra_args: Any) -> None:
    check_request(SERVER, extra_args, ENGINE)
    assert request_config(SERVER, extra_args) is None


@pytest.mark.parametrize(
    "extra_args",
    [
        {"rocketkv": "on"},
        {"rocketkv_policy": "rocketkv"},
        {"rocketkv_prompt_budget": 512},
        {"rocketkv_topk_tokens": 256, "rocketkv": "on", "rocketkv_prompt_budget": 512},
    ],
)
def test_what_the_server_does_anyway_is_the_servers(extra_args: dict[str, Any]) -> None:
    assert config(**extra_args) is None


@pytest.mark.parametrize(
    ("extra_args", "changed"),
    [
        ({"rocketkv": "off"}, {"policy": "full"}),
        ({"rocketkv_policy": "full"}, {"policy": "full"}),
        ({"rocketkv_policy": "snapkv"}, {"policy": "snapkv"}),
        ({"rocketkv_policy": "rocketkv_mt"}, {"policy": "rocketkv_mt"}),
        ({"rocketkv_policy": "streaming_llm"}, {"policy": "streaming_llm"}),
        ({"rocketkv_prompt_budget": 64}, {"prompt_budget": 64}),
        ({"rocketkv_topk_tokens": 44}, {"topk_tokens": 44}),
        (
            {"rocketkv_policy": "rocketkv_mt", "rocketkv_prompt_budget": 128, "rocketkv_topk_tokens": 96},
            {"policy": "rocketkv_mt", "prompt_budget": 128, "topk_tokens": 96},
        ),
    ],
)
def test_options_replace_the_servers(extra_args: dict[str, Any], changed: dict[str, Any]) -> None:
    own = config(**extra_args, other=["value"])
    assert own == SERVER.model_copy(update=changed)
    assert config(**dict(reversed(extra_args.items()))) is own, "equal requests share one object"


def test_extra_args_are_left_as_they_are() -> None:
    extra_args = {"rocketkv_topk_tokens": 64, "kv_transfer_params": {"a": [1]}, "rocket": True}
    before = repr(extra_args)
    assert config(**extra_args) is not None
    assert repr(extra_args) == before


def test_decode_budget_follows_the_requests_prompt_budget() -> None:
    own = config(rocketkv_policy="streaming_llm", rocketkv_prompt_budget=128)
    assert own is not None
    assert own.decode_budget_for_step == 128


def test_an_explicit_decode_budget_stays() -> None:
    own = config(server(prompt_budget=512, decode_budget=1024), rocketkv_prompt_budget=128)
    assert own is not None
    assert own.decode_budget_for_step == 1024


def test_a_decode_interval_without_budget_is_of_the_servers_policy_alone() -> None:
    of = server(policy="h2o", prompt_budget=512, decode_interval=256)
    snapkv = config(of, rocketkv_policy="snapkv")
    streaming = config(of, rocketkv_policy="streaming_llm")
    assert snapkv is not None
    assert streaming is not None
    assert snapkv.decode_budget_for_step is None
    assert streaming.decode_interval_for(32) == 256


def test_rocketkv_mt_pins_nothing_on_another_server_and_others_nothing_on_its_own() -> None:
    assert config(rocketkv_policy="rocketkv_mt").pinned_tokens == 0  # type: ignore[union-attr]
    of = server(policy="rocketkv_mt", pinned_tokens=4096)
    assert config(of, rocketkv_policy="rocketkv").pinned_tokens == 0  # type: ignore[union-attr]
    assert config(of, rocketkv_topk_tokens=64).pinned_tokens == 4096  # type: ignore[union-attr]


@pytest.mark.parametrize(("of", "policy"), list(itertools.product(POLICIES, POLICIES)))
def test_policies_are_those_that_the_servers_cache_supports(of: str, policy: str) -> None:
    extra_args = {"rocketkv_policy": policy}
    if policy not in POLICIES_WITHIN[of]:
        assert f"a server of policy '{of}' does not offer" in refusal(extra_args, server(policy=of))
        return
    own = config(server(policy=of), **extra_args)
    assert (own is None) == (policy == of)
    assert own is None or own.policy == policy


@pytest.mark.parametrize("of", POLICIES)
def test_what_a_cache_must_hold_is_held(of: str) -> None:
    """A policy within another's needs no larger page: KT only where the server's has it, on the same pages, sums likewise."""
    for policy in POLICIES_WITHIN[of]:
        selection = POLICIES[policy][1]
        assert selection in ("none", POLICIES[of][1])
        assert POLICIES[policy][0] != "h2o" or of == "h2o"
        assert selection == "none" or (POLICIES[policy][0] == "none") == (POLICIES[of][0] == "none")


def test_an_adaptive_server_lets_requests_choose_the_policy() -> None:
    of = server(preset="reference")
    own = config(of, rocketkv_policy="snapkv")
    assert own is not None
    assert own.is_adaptive
    assert own.layout(5000, 32) == of.layout(5000, 32)
    off = config(of, rocketkv="off")
    assert off is not None
    assert not off.is_sparse(5000, 32)


@pytest.mark.parametrize("preset", ["default", "reference", "trtllm", "blog"])
def test_off_is_dense_on_any_server(preset: str) -> None:
    own = config(server(preset=preset), rocketkv="off")
    assert own is not None
    assert not own.evicts
    assert not own.selects


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_args", "sentence"),
    [
        ({"rocketkv": "OFF"}, "option 'rocketkv' is 'OFF', but must be 'off' or 'on'"),
        ({"rocketkv": False}, "option 'rocketkv' is False, but must be 'off' or 'on'"),
        ({"rocketkv": 0}, "option 'rocketkv' is 0, but must be 'off' or 'on'"),
        ({"rocketkv": None}, "option 'rocketkv' is None, but must be 'off' or 'on'"),
        ({"rocketkv": ["off"]}, "option 'rocketkv' is ['off'], but must be 'off' or 'on'"),
        (
            {"rocketkv": "off", "rocketkv_topk_tokens": 64},
            "option 'rocketkv_topk_tokens' means nothing beside rocketkv 'off': drop one of the two",
        ),
        (
            {"rocketkv_policy": "rocket"},
            "option 'rocketkv_policy' is 'rocket', but must be 'full', 'streaming_llm', 'snapkv', 'rocketkv' or 'rocketkv_mt'",
        ),
        ({"rocketkv_policy": ["full"]}, "option 'rocketkv_policy' is ['full'], but must be 'full', "),
        ({"rocketkv_policy": 1}, "option 'rocketkv_policy' is 1, but must be 'full', "),
        (
            {"rocketkv_policy": "quest"},
            "option 'rocketkv_policy' is 'quest', which a server of policy 'rocketkv' does not offer: "
            "use 'full', 'streaming_llm', 'snapkv', 'rocketkv' or 'rocketkv_mt', or start vLLM with policy 'quest'",
        ),
        (
            {"rocketkv_prompt_budget": "256"},
            "option 'rocketkv_prompt_budget' is '256', but must be an integer from 1 to 512, the server's",
        ),
        ({"rocketkv_prompt_budget": 513}, "is 513, but must be an integer from 1 to 512, the server's"),
        ({"rocketkv_prompt_budget": 0}, "is 0, but must be an integer from 1 to 512, the server's"),
        ({"rocketkv_prompt_budget": 256.0}, "is 256.0, but must be an integer from 1 to 512, the server's"),
        ({"rocketkv_prompt_budget": True}, "is True, but must be an integer from 1 to 512, the server's"),
        (
            {"rocketkv_prompt_budget": 31},
            "option 'rocketkv_prompt_budget' is 31, less than window_size 32, which is always kept: "
            "raise rocketkv_prompt_budget or lower window_size",
        ),
        (
            {"rocketkv_prompt_budget": 63},
            "rocketkv_prompt_budget 63 is less than window_size 32 + block size 32: raise rocketkv_prompt_budget to at least 64",
        ),
        (
            {"rocketkv_topk_tokens": 30},
            "option 'rocketkv_topk_tokens' is 30, but a step reads whole pages of page_size 4: use 32",
        ),
        ({"rocketkv_topk_tokens": 36}, "raise rocketkv_topk_tokens to at least 40"),
        ({"rocketkv_topk_tokens": 1 << 40}, "but must be an integer from 1 to 16777216"),
        ({"rocketkv_topk_tokens": float("nan")}, "is nan, but must be an integer from 1 to 16777216"),
        ({"rocketkv_topk_tokens": [[[[[[[[1]]]]]]]]}, "but must be an integer from 1 to 16777216"),
        (
            {"rocketkv_policy": "snapkv", "rocketkv_topk_tokens": 64},
            "option 'rocketkv_topk_tokens' means nothing to policy 'snapkv': "
            "drop it or choose rocketkv_policy 'rocketkv' or 'rocketkv_mt'",
        ),
        (
            {"rocketkv_policy": "full", "rocketkv_prompt_budget": 64},
            "option 'rocketkv_prompt_budget' means nothing to policy 'full': drop it or choose rocketkv_policy 'streaming_llm', ",
        ),
        (
            {"rocketkv_topk": 64},
            "option 'rocketkv_topk' is unknown: the nearest known name is 'rocketkv_topk_tokens'",
        ),
        ({"RocketKV": "off"}, "option 'RocketKV' is unknown: the nearest known name is 'rocketkv'"),
        ({"rocketkv-policy": "full"}, "the nearest known name is 'rocketkv_policy'"),
        ({"rocketkv_\n budget": 1}, "option 'rocketkv_ budget' is unknown"),
    ],
)
def test_refused(extra_args: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(extra_args)


@pytest.mark.parametrize(
    ("of", "extra_args", "sentence"),
    [
        (
            {"policy": "full"},
            {"rocketkv_topk_tokens": 64},
            "option 'rocketkv_topk_tokens' means nothing to policy 'full': drop it",
        ),
        (
            {"policy": "snapkv"},
            {"rocketkv_topk_tokens": 64},
            "option 'rocketkv_topk_tokens' means nothing to policy 'snapkv': drop it",
        ),
        (
            {"preset": "reference"},
            {"rocketkv_prompt_budget": 512},
            "option 'rocketkv_prompt_budget' cannot be given to a server whose budgets follow from token_budget 512: "
            "drop it or start vLLM with prompt_budget and topk_tokens instead",
        ),
        ({"preset": "reference"}, {"rocketkv_topk_tokens": 64}, "option 'rocketkv_topk_tokens' cannot be given to a"),
        ({"preset": "reference"}, {"rocketkv_policy": "streaming_llm"}, "needs a fixed prompt_budget"),
        (
            {"preset": "trtllm"},
            {"rocketkv_policy": "streaming_llm"},
            "option 'rocketkv_policy' is 'streaming_llm', which does not fit this server's options (option 'sink_tokens' is 0, ",
        ),
        (
            {"policy": "h2o", "prompt_budget": 40},
            {"rocketkv_policy": "snapkv"},
            "option 'rocketkv_policy' is 'snapkv', which does not fit this server's options (prompt_budget 40 is less than ",
        ),
        (
            {"policy": "h2o", "prompt_budget": 64},
            {"rocketkv_policy": "snapkv", "rocketkv_prompt_budget": 40},
            "rocketkv_prompt_budget 40 is less than window_size 32 + block size 32: raise rocketkv_prompt_budget to at least 64",
        ),
        (
            {"prompt_budget": 8192},
            {"rocketkv_prompt_budget": 512},
            "option 'rocketkv_prompt_budget' is 512, which takes 16 private blocks, but this server sets 0 aside for each "
            "request: drop it or start vLLM with a smaller prompt_budget",
        ),
    ],
)
def test_refused_by_this_server(of: dict[str, Any], extra_args: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(extra_args, server(**of))


def test_parked_queries_must_fit_the_requests_own_blocks() -> None:
    engine = Engine(block_size=32, max_model_len=8192, query_heads_per_kv_head=16)
    assert config(engine=engine, rocketkv_prompt_budget=256) is not None
    assert "raise rocketkv_prompt_budget to at least 256" in refusal({"rocketkv_prompt_budget": 224}, engine=engine)


def test_parking_blocks_that_the_server_does_not_set_aside() -> None:
    """Policy h2o parks nothing; a request under snapkv on its server would, once decoded tokens are evicted."""
    of = server(policy="h2o", prompt_budget=512, decode_budget=512)
    assert config(of, rocketkv_policy="snapkv") is not None
    engine = Engine(block_size=32, max_model_len=8192, query_heads_per_kv_head=16)
    assert "with the private ones, but this server sets 20 aside" in refusal({"rocketkv_policy": "snapkv"}, of, engine)


def test_decoded_tokens_are_not_evicted_beside_speculative_decoding() -> None:
    engine = Engine(block_size=32, max_model_len=8192, query_heads_per_kv_head=3, speculates=True)
    assert config(engine=engine, rocketkv_policy="snapkv") is not None
    assert "start vLLM without --speculative-config" in refusal({"rocketkv_policy": "streaming_llm"}, engine=engine)


@pytest.mark.parametrize("extra_args", [{"rocketkv": "off"}, {"rocketkv_topk_tokens": "x"}, {"rocketkv_unknown": 1}])
def test_gpus_take_no_options_yet(extra_args: dict[str, Any]) -> None:
    engine = Engine(block_size=64, max_model_len=8192, query_heads_per_kv_head=3, is_gpu=True)
    assert "is not supported on GPUs yet: drop it" in refusal(extra_args, engine=engine)
    assert config(engine=engine, other=1) is None


# --- anything at all ---------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=20,
)
VALUES = JSON | st.sampled_from([*POLICIES, "off", "on"]) | st.integers(0, 600)
KEYS = st.sampled_from(NAMES) | st.text(max_size=200).map(lambda text: f"rocketkv{text}") | st.text(max_size=9)


@settings(max_examples=400)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from(list(POLICIES)))
def test_hostile_requests_get_one_sentence_or_a_config_that_fits(extra_args: dict[str, Any], policy: str) -> None:
    of = server(policy=policy) if policy == "full" else server(policy=policy, prompt_budget=512)
    try:
        own = config(of, **extra_args)
    except ValueError:
        refused_line(extra_args, of)  # it shows what the user wrote, full stops and all
        return
    if own is not None:
        assert own.prompt_budget <= of.prompt_budget
        assert own.max_prompt_budget(8192, 32) <= of.max_prompt_budget(8192, 32)
        own.check_block_size(32)


def test_large_names_and_values_are_cheap() -> None:
    refusal({f"rocketkv_{'x' * 10_000_000}": 1})
    refusal({"rocketkv_policy": "x" * 10_000_000})
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    refusal({"rocketkv_topk_tokens": deep})


# --- on their way ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """What schedulers and workers are given of a request."""

    req_id: str
    extra_args: dict[str, Any] | None = None

    @property
    def request_id(self) -> str:
        return self.req_id

    @property
    def num_prompt_tokens(self) -> int:
        return 3000

    @property
    def sampling_params(self) -> Any:
        return SamplingParams(extra_args=self.extra_args) if self.req_id != "pooling" else None


def scheduled(*new: Request, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))


@pytest.fixture
def runner() -> Any:
    return SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"rocketkv": {"prompt_budget": 512}}))


OWN = {"rocketkv_prompt_budget": 256}


def test_workers_keep_options_until_a_request_has_finished(runner: Any) -> None:
    step, of = worker._note_options, worker._configs_of
    assert of(runner, ["a"]) is None
    step(
        runner,
        scheduled(Request("a"), Request("pooling"), Request("b", {"other": 1}), Request("c", {"rocketkv": "on"})),
    )
    assert of(runner, ["a", "b"]) is None, "nobody has options of its own"
    step(runner, scheduled(Request("d", OWN)))
    assert of(runner, ["c", "d", "a"]) == [None, request_config(SERVER, OWN), None]
    step(runner, scheduled(finished=("a",)))
    assert of(runner, ["d"]) == [request_config(SERVER, OWN)]
    step(runner, scheduled(Request("d"), finished=("d",)))
    assert of(runner, ["d"]) is None, "an id may have finished and come again"
    step(runner, scheduled(Request("d", OWN)))
    step(runner, scheduled(Request("e", OWN | {"rocketkv_topk_tokens": 64}), finished=("d",)))
    assert of(runner, ["d", "e"]) == [None, request_config(SERVER, OWN | {"rocketkv_topk_tokens": 64})]


@pytest.mark.parametrize("batch", [None, "prompt_lens of runner V2"])
def test_builders_are_given_the_configs_of_their_batch(monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    own = request_config(SERVER, OWN)
    common: Any = SimpleNamespace(num_reqs=4, rswa_prefix_lens=batch)
    dummy: Any = SimpleNamespace(num_reqs=4, rswa_prefix_lens="others")
    assert compat.request_configs(common) is None
    monkeypatch.setattr(compat, "_batch_configs", (batch, [None, own, None]))
    assert compat.request_configs(common) == [None, own, None, None], "padded rows have none"
    assert compat.request_configs(SimpleNamespace(num_reqs=2, rswa_prefix_lens=batch)) == [None, own]  # type: ignore[arg-type]
    assert compat.request_configs(dummy) is None, "a dummy run after that batch"


@pytest.mark.parametrize("looked_up", [False, True], ids=["no prefix lookup", "prefix lookup"])
@pytest.mark.parametrize("request_", [Request("a", OWN), Request("b"), Request("pooling")], ids=lambda r: r.req_id)
def test_block_managers_are_told_of_every_request(
    monkeypatch: pytest.MonkeyPatch, looked_up: bool, request_: Request
) -> None:
    """Also without prefix caching, and of those that skip the lookup."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_rocketkv.cache.manager import RocketKVManager

    compat.activate_scheduler_hooks()
    admitted = []
    monkeypatch.setattr(RocketKVManager, "admit", lambda self, *args: admitted.append(args))
    manager = RocketKVManager.__new__(RocketKVManager)
    manager.config = SERVER
    coordinator = SimpleNamespace(single_type_managers=[manager], find_longest_cache_hit=lambda *args: ((), 0, 0))
    owner: Any = SimpleNamespace(
        coordinator=coordinator,
        prefix_cache_lookup_enabled=lambda request: looked_up,
        empty_kv_cache_blocks=(),
        enable_kv_cache_events=False,
        create_kv_cache_blocks=lambda blocks: blocks,
    )
    request_.num_tokens, request_.block_hashes = 3000, []  # type: ignore[attr-defined]
    assert KVCacheManager.get_computed_blocks(owner, request_) == ((), 0, 0)
    assert admitted == [(request_.req_id, 3000, request_config(SERVER, request_.extra_args))]
