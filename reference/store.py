"""Meaning: store. Quantise this step's tokens, one row each, and write row and scales through both tables."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.tables import int64_lengths, row_ids

PADDING = -1  # engines' mark for a token that isn't stored
OUT_OF_POOL = -2


def slots_of_step(cache: PagedKVCacheCollection, query_start_loc: Tensor, table: Tensor) -> Tensor:
    """Where this step's tokens go, as engines write it: int64 `[T]`, page id * page_size + slot.

    Token i of request b sits at position cache_lengths[b] + i; a negative position (padding row) gives PADDING, a
    negative page id OUT_OF_POOL.
    """
    starts = query_start_loc.tolist()
    slots = torch.full((starts[-1],), PADDING, dtype=torch.int64)
    for b, cache_length in enumerate(int64_lengths(cache.cache_lengths).tolist()):
        for i in range(starts[b + 1] - starts[b]):
            position = cache_length + i
            if position >= 0:
                page = int(row_ids(table, b, position // cache.page_size + 1)[-1])
                slot = page * cache.page_size + position % cache.page_size
                slots[starts[b] + i] = slot if page >= 0 else OUT_OF_POOL
    return slots


def store(
    latent: Tensor,
    rope: Tensor,
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    slots: Tensor,
    scale_slots: Tensor,
    *,
    power_of_two: bool = False,
) -> Tensor:
    """Write `latent [T, latent]` and `rope [T, rope]` at `slots [T]` and `scale_slots [T]`; -1 is padding.

    A token whose slot lies outside either pool is dropped whole: its row and its scales go together. A per-tensor scale
    is read, never written. Returns the dropped tokens, int64 `[dropped]`.
    """
    rows = cache.value_pool.layer(0, layer).squeeze(2)  # [num_pages, page_size, row]
    scale_pool = None if layout.inline_scales else cache.scale_pool
    scales = None if scale_pool is None else scale_pool.layer(0, layer).squeeze(2)
    page_size, dropped = cache.page_size, []
    for t, (slot, scale_slot) in enumerate(zip(slots.tolist(), scale_slots.tolist())):
        if slot == PADDING:
            continue
        in_pools = 0 <= slot < rows.shape[0] * page_size
        if scales is not None:
            in_pools = in_pools and 0 <= scale_slot < scales.shape[0] * page_size
        if not in_pools:
            dropped.append(t)
            continue
        sigma = None
        if scale_pool is not None and scales is not None and scale_pool.repeated:
            sigma = scales[scale_slot // page_size, scale_slot % page_size]
        scale_dtype = None if scales is None else scales.dtype
        made = layout.quantize(latent[t], rope[t], sigma=sigma, power_of_two=power_of_two, scale_dtype=scale_dtype)
        raw_view(rows)[slot // page_size, slot % page_size] = raw_view(made.values)
        if scales is not None and made.scales is not None and sigma is None:
            raw_view(scales)[scale_slot // page_size, scale_slot % page_size] = raw_view(made.scales)
    return slots.new_tensor(dropped)
