"""Casts that clamp at the largest finite number of the format instead of overflowing to infinity.

NaN becomes the positive quiet NaN without a payload: conversion instructions differ in the NaN that they give.
"""

import triton
import triton.language as tl


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """x in `dtype` (bf16, fp16 or float32). The same dtype keeps every bit, infinity too."""
    if x.dtype == dtype:
        return x
    if dtype == tl.float16:
        largest: tl.constexpr = 65504.0
    elif dtype == tl.bfloat16:
        largest: tl.constexpr = 3.3895313892515355e38
    else:
        largest: tl.constexpr = 3.4028234663852886e38
    wide = x.to(tl.float32)
    clamped = tl.minimum(tl.maximum(wide, -largest), largest)
    return tl.where(wide == wide, clamped.to(dtype), float("nan"))
