"""Instructions that the DSL has no function for, or none on plain shared addresses: one short wrapper each.

Shared addresses are 32-bit byte addresses (Int32), global ones 64-bit (Int64). Names are PTX's.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

_ptx = cute.arch.inline_ptx


# -- shared memory; `offset` becomes part of the instruction ----------------------------------------------------------


def ldmatrix_x4(address: Any, offset: int = 0) -> Any:
    return _ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def ldmatrix_x4_trans(address: Any, offset: int = 0) -> Any:
    return _ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def stmatrix_trans(address: Any, *registers: Any, offset: int = 0) -> None:
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(registers)))
    _ptx(
        f"stmatrix.sync.aligned.m8n8.x{len(registers)}.trans.shared.b16 [{{$r0}} + {offset}], {{{names}}};",
        read_only_args=[address, *registers],
    )


def load_shared(kind: Any, address: Any, count: int, offset: int = 0) -> Any:
    """1, 2 or 4 neighbouring 32-bit values."""
    suffix = "f32" if kind is Float32 else "b32"
    if count == 1:
        code = f"ld.shared.{suffix} {{$w0}}, [{{$r0}} + {offset}];"
        return (_ptx(code, write_only_types=[kind], read_only_args=[address]),)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return _ptx(
        f"ld.shared.v{count}.{suffix} {{{names}}}, [{{$r0}} + {offset}];",
        write_only_types=[kind] * count,
        read_only_args=[address],
    )


def store_shared(address: Any, *values: Any, offset: int = 0) -> None:
    """1, 2 or 4 neighbouring 32-bit values."""
    suffix = "f32" if isinstance(values[0], Float32) else "b32"
    count = len(values)
    if count == 1:
        _ptx(f"st.shared.{suffix} [{{$r0}} + {offset}], {{$r1}};", read_only_args=[address, *values])
        return
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    _ptx(f"st.shared.v{count}.{suffix} [{{$r0}} + {offset}], {{{names}}};", read_only_args=[address, *values])


def copy_async_or_zero(shared: Any, address: Any, size: Any) -> None:
    """cp.async of 4 bytes, of which `size` (4 or 0) are read and the rest becomes 0."""
    _ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", read_only_args=[shared, address, size])


# -- global memory ---------------------------------------------------------------------------------------------------


def load_global(address: Any, count: int) -> Any:
    """1, 2 or 4 neighbouring 32-bit words, through the read-only path."""
    if count == 1:
        got = _ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
        return (got,)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return _ptx(
        f"ld.global.nc.v{count}.b32 {{{names}}}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[address],
    )


def load_global_or(address: Any, count: int, live: Any, fallback: int = 0, path: str = "nc") -> Any:
    """`load_global` where `live` (a Boolean), else `fallback` without a read.

    `path`: "nc", read-only; "cg", past L1, for what another kernel writes while this one is there.
    """
    moves = " ".join(f"mov.b32 {{$w{i}}}, {fallback};" for i in range(count))
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    target = f"{{{names}}}" if count > 1 else names
    got = _ptx(
        f"{{.reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {moves} @p ld.global.{path}{vector}.b32 {target}, [{{$r0}}];}}",
        write_only_types=[Int32] * count,
        read_only_args=[address, Int32(live)],
    )
    return got if count > 1 else (got,)


def store_global(address: Any, *values: Any) -> None:
    """1 or 2 neighbouring 32-bit values."""
    suffix = "f32" if isinstance(values[0], Float32) else "b32"
    if len(values) == 1:
        _ptx(f"st.global.{suffix} [{{$r0}}], {{$r1}};", read_only_args=[address, *values])
        return
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    _ptx(f"st.global.v{len(values)}.{suffix} [{{$r0}}], {{{names}}};", read_only_args=[address, *values])


def store_global_if(address: Any, value: Any, live: Any) -> None:
    """A float32 where `live` (an Int32)."""
    _ptx(
        "{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.f32 [{$r0}], {$r1};}",
        read_only_args=[address, value, live],
    )


# -- numbers ---------------------------------------------------------------------------------------------------------


def as_int(x: Any) -> Any:
    return _ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def as_float(x: Any) -> Any:
    return _ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def join(low: Any, high: Any) -> Any:
    """An Int64 from its halves."""
    return _ptx("mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high])


def exp2(x: Any) -> Any:
    return _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x: Any) -> Any:
    return _ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def pack_e4m3x4(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four float32 to e4m3 with saturation, `a` in the lowest byte."""
    return _ptx(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high};}",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


def unpack_e4m3x4(x: Any) -> Any:
    """Four e4m3 to two registers of two fp16 each, bytes 0 and 1 first; exact."""
    return _ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high;}",
        write_only_types=[Int32, Int32],
        read_only_args=[x],
    )


def pack_half2(a: Any, b: Any, dtype: str) -> Any:
    """Two float32 to bf16x2 or f16x2, `a` in the low half."""
    kind = "bf16x2" if dtype == "bf16" else "f16x2"
    return _ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[a, b])


def unpack_half2(x: Any, dtype: str) -> Any:
    """bf16x2 or f16x2 to two float32."""
    if dtype == "bf16":
        return as_float(x << 16), as_float(x & -65536)
    return _ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high;}",
        write_only_types=[Float32, Float32],
        read_only_args=[x],
    )


def unpack_e4m3x2(x: Any) -> Any:
    """The low two e4m3 bytes to two float32."""
    return _ptx(
        "{.reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 both, low;"
        " mov.b32 {low, high}, both; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high;}",
        write_only_types=[Float32, Float32],
        read_only_args=[x],
    )
