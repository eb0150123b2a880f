"""The names of `pagedmla`, and where they come from. `pagedmla` loads this module when the first is asked for."""

from pagedmla.kv_cache.cache_report import CacheReport
from pagedmla.kv_cache.checks import DroppedStoreWarning
from pagedmla.kv_cache.collection import (
    KVCacheStaticParams,
    PagedKVCache,
    PagedKVCacheCollection,
    generic_get_paged_cache,
    generic_get_paged_cache_with_scales,
)
from pagedmla.kv_cache.convert import convert_rows
from pagedmla.kv_cache.inspection import inspect
from pagedmla.kv_cache.layouts import CacheLayout, QuantizedRows, get_layout, per_tensor_scale
from pagedmla.kv_cache.page_pool import OutOfPagesError, PagePool
from pagedmla.kv_cache.saving import load_cache, save_cache
from pagedmla.kv_cache.values import (
    FlattenOrder,
    KVCacheInputsPerDevice,
    PagedCacheValues,
    SplitKVHeadDims,
)
from pagedmla.plugin.api import attend, decompress, merge_states, prefill, store
from pagedmla.plugin.plan import Plan, plan

__all__ = [
    "CacheLayout",
    "CacheReport",
    "DroppedStoreWarning",
    "FlattenOrder",
    "KVCacheInputsPerDevice",
    "KVCacheStaticParams",
    "OutOfPagesError",
    "PagePool",
    "PagedCacheValues",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "Plan",
    "QuantizedRows",
    "SplitKVHeadDims",
    "attend",
    "convert_rows",
    "decompress",
    "generic_get_paged_cache",
    "generic_get_paged_cache_with_scales",
    "get_layout",
    "inspect",
    "load_cache",
    "merge_states",
    "per_tensor_scale",
    "plan",
    "prefill",
    "save_cache",
    "store",
]
