# SPDX-License-Identifier: Apache-2.0
"""Every place where vLLM 0.32/0.33 has no hook for what this package needs, one function each.

Each docstring says which vLLM, what was observed, and when the function can go. Wrappers call the original and only add to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND_NAME = "ROCKETKV"
BACKEND_PATH = "vllm_rocketkv.backend.backend.RocketKVBackend"


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace method ``owner.name`` by ``make(original)``, once per process. A class method is replaced by a static one, since
    its original is already bound to the class."""
    original = getattr(owner, name)
    if getattr(original, "_rocketkv", False):
        return
    wrapper: Any = functools.wraps(original)(make(original))
    wrapper._rocketkv = True
    setattr(owner, name, staticmethod(wrapper) if inspect.ismethod(original) else wrapper)


# --- every process -----------------------------------------------------------------------------------------------------


def register_backend_name() -> None:
    """Add the enum member ROCKETKV and let it be pickled; make CUSTOM a synonym unless another package took it.

    vLLM 0.32: a dynamically registered member is pickled by value into the spawned engine core before plugins are loaded
    there (``ValueError: '...' is not a valid AttentionBackendEnum``). Can go when vLLM pickles members by name after loading
    plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
        member = AttentionBackendEnum[BACKEND_NAME]
        member.__reduce_ex__ = lambda _protocol: (_unpickle_backend, ())  # type: ignore[method-assign]
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)


def _unpickle_backend() -> AttentionBackendEnum:
    """A process that receives a configuration with our backend selected gets the hooks that go with it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_backend_name()
    activate()
    return AttentionBackendEnum[BACKEND_NAME]


def is_selected(backend: AttentionBackendEnum | None) -> bool:
    """Whether ``backend`` resolves to this package, under its own name or as CUSTOM."""
    if backend is None or backend.name not in (BACKEND_NAME, "CUSTOM"):
        return False
    return bool(backend.get_path() == BACKEND_PATH)


def check_configuration_at_startup() -> None:
    """Run this package's checks when a ``VllmConfig`` with our backend is built, in the process that the user started.

    vLLM 0.32 selects the attention backend in the worker, where a refusal is a stack trace of another process. Can go when
    an attention backend has a hook that sees the ``VllmConfig`` at start-up.
    """
    from vllm.platforms import current_platform

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def check_and_update_config(vllm_config: VllmConfig) -> None:
            original(vllm_config)
            attention = vllm_config.attention_config
            selected = [attention.backend, *attention.backend_per_kind.values()]
            if not any(is_selected(backend) for backend in selected):
                return
            from vllm_rocketkv.support import check_vllm_config

            _prefer_own_name(vllm_config)
            activate()
            check_vllm_config(vllm_config)

        return check_and_update_config

    _wrap(type(current_platform), "check_and_update_config", make)


def _prefer_own_name(vllm_config: VllmConfig) -> None:
    """CUSTOM is a synonym on the way in; inside, the backend has one name, the one that can be pickled."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention = vllm_config.attention_config
    ours = AttentionBackendEnum[BACKEND_NAME]
    if is_selected(attention.backend):
        attention.backend = ours
    for kind, backend in attention.backend_per_kind.items():
        if is_selected(backend):
            attention.backend_per_kind[kind] = ours


def let_cpu_platform_select_us() -> None:
    """Let the CPU platform select this backend.

    vLLM 0.32: ``CpuPlatform.get_attn_backend_cls`` ignores the selected backend and returns CPU_ATTN. MLA, sparse and
    encoder layers keep vLLM's choice. Can go when the CPU platform honours the selection.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def get_attn_backend_cls(
            selected_backend: AttentionBackendEnum | None, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            wanted = is_selected(selected_backend)
            if wanted and not attn_selector_config.use_mla and attn_selector_config.attn_type == "decoder":
                from vllm_rocketkv.backend.backend import RocketKVBackend

                reasons = RocketKVBackend.validate_configuration(
                    **attn_selector_config._asdict(), device_capability=None
                )
                if reasons:
                    raise ValueError(f"rocketkv: this model cannot be served, {'; '.join(reasons)}")
                return BACKEND_PATH
            return original(selected_backend, attn_selector_config, num_heads)

        return get_attn_backend_cls

    _wrap(type(current_platform), "get_attn_backend_cls", make)


def activate() -> None:
    """Install what only a process that serves with this backend needs."""
    collect_engine_stats()
    refuse_streaming_input()


# --- engine core -------------------------------------------------------------------------------------------------------


def activate_scheduler_hooks() -> None:
    """Called when ``RocketKVSpec`` is first imported, that is before any block manager of ours exists."""
    keep_window_out_of_prefix_hits()
    publish_engine_stats()


def keep_window_out_of_prefix_hits() -> None:
    """Tell our block manager each request's prompt length before it is admitted, and cap its prefix hits (I7).

    vLLM 0.32: ``find_longest_cache_hit`` sees only hashes and a length, not the request, and the admission gate of
    ``allocate_slots`` asks for a number of blocks before it names the prompt length. vLLM 0.33 passes
    ``max_cache_hit_length`` through ``get_computed_blocks``; can go when a manager can bound hits by request.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.cache.manager import RocketKVManager

            coordinator = self.coordinator
            managers = [m for m in coordinator.single_type_managers if isinstance(m, RocketKVManager)]
            caps = [manager.admit(request.request_id, request.num_prompt_tokens) for manager in managers]
            cap = min((cap for cap in caps if cap is not None), default=None)
            if cap is None:
                return original(self, request, *args, **kwargs)
            find = coordinator.find_longest_cache_hit
            coordinator.find_longest_cache_hit = lambda hashes, length, **kw: find(hashes, min(length, cap), **kw)
            try:
                return original(self, request, *args, **kwargs)
            finally:
                del coordinator.find_longest_cache_hit

        return get_computed_blocks

    _wrap(KVCacheManager, "get_computed_blocks", make)


def publish_engine_stats() -> None:
    """Send this package's counts with the statistics that the engine core sends anyway.

    vLLM 0.32: ``SchedulerStats`` has no field for other packages; its one free-form ``dict[str, int]`` carries ours under
    keys with our prefix, and ``collect_engine_stats`` takes them out before vLLM's loggers look. Can go when
    ``SchedulerStats`` has such a field.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.cache.manager import RocketKVManager
            from vllm_rocketkv.metrics import pack

            stats = original(self, *args, **kwargs)
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                if isinstance(manager, RocketKVManager):
                    counts = manager.take_counts()
                    if stats is not None:
                        stats.num_kv_fetch_reqs_by_stage.update(pack(counts))
            return stats

        return make_stats

    _wrap(Scheduler, "make_stats", make)


# --- API process -------------------------------------------------------------------------------------------------------


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

    _wrap(StatLoggerManager, "record", make)

    def make_initialized(original: Callable[..., Any]) -> Callable[..., Any]:
        def log_engine_initialized(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.metrics import register

            for engine_index in self.engine_indexes:
                register(engine_index)
            return original(self, *args, **kwargs)

        return log_engine_initialized

    _wrap(StatLoggerManager, "log_engine_initialized", make_initialized)


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

    _wrap(InputProcessor, "process_inputs", make)


# --- worker ------------------------------------------------------------------------------------------------------------

_v1_prompt_lens: torch.Tensor | None = None


def activate_worker_hooks() -> None:
    """Called when the backend class is first imported, that is before any metadata builder of ours exists."""
    give_prompt_lens_to_builders_v1()
    give_prompt_lens_to_builders_v2()
    choose_steps_for_cuda_graphs()
    take_back_discarded_samples_on_cpu()


def give_prompt_lens_to_builders_v1() -> None:
    """Model runner V1: remember the batch's prompt lengths while its attention metadata is built.

    vLLM 0.32: ``CommonAttentionMetadata.rswa_prefix_lens`` carries prompt lengths only for R-SWA models, and setting
    ``rswa_window`` would give other layers the R-SWA mask. Can go when builders see prompt lengths.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
            global _v1_prompt_lens
            _v1_prompt_lens = self.input_batch.num_prompt_tokens_cpu_tensor[: self.input_batch.num_reqs]
            try:
                return original(self, *args, **kwargs)
            finally:
                _v1_prompt_lens = None

        return build_attention_metadata

    _wrap(GPUModelRunner, "_build_attention_metadata", make)


def give_prompt_lens_to_builders_v2() -> None:
    """Model runner V2: fill ``input_batch.prompt_lens``, which arrives at the builder as ``rswa_prefix_lens``, unpadded.

    vLLM 0.32 fills it for R-SWA models alone, on the device; for all others nothing but this package looks at it, so it holds
    the host's own numbers and nobody waits for the device. Can go when builders see prompt lengths.
    """
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            input_batch = original(self, *args, **kwargs)
            if input_batch.prompt_lens is None:
                prompt_lens = self.req_states.prompt_len.np[input_batch.idx_mapping_np]
                input_batch.prompt_lens = torch.from_numpy(prompt_lens)
            return input_batch

        return prepare_inputs

    _wrap(GPUModelRunner, "prepare_inputs", make)


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

    _wrap(GPUModelRunner, "gather_batch_req_state", make)


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


def prompt_lens(common_attn_metadata: CommonAttentionMetadata) -> torch.Tensor:
    """Prompt length of each request of the batch: int32 ``[num_reqs]`` on the host, 0 for padded rows and dummy runs.

    A view of what the runner has, except in padded batches and dummy runs.
    """
    import torch

    num_reqs = common_attn_metadata.num_reqs
    lens = common_attn_metadata.rswa_prefix_lens
    if lens is None:
        lens = _v1_prompt_lens
    if lens is None:
        return torch.zeros(num_reqs, dtype=torch.int32)
    lens = lens[:num_reqs].to(torch.int32)
    missing = num_reqs - lens.shape[0]
    return torch.nn.functional.pad(lens, (0, missing)) if missing else lens


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

    _wrap(GPUModelRunner, "_sample", make_sample)
    _wrap(GPUModelRunner, "_bookkeeping_sync", make_bookkeeping)
