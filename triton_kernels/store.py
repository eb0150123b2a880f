"""Store: quantise this step's latent and rope and write them, with their scales, into the cache.

contract   latent [T, L], rope [T, 64] bf16/fp16/float32; token i of request b goes to position cache_length[b] + i,
           whose page both tables name (`store`), or to the slot that a mapping names (`store_slots`).
           Writes exactly a row's bytes and its scales. A scale plane that is one repeated address is read instead.
           Dropped whole, values and scales: tokens past query_start_loc[B], negative slots and positions, positions
           past the table, page ids outside either pool
meaning    pagedmla.kv_cache.layouts.CacheLayout.quantize, byte for byte
grid       (ceildiv(T, 16),): 16 tokens a program keep neighbouring sigmas in one 64-byte line
cost       1,152 bytes read (bf16) and 644 written (fp8_rope_bf16) a token: 0.37 us per 1,000 tokens at 4.8 TB/s
limits     latent 512 or 256; rope 64; columns of a row adjacent. Two tokens with one slot: either may win
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.hardware.targets import target_of
from pagedmla.kv_cache.checks import ceildiv, expect_same_device, expect_tensor, refuse
from pagedmla.kv_cache.layouts import ROPE, RowPlanes
from pagedmla.kv_cache.quantise import sigma_limits
from pagedmla.triton_kernels.device.fp8 import encode_e4m3
from pagedmla.triton_kernels.device.requests import find_token_requests
from pagedmla.triton_kernels.device.saturate import saturate
from pagedmla.triton_kernels.device.sigma import measure_sigma, pack_sigma, unpack_sigma
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


def store(
    latent: Tensor,
    rope: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    cache_lengths: Tensor,
    query_start_loc: Tensor,
    scales_lookup_table: Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> None:
    """Write this step's tokens through the tables.

    lookup_table, scales_lookup_table [B, W], cache_lengths [B], query_start_loc [B + 1]: int32 or uint32.
    `power_of_two` rounds measured scales up to one. Without a table of their own the scales follow lookup_table.
    """
    lengths = as_int32(cache_lengths, "cache_lengths", [None])
    requests = lengths.shape[0]
    start_loc = as_int32(query_start_loc, "query_start_loc", [requests + 1])
    check_table(lookup_table, "lookup_table", requests)
    if scales_lookup_table is None or planes.scales_in_value_pages:
        scales_lookup_table = lookup_table
    check_table(scales_lookup_table, "scales_lookup_table", requests, lookup_table.shape[1])
    expect_same_device(
        latent,
        "latent",
        lookup_table=lookup_table,
        scales_lookup_table=scales_lookup_table,
        cache_lengths=lengths,
        query_start_loc=start_loc,
    )
    if requests == 0:
        return
    _launch(
        latent,
        rope,
        planes,
        power_of_two,
        False,
        lookup_table,
        scales_lookup_table,
        lengths,
        start_loc,
        requests,
        lookup_table.shape[1],
        lookup_table.stride(0),
        scales_lookup_table.stride(0),
    )


def store_slots(
    latent: Tensor,
    rope: Tensor,
    planes: RowPlanes,
    slot_mapping: Tensor,
    scales_slot_mapping: Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> None:
    """Write this step's tokens to the slots an engine has chosen: `page * page_size + slot`, -1 for padding.

    slot_mapping, scales_slot_mapping [T] int64. Without a mapping of their own the scales follow slot_mapping.
    """
    tokens = expect_tensor(latent, "latent", [None, planes.latent.shape[2]], WIDE_DTYPES).shape[0]
    expect_tensor(slot_mapping, "slot_mapping", [tokens], [torch.int64])
    if scales_slot_mapping is None or planes.scales_in_value_pages:
        scales_slot_mapping = slot_mapping
    expect_tensor(scales_slot_mapping, "scales_slot_mapping", [tokens], [torch.int64])
    expect_same_device(latent, "latent", slot_mapping=slot_mapping, scales_slot_mapping=scales_slot_mapping)
    _launch(
        latent,
        rope,
        planes,
        power_of_two,
        True,
        slot_mapping,
        scales_slot_mapping,
        None,
        None,
        0,
        0,
        slot_mapping.stride(0),
        scales_slot_mapping.stride(0),
    )


def _launch(latent: Tensor, rope: Tensor, planes: RowPlanes, power_of_two: bool, slots: bool, *address: Any) -> None:
    check_planes(planes)
    pages, page_size, columns = planes.latent.shape
    expect_tensor(latent, "latent", [None, columns], WIDE_DTYPES)
    expect_tensor(rope, "rope", [latent.shape[0], ROPE], WIDE_DTYPES)
    for name, rows in (("latent", latent), ("rope", rope)):
        if rows.stride(1) != 1:
            refuse(name, "adjacent columns (stride(1) 1)", rows.stride())
    expect_same_device(latent, "latent", rope=rope, pool=planes.latent)
    scale_pages, *scale_strides = scale_geometry(planes)
    if max(pages, scale_pages) * page_size >= 2**31:
        refuse("planes.latent", "fewer than 2^31 slots", f"{max(pages, scale_pages)} pages of {page_size}")
    tokens = latent.shape[0]
    if tokens == 0 or pages == 0 or page_size == 0:
        return
    launch(
        store_kernel,
        (ceildiv(tokens, TOKENS),),
        latent,
        rope,
        as_bytes(planes.latent),
        as_bytes(planes.rope),
        as_bytes(planes.scales),
        *address,
        tokens,
        page_size,
        pages,
        scale_pages,
        latent.stride(0),
        rope.stride(0),
        *planes.latent.stride()[:2],
        *planes.rope.stride()[:2],
        *scale_strides,
        SLOTS=slots,
        **_constants(planes, power_of_two),
        num_warps=4,
    )


def _constants(planes: RowPlanes, power_of_two: bool) -> dict[str, Any]:
    known = {**constants(planes), **group_blocks(planes)}
    scale_dtype = torch.float32 if planes.scales is None else planes.scales.dtype
    power_of_two = power_of_two or known["E8M0"]
    floor, ceiling = sigma_limits(scale_dtype, power_of_two=power_of_two)
    known |= {
        "FIXED_SIGMA": planes.scales_repeated,
        "POWER_OF_TWO": power_of_two,
        "FLOOR": floor,
        "CEILING": ceiling,
        "ROUNDS_E4M3": target_of(planes.latent.device).rounds_e4m3,
        "TOKENS": TOKENS,
    }
    return known


# A slot mapping's stride is 1, and known to be.
@triton.jit(
    do_not_specialize=[
        "value_address", "scale_address", "cache_lengths", "query_start_loc", "requests", "table_width", "tokens",
        "page_size", "pages", "scale_pages",
    ]
)  # fmt: skip
def store_kernel(
    latent,  # [T, LATENT]
    rope,  # [T, ROPE]
    pool_latent,  # [pages, page_size, LATENT]
    pool_rope,  # [pages, page_size, ROPE]
    pool_scales,  # [scale_pages, page_size, GROUPS], or None
    value_address,  # lookup_table [B, W], or slot_mapping [T]
    scale_address,  # the same for the scales
    cache_lengths,  # [B] int32; None with slots
    query_start_loc,  # [B + 1] int32; None with slots
    requests,
    table_width,
    stride_value_address,
    stride_scale_address,
    tokens,
    page_size,
    pages,
    scale_pages,
    stride_latent,
    stride_rope,
    stride_latent_page,
    stride_latent_slot,
    stride_rope_page,
    stride_rope_slot,
    stride_scales_page,
    stride_scales_slot,
    stride_scales_group,
    SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROPE_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    FIXED_SIGMA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FLOOR: tl.constexpr,
    CEILING: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    ROUNDS_E4M3: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if SLOTS:
        page, slot = _find_slots(value_address, stride_value_address, token, tokens, pages, page_size)
        scale_page, scale_slot = _find_slots(scale_address, stride_scale_address, token, tokens, scale_pages, page_size)
    else:
        page, slot, scale_page = _find_pages(
            value_address,
            scale_address,
            cache_lengths,
            query_start_loc,
            token,
            tokens,
            requests,
            page_size,
            table_width,
            stride_value_address,
            stride_scale_address,
        )
        scale_slot = slot
    kept = (page >= 0) & (page < pages) & (scale_page >= 0) & (scale_page < scale_pages)  # [TOKENS]

    row = token.to(tl.int64)
    latent_row = latent + row * stride_latent
    rope_row = rope + row * stride_rope
    pool_latent_row = pool_latent + page * stride_latent_page + slot * stride_latent_slot
    pool_rope_row = pool_rope + page * stride_rope_page + slot * stride_rope_slot
    if not FP8_LATENT:
        _copy_columns(latent_row, pool_latent_row, kept, LATENT)
        _copy_columns(rope_row, pool_rope_row, kept, ROPE)
    else:
        scales_row = pool_scales + scale_page * stride_scales_page + scale_slot * stride_scales_slot
        # Few groups are numbers known to the compiler, and parts that a group lacks vanish.
        UNROLLED: tl.constexpr = GROUPS if GROUPS <= MOST_UNROLLED else 1
        for first in range(0, GROUPS, UNROLLED):
            for group in tl.static_range(UNROLLED):
                _store_group(
                    latent_row, rope_row, pool_latent_row, pool_rope_row, scales_row, stride_scales_group,
                    first + group, kept, LATENT, ROPE, FP8_ROPE, GROUP, ROPE_SCALED, E8M0, FIXED_SIGMA, POWER_OF_TWO,
                    FLOOR, CEILING, LATENT_BLOCK, ROPE_BLOCK, ROUNDS_E4M3,
                )  # fmt: skip
        if not ROPE_SCALED:
            _copy_columns(rope_row, pool_rope_row, kept, ROPE)


@triton.jit
def _store_group(
    latent_row,
    rope_row,
    pool_latent_row,
    pool_rope_row,
    scales_row,
    stride_scales_group,
    group,
    kept,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FP8_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    FIXED_SIGMA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FLOOR: tl.constexpr,
    CEILING: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    ROUNDS_E4M3: tl.constexpr,
):
    """Quantise and write the columns of one scale group: those of the latent, those of the rope, and the scale."""
    scale = scales_row + tl.cast(group, tl.int64) * stride_scales_group
    first = group * GROUP
    end = first + GROUP
    column = first + tl.arange(0, LATENT_BLOCK)
    in_latent = kept[:, None] & ((column < end) & (column < LATENT))[None, :]
    latent_x = tl.load(latent_row[:, None] + column[None, :], mask=in_latent, other=0.0).to(tl.float32)
    rope_column = tl.arange(0, ROPE_BLOCK)
    if first > LATENT:
        rope_column += first - LATENT
    in_rope = kept[:, None] & ((rope_column < end - LATENT) & (rope_column < ROPE))[None, :]
    rope_x = tl.zeros([kept.shape[0], ROPE_BLOCK], tl.float32)
    if FP8_ROPE and end > LATENT:
        rope_x = tl.load(rope_row[:, None] + rope_column[None, :], mask=in_rope, other=0.0).to(tl.float32)

    if FIXED_SIGMA:
        sigma = unpack_sigma(tl.load(scale, mask=kept, other=1), E8M0)
    else:
        amax = _largest_finite(latent_x)
        if FP8_ROPE and end > LATENT:
            amax = tl.maximum(amax, _largest_finite(rope_x))
        packed = pack_sigma(measure_sigma(amax, FLOOR, CEILING, POWER_OF_TWO), E8M0, scale.dtype.element_ty)
        tl.store(scale, packed, mask=kept)
        sigma = unpack_sigma(packed, E8M0)
    inverse = tl.div_rn(1.0, sigma)[:, None]
    tl.store(pool_latent_row[:, None] + column[None, :], encode_e4m3(latent_x * inverse, ROUNDS_E4M3), mask=in_latent)
    if FP8_ROPE:
        if end > LATENT:
            code = encode_e4m3(rope_x * inverse, ROUNDS_E4M3)
            tl.store(pool_rope_row[:, None] + rope_column[None, :], code, mask=in_rope)
    elif ROPE_SCALED:
        _copy_divided(rope_row, pool_rope_row, inverse, kept, ROPE)


@triton.jit
def _largest_finite(x):
    """Largest |x| of each row over what is neither NaN nor infinite."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)


@triton.jit
def _copy_columns(source_row, target_row, kept, COLUMNS: tl.constexpr):
    """Copy rows; the same dtype keeps its bits, a narrower one saturates."""
    column = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(source_row[:, None] + column, mask=kept[:, None])
    tl.store(target_row[:, None] + column, saturate(x, target_row.dtype.element_ty), mask=kept[:, None])


@triton.jit
def _copy_divided(source_row, target_row, inverse, kept, COLUMNS: tl.constexpr):
    """Copy rows times 1 / sigma, which is how a prescaled rope is stored."""
    column = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(source_row[:, None] + column, mask=kept[:, None]).to(tl.float32) * inverse
    tl.store(target_row[:, None] + column, saturate(x, target_row.dtype.element_ty), mask=kept[:, None])


@triton.jit
def _find_pages(
    lookup_table,
    scales_lookup_table,
    cache_lengths,
    query_start_loc,
    token,
    tokens,
    requests,
    page_size,
    table_width,
    stride_table,
    stride_scales_table,
):
    """Page, slot and scale page of each token, int64; pages are -1 where a token has none."""
    request = find_token_requests(query_start_loc, requests, token)
    real = (token < tokens) & (request < requests)
    first = tl.load(query_start_loc + request, mask=real, other=0)
    position = tl.load(cache_lengths + request, mask=real, other=-1) + (token - first)
    column = position // page_size
    real &= (position >= 0) & (column < table_width)
    row = request.to(tl.int64)
    page = tl.load(lookup_table + row * stride_table + column, mask=real, other=0).to(tl.int64)
    scale_page = tl.load(scales_lookup_table + row * stride_scales_table + column, mask=real, other=0).to(tl.int64)
    return tl.where(real, page, -1), (position % page_size).to(tl.int64), tl.where(real, scale_page, -1)


@triton.jit
def _find_slots(mapping, stride_mapping, token, tokens, pages, page_size):
    """Page and slot of each token, int64; the page is -1 where the mapping names none of the pool."""
    place = tl.load(mapping + token.to(tl.int64) * stride_mapping, mask=token < tokens, other=-1)
    inside = (place >= 0) & (place < tl.cast(pages, tl.int64) * page_size)
    near = tl.where(inside, place, 0).to(tl.int32)  # 64-bit division costs a hundred instructions
    return tl.where(inside, near // page_size, -1).to(tl.int64), (near % page_size).to(tl.int64)
