"""Numbers, and the bit patterns that stand for them in a handle of the interpreter."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class _Float8(NamedTuple):
    """An FP8 format: sign, exponent with `bias`, `mantissa` bits. Codes above the `largest` value are special."""

    mantissa: int
    bias: int
    largest: float
    infinite: bool  # the first code above `largest` is infinity, not NaN

    def values(self) -> Array:
        """The float32 value of each of the 256 codes."""
        codes = np.arange(256, dtype=np.int64)
        exponent = (codes & 0x7F) >> self.mantissa
        fraction = (codes & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        subnormal = np.ldexp(fraction, 1 - self.bias)
        magnitude = np.where(exponent == 0, subnormal, np.ldexp(1 + fraction, exponent - self.bias))
        special = np.where(self.infinite & (fraction == 0), np.inf, np.nan)
        magnitude = np.where(magnitude > self.largest, special, magnitude)
        return np.where(codes < 0x80, magnitude, -magnitude).astype(np.float32)

    def encode(self, values: Array) -> Array:
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
CODED = frozenset({"bf16"}) | _FLOAT8.keys() | _UNPROVED_FLOAT8


def decode(handle: stock.TensorHandle) -> Array:
    """The numbers that a handle stands for: float32 for bf16 and FP8, the data itself for the rest."""
    name, data = handle.dtype.scalar.name, cast(Array, handle.data)
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if name in _FLOAT8:
        return _FLOAT8_VALUES[name][data]
    _refuse_unproved(name)
    return data


def encode(values: Array, dtype: tl.dtype, toward_zero: bool = False) -> stock.TensorHandle:
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
