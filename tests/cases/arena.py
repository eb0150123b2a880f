"""Pools cut out of a byte arena in every way that engines lay them out, and the addresses that go with each.

`address` is the interface's formula written out once more, in plain integers and from the description alone, so that it
can judge the product's strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

FILL = 0xA5  # a byte that no test writes


@dataclass(frozen=True)
class Geometry:
    """A pool `[num_pages, kv_dim, num_layers, page_size, num_heads, width]`, its pages `padding` elements apart."""

    num_pages: int
    kv_dim: int
    num_layers: int
    page_size: int
    num_heads: int
    width: int
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_pages, self.kv_dim, self.num_layers, self.page_size, self.num_heads, self.width)

    @property
    def page(self) -> int:
        """Elements of a page without its padding."""
        return self.kv_dim * self.num_layers * self.page_size * self.num_heads * self.width

    @property
    def page_stride(self) -> int:
        return self.page + self.padding

    @property
    def elements(self) -> int:
        """Elements of the arena, padding behind the last page included."""
        return self.num_pages * self.page_stride

    def address(self, page: int, kv: int, layer: int, slot: int, head: int, column: int) -> int:
        inner = (((kv * self.num_layers + layer) * self.page_size + slot) * self.num_heads + head) * self.width + column
        return page * self.page_stride + inner

    def strided(self, arena: Tensor) -> Tensor:
        """The pool as a view whose own stride(0) reaches over the padding."""
        inner = torch.empty(self.shape[1:], device="meta").stride()
        return arena.as_strided(self.shape, (self.page_stride, *inner))

    def short(self, arena: Tensor) -> Tensor:
        """The pool as MAX binds it: contiguous, so shorter than it is; the page stride must be given."""
        return arena.as_strided(self.shape, torch.empty(self.shape, device="meta").stride())

    def everywhere(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Every (page, layer, slot, head, column) of key rows."""
        yield from product(*map(range, (self.num_pages, *self.shape[2:])))


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """An arena filled with FILL."""
    return torch.full((elements * dtype.itemsize,), FILL, dtype=torch.uint8).view(dtype)


def counting(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An arena in which every element holds its own address."""
    assert elements < 2**24 or dtype != torch.float32
    return torch.arange(elements).to(dtype)
