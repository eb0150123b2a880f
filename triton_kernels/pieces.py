"""Pieces: absorbed attention of a ragged step whose work is spread evenly, by a schedule made from its lengths.

contract   as mixed.py, and a schedule of the same step (schedule.py). Rows that are whole go to `out` and `lse` at
           once; those that are cut leave a state a piece in the workspace, and a second launch merges them (it is made
           where the workspace has room for cuts, and ends at once where there are none)
meaning    reference/attention.py
grid       a program a piece, and of the merge one for each row of a tile that may be cut: both by capacities alone
cost       docs/kernels/decode_triton.md; a cut row is written and read again in float32 once a piece
limits     as mixed.py
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, expect_same_device, expect_tensor, refuse
from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.triton_kernels.attending import build_options, check_call, strides
from pagedmla.triton_kernels.device.attention import attend_rows
from pagedmla.triton_kernels.device.pieces import (
    CACHE_LENGTH,
    CUT_COUNT,
    CUT_FIRST_ROW,
    CUT_FIRST_SLOT,
    CUT_FIRST_TOKEN,
    CUT_ROW_COUNT,
    CUT_WORDS,
    END,
    FIRST_ROW,
    FIRST_TILE,
    FIRST_TOKEN,
    PIECE_WORDS,
    REQUEST,
    ROW_COUNT,
)
from pagedmla.triton_kernels.device.states import merge_states
from pagedmla.triton_kernels.device.uniform import make_uniform
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import as_bytes
from pagedmla.triton_kernels.schedule import Schedule

_STATES = {True: 16, False: 4}  # of few columns, and of whole rows, in flight
_LSES = 32
_FEW_ROWS = 512  # of cut tiles, below which a merge of whole rows would leave multiprocessors idle
_FEW_COLUMNS = 128


def attend_pieces(
    q: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    schedule: Schedule,
    out: Tensor,
    lse: Tensor,
    states: Tensor,
    state_lse: Tensor,
    scales_lookup_table: Tensor | None = None,
    *,
    sm_scale: float,
    max_query_len: int,
    causal: bool = True,
) -> None:
    """Attend, and write `out` and `lse` (see the top of this file).

    `states [slots, rows, latent]` and `state_lse [slots, rows]`, float32, hold what is cut: as many slots as the
    schedule was told. `max_query_len` chooses the tile, which must be the schedule's: see `tile_of`.
    """
    tables = check_call(q, planes, lookup_table, scales_lookup_table, None, out, lse)
    _, heads, _ = q.shape
    latent = planes.latent.shape[2]
    compiled = build_options(q, planes, causal, max_query_len * heads)
    rows, keys = compiled["ROWS"], compiled["TILE"]
    if (rows, keys) != (schedule.rows, schedule.keys):
        refuse("schedule", f"one for tiles of {rows} rows and {keys} keys", f"{schedule.rows} and {schedule.keys}")
    expect_tensor(states, "states", [None, rows, latent], [torch.float32])
    expect_tensor(state_lse, "state_lse", [states.shape[0], rows], [torch.float32])
    for name, tensor in (("states", states), ("state_lse", state_lse)):
        if not tensor.is_contiguous():
            refuse(name, "adjacent elements", tensor.stride())
    expect_same_device(q, "q", schedule=schedule.pieces, states=states, state_lse=state_lse)
    launch(
        pieces_kernel,
        (schedule.pieces.shape[0],),
        out,
        lse,
        states,
        state_lse,
        q,
        as_bytes(planes.latent),
        as_bytes(planes.rope),
        as_bytes(planes.scales),
        *tables,
        schedule.pieces,
        heads,
        sm_scale * math.log2(math.e),
        *strides(q, planes, tables, out),
        **compiled,
    )
    cuts = schedule.cuts.shape[0]
    if cuts == 0:
        return
    few = cuts * rows <= _FEW_ROWS
    columns = _FEW_COLUMNS if few else latent
    launch(
        merge_cuts_kernel,
        (cuts * rows, ceildiv(latent, columns)),
        out,
        lse,
        states,
        state_lse,
        schedule.cuts,
        heads,
        *out.stride()[:2],
        LATENT=latent,
        ROWS=rows,
        COLUMNS=columns,
        STATES=_STATES[few],
        LSES=_LSES,
        num_warps=4,
    )


def tile_of(q: Tensor, planes: RowPlanes, max_query_len: int) -> tuple[int, int]:
    """(rows, keys) of the tile that a step of requests of at most so many query tokens works in."""
    compiled = build_options(q, planes, True, max_query_len * q.shape[1])
    return compiled["ROWS"], compiled["TILE"]


@triton.jit(
    do_not_specialize=[
        "lse", "lookup_table", "scales_lookup_table", "pieces", "heads", "stride_table", "stride_scales_table",
    ]
)  # fmt: skip
def pieces_kernel(
    out, lse, states, state_lse, q, latent, rope, scales, lookup_table, scales_lookup_table, pieces,
    heads, score_scale,
    stride_table, stride_scales_table, stride_q_token, stride_q_head,
    stride_latent_page, stride_rope_page, stride_scales_page, stride_out_token, stride_out_head,
    STRIDE_LATENT_SLOT: tl.constexpr, STRIDE_ROPE_SLOT: tl.constexpr, STRIDE_SCALES_SLOT: tl.constexpr,
    STRIDE_SCALES_GROUP: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROPE_SCALED: tl.constexpr, E8M0: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    ROPE_CHUNK: tl.constexpr, LATENT_MMA: tl.constexpr, ROPE_MMA: tl.constexpr, SPLIT_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, DEQUANTISE: tl.constexpr, NATIVE_E4M3: tl.constexpr, HOIST: tl.constexpr,
    PREFETCH: tl.constexpr, PREFETCH_ROPE: tl.constexpr,
):  # fmt: skip
    piece = pieces + tl.program_id(0) * PIECE_WORDS
    request = tl.load(piece + REQUEST)
    if make_uniform(request) >= 0:
        row_count = tl.load(piece + ROW_COUNT)
        cache_length = tl.load(piece + CACHE_LENGTH)
        attend_rows(
            out, lse, states, state_lse, q, latent, rope, scales,
            lookup_table + request.to(tl.int64) * stride_table,
            scales_lookup_table + request.to(tl.int64) * stride_scales_table,
            tl.load(piece + FIRST_TOKEN), tl.load(piece + FIRST_ROW), row_count, heads, cache_length,
            tl.maximum(cache_length + row_count // heads, 0), tl.load(piece + FIRST_TILE) * TILE, tl.load(piece + END),
            piece, score_scale,
            stride_q_token, stride_q_head, stride_latent_page, stride_rope_page, stride_scales_page,
            stride_out_token, stride_out_head,
            STRIDE_LATENT_SLOT, STRIDE_ROPE_SLOT, STRIDE_SCALES_SLOT, STRIDE_SCALES_GROUP, LATENT, ROPE, FP8_LATENT,
            FP8_ROPE, GROUP, GROUPS, ROPE_SCALED, E8M0, PAGE_SIZE, CAUSAL, ROWS, TILE, CHUNK, ROPE_CHUNK, LATENT_MMA,
            ROPE_MMA, SPLIT_QUERIES, PRECISION, DEQUANTISE, NATIVE_E4M3, HOIST, PREFETCH, PREFETCH_ROPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lse", "state_lse", "cuts", "heads"])
def merge_cuts_kernel(
    out, lse, states, state_lse, cuts, heads, stride_out_token, stride_out_head,
    LATENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr, LSES: tl.constexpr,
):  # fmt: skip
    """A row of a tile that was cut, and some of its columns."""
    cut = cuts + tl.program_id(0) // ROWS * CUT_WORDS
    place = tl.program_id(0) % ROWS
    count = tl.load(cut + CUT_COUNT)
    # Of a cut that isn't one only the count was written.
    row = tl.load(cut + CUT_FIRST_ROW, mask=count > 0, other=0) + place
    if (count > 0) & (row < tl.load(cut + CUT_ROW_COUNT)):
        slot = tl.load(cut + CUT_FIRST_SLOT)
        first = tl.program_id(1) * COLUMNS
        first_row = slot.to(tl.int64) * ROWS + place
        column = tl.arange(0, COLUMNS)
        merged, merged_lse = merge_states(
            states + first_row * LATENT + first, state_lse + first_row, count, ROWS * LATENT, ROWS, 1,
            first + column < LATENT, COLUMNS, STATES, LSES,
        )  # fmt: skip
        token = (tl.load(cut + CUT_FIRST_TOKEN) + row // heads).to(tl.int64)
        head = (row % heads).to(tl.int64)
        tl.store(
            out + token * stride_out_token + head * stride_out_head + first + column,
            merged.to(out.dtype.element_ty),
            mask=first + column < LATENT,
        )
        tl.store(lse + token * heads + head, merged_lse)
