# SPDX-License-Identifier: Apache-2.0
"""The name, the options and the refusals, as a user meets them before any engine starts."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.random_models import save_llama, save_mistral
from vllm_rocketkv import compat, plugin
from vllm_rocketkv.support import _refused_policies, config_of

OPTIONS = {"prompt_budget": 256, "window_size": 16, "topk_tokens": 64, "recent_tokens": 8}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    plugin.register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


def configure(model: str, rocketkv: Any = None, **options: Any) -> Any:
    """The ``VllmConfig`` that ``LLM(...)`` and ``vllm serve`` build before anything else starts."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"attention_backend": "rocketkv", "skip_tokenizer_init": True, "dtype": "float32"} | options
    if rocketkv is not None:
        options["additional_config"] = {"rocketkv": rocketkv}
    return EngineArgs(model=model, **options).create_engine_config()


# --- the name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rocketkv", "ROCKETKV", "CUSTOM", "custom"])
def test_every_name_selects_the_backend(model: str, name: str) -> None:
    from vllm.config import AttentionConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--attention-backend", name])
    for options in (
        {"attention_backend": name},
        {"attention_backend": parsed.attention_backend},
        {"attention_backend": None, "attention_config": AttentionConfig(backend=name)},
        {"attention_backend": None, "attention_config": {"backend": name}},
    ):
        assert configure(model, OPTIONS, **options).attention_config.backend.name == compat.BACKEND_NAME


def _name_of(pickled: bytes) -> tuple[str, str]:
    backend = pickle.loads(pickled)
    return backend.name, backend.get_path()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_name_survives_a_new_process(model: str, method: str) -> None:
    """A spawned engine core unpickles its configuration before it loads plugins."""
    pickled = pickle.dumps(configure(model, OPTIONS).attention_config.backend)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_name_of, (pickled,)) == (compat.BACKEND_NAME, compat.BACKEND_PATH)


def test_registering_again_changes_nothing(model: str) -> None:
    from vllm.platforms import current_platform

    before = current_platform.check_and_update_config
    plugin.register()
    assert current_platform.check_and_update_config is before
    assert configure(model, OPTIONS).attention_config.backend.name == compat.BACKEND_NAME


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=8 << 20, dtype="float32",
              skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    prompts = [{"prompt_token_ids": [(7 * i + s) % 997 for i in range(n)]} for s, n in ((1, 400), (2, 33))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False))
    state = lambda worker: [(k, type(v.impl).__name__, str(v.kv_cache.shape), v.kv_cache.stride())
                            for k, v in worker.vllm_config.compilation_config.static_forward_context.items()]
    print("RESULT", json.dumps([[o.outputs[0].token_ids for o in outputs], llm.collective_rpc(state)]))
"""


def run_script(model: str, options: dict[str, Any], **environment: str) -> Any:
    environment = os.environ | environment | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [sys.executable, "-c", SCRIPT, model, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


@pytest.mark.engine
def test_installed_but_not_selected_changes_nothing(model: str) -> None:
    """Same tokens, same layers, same cache tensors with the plugin loaded as with vLLM told to load none."""
    assert run_script(model, {}) == run_script(model, {}, VLLM_PLUGINS="")


# --- the refusals ------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt_bugdet": 512}, {}, "prompt_budget"),
    ({"page_size": 3}, {}, "page_size"),
    ({"prompt_budget": 16}, {}, "prompt_budget"),
    ({"prompt_budget": 128}, {}, "--block-size"),
    ({"page_size": 64, "topk_tokens": 256}, {"block_size": 32}, "page_size"),
    ({"policy": "quests"}, {}, "policy"),
    ({"policy": "quest", "window_size": 32}, {}, "window_size"),
    ({"policy": "h2o", "preset": "trtllm"}, {}, "preset"),
    ({"policy": "streaming_llm", "prompt_budget": 128}, {}, "--block-size"),
    (OPTIONS | {"decode_budget": 256, "decode_interval": 64}, {}, "decode_interval"),
    (OPTIONS | {"policy": "rocketkv_mt", "pinned_tokens": 64}, {"enable_prefix_caching": False}, "pinned_tokens"),
    (OPTIONS | {"policy": "rocketkv_mt", "pinned_tokens": 64, "skip_layers": [0]}, {}, "skip_layers"),
    (OPTIONS, {"block_size": 48}, "--block-size"),
    ({"sink_tokens": 4096, "policy": "snapkv"}, {}, "sink_tokens"),
    (OPTIONS | {"kt_dtype": "float8_e4m3fn"}, {}, "kt_dtype"),
    (OPTIONS, {"kv_cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype"),
    (OPTIONS, {"kv_cache_dtype": "fp8_inc"}, "--kv-cache-dtype"),
    (OPTIONS, {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype"),
    (OPTIONS, {"kv_cache_dtype": "float16", "dtype": "bfloat16"}, "--kv-cache-dtype"),
    (OPTIONS, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
    ({"prompt_budget": 288, "window_size": 160}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    (OPTIONS, {"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    (OPTIONS, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    (OPTIONS, {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
    (
        OPTIONS,
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config",
    ),
    (OPTIONS, {"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    (OPTIONS, {"runner": "pooling", "convert": "embed"}, "pooling"),
]


@pytest.mark.parametrize(("rocketkv", "options", "names"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))])
def test_refused_in_one_sentence_that_names_the_option(
    model: str, rocketkv: dict[str, Any], options: dict[str, Any], names: str
) -> None:
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(model, rocketkv, **options)
    sentence = _sentence(refusal.value)
    assert names in sentence
    assert "\n" not in sentence
    assert ". " not in sentence.removesuffix(".")


def _sentence(error: ValueError) -> str:
    """The one line that is ours, out of pydantic's report on a ``VllmConfig``."""
    lines = [line for line in str(error).splitlines() if "rocketkv: " in line]
    assert len(lines) == 1, str(error)
    text = lines[0][lines[0].index("rocketkv: ") :]
    return text.split(" [type=")[0]


@pytest.mark.parametrize("misplaced", [{"prompt_budget": 512}, {"RocketKV": {}}, {"rocket_kv": {"policy": "full"}}])
def test_options_in_the_wrong_place_are_refused(model: str, misplaced: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(model, additional_config=misplaced)
    assert "--additional-config" in _sentence(refusal.value)


MODELS: list[tuple[Callable[..., str], dict[str, Any], str]] = [
    (save_mistral, {"sliding_window": 64}, "sliding-window"),
    (save_llama, {"head_dim": 48}, "head size 48"),
    (save_llama, {"head_dim": 512}, "head size 512"),
]


@pytest.mark.parametrize(("save", "changes", "names"), MODELS, ids=[names for _, _, names in MODELS])
def test_unsupported_models_are_refused(
    tmp_path: Path, save: Callable[..., str], changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(save(tmp_path, **changes), OPTIONS)
    assert names in _sentence(refusal.value)


def test_draft_models_are_refused(model: str) -> None:
    speculative = {"model": model, "method": "draft_model", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(model, OPTIONS, speculative_config=speculative)
    assert "--speculative-config" in _sentence(refusal.value)


# --- decode-time eviction ----------------------------------------------------------------------------------------------

EVICTS_DECODED: list[tuple[dict[str, Any], str, str]] = [
    ({"policy": "streaming_llm"}, "policy 'streaming_llm'", "choose policy 'snapkv' or 'rocketkv'"),
    ({"policy": "h2o"}, "policy 'h2o'", "choose policy 'snapkv' or 'rocketkv'"),
    ({"policy": "snapkv", "decode_budget": 2048}, "option 'decode_budget'", "drop it"),
    ({"decode_budget": 2048}, "option 'decode_budget'", "drop it"),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(("rocketkv", "names", "way_out"), EVICTS_DECODED)
def test_decode_time_eviction_is_refused_beside_speculative_decoding(
    model: str, rocketkv: dict[str, Any], names: str, way_out: str
) -> None:
    configure(model, rocketkv)
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(model, rocketkv, speculative_config=NGRAM)
    assert _sentence(refusal.value) == (
        f"rocketkv: {names} evicts decoded tokens, also for drafts that are rejected: {way_out} or remove --speculative-config"
    )


@pytest.mark.parametrize(("rocketkv", "names", "way_out"), EVICTS_DECODED)
def test_decode_time_eviction_is_refused_on_gpus(
    model: str, monkeypatch: pytest.MonkeyPatch, rocketkv: dict[str, Any], names: str, way_out: str
) -> None:
    config = configure(model, rocketkv)
    assert list(_refused_policies(config, config_of(config))) == []
    monkeypatch.setattr("vllm_rocketkv.support.kernels", lambda: "triton")
    assert list(_refused_policies(config, config_of(config))) == [
        f"{names} evicts decoded tokens, which is not supported on GPUs yet: {way_out}"
    ]


def test_a_window_of_decoded_tokens_must_fit_into_blocks(tmp_path: Path) -> None:
    """64 query heads in float32 take more bytes than K and V of 32 tokens and one KV head in fp8."""
    path = save_llama(tmp_path, num_attention_heads=64, num_key_value_heads=1, head_dim=32)
    options = {"decode_budget": 2048, "window_size": 1}
    configure(path, options, block_size=32)
    configure(path, {"window_size": 1}, block_size=32, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(path, options, block_size=32, kv_cache_dtype="fp8")
    assert "does not fit into a block of 32 tokens" in _sentence(refusal.value)


# --- what K and V are stored in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_are_accepted(model: str, dtype: str, kv_cache_dtype: str) -> None:
    config = configure(model, OPTIONS, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert config.cache_config.cache_dtype == kv_cache_dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_models_own_type_may_be_named(model: str, dtype: str) -> None:
    assert configure(model, OPTIONS, dtype=dtype, kv_cache_dtype=dtype).cache_config.cache_dtype == dtype


def test_fp8_is_refused_where_vllms_kernels_lack_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, without_avx512 in ((save_llama(tmp_path, head_dim=80), False), (model, True)):
        if without_avx512:
            monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
            monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
        with pytest.raises(ValueError, match="rocketkv") as refusal:
            configure(path, OPTIONS, kv_cache_dtype="fp8")
        sentence = _sentence(refusal.value)
        assert "--kv-cache-dtype fp8" in sentence
        assert "use auto" in sentence
        assert configure(path, OPTIONS).cache_config.cache_dtype == "auto"


def test_a_checkpoint_may_ask_for_fp8(tmp_path: Path) -> None:
    """Under auto vLLM's layers follow the checkpoint; so must the room for parked queries, a fourth of a float32 cache's."""
    options = {"prompt_budget": 288, "window_size": 160}
    path = Path(save_llama(tmp_path))
    configure(str(path), options)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    hf_config = json.loads((path / "config.json").read_text())
    hf_config["quantization_config"] = quantization | {"kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps(hf_config))
    with pytest.raises(ValueError, match="rocketkv") as refusal:
        configure(str(path), options)
    assert "window_size 160" in _sentence(refusal.value)


# --- the log -----------------------------------------------------------------------------------------------------------


def test_what_is_in_effect_is_logged_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("vllm.rocketkv.support")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.manager._clear_cache()  # of levels
    configure(model, OPTIONS | {"prompt_budget": 288})
    configure(model, OPTIONS | {"prompt_budget": 288})
    assert len(records) == 1
    assert "prompt_budget 288" in records[0].getMessage()
    assert f"keeps 2 of 4 blocks and frees 2 ({_freed_mib(2, 2, 4)} MiB)" in records[0].getMessage()
    configure(model, OPTIONS | {"prompt_budget": 288}, kv_cache_dtype="fp8")
    assert f"frees 2 ({_freed_mib(2, 2, 1)} MiB)" in records[1].getMessage()


def _freed_mib(num_blocks: int, num_layers: int, kv_bytes: int) -> str:
    """Of 2 KV heads, 128 tokens a block, 32 dimensions of K and V, and min and max of 32 pages in bfloat16."""
    return f"{num_blocks * num_layers * 2 * 32 * (128 * 2 * kv_bytes + 32 * 2 * 2) / 2**20:.1f}"


def test_the_rust_frontend_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go around the checks of requests."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND goes around"):
        configure(model, OPTIONS)
