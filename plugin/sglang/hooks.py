"""What SGLang has no registration for, by its own registry of hooks: our pool's class and size, and draft backends.

Each hook asks whether our backend is meant, and else does what SGLang did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.sglang.settings import BACKEND, CACHE_SWITCH, asks_for_our_pool

POOL_CLASS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
POOL_WIDTH = "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim"
DRAFT_DECODE = "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend"
DRAFT_EXTEND = "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend"


_registered: set[str] = set()


def hook_pool() -> None:
    """From the entry point, where PAGEDMLA_KV_CACHE is set: pools are made before any backend.

    The engine applies what its plugins registered once all of them are loaded.
    """
    _around({POOL_CLASS: pool_class, POOL_WIDTH: pool_width})


def hook_drafts() -> None:
    """From the factory of the backend: a draft worker makes its own backend before those of its steps."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _around({DRAFT_DECODE: draft_decode_backend, DRAFT_EXTEND: draft_extend_backend})
    HookRegistry.apply_hooks()


def _around(hooks: dict[str, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in hooks.keys() - _registered:
        HookRegistry.register(target, hooks[target], HookType.AROUND)
        _registered.add(target)


def pool_class(original: Callable[..., type], configurator: Any, *, kind: str, default: type) -> type:
    """Ours for the MLA pool of a runner that our backend serves."""
    chosen = original(configurator, kind=kind, default=default)
    if kind != "mla" or not _serves(configurator.is_draft_worker) or not asks_for_our_pool():
        return chosen

    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool

    if chosen is not MLATokenToKVPool:
        raise Refusal(
            f"{CACHE_SWITCH}: expected SGLang's own MLATokenToKVPool to take the place of; got {chosen.__name__}"
        )
    if configurator.kv_cache_dtype != torch.float8_e4m3fn:
        raise Refusal(
            f"{CACHE_SWITCH}=fp8_rope_bf16: expected --kv-cache-dtype fp8_e4m3 beside it; "
            f"got {configurator.kv_cache_dtype}"
        )
    return PagedMLATokenToKVPool


def pool_width(original: Callable[..., int], *, model_config: Any, kv_cache_dtype: Any) -> int:
    """Bytes of a slot of our pool for a model that our backend serves, where the engine counts how many it holds."""
    width = original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
    if not _serves(model_config.is_draft_model) or not asks_for_our_pool():
        return width

    import torch

    latent, rope = model_config.kv_lora_rank, model_config.qk_rope_head_dim
    if kv_cache_dtype != torch.float8_e4m3fn or width != latent + rope:
        return width

    from pagedmla.adapters.sglang import slot_bytes
    from pagedmla.kv_cache.layouts import get_layout

    return slot_bytes(get_layout("fp8_rope_bf16", latent=latent, rope=rope))


def draft_decode_backend(original: Callable[..., Any], factory: Any) -> Any:
    """Our backend of a chain of drafts, where the draft runs on ours; the engine's map of names has no place for it."""
    if not _drafts_on_ours(factory, "decode"):
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None

    from pagedmla.plugin.sglang.drafts import PagedMLAMultiStepDraftBackend

    return _stamped(
        PagedMLAMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    )


def draft_extend_backend(original: Callable[..., Any], factory: Any) -> Any:
    """As above, for the step that fills the draft's cache with accepted tokens."""
    from sglang.srt.runtime_context import get_spec

    mode = "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"
    if not _drafts_on_ours(factory, mode):
        return original(factory)

    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend

    return _stamped(PagedMLAAttnBackend(factory.draft_model_runner))


def _serves(is_draft: bool) -> bool:
    """Whether both forms of attention of the target, or of the draft, run on our backend."""
    from sglang.srt.runtime_context import attention_backends, get_spec

    named = attention_backends()
    if is_draft and get_spec().speculative_draft_attention_backend:
        named = (get_spec().speculative_draft_attention_backend,)
    return all(name == BACKEND for name in named)


def _drafts_on_ours(factory: Any, mode: str) -> bool:
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    named = factory.draft_attn_backend or (decode if mode == "decode" else prefill)
    return bool(named == BACKEND)


def _stamped(backend: Any) -> Any:
    """The model asks the backend by which name it goes."""
    for each in (backend, *getattr(backend, "attn_backends", ())):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = BACKEND
    return backend
