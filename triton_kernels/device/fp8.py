"""e4m3 codes to float16, exactly.

Every finite e4m3 value is a float16 value, so nothing is rounded, and a 16-bit conversion costs half an instruction
an element where bfloat16 costs two or three. The scale stays outside: it multiplies scores and probabilities, never
elements.
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
