"""What an engine hands over for a step: the cache of one device, and the bundle of all devices.

The fields and their order are those of MAX's `KVCacheInputsPerDevice`. Three orders exist in which MAX flattens them;
`FlattenOrder` names them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pagedmla.kv_cache.checks import IndexRefusal, describe, expect_tensor, host_int, refuse
from pagedmla.kv_cache.collection import (
    PagedKVCacheCollection,
    bind_collection,
)
from pagedmla.kv_cache.paged_tensor import PACKED_PAGE_STRIDE


@dataclass(frozen=True)
class SplitKVHeadDims:
    """Head widths of keys and values where they differ: 576 and 512 for MLA.

    Our reading of a name that MAX leaves undocumented. Static: it is never a tensor.
    """

    key_head_dim: int
    value_head_dim: int


class FlattenOrder(enum.Enum):
    """The orders in which MAX lays the fields out; absent fields are skipped in all of them."""

    DECLARATION = "declaration"  # graph inputs: every field as declared
    OPERAND = "operand"  # a kernel's operands: page strides ahead, no dispatch metadata
    ITERATION = "iteration"  # `for leaf in values`: the oldest form, no strides and no scale table

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of `KVCacheInputsPerDevice` that it has, in its order."""
        return _ORDERS[self]


_DECLARATION = (
    "kv_blocks",
    "cache_lengths",
    "lookup_table",
    "max_prompt_length",
    "max_cache_length",
    "page_stride",
    "kv_scales",
    "scales_page_stride",
    "scales_lookup_table",
    "attention_dispatch_metadata",
    "draft_attention_dispatch_metadata",
    "mla_num_partitions",
    "draft_mla_num_partitions",
    "mixed_step_split",
)
_ORDERS = {
    FlattenOrder.DECLARATION: _DECLARATION,
    FlattenOrder.OPERAND: (
        "kv_blocks",
        "page_stride",
        "cache_lengths",
        "lookup_table",
        "max_prompt_length",
        "max_cache_length",
        "kv_scales",
        "scales_page_stride",
        "scales_lookup_table",
    ),
    FlattenOrder.ITERATION: (
        "kv_blocks",
        "cache_lengths",
        "lookup_table",
        "max_prompt_length",
        "max_cache_length",
        "kv_scales",
    ),
}


def _told(value: object) -> str:
    return f"{describe(value)} {value.device}" if isinstance(value, Tensor) else repr(value)


class FlattenSpec(NamedTuple):
    """What `unflatten` needs beside the leaves: their order, which fields they are, and what isn't a tensor."""

    order: FlattenOrder
    present: tuple[str, ...]
    split_head_dims: SplitKVHeadDims | None


class Dispatch(NamedTuple):
    """How decode rows of a step are launched, from host values; None where the values don't say."""

    max_query_length: int | None
    num_partitions: int | None


@dataclass(frozen=True, eq=False, repr=False)
class KVCacheInputsPerDevice:
    """The paged cache of one device for one step.

    kv_blocks            [num_pages, kv_dim, num_layers, page_size, num_heads, row] device; written in place
    cache_lengths        [batch] uint32 or int32, device: tokens in the cache before this step
    lookup_table         [batch, max_pages] uint32 or int32, device: page ids of the values
    max_prompt_length    [1] uint32, host: largest query length of the step (an upper bound)
    max_cache_length     [1] uint32, host: largest kv_len of the step (an upper bound)
    page_stride          [1] int64, host: elements from page to page of kv_blocks; -1 or None = its own stride(0)
    kv_scales            [num_scale_pages, kv_dim, num_layers, page_size, num_heads, G] device; written in place
    scales_page_stride   [1] int64, host: the same for kv_scales
    scales_lookup_table  [batch, max_pages] uint32 or int32, device: page ids of the scales; None = lookup_table
    attention_dispatch_metadata        [3] int64, host or device: batch, largest query length, partitions (upper
                                       bounds); only one on the host is checked
    draft_attention_dispatch_metadata  the same at the draft's query length (speculative decoding)
    mla_num_partitions                 [1] int64, host: the third of attention_dispatch_metadata
    draft_mla_num_partitions           the same for the draft
    split_head_dims      key and value widths, static
    mixed_step_split     [2] int32, host: how many requests, and how many of their query tokens, stand first in the step
                         and are decode rows. Our reading of a name that MAX leaves undocumented.

    max_prompt_length, max_cache_length and both page strides may be ints. `==` is identity: compare fields.
    """

    kv_blocks: Any
    cache_lengths: Any
    lookup_table: Any
    max_prompt_length: Any
    max_cache_length: Any
    page_stride: Any
    kv_scales: Any = None
    scales_page_stride: Any = None
    scales_lookup_table: Any = None
    attention_dispatch_metadata: Any = None
    draft_attention_dispatch_metadata: Any = None
    mla_num_partitions: Any = None
    draft_mla_num_partitions: Any = None
    split_head_dims: SplitKVHeadDims | None = None
    mixed_step_split: Any = None

    MUTATED: ClassVar[tuple[str, ...]] = ("kv_blocks", "kv_scales")

    def __repr__(self) -> str:
        """Tensors by shape, dtype and device: a cache's numbers would fill every traceback."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        told = [f"{name}={_told(value)}" for name, value in given.items() if value is not None]
        return f"{type(self).__name__}({', '.join(told)})"

    def collection(self, quantization_granularity: int | None = None) -> PagedKVCacheCollection:
        """The addressable cache; checks shapes, dtypes, devices and strides, and reads no device value.

        `quantization_granularity` (row elements a scale) is needed only where the scales don't divide the row evenly.
        """
        blocks = expect_tensor(self.kv_blocks, "kv_blocks", [None] * 6, ())
        if self.kv_scales is None:
            for name in ("scales_lookup_table", "scales_page_stride"):
                if getattr(self, name) is not None:
                    refuse(name, "None, since there are no kv_scales", getattr(self, name))
        return bind_collection(
            blocks,
            self.cache_lengths,
            self.lookup_table,
            self.max_prompt_length,
            self.max_cache_length,
            self.kv_scales,
            self.scales_lookup_table,
            quantization_granularity=quantization_granularity,
            page_stride=self.page_stride,
            scales_page_stride=self.scales_page_stride,
            prefix="kv_",
        )

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def for_draft(self) -> KVCacheInputsPerDevice:
        """The same cache with the draft's dispatch metadata in force; refused where there is none."""
        if self.draft_attention_dispatch_metadata is None and self.draft_mla_num_partitions is None:
            refuse("draft_attention_dispatch_metadata", "[3] int64 for a draft step", None)
        return replace(
            self,
            attention_dispatch_metadata=self.draft_attention_dispatch_metadata,
            mla_num_partitions=self.draft_mla_num_partitions,
            draft_attention_dispatch_metadata=None,
            draft_mla_num_partitions=None,
        )

    def dispatch(self, max_query_length: int) -> Dispatch:
        """What the metadata asks for in a step whose largest query length is `max_query_length`.

        Metadata on the host is checked against its host copy. Draft metadata on the host serves a step of exactly the
        draft's query length. On a device it can't be read without a sync: call `for_draft()`.
        """
        target = self._dispatch("attention_dispatch_metadata", "mla_num_partitions")
        draft = self._dispatch("draft_attention_dispatch_metadata", "draft_mla_num_partitions")
        if draft.max_query_length == max_query_length != target.max_query_length:
            return draft
        return target

    def _dispatch(self, metadata_name: str, partitions_name: str) -> Dispatch:
        metadata, partitions = getattr(self, metadata_name), getattr(self, partitions_name)
        host = None if partitions is None else host_int(partitions, partitions_name, minimum=1)
        if metadata is None:
            return Dispatch(None, host)
        expect_tensor(metadata, metadata_name, [3], (torch.int64,), "It is (batch, largest query length, partitions).")
        if metadata.device.type != "cpu":
            return Dispatch(None, host)
        batch, max_query_length, count = metadata.tolist()
        if host is not None and count != host:
            refuse(partitions_name, f"{count}, as in {metadata_name}", host)
        if count < 1:
            refuse(metadata_name, "at least 1 partition", metadata.tolist())
        if batch < self.cache_lengths.shape[0]:
            refuse(metadata_name, f"a batch of at least {self.cache_lengths.shape[0]}", metadata.tolist())
        return Dispatch(max_query_length, count)

    # -- flattening --------------------------------------------------------------------------------------------------

    def flatten(self, order: FlattenOrder = FlattenOrder.DECLARATION) -> tuple[list[Any], FlattenSpec]:
        """The leaves in one of MAX's orders, and what `unflatten` needs to undo it."""
        present = tuple(name for name in order.fields if getattr(self, name) is not None)
        return [getattr(self, name) for name in present], FlattenSpec(order, present, self.split_head_dims)

    @classmethod
    def unflatten(cls, leaves: Iterable[Any], spec: FlattenSpec) -> KVCacheInputsPerDevice:
        """Undo `flatten`. Takes exactly its own leaves from an iterator; fields outside the order come back None."""
        source = iter(leaves)
        found = {}
        for name in spec.present:
            try:
                found[name] = next(source)
            except StopIteration:
                refuse("leaves", f"{len(spec.present)} for {list(spec.present)}", f"{len(found)}")
        missing = {name: None for name in _DECLARATION if name not in found}
        return cls(**found, **missing, split_head_dims=spec.split_head_dims)

    def __iter__(self) -> Any:
        """The leaves in `FlattenOrder.ITERATION`, as MAX iterates."""
        return iter(self.flatten(FlattenOrder.ITERATION)[0])


@dataclass(frozen=True, eq=False, repr=False)
class PagedCacheValues(KVCacheInputsPerDevice):
    """The caches of several devices as one object: a field holds one tensor a device, in a tuple.

    Plain tensors mean one device.
    """

    @classmethod
    def from_upstream(cls, per_device: Sequence[KVCacheInputsPerDevice], mapping: Any) -> PagedCacheValues:
        """Bundle per-device caches; `mapping` is a list of devices, or a torch DeviceMesh read for its device list.

        Every device must have the same optional fields, and its blocks must lie on its own device. Raises ValueError
        that names the device and the field.
        """
        caches, devices = list(per_device), _device_list(mapping)
        if not caches:
            refuse("per_device", "at least one device's cache", "none")
        for index, cache in enumerate(caches):
            if not isinstance(cache, KVCacheInputsPerDevice):
                refuse(f"per_device[{index}]", "KVCacheInputsPerDevice", describe(cache), error=TypeError)
        if len(devices) != len(caches):
            refuse("mapping", f"{len(caches)} devices, one for each cache", f"{len(devices)}: {devices}")
        for index, (cache, device) in enumerate(zip(caches, devices)):
            for name in _DECLARATION:
                if (getattr(cache, name) is None) != (getattr(caches[0], name) is None):
                    has = "set" if getattr(cache, name) is not None else "None"
                    other = "set" if getattr(caches[0], name) is not None else "None"
                    refuse(f"device {index} ({device}): {name}", f"{other}, as on device 0 ({devices[0]})", has)
            if cache.split_head_dims != caches[0].split_head_dims:
                expected = f"{caches[0].split_head_dims}, as on device 0 ({devices[0]})"
                refuse(f"device {index} ({device}): split_head_dims", expected, cache.split_head_dims)
            if isinstance(cache.kv_blocks, Tensor) and not _on(cache.kv_blocks.device, device):
                refuse(f"device {index} ({device}): kv_blocks", f"a tensor on {device}", f"{cache.kv_blocks.device}")
        bundled = {
            name: None if getattr(caches[0], name) is None else tuple(getattr(cache, name) for cache in caches)
            for name in _DECLARATION
        }
        return cls(**bundled, split_head_dims=caches[0].split_head_dims)

    @property
    def n_devices(self) -> int:
        return len(self.kv_blocks) if isinstance(self.kv_blocks, (tuple, list)) else 1

    def per_device(self, index: int) -> KVCacheInputsPerDevice:
        """One device's cache."""
        if not 0 <= index < self.n_devices:
            raise IndexRefusal(f"per_device: {index} is out of range for {self.n_devices} devices")
        picked = {}
        for name in _DECLARATION:
            value = getattr(self, name)
            picked[name] = value[index] if isinstance(value, (tuple, list)) else value
        return KVCacheInputsPerDevice(**picked, split_head_dims=self.split_head_dims)

    def to_graph_values(self) -> KVCacheInputsPerDevice:
        """One device's cache, every field a tensor, for a torch custom op or torch.export.

        `kv_blocks` and `kv_scales` (`MUTATED`) are the arguments that an op writes. Refuses more than one device.
        """
        if self.n_devices != 1:
            refuse("to_graph_values", "one device", f"{self.n_devices} devices", "Take one with per_device(index).")
        single = self.per_device(0)
        as_tensors: dict[str, Any] = {
            "max_prompt_length": _as_host_tensor(single.max_prompt_length, torch.uint32),
            "max_cache_length": _as_host_tensor(single.max_cache_length, torch.uint32),
            "page_stride": _as_host_tensor(single.page_stride, torch.int64),
        }
        if single.kv_scales is not None:
            as_tensors["scales_page_stride"] = _as_host_tensor(single.scales_page_stride, torch.int64)
            if single.scales_lookup_table is None:
                as_tensors["scales_lookup_table"] = single.lookup_table
        for name in ("mla_num_partitions", "draft_mla_num_partitions"):
            if getattr(single, name) is not None:
                as_tensors[name] = _as_host_tensor(getattr(single, name), torch.int64)
        return replace(single, **as_tensors)

    def collection(self, quantization_granularity: int | None = None) -> PagedKVCacheCollection:
        if self.n_devices != 1:
            refuse("collection", "one device", f"{self.n_devices} devices", "Take one with per_device(index).")
        return self.per_device(0).collection(quantization_granularity)


def single_device(values: KVCacheInputsPerDevice) -> KVCacheInputsPerDevice:
    """`values` as one device's cache; a bundle of several is refused."""
    if not isinstance(values, KVCacheInputsPerDevice):
        refuse("values", "PagedCacheValues or KVCacheInputsPerDevice", describe(values), error=TypeError)
    if isinstance(values, PagedCacheValues):
        if values.n_devices != 1:
            refuse("values", "one device's cache", f"{values.n_devices} devices", "Take one with per_device(index).")
        return values.per_device(0)
    return values


def _as_host_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor([PACKED_PAGE_STRIDE if value is None else value], dtype=dtype)


def _on(actual: torch.device, wanted: torch.device) -> bool:
    if wanted.type == "cpu":
        return actual.type == "cpu"
    return actual == wanted or (actual.type == wanted.type and str(wanted) == wanted.type)


def _device_list(mapping: Any) -> list[torch.device]:
    if hasattr(mapping, "mesh") and hasattr(mapping, "device_type"):  # a torch.distributed DeviceMesh
        kind = mapping.device_type
        ranks = mapping.mesh.flatten().tolist()
        return [torch.device(kind) if kind == "cpu" else torch.device(kind, rank) for rank in ranks]
    if isinstance(mapping, (str, torch.device)):
        return [torch.device(mapping)]
    if not isinstance(mapping, Iterable):
        refuse("mapping", "a list of devices or a DeviceMesh", mapping, error=TypeError)
    try:
        return [torch.device(device) for device in mapping]
    except (RuntimeError, TypeError):
        refuse("mapping", "a list of devices or a DeviceMesh", list(mapping), error=TypeError)


def _register(cls: type[KVCacheInputsPerDevice]) -> None:
    """Let torch.export and torch.utils._pytree see the fields as leaves."""
    names = [field.name for field in fields(cls)]
    static = "split_head_dims"

    def flatten(values: KVCacheInputsPerDevice) -> tuple[list[Any], Any]:
        return [getattr(values, name) for name in names if name != static], values.split_head_dims

    def unflatten(leaves: Iterable[Any], split_head_dims: Any) -> KVCacheInputsPerDevice:
        return cls(**dict(zip([name for name in names if name != static], leaves)), split_head_dims=split_head_dims)

    def flatten_with_keys(values: KVCacheInputsPerDevice) -> Any:
        leaves, context = flatten(values)
        keys = [pytree.GetAttrKey(name) for name in names if name != static]
        return list(zip(keys, leaves)), context

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"pagedmla.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda dims: None if dims is None else [dims.key_head_dim, dims.value_head_dim],
        from_dumpable_context=lambda dims: None if dims is None else SplitKVHeadDims(*dims),
    )


_register(KVCacheInputsPerDevice)
_register(PagedCacheValues)
