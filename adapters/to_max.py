"""MAX: a cache of ours as MAX's `KVCacheInputsPerDevice` of driver buffers, in the same memory. The way in is `max.py`.

MAX binds contiguous buffers. Within a page all must be packed; pages may lie further apart by whole rows, and are then
bound as a contiguous tensor that is too short, with the distance beside it. What MAX would read otherwise than it is
meant is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.adapters.max import (
    FIELDS,
    HINTS,
    LAYOUTS,
    METADATA,
    PARTITIONS,
    SCALES,
    STRIDES,
    check_version,
    flatten_order,
    installed_version,
    with_unit_scale,
)
from pagedmla.kv_cache.binding import bind_values
from pagedmla.kv_cache.checks import ceildiv, dtype_name, expect_tensor, host_int, refuse
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout, Fp8Flat, Fp8RopeBf16Prescaled
from pagedmla.kv_cache.page_pool import padded_columns
from pagedmla.kv_cache.paged_tensor import PACKED_PAGE_STRIDE, PagedTensor
from pagedmla.kv_cache.values import FlattenOrder, KVCacheInputsPerDevice, PagedCacheValues, single_device

_EXCHANGED = tuple(name for names in LAYOUTS.values() for name in names)


def values_to_max(values: KVCacheInputsPerDevice, layout: CacheLayout | str) -> Any:
    """One device's cache as MAX's `KVCacheInputsPerDevice`. Only ints are copied, into one-element buffers.

    `layout` says what the rows mean. `fp8_rope_bf16` is refused: MAX would read its rope as divided by sigma
    (`convert_rows` divides it). So are tables narrower than MAX loads them (`table_columns`). For an absent scales'
    table stands the values' table. `split_head_dims` and `mixed_step_split` are hints whose meaning in MAX is
    undocumented: they aren't passed on. Raises ValueError and TypeError that name the tensor.
    """
    check_version(installed_version())
    from max.nn.kv_cache import KVCacheInputsPerDevice as MaxInputs

    known = MaxInputs.__dataclass_fields__
    values, layout, cache = _checked(values, layout)
    blocks, page_stride = _short(cache.value_pool, values.page_stride)
    made = {
        "kv_blocks": blocks.view(layout.value_dtypes[0]),
        "page_stride": page_stride,
        "cache_lengths": _lengths(values.cache_lengths),
        "lookup_table": _table(cache, values.lookup_table, "lookup_table"),
        "max_prompt_length": _one(values.max_prompt_length, cache.max_prompt_length, torch.uint32),
        "max_cache_length": _one(values.max_cache_length, cache.max_cache_length, torch.uint32),
    }
    if values.kv_scales is not None and cache.scale_pool is not None:
        scales, scales_page_stride = _short(cache.scale_pool, values.scales_page_stride)
        table = _table(cache, cache.scales_lookup_table, "scales_lookup_table")
        made |= dict(zip(SCALES, (scales, scales_page_stride, table)))
    made |= {name: _metadata(values, name) for name in METADATA if getattr(values, name) is not None}
    for name in PARTITIONS:
        number = getattr(values, name)
        if number is not None:
            made[name] = _one(number, host_int(number, name, minimum=1), torch.int64)
    for name in STRIDES.values():
        if name not in known and name in made:  # 26.6
            stride = int(made.pop(name))
            if stride != PACKED_PAGE_STRIDE:
                refuse(name, f"packed pages (-1), since max {installed_version()} knows no others", stride)
    return MaxInputs(**{name: _buffer(tensor) for name, tensor in made.items()})


def cache_to_max(values: PagedCacheValues, layout: CacheLayout | str) -> tuple[Any, ...]:
    """A cache on all its devices as the tuple that MAX's models take: `values_to_max` of each."""
    return tuple(values_to_max(values.per_device(index), layout) for index in range(values.n_devices))


def values_to_flat(
    values: KVCacheInputsPerDevice, layout: CacheLayout | str, order: FlattenOrder | str = FlattenOrder.DECLARATION
) -> list[Any]:
    """`values_to_max` as MAX's flat list of driver buffers, in one of its three orders or by its name."""
    order = flatten_order(order)
    made = values_to_max(values, layout)
    fields = {name: getattr(made, name, None) for name in FIELDS if name not in HINTS}
    return KVCacheInputsPerDevice(**fields).flatten(order)[0]


def decode_arguments(values: KVCacheInputsPerDevice) -> tuple[Any, Any]:
    """What MAX's scaled decode takes of one layer in `fp8_rope_bf16_prescaled`: inputs, and the scales beside them.

    It finds scales through the values' table and takes them packed. Ids of their own are refused, and padded scales.
    """
    values = single_device(values)
    if values.kv_blocks.shape[2] != 1:
        refuse("kv_blocks", "one layer, since MAX keeps the scales of each in a buffer of its own", values.kv_blocks)
    own, shared = values.scales_lookup_table, values.lookup_table
    if own is not None and _place(own) != _place(shared):
        refuse("scales_lookup_table", "None or lookup_table, which MAX's scaled decode takes for both", own)
    made = values_to_max(values, Fp8RopeBf16Prescaled.name)
    if not values.kv_scales.is_contiguous():
        refuse("kv_scales", "packed pages, which MAX's scaled decode needs", f"strides {values.kv_scales.stride()}")
    scales = made.kv_scales
    for name in SCALES:
        if hasattr(made, name):
            setattr(made, name, None)
    return made, scales


def table_columns(tokens: int, page_size: int) -> int:
    """Columns that a table must have for MAX, which loads ids by sixteens, up to past the last page of `tokens`."""
    return padded_columns(ceildiv(tokens, page_size))


# -- what MAX takes ----------------------------------------------------------------------------------------------------


def _checked(
    values: KVCacheInputsPerDevice, layout: CacheLayout | str
) -> tuple[KVCacheInputsPerDevice, CacheLayout, PagedKVCacheCollection]:
    """One device's values, their layout and cache: known to fit each other, and to mean the same to MAX."""
    values = single_device(values)
    name = layout if isinstance(layout, str) else layout.name
    pool = values.kv_blocks
    unscaled = name == Fp8Flat.name and values.kv_scales is None and isinstance(pool, Tensor) and pool.dim() == 6
    _, layout, cache = bind_values(with_unit_scale(values) if unscaled else values, layout)
    if layout.name not in _EXCHANGED:
        hint = "Convert its rows first: pagedmla.convert_rows." if layout.quantised else ""
        refuse("layout", f"one that MAX reads as it is meant ({', '.join(_EXCHANGED)})", layout.name, hint)
    return values, layout, cache


def _short(pool: PagedTensor, given_stride: Any) -> tuple[Tensor, Tensor]:
    """The contiguous tensor under which MAX binds a pool, and its page stride."""
    tensor, name = pool.tensor, pool.name
    packed = torch.empty(tensor.shape, device="meta").stride()
    inner = zip(tensor.shape[1:], tensor.stride()[1:], packed[1:])
    if any(size > 1 and stride != wanted for size, stride, wanted in inner):
        hint = "MAX has no scale for a whole tensor; where it is 1, leave kv_scales away." if pool.repeated else ""
        refuse(name, f"pages packed within, strides (*, {', '.join(map(str, packed[1:]))})", str(tensor.stride()), hint)
    row = tensor.shape[4] * tensor.shape[5]
    if pool.page_stride % row:
        hint = "MAX counts its way to a page in rows."
        refuse(STRIDES[name], f"a whole number of rows of {row} elements", pool.page_stride, hint)
    is_packed = pool.page_stride == packed[0] or pool.num_pages < 2
    stride = PACKED_PAGE_STRIDE if is_packed else pool.page_stride
    return tensor.as_strided(tensor.shape, packed), _one(given_stride, stride, torch.int64)


def _lengths(lengths: Tensor) -> Tensor:
    if lengths.device.type == "cpu" and lengths.numel() and int(lengths.view(torch.int32).min()) < 0:
        refuse("cache_lengths", "lengths of at least 0, since MAX reads them unsigned", str(lengths.tolist()))
    return _contiguous(lengths, "cache_lengths").view(torch.uint32)


def _table(cache: PagedKVCacheCollection, table: Tensor, name: str) -> Tensor:
    """A table that is wide enough for what can be known of the lengths without reading a device."""
    lengths = cache.cache_lengths
    readable = lengths.device.type == "cpu" and lengths.numel() > 0
    tokens = 1 + (int(lengths.view(torch.int32).max()) if readable else 0)
    columns = table_columns(tokens, cache.page_size)
    if table.shape[1] < columns or table.shape[1] % 8:
        hint = "MAX loads ids past the last one used: see table_columns."
        refuse(name, f"at least {columns} columns, and a multiple of 8", table, hint)
    return _contiguous(table, name).view(torch.uint32)


def _metadata(values: KVCacheInputsPerDevice, name: str) -> Tensor:
    hint = "It is (batch, largest query length, partitions)."
    return _contiguous(expect_tensor(getattr(values, name), name, [3], (torch.int64,), hint), name)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _contiguous(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_contiguous():
        refuse(name, "a contiguous tensor, as MAX binds no other", f"strides {tensor.stride()}")
    return tensor


def _one(given: Any, number: int, dtype: torch.dtype) -> Tensor:
    """`[1]` on the host: `given` itself where it is that already."""
    is_it = isinstance(given, Tensor) and given.dtype == dtype and given.shape == (1,) and int(given) == number
    return given if is_it else torch.tensor([number], dtype=dtype)


def _buffer(tensor: Tensor) -> Any:
    """A driver buffer over the memory of a contiguous tensor; FP8 through its bytes."""
    from max.driver import Buffer
    from max.dtype import DType

    name = dtype_name(tensor.dtype)
    if not name.startswith("float8"):
        return Buffer.from_dlpack(tensor)
    return Buffer.from_dlpack(tensor.view(torch.uint8)).view(getattr(DType, name), tuple(tensor.shape))
