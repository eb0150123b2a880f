"""Online softmax whose weights carry the scales of the values, all in log2 units.

One running maximum a row, of score + log2(sigma). Relative to it a weight p * sigma is at most 1 whatever the size of
sigma, so that a 16-bit weight never underflows because sigma is small, and p itself stays within float32 for sigma
from 2^-100 to 2^119, the range that the cache's writers keep: a key's own p is at most 1 / sigma, and the largest is
at least 2^-119.
"""

import triton
import triton.language as tl


@triton.jit
def advance_peak(scores, peak):
    """The running maximum [ROWS] after a tile of (weighted) scores [TILE, ROWS]."""
    return tl.maximum(peak, tl.max(scores, 0))


@triton.jit
def finite_or_zero(peak):
    """A maximum to subtract: 0 for a row that has seen no key, so that -inf - -inf doesn't arise."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def decay(before, after):
    """What sums relative to maximum `before` are multiplied by to be relative to `after`."""
    return tl.exp2(before - finite_or_zero(after))
