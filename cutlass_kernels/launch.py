"""From tensors to a launch: checks, tensor maps, launch attributes and the stream.

A launcher is one variant on one device. Making one loads its cubins, so make it before a graph is captured; a call
checks, packs and launches, and is safe in a capture. What depends on shapes, strides and places alone is worked out
once for each; the stream is torch's current one, asked for in every call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagedmla.cutlass_kernels import schedule
from pagedmla.cutlass_kernels.arguments import COMBINE, DECODE
from pagedmla.cutlass_kernels.cubin_cache import Cubin, CubinCache
from pagedmla.cutlass_kernels.driver import CudaDriver, Driver, DriverError
from pagedmla.cutlass_kernels.launch_checks import CallTensors, check_addresses, check_form, check_pool, check_scales
from pagedmla.cutlass_kernels.loaded_kernel import LoadedKernel
from pagedmla.cutlass_kernels.tiles import LATENT
from pagedmla.cutlass_kernels.variants import COMBINES, CombineVariant, Variant
from pagedmla.kv_cache.checks import refuse
from pagedmla.kv_cache.layouts import RowPlanes

LOG2E = math.log2(math.e)
_HELD = 4096  # of each kind of what is worked out once; what is let go is worked out again

_Key = tuple[Any, ...]
_Worked = TypeVar("_Worked")


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch of cut requests: what workers keep of their pieces, and how each query row was cut.

    It may hold anything: decode writes `cuts` of every row in every launch, and nobody reads a partial row that decode
    didn't write. Without partial rows nothing can be cut.
    """

    partial_out: Tensor  # [partial rows, 512] float32
    partial_lse: Tensor  # [partial rows] float32
    cuts: Tensor  # [rows] int32

    @cached_property
    def rows(self) -> int:
        return self.cuts.shape[0]

    @cached_property
    def partial_rows(self) -> int:
        return self.partial_lse.shape[0]

    @cached_property
    def addresses(self) -> dict[str, int]:
        return {name: getattr(self, name).data_ptr() for name in ("partial_out", "partial_lse", "cuts")}

    @classmethod
    def empty(cls, partial_rows: int, rows: int, device: torch.device | str) -> Workspace:
        return cls(
            torch.empty(partial_rows, LATENT, dtype=torch.float32, device=device),
            torch.empty(partial_rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )


def partial_rows(variant: Variant, multiprocessors: int) -> int:
    """Rows that a workspace holds for steps that may be cut, on a device of so many multiprocessors."""
    return int(schedule.partial_rows(multiprocessors // variant.cluster, variant.rows))


class DecodeLauncher:
    """A variant of the decode kernel on one device, with the kernel that merges what it cut.

    `device` is the device's number, `current_stream` gives a stream's handle.
    """

    def __init__(
        self,
        variant: Variant,
        driver: Driver,
        device: int,
        decode: Cubin,
        combine: Cubin,
        current_stream: Callable[[], int],
    ) -> None:
        self.variant = variant
        self._driver, self._device = driver, device
        self._threads = threading.local()  # those that are known to have a context
        driver.make_current(device)
        self._decode = LoadedKernel(driver, decode, DECODE)
        self._combine = LoadedKernel(driver, combine, COMBINE)
        self._grid = self._decode.clusters_held() * variant.cluster  # a CTA a multiprocessor
        if self._grid == 0:
            raise DriverError(f"{variant.name}: the device holds no cluster of {variant.cluster} CTAs of this kernel")
        self._partial_rows = partial_rows(variant, self._grid)
        self._most_merging = self._grid * CombineVariant.per_multiprocessor
        self._current_stream = current_stream
        self._pools: dict[_Key, dict[str, Any]] = {}
        self._forms: dict[_Key, dict[str, int]] = {}

    def __call__(
        self,
        q: Tensor,
        planes: RowPlanes,
        lookup_table: Tensor,
        cache_lengths: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
        lse: Tensor,
        workspace: Workspace,
        *,
        sm_scale: float,
        causal: bool = True,
        num_partitions: int = 1,
        scales_lookup_table: Tensor | None = None,
    ) -> None:
        """`q [T, H, 576]` over the pages of `planes` into `out [T, H, 512]` and `lse [T, H]` float32.

        The rest is as in `reference.attention.attend`. NotTaken, a ValueError, names what this variant doesn't take; no
        device value is read.
        """
        if q.numel() == 0:
            return
        scales = check_scales(self.variant, planes.scales)
        scales_table = lookup_table if scales_lookup_table is None else scales_lookup_table
        form = self._form(q, out, lse, lookup_table, scales_table, cache_lengths, query_start_loc)
        q_address, out_address = q.data_ptr(), out.data_ptr()
        check_addresses(q_address, out_address)
        rows = form["rows"]
        partial = self._partial_rows if num_partitions > 1 else 0
        if rows > workspace.rows or partial > workspace.partial_rows:
            held = f"room for {workspace.rows} rows and {workspace.partial_rows} partial ones"
            refuse("workspace", f"room for {rows} rows and {partial} partial ones", held)
        values = {
            **form,
            **self._pool(planes, scales),
            **workspace.addresses,
            "q": q_address,
            "lookup_table": lookup_table.data_ptr(),
            "scales": scales.data_ptr(),
            "scales_lookup_table": scales_table.data_ptr(),
            "cache_lengths": cache_lengths.data_ptr(),
            "query_start_loc": query_start_loc.data_ptr(),
            "out": out_address,
            "lse": lse.data_ptr(),
            "partitions": min(num_partitions, CombineVariant.pieces),
            "tile_rows": self.variant.rows,
            "causal": int(causal),
            "scale_log2": sm_scale * LOG2E,
        }
        if not hasattr(self._threads, "known"):
            self._driver.make_current(self._device)
            self._threads.known = True
        stream = self._current_stream()
        self._decode.launch(stream, self._grid, values)
        if num_partitions > 1:
            self._combine.launch(stream, min(rows * CombineVariant.parts, self._most_merging), values)

    # What depends on shapes, strides, types and devices alone.

    def _form(
        self, q: Tensor, out: Tensor, lse: Tensor, table: Tensor, scales_table: Tensor, lengths: Tensor, starts: Tensor
    ) -> dict[str, int]:
        """Sizes and strides among the arguments, which stand in the order of CallTensors."""
        of_scales: _Key = ()  # they have a table of their own, or not
        if scales_table is not table:
            of_scales = (scales_table.shape, scales_table.stride(), scales_table.dtype, scales_table.device)
        key = (
            *(q.shape, q.stride(), q.dtype, q.device, out.shape, out.stride(), out.dtype, out.device),
            *(lse.shape, lse.stride(), lse.dtype, lse.device),
            *(table.shape, table.stride(), table.dtype, table.device, *of_scales),
            *(lengths.shape, lengths.stride(), lengths.dtype, lengths.device),
            *(starts.shape, starts.stride(), starts.dtype, starts.device),
        )  # written out: a loop over the tensors takes a third more
        form = self._forms.get(key)
        if form is None:
            tensors = CallTensors(q, out, lse, table, scales_table, lengths, starts)
            form = _hold(self._forms, key, self._check_form(tensors))
        return form

    def _check_form(self, tensors: CallTensors) -> dict[str, int]:
        check_form(self.variant, tensors)
        q, out = tensors.q, tensors.out
        tokens, heads, _ = q.shape
        return {
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_out_token": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_table": tensors.lookup_table.stride(0),
            "stride_scales_table": tensors.scales_lookup_table.stride(0),
            "batch": tensors.cache_lengths.shape[0],
            "tokens": tokens,
            "heads": heads,
            "rows": tokens * heads,
        }

    # What depends on a pool and where it lies.

    def _pool(self, planes: RowPlanes, scales: Tensor) -> dict[str, Any]:
        """Both maps, page size and scale strides of a layer."""
        latent, rope = planes.latent, planes.rope
        key = (
            *(latent.data_ptr(), latent.shape, latent.stride(), latent.dtype, latent.device),
            *(rope.data_ptr(), rope.shape, rope.stride(), rope.dtype, planes.rope_scaled),
            *(scales.shape, scales.stride(), scales.dtype),
        )
        pool = self._pools.get(key)
        if pool is None:
            pool = _hold(self._pools, key, self._map_pool(planes, scales))
        return pool

    def _map_pool(self, planes: RowPlanes, scales: Tensor) -> dict[str, Any]:
        latent_map, rope_map = check_pool(self.variant, planes)
        return {
            "latent_map": self._driver.encode(latent_map),
            "rope_map": self._driver.encode(rope_map),
            "page_shift": planes.latent.shape[1].bit_length() - 1,
            "stride_scale_page": scales.stride(0),
            "stride_scale_slot": scales.stride(1),
        }


def _hold(held: dict[_Key, _Worked], key: _Key, worked: _Worked) -> _Worked:
    if len(held) >= _HELD:
        held.clear()
    held[key] = worked
    return worked


_making = threading.Lock()


def launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    """The launcher of a variant on a CUDA device; called like a DecodeLauncher, whichever device is current.

    Made at the first call: its cubins are loaded, and built before that where there are none and the DSL is installed.
    """
    with _making:
        index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
        return _launcher(variant, index)


@cache
def _launcher(variant: Variant, index: int) -> Callable[..., None]:
    from pagedmla.cutlass_kernels.build import on_demand

    cubins = CubinCache()
    decode = on_demand(variant, cubins)
    combine = on_demand(next(each for each in COMBINES if each.dtype == variant.dtype), cubins)
    with torch.cuda.device(index):
        made = DecodeLauncher(
            variant, CudaDriver(), index, decode, combine, lambda: int(torch.cuda.current_stream(index).cuda_stream)
        )

    def call(*args: Any, **kwargs: Any) -> None:
        if torch.cuda.current_device() == index:
            return made(*args, **kwargs)
        with torch.cuda.device(index):
            return made(*args, **kwargs)

    return call
