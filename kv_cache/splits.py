"""How a key range is cut into partitions, so that every executor cuts alike.

Plain arithmetic: ints, tensors and device values all pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedmla.kv_cache.checks import ceildiv

SMALLEST_TILE = 16  # keys; no kernel cuts finer
SMALLEST_PIECE = 128  # keys: a piece costs a partial row, written and read again
MOST_REQUESTS = 4095  # of a step whose work is spread by their lengths; more keep a machine busy as they are


def useful_partitions(num_partitions: int, max_kv_len: int, page_size: int) -> int:
    """`num_partitions`, or as many as any kernel could give keys to; it follows from capacities, never from lengths."""
    return max(1, min(num_partitions, ceildiv(max_kv_len, min(page_size, SMALLEST_TILE))))


def used_partitions(kv_len: int, num_partitions: int, tile: int) -> int:
    """How many of the partitions hold tokens: they stand first, and the rest are empty."""
    tiles = ceildiv(kv_len, tile)
    return ceildiv(tiles, ceildiv(tiles, num_partitions)) if tiles else 0


def split_bounds(kv_len: int, partition: int, num_partitions: int, tile: int) -> tuple[int, int]:
    """First token and end of `partition`; whole tiles each, the last ones possibly empty (start == end).

    tiles = ceildiv(kv_len, tile); each partition takes ceildiv(tiles, num_partitions) of them.
    """
    tokens = ceildiv(ceildiv(kv_len, tile), num_partitions) * tile
    start = min(partition * tokens, kv_len)
    return start, min(start + tokens, kv_len)


def choose_span(
    row_tiles: Sequence[int], key_tiles: Sequence[int], *, places: int, slots: int, most_pieces: int, smallest: int = 1
) -> int:
    """The most tiles of keys that a piece may have. Request b has row_tiles[b] tiles of rows, each over key_tiles[b]
    tiles of keys.

    Each tile of rows is cut into ceildiv(key_tiles[b], span) pieces, of which `places` run at once. Of the spans from
    an even share to the longest request (nothing is cut) it is the one that is expected to end first: pieces that all
    run at once take as long as the longest of them; others an even share, and at worst a piece more.

    slots        pieces of cut tiles that there is room for
    most_pieces  of a request
    smallest     tiles that a piece should have
    """
    longest = max((keys for rows, keys in zip(row_tiles, key_tiles) if rows), default=0)
    even = ceildiv(sum(rows * keys for rows, keys in zip(row_tiles, key_tiles)), places)
    best, best_time = longest, longest + (even if sum(row_tiles) > places else 0)
    span = max(even, smallest, ceildiv(longest, most_pieces))
    while span < longest:
        counts = [ceildiv(keys, span) for keys in key_tiles]
        pieces = sum(rows * count for rows, count in zip(row_tiles, counts))
        cut = sum(rows * count for rows, count in zip(row_tiles, counts) if count > 1)
        piece = max(ceildiv(keys, count) for rows, keys, count in zip(row_tiles, key_tiles, counts) if rows and count)
        time = piece + (even if pieces > places else 0)
        if cut <= slots:
            if time < best_time:
                best, best_time = span, time
            if pieces <= places or sum(row_tiles) >= places:  # longer ones end later
                break
        span += max(span // 8, 1)
    return max(best, 1)
