# SPDX-License-Identifier: Apache-2.0
"""What is refused at start-up, in one sentence each, and the one line that says what is in effect (I10)."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_rocketkv.backend.device import kernels
from vllm_rocketkv.config import RocketKVConfig

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.rocketkv.support")

_KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_WITHOUT_US = "start vLLM without --attention-backend rocketkv"


def config_of(vllm_config: VllmConfig) -> RocketKVConfig:
    """The options of ``--additional-config '{"rocketkv": {...}}'``."""
    additional_config = vllm_config.additional_config
    if not isinstance(additional_config, dict):
        return _parse("null")
    for name in additional_config:
        looks_like_ours = str(name).lower().replace("_", "").replace("-", "") == "rocketkv"
        if name in RocketKVConfig.model_fields or (looks_like_ours and name != "rocketkv"):
            raise ValueError(
                f"rocketkv: --additional-config holds {name!r} where nothing reads it, write "
                '\'{"rocketkv": {"prompt_budget": 2048}}\''
            )
    return _parse(json.dumps(additional_config.get("rocketkv"), default=repr))


@cache
def _parse(options: str) -> RocketKVConfig:
    """Once for the same options: every attention layer of a model asks."""
    return RocketKVConfig.parse(json.loads(options))


def check_vllm_config(vllm_config: VllmConfig) -> None:
    """Refuse what is not supported and log what is in effect.

    Raises:
        ValueError: with one sentence that names the option and the way out.
    """
    config = config_of(vllm_config)
    for refusal in _refusals(vllm_config):
        raise ValueError(f"rocketkv: {refusal}")
    model = vllm_config.model_config
    if model is None:
        return
    block_size = resolved_block_size(vllm_config)
    config.check_block_size(block_size)
    if kernels() == "cpu" and config.kt_dtype == "float8_e4m3fn":
        raise ValueError("rocketkv: option 'kt_dtype' float8_e4m3fn is for GPUs, use float8_e5m2 or bfloat16")
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    group = heads // model.get_num_kv_heads(vllm_config.parallel_config)
    config.check_window_fits(block_size, group, model.dtype.itemsize // cache_dtype(vllm_config).itemsize)
    _log_effective(vllm_config, config)


def _refusals(vllm_config: VllmConfig) -> Iterator[str]:
    yield from _refused_options(vllm_config)
    yield from _refused_policies(vllm_config, config_of(vllm_config))
    if vllm_config.model_config is not None:
        yield from _refused_models(vllm_config, vllm_config.model_config)
        yield from _refused_kv_cache_dtypes(vllm_config, vllm_config.model_config)


def _refused_options(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        yield f"there are kernels for CPUs and GPUs, on {current_platform.device_name} {_WITHOUT_US}"
    if kernels() == "triton" and not vllm_config.use_v2_model_runner:
        yield "model runner V1 is not supported on GPUs, unset VLLM_USE_V2_MODEL_RUNNER"
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        yield (
            "KV connectors (--kv-transfer-config, --kv-offloading-size) are not supported, remove the option or "
            f"{_WITHOUT_US}"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        yield f'--speculative-config with method {speculative.method!r} is not supported, use {{"method": "ngram"}}'
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism is not supported, set --decode-context-parallel-size and --prefill-context-parallel-size to 1"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism is not supported, set --pipeline-parallel-size to 1"
    if parallel.enable_dbo:
        yield "dual batch overlap is not supported, remove --enable-dbo"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill skips the queries that eviction needs, remove the option"
    if envs.VLLM_USE_RUST_FRONTEND:
        yield "VLLM_USE_RUST_FRONTEND goes around the checks of requests and the counters, unset it"
    if envs.VLLM_BATCH_INVARIANT:
        yield "VLLM_BATCH_INVARIANT is not supported, unset it"
    yield from _refused_skip_layers(vllm_config)
    multiple = 16 if kernels() == "triton" else 32
    if cache.block_size is not None and cache.block_size % multiple != 0:
        yield f"--block-size {cache.block_size} is not a multiple of {multiple}, choose 32, 64 or 128"


def _refused_policies(vllm_config: VllmConfig, config: RocketKVConfig) -> Iterator[str]:
    if config.pinned_tokens and vllm_config.cache_config.enable_prefix_caching is False:
        yield "option 'pinned_tokens' needs the prefix cache, drop it or start vLLM without --no-enable-prefix-caching"
    if config.pinned_tokens and config.skip_layers:
        yield "option 'pinned_tokens' pins no blocks of dense layers, so the others would be of no use: drop it or skip_layers"
    if config.decode_budget_for_step is None:
        return
    named, way_out = f"policy '{config.policy}'", "choose policy 'snapkv' or 'rocketkv'"
    if config.eviction == "snapkv":
        named, way_out = "option 'decode_budget'", "drop it"
    if vllm_config.speculative_config is not None:
        yield f"{named} evicts decoded tokens, also for drafts that are rejected: {way_out} or remove --speculative-config"
    if kernels() == "triton":
        yield f"{named} evicts decoded tokens, which is not supported on GPUs yet: {way_out}"
    if vllm_config.model_config is not None and shares_kv(vllm_config.model_config):
        yield f"{named} evicts decoded tokens before layers that share a KV cache have read them: {way_out}"


def _refused_skip_layers(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm.platforms import current_platform

    skipped, model = config_of(vllm_config).skip_layers, vllm_config.model_config
    if not skipped or model is None:
        return
    num_layers = model.get_total_num_hidden_layers()
    beyond = sorted(layer for layer in set(skipped) if layer >= num_layers)
    if beyond:
        yield (
            f"option 'skip_layers' names layer {beyond[0]}, but the model's {num_layers} layers are numbered 0 to "
            f"{num_layers - 1}: drop it"
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "option 'skip_layers' needs blocks of its own for the dense layers: remove --disable-hybrid-kv-cache-manager or "
            "drop skip_layers"
        )
    if not current_platform.support_hybrid_kv_cache():
        yield f"option 'skip_layers' needs vLLM's hybrid KV cache manager, which {current_platform.device_name} lacks: drop it"
    if shares_kv(model):
        yield "option 'skip_layers' is not supported for models whose layers share KV caches: drop it"


def _refused_models(vllm_config: VllmConfig, model: ModelConfig) -> Iterator[str]:
    text_config = model.hf_text_config
    if model.runner_type != "generate":
        yield f"the {model.runner_type} runner has no decode steps to save, {_WITHOUT_US}"
    head_size, head_sizes = model.get_head_size(), _head_sizes()
    if not model.use_mla and head_size not in head_sizes:
        yield f"the model's head size {head_size} is not one of {', '.join(map(str, head_sizes))}, {_WITHOUT_US}"
    if model.use_mla:
        yield f"models with multi-head latent attention are not supported, {_WITHOUT_US}"
    if model.is_encoder_decoder:
        yield f"encoder-decoder models are not supported, {_WITHOUT_US}"
    if model.is_hybrid or model.is_attention_free:
        yield f"models with state-space layers are not supported, {_WITHOUT_US}"
    if model.is_mm_prefix_lm:
        yield f"models with bidirectional attention over images are not supported, {_WITHOUT_US}"
    if model.uses_alibi:
        yield f"models with ALiBi positions are not supported, {_WITHOUT_US}"
    if model.get_sliding_window() is not None or _has_other_layer_types(text_config):
        yield f"models with sliding-window or chunked-attention layers are not supported yet, {_WITHOUT_US}"


def _refused_kv_cache_dtypes(vllm_config: VllmConfig, model: ModelConfig) -> Iterator[str]:
    """What vLLM's attention on this device lacks as well, or would store in another type than the option says."""
    name, cache = kv_dtype_name(vllm_config), vllm_config.cache_config
    if name in ("bfloat16", "float16"):
        if cache_dtype(vllm_config) != model.dtype:
            yield f"--kv-cache-dtype {name} is not the model's {str(model.dtype).removeprefix('torch.')}, use auto or fp8"
        return
    if name not in _KV_CACHE_DTYPES:
        yield f"--kv-cache-dtype {name} is not supported, use one of {', '.join(_KV_CACHE_DTYPES)}"
    if name != "auto" and cache.kv_cache_dtype_skip_layers:
        yield "--kv-cache-dtype-skip-layers makes blocks of two sizes, which is not supported, remove the option"
    if kernels() == "triton":
        return
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        _get_attn_isa(model.dtype, cache.block_size or 32, model.get_head_size(), name)
    except NotImplementedError as error:
        yield f"--kv-cache-dtype {name} cannot be used here, use auto: {str(error).removesuffix('.')}"


def resolved_block_size(vllm_config: VllmConfig) -> int:
    """The block size that vLLM will use. On GPUs it asks the backend, later than this, unless the user has named one."""
    cache = vllm_config.cache_config
    if kernels() == "cpu" or cache.user_specified_block_size:
        return int(cache.block_size)
    from vllm_rocketkv.backend.gpu_backend import PREFERRED_BLOCK_SIZE

    return max(int(cache.block_size), PREFERRED_BLOCK_SIZE)


def kv_dtype_name(vllm_config: VllmConfig) -> str:
    """What K and V are stored in, by vLLM's name: ``--kv-cache-dtype``, or fp8 if that is auto and the checkpoint asks for it
    (vLLM looks there in the worker, when it builds its layers)."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None) is not None:
        return "fp8"
    return name


def cache_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """The element type of vLLM's cache tensors: bytes, if K and V are stored in fp8."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(kv_dtype_name(vllm_config), vllm_config.model_config)


def shares_kv(model: ModelConfig) -> bool:
    """Whether layers of the model read other layers' KV caches."""
    return bool(getattr(model.hf_text_config, "num_kv_shared_layers", 0))


def _head_sizes() -> Sequence[int]:
    if kernels() == "triton":
        from vllm_rocketkv.backend.gpu_backend import HEAD_SIZES

        return HEAD_SIZES
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    # What the kernels keep on their stack has room for 256.
    return [size for size in CPUAttentionBackend.get_supported_head_sizes() if size <= 256]


def _has_other_layer_types(text_config: object) -> bool:
    layer_types = getattr(text_config, "layer_types", None) or ()
    return any(layer_type != "full_attention" for layer_type in layer_types)


def _log_effective(vllm_config: VllmConfig, config: RocketKVConfig) -> None:
    if multiprocessing.parent_process() is not None:
        return  # the process that the user started has said it
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_rocketkv.cache.spec import rocketkv_spec

    model, cache = vllm_config.model_config, vllm_config.cache_config
    spec = rocketkv_spec(
        FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
            head_size=model.get_head_size(),
            dtype=cache_dtype(vllm_config),
        ),
        config,
    )
    num_layers = model.get_num_layers(vllm_config.parallel_config) - len(set(config.skip_layers))
    bytes_per_block = spec.page_size_bytes * num_layers
    logger.info_once(
        "RocketKV: %s; %s", config.describe(), config.savings(model.max_model_len, cache.block_size, bytes_per_block)
    )
