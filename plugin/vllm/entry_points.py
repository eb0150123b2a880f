"""What vLLM calls when it loads plugins, in every process and more than once.

`register` is of group vllm.general_plugins, `cpu_platform` of vllm.platform_plugins. Neither imports a kernel, and
neither raises: an engine that doesn't use this backend mustn't notice it. What we can't serve is said once the backend
is asked for, by `backend` and `builder`.
"""

from __future__ import annotations

import os

BACKEND = "pagedmla.plugin.vllm.backend.PagedMLABackend"
PLATFORM = "pagedmla.plugin.vllm.cpu_platform.PagedMLACpuPlatform"
PLATFORM_SWITCH = "PAGEDMLA_CPU_PLATFORM"


def register() -> None:
    """Put the backend behind `--attention-backend CUSTOM`, and our cache dtype among the engine's names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pagedmla.plugin.vllm.cache_dtypes import register_cache_dtype

    slot = AttentionBackendEnum.CUSTOM
    if slot.is_overridden() and slot.get_path() != BACKEND:
        from vllm.logger import init_logger

        init_logger("vllm.pagedmla").warning(
            "attention backend CUSTOM was %s and is now %s; leave one of the two plugins out of VLLM_PLUGINS",
            slot.get_path(),
            BACKEND,
        )
    register_backend(slot, BACKEND)
    register_cache_dtype()


def cpu_platform() -> str | None:
    """The platform class where PAGEDMLA_CPU_PLATFORM=1 (true, yes, on) asks for it; else None: vLLM chooses as ever."""
    return PLATFORM if os.environ.get(PLATFORM_SWITCH, "").strip().lower() in ("1", "true", "yes", "on") else None
