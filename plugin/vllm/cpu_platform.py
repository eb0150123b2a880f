"""vLLM's CPU platform, but with this backend where it is asked for: for tests and the demonstration.

The stock platform serves MLA with one backend of its own, says in a log line that it ignores any other, and for it
turns chunked prefill and prefix caching off and fixes the block size. Here an explicit `--attention-backend CUSTOM` is
honoured or refused, and those settings stay as the user gave them. Inert unless PAGEDMLA_CPU_PLATFORM=1.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from pagedmla.kv_cache.checks import Refusal

DEFAULT_BLOCK_SIZE = 64
STOCK_BLOCK_SIZE = 16  # of vLLM's own MLA backend here


class PagedMLACpuPlatform(CpuPlatform):  # type: ignore[misc] # vllm is not there for a plain type check
    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if selected_backend is None and attn_selector_config.use_mla:
            _refuse_what_the_stock_backend_misreads(attn_selector_config)
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs))
        try:
            backend = selected_backend.get_class()
            reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        except ImportError as error:
            reasons = [str(error)]
        if reasons:
            raise Refusal(f"{selected_backend.name} can't serve this configuration: {'; '.join(reasons)}")
        return str(selected_backend.get_path())

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if vllm_config.model_config is None or vllm_config.attention_config.backend != AttentionBackendEnum.CUSTOM:
            super().check_and_update_config(vllm_config)
            return
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        wanted = [
            (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
            (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
            (cache, "enable_prefix_caching", cache.enable_prefix_caching),
            (cache, "block_size", cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE),
            (cache, "cache_dtype", cache.cache_dtype),
        ]
        cache.cache_dtype = "auto"  # from 0.33 on the platform refuses MLA caches that its own backend can't read
        super().check_and_update_config(vllm_config)
        for config, name, value in wanted:
            setattr(config, name, value)


def _refuse_what_the_stock_backend_misreads(asked: Any) -> None:
    """vLLM's own MLA backend of the CPU takes any cache and page size that it is handed, and reads some wrongly."""
    unquantised = asked.kv_cache_dtype in (None, "auto", "bfloat16", "float16")
    if unquantised and asked.block_size in (None, STOCK_BLOCK_SIZE):
        return
    raise Refusal(
        f"no attention backend is chosen for a layer with --kv-cache-dtype {asked.kv_cache_dtype} and --block-size "
        f"{asked.block_size}, which vLLM's own for the CPU can't serve. Draft layers don't follow --attention-backend: "
        f'add "attention_backend": "CUSTOM" to --speculative-config'
    )
