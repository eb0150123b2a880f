"""Tensor maps of cache planes: what a map says, and what none can say.

Grid: every layout that the kernel takes, pages of 16 and 64, pools whose pages and layers are padded or shared with
scales. The judge of a map is the plane itself: bytes gathered by the map's own address arithmetic must be the plane's.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from pagedmla.cutlass_kernels.tensor_maps import plane_map
from pagedmla.kv_cache.layouts import get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor

PAGES, LAYERS = 5, 3


def planes(layout_name, page_size, layer=1, page_padding=0):
    """One layer of a pool of random bytes, its pages `page_padding` bytes apart."""
    layout = get_layout(layout_name)
    row = layout.row_elements
    size = LAYERS * page_size * row + page_padding
    memory = torch.randint(0, 256, (PAGES * size,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    shape, strides = (PAGES, 1, LAYERS, page_size, 1, row), (size, size, page_size * row, row, row, 1)
    scales = torch.ones(PAGES, 1, LAYERS, page_size, 1, 1)
    values = PagedTensor.bind(memory.as_strided(shape, strides), "kv_blocks")
    return layout.planes(values, PagedTensor.bind(scales, "kv_scales"), layer)


def box_bytes_of(rope):
    return min(128, rope.shape[2] * rope.element_size())


def gather(tiles, byte, slot, page):
    """The byte that a map names by its coordinates."""
    return ctypes.string_at(tiles.address + byte + slot * tiles.strides[0] + page * tiles.strides[1], 1)[0]


@pytest.mark.parametrize("page_padding", [0, 16, 4 * 64])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_flat"])
def test_a_map_names_the_planes_bytes(layout, page_size, page_padding):
    layer = planes(layout, page_size, page_padding=page_padding)
    for plane, box in ((layer.latent, 128), (layer.rope, box_bytes_of(layer.rope))):
        tiles = plane_map(plane, "plane", box, 16)
        raw = plane.view(torch.uint8)
        assert tiles.dims == (raw.shape[2], page_size, PAGES)
        for byte, slot, page in ((0, 0, 0), (raw.shape[2] - 1, page_size - 1, PAGES - 1), (17, 3, 2)):
            assert gather(tiles, byte, slot, page) == int(raw[page, slot, byte])


def test_boxes_and_swizzle_of_the_flagship():
    """Hand-computed: rows of 640 bytes, 3 layers of 64 slots, boxes of a page by one swizzle atom."""
    layer = planes("fp8_rope_bf16", 64)
    latent = plane_map(layer.latent, "planes.latent", 128, 64)
    assert (latent.dims, latent.strides, latent.box) == ((512, 64, 5), (640, 3 * 64 * 640), (128, 64, 1))
    rope = plane_map(layer.rope, "planes.rope", 128, 64)
    assert (rope.dims, rope.strides, rope.box) == ((128, 64, 5), (640, 3 * 64 * 640), (128, 64, 1))
    assert rope.address - latent.address == 512
    assert latent.swizzle == rope.swizzle == 128


def test_a_flat_row_has_a_rope_of_64_bytes():
    rope = plane_map(planes("fp8_flat", 16).rope, "planes.rope", 64, 16)
    assert (rope.dims[0], rope.box[0], rope.swizzle, rope.strides[0]) == (64, 64, 64, 576)


def test_scales_after_the_values_of_a_page_keep_it_mappable_from_page_size_4_on():
    """644 bytes a token: 4 tokens are 161 times 16 bytes, 2 tokens are not a multiple of it."""
    fits = torch.zeros(3 * 4 * 644, dtype=torch.uint8).as_strided((3, 4, 512), (4 * 644, 640, 1))
    assert plane_map(fits, "plane", 128, 4).strides == (640, 4 * 644)
    too_small = torch.zeros(3 * 2 * 644, dtype=torch.uint8).as_strided((3, 2, 512), (2 * 644, 640, 1))
    with pytest.raises(ValueError, match=r"planes\.latent: expected a page stride that is a multiple of 16 bytes"):
        plane_map(too_small, "planes.latent", 128, 2)


def test_a_dimension_of_one_needs_no_stride():
    """An odd stride that is never taken is no reason to refuse a pool of one page, or pages of one slot."""
    one_page = torch.zeros(4000, dtype=torch.uint8).as_strided((1, 4, 512), (999, 640, 1))
    assert plane_map(one_page, "plane", 128, 4).strides == (640, 16)
    one_slot = torch.zeros(4000, dtype=torch.uint8).as_strided((3, 1, 512), (640, 999, 1))
    assert plane_map(one_slot, "plane", 128, 1).strides == (16, 640)


def zeros(shape, strides, offset=0):
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return torch.zeros(extent, dtype=torch.uint8).as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("plane", "box", "slots", "message"),
    [
        (zeros((3, 16, 512), (16 * 648, 648, 1)), 128, 16, "a slot stride that is a multiple of 16 bytes"),
        (zeros((3, 16, 512), (0, 640, 1)), 128, 16, "a page stride .* above 0 .* got 0 bytes"),
        (torch.empty((3, 16, 512), dtype=torch.uint8, device="meta").as_strided((3, 16, 512), (1 << 40, 640, 1)),
         128, 16, "below 2\\^40; got 1099511627776 bytes"),
        (zeros((3, 16, 512), (16 * 640, 640, 1), offset=8), 128, 16, "planes.latent: expected a first byte"),
        (zeros((3, 16, 512), (16 * 1280, 1280, 2)), 128, 16, "adjacent columns"),
        (zeros((3, 8, 512), (8 * 640, 640, 1)), 128, 16, "pages of at least 16 slots"),
        (zeros((3, 512, 512), (512 * 640, 640, 1)), 128, 512, "at most 256 slots a box"),
        (zeros((3, 16, 500), (16 * 640, 640, 1)), 128, 16, "rows of whole boxes of 128 bytes"),
        (zeros((3, 16, 512), (16 * 640, 640, 1)), 256, 16, "boxes of 256 bytes \\(32, 64 or 128\\)"),
        (torch.zeros(0, 16, 512, dtype=torch.uint8), 128, 16, "none of them 0"),
        (torch.zeros(16, 512, dtype=torch.uint8), 128, 16, "\\[pages, page_size, columns\\]"),
    ],
)  # fmt: skip
def test_what_no_map_can_say_is_refused_by_name(plane, box, slots, message):
    with pytest.raises(ValueError, match=message):
        plane_map(plane, "planes.latent", box, slots)
