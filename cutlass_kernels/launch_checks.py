"""What a variant takes: shapes, dtypes, strides and addresses, for the launcher and for the executable model alike.

NotTaken, a ValueError, names the tensor that a variant doesn't take. No device value is read.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from pagedmla.cutlass_kernels.tensor_maps import TiledMap, plane_map
from pagedmla.cutlass_kernels.tiles import LATENT, PANEL_BYTES, ROPE
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.kv_cache.checks import INDEX_DTYPES, Refusal, expect_same_device, refuse
from pagedmla.kv_cache.layouts import RowPlanes

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Q_ALIGNMENT = 16  # bytes, of each row of q
_OUT_ALIGNMENT = 4


class NotTaken(Refusal):
    """A call that other kernels may take: what is wrong with it is this variant's limits alone."""


class CallTensors(NamedTuple):
    """The arguments of a call beside the cache: two tables and two vectors of lengths among them."""

    q: Tensor  # [T, H, 576]
    out: Tensor  # [T, H, 512]
    lse: Tensor  # [T, H]
    lookup_table: Tensor  # [B, W]
    scales_lookup_table: Tensor  # [B, W]
    cache_lengths: Tensor  # [B]
    query_start_loc: Tensor  # [B + 1]


def check_form(variant: Variant, tensors: CallTensors) -> None:
    """Sizes, strides, dtypes and devices; not addresses, which change from call to call."""
    q, out, lse = tensors.q, tensors.out, tensors.lse
    dtype = _DTYPES[variant.dtype]
    tables = {"lookup_table": tensors.lookup_table, "scales_lookup_table": tensors.scales_lookup_table}
    lengths = {"cache_lengths": tensors.cache_lengths, "query_start_loc": tensors.query_start_loc}
    expect_same_device(q, "q", out=out, lse=lse, **tables, **lengths)
    tokens, heads, width = q.shape
    if width != LATENT + ROPE or q.dtype != dtype or q.stride(2) != 1:
        _decline("q", f"[T, H, {LATENT + ROPE}] {variant.dtype} with adjacent columns", q)
    if (q.stride(0) | q.stride(1)) * q.element_size() % _Q_ALIGNMENT:
        _decline("q", f"rows that begin at multiples of {_Q_ALIGNMENT} bytes", f"strides {q.stride()}")
    if out.shape != (tokens, heads, LATENT) or out.dtype != dtype or out.stride(2) != 1:
        _decline("out", f"[{tokens}, {heads}, {LATENT}] {variant.dtype} with adjacent columns", out)
    if (out.stride(0) | out.stride(1)) * out.element_size() % _OUT_ALIGNMENT:
        _decline("out", f"rows that begin at multiples of {_OUT_ALIGNMENT} bytes", f"strides {out.stride()}")
    if lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous():
        _decline("lse", f"[{tokens}, {heads}] float32, contiguous", lse)
    batch = tensors.cache_lengths.shape[0]
    for name, table in tables.items():
        if table.dim() != 2 or table.shape[0] != batch or table.dtype not in INDEX_DTYPES:
            _decline(name, f"[{batch}, *] int32 or uint32", table)
        if table.numel() and table.shape[1] > 1 and table.stride(1) != 1:
            _decline(name, "adjacent columns (stride(1) 1)", f"strides {table.stride()}")
    for (name, vector), size in zip(lengths.items(), (batch, batch + 1), strict=True):
        if vector.shape != (size,) or vector.dtype not in INDEX_DTYPES or not vector.is_contiguous():
            _decline(name, f"[{size}] int32 or uint32, contiguous", vector)


def check_addresses(q_address: int, out_address: int) -> None:
    """First bytes, in every call."""
    if q_address % _Q_ALIGNMENT or out_address % _OUT_ALIGNMENT:
        _decline(
            "q, out", f"first bytes at multiples of {_Q_ALIGNMENT}, {_OUT_ALIGNMENT}", f"{q_address}, {out_address}"
        )


def check_scales(variant: Variant, scales: Tensor | None) -> Tensor:
    """The scales, which must be there."""
    if scales is None:
        _decline("planes.scales", f"float32 scales for {variant.name}", None)
    return scales


def check_pool(variant: Variant, planes: RowPlanes) -> tuple[TiledMap, TiledMap]:
    """A layer's planes and where they lie; what the driver will be told of latent and rope."""
    latent, rope, scales = planes.latent, planes.rope, check_scales(variant, planes.scales)
    pages, page_size, width = latent.shape
    if page_size not in variant.page_sizes:
        _decline("planes", f"pages of {' or '.join(map(str, variant.page_sizes))} for {variant.name}", f"{page_size}")
    if width != LATENT or latent.element_size() != 1:
        _decline("planes.latent", f"[*, {page_size}, {LATENT}] e4m3", latent)
    kind = "e4m3" if rope.element_size() == 1 else "scaled_bf16" if planes.rope_scaled else "bf16"
    if rope.shape != (pages, page_size, ROPE) or kind != variant.shape.rope:
        _decline("planes.rope", f"[{pages}, {page_size}, {ROPE}] {variant.shape.rope} for {variant.name}", rope)
    if scales.shape[1:] != (page_size, 1) or scales.dtype != torch.float32:
        _decline("planes.scales", f"[*, {page_size}, 1] float32 for {variant.name}", scales)
    expect_same_device(latent, "planes.latent", rope=rope, scales=scales)
    try:
        return (
            plane_map(latent, "planes.latent", PANEL_BYTES, variant.box),
            plane_map(rope, "planes.rope", variant.shape.rope_bytes, variant.box),
        )
    except Refusal as unmappable:
        raise NotTaken(str(unmappable)) from None


def _decline(name: str, expected: str, got: object) -> NoReturn:
    refuse(name, expected, got, error=NotTaken)
