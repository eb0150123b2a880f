"""Q of an item into shared memory: each row divided by a power of two of its own, then rounded to the variant's form.

A warp takes up to four rows at a time: all are loaded before the first is rounded. A lane has 16 latent columns, half
the lanes 4 of the rope. The scale leaves q_rope exact in bf16, and folds back in with the logit's factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from pagedmla.cutlass_kernels import fragments, ptx, schedule
from pagedmla.cutlass_kernels.consumer import Consumer
from pagedmla.cutlass_kernels.tiles import LATENT, LEAST_QUERY_SCALE, WARPGROUPS, WARPS
from pagedmla.cutlass_kernels.work import Item

_TOGETHER = 4  # rows that a warp loads before it rounds the first: a trip to memory for all of them
_ROPE_LANES = 16


class Rows(NamedTuple):
    """Where rows of q lie: the address (Int64), strides in elements, heads; and sm_scale * log2(e)."""

    q: Any
    stride_token: Any
    stride_head: Any
    heads: Any
    scale_log2: Any


def first_row(consumer: Consumer, item: Item, rank: Any) -> Any:
    """The CTA's first row, counted from the request's first."""
    return (item.row_tile * consumer.variant.cluster + rank) * consumer.shape.rows


@cute.jit
def load_queries(consumer: cutlass.Constexpr, rows: Rows, item: Item, first: Int32) -> None:
    """Quantise the CTA's rows, half of them each consumer, and note each row's factor."""
    shape, place = consumer.shape, consumer.place
    live = item.request.q_len * rows.heads
    warps = WARPGROUPS * WARPS
    together = min(shape.rows // warps, _TOGETHER)
    for row in cutlass.range(place.which * WARPS + place.warp, shape.rows, warps * together, unroll=1):
        loaded = [_load_row(consumer, rows, item, first + row + warps * i, live) for i in range(together)]
        for i in cutlass.range_constexpr(together):
            _store_row(consumer, rows, row + warps * i, *loaded[i])


@cute.jit
def set_rows(consumer: cutlass.Constexpr, rows: Rows, item: Item, first: Int32, causal: Int32) -> None:
    """Each row's limit and place in the output (-1: no such row), and a running maximum of -inf; by one consumer."""
    shape, thread = consumer.shape, consumer.place.thread
    if thread < shape.rows:
        row = first + fragments.placed_row(thread, shape.rows)
        token = row // rows.heads
        request = item.request
        limit = schedule.keys_seen(request.cache_length, request.kv_len, token, causal)
        present = Int32(row < request.q_len * rows.heads)
        output = request.first_token * rows.heads + row
        ptx.store_shared(consumer.at("limit") + 4 * thread, limit)
        ptx.store_shared(consumer.at("row") + 4 * thread, present * (output + 1) - 1)
        none = Float32(-Float32.inf)
        ptx.store_shared(consumer.at("peak") + 4 * thread, none)
        for which in cutlass.range_constexpr(WARPGROUPS):
            ptx.store_shared(consumer.at("own_peak", which) + 4 * thread, none)
            for warp in cutlass.range_constexpr(WARPS):
                ptx.store_shared(consumer.at("warp_sum", which * WARPS + warp) + 4 * thread, Float32(0.0))


def _load_row(consumer: Consumer, rows: Rows, item: Item, in_request: Any, live: Any) -> tuple[list[Any], list[Any]]:
    """The lane's words of a row: 8 of the latent, 2 of the rope; 0 from the request's `live` rows on."""
    lane = consumer.place.lane
    token = item.request.first_token + in_request // rows.heads
    head = in_request % rows.heads
    source = rows.q + (Int64(token) * rows.stride_token + Int64(head) * rows.stride_head) * 2
    inside = Int32(in_request < live)
    words = [word for half in range(2) for word in ptx.load_global_or(source + lane * 32 + 16 * half, 4, inside)]
    rope_inside = inside & Int32(lane < _ROPE_LANES)
    rope_source = source + 2 * LATENT + (lane & (_ROPE_LANES - 1)) * 8
    return words, list(ptx.load_global_or(rope_source, 2, rope_inside))


@cute.jit
def _store_row(
    consumer: cutlass.Constexpr, rows: Rows, row: Int32, words: cutlass.Constexpr, rope_words: cutlass.Constexpr
) -> None:
    shape, lane, dtype = consumer.shape, consumer.place.lane, consumer.variant.dtype
    latent = [x for word in words for x in ptx.unpack_half2(word, dtype)]
    rope = [x for word in rope_words for x in ptx.unpack_half2(word, dtype)]
    largest = Float32(0.0)
    for x in latent + (rope if shape.rope == "e4m3" else []):
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    for distance in cutlass.range_constexpr(5):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << distance))
    scale, inverse = _power_of_two(largest, shape.query_top)
    latent = [x * inverse for x in latent]
    rope = [x * inverse for x in rope]
    for term in cutlass.range_constexpr(shape.terms):
        latent = _store_latent(consumer, row, latent, term)
    if lane < _ROPE_LANES:
        for term in cutlass.range_constexpr(shape.query_rope_terms):
            rope = _store_rope(consumer, row, rope, term)
    if lane == 0:
        ptx.store_shared(consumer.at("factor") + 4 * fragments.row_place(row, shape.rows), rows.scale_log2 * scale)


def _power_of_two(largest: Any, top: float) -> tuple[Any, Any]:
    """The least power of two that brings `largest` under `top`, and its inverse."""
    floored = cute.arch.fmax(largest * (1.0 / top), Float32(LEAST_QUERY_SCALE))
    bits = (ptx.as_int(floored) + 0x7FFFFF) & 0x7F800000
    return ptx.as_float(bits), ptx.as_float(0x7F000000 - bits)


def _store_latent(consumer: Consumer, row: Any, x: list[Any], term: int) -> list[Any]:
    """16 columns of a row, as two 16-byte units of fp16 or one of e4m3; returns what the rounding left."""
    shape, lane = consumer.shape, consumer.place.lane
    below, beside = term % shape.stacked, term // shape.stacked
    base = consumer.smem_address + beside * shape.latent_steps * shape.query_panel
    row = row + below * shape.rows
    if shape.precision == "fp16":
        pairs = [ptx.pack_half2(x[i], x[i + 1], "fp16") for i in range(0, 16, 2)]
        for half in range(2):  # fragments.query_slot: pairs 0, 2, 4, 6 first
            unit = fragments.panel_byte(row, lane * 32 + 16 * half, shape.query_rows)
            ptx.store_shared(base + unit, *pairs[half::2])
        return x
    codes = [ptx.pack_e4m3x4(*x[i : i + 4]) for i in range(0, 16, 4)]
    ptx.store_shared(base + fragments.panel_byte(row, lane * 16, shape.query_rows), *codes)
    return _remainder(x, codes) if term + 1 < shape.terms else x


def _store_rope(consumer: Consumer, row: Any, x: list[Any], term: int) -> list[Any]:
    """4 columns of a row; returns what the rounding left."""
    shape, lane = consumer.shape, consumer.place.lane
    width, panel_rows = shape.query_rope_bytes, shape.query_rope_rows
    base = consumer.smem_address + shape.query_rope_offset
    if panel_rows > shape.rows:  # stacked
        row = row + term * shape.rows
    else:
        base = base + term * (panel_rows * width)
    if shape.rope != "e4m3":
        pairs = [ptx.pack_half2(x[i], x[i + 1], "bf16") for i in (0, 2)]
        ptx.store_shared(base + fragments.panel_byte(row, lane * 8, panel_rows, width), *pairs)
        return x
    if shape.precision == "fp16":
        for half in range(2):
            place = (lane >> 2) * 32 + (lane & 3) * 4 + 16 * half
            pair = ptx.pack_half2(x[2 * half], x[2 * half + 1], "fp16")
            ptx.store_shared(base + fragments.panel_byte(row, place, panel_rows, width), pair)
        return x
    code = ptx.pack_e4m3x4(*x)
    ptx.store_shared(base + fragments.panel_byte(row, lane * 4, panel_rows, width), code)
    return _remainder(x, [code]) if term + 1 < shape.query_rope_terms else x


def _remainder(x: list[Any], codes: list[Any]) -> list[Any]:
    """x minus what its e4m3 codes mean."""
    meant = [value for code in codes for half in (code, code >> 16) for value in ptx.unpack_e4m3x2(half)]
    return [a - b for a, b in zip(x, meant, strict=True)]
