"""Operations: what an instruction of the compiled kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from pagedmla.triton_kernels.interpreter.formats import CODED, decode, encode
from pagedmla.triton_kernels.interpreter.memory import Memory


class CorrectedBuilder(stock.InterpreterBuilder):  # type: ignore[misc] # Triton has no type information
    """Triton's interpreting builder with the arithmetic of bf16 and FP8 corrected. `memory` is set while debugging."""

    memory: Memory | None = None

    # Conversions. Each create_*_to_*, create_fp_ext, create_fp_trunc and create_int_cast of the base ends in cast_impl.

    def cast_impl(self, src: stock.TensorHandle, dst_type: tl.dtype) -> stock.TensorHandle:
        return encode(decode(src), dst_type.scalar)

    def create_fp_to_fp(self, src: stock.TensorHandle, dst_type: tl.dtype, rounding: Any) -> stock.TensorHandle:
        return encode(decode(src), dst_type.scalar, toward_zero=rounding == stock._ir.ROUNDING_MODE.RTZ)

    def get_bf16(self, value: float) -> stock.TensorHandle:
        return encode(np.array([value]), tl.bfloat16)

    # Elementwise arithmetic. create_fadd, create_fcmpOLT, create_exp, ... of the base end in these.

    def binary_op(self, lhs: stock.TensorHandle, rhs: stock.TensorHandle, op: Callable[..., Any]) -> stock.TensorHandle:
        dtype = lhs.dtype.scalar
        if dtype.name in CODED:
            output = op(decode(lhs), decode(rhs))
            return stock.TensorHandle(output, tl.int1) if output.dtype == np.bool_ else encode(output, dtype)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: stock.TensorHandle, op: Callable[..., Any]) -> stock.TensorHandle:
        dtype = arg.dtype.scalar
        return encode(op(decode(arg)), dtype) if dtype.name in CODED else super().unary_op(arg, op)

    def create_fma(self, x: stock.TensorHandle, y: stock.TensorHandle, z: stock.TensorHandle) -> stock.TensorHandle:
        if z.dtype.scalar.name not in CODED:
            return super().create_fma(x, y, z)
        product = np.multiply(decode(x), decode(y), dtype=np.float64)  # exact
        return encode(product + decode(z), z.dtype.scalar)

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
        lhs, rhs = decode(a), decode(b)
        if lhs.dtype.kind != "f":
            return super().create_dot(a, b, d, precision, imprecise)
        accumulator = np.promote_types(np.promote_types(lhs.dtype, rhs.dtype), np.float32)
        product = np.matmul(lhs.astype(accumulator), rhs.astype(accumulator))
        return encode(product + decode(d), d.dtype.scalar)

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
        if val.dtype.scalar.name in CODED:
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
