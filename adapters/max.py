"""MAX: the paged cache of its managers as `KVCacheInputsPerDevice` and `PagedCacheValues`, in the same memory.

MAX hands a step over as one `KVCacheInputsPerDevice` a device. Its fields are ours by name and meaning:

    kv_blocks, kv_scales   pools that both sides write; in MAX's pooled manager they lie in one arena
    lookup tables          [B, W] uint32; unused columns hold page 0 or the page past the last, by manager
    page strides           [1] int64, in elements; -1 = packed, else the pool comes as a contiguous tensor that ends
                           before its last page does

Every tensor is shared by DLPack, FP8 through its bytes; no page is copied. MAX 26.6 has no page strides, and its
scales' table may be absent; `split_head_dims` and `mixed_step_split` are newer than 26.7. MAX itself isn't imported
here. The way back is `to_max.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from pagedmla.adapters.dlpack import pages_apart, shared
from pagedmla.kv_cache.checks import (
    IndexRefusal,
    counted,
    describe,
    dtype_name,
    expect_tensor,
    host_int,
    quoted,
    refuse,
)
from pagedmla.kv_cache.layouts import (
    LATENTS,
    ROPE,
    CacheLayout,
    Fp8Flat,
    Fp8RopeBf16Prescaled,
    get_layout,
    per_tensor_scale,
    resolve_layout,
)
from pagedmla.kv_cache.paged_tensor import PACKED_PAGE_STRIDE
from pagedmla.kv_cache.values import (
    FlattenOrder,
    FlattenSpec,
    KVCacheInputsPerDevice,
    PagedCacheValues,
    SplitKVHeadDims,
    single_device,
)

OLDEST_VERSION = (26, 6)
NEWEST_VERSION = (26, 7)
OLDEST, NEWEST = (".".join(map(str, version)) for version in (OLDEST_VERSION, NEWEST_VERSION))

# What rows of a dtype may be, in MAX. Where the rope beside an FP8 latent is bf16, MAX has divided it by sigma.
LAYOUTS: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("bf16",),
    torch.float16: ("fp16",),
    torch.float32: ("fp32",),
    torch.float8_e4m3fn: (Fp8Flat.name, Fp8RopeBf16Prescaled.name),
}

REQUIRED = ("kv_blocks", "cache_lengths", "lookup_table", "max_prompt_length", "max_cache_length")
STRIDES = {"kv_blocks": "page_stride", "kv_scales": "scales_page_stride"}
SCALES = ("kv_scales", "scales_page_stride", "scales_lookup_table")
METADATA = ("attention_dispatch_metadata", "draft_attention_dispatch_metadata")
PARTITIONS = ("mla_num_partitions", "draft_mla_num_partitions")
HINTS = ("split_head_dims", "mixed_step_split")
OPTIONAL = (*SCALES, *METADATA, *PARTITIONS, *HINTS)
FIELDS = (*REQUIRED, "page_stride", *OPTIONAL)


class UnknownMaxWarning(UserWarning):
    """A MAX newer than any that this adapter was tried on: its fields are taken by their names."""


@cache
def installed_version() -> str:
    """The version of the installed MAX. ImportError names the extra where there is none."""
    try:
        return metadata.version("max-core")
    except metadata.PackageNotFoundError:
        raise ImportError("max: it is not installed; pip install 'pagedmla[max]' does that") from None


@cache
def check_version(version: str) -> None:
    """ImportError for a MAX older than the adapter knows; a warning, once, for a newer one."""
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or (int(number[1]), int(number[2])) < OLDEST_VERSION:
        raise ImportError(
            f"max: expected {OLDEST} to {NEWEST}, whose cache interface pagedmla knows; got {version}. "
            f"Install one of those, or a pagedmla that knows this one."
        )
    if (int(number[1]), int(number[2])) > NEWEST_VERSION:
        message = f"max: {version} is newer than {NEWEST}, the last one tried; its fields are taken by their names"
        warnings.warn(message, UnknownMaxWarning, stacklevel=3)


# -- caches ------------------------------------------------------------------------------------------------------------


def values_from_max(inputs: Any) -> KVCacheInputsPerDevice:
    """One device's `KVCacheInputsPerDevice` of MAX, of driver buffers or eager tensors, as ours. Nothing is copied.

    A dict of the same fields will do. Fields that are absent come back None. MAX's managers write tables and lengths
    anew for the next step: take them anew too. Raises ValueError and TypeError that name the field: one that isn't
    known, one that is missing, or a graph's value, which has no memory yet.
    """
    if type(inputs).__module__.partition(".")[0] == "max":
        check_version(installed_version())
    fields = fields_of(inputs)
    taken: dict[str, Any] = {"page_stride": None}
    for name, value in fields.items():
        if name == "split_head_dims":
            taken[name] = _head_dims(value)
        elif name in STRIDES:
            stride = fields.get(STRIDES[name])
            taken[name] = _pool(value, name, None if stride is None else _tensor(stride, STRIDES[name]))
        else:
            taken[name] = _tensor(value, name)
    return KVCacheInputsPerDevice(**taken)


def cache_from_max(inputs: Any) -> PagedCacheValues:
    """One cache on all its devices: the tuple that MAX's managers make, or MAX's own distributed `PagedCacheValues`.

    A model of several caches has a dict of such tuples: take them one by one.
    """
    inputs = getattr(inputs, "children", getattr(inputs, "inputs", inputs))  # 26.6 wraps the dict, and the tuple
    if isinstance(inputs, Mapping):
        refuse("inputs", "the devices of one cache", f"a dict of caches: {', '.join(inputs)}", "Take them one by one.")
    devices = inputs if isinstance(inputs, (tuple, list)) else _shards(inputs)
    caches = [values_from_max(device) for device in devices]
    return PagedCacheValues.from_upstream(caches, [cache.kv_blocks.device for cache in caches])


def values_from_flat(
    leaves: Iterable[Any], order: FlattenOrder | str = FlattenOrder.DECLARATION, present: Sequence[str] | None = None
) -> KVCacheInputsPerDevice:
    """One device's cache from MAX's flat list of its fields, in one of MAX's three orders or by its name.

    `present` names the fields in the list, in their order; without it the length of the list tells, for an MLA cache of
    26.7. Lists of 26.6, without page strides, need it.
    ITERATION has no page strides and no scales' table: it serves packed pools whose ids are shared, and no others.
    """
    order, found = flatten_order(order), list(leaves)
    names = tuple(present) if present is not None else _present(order, len(found))
    if len(names) != len(found):
        refuse("leaves", f"{len(names)} for {list(names)}", f"{len(found)}")
    cache = KVCacheInputsPerDevice.unflatten(found, FlattenSpec(order, names, None))
    return values_from_max({name: value for name, value in vars(cache).items() if value is not None})


def flatten_order(order: FlattenOrder | str) -> FlattenOrder:
    """One of MAX's orders, by itself or by its name. ValueError names them."""
    try:
        return FlattenOrder(order)
    except ValueError:
        refuse("order", " or ".join(repr(each.value) for each in FlattenOrder), quoted(order))


# -- layouts and scales ------------------------------------------------------------------------------------------------


def layout_of(values: KVCacheInputsPerDevice, granularity: int | None = None) -> CacheLayout:
    """The layout of a cache that MAX made. Rows of 640 bytes are `fp8_rope_bf16_prescaled`, never the raw one.

    `granularity` (columns a scale) is needed only where scales don't divide a row evenly. FP8 without scales is
    `fp8_flat`, once it has its scale of 1 (`with_unit_scale`). ValueError names a dtype or row that no layout has.
    """
    values = single_device(values)
    blocks = expect_tensor(values.kv_blocks, "kv_blocks", [None, 1, None, None, 1, None], (), "It is an MLA cache.")
    layout = _layout_of_rows(blocks.dtype, blocks.shape[5])
    if values.kv_scales is None:
        return layout
    if isinstance(layout, Fp8Flat):
        named: CacheLayout | str = layout.name if granularity is None else replace(layout, granularity=granularity)
        return resolve_layout(named, blocks, values.kv_scales)
    return resolve_layout(layout, blocks, values.kv_scales)


def layout_of_params(params: Any) -> CacheLayout:
    """The layout behind MAX's `MLAKVCacheParams`. ValueError names the setting that none of ours has."""
    for name, wanted in (("kv_dim", 1), ("slots_per_page", params.page_size), ("per_layer_buffers", False)):
        got = getattr(params, name, wanted)
        if got != wanted:
            refuse(f"params.{name}", str(wanted), str(got))
    layout = _layout_of_rows(getattr(torch, params.dtype.name, params.dtype.name), params.head_dim)
    if params.quantized_kv_cache and isinstance(layout, Fp8Flat):
        return replace(layout, granularity=params.kvcache_quant_config.quantization_granularity)
    return layout


def with_unit_scale(values: KVCacheInputsPerDevice) -> KVCacheInputsPerDevice:
    """FP8 without scales, as MAX serves DeepSeek, as `store` and `attend` take it: with one scale of 1."""
    values = single_device(values)
    if values.kv_scales is not None:
        refuse("kv_scales", "None: a cache without scales", values.kv_scales)
    one = torch.ones(1, dtype=torch.float32, device=values.kv_blocks.device)
    return replace(values, kv_scales=per_tensor_scale(one, values.kv_blocks))


def with_decode_scales(values: KVCacheInputsPerDevice, kv_scales: Any, layer: int) -> KVCacheInputsPerDevice:
    """One layer with the scales that MAX's scaled decode takes beside the cache. It is layer 0 of what comes back.

    kv_scales  [num_pages, 1, 1, page_size, 1, 1] float32, found through the values' table
    """
    values = single_device(values)
    if values.kv_scales is not None:
        refuse("kv_scales", "None in the cache, since they come beside it", values.kv_scales)
    blocks = expect_tensor(values.kv_blocks, "kv_blocks", [None, 1, None, None, 1, None], (), "It is an MLA cache.")
    if not 0 <= layer < blocks.shape[2]:
        raise IndexRefusal(f"layer: {layer} is out of range for a cache of {blocks.shape[2]} layers")
    blocks = blocks[:, :, layer : layer + 1]  # its pages stay as far apart as they were
    shape = [blocks.shape[0], 1, 1, blocks.shape[3], 1, 1]
    scales = expect_tensor(_tensor(kv_scales, "kv_scales"), "kv_scales", shape, (torch.float32,))
    return replace(values, kv_blocks=blocks, kv_scales=scales)


def _layout_of_rows(dtype: torch.dtype | str, row: int) -> CacheLayout:
    names = LAYOUTS.get(dtype, ()) if isinstance(dtype, torch.dtype) else ()
    if not names:
        shown = dtype if isinstance(dtype, str) else dtype_name(dtype)
        refuse("kv_blocks", " or ".join(map(dtype_name, LAYOUTS)), shown)
    layouts = [get_layout(name, latent=latent) for name in names for latent in LATENTS]
    for layout in layouts:
        if layout.row_elements == row:
            return layout
    rows = ", ".join(f"{layout.row_elements} ({layout.name})" for layout in layouts)
    refuse(
        "kv_blocks",
        f"rows of {rows}",
        f"{row}",
        f"Layouts are for a latent of {' or '.join(map(str, LATENTS))} and a rope of {ROPE}.",
    )


# -- fields ------------------------------------------------------------------------------------------------------------


def fields_of(inputs: Any) -> dict[str, Any]:
    """The fields that are set. A name that isn't known is refused, and so is a missing one."""
    fields = inputs if isinstance(inputs, Mapping) else getattr(inputs, "__dict__", {})
    if "kv_blocks" not in fields:
        refuse("inputs", "a paged cache: MAX's KVCacheInputsPerDevice", describe(inputs), error=TypeError)
    given = {name: value for name, value in fields.items() if value is not None}
    for name in ("kv_blocks_per_layer", "kv_scales_per_layer"):
        if name in given:
            refuse(name, "None: one pool holds all layers", counted(len(given[name]), "buffer"))
    for name in given:
        if name not in FIELDS:
            wanted = f"None, since it is none of the known fields {', '.join(FIELDS)}"
            refuse(name, wanted, describe(given[name]), _which())
    for name in REQUIRED:
        if name not in given:
            refuse(name, "a buffer, as in every MAX that pagedmla knows", None, _which())
    return given


def _which() -> str:
    try:
        return f"This is max {installed_version()}; pagedmla knows {OLDEST} to {NEWEST}."
    except ImportError:
        return ""


def _shards(inputs: Any) -> list[dict[str, Any]]:
    """The devices of MAX's distributed `PagedCacheValues`: each of its tensors has a shard for each."""
    fields = fields_of(inputs)
    count = len(getattr(fields["kv_blocks"], "local_shards", [None]))
    return [
        {name: value.local_shards[i] if hasattr(value, "local_shards") else value for name, value in fields.items()}
        for i in range(count)
    ]


def _present(order: FlattenOrder, count: int) -> tuple[str, ...]:
    """The fields of an MLA cache that MAX flattens to `count` leaves."""
    dispatch: list[tuple[str, ...]] = [()]
    if order is FlattenOrder.DECLARATION:
        dispatch += [(METADATA[0], PARTITIONS[0]), (*METADATA, *PARTITIONS)]
    choices = [
        tuple(name for name in order.fields if name not in OPTIONAL or name in (*own, *extra))
        for own in ((), SCALES)
        for extra in dispatch
    ]
    for names in choices:
        if len(names) == count:
            return names
    counts = " or ".join(str(number) for number in sorted({len(names) for names in choices}))
    hint = "Name them: present=."
    refuse("leaves", f"{counts} for an MLA cache in the order {order.value!r}", str(count), hint)


def _tensor(value: Any, name: str) -> Tensor:
    """The memory of a driver buffer, or of the one that an eager tensor has."""
    if isinstance(value, Tensor):
        return value
    buffer = getattr(value, "storage", value)
    if not hasattr(buffer, "__dlpack__"):
        wanted = "a driver Buffer or a computed eager Tensor"
        refuse(name, wanted, describe(value), "A graph's values have no memory yet.", TypeError)
    return _typed(shared(_as_bytes(buffer), name), buffer)


def _as_bytes(buffer: Any) -> Any:
    """FP8 as bytes: every library exchanges those."""
    return buffer.view(type(buffer.dtype).uint8, buffer.shape) if _is_fp8(buffer) else buffer


def _typed(tensor: Tensor, buffer: Any) -> Tensor:
    return tensor.view(getattr(torch, buffer.dtype.name)) if _is_fp8(buffer) else tensor


def _is_fp8(buffer: Any) -> bool:
    """Of a library whose dtypes are members of one enumeration, as MAX's are: others have no bytes to ask for."""
    dtype = getattr(buffer, "dtype", None)
    return hasattr(type(dtype), "uint8") and str(getattr(dtype, "name", "")).startswith("float8")


def _pool(value: Any, name: str, page_stride: Tensor | None) -> Tensor:
    """A pool whose pages lie where they really do."""
    tensor = _tensor(value, name)
    stride = PACKED_PAGE_STRIDE if page_stride is None else host_int(page_stride, STRIDES[name], PACKED_PAGE_STRIDE)
    if stride == PACKED_PAGE_STRIDE or isinstance(value, Tensor) or (tensor.dim() and stride == tensor.stride(0)):
        return tensor
    buffer = getattr(value, "storage", value)
    return _typed(pages_apart(_as_bytes(buffer), stride, name, STRIDES[name]), buffer)


def _head_dims(value: Any) -> SplitKVHeadDims:
    """Our reading of a name that MAX leaves undocumented."""
    dims = [getattr(value, name, None) for name in ("key_head_dim", "value_head_dim")]
    if not all(isinstance(dim, int) for dim in dims):
        refuse("split_head_dims", "an object with key_head_dim and value_head_dim", repr(value), _which())
    return SplitKVHeadDims(*dims)  # type: ignore[arg-type]
