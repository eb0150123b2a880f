"""A step's cache in a file: strides, storages that tensors share and per-tensor scales come back as they were.

The file is `torch.save` of plain containers and bytes, so `torch.load(weights_only=True)` reads it and runs no code. It
holds every storage once, and each tensor as a view into one of them: torch itself refuses to save tensors of different
dtypes that share memory, as values and scales in one slab do. A view into an arena is saved with the whole arena.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import Refusal, expect_memory, refuse
from pagedmla.kv_cache.files import replacing
from pagedmla.kv_cache.layouts import CacheLayout, get_layout, resolve_layout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, SplitKVHeadDims, single_device

FORMAT = "pagedmla cache"
VERSION = 1


class SavedCache(NamedTuple):
    """What `load_cache` returns; `query_start_loc` and `request_names` are None where the file has none."""

    values: KVCacheInputsPerDevice
    layout: CacheLayout
    query_start_loc: Tensor | None
    request_names: list[str] | None


def save_cache(
    path: str | PathLike[str],
    values: KVCacheInputsPerDevice,
    layout: CacheLayout | str,
    query_start_loc: Tensor | None = None,
    request_names: Sequence[str] | None = None,
) -> None:
    """Write one device's cache and its layout to `path`; with it query starts `[B + 1]` and the rows' names.

    `path` is replaced by the whole file or stays as it was. OSError names it.
    """
    values = single_device(values)
    layout = resolve_layout(layout, values.kv_blocks, values.kv_scales)
    dims = values.split_head_dims
    if not isinstance(dims, (SplitKVHeadDims, type(None))):
        refuse("split_head_dims", "SplitKVHeadDims or None", dims, error=TypeError)
    storages = _Storages()
    saved = {field.name: storages.describe(getattr(values, field.name), field.name) for field in fields(values)}
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
        "query_start_loc": storages.describe(query_start_loc, "query_start_loc"),
        "request_names": None if request_names is None else [str(name) for name in request_names],
        "storages": storages.bytes,
    }
    with replacing(path) as file, _checksums():
        try:
            torch.save(data, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch would hide why a file can't be written
                raise error.__context__ from None
            raise


def load_cache(path: str | PathLike[str]) -> SavedCache:
    """Read what `save_cache` wrote, onto the CPU. Raises ValueError for any other file, FileNotFoundError for none."""
    path = Path(path)
    source = io.BytesIO(path.read_bytes()) if path.is_fifo() else path  # a pipe can't be read twice
    try:
        damaged = _damaged_part(source)
        data = torch.load(source, map_location="cpu", weights_only=True) if damaged is None else None
    except OSError:
        raise
    except Exception as error:  # the unpickler fails in as many ways as a file can be broken
        _not_ours(path, f"a file that torch can't load ({type(error).__name__})")
    if damaged is not None:
        _not_ours(path, f"a damaged one (its part {damaged!r} isn't what was written)")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        _not_ours(path, "another file of torch.save")
    version = data.get("version")
    if version != VERSION:
        refuse(str(path), f"version {VERSION} of the format", f"version {version}", "Use a newer pagedmla.")
    try:
        return _restore(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        kind = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
        _not_ours(path, f"a damaged one ({kind}{error})")


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """The archive's own, which a program may have switched off for its checkpoints."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _damaged_part(source: Path | io.BytesIO) -> str | None:
    """The first part of an archive whose checksum is off: torch reads flipped bytes as they are."""
    if not zipfile.is_zipfile(source):
        return None  # torch says what else it is
    with zipfile.ZipFile(source) as archive:
        # Without checksums torch writes 0 for each.
        damaged = archive.testzip() if any(part.CRC for part in archive.infolist()) else None
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return damaged


def _restore(data: dict[str, Any]) -> SavedCache:
    saved = {name: _rebuild(value, data["storages"]) for name, value in data["values"].items()}
    if saved["split_head_dims"] is not None:
        saved["split_head_dims"] = SplitKVHeadDims(*saved["split_head_dims"])
    starts = _rebuild(data["query_start_loc"], data["storages"])
    values = KVCacheInputsPerDevice(**saved)
    names = data.get("request_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"request_names: expected a list of names; got {names!r}")
    return SavedCache(values, get_layout(**data["layout"]), starts, names)


class _Storages:
    """The memory behind tensors, each piece once, as uint8 tensors."""

    def __init__(self) -> None:
        self.bytes: list[Tensor] = []
        self._index: dict[int, int] = {}

    def describe(self, value: Any, name: str) -> Any:
        """A tensor as a view into one of the storages; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        expect_memory(value, name)
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
    storage, dtype = storages[described["storage"]], described["dtype"]
    whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(described["shape"], described["stride"], described["offset"])  # bounded, unlike set_


def _not_ours(path: Path, got: str) -> NoReturn:
    refuse(str(path), "a cache written by pagedmla.save_cache", got)
