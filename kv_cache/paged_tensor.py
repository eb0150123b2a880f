"""One pool of pages as a strided tensor: strides are read, never rebuilt.

element address = page_id * page_stride + kv * stride(1) + layer * stride(2) + slot * stride(3) + head * stride(4)
                  + column * stride(5)                       (elements, from the tensor's own storage offset)

The page stride may be given: a padded pool is bound as a short contiguous tensor whose pages really lie further apart
(MAX `page_stride`). So addresses are bounded by the storage, never by the bound tensor's own numel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import host_int, refuse

PACKED_PAGE_STRIDE = -1

_DIMENSIONS = ("page", "kv", "layer", "slot", "head", "column")
_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width: torch indexes those in every version, float8 not."""
    return tensor.view(_RAW_DTYPES[tensor.element_size()])


def is_repeated(pool: Tensor, page_stride: int) -> bool:
    """Whether every page and slot of a pool holds the same one number."""
    pages, slots = (pool.shape[0], page_stride), (pool.shape[3], pool.stride(3))
    longer = [stride for size, stride in (pages, slots) if size > 1] or [pages[1], slots[1]]
    return pool.shape[5] == 1 and not any(longer)


@dataclass(frozen=True, eq=False)
class PagedTensor:
    """A pool `[num_pages, kv_dim, num_layers, page_size, num_heads, width]` and the distance of its pages.

    `page_stride` is in elements; -1 or None means the tensor's own `stride(0)`. Raises ValueError where the last page
    would reach past the storage, and where elements share an address: a store would write over itself. One number for
    all pages and slots (`repeated`) is the exception, for pools of scales: it is read and never written.
    """

    tensor: Tensor
    name: str
    page_stride: int

    @classmethod
    def bind(cls, tensor: Tensor, name: str, page_stride: Tensor | int | None = None) -> PagedTensor:
        stride_name = "scales_page_stride" if name.endswith("scales") else "page_stride"
        given = PACKED_PAGE_STRIDE
        if page_stride is not None:
            given = host_int(page_stride, stride_name, minimum=PACKED_PAGE_STRIDE)
        if given >= 2**63:  # a pool of one page would take any
            refuse(stride_name, "an int64", given)
        stride = tensor.stride(0) if given == PACKED_PAGE_STRIDE else given
        pool = cls(tensor, name, stride)
        pool._check_storage(stride_name)
        pool._check_overlap()
        return pool

    def _check_storage(self, stride_name: str) -> None:
        if self.tensor.numel() == 0:
            return
        inner = sum((size - 1) * stride for size, stride in zip(self.tensor.shape[1:], self.tensor.stride()[1:]))
        end = self.tensor.storage_offset() + (self.num_pages - 1) * self.page_stride + inner + 1
        room = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        if end > room:
            refuse(
                self.name,
                f"a storage of at least {end} elements for {self.num_pages} pages {self.page_stride} elements apart",
                f"{room} elements",
                f"Bind a view into the whole arena, or pass the real {stride_name}.",
            )

    def _check_overlap(self) -> None:
        """Each stride must step over all that the smaller ones reach, as in any view of a pool that was once packed."""
        if self.tensor.numel() == 0 or (self.name.endswith("scales") and self.repeated):
            return
        strides = (self.page_stride, *self.tensor.stride()[1:])
        reach = 1
        for stride, size, dimension in sorted(zip(strides, self.tensor.shape, _DIMENSIONS)):
            if size < 2:
                continue
            if stride < reach:
                hint = "One scale for all pages is a pool of one number, with stride 0 along both pages and slots."
                refuse(
                    self.name,
                    f"an address for each element, so a {dimension} stride of at least {reach}",
                    str(stride),
                    hint if self.name.endswith("scales") else "",
                )
            reach += (size - 1) * stride

    @property
    def repeated(self) -> bool:
        """Whether every page and slot holds the same one number."""
        return is_repeated(self.tensor, self.page_stride)

    @property
    def num_pages(self) -> int:
        return self.tensor.shape[0]

    @property
    def page_size(self) -> int:
        return self.tensor.shape[3]

    def outside(self, ids: Tensor) -> Tensor:
        """Which of these page ids the pool doesn't have: bool of their shape."""
        return (ids < 0) | (ids >= self.num_pages)

    def names_outside(self, table_name: str, place: str, page: int) -> str:
        """The sentence that says so of one of them."""
        return f"{table_name}: {place} holds page id {page}; {self.name} has {self.num_pages} pages"

    def layer(self, kv: int, layer: int) -> Tensor:
        """One layer as a view `[num_pages, page_size, num_heads, width]` that shares the memory."""
        inner = self.tensor[:1, kv, layer]
        return inner.as_strided((self.num_pages, *inner.shape[1:]), (self.page_stride, *inner.stride()[1:]))

    def offsets(self, page: Tensor, kv: int, layer: int, slot: Tensor, head: Tensor, column: Tensor) -> Tensor:
        """int64 element addresses relative to the tensor's first element."""
        _, stride_kv, stride_layer, stride_slot, stride_head, stride_column = self.tensor.stride()
        base = kv * stride_kv + layer * stride_layer
        return page * self.page_stride + base + slot * stride_slot + head * stride_head + column * stride_column

    def flat(self) -> Tensor:
        """All of the storage from the tensor's first element on, `[elements]`, as raw integers."""
        start = self.tensor.storage_offset()
        room = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - start
        return raw_view(self.tensor.as_strided((room,), (1,), start))
