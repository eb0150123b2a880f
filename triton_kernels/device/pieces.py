"""The records of a schedule: what a program of pieces.py works on, and what one of its merge puts together.

piece  [request, first token, rows, first row, cache_length, first tile of keys, end of its keys, slot]
cut    [first token, rows, first row, first slot, slots, -, -, -]

A request of -1, and slots of 0, stand for nothing to do. `slot` is -1 where the piece is all there is of its rows. The
first key comes as its tile, since Triton then knows that it is a multiple of one.
"""

import triton
import triton.language as tl

PIECE_WORDS: tl.constexpr = tl.constexpr(8)
REQUEST: tl.constexpr = tl.constexpr(0)
FIRST_TOKEN: tl.constexpr = tl.constexpr(1)
ROW_COUNT: tl.constexpr = tl.constexpr(2)
FIRST_ROW: tl.constexpr = tl.constexpr(3)
CACHE_LENGTH: tl.constexpr = tl.constexpr(4)
FIRST_TILE: tl.constexpr = tl.constexpr(5)
END: tl.constexpr = tl.constexpr(6)
SLOT: tl.constexpr = tl.constexpr(7)

CUT_WORDS: tl.constexpr = tl.constexpr(8)
CUT_FIRST_TOKEN: tl.constexpr = tl.constexpr(0)
CUT_ROW_COUNT: tl.constexpr = tl.constexpr(1)
CUT_FIRST_ROW: tl.constexpr = tl.constexpr(2)
CUT_FIRST_SLOT: tl.constexpr = tl.constexpr(3)
CUT_COUNT: tl.constexpr = tl.constexpr(4)  # of slots


@triton.jit
def read_again(piece, WORD: tl.constexpr, value):
    """A word of a program's record where it is needed rarely, so that no register holds it in between; `value` where
    there is no record."""
    if piece is None:
        return value
    else:
        return tl.load(piece + WORD, volatile=True)
