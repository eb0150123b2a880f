"""Buffers for kernel tests: poisoned, between sentinels, and watched.

Every tensor that a kernel is handed comes from the `guarded` fixture. Its memory is filled with 0xFF, which is NaN in
every float format and -1 in integers, with a band before and behind it; whatever isn't an element of the tensor
(bands, gaps between rows, padding) must still be 0xFF when the test ends, and a tensor that was given its data must
be unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

_POISON = 0xFF
_BAND = 4096
_INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guard:
    """Makes tensors inside poisoned memory and checks afterwards that nothing else was written."""

    def __init__(self) -> None:
        self._watched: list[tuple[Tensor, Tensor]] = []  # (bytes, which of them may change)
        self._frozen: list[tuple[Tensor, Tensor]] = []  # (bytes, what they were)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """A poisoned tensor that a kernel may write. `strides` in elements; contiguous without."""
        strides = tuple(torch.empty(shape, device="meta").stride()) if strides is None else tuple(strides)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if all(shape) else 0
        memory = torch.full((2 * _BAND + extent * dtype.itemsize,), _POISON, dtype=torch.uint8)
        mine = torch.zeros_like(memory)
        offset = _BAND // dtype.itemsize
        integer = _INTEGER_OF[dtype.itemsize]
        mine[: len(mine) // dtype.itemsize * dtype.itemsize].view(integer).as_strided(shape, strides, offset).fill_(-1)
        self._watched.append((memory, mine != 0))
        usable = memory[: len(memory) // dtype.itemsize * dtype.itemsize]
        return usable.view(dtype).as_strided(shape, strides, offset)

    def frozen(self, data: Tensor, strides: Sequence[int] | None = None) -> Tensor:
        """A copy of `data` that no kernel may write."""
        tensor = self.empty(data.shape, data.dtype, strides)
        _bits(tensor).copy_(_bits(data))
        memory = self._watched.pop()[0]
        self._frozen.append((memory, memory.clone()))
        return tensor

    def check(self) -> None:
        """AssertionError if a byte changed that had no business to."""
        for memory, mine in self._watched:
            outside = memory[~mine]
            assert bool((outside == _POISON).all()), "written outside the tensor"
        for memory, before in self._frozen:
            assert torch.equal(memory, before), "an input was written"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGER_OF[tensor.dtype.itemsize])


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """A Guard that is checked when the test ends; the interpreter also refuses accesses outside all storage."""
    monkeypatch.setenv("PAGEDMLA_CHECK", "1")
    guard = Guard()
    yield guard
    guard.check()
