"""A tile of cached rows, as column chunks: fetched as they lie in memory, then widened to what the MMA takes.

The two halves stand apart so that a loop can fetch the next tile before it works on this one and widen it afterwards.
"""
# ruff: noqa: RUF005  Triton knows no starred expressions.

import triton
import triton.language as tl

from pagedmla.triton_kernels.device.fp8 import e4m3_to_float16


@triton.jit
def fetch_columns(plane, offsets, live, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """A tuple of COLUMNS // CHUNK tensors [TILE, CHUNK] in the plane's dtype; 0 for tokens that aren't live.

    offsets  int64 [TILE], element offsets of the tokens' rows. What isn't live isn't read: NaN there would survive a
             weight of 0
    """
    chunks = ()
    for chunk in tl.static_range(COLUMNS // CHUNK):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        chunks = chunks + (tl.load(plane + offsets[:, None] + column[None, :], mask=live[:, None], other=0),)
    return chunks


@triton.jit
def widen_columns(
    chunks,
    COUNT: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    dtype: tl.constexpr,
    BITS: tl.constexpr = False,
):
    """The chunks in `dtype`; e4m3 codes become float16 on the way.

    BITS  the chunks are integers that hold numbers of `dtype`. Triton hands an MMA what it has loaded through shared
          memory, and what is computed, be it a cast that costs nothing, through registers
    """
    wide = ()
    for chunk in tl.static_range(COUNT):
        if FP8:
            wide = wide + (e4m3_to_float16(chunks[chunk], NATIVE_E4M3).to(dtype),)
        elif BITS:
            wide = wide + (chunks[chunk].to(dtype, bitcast=True),)
        else:
            wide = wide + (chunks[chunk].to(dtype),)
    return wide
