"""What mixed, decode and pieces share on the host: which calls they take, and what a call is built for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.hardware.targets import target_of
from pagedmla.kv_cache.checks import expect_same_device, expect_tensor, refuse
from pagedmla.kv_cache.layouts import ROPE, RowPlanes
from pagedmla.triton_kernels.planes import check_planes, check_table, constants
from pagedmla.triton_kernels.tiles import QUERY_DTYPES, choose_tile

_MAX_HEADS = 128


def check_call(
    q: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    scales_lookup_table: Tensor | None,
    requests: int | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Refuse what no attention kernel here takes; returns the table of the values and that of the scales.

    requests  rows of the tables; None: as many as there are
    """
    check_planes(planes)
    latent = planes.latent.shape[2]
    expect_tensor(q, "q", [None, None, latent + ROPE], QUERY_DTYPES)
    tokens, heads, _ = q.shape
    if not 1 <= heads <= _MAX_HEADS:
        refuse("q", f"1 to {_MAX_HEADS} heads", q)
    page_size = planes.latent.shape[1]
    if page_size < 1 or (page_size & (page_size - 1) and page_size % 16):
        refuse("planes.latent", "a page size that is a power of two or a multiple of 16", planes.latent)
    check_table(lookup_table, "lookup_table", requests)
    if scales_lookup_table is None or planes.scales_in_value_pages:
        scales_lookup_table = lookup_table
    check_table(scales_lookup_table, "scales_lookup_table", lookup_table.shape[0])
    expect_tensor(out, "out", [tokens, heads, latent], QUERY_DTYPES)
    expect_tensor(lse, "lse", [tokens, heads], [torch.float32])
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(-1) != 1:
            refuse(name, "adjacent columns (stride(-1) 1)", tensor.stride())
    if not lse.is_contiguous():
        refuse("lse", "adjacent heads and tokens", lse.stride())
    expect_same_device(
        q, "q", pool=planes.latent, lookup_table=lookup_table, scales_lookup_table=scales_lookup_table, out=out, lse=lse
    )
    return lookup_table, scales_lookup_table


def strides(q: Tensor, planes: RowPlanes, tables: tuple[Tensor, Tensor], out: Tensor) -> tuple[int, ...]:
    """The strides that kernels take when they run; slot and group strides are compile-time constants."""
    return (
        *(table.stride(0) for table in tables),
        *q.stride()[:2],
        planes.latent.stride(0),
        planes.rope.stride(0),
        0 if planes.scales is None else planes.scales.stride(0),
        *out.stride()[:2],
    )


def build_options(q: Tensor, planes: RowPlanes, causal: bool, rows: int) -> dict[str, Any]:
    """Constants and launch options of an attention kernel for requests of at most `rows` rows."""
    known = constants(planes)
    cache_dtypes = (
        torch.uint8 if known["FP8_LATENT"] else planes.latent.dtype,
        torch.uint8 if known["FP8_ROPE"] else planes.rope.dtype,
    )
    tile = choose_tile(known, rows, q.dtype, cache_dtypes, target_of(q.device))
    return {
        **known,
        "STRIDE_LATENT_SLOT": planes.latent.stride(1),
        "STRIDE_ROPE_SLOT": planes.rope.stride(1),
        "STRIDE_SCALES_SLOT": 0 if planes.scales is None else planes.scales.stride(1),
        "STRIDE_SCALES_GROUP": 0 if planes.scales is None else planes.scales.stride(2),
        "PAGE_SIZE": planes.latent.shape[1],
        "CAUSAL": causal,
        **tile.keywords(),
    }
