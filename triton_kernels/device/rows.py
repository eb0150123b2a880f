"""Query rows: a request's query tokens times its heads, folded token-major into the rows of a tile.

Row r of a request is head r % heads of query token r // heads, so that all rows of a tile share the keys of one
request and each key is read once a tile.
"""

import triton
import triton.language as tl

# Rows are scaled to the largest power of two that leaves float16 headroom: 2^13 <= max |q| < 2^14.
_TARGET_EXPONENT: tl.constexpr = tl.constexpr(13)


@triton.jit
def fold_row(first, row_count, heads, ROWS: tl.constexpr):
    """`(token, head, valid)` of rows `first .. first + ROWS` of a request that has `row_count` rows: [ROWS] each."""
    row = first + tl.arange(0, ROWS)
    return row // heads, row % heads, row < row_count


@triton.jit
def load_columns(q, offsets, valid, first, COLUMNS: tl.constexpr):
    """Columns `first .. first + COLUMNS` of the rows, transposed: [COLUMNS, ROWS]; 0 where a row doesn't exist."""
    column = first + tl.arange(0, COLUMNS)
    return tl.load(q + offsets[None, :] + column[:, None], mask=valid[None, :], other=0.0)


@triton.jit
def row_exponent(amax):
    """The shift s [ROWS], as int32, by which rows of largest magnitude `amax` are multiplied as 2^s."""
    exponent = (amax.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF
    return 127 - tl.minimum(tl.maximum(exponent - _TARGET_EXPONENT, 1), 253 - _TARGET_EXPONENT)


@triton.jit
def power_of_two(exponent):
    """float32 2^exponent for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
