"""A step's values as what every operation works on: one device, a layout, and a cache that fits both."""

from __future__ import annotations

from pagedmla.kv_cache.checks import refuse
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout, resolve_layout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, SplitKVHeadDims, single_device


def bind_values(
    values: KVCacheInputsPerDevice, layout: CacheLayout | str
) -> tuple[KVCacheInputsPerDevice, CacheLayout, PagedKVCacheCollection]:
    """One device's values, their layout and their cache. Raises ValueError and TypeError; reads no device value."""
    values = single_device(values)
    layout = resolve_layout(layout, values.kv_blocks, values.kv_scales)
    cache = values.collection(layout.pool_granularity)
    layout.check_alignment(cache.value_pool)
    dims = SplitKVHeadDims(layout.width, layout.latent)
    if values.split_head_dims not in (None, dims):
        refuse("split_head_dims", f"None or {dims}, as in layout {layout}", values.split_head_dims)
    return values, layout, cache
