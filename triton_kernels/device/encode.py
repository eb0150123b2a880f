"""float32 to e4m3, the same bits on every target.

By one instruction where the target has one that rounds once; else in integer and float32 arithmetic, since there is no
type on sm_80, sm_89's conversion goes through float16 and so rounds twice, and others saturate in their own way.

    code   s eeee mmm   bias 7; no infinity; 0x7F and 0xFF are NaN; 448 = 0x7E is the largest; 2^-9 the smallest
"""

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x, ROUNDS_E4M3: tl.constexpr):
    """uint8 codes of float32 x: to nearest, ties to even, saturating at +-448 (infinity too), every NaN 0x7F."""
    if ROUNDS_E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_by_integers(x)


@triton.jit
def _encode_by_integers(x):
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # From 2^-6 up: 20 of 23 mantissa bits go, after half of the last kept bit was added, its parity breaking ties; a
    # carry moves into the exponent, as it should. The bias goes from 127 to 7 in the same addition.
    normal = (bits + ((bits >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    # Below 2^-6 the codes are multiples of 2^-9, which is what float32 resolves at 2^14: the addition rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)
