"""Tensor maps over a plane of the cache: three dimensions of bytes, (byte of the row, slot, page).

The page's id is a coordinate, so one map serves a layer of a pool for as long as the pool stays where it is, whatever
pages and layers are padded with. What a map can say, by the CUDA driver's rules for tiled maps: base and strides are
multiples of 16 bytes, strides are below 2^40 and sizes at most 2^32, a box has at most 256 bytes, slots and pages, and
is no wider than its swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagedmla.kv_cache.checks import refuse

MAP_BYTES = 128
_ALIGNMENT = 16
_MAX_STRIDE = 1 << 40
_MAX_DIM = 1 << 32
_MAX_BOX = 256
_SWIZZLES = (32, 64, 128)


@dataclass(frozen=True)
class TiledMap:
    """A tiled map of bytes. Innermost dimension first; `strides` are those of all others; swizzle 32, 64 or 128."""

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def __str__(self) -> str:
        return f"{list(self.dims)} bytes at {self.address:#x}, strides {list(self.strides)}, boxes {list(self.box)}"


def plane_map(plane: Tensor, name: str, box_bytes: int, box_slots: int) -> TiledMap:
    """The map of `plane [pages, page_size, columns]`, copied in boxes of `box_slots` slots of one page.

    The swizzle is as wide as the box. Reads shape, strides and address alone. ValueError, under the plane's `name`,
    where no map can say it.
    """
    if plane.dim() != 3 or plane.stride(2) != 1 or not plane.numel():
        refuse(name, "[pages, page_size, columns] with adjacent columns, none of them 0", plane)
    size = plane.element_size()
    pages, slots, columns = plane.shape
    if box_bytes not in _SWIZZLES or columns * size % box_bytes:
        refuse(name, f"rows of whole boxes of {box_bytes} bytes (32, 64 or 128)", plane)
    if not 1 <= box_slots <= min(slots, _MAX_BOX):
        refuse(name, f"pages of at least {box_slots} slots, at most {_MAX_BOX} slots a box", plane)
    if max(pages, slots) > _MAX_DIM:
        refuse(name, "at most 2^32 pages", plane)
    address = plane.data_ptr()
    if address % _ALIGNMENT:
        refuse(name, f"a first byte at a multiple of {_ALIGNMENT}", f"one at {address:#x}")
    # A dimension of one has no next element: any stride that a map takes will do.
    strides = tuple(
        plane.stride(dimension) * size if plane.shape[dimension] > 1 else _ALIGNMENT for dimension in (1, 0)
    )
    for what, stride in zip(("slot", "page"), strides, strict=True):
        if stride % _ALIGNMENT or not 0 < stride < _MAX_STRIDE:
            refuse(
                name,
                f"a {what} stride that is a multiple of {_ALIGNMENT} bytes, above 0 and below 2^40",
                f"{stride} bytes",
                "Pad the pages, or use the Triton kernels, which take any stride.",
            )
    return TiledMap(address, (columns * size, slots, pages), strides, (box_bytes, box_slots, 1), box_bytes)
