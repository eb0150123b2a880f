"""Pools in which two elements share an address: a store would write over itself, so they are refused.

Each dimension is the one that overlaps, with stride 0 and with one element less than the smaller strides reach. What
engines really bind stands on the other side: padded, cross-layer, interleaved and two-plane pages.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedmla import per_tensor_scale
from pagedmla.kv_cache.paged_tensor import PagedTensor

SHAPE = (4, 1, 2, 16, 1, 8)  # pages, kv, layers, slots, heads, columns
PACKED = (256, 256, 128, 8, 8, 1)


def bind(strides: tuple[int, ...], page_stride: int | None = None, name: str = "kv_blocks") -> PagedTensor:
    return PagedTensor.bind(torch.zeros(2048, dtype=torch.uint8).as_strided(SHAPE, strides), name, page_stride)


@pytest.mark.parametrize(
    ("dimension", "at", "needed"), [("page", 0, 256), ("layer", 2, 128), ("slot", 3, 8), ("column", 5, 1)]
)
def test_a_dimension_that_repeats_itself(dimension: str, at: int, needed: int) -> None:
    """Expanded pools were bound; every page of them, or layer, or slot, was the same memory to a store."""
    strides = (*PACKED[:at], 0, *PACKED[at + 1 :])
    with pytest.raises(ValueError, match=rf"kv_blocks: expected an address for each element, so a {dimension} stride "):
        bind(strides)


@pytest.mark.parametrize(("page_stride", "got"), [(0, "0"), (255, "255")])
def test_pages_that_overlap_by_the_given_stride(page_stride: int, got: str) -> None:
    """`page_stride` below a page's size passed: only the end of the storage was checked."""
    with pytest.raises(ValueError, match=rf"kv_blocks: expected an address .* stride of at least \d+; got {got}\."):
        bind(PACKED, page_stride)


@pytest.mark.parametrize("strides", [
    pytest.param(PACKED, id="packed"),
    pytest.param((300, 300, 128, 8, 8, 1), id="padded"),
    pytest.param((128, 128, 512, 8, 8, 1), id="layers outermost"),
    pytest.param((256, 256, 8, 16, 8, 1), id="layers interleaved slot by slot"),
    pytest.param((400, 400, 200, 8, 8, 1), id="two planes in a page"),
    pytest.param((8, 8, 1024, 32, 8, 1), id="pages innermost"),
])  # fmt: skip
def test_what_engines_bind(strides: tuple[int, ...]) -> None:
    pool = bind(strides)
    assert not pool.repeated
    index = torch.cartesian_prod(*(torch.arange(size) for size in SHAPE))
    addresses = (index * torch.tensor(strides)).sum(1)
    assert addresses.unique().numel() == addresses.numel()


@pytest.mark.parametrize("scales", [
    pytest.param(torch.zeros(4, 1, 2, 1, 1, 1).expand(-1, -1, -1, 16, -1, -1), id="slots"),
    pytest.param(torch.zeros(4, 1, 2, 16, 1, 1).expand(-1, -1, -1, -1, -1, 9), id="groups"),
    pytest.param(torch.zeros(4, 1, 1, 16, 1, 1).expand(-1, -1, 2, -1, -1, -1), id="layers"),
    pytest.param(torch.zeros(1, 1, 2, 16, 1, 1).expand(4, -1, -1, -1, -1, -1), id="pages"),
    pytest.param(torch.zeros(1).expand(4, 1, 2, 16, 1, 9), id="one number, several groups"),
])  # fmt: skip
def test_scales_that_are_expanded_in_part(scales: Tensor) -> None:
    """The scatter of a store overwrote itself: with stride 0 along slots values came back 12,000 times too large."""
    with pytest.raises(ValueError, match="kv_scales: expected an address for each element"):
        PagedTensor.bind(scales, "kv_scales")


def test_one_scale_for_all_pages_is_no_overlap() -> None:
    blocks = torch.zeros(SHAPE)
    for sigma in (torch.ones(1), torch.ones(2)):
        assert PagedTensor.bind(per_tensor_scale(sigma, blocks), "kv_scales").repeated
    with pytest.raises(ValueError, match="kv_blocks: expected an address"):
        PagedTensor.bind(torch.zeros(1).expand(4, 1, 2, 16, 1, 1), "kv_blocks")


def test_the_given_page_stride_decides_what_is_repeated() -> None:
    """scales_page_stride=0 with pages of one token: the tensor's own stride said paged, and a store wrote the scale."""
    scales = torch.ones(4, 1, 2, 1, 1, 1)
    assert PagedTensor.bind(scales, "kv_scales", 0).repeated
    assert not PagedTensor.bind(scales, "kv_scales").repeated
