"""A cubin that the driver holds, and the block of bytes in which its arguments are handed over."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from pagedmla.cutlass_kernels.arguments import FLOAT32, INT32, INT64, MAP, POINTER, SIZES, Argument, offsets
from pagedmla.cutlass_kernels.cubin_cache import Cubin
from pagedmla.cutlass_kernels.driver import Driver, LaunchShape

_FORMATS = {MAP: "128s", POINTER: "Q", INT32: "i", INT64: "q", FLOAT32: "f"}


class ParameterBlock:
    """Arguments at the offsets that `arguments.offsets` gives; gaps are zero."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        layout, end = "<", 0
        places = offsets(tuple(arguments))
        for argument, place in zip(arguments, places, strict=True):
            layout += f"{place - end}x{_FORMATS[argument.kind]}"
            end = place + SIZES[argument.kind]
        self._packer = struct.Struct(layout)
        self._in_order = itemgetter(*(argument.name for argument in arguments))
        self._bytes = ctypes.create_string_buffer(self._packer.size)
        base = ctypes.addressof(self._bytes)
        self.addresses = [base + place for place in places]

    def pack(self, values: Mapping[str, Any]) -> None:
        """All arguments by name; KeyError names one that is absent. Others are left alone."""
        self._packer.pack_into(self._bytes, 0, *self._in_order(values))


class LoadedKernel:
    """A kernel in the current context. Making one loads it; `launch` only packs and launches."""

    def __init__(self, driver: Driver, cubin: Cubin, arguments: Sequence[Argument]) -> None:
        self.cubin = cubin
        self._driver = driver
        self._function = driver.function(driver.load(cubin.image), cubin.entry)
        driver.allow_shared(self._function, cubin.shared_bytes)
        self._parameters = ParameterBlock(arguments)
        self._starts: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()  # the block holds one call's arguments

    def clusters_held(self) -> int:
        """Clusters that the device holds at a time."""
        return self._driver.active_clusters(self._function, self._shape(self.cubin.cluster))

    def launch(self, stream: int, grid: int, values: Mapping[str, Any]) -> None:
        """`grid` CTAs on a stream, with arguments by name."""
        with self._lock:
            start = self._starts.get(grid)
            if start is None:
                start = self._driver.prepare(self._function, self._shape(grid), self._parameters.addresses)
                self._starts[grid] = start
            self._parameters.pack(values)
            start(stream)

    def _shape(self, grid: int) -> LaunchShape:
        cubin = self.cubin
        return LaunchShape(grid, cubin.threads, cubin.shared_bytes, cubin.cluster, cubin.may_start_early)
