"""The process: triton.language while a kernel runs."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from pagedmla.triton_kernels.interpreter.builder import BUILDER, SEMANTIC
from pagedmla.triton_kernels.interpreter.formats import decode
from pagedmla.triton_kernels.interpreter.memory import Memory
from pagedmla.triton_kernels.interpreter.reductions import reduce, scan
from pagedmla.triton_kernels.interpreter.syntax import loop, rewritten, unwrap

_LOCK = threading.Lock()
_owner: int | None = None  # the thread that interprets
_ABSENT = object()


@contextlib.contextmanager
def running(debug: bool, memory: Memory) -> Iterator[None]:
    """One interpreted launch: takes the lock, patches triton.language, and undoes both."""
    global _owner
    if _owner == threading.get_ident():
        raise RuntimeError("a kernel that is being interpreted can't launch another")
    with _LOCK, np.errstate(all="ignore"):  # a GPU doesn't warn of inf and NaN
        replaced: list[tuple[Any, str, Any]] = []
        try:
            _owner = threading.get_ident()
            BUILDER.options = stock.InterpreterOptions(debug=debug, sanitize_overflow=debug)
            BUILDER.memory = memory if debug else None
            for target, name, replacement in _patches():
                replaced.append((target, name, vars(target).get(name, _ABSENT)))
                setattr(target, name, replacement)
            yield
        finally:
            for target, name, original in reversed(replaced):
                if original is _ABSENT:
                    delattr(target, name)
                else:
                    setattr(target, name, original)
            BUILDER.memory = None
            _owner = None


@functools.cache
def _patches() -> list[tuple[Any, str, Any]]:
    """(module or class, attribute, replacement): what kernels call in triton.language, made callable from Python.

    A replacement interprets in the thread that runs a kernel, and in every other does what it replaces.
    """
    found: list[tuple[Any, str, Any]] = []
    tensor = tl.tensor
    for target in (tl, tl.core, tl.math, tensor, tl.core.tensor_descriptor_base, tl.core.tensor_descriptor):
        for name, member in vars(target).items():
            member = _unpatched(member)
            if target is tensor and isinstance(member, JITFunction):
                found.append((target, name, _BoundJIT(member)))
            elif tl.core.is_builtin(member):
                found.append((target, name, _with_semantic(member)))
    for target in (tl, tl.core):
        found += [
            (target, "reduce", _instead(reduce, tl.reduce)),
            (target, "associative_scan", _instead(scan, tl.associative_scan)),
            (target, "static_assert", _instead(_static_assert, tl.static_assert)),
            (target, "static_print", _instead(print, tl.static_print)),
            *(
                (target, hint, _instead(_keep, getattr(tl, hint)))
                for hint in ("multiple_of", "max_contiguous", "max_constancy")
            ),
        ]
    found += [
        (tensor, "reduce", _instead(reduce, tl.reduce)),
        (tensor, "associative_scan", _instead(scan, tl.associative_scan)),
        (tensor, "__init__", _here(_init_tensor(tensor.__init__), tensor.__init__)),
        (tl.block_type, "__init__", _here(_init_block_type(tl.block_type.__init__), tl.block_type.__init__)),
        (tensor, "__index__", _here(_index, _no_index)),
        (tensor, "__bool__", _here(_truth, lambda self: True)),
        (tensor, "__repr__", _here(_text, tensor.__repr__)),
        (tensor, "__str__", _here(_text, tensor.__str__)),
        (tensor, "T", property(_here(_transposed, tensor.T.fget))),
        (tl.range, "__iter__", _here(lambda self: loop(self.start, self.end, self.step), tl.range.__iter__)),
        (tl.static_range, "__init__", _here(_static_bounds, tl.static_range.__init__)),
        (tl.static_range, "__iter__", _here(lambda self: iter(self.values), tl.static_range.__iter__)),
        (tl.dtype, "to_ir", _here(lambda self, builder: self, tl.dtype.to_ir)),
        (JITFunction, "__call__", _here(_call, JITFunction.__call__)),
        (stock.InterpretedFunction, "__call__", _here(_call, stock.InterpretedFunction.__call__)),
    ]
    return found


def _unpatched(member: Any) -> Any:
    """The original of a builtin: the stock interpreter leaves its own patches behind after a nested call."""
    while isinstance(member, types.FunctionType) and member.__module__ == stock.__name__ and member.__kwdefaults__:
        member = member.__kwdefaults__["member"]
    return member


def _here(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`replacement` in the thread that interprets, `original` in every other."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == _owner else original)(*args, **kwargs)

    return method


def _with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin that takes our semantic where a kernel calls it: only a compiler passes one itself."""

    @functools.wraps(member)
    def builtin(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None and threading.get_ident() == _owner:
            _semantic = SEMANTIC
        return member(*args, _semantic=_semantic, **kwargs)

    return builtin


def _instead(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin that can't run without a compiler's code generator, and what stands for it in a kernel."""

    @functools.wraps(original)
    def builtin(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is SEMANTIC or (_semantic is None and threading.get_ident() == _owner):
            return replacement(*args, **kwargs)
        return original(*args, _semantic=_semantic, **kwargs)

    return builtin


class _BoundJIT:
    """A jit function as a method of tensors (`x.sum(0)`): the class keeps the function, an instance binds it."""

    def __init__(self, function: JITFunction) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or threading.get_ident() != _owner:
            return self.function
        return functools.partial(self.function, instance)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return rewritten(function.fn)(*args, **kwargs)


def _init_block_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Building a block's type and shape is most of what an operation costs: done once a type, then copied."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    return init


def _init_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: stock.TensorHandle, type: tl.dtype) -> None:
        if type.name not in known:
            original(self, handle, type)
            known[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        self.__dict__.update(known[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _index(tensor: tl.tensor) -> int:
    return int(tensor.handle.data.item())  # int(array) refuses an array of one element since numpy 2.4


def _no_index(tensor: tl.tensor) -> int:
    raise TypeError("'tensor' object cannot be interpreted as an integer")


def _truth(tensor: tl.tensor) -> bool:
    # Triton's own code asks blocks for their truth and means "not None".
    return bool(tensor.handle.data.item()) if tensor.handle.data.size == 1 else True


def _text(tensor: tl.tensor) -> str:
    return str(decode(tensor.handle))


def _transposed(tensor: tl.tensor) -> tl.tensor:
    rank = len(tensor.shape)
    return SEMANTIC.permute(tensor, (*range(rank - 2), rank - 1, rank - 2))


def _static_bounds(self: Any, arg1: Any, arg2: Any = None, step: Any = None) -> None:
    bounds = (0, arg1) if arg2 is None else (arg1, arg2)
    start, stop = map(operator.index, bounds)
    self.values = range(start, stop, 1 if step is None else operator.index(step))


def _static_assert(condition: Any, message: Any = "") -> None:
    assert condition, unwrap(message)


def _keep(tensor: tl.tensor, *_: Any) -> tl.tensor:
    return tensor
