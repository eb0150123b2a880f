"""Scales as pools hold them (float32, float16, or e8m0 as its byte) to float32 and back, and how one is measured.

The rules are those of `pagedmla.kv_cache.quantise`, bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def measure_sigma(amax, FLOOR: tl.constexpr, CEILING: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """float32 sigma that maps `amax` onto 448, the largest e4m3, kept in [FLOOR, CEILING]."""
    sigma = tl.minimum(tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)), FLOOR), CEILING)
    if POWER_OF_TWO:
        bits = sigma.to(tl.int32, bitcast=True)
        sigma = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return sigma


@triton.jit
def pack_sigma(sigma, E8M0: tl.constexpr, dtype: tl.constexpr):
    """float32 sigma in the pool's dtype; for e8m0 sigma must be a power of two."""
    if E8M0:
        return (sigma.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    return sigma.to(dtype)


@triton.jit
def unpack_sigma(packed, E8M0: tl.constexpr):
    """float32 of a scale as the pool holds it. e8m0: 2^(byte - 127), 255 is NaN."""
    if E8M0:
        exponent = packed.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return packed.to(tl.float32)
