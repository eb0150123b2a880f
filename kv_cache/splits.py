"""How a key range is cut into partitions, so that every executor cuts alike.

Plain arithmetic: ints, tensors and device values all pass through it.
"""

from __future__ import annotations

from pagedmla.kv_cache.checks import ceildiv

SMALLEST_TILE = 16  # keys; no kernel cuts finer


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
