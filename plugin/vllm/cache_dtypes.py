"""--kv-cache-dtype: the names that we serve, our own name, and how many bytes a token takes in a page.

| name                                    | layout          | bytes a token |
|-----------------------------------------|-----------------|---------------|
| auto, bfloat16, float16                 | bf16, fp16, fp32 | 1152 or 2304 |
| fp8, fp8_e4m3                           | fp8_flat, the layer's k_scale for the whole tensor | 576 |
| fp8_ds_mla                              | fp8_ds_mla      | 656           |
| fp8_rope_bf16 (vLLM 0.33 and later)     | fp8_rope_bf16   | 644           |
| fp8_per_token_head (where 0.33 isn't)   | fp8_rope_bf16   | 644           |

vLLM takes new names from 0.33 on. Before, `fp8_per_token_head` is a name that it accepts, that no MLA backend of its
own uses, and whose row a backend may size: our layout goes under it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedmla.adapters.vllm import CACHE_DTYPES, layout_of, row_bytes
from pagedmla.kv_cache.layouts import ROPE

OWN_DTYPE = "fp8_rope_bf16"


def register_cache_dtype() -> None:
    """Make OWN_DTYPE a name that vLLM accepts; nothing where it is one already, or where vLLM takes no new names."""
    try:
        from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    except ImportError:
        return
    if OWN_DTYPE in KV_CACHE_DTYPES:
        return
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    @register_kv_cache_dtype(OWN_DTYPE)
    class _Fp8RopeBf16:
        name = OWN_DTYPE

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM


def served_dtypes() -> list[str]:
    """The names that this engine and this backend both know."""
    from typing import get_args

    from vllm.config import cache

    known = set(getattr(cache, "KV_CACHE_DTYPES", None) or get_args(cache.CacheDType))
    return [name for name in CACHE_DTYPES if name in known]


def sized_spec(spec: Any) -> Any:
    """vLLM's spec of a layer's cache with the bytes that a token takes in our layout, where vLLM can't know them."""
    name = spec.cache_dtype_str
    if name not in CACHE_DTYPES or CACHE_DTYPES[name] != OWN_DTYPE:
        return spec
    layout = layout_of(name, spec.dtype, latent=spec.head_size - ROPE)
    return replace(spec, state_content_bytes=row_bytes(layout))
