"""Reductions and scans: `tl.reduce` and `tl.associative_scan`, a block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from pagedmla.triton_kernels.interpreter.formats import CODED, Array
from pagedmla.triton_kernels.interpreter.syntax import unwrap


def _tensor(data: Array, dtype: tl.dtype) -> tl.tensor:
    if data.ndim == 0:  # the interpreter's scalars are arrays of one element
        return tl.tensor(stock.TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(stock.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def reduce(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any
) -> tl.tensor | tuple[tl.tensor, ...]:
    """`tl.reduce`: joins neighbours with `combine_fn` until one is left, a block at a time, or asks numpy."""
    inputs = input if isinstance(input, tuple) else (input,)
    axis, keep_dims = unwrap(axis), unwrap(keep_dims)
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


def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> tl.tensor | tuple[tl.tensor, ...]:
    """`tl.associative_scan`: log2(n) steps of `combine_fn` on the whole block, or numpy's running sum."""
    inputs = input if isinstance(input, tuple) else (input,)
    dtypes = [tensor.dtype for tensor in inputs]
    axis, reverse = unwrap(axis) % inputs[0].handle.data.ndim, unwrap(reverse)
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
    if len(dtypes) != 1 or dtypes[0].name in CODED:
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
