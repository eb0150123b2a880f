"""A pool's planes as kernels want to be handed them: bytes instead of 8-bit floats, and the compile-time facts.

Triton has no e4m3 on sm_80 and no e8m0 anywhere, so both go as bytes; `device/` decodes and encodes both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import INDEX_DTYPES, expect_tensor, refuse
from pagedmla.kv_cache.layouts import LATENTS, ROPE, RowPlanes

WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Of store and decompress.
TOKENS = 16  # of a program
MOST_UNROLLED: tl.constexpr = tl.constexpr(8)  # scale groups


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, or its bytes where its dtype is an 8-bit float."""
    if tensor is None or tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return tensor
    return tensor.view(torch.uint8)


def check_planes(planes: RowPlanes) -> None:
    """Refuse widths and strides that no kernel here takes."""
    _, _, latent = planes.latent.shape
    if latent not in LATENTS:
        refuse("planes.latent", f"a latent of {' or '.join(map(str, LATENTS))} columns", planes.latent)
    expect_tensor(planes.rope, "planes.rope", [*planes.latent.shape[:2], ROPE], ())
    for name, plane in (("planes.latent", planes.latent), ("planes.rope", planes.rope)):
        if plane.stride(2) != 1:
            refuse(name, "adjacent columns (stride(2) 1)", plane.stride())


def check_table(table: Tensor, name: str, requests: int | None, width: int | None = None) -> None:
    """Refuse a page table that isn't [requests, width] of 32-bit ids with adjacent columns."""
    expect_tensor(table, name, [requests, width], INDEX_DTYPES)
    if table.numel() and table.shape[1] > 1 and table.stride(1) != 1:
        refuse(name, "adjacent columns (stride(1) 1)", table.stride())


def as_int32(tensor: Tensor, name: str, shape: list[int | None]) -> Tensor:
    """A length vector as int32: uint32 by its bits, so that the -1 of an engine's padding row stays -1.

    Kernels step through it element by element, so its elements must be adjacent.
    """
    expect_tensor(tensor, name, shape, INDEX_DTYPES)
    if tensor.shape[0] > 1 and tensor.stride(0) != 1:
        refuse(name, "adjacent elements (stride(0) 1)", f"stride {tensor.stride(0)}", "Pass a contiguous copy.")
    return tensor if tensor.dtype == torch.int32 else tensor.view(torch.int32)


def constants(planes: RowPlanes) -> dict[str, Any]:
    """What a kernel must know about a layout when it is compiled.

    LATENT, ROPE  columns; FP8_LATENT, FP8_ROPE  whether they are e4m3 bytes; GROUP  columns that share a scale;
    GROUPS  scales of the row (0: none); ROPE_SCALED  whether the rope is multiplied by one; E8M0  scales are exponents
    """
    latent, scales = planes.latent, planes.scales
    quantised = latent.dtype in (torch.uint8, torch.float8_e4m3fn)
    rope_quantised = planes.rope.dtype in (torch.uint8, torch.float8_e4m3fn)
    return {
        "LATENT": latent.shape[2],
        "ROPE": planes.rope.shape[2],
        "FP8_LATENT": quantised,
        "FP8_ROPE": rope_quantised,
        "GROUP": planes.scale_group,
        "GROUPS": 0 if scales is None else scales.shape[2],
        "ROPE_SCALED": planes.rope_scaled,
        "E8M0": scales is not None and scales.dtype == torch.float8_e8m0fnu,
    }


def group_blocks(planes: RowPlanes) -> dict[str, int]:
    """Powers of two that hold the latent columns and the rope columns of one scale group."""
    group = planes.scale_group
    return {
        "LATENT_BLOCK": triton.next_power_of_2(min(group, planes.latent.shape[2])),
        "ROPE_BLOCK": triton.next_power_of_2(min(group, planes.rope.shape[2])),
    }


def scale_geometry(planes: RowPlanes) -> tuple[int, int, int, int]:
    """Pages of the scale plane and its strides (page, slot, group); without scales, the value pages and zeros."""
    if planes.scales is None:
        return planes.latent.shape[0], 0, 0, 0
    stride_page, stride_slot, stride_group = planes.scales.stride()
    return planes.scales.shape[0], stride_page, stride_slot, stride_group
