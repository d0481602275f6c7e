# SPDX-License-Identifier: Apache-2.0
"""Every process: the backend's name, the checks at start-up, the selection on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_rocketkv.compat.api_process import activate
from vllm_rocketkv.compat.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND_NAME = "ROCKETKV"
BACKEND_PATH = "vllm_rocketkv.backend.backend.RocketKVBackend"


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

    wrap(type(current_platform), "check_and_update_config", make)


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

    wrap(type(current_platform), "get_attn_backend_cls", make)
