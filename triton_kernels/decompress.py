"""Decompress: gather cached tokens of each request, dequantised, into a dense workspace, one chunk at a time.

contract   request b's tokens chunk_start[b] .. chunk_start[b] + length, where length = key_start_loc[b + 1] -
           key_start_loc[b], become workspace rows from key_start_loc[b] on: [K, L + 64] bf16/fp16/float32, latent then
           rope. Nothing but those tokens is read. Rows past key_start_loc[B] keep their bytes
meaning    pagedmla.kv_cache.layouts.CacheLayout.dequantize in float32, rounded once to the workspace's dtype
bad ids    a position below 0 or a page id outside either pool isn't followed: its row becomes NaN, so that the fault
           shows
grid       (ceildiv(K, 16),)
cost       644 bytes read (fp8_rope_bf16) and 1,152 written (bf16) a token: 0.37 us per 1,000 tokens at 4.8 TB/s
limits     latent 512 or 256; rope 64; chunk_start + length must not exceed what the request has cached
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagedmla.hardware.targets import target_of
from pagedmla.kv_cache.checks import ceildiv, expect_same_device, expect_tensor, refuse
from pagedmla.kv_cache.layouts import ROPE, RowPlanes
from pagedmla.triton_kernels.device.fp8 import e4m3_to_float16
from pagedmla.triton_kernels.device.requests import find_token_requests
from pagedmla.triton_kernels.device.sigma import unpack_sigma
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import (
    MOST_UNROLLED,
    TOKENS,
    WIDE_DTYPES,
    as_bytes,
    as_int32,
    check_planes,
    check_table,
    constants,
    group_blocks,
    scale_geometry,
)


def decompress(
    planes: RowPlanes,
    lookup_table: Tensor,
    chunk_start: Tensor,
    key_start_loc: Tensor,
    workspace: Tensor,
    scales_lookup_table: Tensor | None = None,
) -> None:
    """Fill `workspace` [K, L + 64] with one chunk of every request (see the top of this file).

    lookup_table, scales_lookup_table [B, W] int32 or uint32; chunk_start [B], key_start_loc [B + 1] int32 or uint32.
    """
    check_planes(planes)
    pages, page_size, columns = planes.latent.shape
    start = as_int32(chunk_start, "chunk_start", [None])
    requests = start.shape[0]
    start_loc = as_int32(key_start_loc, "key_start_loc", [requests + 1])
    check_table(lookup_table, "lookup_table", requests)
    if scales_lookup_table is None or planes.scales_in_value_pages:
        scales_lookup_table = lookup_table
    check_table(scales_lookup_table, "scales_lookup_table", requests, lookup_table.shape[1])
    expect_tensor(workspace, "workspace", [None, columns + ROPE], WIDE_DTYPES)
    if workspace.stride(1) != 1:
        refuse("workspace", "adjacent columns (stride(1) 1)", workspace.stride())
    expect_same_device(
        workspace,
        "workspace",
        pool=planes.latent,
        lookup_table=lookup_table,
        scales_lookup_table=scales_lookup_table,
        chunk_start=start,
        key_start_loc=start_loc,
    )
    keys = workspace.shape[0]
    if requests == 0 or keys == 0:
        return
    scale_pages, *scale_strides = scale_geometry(planes)
    launch(
        decompress_kernel,
        (ceildiv(keys, TOKENS),),
        as_bytes(planes.latent),
        as_bytes(planes.rope),
        as_bytes(planes.scales),
        lookup_table,
        scales_lookup_table,
        start,
        start_loc,
        workspace,
        requests,
        keys,
        page_size,
        pages,
        scale_pages,
        lookup_table.shape[1],
        lookup_table.stride(0),
        scales_lookup_table.stride(0),
        *planes.latent.stride()[:2],
        *planes.rope.stride()[:2],
        *scale_strides,
        workspace.stride(0),
        **constants(planes),
        **group_blocks(planes),
        NATIVE_E4M3=target_of(workspace.device).native_e4m3,
        TOKENS=TOKENS,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=[
        "lookup_table", "scales_lookup_table", "chunk_start", "key_start_loc", "requests", "keys", "page_size",
        "pages", "scale_pages", "table_width", "stride_table", "stride_scales_table",
    ]
)  # fmt: skip
def decompress_kernel(
    pool_latent,  # [pages, page_size, LATENT]
    pool_rope,  # [pages, page_size, ROPE]
    pool_scales,  # [scale_pages, page_size, GROUPS], or None
    lookup_table,  # [B, W]
    scales_lookup_table,  # [B, W]
    chunk_start,  # [B] int32
    key_start_loc,  # [B + 1] int32
    workspace,  # [K, LATENT + ROPE]
    requests,
    keys,
    page_size,
    pages,
    scale_pages,
    table_width,
    stride_table,
    stride_scales_table,
    stride_latent_page,
    stride_latent_slot,
    stride_rope_page,
    stride_rope_slot,
    stride_scales_page,
    stride_scales_slot,
    stride_scales_group,
    stride_workspace,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROPE_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    TOKENS: tl.constexpr,
):
    key = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    request = find_token_requests(key_start_loc, requests, key)
    real = (key < keys) & (request < requests)  # [TOKENS]
    first = tl.load(key_start_loc + request, mask=real, other=0)
    position = tl.load(chunk_start + request, mask=real, other=0) + (key - first)
    column = position // page_size
    slot = (position % page_size).to(tl.int64)
    in_table = real & (position >= 0) & (column < table_width)
    table_row = request.to(tl.int64)
    page = tl.load(lookup_table + table_row * stride_table + column, mask=in_table, other=-1).to(tl.int64)
    scale_page = tl.load(scales_lookup_table + table_row * stride_scales_table + column, mask=in_table, other=-1)
    scale_page = scale_page.to(tl.int64)
    known = in_table & (page >= 0) & (page < pages) & (scale_page >= 0) & (scale_page < scale_pages)

    latent_row = pool_latent + page * stride_latent_page + slot * stride_latent_slot
    rope_row = pool_rope + page * stride_rope_page + slot * stride_rope_slot
    out_row = workspace + key.to(tl.int64) * stride_workspace
    no_scale = tl.full([TOKENS], 1.0, tl.float32)
    if not FP8_LATENT:
        _copy_columns(latent_row, out_row, no_scale, known, real, LATENT)
        _copy_columns(rope_row, out_row + LATENT, no_scale, known, real, ROPE)
    else:
        scales_row = pool_scales + scale_page * stride_scales_page + slot * stride_scales_slot
        # Few groups are numbers known to the compiler, and parts that a group lacks vanish.
        UNROLLED: tl.constexpr = GROUPS if GROUPS <= MOST_UNROLLED else 1
        for first_group in range(0, GROUPS, UNROLLED):
            for group in tl.static_range(UNROLLED):
                _decode_group(
                    latent_row, rope_row, out_row, scales_row, stride_scales_group, first_group + group, known, real,
                    LATENT, ROPE, FP8_ROPE, GROUP, ROPE_SCALED, E8M0, LATENT_BLOCK, ROPE_BLOCK, NATIVE_E4M3,
                )  # fmt: skip
        if not ROPE_SCALED:
            _copy_columns(rope_row, out_row + LATENT, no_scale, known, real, ROPE)


@triton.jit
def _decode_group(
    latent_row,
    rope_row,
    out_row,
    scales_row,
    stride_scales_group,
    group,
    known,
    real,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FP8_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
):
    """Dequantise the columns of one scale group: those of the latent and those of the rope."""
    scale = scales_row + tl.cast(group, tl.int64) * stride_scales_group
    sigma = unpack_sigma(tl.load(scale, mask=known, other=0), E8M0)  # [TOKENS]
    first = group * GROUP
    end = first + GROUP
    column = first + tl.arange(0, LATENT_BLOCK)
    in_latent = (column < end) & (column < LATENT)
    _decode_columns(latent_row, out_row, sigma, column, in_latent, known, real, NATIVE_E4M3)
    if FP8_ROPE:
        if end > LATENT:
            rope_column = tl.arange(0, ROPE_BLOCK)
            if first > LATENT:
                rope_column += first - LATENT
            in_rope = (rope_column < end - LATENT) & (rope_column < ROPE)
            _decode_columns(rope_row, out_row + LATENT, sigma, rope_column, in_rope, known, real, NATIVE_E4M3)
    elif ROPE_SCALED:
        _copy_columns(rope_row, out_row + LATENT, sigma, known, real, ROPE)


@triton.jit
def _decode_columns(source_row, out_row, sigma, column, in_group, known, real, NATIVE_E4M3: tl.constexpr):
    """Dequantise some columns; rows whose page isn't known become NaN."""
    readable = known[:, None] & in_group[None, :]
    code = tl.load(source_row[:, None] + column[None, :], mask=readable, other=0x7F)
    value = e4m3_to_float16(code, NATIVE_E4M3).to(tl.float32) * sigma[:, None]
    writable = real[:, None] & in_group[None, :]
    tl.store(out_row[:, None] + column[None, :], value.to(out_row.dtype.element_ty), mask=writable)


@triton.jit
def _copy_columns(source_row, out_row, sigma, known, real, COLUMNS: tl.constexpr):
    """Copy rows of numbers that need no decoding, times sigma."""
    column = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(source_row[:, None] + column, mask=known[:, None], other=float("nan")).to(tl.float32)
    tl.store(out_row[:, None] + column, (x * sigma[:, None]).to(out_row.dtype.element_ty), mask=real[:, None])
