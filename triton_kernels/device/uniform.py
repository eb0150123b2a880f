"""Telling the assembler that a value is the same in all lanes of a warp.

Loop bounds and offsets that come out of memory are uniform by construction, but ptxas can't know, and a loop whose
trip count may differ between lanes can't keep its MMA descriptors in uniform registers: they spill instead
(docs/kernels/decode_triton.md). A warp-wide integer reduction is one REDUX, whose result is uniform by definition.
"""

import triton
import triton.language as tl


@triton.jit
def make_uniform(value):
    """The same int32 scalar, known to be uniform."""
    return tl.max(tl.full([32], value, tl.int32), 0)
