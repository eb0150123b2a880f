"""A launch: arguments as a kernel sees them, and its programs one after the other."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction, KernelParam

from pagedmla.triton_kernels.interpreter.builder import BUILDER
from pagedmla.triton_kernels.interpreter.formats import encode
from pagedmla.triton_kernels.interpreter.memory import Memory
from pagedmla.triton_kernels.interpreter.patches import running
from pagedmla.triton_kernels.interpreter.syntax import rewritten, unwrap

# tests/triton_kernels/test_interpreter.py passes on each of these.
PROVED_VERSIONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")

# Keywords of a launch that steer the compiler and not the kernel.
LAUNCH_OPTIONS = frozenset(
    "num_warps num_stages num_ctas maxnreg enable_fp_fusion launch_cooperative_grid launch_pdl "
    "waves_per_eu matrix_instr_nonkdim kpack".split()
)


def interpreted(kernel: Any, *, debug: bool = False) -> Interpreted:
    """What `kernel` is to be launched through on CPU tensors: `interpreted(kernel)[grid](*args, **kwargs)`.

    `kernel` is a `@triton.jit` function, or `@triton.heuristics` around one. `debug=True` does what Triton's debug mode
    does on a GPU (`tl.device_assert` is evaluated, an integer narrower than 64 bits that overflows is an OverflowError)
    and raises IndexError, before it happens, for an access outside the storage of every tensor argument.

    Raises RuntimeError for a Triton release outside PROVED_VERSIONS and TypeError for anything but a kernel. What a
    program raises comes through as it is, with the program's index in a note.
    """
    if triton.__version__.split("+")[0] not in PROVED_VERSIONS:
        raise RuntimeError(
            f"the corrected interpreter is proved on Triton {', '.join(PROVED_VERSIONS)}, not on {triton.__version__}: "
            "install one of these to run Triton kernels on the CPU"
        )
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while isinstance(kernel, triton.runtime.Heuristics):
        heuristics = {**kernel.values, **heuristics}
        kernel = kernel.fn
    if isinstance(kernel, triton.runtime.Autotuner):
        raise TypeError(
            f"{kernel.base_fn.__name__} is autotuned, and there is nothing to time on the CPU: pass its .fn, with the "
            "values of one configuration as keywords"
        )
    if not isinstance(kernel, (JITFunction, stock.InterpretedFunction)):
        raise TypeError(f"expected a @triton.jit function, got {type(kernel).__name__}")
    return Interpreted(kernel.fn, heuristics, debug)


class Interpreted:
    """A kernel with the launch syntax of a JITFunction, running on CPU tensors. Made by `interpreted`."""

    def __init__(self, fn: types.FunctionType, heuristics: dict[str, Callable[..., Any]], debug: bool) -> None:
        self.fn = fn
        self.heuristics = heuristics
        self.debug = debug

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def __repr__(self) -> str:
        return f"interpreted({self.fn.__module__}.{self.fn.__qualname__})"

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        signature, params = _signature(self.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in params or name not in LAUNCH_OPTIONS}
        for name, heuristic in self.heuristics.items():
            kwargs[name] = heuristic({**dict(zip(params, args)), **kwargs})
        bound = signature.bind(*args, **kwargs)  # TypeError names a keyword that the kernel doesn't know
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        sizes = tuple(operator.index(size) for size in (sizes if isinstance(sizes, Sequence) else (sizes,)))
        sizes += (1,) * (3 - len(sizes))
        memory = Memory(bound.arguments)

        fn = rewritten(self.fn)
        with running(self.debug, memory):
            values = {
                name: unwrap(value) if params[name].is_constexpr else _argument(value, params[name].annotation_type)
                for name, value in bound.arguments.items()
            }
            BUILDER.set_grid_dim(*sizes)
            # The first axis varies fastest, as on a GPU; programs run one after the other.
            for z, y, x in itertools.product(*map(range, reversed(sizes))):
                BUILDER.set_grid_idx(x, y, z)
                try:
                    fn(**values)
                except Exception as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"in program ({x}, {y}, {z}) of grid {sizes} of {self!r}")
                    raise


@functools.cache
def _signature(fn: types.FunctionType) -> tuple[inspect.Signature, dict[str, KernelParam]]:
    signature = inspect.signature(fn)
    params = {
        name: KernelParam(index, param, False, False)
        for index, (name, param) in enumerate(signature.parameters.items())
    }
    return signature, params


def _argument(value: Any, annotation: str = "") -> Any:
    """A launch argument as the kernel sees it: typed by its annotation, else as the JIT types it."""
    if isinstance(value, (bool, int, float)):
        if annotation:
            dtype = tl.str_to_ty(annotation, None)
        elif isinstance(value, float):
            dtype = tl.float32
        elif isinstance(value, bool):
            dtype = tl.int1
        else:
            dtype = tl.int32 if -(2**31) <= value < 2**31 else tl.int64 if value < 2**63 else tl.uint64
        return tl.tensor(encode(np.array([value]), dtype), dtype)
    if isinstance(value, tuple):
        items = [_argument(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return stock._implicit_cvt(value)  # pointers, host-side descriptors, None
