"""The part of a request's keys that one split works on."""

import triton
import triton.language as tl


@triton.jit
def split_range(kv_len, split, num_splits, TILE: tl.constexpr):
    """`(begin, end)` of a split: whole tiles of keys, spread evenly; `begin >= end` when nothing is left for it.

    Cut by `kv_len` and not by what a row may see, so that every row of a request is cut in the same places.
    """
    tiles = tl.cdiv(kv_len, TILE)
    span = tl.cdiv(tiles, num_splits) * TILE
    begin = split * span
    return begin, tl.minimum(begin + span, kv_len)
