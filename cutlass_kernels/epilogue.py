"""The end of an item: both consumers' sums become one, O is divided by it and stored, as output or partial result."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from pagedmla.cutlass_kernels import ptx, schedule
from pagedmla.cutlass_kernels.consumer import Consumer
from pagedmla.cutlass_kernels.protocol import Action
from pagedmla.cutlass_kernels.tiles import COLUMN_TILE, COLUMN_TILES, COLUMNS, LATENT, WARPGROUPS


class Outputs(NamedTuple):
    """Where results go: addresses (Int64) and strides in elements."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    cuts: Any
    stride_token: Any
    stride_head: Any
    heads: Any


@cute.jit
def write(
    consumer: cutlass.Constexpr,
    values: cutlass.Constexpr,
    outputs: Outputs,
    piece: Int32,
    pieces: Int32,
) -> None:
    """Write the item's rows: out and lse where the request isn't cut, else this piece's partial result."""
    shape, place = consumer.shape, consumer.place
    consumer.barriers.step(Action.MEET, "consumers")
    consumer.meet_all()  # each consumer's sums and its running maximum are in shared memory
    if place.thread < shape.rows:
        _normalise(consumer, outputs, piece, pieces, place.thread)
    consumer.meet()
    inverses = consumer.own(Float32, "gain", place.which)
    addresses = _own_addresses(consumer)
    first = place.which * COLUMNS + 16 * place.warp + 2 * (place.lane >> 2)  # see fragments.output_column
    if pieces == 1:
        for row in cutlass.range_constexpr(consumer.own_rows):
            if addresses[row] != 0:
                start = addresses[row] + first * 2
                for tile in cutlass.range_constexpr(COLUMN_TILES):
                    low, high = (x * inverses[row] for x in values.pair(tile, row))
                    pair = ptx.pack_half2(low, high, consumer.variant.dtype)
                    ptx.store_global(start + tile * (COLUMN_TILE * 2), pair)
    else:
        for row in cutlass.range_constexpr(consumer.own_rows):
            if addresses[row] != 0:
                start = addresses[row] + first * 4
                for tile in cutlass.range_constexpr(COLUMN_TILES):
                    low, high = (x * inverses[row] for x in values.pair(tile, row))
                    ptx.store_global(start + tile * (COLUMN_TILE * 4), low, high)


@cute.jit
def _normalise(consumer: cutlass.Constexpr, outputs: Outputs, piece: Int32, pieces: Int32, row: Int32) -> None:
    """A thread a row: 1 / sum into `gain`; one consumer also stores the LSE."""
    none = Float32(-Float32.inf)
    (peak,) = ptx.load_shared(Float32, consumer.at("peak") + 4 * row, 1)
    anchor = cutlass.select_(peak == none, Float32(0.0), peak)
    total = Float32(0.0)
    for which in cutlass.range_constexpr(WARPGROUPS):
        (own,) = ptx.load_shared(Float32, consumer.at("own_peak", which) + 4 * row, 1)
        weight = ptx.exp2(own - anchor)
        for part in consumer.warp_statistics("warp_sum", row, which):
            total += part * weight
    empty = total == Float32(0.0)  # not by the peak: a maximum passes over NaN
    inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
    ptx.store_shared(consumer.at("gain", consumer.place.which) + 4 * row, inverse)
    lse = cutlass.select_(empty, none, (anchor + ptx.log2(total)) * math.log(2))
    (place,) = ptx.load_shared(Int32, consumer.at("row") + 4 * row, 1)
    address = Int64(0)
    if place >= 0:
        block, _, _ = cute.arch.block_idx()  # asked for anew: a register less
        cluster = consumer.variant.cluster
        first = schedule.partial_row(block // cluster, piece, block % cluster, consumer.shape.rows, cluster)
        partial_row = first + row
        if pieces == 1:
            token, head = place // outputs.heads, place % outputs.heads
            address = outputs.out + (Int64(token) * outputs.stride_token + Int64(head) * outputs.stride_head) * 2
        else:
            address = outputs.partial_out + Int64(partial_row) * (LATENT * 4)
        if consumer.place.which == 0:
            if pieces == 1:
                ptx.store_global(outputs.lse + Int64(place) * 4, lse)
            else:
                ptx.store_global(outputs.partial_lse + Int64(partial_row) * 4, lse)
            if piece == 0:
                ptx.store_global(outputs.cuts + Int64(place) * 4, schedule.cut_of(pieces, partial_row))
    low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
    ptx.store_shared(consumer.at("address") + 8 * row, low, high)  # both consumers write the same


def _own_addresses(consumer: Consumer) -> list[Any]:
    """Where the outputs of the thread's rows go (Int64); 0: nowhere."""
    address = consumer.at("address") + (consumer.place.lane & 3) * (8 * consumer.own_rows)
    words: list[Any] = []
    for first in range(0, consumer.own_rows, 2):
        words += ptx.load_shared(Int32, address, 4, 8 * first)
    return [ptx.join(low, high) for low, high in zip(words[::2], words[1::2], strict=True)]
