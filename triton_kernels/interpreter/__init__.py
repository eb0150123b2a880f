"""Interpreter: runs `@triton.jit` functions on CPU tensors, with the arithmetic that a GPU would use.

contract   interpreted(kernel)[grid](*args, **kwargs) does on CPU tensors what kernel[grid](...) does on a GPU
meaning    Triton's own interpreter (triton.runtime.interpreter), with bfloat16 and FP8 arithmetic, conversions, the NaN
           handling of max and min, and loop variables corrected
needs      no environment variable; kernels may be JITFunctions or, under TRITON_INTERPRET=1, InterpretedFunctions
leaves     Triton as it was: a kernel stays a JITFunction, triton.runtime.interpreter isn't changed, and what is
           replaced in triton.language while a kernel runs still serves a compiler in another thread
limits     one launch at a time in a process, and none while another thread is in Triton's own interpreter; refuses a
           Triton release that it wasn't proved on

Numbers. A bfloat16 or FP8 tensor is an array of bit patterns, as in Triton's interpreter. An operation on it decodes to
float32, computes, and rounds once to nearest even, as an instruction of that type does: float32 holds more than twice
the significand bits, so that sums, products and quotients aren't rounded twice. Conversions to FP8 saturate as
`cvt.rn.satfinite` does (infinity becomes the largest finite value), and NaN stays NaN. `tl.dot` multiplies exactly and
accumulates in float32; the narrower accumulator of Hopper's FP8 tensor cores isn't modelled, nor is TF32.

`launch`      arguments, the grid, and what is refused
`syntax`      a kernel's source rewritten: assignments, `and`, loops
`builder`     operations, with Triton's semantic on top; `reductions` the two that take a function
`formats`     numbers and their bit patterns
`memory`      which addresses a launch may touch
`patches`     triton.language while a kernel runs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedmla.triton_kernels.interpreter.launch import LAUNCH_OPTIONS, PROVED_VERSIONS, Interpreted, interpreted

__all__ = ["LAUNCH_OPTIONS", "PROVED_VERSIONS", "Interpreted", "interpreted"]


def __getattr__(name: str) -> Any:
    """What is public here, once it is asked for: to import the package loads no Triton."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pagedmla.triton_kernels.interpreter import launch

    return getattr(launch, name)
