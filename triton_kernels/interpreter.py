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
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import operator
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction, KernelParam

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

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
        memory = _Memory(bound.arguments)

        fn = _rewritten(self.fn)
        with _running(self.debug, memory):
            values = {
                name: _unwrap(value) if params[name].is_constexpr else _argument(value, params[name].annotation_type)
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


# Formats: numbers and the bit patterns that stand for them


class _Float8(NamedTuple):
    """An FP8 format: sign, exponent with `bias`, `mantissa` bits. Codes above the `largest` value are special."""

    mantissa: int
    bias: int
    largest: float
    infinite: bool  # the first code above `largest` is infinity, not NaN

    def values(self) -> _Array:
        """The float32 value of each of the 256 codes."""
        codes = np.arange(256, dtype=np.int64)
        exponent = (codes & 0x7F) >> self.mantissa
        fraction = (codes & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        subnormal = np.ldexp(fraction, 1 - self.bias)
        magnitude = np.where(exponent == 0, subnormal, np.ldexp(1 + fraction, exponent - self.bias))
        special = np.where(self.infinite & (fraction == 0), np.inf, np.nan)
        magnitude = np.where(magnitude > self.largest, special, magnitude)
        return np.where(codes < 0x80, magnitude, -magnitude).astype(np.float32)

    def encode(self, values: _Array) -> _Array:
        """float32 to codes (uint8): nearest even, saturating, NaN to 0x7F."""
        magnitude = np.minimum(np.abs(values), np.float32(self.largest))  # NaN stays NaN
        bits = magnitude.view(np.uint32)
        shift = 23 - self.mantissa
        # Adding half a unit less one, and one more for an odd code, carries into the code exactly when RNE rounds up.
        normal = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
        normal = normal - ((127 - self.bias) << self.mantissa)
        subnormal = np.rint(magnitude * np.float32(2.0 ** (self.bias - 1 + self.mantissa)))
        codes = np.where(magnitude < np.float32(2.0 ** (1 - self.bias)), subnormal, normal).astype(np.uint8)
        sign = (values.view(np.uint32) >> 24).astype(np.uint8) & 0x80
        return np.where(np.isnan(values), np.uint8(0x7F), codes | sign)


_FLOAT8 = {
    "fp8e4nv": _Float8(mantissa=3, bias=7, largest=448.0, infinite=False),
    "fp8e5": _Float8(mantissa=2, bias=15, largest=57344.0, infinite=True),
}
_FLOAT8_VALUES = {name: fmt.values() for name, fmt in _FLOAT8.items()}
_UNPROVED_FLOAT8 = frozenset({"fp8e4b8", "fp8e4b15", "fp8e5b16"})
# Types that numpy lacks: a handle of one holds bit patterns.
_CODED = frozenset({"bf16"}) | _FLOAT8.keys() | _UNPROVED_FLOAT8


def _decode(handle: stock.TensorHandle) -> _Array:
    """The numbers that a handle stands for: float32 for bf16 and FP8, the data itself for the rest."""
    name, data = handle.dtype.scalar.name, cast(_Array, handle.data)
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if name in _FLOAT8:
        return _FLOAT8_VALUES[name][data]
    _refuse_unproved(name)
    return data


def _encode(values: _Array, dtype: tl.dtype, toward_zero: bool = False) -> stock.TensorHandle:
    """Numbers to a handle of type `dtype`, rounded to nearest even, or toward zero (bf16 and fp16 only)."""
    name = dtype.name
    if name == "bf16":
        values = values.astype(np.float32)
        bits = values.view(np.uint32)
        rounded = bits if toward_zero else bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding could carry a NaN into infinity, and truncation could clear it to one: a quiet bit prevents both.
        data = (np.where(np.isnan(values), bits | 0x400000, rounded) >> 16).astype(np.uint16)
    elif name in _FLOAT8:
        if toward_zero:
            raise NotImplementedError(f"fp_downcast_rounding='rtz' to {name}: only nearest even is proved")
        data = _FLOAT8[name].encode(values.astype(np.float32))
    else:
        _refuse_unproved(name)
        data = values.astype(_numpy_dtype(dtype))
        if toward_zero and name == "fp16":
            data = np.where(np.abs(data) > np.abs(values), np.nextafter(data, np.float16(0)), data)
    return stock.TensorHandle(data, dtype)


def _refuse_unproved(name: str) -> None:
    if name in _UNPROVED_FLOAT8:
        raise NotImplementedError(f"arithmetic on {name} isn't corrected: only {' and '.join(_FLOAT8)} are proved")


@functools.cache
def _numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    return cast("np.dtype[Any]", stock._get_np_dtype(dtype))


# Operations: what an instruction of the compiled kernel does


class CorrectedBuilder(stock.InterpreterBuilder):  # type: ignore[misc] # Triton has no type information
    """Triton's interpreting builder with the arithmetic of bf16 and FP8 corrected. `memory` is set while debugging."""

    memory: _Memory | None = None

    # Conversions. Each create_*_to_*, create_fp_ext, create_fp_trunc and create_int_cast of the base ends in cast_impl.

    def cast_impl(self, src: stock.TensorHandle, dst_type: tl.dtype) -> stock.TensorHandle:
        return _encode(_decode(src), dst_type.scalar)

    def create_fp_to_fp(self, src: stock.TensorHandle, dst_type: tl.dtype, rounding: Any) -> stock.TensorHandle:
        return _encode(_decode(src), dst_type.scalar, toward_zero=rounding == stock._ir.ROUNDING_MODE.RTZ)

    def get_bf16(self, value: float) -> stock.TensorHandle:
        return _encode(np.array([value]), tl.bfloat16)

    # Elementwise arithmetic. create_fadd, create_fcmpOLT, create_exp, ... of the base end in these.

    def binary_op(self, lhs: stock.TensorHandle, rhs: stock.TensorHandle, op: Callable[..., Any]) -> stock.TensorHandle:
        dtype = lhs.dtype.scalar
        if dtype.name in _CODED:
            output = op(_decode(lhs), _decode(rhs))
            return stock.TensorHandle(output, tl.int1) if output.dtype == np.bool_ else _encode(output, dtype)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: stock.TensorHandle, op: Callable[..., Any]) -> stock.TensorHandle:
        dtype = arg.dtype.scalar
        return _encode(op(_decode(arg)), dtype) if dtype.name in _CODED else super().unary_op(arg, op)

    def create_fma(self, x: stock.TensorHandle, y: stock.TensorHandle, z: stock.TensorHandle) -> stock.TensorHandle:
        if z.dtype.scalar.name not in _CODED:
            return super().create_fma(x, y, z)
        product = np.multiply(_decode(x), _decode(y), dtype=np.float64)  # exact
        return _encode(product + _decode(z), z.dtype.scalar)

    # maxnum and minnum of IEEE 754 drop a NaN; releases before 3.8 kept it.

    def create_maxnumf(self, lhs: stock.TensorHandle, rhs: stock.TensorHandle) -> stock.TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: stock.TensorHandle, rhs: stock.TensorHandle) -> stock.TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(
        self, arg: stock.TensorHandle, low: stock.TensorHandle, high: stock.TensorHandle, propagate_nan: Any
    ) -> stock.TensorHandle:
        keep = propagate_nan != stock._ir.PROPAGATE_NAN.NONE
        raised = self.binary_op(arg, low, np.maximum if keep else np.fmax)
        return self.binary_op(raised, high, np.minimum if keep else np.fmin)

    # Matrix products.

    def create_dot(
        self, a: stock.TensorHandle, b: stock.TensorHandle, d: stock.TensorHandle, precision: Any, imprecise: Any
    ) -> stock.TensorHandle:
        lhs, rhs = _decode(a), _decode(b)
        if lhs.dtype.kind != "f":
            return super().create_dot(a, b, d, precision, imprecise)
        accumulator = np.promote_types(np.promote_types(lhs.dtype, rhs.dtype), np.float32)
        product = np.matmul(lhs.astype(accumulator), rhs.astype(accumulator))
        return _encode(product + _decode(d), d.dtype.scalar)

    def create_dot_scaled(self, *_: Any) -> stock.TensorHandle:
        raise NotImplementedError("tl.dot_scaled isn't proved in the interpreter: scale the operands or the product")

    def create_splat(self, ret_type: tl.dtype, arg: stock.TensorHandle) -> stock.TensorHandle:
        return stock.TensorHandle(np.full(ret_type.shape, arg.data.flat[0], arg.data.dtype), arg.dtype.scalar)

    # Memory. The loads, stores and descriptors of the base end in these.

    def create_masked_load(self, ptrs: stock.TensorHandle, mask: Any, *rest: Any, **kwargs: Any) -> stock.TensorHandle:
        if self.memory is not None:
            self.memory.check("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, *rest, **kwargs)

    def create_masked_store(self, ptrs: stock.TensorHandle, value: stock.TensorHandle, mask: Any, *rest: Any) -> None:
        if self.memory is not None:
            self.memory.check("store", ptrs, mask)
        super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(
        self, op: Any, ptr: stock.TensorHandle, val: stock.TensorHandle, mask: Any, *rest: Any
    ) -> stock.TensorHandle:
        if val.dtype.scalar.name in _CODED:
            raise NotImplementedError(f"atomic arithmetic on {val.dtype.scalar} isn't proved: use float32")
        if self.memory is not None:
            self.memory.check("atomic", ptr, mask)
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: stock.TensorHandle, *rest: Any) -> stock.TensorHandle:
        if self.memory is not None:
            self.memory.check("atomic", ptr, np.True_)
        return super().create_atomic_cas(ptr, *rest)


class CheckedSemantic(TritonSemantic):  # type: ignore[misc] # Triton has no type information
    """Triton's semantic, with the overflow check of its debug mode done in a few numpy operations."""

    def binary_op_sanitize_overflow_impl(self, lhs: tl.tensor, rhs: tl.tensor, binary_op: Callable[..., Any]) -> None:
        dtype = lhs.dtype
        if not self.builder.options.sanitize_overflow or not 1 < dtype.int_bitwidth < 64:
            return
        exact = _EXACT[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        if np.any((exact < dtype.get_int_min_value()) | (exact > dtype.get_int_max_value())):
            raise OverflowError(f"{dtype} overflow in {binary_op.__name__}")


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

BUILDER = CorrectedBuilder()
SEMANTIC = CheckedSemantic(BUILDER)


def _tensor(data: _Array, dtype: tl.dtype) -> tl.tensor:
    if data.ndim == 0:  # the interpreter's scalars are arrays of one element
        return tl.tensor(stock.TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(stock.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _reduce(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any
) -> tl.tensor | tuple[tl.tensor, ...]:
    """`tl.reduce`: joins neighbours with `combine_fn` until one is left, a block at a time, or asks numpy."""
    inputs = input if isinstance(input, tuple) else (input,)
    axis, keep_dims = _unwrap(axis), _unwrap(keep_dims)
    arrays = [tensor.handle.data for tensor in inputs]
    dtypes = [tensor.dtype for tensor in inputs]
    rank = arrays[0].ndim
    if axis is None:
        arrays, axis = [array.reshape(-1) for array in arrays], 0
        kept: tuple[int, ...] = tuple(range(rank))
    else:
        axis %= rank
        kept = (axis,)

    ufunc = _reduction_ufunc(combine_fn, dtypes)
    if ufunc is not None:
        arrays = [ufunc.reduce(arrays[0], axis=axis, dtype=arrays[0].dtype)]
    else:
        even, odd = (slice(None),) * axis + (slice(0, None, 2),), (slice(None),) * axis + (slice(1, None, 2),)
        while arrays[0].shape[axis] > 1:
            operands = [_tensor(array[half], ty) for half in (even, odd) for array, ty in zip(arrays, dtypes)]
            arrays = [tensor.handle.data for tensor in _as_tuple(combine_fn(*operands))]
        arrays = [array.squeeze(axis) for array in arrays]
    if keep_dims:
        arrays = [np.expand_dims(array, kept) for array in arrays]
    results = tuple(_tensor(array, ty) for array, ty in zip(arrays, dtypes))
    return results if isinstance(input, tuple) else results[0]


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> tl.tensor | tuple[tl.tensor, ...]:
    """`tl.associative_scan`: log2(n) steps of `combine_fn` on the whole block, or numpy's running sum."""
    inputs = input if isinstance(input, tuple) else (input,)
    dtypes = [tensor.dtype for tensor in inputs]
    axis, reverse = _unwrap(axis) % inputs[0].handle.data.ndim, _unwrap(reverse)
    arrays = [np.flip(tensor.handle.data, axis) if reverse else tensor.handle.data for tensor in inputs]
    ufunc = _reduction_ufunc(combine_fn, dtypes)
    if ufunc is not None:
        arrays = [ufunc.accumulate(arrays[0], axis=axis, dtype=arrays[0].dtype)]
    else:
        length = arrays[0].shape[axis]
        position = np.arange(length).reshape(-1, *(1,) * (arrays[0].ndim - 1 - axis))
        step = 1
        while step < length:
            earlier = [_tensor(np.roll(array, step, axis), ty) for array, ty in zip(arrays, dtypes)]
            current = [_tensor(array, ty) for array, ty in zip(arrays, dtypes)]
            combined = _as_tuple(combine_fn(*earlier, *current))
            arrays = [np.where(position < step, array, new.handle.data) for array, new in zip(arrays, combined)]
            step *= 2
    results = tuple(_tensor(np.flip(array, axis) if reverse else array, ty) for array, ty in zip(arrays, dtypes))
    return results if isinstance(input, tuple) else results[0]


def _reduction_ufunc(combine_fn: Any, dtypes: list[tl.dtype]) -> np.ufunc | None:
    """numpy's form of the combine functions of tl.sum, tl.max and tl.min, where it means the same."""
    if len(dtypes) != 1 or dtypes[0].name in _CODED:
        return None
    if combine_fn is tl.standard._sum_combine:
        return np.add
    if combine_fn is tl.standard._elementwise_max:
        return np.fmax  # maxnum: NaN loses
    if combine_fn is tl.standard._elementwise_min:
        return np.fmin
    return None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, tl.tuple)) else (value,)


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


# Arguments and the memory behind them


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
        return tl.tensor(_encode(np.array([value]), dtype), dtype)
    if isinstance(value, tuple):
        items = [_argument(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return stock._implicit_cvt(value)  # pointers, host-side descriptors, None


class _Memory:
    """The storages that a launch may touch: the half-open address ranges of its tensor arguments, by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ranges: list[tuple[int, int, str]] = []
        for name, value in arguments.items():
            self._add(name, value)
        self.ranges.sort()

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                self._add(f"{name}[{index}]", item)
        elif isinstance(value, (stock.TensorDescriptor, triton.runtime.jit.TensorWrapper)):
            self._add(name, value.base)
        elif hasattr(value, "data_ptr"):
            if value.device.type != "cpu":
                raise ValueError(f"{name}: expected a CPU tensor, got one on {value.device}: launch the kernel itself")
            storage = value.untyped_storage()
            self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))

    def check(self, access: str, ptrs: stock.TensorHandle, mask: Any) -> None:
        """Raises IndexError for the first enabled address outside every range."""
        enabled = np.broadcast_to(mask.data if isinstance(mask, stock.TensorHandle) else mask, ptrs.data.shape)
        addresses = ptrs.data[enabled].astype(np.uint64)
        item_bytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end, _ in self.ranges:
            if end - start >= item_bytes:
                inside |= (addresses >= np.uint64(start)) & (addresses <= np.uint64(end - item_bytes))
        if inside.all():
            return
        address = int(addresses[~inside][0])
        start, end, name = min(self.ranges, key=lambda r: max(r[0] - address, address - r[1]), default=(0, 0, "null"))
        raise IndexError(
            f"{access} outside every argument: {int((~inside).sum())} of {inside.size} addresses, the first at byte "
            f"{address - start} of the storage of {name}, which has {end - start}"
        )


# Functions: Python's syntax with the meaning that it has in a kernel


@functools.cache
def _rewritten(fn: types.FunctionType) -> types.FunctionType:
    """The function that runs in place of `fn`: assignments make tensors, loop variables and min/max are Triton's.

    It shares the globals and the closure of `fn`. What the rewriting needs comes in further closure cells, so that the
    module of `fn` stays as it is.
    """
    lines, start = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    bound = {**_REWRITER_NAMES, **{name: value for name, value in _BUILTINS.items() if name not in fn.__globals__}}
    cells = {name: types.CellType(value) for name, value in bound.items()}
    cells.update(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
    enclosing = ast.parse(f"def enclosing({', '.join(cells)}): pass")
    assert isinstance(enclosing.body[0], ast.FunctionDef)
    enclosing.body[0].body = [_Rewriter().visit(definition)]
    ast.increment_lineno(ast.fix_missing_locations(enclosing), start - 1)
    code = compile(enclosing, fn.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("enclosing", fn.__name__):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    closure = tuple(cells[name] for name in code.co_freevars)
    twin = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


class _Rewriter(ast.NodeTransformer):
    """Assignments of numbers make tensors; `and`, `or` and `not` of tensors are elementwise."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _call_to("_to_tensor", node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        self.generic_visit(node)
        thunks = [ast.Lambda(args=_NO_ARGUMENTS, body=value) for value in node.values]
        return _call_to("_both" if isinstance(node.op, ast.And) else "_either", *thunks)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call_to("_negation", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        if len(node.ops) > 1:
            raise NotImplementedError(
                f"{ast.unparse(node)}: Triton before 3.9 compiles no chain, join comparisons with &"
            )
        self.generic_visit(node)
        return node


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _call_to(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])


def _to_tensor(value: Any) -> Any:
    """What an assignment stores: a Python number becomes a tensor, as in compiled code."""
    return SEMANTIC.to_tensor(value, check_type=False)


def _both(left: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`and`: of tensors elementwise, with every operand evaluated; of Python values as in Python."""
    value = left()
    for operand in rest:
        if isinstance(value, tl.tensor):
            value = value.logical_and(operand())
        elif value:
            value = operand()
    return value


def _either(left: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    value = left()
    for operand in rest:
        if isinstance(value, tl.tensor):
            value = value.logical_or(operand())
        elif not value:
            value = operand()
    return value


def _negation(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _loop(*bounds: Any) -> Iterator[tl.tensor]:
    """`range` in a kernel: the loop variable is an integer tensor of the bounds' type, as in compiled code."""
    tensors = [SEMANTIC.to_tensor(bound) for bound in bounds]
    dtype = functools.reduce(SEMANTIC.integer_promote_impl, [tensor.dtype for tensor in tensors])
    for value in range(*map(operator.index, tensors)):
        yield SEMANTIC.scalar_constant(value, dtype)


def _least(*args: Any) -> Any:
    return functools.reduce(tl.minimum, args) if any(isinstance(a, tl.tensor) for a in args) else min(*args)


def _greatest(*args: Any) -> Any:
    return functools.reduce(tl.maximum, args) if any(isinstance(a, tl.tensor) for a in args) else max(*args)


# What the output of _Rewriter calls.
_REWRITER_NAMES = {"_to_tensor": _to_tensor, "_both": _both, "_either": _either, "_negation": _negation}
# Names of Python that mean something else in a kernel.
_BUILTINS = {"range": _loop, "min": _least, "max": _greatest}


# The process: triton.language while a kernel runs

_LOCK = threading.Lock()
_owner: int | None = None  # the thread that interprets
_ABSENT = object()


@contextlib.contextmanager
def _running(debug: bool, memory: _Memory) -> Iterator[None]:
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
            (target, "reduce", _instead(_reduce, tl.reduce)),
            (target, "associative_scan", _instead(_scan, tl.associative_scan)),
            (target, "static_assert", _instead(_static_assert, tl.static_assert)),
            (target, "static_print", _instead(print, tl.static_print)),
            *(
                (target, hint, _instead(_keep, getattr(tl, hint)))
                for hint in ("multiple_of", "max_contiguous", "max_constancy")
            ),
        ]
    found += [
        (tensor, "reduce", _instead(_reduce, tl.reduce)),
        (tensor, "associative_scan", _instead(_scan, tl.associative_scan)),
        (tensor, "__init__", _here(_init_tensor(tensor.__init__), tensor.__init__)),
        (tl.block_type, "__init__", _here(_init_block_type(tl.block_type.__init__), tl.block_type.__init__)),
        (tensor, "__index__", _here(_index, _no_index)),
        (tensor, "__bool__", _here(_truth, lambda self: True)),
        (tensor, "__repr__", _here(_text, tensor.__repr__)),
        (tensor, "__str__", _here(_text, tensor.__str__)),
        (tensor, "T", property(_here(_transposed, tensor.T.fget))),
        (tl.range, "__iter__", _here(lambda self: _loop(self.start, self.end, self.step), tl.range.__iter__)),
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
    return _rewritten(function.fn)(*args, **kwargs)


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
    return str(_decode(tensor.handle))


def _transposed(tensor: tl.tensor) -> tl.tensor:
    rank = len(tensor.shape)
    return SEMANTIC.permute(tensor, (*range(rank - 2), rank - 1, rank - 2))


def _static_bounds(self: Any, arg1: Any, arg2: Any = None, step: Any = None) -> None:
    bounds = (0, arg1) if arg2 is None else (arg1, arg2)
    start, stop = map(operator.index, bounds)
    self.values = range(start, stop, 1 if step is None else operator.index(step))


def _static_assert(condition: Any, message: Any = "") -> None:
    assert condition, _unwrap(message)


def _keep(tensor: tl.tensor, *_: Any) -> tl.tensor:
    return tensor
