"""Meaning: which rows of the cache a request sees."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.tables import row_ids


def read_rows(
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    request: int,
    start: int,
    end: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Tokens `start .. end - 1` of a request, dequantised: `[end - start, latent + rope]` in `dtype`.

    Token t lies in column t // page_size of both tables, at slot t % page_size.
    """
    planes = layout.planes(cache.value_pool, cache.scale_pool, layer)
    token = torch.arange(start, end, device=cache.blocks.device)
    column, slot = token // cache.page_size, token % cache.page_size
    columns = -(-end // cache.page_size)

    page = row_ids(cache.lookup_table, request, columns)[column]
    values = _take(cache.value_pool.layer(0, layer).squeeze(2), page, slot)
    if planes.scales is None or planes.scales_in_value_pages:
        return layout.dequantize(values, None, dtype)
    scale_page = row_ids(cache.scales_lookup_table, request, columns)[column]
    return layout.dequantize(values, _take(planes.scales, scale_page, slot), dtype)


def _take(plane: Tensor, page: Tensor, slot: Tensor) -> Tensor:
    """`plane[page, slot]`; by raw integers, since torch doesn't index every float8."""
    return raw_view(plane)[page, slot].view(plane.dtype)


def decompress(
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    starts: Tensor,
    lengths: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Tokens `starts[b] .. starts[b] + lengths[b] - 1` of every request, one after the other, in `dtype`:
    `[sum(lengths), latent + rope]`. What prefill with a cached context works on."""
    spans = [(int(start), int(start) + int(length)) for start, length in zip(starts, lengths)]
    rows = [read_rows(cache, layout, layer, b, start, end, dtype) for b, (start, end) in enumerate(spans)]
    return torch.cat(rows) if rows else torch.zeros(0, layout.width, dtype=dtype)
