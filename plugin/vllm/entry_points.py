"""What vLLM calls when it loads plugins, in every process and more than once.

`register` is of group vllm.general_plugins, `cpu_platform` of vllm.platform_plugins. Neither imports a kernel, and
neither raises, whatever the release: an engine that doesn't use this backend mustn't notice it. What we can't serve is
said once the backend is asked for, by `backend` and `builder`.
"""

from __future__ import annotations

import logging
import os

BACKEND = "pagedmla.plugin.vllm.backend.PagedMLABackend"
PLATFORM = "pagedmla.plugin.vllm.cpu_platform.PagedMLACpuPlatform"
PLATFORM_SWITCH = "PAGEDMLA_CPU_PLATFORM"


_log = logging.getLogger("vllm.pagedmla")  # below "vllm", where the engine's log handlers are


def register() -> None:
    """Put the backend behind `--attention-backend CUSTOM`, and our cache dtype among the engine's names.

    A line of the log where the engine has no such places: vLLM doesn't catch what a plugin raises, and would end here.
    """
    try:
        _register()
    except (AttributeError, ImportError) as missing:
        _log.warning("pagedmla is installed, and can't serve this release of vLLM: %s", missing)


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pagedmla.plugin.vllm.cache_dtypes import register_cache_dtype

    slot = AttentionBackendEnum.CUSTOM
    if slot.is_overridden() and slot.get_path() != BACKEND:
        _log.warning(
            "attention backend CUSTOM was %s and is now %s; leave one of the two plugins out of VLLM_PLUGINS",
            slot.get_path(),
            BACKEND,
        )
    register_backend(slot, BACKEND)
    register_cache_dtype()


def cpu_platform() -> str | None:
    """The platform class where PAGEDMLA_CPU_PLATFORM=1 (true, yes, on) asks for it; else None: vLLM chooses as ever."""
    return PLATFORM if os.environ.get(PLATFORM_SWITCH, "").strip().lower() in ("1", "true", "yes", "on") else None
