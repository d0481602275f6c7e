# SPDX-License-Identifier: Apache-2.0
"""The engine core: what the block manager is told of each request, and the counts that it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_rocketkv.compat.wrapping import wrap


def activate_scheduler_hooks() -> None:
    """Called when ``RocketKVSpec`` is first imported, that is before any block manager of ours exists."""
    keep_window_out_of_prefix_hits()
    publish_engine_stats()


def keep_window_out_of_prefix_hits() -> None:
    """Tell our block manager each request's prompt length and options before it is admitted, and cap its prefix hits (I7).

    vLLM 0.32: ``find_longest_cache_hit`` sees only hashes and a length, not the request, and the admission gate of
    ``allocate_slots`` asks for a number of blocks before it names the prompt length. vLLM 0.33 passes
    ``max_cache_hit_length`` through ``get_computed_blocks``; can go when a manager can bound hits by request.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_rocketkv.cache.manager import RocketKVManager
            from vllm_rocketkv.request_options import request_config

            coordinator = self.coordinator
            params = request.sampling_params
            extra_args = params.extra_args if params is not None else None
            managers = [m for m in coordinator.single_type_managers if isinstance(m, RocketKVManager)]
            caps = [
                manager.admit(request.request_id, request.num_prompt_tokens, request_config(manager.config, extra_args))
                for manager in managers
            ]
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

    wrap(KVCacheManager, "get_computed_blocks", make)


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
            coordinator = self.kv_cache_manager.coordinator
            managers = [m for m in coordinator.single_type_managers if isinstance(m, RocketKVManager)]
            if managers:
                counts = managers[0].take_counts(managers[1:])
                if stats is not None:
                    stats.num_kv_fetch_reqs_by_stage.update(pack(counts))
            return stats

        return make_stats

    wrap(Scheduler, "make_stats", make)
