"""FP8 paged multi-head latent attention (MLA) for vLLM-style engines: the public API and nothing else."""

from pathlib import Path

__version__ = "0.1.0"

# In a clone the subpackages are the folders beside this one; in a wheel they lie inside it.
if not (Path(__file__).parent / "kv_cache").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from pagedmla.kv_cache.checks import DroppedStoreWarning  # noqa: E402
from pagedmla.kv_cache.collection import (  # noqa: E402
    KVCacheStaticParams,
    PagedKVCache,
    PagedKVCacheCollection,
    generic_get_paged_cache,
    generic_get_paged_cache_with_scales,
)
from pagedmla.kv_cache.convert import convert_rows  # noqa: E402
from pagedmla.kv_cache.layouts import CacheLayout, QuantizedRows, get_layout, per_tensor_scale  # noqa: E402
from pagedmla.kv_cache.values import (  # noqa: E402
    FlattenOrder,
    KVCacheInputsPerDevice,
    PagedCacheValues,
    SplitKVHeadDims,
)
from pagedmla.plugin.api import attend, merge_states, store  # noqa: E402
from pagedmla.plugin.plan import Plan, plan  # noqa: E402

__all__ = [
    "CacheLayout",
    "DroppedStoreWarning",
    "FlattenOrder",
    "KVCacheInputsPerDevice",
    "KVCacheStaticParams",
    "PagedCacheValues",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "Plan",
    "QuantizedRows",
    "SplitKVHeadDims",
    "attend",
    "convert_rows",
    "generic_get_paged_cache",
    "generic_get_paged_cache_with_scales",
    "get_layout",
    "merge_states",
    "per_tensor_scale",
    "plan",
    "store",
]
