"""A step's cache in a file: strides, storages that tensors share and per-tensor scales come back as they were.

The file is `torch.save` of plain containers and bytes, so `torch.load(weights_only=True)` reads it and runs no code. It
holds every storage once, and each tensor as a view into one of them: torch itself refuses to save tensors of different
dtypes that share memory, as values and scales in one slab do. A view into an arena is saved with the whole arena.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import refuse
from pagedmla.kv_cache.layouts import CacheLayout, get_layout, resolve_layout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, SplitKVHeadDims, single_device

FORMAT = "pagedmla cache"
VERSION = 1


class SavedCache(NamedTuple):
    """What `load_cache` returns; `query_start_loc` is None where the file has none."""

    values: KVCacheInputsPerDevice
    layout: CacheLayout
    query_start_loc: Tensor | None


def save_cache(
    path: str | PathLike[str],
    values: KVCacheInputsPerDevice,
    layout: CacheLayout | str,
    query_start_loc: Tensor | None = None,
) -> None:
    """Write one device's cache, its layout and the step's query starts `[B + 1]` to `path`."""
    values = single_device(values)
    layout = resolve_layout(layout, values.kv_blocks, values.kv_scales)
    dims = values.split_head_dims
    storages = _Storages()
    saved = {field.name: storages.describe(getattr(values, field.name)) for field in fields(values)}
    saved["split_head_dims"] = None if dims is None else [dims.key_head_dim, dims.value_head_dim]
    described = {
        "name": layout.name,
        "latent": layout.latent,
        "rope": layout.rope,
        "granularity": getattr(layout, "granularity", None),
    }
    data = {
        "format": FORMAT,
        "version": VERSION,
        "layout": described,
        "values": saved,
        "query_start_loc": storages.describe(query_start_loc),
        "storages": storages.bytes,
    }
    torch.save(data, path)


def load_cache(path: str | PathLike[str]) -> SavedCache:
    """Read what `save_cache` wrote, onto the CPU. Raises ValueError for any other file, FileNotFoundError for none."""
    path = Path(path)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        _not_ours(path, f"a file that torch can't load ({type(error).__name__})")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        _not_ours(path, "another file of torch.save")
    if data["version"] != VERSION:
        refuse(str(path), f"version {VERSION} of the format", f"version {data['version']}", "Use a newer pagedmla.")
    saved = {name: _rebuild(value, data["storages"]) for name, value in data["values"].items()}
    if saved["split_head_dims"] is not None:
        saved["split_head_dims"] = SplitKVHeadDims(*saved["split_head_dims"])
    starts = _rebuild(data["query_start_loc"], data["storages"])
    return SavedCache(KVCacheInputsPerDevice(**saved), get_layout(**data["layout"]), starts)


class _Storages:
    """The memory behind tensors, each piece once, as uint8 tensors."""

    def __init__(self) -> None:
        self.bytes: list[Tensor] = []
        self._index: dict[int, int] = {}

    def describe(self, value: Any) -> Any:
        """A tensor as a view into one of the storages; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        index = self._index.setdefault(storage.data_ptr(), len(self.bytes))
        if index == len(self.bytes):
            self.bytes.append(torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage))
        return {
            "storage": index,
            "dtype": value.dtype,
            "offset": value.storage_offset(),
            "shape": tuple(value.shape),
            "stride": value.stride(),
        }


def _rebuild(described: Any, storages: list[Tensor]) -> Any:
    if not isinstance(described, dict):
        return described
    storage = storages[described["storage"]].untyped_storage()
    view = torch.empty(0, dtype=described["dtype"])
    return view.set_(storage, described["offset"], described["shape"], described["stride"])


def _not_ours(path: Path, got: str) -> None:
    refuse(str(path), "a cache written by pagedmla.save_cache", got)
