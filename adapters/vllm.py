"""vLLM: the tensors of a layer's cache and of a step's metadata as `KVCacheInputsPerDevice`.

vLLM hands a backend one cache tensor a layer, `[num_blocks, block_size, row]`, whose block stride may span all layers,
and for each step

    query_start_loc  [B + 1] int32    request b owns tokens query_start_loc[b] .. query_start_loc[b + 1] - 1
    seq_lens         [B] int32        kv_len: the step's tokens included
    block_table      [B, W] int32     rows of a persistent buffer; unused entries hold the null block 0

Requests that decode come first. Scales lie inside the page, or are one number a tensor, so `scales_lookup_table` is
always the values' table. Everything below is a view of the engine's memory, but for the lengths before the step
(`CacheLengths`).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from pagedmla.adapters.rows import LayerPools, first_rows
from pagedmla.kv_cache.checks import expect_same_device, expect_tensor, refuse
from pagedmla.kv_cache.layouts import (
    LATENTS,
    ROPE,
    CacheLayout,
    Fp8DsMla,
    Fp8Flat,
    Fp8RopeBf16,
    get_layout,
    per_tensor_scale,
)

OLDEST_VERSION = (0, 29)
NEWEST_VERSION = (0, 33)

# --kv-cache-dtype to layout. None: numbers of the model's own dtype.
CACHE_DTYPES: dict[str, str | None] = {
    "auto": None,
    "bfloat16": None,
    "float16": None,
    "fp8": Fp8Flat.name,
    "fp8_e4m3": Fp8Flat.name,
    "fp8_ds_mla": Fp8DsMla.name,
    "fp8_rope_bf16": Fp8RopeBf16.name,  # registered by us where the engine takes new names (0.33)
    "fp8_per_token_head": Fp8RopeBf16.name,  # a name that older engines accept, with our bytes under it
}
_UNQUANTISED = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def check_version(version: str) -> None:
    """ImportError where this isn't a vLLM that the adapter knows."""
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or not OLDEST_VERSION <= (int(number[1]), int(number[2])) <= NEWEST_VERSION:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_VERSION, NEWEST_VERSION))
        raise ImportError(
            f"vllm: expected {oldest} to {newest}, whose attention interface pagedmla knows; got {version}. "
            f"Install one of those, or a pagedmla that knows this one."
        )


def layout_of(cache_dtype: str, model_dtype: torch.dtype, *, latent: int = LATENTS[0], rope: int = ROPE) -> CacheLayout:
    """The layout behind a --kv-cache-dtype. ValueError names those that there are."""
    if cache_dtype not in CACHE_DTYPES:
        refuse("kv_cache_dtype", f"one of {', '.join(CACHE_DTYPES)}", cache_dtype)
    name = CACHE_DTYPES[cache_dtype]
    if name is None:
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(cache_dtype, model_dtype)
        if dtype not in _UNQUANTISED:
            refuse("kv_cache_dtype", "a model of bfloat16, float16 or float32 for an unquantised cache", str(dtype))
        name = _UNQUANTISED[dtype]
    return get_layout(name, latent=latent, rope=rope)


def row_bytes(layout: CacheLayout) -> int:
    """Bytes that a token takes in a page: its row, and its scales where they are paged too."""
    return layout.bytes_per_token if _has_sigma_plane(layout) else layout.row_bytes


def layer_pools(cache: Tensor, layout: CacheLayout, k_scale: Tensor | None = None) -> LayerPools:
    """View a layer's cache `[num_blocks, block_size, row]` as pools, with the strides that it has.

    `k_scale` is the layer's scale, one float32 on the cache's device; per-tensor FP8 (`fp8_flat`) needs it. The pages
    of `fp8_rope_bf16` are two planes, in bytes for a block_size of P:

        0 .. 640 P - 1      rows, [P, 640]
        640 P .. 644 P - 1  sigmas, [P] float32

    so rows stay 16-byte aligned, and whoever copies a page copies its scales. Raises ValueError where the tensor isn't
    such a cache.
    """
    expect_tensor(cache, "kv_cache", [None, None, None], (), "It is [num_blocks, block_size, row].")
    if _has_sigma_plane(layout):
        rows, scales = _two_planes(cache, layout)
    else:
        rows, scales = cache, None
    if layout.quantised:
        if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):  # e5m2 and fnuz bytes mean other numbers
            refuse("kv_cache", "float8_e4m3fn or its bytes", cache)
        rows = rows.view(layout.value_dtypes[0])
    blocks = rows[:, None, None, :, None, :]
    if isinstance(layout, Fp8Flat):
        if k_scale is None:
            refuse("k_scale", f"one float32 for layout {layout}", None)
        sigma = expect_tensor(k_scale.reshape(-1), "k_scale", [1], (torch.float32,))
        expect_same_device(cache, "kv_cache", k_scale=sigma)
        scales = per_tensor_scale(sigma, blocks)
    layout.check_pool(blocks, scales)
    return LayerPools(layout, blocks, scales)


def _has_sigma_plane(layout: CacheLayout) -> bool:
    return layout.scales_per_token == 1 and not isinstance(layout, Fp8Flat)


def _two_planes(cache: Tensor, layout: CacheLayout) -> tuple[Tensor, Tensor]:
    """Rows `[num_blocks, P, row]` and sigmas `[num_blocks, 1, 1, P, 1, 1]` of pages that hold both."""
    pages, page_size, width = cache.shape
    token = layout.bytes_per_token
    if cache.element_size() != 1 or width != token:
        refuse("kv_cache", f"[*, *, {token}] bytes for layout {layout}", cache)
    if (page_size > 1 and cache.stride(1) != token) or cache.stride(2) != 1:
        refuse("kv_cache", f"pages whose {page_size} x {token} bytes are adjacent", f"strides {cache.stride()}")
    if cache.stride(0) % 4 or cache.storage_offset() % 4:
        where = f"stride {cache.stride(0)} from byte {cache.storage_offset()}"
        refuse("kv_cache", f"pages that start at multiples of 4 bytes for layout {layout}", where)
    flat = cache.view(torch.uint8).as_strided((pages, page_size * token), (cache.stride(0), 1))
    split = page_size * layout.row_bytes
    rows = flat[:, :split].unflatten(1, (page_size, layout.row_bytes))
    return rows, flat[:, split:].view(torch.float32)[:, None, None, :, None, None]


class CacheLengths:
    """Lengths of up to `requests` requests before a step, in memory that stays: a captured graph finds them there."""

    def __init__(self, requests: int, device: torch.device | str) -> None:
        self._buffer = torch.zeros(requests, dtype=torch.int32, device=device)
        # A Python number in its place costs the host more than the subtraction itself.
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def write(self, seq_lens: Tensor, query_start_loc: Tensor, max_query_length: int | None = None) -> Tensor:
        """`seq_lens - query_lens` `[B]` int32. No device value is read.

        One operation where the bound `max_query_length` is 1, else two. The padding of a captured graph, a row without
        keys or query, then comes out as -1, and is empty either way.
        """
        requests = seq_lens.shape[0]
        if self._buffer.shape[0] < requests:
            refuse("seq_lens", f"at most {self._buffer.shape[0]} requests", seq_lens)
        lengths = first_rows(self._buffer, requests)
        if max_query_length == 1:
            return torch.sub(seq_lens, self._one, out=lengths)
        return torch.sub(seq_lens, query_start_loc[1:], out=lengths).add_(query_start_loc[:-1])
