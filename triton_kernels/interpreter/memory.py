"""The memory that a launch may touch."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter as stock


class Memory:
    """The storages that a launch may touch: the half-open address ranges of its tensor arguments, by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ranges: list[tuple[int, int, str]] = []
        for name, value in arguments.items():
            self._add(name, value)
        self.ranges.sort()

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                self._add(f"{name}[{index}]", item)
        elif isinstance(value, (stock.TensorDescriptor, triton.runtime.jit.TensorWrapper)):
            self._add(name, value.base)
        elif hasattr(value, "data_ptr"):
            if value.device.type != "cpu":
                raise ValueError(f"{name}: expected a CPU tensor, got one on {value.device}: launch the kernel itself")
            storage = value.untyped_storage()
            self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))

    def check(self, access: str, ptrs: stock.TensorHandle, mask: Any) -> None:
        """Raises IndexError for the first enabled address outside every range."""
        enabled = np.broadcast_to(mask.data if isinstance(mask, stock.TensorHandle) else mask, ptrs.data.shape)
        addresses = ptrs.data[enabled].astype(np.uint64)
        item_bytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end, _ in self.ranges:
            if end - start >= item_bytes:
                inside |= (addresses >= np.uint64(start)) & (addresses <= np.uint64(end - item_bytes))
        if inside.all():
            return
        address = int(addresses[~inside][0])
        start, end, name = min(self.ranges, key=lambda r: max(r[0] - address, address - r[1]), default=(0, 0, "null"))
        raise IndexError(
            f"{access} outside every argument: {int((~inside).sum())} of {inside.size} addresses, the first at byte "
            f"{address - start} of the storage of {name}, which has {end - start}"
        )
