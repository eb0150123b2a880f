"""FP8 paged multi-head latent attention (MLA) for vLLM-style engines: the public API and nothing else."""

from pathlib import Path

__version__ = "0.1.0"

# In a clone the subpackages are the folders beside this one; in a wheel they lie inside it.
if not (Path(__file__).parent / "kv_cache").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

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
