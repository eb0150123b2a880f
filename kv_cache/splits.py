"""How a key range is cut into partitions, so that every executor cuts alike.

Plain arithmetic: ints, tensors and device values all pass through it.
"""

from __future__ import annotations

from pagedmla.kv_cache.checks import ceildiv


def split_bounds(kv_len: int, partition: int, num_partitions: int, tile: int) -> tuple[int, int]:
    """First token and end of `partition`; whole tiles each, the last ones possibly empty (start == end).

    tiles = ceildiv(kv_len, tile); each partition takes ceildiv(tiles, num_partitions) of them.
    """
    tokens = ceildiv(ceildiv(kv_len, tile), num_partitions) * tile
    start = min(partition * tokens, kv_len)
    return start, min(start + tokens, kv_len)
