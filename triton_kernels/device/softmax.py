"""Online softmax whose weights carry the scales of the values.

Two running maxima a row, both in log2 units: `peak` of the scores, which the sum is relative to, and `weight_peak` of the scores
plus log2(sigma), which the weights handed to the value MMA are relative to. A weight p * sigma is therefore at most 2^HEADROOM
whatever the size of sigma, and keeps a 16-bit format's full precision down to 2^-(14 + HEADROOM) of the row's largest.
"""

import triton
import triton.language as tl


@triton.jit
def _larger_pair(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def finite_or_zero(peak):
    """A maximum to subtract: 0 for a row that has seen no key, so that -inf - -inf doesn't arise."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def advance_peaks(scores, weighted, peak, weight_peak):
    """Running maxima [ROWS] after a tile of scores and weighted scores [TILE, ROWS]; one reduction for both."""
    tile_peak, tile_weight_peak = tl.reduce((scores, weighted), 0, _larger_pair)
    return tl.maximum(peak, tile_peak), tl.maximum(weight_peak, tile_weight_peak)


@triton.jit
def decay(before, after):
    """What sums relative to maximum `before` are multiplied by to be relative to `after`."""
    return tl.exp2(before - finite_or_zero(after))
