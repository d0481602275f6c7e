# SPDX-License-Identifier: Apache-2.0
"""The worker: what both model runners know of a batch and builders are not told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_rocketkv.compat.every_process import BACKEND_NAME
from vllm_rocketkv.compat.wrapping import wrap

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_rocketkv.config import RocketKVConfig


def activate_worker_hooks() -> None:
    """Called when the backend class is first imported, that is before any attention layer or metadata builder of ours exists."""
    keep_layers_dense()
    keep_request_options()
    give_requests_to_builders_v1()
    give_requests_to_builders_v2()
    choose_steps_for_cuda_graphs()
    take_back_discarded_samples_on_cpu()


def keep_layers_dense() -> None:
    """Give the layers of option ``skip_layers`` a KV cache spec of their own, and with it a KV cache group.

    vLLM 0.32 and 0.33: a backend shapes the specs of its layers by ``customize_spec``, which is not told which layer it is
    asked about. ``Attention.get_kv_cache_spec`` has the layer's name. Can go when ``customize_spec`` is given the name.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> Any:
            from vllm_rocketkv.cache.spec import dense_layer_spec
            from vllm_rocketkv.support import config_of

            spec = original(self, vllm_config)
            if self.attn_backend.get_name() != BACKEND_NAME or type(spec) is not FullAttentionSpec or spec.non_causal:
                return spec
            config = config_of(vllm_config)
            if config.skip_layers and extract_layer_index(self.layer_name) in config.skip_layers:
                return dense_layer_spec(spec, config)
            return spec

        return get_kv_cache_spec

    wrap(Attention, "get_kv_cache_spec", make)


def keep_request_options() -> None:
    """Both model runners: keep the options of live requests that have any, by request.

    vLLM 0.32: V1 keeps the sampling parameters of all requests, V2 only what it samples by. Can go when builders see them.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, scheduler_output: SchedulerOutput) -> Any:
            _note_options(self, scheduler_output)
            return original(self, scheduler_output)

        return update

    wrap(GPUModelRunnerV1, "_update_states", make)
    wrap(GPUModelRunnerV2, "add_requests", make)


def _note_options(runner: Any, scheduler_output: SchedulerOutput) -> None:
    from vllm_rocketkv.request_options import request_config
    from vllm_rocketkv.support import config_of

    configs = runner.__dict__.setdefault("_rocketkv_configs", {})
    if configs:  # an id may have finished and come again
        for req_id in scheduler_output.finished_req_ids:
            configs.pop(req_id, None)
    for new_request in scheduler_output.scheduled_new_reqs:
        params = new_request.sampling_params
        if params is None or not params.extra_args:
            continue
        config = request_config(config_of(runner.vllm_config), params.extra_args)
        if config is not None:
            configs[new_request.req_id] = config


def _configs_of(runner: Any, req_ids: list[str]) -> list[RocketKVConfig | None] | None:
    configs = runner.__dict__.get("_rocketkv_configs")
    return [configs.get(req_id) for req_id in req_ids] if configs else None


def give_requests_to_builders_v1() -> None:
    """Model runner V1: remember the batch's prompt lengths and options while its attention metadata is built.

    vLLM 0.32: ``CommonAttentionMetadata.rswa_prefix_lens`` carries prompt lengths only for R-SWA models, and setting
    ``rswa_window`` would give other layers the R-SWA mask. Can go when builders see the requests.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_rocketkv import compat

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
            compat._v1_prompt_lens = self.input_batch.num_prompt_tokens_cpu_tensor[: self.input_batch.num_reqs]
            configs = _configs_of(self, self.input_batch.req_ids)
            compat._batch_configs = (None, configs) if configs else None
            try:
                return original(self, *args, **kwargs)
            finally:
                compat._v1_prompt_lens = compat._batch_configs = None

        return build_attention_metadata

    wrap(GPUModelRunner, "_build_attention_metadata", make)


def give_requests_to_builders_v2() -> None:
    """Model runner V2: fill ``input_batch.prompt_lens``, which arrives at the builder as ``rswa_prefix_lens``, unpadded, and by
    which the batch's options are known.

    vLLM 0.32 fills it for R-SWA models alone, on the device; for all others nothing but this package looks at it, so it holds
    the host's own numbers and nobody waits for the device. Can go when builders see the requests.
    """
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_rocketkv import compat

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            input_batch = original(self, *args, **kwargs)
            if input_batch.prompt_lens is None:
                prompt_lens = self.req_states.prompt_len.np[input_batch.idx_mapping_np]
                input_batch.prompt_lens = torch.from_numpy(prompt_lens)
            configs = _configs_of(self, input_batch.req_ids)
            compat._batch_configs = (input_batch.prompt_lens, configs) if configs else None
            return input_batch

        return prepare_inputs

    wrap(GPUModelRunner, "prepare_inputs", make)


def choose_steps_for_cuda_graphs() -> None:
    """Model runner V2: some decodes are none for CUDA graphs.

    vLLM 0.32 replays the decode graph for a prompt's last chunk if that is one token (N = k * chunk + 1); stage 1, which has to
    run in that step, is in no graph. Neither are the split kernels, which rows need that outgrow the fused one. Can go when a
    builder can refuse a graph for one batch.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            state, uniform_token_count = original(self, *args, **kwargs)
            if state is None or not state.decode_graph_eligible or not _needs_more_than_the_graph(self, state):
                return state, uniform_token_count
            return state._replace(decode_graph_eligible=False), None

        return gather_batch_req_state

    wrap(GPUModelRunner, "gather_batch_req_state", make)


def _needs_more_than_the_graph(runner: Any, state: Any) -> bool:
    """Whether a request of the batch, its prompt longer than the budget, computes a token of its observation window or has
    outgrown the fused decode kernel."""
    from vllm_rocketkv.backend.limits import fused_capacity
    from vllm_rocketkv.support import config_of

    config = config_of(runner.vllm_config)
    if not config.evicts:
        return False
    block_size = runner.vllm_config.cache_config.block_size
    capacity = fused_capacity(config, runner.vllm_config.model_config.max_model_len, block_size)
    prompt_lens = runner.req_states.prompt_len.np[state.idx_mapping_np]
    ends = runner.req_states.num_computed_tokens_np[state.idx_mapping_np] + state.num_scheduled_tokens
    # An upper bound of what is cached: decoded tokens and all that eviction may keep.
    kept = config.max_private_blocks(runner.vllm_config.model_config.max_model_len, block_size) * block_size
    may_be_long = ends - prompt_lens + kept > capacity
    prefilled = state.num_computed_prefill_tokens_np
    in_window = (prefilled < prompt_lens) & (prefilled + state.num_scheduled_tokens > prompt_lens - config.window_size)
    suspects = prompt_lens[may_be_long | in_window]
    return any(config.is_sparse(N, block_size) for N in suspects.tolist())


def take_back_discarded_samples_on_cpu() -> None:
    """Model runner V1 on CPUs: a seeded request whose prompt takes several steps no longer ends the engine.

    vLLM 0.32 and 0.33 discard what such a step sampled and rewind the request's generator by ``set_offset``, which a CPU
    generator does not have (``RuntimeError: CPU Generator does not use offset``; plain vLLM dies of it as well). Here its
    state is put back instead, so a seed gives the same tokens for any chunk size. Can go when vLLM does that itself.
    """
    import numpy as np
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not current_platform.is_cpu():
        return

    def discarded(runner: Any) -> dict[int, torch.Generator]:
        rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
        generators = runner.input_batch.generators
        return {row: generators[row] for row in rows.tolist() if row in generators}

    def make_sample(original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            states = [(generator, generator.get_state()) for generator in discarded(self).values()]
            output = original(self, *args, **kwargs)
            for generator, state in states:
                generator.set_state(state)
            return output

        return sample

    def make_bookkeeping(original: Callable[..., Any]) -> Callable[..., Any]:
        def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = discarded(self)
            for row in hidden:
                del self.input_batch.generators[row]
            try:
                return original(self, *args, **kwargs)
            finally:
                self.input_batch.generators.update(hidden)

        return bookkeeping_sync

    wrap(GPUModelRunner, "_sample", make_sample)
    wrap(GPUModelRunner, "_bookkeeping_sync", make_bookkeeping)
