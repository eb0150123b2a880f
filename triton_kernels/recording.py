"""What a host function would launch, without launching it, and the types that Triton's JIT would compile that for.

A host function is called with meta tensors, which have shapes, strides and dtypes and no memory. So what is built ahead
of time is what runs later: nobody keeps a second list of arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedmla.hardware.targets import Target, assumed_target
from pagedmla.triton_kernels import launch as launching

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, eq=False)
class Recorded:
    """One launch: the kernel, its grid, and its arguments by position and by keyword (constants and options)."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Specialisation:
    """What Triton compiles a launch for: argument types, compile-time values, arguments divisible by 16, options."""

    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    options: dict[str, Any]


def record(call: Callable[[], object], target: Target) -> list[Recorded]:
    """The launches that `call` would make on that target. Its tensors should be meta tensors."""
    recorded: list[Recorded] = []
    with assumed_target(target), launching.intercepted(lambda *launched: recorded.append(Recorded(*launched))):
        call()
    return recorded


def specialise(launched: Recorded) -> Specialisation:
    """Types as Triton's JIT derives them: None and the integer 1 are constants, multiples of 16 are marked; neither is
    asked of arguments that the kernel names in `do_not_specialize`."""
    names = launched.kernel.arg_names
    values = {**dict(zip(names, launched.args)), **launched.kwargs}
    options = {name: value for name, value in values.items() if name not in names}
    constexprs = {parameter.name for parameter in launched.kernel.params if parameter.is_constexpr}
    general = {parameter.name for parameter in launched.kernel.params if parameter.do_not_specialize}
    signature, constants, divisible = {}, {}, []
    for name in names:
        value = values[name]
        if name in constexprs or value is None or (type(value) is int and value == 1 and name not in general):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            divisible += [name] if value.storage_offset() * value.element_size() % 16 == 0 else []
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible += [name] if value % 16 == 0 else []
    return Specialisation(signature, constants, tuple(name for name in divisible if name not in general), options)
