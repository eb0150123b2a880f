"""e4m3 codes to float16 and float32 to e4m3 codes, exactly as a GPU that has the instructions does.

    code   s eeee mmm   bias 7; no infinity; 0x7F and 0xFF are NaN; 448 = 0x7E is the largest; 2^-9 the smallest

Every finite e4m3 value is a float16 value, so nothing is rounded on the way out, and a 16-bit conversion costs half an
instruction an element where bfloat16 costs two or three. The scale stays outside: it multiplies scores and
probabilities, never elements. On the way in, hardware may lack the instruction, round twice (by way of float16), or
saturate in its own way; integers do it there.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_float16(codes, NATIVE: tl.constexpr):
    """uint8 codes of any shape to float16. NaN codes (0x7F, 0xFF) give NaN.

    NATIVE  the target has an e4m3 type (sm_89 and later); without one the exponent and mantissa are shifted into
            place, which leaves the value 2^-8 too small because the exponent biases differ by 8
    """
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = codes.to(tl.uint16)
        magnitude = bits & 0x7F
        shifted = ((bits & 0x80) << 8) | (magnitude << 7)
        shifted = tl.where(magnitude == 0x7F, 0x7E00, shifted).to(tl.uint16)
        return shifted.to(tl.float16, bitcast=True) * 256.0


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
