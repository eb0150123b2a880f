"""The backend class: what we serve, and one sentence for each thing that we don't.

vLLM asks `validate_configuration`, whose keywords change with every release; it is left alone, and only the questions
that it asks are answered here.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
import vllm

from pagedmla.adapters.vllm import CACHE_DTYPES, check_version
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import LATENTS, ROPE

check_version(vllm.__version__)  # before the imports below fail in a way that only we understand

from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402

from pagedmla.plugin.vllm import cache_dtypes  # noqa: E402

HEAD_SIZES = tuple(latent + ROPE for latent in LATENTS)
PAGE_MULTIPLE = 16
PAGE_SIZE_SWITCH = "PAGEDMLA_PAGE_SIZE"


class PagedMLABackend(MLACommonBackend):  # type: ignore[misc] # vllm is not there for a plain type check
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "PAGEDMLA"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        from pagedmla.plugin.vllm.impl import PagedMLAImpl

        return PagedMLAImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        from pagedmla.plugin.vllm.builder import PagedMLABuilder

        return PagedMLABuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16, or the one that PAGEDMLA_PAGE_SIZE names: the engine then splits larger blocks."""
        return [page_size()] if page_size() else [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        return None  # any: strides are read off the tensor

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return cache_dtypes.sized_spec(spec)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *rest: Any,
        **more: Any,
    ) -> str | None:
        """One sentence where we can't serve. vLLM's own reasons, a few words each, stand beside it."""
        if use_sparse:
            return (
                "pagedmla serves dense MLA (DeepSeek V2, V3, R1); this model selects its keys by an indexer (sparse "
                "attention, DeepSeek V3.2 and later): use FLASHMLA_SPARSE or FLASHINFER_MLA_SPARSE"
            )
        if not use_mla:
            return "pagedmla serves MLA models; this one has another kind of attention: leave --attention-backend out"
        if head_size not in HEAD_SIZES:
            sizes, latents = (" or ".join(map(str, numbers)) for numbers in (HEAD_SIZES, LATENTS))
            return f"pagedmla serves head sizes {sizes} (latent {latents}, rope {ROPE}); this model has {head_size}"
        if dtype not in cls.supported_dtypes:
            return f"pagedmla serves models in bfloat16, float16 and float32; this one is in {dtype}"
        if kv_cache_dtype is not None and kv_cache_dtype not in CACHE_DTYPES:
            served = ", ".join(cache_dtypes.served_dtypes())
            return f"pagedmla serves --kv-cache-dtype {served}; got {kv_cache_dtype}"
        if not cls.supports_block_size(block_size):
            wanted = page_size() or PAGE_MULTIPLE
            return f"pagedmla takes a --block-size that is a multiple of {wanted}; got {block_size}"
        return None


def page_size() -> int | None:
    """Tokens a page as kernels see it, where PAGEDMLA_PAGE_SIZE fixes them."""
    setting = os.environ.get(PAGE_SIZE_SWITCH, "")
    if not setting:
        return None
    if not setting.isdecimal() or int(setting) < PAGE_MULTIPLE or int(setting) % PAGE_MULTIPLE:
        raise Refusal(f"{PAGE_SIZE_SWITCH}: expected a multiple of {PAGE_MULTIPLE}; got {setting!r}")
    return int(setting)
