"""The scales (sigma) of a tile of keys.

A group is `GROUP` consecutive columns of the row that share a sigma. A per-tensor sigma is a pool whose strides are 0.
"""
# ruff: noqa: RUF005  Triton knows no starred expressions.

import triton
import triton.language as tl

from pagedmla.triton_kernels.device.sigma import unpack_sigma


@triton.jit
def fetch_sigma(scales, offsets, live, STRIDE_GROUP: tl.constexpr, GROUPS: tl.constexpr, E8M0: tl.constexpr):
    """A tuple of GROUPS tensors [TILE] float32; 1 for tokens that aren't live, whose slots aren't read.

    offsets  int64 [TILE], element offsets of the tokens' scale rows
    """
    sigma = ()
    for group in tl.static_range(GROUPS):
        packed = tl.load(scales + offsets + group * STRIDE_GROUP, mask=live, other=127 if E8M0 else 1)
        sigma = sigma + (unpack_sigma(packed, E8M0),)
    return sigma


@triton.jit
def fetch_column_sigma(
    scales,
    offsets,
    live,
    STRIDE_GROUP: tl.constexpr,
    first,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
):
    """float32 [TILE, COLUMNS]: the scale of every element of columns `first .. first + COLUMNS`."""
    group = (first + tl.arange(0, COLUMNS)) // GROUP
    packed = tl.load(
        scales + offsets[:, None] + (group * STRIDE_GROUP)[None, :], mask=live[:, None], other=127 if E8M0 else 1
    )
    return unpack_sigma(packed, E8M0)


@triton.jit
def largest_sigma(sigma, GROUPS: tl.constexpr):
    """The largest of a token's first GROUPS scales: float32 [TILE]."""
    largest = sigma[0]
    for group in tl.static_range(1, GROUPS):
        largest = tl.maximum(largest, sigma[group])
    return largest
