"""Schedule: who works on which rows and keys of a ragged step, decided on the device from its lengths.

contract   cache_lengths [B], query_start_loc [B + 1]; writes int32 records (device/pieces.py): `pieces [P, 8]`, one for
           each program of pieces.py, and `cuts [C, 8]`, one for each tile of rows whose keys are cut. A request's rows
           are cut into pieces of whole tiles of keys, as many for each of its tiles of rows, all as long but the last.
           One without keys has one piece, an empty one. The rows past the last request form another such request
meaning    kv_cache/splits.py::choose_span
grid       one program that chooses, then one for 256 records, once a step: its layers share the schedule. Nothing is
           read on the host, so that a captured graph replays with other lengths
limits     4095 requests; `slots` bounds the pieces of cut rows, `most_pieces` those of a request
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, expect_same_device, refuse
from pagedmla.kv_cache.splits import MOST_REQUESTS, SMALLEST_PIECE
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
    SLOT,
)
from pagedmla.triton_kernels.device.requests import find_scheduled
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import as_int32

_BLOCKS = (256, 1024, 4096)  # requests of one build, with the one that stands for padding
_PIECES = 256  # records of a program


@dataclass(frozen=True, eq=False)
class Schedule:
    """`rows`, `keys`: the tile that it was made for; `slots`: partial tiles of rows that it may fill."""

    pieces: Tensor
    cuts: Tensor
    rows: int
    keys: int
    slots: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"pieces": self.pieces, "cuts": self.cuts}


def make_schedule(
    cache_lengths: Tensor,
    query_start_loc: Tensor,
    *,
    tokens: int,
    heads: int,
    rows: int,
    keys: int,
    row_tiles: int,
    places: int,
    slots: int,
    most_pieces: int,
) -> Schedule:
    """Launch the schedule of a step of `tokens` query tokens; `rows` and `keys` are the tile's.

    row_tiles    tiles of rows that a step of this shape has at most
    places       pieces that run at once
    slots        partial tiles of rows that there is room for
    most_pieces  of a request
    """
    lengths = as_int32(cache_lengths, "cache_lengths", [None])
    requests = lengths.shape[0]
    if requests > MOST_REQUESTS:
        refuse("cache_lengths", f"at most {MOST_REQUESTS} requests", cache_lengths)
    starts = as_int32(query_start_loc, "query_start_loc", [requests + 1])
    expect_same_device(lengths, "cache_lengths", query_start_loc=starts)
    # A piece is no shorter than a share of the places, so that cuts add at most as many.
    sizes = [
        min(row_tiles + places, row_tiles * most_pieces) * PIECE_WORDS.value,
        min(slots // 2, row_tiles) * CUT_WORDS.value,
        4 * (requests + 1),
    ]
    pieces, cuts, offsets = torch.empty(sum(sizes), dtype=torch.int32, device=lengths.device).split(sizes)
    step = (lengths, starts, requests, tokens, heads)
    made = Schedule(pieces.view(-1, PIECE_WORDS.value), cuts.view(-1, CUT_WORDS.value), rows, keys, slots)
    block = next(size for size in _BLOCKS if requests < size)
    launch(
        schedule_kernel,
        (1,),
        offsets,
        cuts,
        *step,
        places,
        slots,
        most_pieces,
        made.cuts.shape[0],
        ROWS=rows,
        TILE=keys,
        SMALLEST=ceildiv(SMALLEST_PIECE, keys),
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        num_stages=1,
    )
    launch(
        records_kernel,
        (ceildiv(made.pieces.shape[0], _PIECES),),
        pieces,
        cuts,
        offsets,
        *step,
        made.pieces.shape[0],
        made.cuts.shape[0],
        ROWS=rows,
        TILE=keys,
        PIECES=_PIECES,
        num_warps=4,
        num_stages=1,
    )
    return made


@triton.jit(
    do_not_specialize=[
        "offsets", "cuts", "cache_lengths", "query_start_loc", "requests", "tokens", "heads", "places", "slots",
        "most_pieces", "cuts_size",
    ]
)  # fmt: skip
def schedule_kernel(
    offsets,  # [4, requests + 1]: of each request the end of its pieces, their number a tile of rows, slot, cut
    cuts,  # [cuts_size, CUT_WORDS]
    cache_lengths,
    query_start_loc,
    requests,
    tokens,
    heads,
    places,
    slots,
    most_pieces,
    cuts_size,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SMALLEST: tl.constexpr,  # tiles of keys in a piece
    BLOCK: tl.constexpr,
):
    """Chooses the span, and where each request's records stand; leaves every cut empty."""
    request = tl.arange(0, BLOCK)
    _, row_count, _, kv_len = _facts(cache_lengths, query_start_loc, request, requests, tokens, heads)
    row_tiles = tl.cdiv(row_count, ROWS)
    key_tiles = tl.where(row_tiles > 0, tl.maximum(_tiles(kv_len, TILE), 1), 0)
    span = _choose_span(row_tiles, key_tiles, places, slots, most_pieces, SMALLEST)
    each = tl.cdiv(key_tiles, span)  # pieces of a tile of rows
    count = row_tiles * each
    cut = each > 1
    in_slots = tl.where(cut, count, 0)
    in_cuts = tl.where(cut, row_tiles, 0)
    known = request <= requests
    tl.store(offsets + request, tl.cumsum(count, 0), mask=known)
    tl.store(offsets + (requests + 1) + request, each, mask=known)
    tl.store(offsets + 2 * (requests + 1) + request, tl.cumsum(in_slots, 0) - in_slots, mask=known)
    tl.store(offsets + 3 * (requests + 1) + request, tl.cumsum(in_cuts, 0) - in_cuts, mask=known)
    for start in range(0, cuts_size, BLOCK):
        tl.store(cuts + (start + request) * CUT_WORDS + CUT_COUNT, 0, mask=start + request < cuts_size)


# A launch of its own: no barrier within one makes a program's stores visible to its loads on every GPU (on gfx942
# Triton's waits for the program, not for memory).
@triton.jit(
    do_not_specialize=[
        "cuts", "offsets", "cache_lengths", "query_start_loc", "requests", "tokens", "heads", "pieces_size",
        "cuts_size",
    ]
)  # fmt: skip
def records_kernel(
    pieces,  # [pieces_size, PIECE_WORDS]
    cuts,
    offsets,
    cache_lengths,
    query_start_loc,
    requests,
    tokens,
    heads,
    pieces_size,
    cuts_size,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The records of a block of pieces, and of the cuts whose first piece is among them."""
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    request = find_scheduled(offsets, requests, piece)
    known = request <= requests
    first_token, row_count, cached, kv_len = _facts(cache_lengths, query_start_loc, request, requests, tokens, heads)
    each = tl.load(offsets + (requests + 1) + request, mask=known, other=1)
    before = tl.load(offsets + request - 1, mask=known & (request > 0), other=0)
    row_tile = (piece - before) // each
    part = (piece - before) % each
    span = tl.cdiv(_tiles(kv_len, TILE), each)
    first_slot = tl.load(offsets + 2 * (requests + 1) + request, mask=known, other=0) + row_tile * each
    written = piece < pieces_size
    record = pieces + piece * PIECE_WORDS
    tl.store(record + REQUEST, tl.where(known, request, -1), mask=written)
    tl.store(record + FIRST_TOKEN, first_token, mask=written)
    tl.store(record + ROW_COUNT, row_count, mask=written)
    tl.store(record + FIRST_ROW, row_tile * ROWS, mask=written)
    tl.store(record + CACHE_LENGTH, cached, mask=written)
    tl.store(record + FIRST_TILE, part * span, mask=written)
    # The last one's end by itself: near 2^31 keys the product wraps.
    tl.store(record + END, tl.where(part + 1 == each, kv_len, (part + 1) * span * TILE), mask=written)
    tl.store(record + SLOT, tl.where(each > 1, first_slot + part, -1), mask=written)
    cut = tl.load(offsets + 3 * (requests + 1) + request, mask=known, other=0) + row_tile
    opens = written & known & (each > 1) & (part == 0) & (cut < cuts_size)
    record = cuts + cut * CUT_WORDS
    tl.store(record + CUT_FIRST_TOKEN, first_token, mask=opens)
    tl.store(record + CUT_ROW_COUNT, row_count, mask=opens)
    tl.store(record + CUT_FIRST_ROW, row_tile * ROWS, mask=opens)
    tl.store(record + CUT_FIRST_SLOT, first_slot, mask=opens)
    tl.store(record + CUT_COUNT, each, mask=opens)


@triton.jit
def _tiles(kv_len, TILE: tl.constexpr):
    """Tiles of keys; cdiv would wrap near 2^31."""
    return kv_len // TILE + (kv_len % TILE != 0).to(tl.int32)


@triton.jit
def _facts(cache_lengths, query_start_loc, request, requests, tokens, heads):
    """`(first token, rows, cache_length, keys)` of requests; `requests` stands for the padding rows."""
    real = request < requests
    first = tl.load(query_start_loc + request, mask=request <= requests, other=0)
    last = tl.load(query_start_loc + request + 1, mask=real, other=0)
    last = tl.where(real, last, tl.where(request == requests, tokens, first))
    cached = tl.load(cache_lengths + request, mask=real, other=0)
    query_len = tl.maximum(last - first, 0)
    return first, query_len * heads, cached, tl.where(real, tl.maximum(cached + query_len, 0), 0)


@triton.jit
def _choose_span(row_tiles, key_tiles, places, slots, most_pieces, SMALLEST: tl.constexpr):
    """The most tiles of keys that a piece may have: of an even share and what is larger, the one that ends first.
    Request b has row_tiles[b] tiles of rows, each over key_tiles[b] tiles of keys.

    A span that lets all pieces run at once takes as long as its longest piece. One that doesn't takes an even share,
    and at worst a piece more; of such the shortest is best. Uncut rows are the longest span.
    """
    longest = tl.max(key_tiles, 0)
    even = tl.cdiv(tl.sum(row_tiles.to(tl.int64) * key_tiles, 0), places).to(tl.int32)
    tiles = tl.sum(row_tiles, 0)
    best = longest
    best_time = longest + tl.where(tiles > places, even, 0)
    span = tl.maximum(tl.maximum(even, SMALLEST), tl.cdiv(longest, most_pieces))
    searching = span < longest
    while searching:
        each = tl.cdiv(key_tiles, span)
        count = tl.sum(row_tiles * each, 0)
        in_slots = tl.sum(tl.where(each > 1, row_tiles * each, 0), 0)
        time = tl.max(tl.cdiv(key_tiles, tl.maximum(each, 1)), 0) + tl.where(count > places, even, 0)
        fits = in_slots <= slots
        better = fits & (time < best_time)
        best = tl.where(better, span, best)
        best_time = tl.where(better, time, best_time)
        # Past the first that fits and runs at once, or where none can run at once, the first that fits, all are worse.
        done = fits & ((count <= places) | (tiles >= places))
        span += tl.maximum(span // 8, 1)
        searching = (span < longest) & (done == 0)
    return tl.maximum(best, 1)
