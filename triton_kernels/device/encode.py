"""float32 to e4m3 in integer and float32 arithmetic alone: the same bits on every target, also where the type doesn't exist
(sm_80) or where the hardware's conversion goes through float16 and rounds twice (sm_89).

    code   s eeee mmm   bias 7; no infinity; 0x7F and 0xFF are NaN; 448 = 0x7E is the largest; 2^-9 the smallest
"""

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """uint8 codes of float32 x: to nearest, ties to even, saturating at +-448 (infinity too), every NaN 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    magnitude_bits = magnitude.to(tl.int32, bitcast=True)
    # From 2^-6 up: drop 20 of 23 mantissa bits, half of the last kept bit's value added first, its parity breaking ties;
    # a carry moves into the exponent, as it should. Then the bias goes from 127 to 7.
    normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the codes are multiples of 2^-9, which is what float32 resolves at 2^14: the addition rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)
