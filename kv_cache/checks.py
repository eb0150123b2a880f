"""How errors are worded, and whether device values may be read for a check.

Every refusal names the tensor, what was expected, what came, and what to pass instead:

    kv_scales: expected [*, 1, 61, 64, 1, 1] float32; got [128, 1, 61, 64, 1, 5] float32. Use layout "fp8_flat" ...
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.uint32)


class Refusal(ValueError):
    """Arguments that don't fit, told in this package's one form: what is raised so is no bug of ours."""


class TypeRefusal(Refusal, TypeError):
    """An argument that isn't of its kind."""


class IndexRefusal(Refusal, IndexError):
    """A number beyond what it counts."""


class DroppedStoreWarning(UserWarning):
    """A store named a page outside its pool. Nothing was written for it; with checks on it is an IndexError."""


def checks_enabled(check: bool | None = None) -> bool:
    """Whether values (ids, scales, bytes) are checked too: `check` if given, else PAGEDMLA_CHECK=1."""
    if check is not None:
        return expect_bool(check, "check")
    setting = os.environ.get("PAGEDMLA_CHECK", "")
    if setting not in ("", "0", "1"):
        refuse("PAGEDMLA_CHECK", "0 or 1", quoted(setting))
    return setting == "1"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """`[2, 24] uint32` for a tensor, `None` for nothing, else the type's name."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {dtype_name(value.dtype)}"
    return "None" if value is None else type(value).__name__


_REFUSALS: dict[type[Exception], type[Exception]] = {
    ValueError: Refusal,
    TypeError: TypeRefusal,
    IndexError: IndexRefusal,
}


def refuse(name: str, expected: str, got: object, hint: str = "", error: type[Exception] = Refusal) -> NoReturn:
    """Raise `error` in the one form that every refusal of this package has; a plain one as the refusal of its kind."""
    shown = got if isinstance(got, str) else describe(got) if isinstance(got, Tensor) or got is None else repr(got)
    raise _REFUSALS.get(error, error)(f"{name}: expected {expected}; got {shown}." + (f" {hint}" if hint else ""))


def expect_tensor(
    value: object, name: str, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], hint: str = ""
) -> Tensor:
    """`value` if it is a tensor of that shape (None: any size) and one of those dtypes; else a refusal."""
    if isinstance(value, Tensor):
        fits = value.dim() == len(shape) and all(size in (None, actual) for size, actual in zip(shape, value.shape))
        if fits and (not dtypes or value.dtype in dtypes):
            return value
    wanted = f"[{', '.join('*' if size is None else str(size) for size in shape)}]"
    wanted += f" {' or '.join(dtype_name(dtype) for dtype in dtypes)}" if dtypes else ""
    if isinstance(value, Tensor):
        refuse(name, wanted, value, hint)
    refuse(name, f"a tensor {wanted}", describe(value), hint, TypeRefusal)


def expect_same_device(anchor: Tensor, anchor_name: str, **others: Tensor | None) -> None:
    """Refuse the first of `others` that lies elsewhere than `anchor`; None lies anywhere."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != anchor.device:
            refuse(name, f"a tensor on {anchor.device}, as {anchor_name}", f"one on {tensor.device}")


def expect_memory(tensor: Tensor, name: str) -> None:
    """Refuse a tensor of the meta device, which has a shape and no numbers: torch's own words for it name no tensor."""
    if tensor.is_meta:
        refuse(name, "a tensor on cpu or cuda", f"{describe(tensor)} on meta, which holds no numbers")


def host_int(value: Tensor | int, name: str, minimum: int = 0) -> int:
    """A Python int from an int or a one-element host tensor. A device tensor is refused: reading it would sync."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype.is_floating_point or value.dtype == torch.bool:
            refuse(name, "one integer", value)
        if value.device.type != "cpu":
            refuse(name, "an int or a tensor on the host", f"one on {value.device}", "Keep this field on the CPU.")
        value = int(value.item())
    value = expect_int(value, name, "one integer")
    if value < minimum:
        refuse(name, f"at least {minimum}", value)
    return value


def expect_int(value: object, name: str, expected: str = "an int") -> int:
    """A Python int from any integer, numpy's too; no bool, and no tensor, which may lie on a device."""
    if type(value) is int:  # dynamo's symbolic ints pass this test and have no `__index__`
        return value
    if not isinstance(value, (bool, Tensor)) and hasattr(value, "__index__"):
        return operator.index(value)
    refuse(name, expected, quoted(value), error=TypeError)


def expect_bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        refuse(name, "True or False", quoted(value), error=TypeError)
    return value


def quoted(value: object) -> object:
    """For `refuse`, which takes a plain string for words of ours."""
    return repr(value) if isinstance(value, str) else value


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)
