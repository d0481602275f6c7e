# SPDX-License-Identifier: Apache-2.0
"""The API process: the counts that the engine core sends, and requests that are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_rocketkv.compat.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_rocketkv.request_options import Engine


def activate() -> None:
    """Install what only a process that serves with this backend needs."""
    collect_engine_stats()
    refuse_streaming_input()
    check_request_options()
    check_request_options_before_a_stream()
    refuse_request_options_of_beam_search()


def collect_engine_stats() -> None:
    """Take this package's counts out of ``SchedulerStats`` and export them; the counterpart of ``publish_engine_stats``."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.metrics import export, unpack

            if scheduler_stats is not None:
                counts = unpack(scheduler_stats.num_kv_fetch_reqs_by_stage)
                if counts is not None:
                    export(counts, kwargs.get("engine_idx") or 0)
            return original(self, scheduler_stats, *args, **kwargs)

        return record

    wrap(StatLoggerManager, "record", make)

    def make_initialized(original: Callable[..., Any]) -> Callable[..., Any]:
        def log_engine_initialized(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.metrics import register

            for engine_index in self.engine_indexes:
                register(engine_index)
            return original(self, *args, **kwargs)

        return log_engine_initialized

    wrap(StatLoggerManager, "log_engine_initialized", make_initialized)


def refuse_streaming_input() -> None:
    """Refuse a resumable streaming-input session: its prompt grows, and the layout is a function of the prompt's length.

    vLLM 0.32: no hook decides per request what an attention backend supports. Can go when the layout follows a growing prompt.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("resumable"):
                raise ValueError(
                    "rocketkv: streaming-input sessions are not supported, send the whole prompt in one request or start "
                    "vLLM without --attention-backend rocketkv"
                )
            return original(self, *args, **kwargs)

        return process_inputs

    wrap(InputProcessor, "process_inputs", make)


def check_request_options() -> None:
    """Refuse a request whose options are wrong or do not fit this server.

    vLLM 0.32 passes ``vllm_xargs`` and ``extra_args`` on as they come, and no hook lets a package look at them but a logits
    processor. Can go when there is one.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            _check(self.vllm_config, params)
            return original(self, params, *args, **kwargs)

        return validate_params

    wrap(InputProcessor, "_validate_params", make)


def check_request_options_before_a_stream() -> None:
    """The same check when a request is handed over, so that one that wants its reply streamed gets status 400, too.

    vLLM 0.32 processes a request when its first token is awaited: a stream has begun by then, with status 200, and a refusal is
    an event in it. Can go when vLLM processes a request before it answers.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            _check(self.vllm_config, sampling_params)
            return original(self, prompt, sampling_params, *args, **kwargs)

        return generate

    wrap(AsyncLLM, "generate", make)


def refuse_request_options_of_beam_search() -> None:
    """Refuse options of ours in a request that asks for beam search.

    vLLM 0.32: ``BeamSearchParams`` carries no ``extra_args``, so they would be lost without a word. Can go when it does.
    """
    modules = [
        sys.modules.get(f"vllm.entrypoints.openai.{name}.protocol") for name in ("chat_completion", "completion")
    ]
    if None in modules:  # no HTTP server runs in this process
        return
    chat, completion = modules

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.request_options import given

            if names := given(self.vllm_xargs):
                raise ValueError(
                    f"rocketkv: option '{names[0][:64]}' is lost in beam search: drop it or drop use_beam_search"
                )
            return original(self, *args, **kwargs)

        return to_beam_search_params

    wrap(chat.ChatCompletionRequest, "to_beam_search_params", make)  # type: ignore[union-attr]
    wrap(completion.CompletionRequest, "to_beam_search_params", make)  # type: ignore[union-attr]


def _check(vllm_config: VllmConfig, params: Any) -> None:
    """Parameters of a pooling request hold no options of ours."""
    from vllm_rocketkv.request_options import check_request, given

    extra_args = getattr(params, "extra_args", None)
    if extra_args and given(extra_args):
        from vllm_rocketkv.support import config_of

        check_request(config_of(vllm_config), extra_args, _engine_of(vllm_config))


def _engine_of(vllm_config: VllmConfig) -> Engine:
    from vllm_rocketkv import support
    from vllm_rocketkv.backend.device import kernels
    from vllm_rocketkv.request_options import Engine

    model_config = vllm_config.model_config
    heads = model_config.get_num_attention_heads(vllm_config.parallel_config)
    return Engine(
        block_size=support.resolved_block_size(vllm_config),
        max_model_len=model_config.max_model_len,
        query_heads_per_kv_head=heads // model_config.get_num_kv_heads(vllm_config.parallel_config),
        query_to_kv_bytes=model_config.dtype.itemsize // support.cache_dtype(vllm_config).itemsize,
        speculates=vllm_config.speculative_config is not None,
        shares_kv=support.shares_kv(model_config),
        is_gpu=kernels() == "triton",
    )
