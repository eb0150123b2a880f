"""The schedule on the device: which part of which request a CTA is at, and how it moves on."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from pagedmla.cutlass_kernels import ptx, schedule
from pagedmla.cutlass_kernels.schedule import tiles_of
from pagedmla.cutlass_kernels.tiles import KEYS, NO_CACHE


class Lengths(NamedTuple):
    """Where requests' lengths lie, and the step's sizes."""

    cache_lengths: Any  # addresses (Int64)
    query_start_loc: Any
    batch: Any
    tokens: Any
    heads: Any
    workers: Any
    partitions: Any


class Request(NamedTuple):
    """`index` may be `batch`: rows of q behind the last request, which see no key."""

    index: Any
    first_token: Any
    q_len: Any
    cache_length: Any
    kv_len: Any


class Item(NamedTuple):
    """A piece of a segment: tiles begin .. begin + tiles - 1 of a request against a tile of its rows."""

    request: Request
    row_tile: Any
    begin: Any
    tiles: Any


_FIRST, _SHARE = 0, 16  # bytes
_PLACE, _SIZES, _RANGE, _FILL = 0, 16, 32, 48
_ITEMS, _PIECE = _PLACE + 12, _SIZES + 8


class Notes:
    """What the walk needs again after an item, kept in shared memory: registers are short while one is worked on.

    found    at _FIRST   the first segment's request, row tile and first unit
             at _SHARE   share, whole, one_each
    warp     at _PLACE   request, row tile, first unit, items
             at _SIZES   units, row tiles, piece, pieces
             at _RANGE   first key, kv_len, kept, tiles
             at _FILL    fill
    """

    def __init__(self, found: Any, warp: Any) -> None:
        self.found, self.warp = found, warp


def read_request(lengths: Lengths, index: Any) -> Request:
    """For index 0 .. batch; above it, an empty one."""
    real = Int32(index < lengths.batch)
    inside = Int32(index <= lengths.batch)
    at = schedule.smaller(index, lengths.batch)
    (first,) = ptx.load_global(lengths.query_start_loc + Int64(at) * 4, 1)
    (end,) = ptx.load_global_or(lengths.query_start_loc + Int64(at) * 4 + 4, 1, real)
    (cache_length,) = ptx.load_global_or(lengths.cache_lengths + Int64(at) * 4, 1, real, NO_CACHE)
    q_len = (end + (1 - real) * lengths.tokens - first) * inside
    return Request(index, first, q_len, cache_length, schedule.length_of(cache_length, q_len))


@cute.jit
def find_share(
    lengths: Lengths, worker: Int32, thread: Int32, scratch: Int32, rows: cutlass.Constexpr, threads: cutlass.Constexpr
) -> Int32:
    """The worker's share and first segment as `Notes.found`, whose address is returned: behind 16 bytes a warp of
    `scratch`. By all threads of the CTA, which meet in it.
    """
    warps = threads // 32
    warp, lane = thread // 32, thread % 32
    total, longest, segments = Int32(0), Int32(1), Int32(0)
    for index in cutlass.range(thread, lengths.batch + 1, threads, unroll=1):
        request = read_request(lengths, index)
        row_tiles = schedule.row_tiles_of(request.q_len, lengths.heads, rows)
        units = schedule.units_of(request.kv_len)
        total += row_tiles * units
        segments += row_tiles
        longest = schedule.larger(longest, Int32(row_tiles > 0) * units)
    total = cute.arch.warp_redux_sync(total, "add")
    segments = cute.arch.warp_redux_sync(segments, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    if lane == 0:
        ptx.store_shared(scratch + 16 * warp, total, segments, longest, Int32(0))
    cute.arch.sync_threads()
    total, longest, segments = Int32(0), Int32(1), Int32(0)
    for other in cutlass.range_constexpr(warps):
        its_total, its_segments, its_longest, _ = ptx.load_shared(Int32, scratch + 16 * other, 4)
        total, segments = total + its_total, segments + its_segments
        longest = schedule.larger(longest, its_longest)
    share = schedule.share_of(total, longest, lengths.workers, lengths.partitions)
    whole = schedule.is_whole(total, longest, segments, lengths.workers, lengths.partitions)
    one_each = whole & Int32(segments <= lengths.workers)
    result = scratch + 16 * warps
    if thread == 0:
        ptx.store_shared(result, lengths.batch + 1, Int32(0), Int32(0), Int32(0), offset=_FIRST)
        ptx.store_shared(result, share, whole, one_each, Int32(0), offset=_SHARE)
    units_before, segments_before = Int32(0), Int32(0)
    for chunk in cutlass.range(0, lengths.batch + 1, threads, unroll=1):
        request = read_request(lengths, chunk + thread)
        row_tiles = schedule.row_tiles_of(request.q_len, lengths.heads, rows)
        units = schedule.units_of(request.kv_len)
        my_units, my_segments = row_tiles * units, row_tiles
        units_to, segments_to = my_units, my_segments  # inclusive prefix within the warp
        for step in cutlass.range_constexpr(5):
            distance = 1 << step
            inside = Int32(lane >= distance)
            units_to += inside * cute.arch.shuffle_sync_up(units_to, distance, mask_and_clamp=0)
            segments_to += inside * cute.arch.shuffle_sync_up(segments_to, distance, mask_and_clamp=0)
        cute.arch.sync_threads()
        if lane == 31:
            ptx.store_shared(scratch + 16 * warp, units_to, segments_to)
        cute.arch.sync_threads()
        chunk_units, chunk_segments = Int32(0), Int32(0)
        units_from, segments_from = units_before + units_to - my_units, segments_before + segments_to - my_segments
        for other in cutlass.range_constexpr(warps):
            its_units, its_segments = ptx.load_shared(Int32, scratch + 16 * other, 2)
            earlier = Int32(other < warp)
            units_from += earlier * its_units
            segments_from += earlier * its_segments
            chunk_units, chunk_segments = chunk_units + its_units, chunk_segments + its_segments
        units_ahead = schedule.first_unit(worker, share) - units_from
        by_unit = units_ahead // units
        segments_ahead = worker - segments_from
        row_tile = one_each * segments_ahead + (1 - one_each) * by_unit
        ahead = one_each * segments_ahead + (1 - one_each) * units_ahead
        span = one_each * my_segments + (1 - one_each) * my_units
        if ahead >= 0 and ahead < span:
            ptx.store_shared(result, chunk + thread, row_tile, units_from + row_tile * units, Int32(0), offset=_FIRST)
        units_before, segments_before = units_before + chunk_units, segments_before + chunk_segments
    cute.arch.sync_threads()
    return result


@cute.jit
def walk(
    role: cutlass.Constexpr, lengths: Lengths, worker: Int32, notes: cutlass.Constexpr, rows: cutlass.Constexpr
) -> None:
    """Every piece of the CTA's share in order: `fill = role(item, fill, items)` for each that isn't empty.

    `fill` counts tiles of keys and `items` pieces since the kernel began.
    """
    fill, items = Int32(0), Int32(0)
    index, row_tile, start, _ = ptx.load_shared(Int32, notes.found, 4, _FIRST)
    running = Int32(index <= lengths.batch)
    while running != 0:
        share, whole, one_each, _ = ptx.load_shared(Int32, notes.found, 4, _SHARE)
        request = read_request(lengths, index)
        row_tiles = schedule.row_tiles_of(request.q_len, lengths.heads, rows)
        units = schedule.units_of(request.kv_len)
        begin, end, piece, pieces = schedule.piece_of(worker, start, units, share)
        mine = one_each | Int32(start >= schedule.first_unit(worker, share))  # who has its first unit has all of it
        begin, end = (1 - whole) * begin, (1 - whole) * end + whole * mine * units
        piece, pieces = (1 - whole) * piece, (1 - whole) * pieces + whole
        ptx.store_shared(notes.warp, index, row_tile, start, items, offset=_PLACE)
        ptx.store_shared(notes.warp, units, row_tiles, piece, pieces, offset=_SIZES)
        cute.arch.sync_warp()
        if Int32(row_tiles > 0) * (end - begin) > 0:
            tiles = schedule.at_least_zero(schedule.smaller(end, tiles_of(request.kv_len)) - begin)
            fill = role(Item(request, row_tile, begin, tiles), fill, items)
            items = items_before(notes) + 1
        share, whole, one_each, _ = ptx.load_shared(Int32, notes.found, 4, _SHARE)
        index, row_tile, start, _ = ptx.load_shared(Int32, notes.warp, 4, _PLACE)
        units, row_tiles, _, _ = ptx.load_shared(Int32, notes.warp, 4, _SIZES)
        start += Int32(row_tiles > 0) * units
        done = Int32(row_tile + 1 >= row_tiles)
        index, row_tile = index + done, (1 - done) * (row_tile + 1)
        inside = Int32(start < schedule.first_unit(worker, share) + share)
        running = (1 - one_each) & inside & Int32(index <= lengths.batch)


def keep_range(notes: Notes, item: Item, kept: Any, fill: Any) -> None:
    """Note the item's first key, its end, how many keys every row sees, its tiles, and the first one's fill."""
    ptx.store_shared(notes.warp, item.begin * KEYS, item.request.kv_len, kept, item.tiles, offset=_RANGE)
    ptx.store_shared(notes.warp, fill, offset=_FILL)


class Keys(NamedTuple):
    """The keys of an item: the first one, the request's end, how many every row sees, tiles, the first tile's fill."""

    first: Any
    kv_len: Any
    kept: Any
    tiles: Any
    fill: Any


def range_of(notes: Notes) -> Keys:
    return Keys(*ptx.load_shared(Int32, notes.warp, 4, _RANGE), *ptx.load_shared(Int32, notes.warp, 1, _FILL))


def items_before(notes: Notes) -> Any:
    """Items that the CTA has finished."""
    return ptx.load_shared(Int32, notes.warp, 1, _ITEMS)[0]


def pieces_of(notes: Notes) -> Any:
    """(piece, pieces) of the item at hand."""
    return ptx.load_shared(Int32, notes.warp, 2, _PIECE)
