"""The corrected interpreter against torch, which rounds by other code, and against small cases done by hand.

The formats are small enough to be proved whole: every code of bf16 and of both FP8 formats is decoded, every midpoint
between neighbouring codes (with the float32 numbers just below and above it) is encoded, in both signs. What saturates,
underflows or is NaN is listed; random numbers fill in the rest. Arithmetic takes all 65,536 codes against shuffled
partners. The other half of the file is about the process: what an interpreted launch leaves behind is nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs triton: pip install pagedmla[triton]")
tl = pytest.importorskip("triton.language")

from triton.runtime import interpreter as stock  # noqa: E402 # triton may be missing
from triton.runtime.jit import JITFunction  # noqa: E402

from pagedmla.triton_kernels import interpreter  # noqa: E402
from pagedmla.triton_kernels.interpreter import interpreted  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
GENERATOR = torch.Generator().manual_seed(0)


@triton.jit
def cast_kernel(src, dst, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(src + at).to(dst.dtype.element_ty))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values -> dtype by a kernel; any length."""
    length = 1 << max(0, (values.numel() - 1).bit_length())
    src, dst = torch.zeros(length, dtype=values.dtype), torch.zeros(length, dtype=dtype)
    src.view(torch.uint8)[: values.numel() * values.itemsize] = values.contiguous().view(torch.uint8)
    interpreted(cast_kernel)[(1,)](src, dst, length)
    return dst[: values.numel()]


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal numbers, NaN in the same places."""
    assert got.dtype == want.dtype
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal codes, the sign of zero included; NaN in the same places."""
    assert_same(got, want)
    numbers = ~want.float().isnan()
    integer = {1: torch.uint8, 2: torch.int16}[got.itemsize]
    assert torch.equal(got.view(integer)[numbers], want.view(integer)[numbers])


def all_codes(dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def neighbourhoods(dtype: torch.dtype) -> Tensor:
    """float32: each finite value of `dtype`, each midpoint of neighbours, and the next float32 either side of both."""
    values = all_codes(dtype).double()
    values = values[values.isfinite()].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    infinity = torch.full_like(points, torch.inf)
    return torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity), -points])


# Conversions


@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_code_is_decoded(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Triton's interpreter reads the NaN codes of e4m3, 0x7F and 0xFF, as 480."""
    assert_same(cast(all_codes(dtype), wide), all_codes(dtype).to(wide))


@triton.jit
def bitcast_kernel(src, dst, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(src + at).to(tl.float8e4nv, bitcast=True).to(tl.float32))


def test_bytes_are_read_as_e4m3() -> None:
    got = torch.zeros(256)
    interpreted(bitcast_kernel)[(1,)](torch.arange(256, dtype=torch.uint8), got, 256)
    assert_same(got, all_codes(E4M3).float())


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_tie_of_fp8_goes_to_even(dtype: torch.dtype, source: torch.dtype) -> None:
    """Triton's interpreter loses the carry (31.7 becomes 16), truncates subnormals and rounds ties up."""
    values = neighbourhoods(dtype) if source is torch.float32 else all_codes(source)
    bound = LARGEST[dtype]
    want = values.float().clamp(-bound, bound).to(dtype)  # clamped: torch saturates by itself only since 2.13
    assert_same_bits(cast(values, dtype), want)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_random_float32_to_fp8(dtype: torch.dtype) -> None:
    exponents = torch.randint(-30, 20, (1 << 18,), generator=GENERATOR)
    values = torch.randn(1 << 18, generator=GENERATOR).ldexp(exponents)
    bound = LARGEST[dtype]
    assert_same_bits(cast(values, dtype), values.clamp(-bound, bound).to(dtype))


def test_fp8_by_hand() -> None:
    cases = [
        (31.7, 32.0),  # the carry runs into the exponent
        (7.9, 8.0),
        (17.0, 16.0),  # between 16 and 18
        (19.0, 20.0),  # between 18 and 20
        (2.0**-9, 2.0**-9),  # the smallest subnormal
        (2.0**-10, 0.0),  # a tie with zero, which is even
        (1.5 * 2.0**-9, 2.0**-8),
        (2.0**-126, 0.0),
        (464.0, 448.0),
        (1e9, 448.0),
        (float("inf"), 448.0),
        (float("-inf"), -448.0),
    ]
    values, want = torch.tensor(cases).unbind(1)
    assert_same(cast(values, E4M3).float(), want)
    codes = cast(torch.tensor([-0.0, -(2.0**-20), float("nan")]), E4M3).view(torch.uint8)
    assert codes.tolist() == [0x80, 0x80, 0x7F]
    assert cast(torch.tensor([float("inf"), -1e30]), E5M2).float().tolist() == [57344.0, -57344.0]
    assert cast(torch.tensor([float("nan")]), E5M2).isnan().all()


def test_every_bf16_code_survives_float32() -> None:
    codes = all_codes(torch.bfloat16)
    wide = cast(codes, torch.float32)
    assert_same(wide, codes.float())
    assert_same_bits(cast(wide, torch.bfloat16), codes)


def test_every_tie_of_bf16_goes_to_even() -> None:
    """Triton's interpreter truncates: half of all numbers come out one step too small."""
    values = neighbourhoods(torch.bfloat16)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 3.39e38, -3.4e38, 1e-45, -1e-45, -0.0])
    quiet = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN that could carry
    values = torch.cat([values, special, quiet, torch.randn(1 << 16, generator=GENERATOR)])
    assert_same_bits(cast(values, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64])
def test_other_types_to_bf16_and_back(source: torch.dtype) -> None:
    values = torch.arange(-128, 128) if source is not torch.uint8 else torch.arange(256)
    values = values.to(source)
    assert_same_bits(cast(values, torch.bfloat16), values.bfloat16())
    assert torch.equal(cast(values.bfloat16(), source), values)


@triton.jit
def truncate_kernel(src, half, brain, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(src + at)
    tl.store(half + at, x.to(tl.float16, fp_downcast_rounding="rtz"))
    tl.store(brain + at, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_rounding_toward_zero_on_request() -> None:
    values = torch.randn(4096, generator=GENERATOR)
    half, brain = torch.zeros(4096, dtype=torch.float16), torch.zeros(4096, dtype=torch.bfloat16)
    interpreted(truncate_kernel)[(1,)](values, half, brain, 4096)
    assert torch.equal(brain.float(), (values.view(torch.int32) & -65536).view(torch.float32))
    up = values.half().float().abs() > values.abs()
    assert torch.equal(half, torch.where(up, values.half().nextafter(torch.zeros(()).half()), values.half()))


# Arithmetic


@triton.jit
def bf16_kernel(x, y, sums, differences, products, quotients, largest, smallest, flags, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(sums + at, a + b)
    tl.store(differences + at, a - b)
    tl.store(products + at, a * b)
    tl.store(quotients + at, a / b)
    tl.store(largest + at, tl.maximum(a, b))
    tl.store(smallest + at, tl.minimum(a, b))
    less = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a > b).to(tl.int32) + 8 * (a >= b).to(tl.int32)
    tl.store(flags + at, less + 16 * (a == b).to(tl.int32) + 32 * (a != b).to(tl.int32))


def test_bf16_arithmetic_on_every_code() -> None:
    """Triton's interpreter adds and compares the bit patterns as integers."""
    x = all_codes(torch.bfloat16)
    y = x[torch.randperm(x.numel(), generator=GENERATOR)]
    near = x * torch.randn(x.numel(), generator=GENERATOR).bfloat16()  # partners of the same size, so that sums cancel
    for b in (y, near, x):
        narrow = [torch.zeros_like(x) for _ in range(3)]
        wide = torch.zeros(x.numel())
        bounds = [torch.zeros_like(x) for _ in range(2)]
        flags = torch.zeros(x.numel(), dtype=torch.int32)
        interpreted(bf16_kernel)[(1,)](x, b, *narrow, wide, *bounds, flags, x.numel())
        # Not torch.fmax: where it is vectorised, a NaN with its sign bit set wins.
        most, least = (
            torch.where(b.isnan(), x, torch.where(x.isnan(), b, f(x, b))) for f in (torch.maximum, torch.minimum)
        )
        expected = [x + b, x - b, x * b, x.float() / b.float(), most, least]
        for got, want in zip([*narrow, wide, *bounds], expected):
            assert_same(got, want)
        bits = [x < b, x <= b, x > b, x >= b, x == b, x != b]
        assert torch.equal(flags, sum((bit.int() << i for i, bit in enumerate(bits)), torch.zeros_like(flags)))


@triton.jit
def bf16_unary_kernel(x, negated, absolute, fused, chosen, filled, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    tl.store(negated + at, -a)
    tl.store(absolute + at, tl.abs(a))
    tl.store(fused + at, tl.fma(a, a, a))
    tl.store(chosen + at, tl.where(a > 1.0, a, 0.5))
    tl.store(filled + at, tl.full([N], 1.00390625, tl.bfloat16))


def test_bf16_unary_and_constants() -> None:
    x = all_codes(torch.bfloat16)
    got = [torch.zeros_like(x) for _ in range(5)]
    interpreted(bf16_unary_kernel)[(1,)](x, *got, x.numel())
    half = torch.tensor(0.5).bfloat16()
    fused = (x.double() * x.double() + x.double()).bfloat16()
    filled = torch.full_like(x, 1.0)  # 1 + 2^-8 is a tie, and 1 is even
    for result, want in zip(got, [-x, x.abs(), fused, torch.where(x > 1, x, half), filled]):
        assert_same(result, want)


@triton.jit
def nan_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    tl.store(out + at, tl.maximum(a, 1.0))
    tl.store(out + N + at, tl.maximum(a, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 2 * N + at, tl.minimum(a, 1.0))
    tl.store(out + 3 * N + at, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 4 * N + at, tl.max(a, 0))
    tl.store(out + 5 * N + at, tl.min(a, 0))


def test_max_and_min_drop_nan_unless_asked() -> None:
    """Up to 3.7 Triton's interpreter let NaN win: an amax over a tile with one NaN was NaN, and on a GPU it isn't."""
    x = torch.tensor([torch.nan, -torch.inf, 2.0, -3.0])
    out = torch.zeros(6, 4)
    interpreted(nan_kernel)[(1,)](x, out, 4)
    nan, inf = torch.nan, torch.inf
    want = [[1, 1, 2, 1], [nan, 1, 2, 1], [1, -inf, 1, -3], [-1, -1, 1, -1], [2] * 4, [-inf] * 4]
    assert_same(out, torch.tensor(want, dtype=torch.float32))


# Matrix products


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    columns = tl.arange(0, N)[None, :]
    inner = tl.arange(0, K)
    x = tl.load(a + rows * K + inner[None, :])
    y = tl.load(b + inner[:, None] * N + columns)
    acc = tl.full([M, N], 1.0, tl.float32)
    tl.store(out + rows * N + columns, tl.dot(x, y, acc))


@pytest.mark.parametrize(
    ("left", "right"),
    [(torch.bfloat16,) * 2, (torch.float16,) * 2, (E4M3,) * 2, (E5M2,) * 2, (E4M3, E5M2), (torch.float32,) * 2],
)
def test_dot_accumulates_exact_products_in_float32(left: torch.dtype, right: torch.dtype) -> None:
    """Triton's interpreter multiplies the bit patterns of bf16: attention came out 10 orders of magnitude too large."""
    M, N, K = 16, 32, 128
    a = torch.randn(M, K, generator=GENERATOR).to(left)
    b = torch.randn(K, N, generator=GENERATOR).to(right)
    out = torch.zeros(M, N)
    interpreted(dot_kernel)[(1,)](a, b, out, M, N, K)
    error = (out - (a.double() @ b.double() + 1)).abs()
    assert (error <= (K + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs() + 1)).all()


def test_dot_of_a_nan_code_is_nan_in_its_row_alone() -> None:
    a, b = torch.ones(16, 32).to(E4M3), torch.ones(32, 16).to(E4M3)
    a.view(torch.uint8)[3, 5] = 0x7F
    out = torch.zeros(16, 16)
    interpreted(dot_kernel)[(1,)](a, b, out, 16, 16, 32)
    assert out[3].isnan().all()
    assert (out[torch.arange(16) != 3] == 33).all()


# Reductions and scans


@triton.jit
def sum_kernel(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(a, 0))
    tl.store(out + 1, tl.sum(a.to(tl.float32), 0).to(tl.bfloat16))
    tl.store(out + tl.arange(0, N) + 2, tl.cumsum(a, 0))


def test_bf16_sums_round_at_each_step() -> None:
    """By hand, in bf16, whose step above 256 is 2: (256 + 1) + (1 + 1) = 256 + 2, where float32 has 259 -> 260."""
    x = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16()
    out = torch.zeros(6).bfloat16()
    interpreted(sum_kernel)[(1,)](x, out, 4)
    assert out[:3].tolist() == [258.0, 260.0, 256.0]
    x = torch.rand(1024, generator=GENERATOR).bfloat16()
    out = torch.zeros(1026).bfloat16()
    interpreted(sum_kernel)[(1,)](x, out, 1024)
    assert abs(out[0].double() - x.double().sum()) <= 10 * 2.0**-8 * x.double().sum()
    assert ((out[2:].double() - x.double().cumsum(0)).abs() <= 10 * 2.0**-8 * x.double().cumsum(0)).all()


@triton.jit
def extremes_kernel(x, out, at, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    a = tl.load(x + rows[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + rows, tl.max(a, 1))
    tl.store(out + M + rows, tl.max(a, 1, keep_dims=True).reshape(M))
    tl.store(out + 2 * M, tl.max(a))
    tl.store(at + rows, tl.argmax(a, 1))
    tl.store(at + M + rows, a.argmin(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, E4M3])
def test_extremes_and_where_they_are(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 8, (4, 16), generator=GENERATOR).to(dtype)  # many ties: the first of equals is named
    wide = torch.int32 if dtype is torch.int32 else torch.float32
    out, at = torch.zeros(9, dtype=wide), torch.zeros(8, dtype=torch.int32)
    interpreted(extremes_kernel)[(1,)](x, out, at, 4, 16)
    x = x.double()
    assert torch.equal(out.double(), torch.cat([x.amax(1), x.amax(1), x.amax().view(1)]))
    assert torch.equal(at, torch.from_numpy(np.concatenate([x.numpy().argmax(1), x.numpy().argmin(1)])).int())


@triton.jit
def follow(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def first(a, b):
    return a


@triton.jit
def recurrence_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(a + at)
    y = tl.load(b + at)
    _, state = tl.associative_scan((x, y), AXIS, follow, reverse=REVERSE)
    tl.store(out + at, state)
    tl.store(out + M * N + tl.arange(0, M), tl.reduce(x, 1, first))
    _, last = tl.reduce((x, y), 1, follow)
    tl.store(out + M * N + M + tl.arange(0, M), last)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_scan_and_reduce_keep_the_order(axis: int, reverse: bool) -> None:
    """h = a h + b isn't commutative: in any other order it comes out differently."""
    a, b = torch.rand(8, 4, generator=GENERATOR), torch.rand(8, 4, generator=GENERATOR)
    out = torch.zeros(32 + 16)
    interpreted(recurrence_kernel)[(1,)](a, b, out, 8, 4, axis, reverse)
    dims = (axis,) if reverse else ()
    x, y = a.flip(dims).unbind(axis), b.flip(dims).unbind(axis)
    states = [y[0]]
    for gain, offset in zip(x[1:], y[1:]):
        states.append(states[-1] * gain + offset)
    torch.testing.assert_close(out[:32].view(8, 4), torch.stack(states, axis).flip(dims))
    assert torch.equal(out[32:40], a[:, 0])
    last = b[:, 0]
    for column in range(1, 4):
        last = last * a[:, column] + b[:, column]
    torch.testing.assert_close(out[40:], last)


# What kernels are written with


@triton.jit
def scale(x, FACTOR: tl.constexpr = 2):
    return x * FACTOR


@triton.jit
def loops_kernel(out, n, stride: tl.int64, bias, flag, LOOPS: tl.constexpr):
    total = tl.zeros([4], tl.float32)
    for i in range(n):
        total += i.to(tl.int64) * stride
    for i in tl.range(1, n, 2, num_stages=2):
        total += i
    for i in tl.static_range(LOOPS):
        total += scale(i, FACTOR=3)
    i = 0
    while i < n:
        i += 1
    total += max(i, 2) + min(n, 2) + bias
    if flag:
        total += total.sum(0)
    if n == 0:
        return
    tl.store(out + tl.arange(0, 4), scale(total))


def test_loops_helpers_and_scalars() -> None:
    """A loop variable is a tensor, as in compiled code: i.to(tl.int64) works. Triton's interpreter has an int."""
    out = torch.zeros(4)
    interpreted(loops_kernel)[(1,)](out, 5, 10, 0.5, True, LOOPS=3, num_warps=8)
    total = 10 * (0 + 1 + 2 + 3 + 4) + (1 + 3) + 3 * (0 + 1 + 2) + max(5, 2) + min(5, 2) + 0.5
    assert out.tolist() == [2 * 5 * total] * 4
    interpreted(loops_kernel)[(1,)](out.zero_(), 0, 10, 0.5, False, 3)
    assert out.tolist() == [0.0] * 4


@triton.jit
def logic_kernel(out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, at, mask=(at > 1 and at < n) or not at < 6)


def test_and_or_not_are_elementwise() -> None:
    """Python's `and` asks a block for its truth and takes the second operand: ties of tl.argmax came out wrong."""
    out = torch.full((8,), -1, dtype=torch.int32)
    interpreted(logic_kernel)[(1,)](out, 4, 8)
    assert out.tolist() == [-1, -1, 2, 3, -1, -1, 6, 7]


@triton.jit
def chain_kernel(out, n):
    tl.store(out, 1, mask=0 < n < 4)


def test_a_chain_of_comparisons_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"0 < n < 4: Triton before 3\.9"):
        interpreted(chain_kernel)[(1,)](torch.zeros(1), 2)


@triton.jit
def table_kernel(table, values, out, counter, W: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1)
    page = tl.load(table + row * W + column).to(tl.int64)
    tl.store(out + row * W + column, tl.load(values + page))
    tl.atomic_add(counter, 1)
    tl.atomic_max(counter + 1, row * tl.num_programs(1) + column)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
def test_tables_grids_and_atomics(dtype: torch.dtype) -> None:
    table = torch.tensor([[3, 0], [1, 2], [2, 2]], dtype=torch.int32).view(dtype)
    values = torch.tensor([10.0, 11.0, 12.0, 13.0])
    out, counter = torch.zeros(3, 2), torch.zeros(2, dtype=torch.int32)
    interpreted(table_kernel)[lambda meta: (3, meta["W"])](table, values, out, counter, W=2)
    assert out.tolist() == [[13, 10], [11, 12], [12, 12]]
    assert counter.tolist() == [6, 5]


@triton.jit
def descriptor_kernel(src, dst, rows, BLOCK: tl.constexpr, N: tl.constexpr):
    read = tl.make_tensor_descriptor(src, [rows, N], [N, 1], [BLOCK, N])
    write = tl.make_tensor_descriptor(dst, [rows, N], [N, 1], [BLOCK, N])
    for i in range(tl.cdiv(rows, BLOCK)):
        write.store([i * BLOCK, 0], read.load([i * BLOCK, 0]).T.trans())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_tensor_descriptors(dtype: torch.dtype) -> None:
    src = torch.randn(40, 32, generator=GENERATOR).to(dtype)
    dst = torch.zeros_like(src)
    interpreted(descriptor_kernel)[(1,)](src, dst, 40, 16, 32)  # the last block is cut off at row 40
    assert torch.equal(dst.view(torch.uint8), src.view(torch.uint8))


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def heuristic_kernel(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, at, mask=at < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 4})], key=["n"])
@triton.jit
def tuned_kernel(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, at, mask=at < n)


def test_heuristics_are_evaluated() -> None:
    out = torch.full((8,), -1, dtype=torch.int32)
    interpreted(heuristic_kernel)[(1,)](out, 5)
    assert out.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_a_kernel_can_be_nested_in_a_function() -> None:
    factor = 3

    @triton.jit
    def local_kernel(out):
        tl.store(out, scale(factor + 0.0))

    out = torch.zeros(1)
    interpreted(local_kernel)[(1,)](out)
    assert out.item() == 6


# Refusals


def test_an_autotuned_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"tuned_kernel is autotuned.*pass its \.fn"):
        interpreted(tuned_kernel)
    out = torch.full((4,), -1, dtype=torch.int32)
    interpreted(tuned_kernel.fn)[(1,)](out, 3, BLOCK=4)
    assert out.tolist() == [0, 1, 2, -1]


def test_an_unproved_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with pytest.raises(RuntimeError, match=r"3\.6\.0, 3\.7\.0, 3\.7\.1, 3\.8\.0, 3\.9\.0, not on 3\.10\.0"):
        interpreted(cast_kernel)
    monkeypatch.setattr(triton, "__version__", "3.7.1+git0123abc")  # a build of a proved release
    interpreted(cast_kernel)


def test_what_is_no_kernel_or_no_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a @triton\.jit function, got function"):
        interpreted(cast)
    with pytest.raises(TypeError, match="BLOKC"):
        interpreted(cast_kernel)[(1,)](torch.zeros(4), torch.zeros(4), 4, BLOKC=3)
    with pytest.raises(ValueError, match="dst: expected a CPU tensor, got one on meta"):
        interpreted(cast_kernel)[(1,)](torch.zeros(4), torch.zeros(4, device="meta"), 4)


def test_unproved_formats_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="fp8e4b8"):
        cast(torch.zeros(4), torch.float8_e4m3fnuz)


@triton.jit
def overflow_kernel(out, n):
    tl.store(out, n * 65536)


@triton.jit
def past_the_end_kernel(src, dst, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(src + at, mask=at < n, other=0.0))


@triton.jit
def asserting_kernel(n):
    tl.device_assert(n < 4, "n is too large")


def test_debug_finds_overflow_wild_addresses_and_failed_asserts() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    interpreted(overflow_kernel)[(1,)](out, 65537)
    assert out.item() == 65536
    with pytest.raises(OverflowError, match="int32 overflow in mul"):
        interpreted(overflow_kernel, debug=True)[(1,)](out, 65537)

    src, dst = torch.ones(6), torch.zeros(8)
    interpreted(past_the_end_kernel, debug=True)[(1,)](src, dst, 6, 8)
    assert dst.tolist() == [1.0] * 6 + [0.0] * 2
    with pytest.raises(
        IndexError, match=r"load outside every argument: 2 of 8 addresses.* storage of src, which has 24"
    ):
        interpreted(past_the_end_kernel, debug=True)[(1,)](src, torch.zeros(8), 8, 8)
    with pytest.raises(IndexError, match=r"store outside every argument: 4 of 8 addresses"):
        interpreted(past_the_end_kernel, debug=True)[(1,)](src, torch.zeros(4), 6, 8)

    interpreted(asserting_kernel)[(1,)](4)
    with pytest.raises(AssertionError, match="n is too large"):
        interpreted(asserting_kernel, debug=True)[(1,)](4)


# The process afterwards


TOUCHED = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.tensor,
    tl.block_type,
    tl.dtype,
    tl.core.range,
    tl.core.static_range,
    tl.core.tensor_descriptor_base,
    tl.tensor_descriptor,
    JITFunction,
    stock,
    stock.InterpreterBuilder,
    stock.InterpretedFunction,
)
# Taken while modules are collected, before any test has launched a kernel.
PRISTINE = [dict(vars(place)) for place in TOUCHED]


@pytest.fixture
def untouched() -> Iterator[None]:
    """Every attribute of Triton's language and interpreter is what Triton made it; this module has no new names."""
    names, errors = set(globals()), np.geterr()
    yield
    for place, attributes in zip(TOUCHED, PRISTINE):
        assert vars(place).keys() == attributes.keys(), place
        changed = [name for name, value in vars(place).items() if value is not attributes[name]]
        assert not changed, f"{place}: {changed}"
    assert set(globals()) == names
    assert np.geterr() == errors


@pytest.fixture
def compiled_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(cast_kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET is set, so that Triton made no function to compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@triton.jit
def compiled_kernel(src, dst, n, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for i in tl.range(n, num_stages=2):
        total += tl.sum(tl.load(src + i * N + at), 0)
    for i in tl.static_range(2):
        total += i
    tl.store(dst + at, total.max(0).to(tl.bfloat16))


def compile_for_hopper() -> str:
    """PTX of compiled_kernel, which uses what an interpreted launch replaces."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"src": "*fp32", "dst": "*bf16", "n": "i32", "N": "constexpr"}
    source = ASTSource(fn=compiled_kernel, signature=signature, constexprs={(3,): 64})
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


@pytest.mark.usefixtures("untouched", "compiled_only")
def test_a_launch_leaves_the_process_as_it_was() -> None:
    interpreted(loops_kernel)[(1,)](torch.zeros(4), 5, 10, 0.5, True, LOOPS=3)
    assert isinstance(loops_kernel, JITFunction)
    assert isinstance(scale, JITFunction)
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        scale(1)
    with pytest.raises(ValueError, match=r"Did you forget to add @triton\.jit"):
        tl.arange(0, 4)
    assert "bf16" in compile_for_hopper()


@triton.jit
def failing_kernel(hook: tl.constexpr):
    hook(tl.program_id(0))


@pytest.mark.usefixtures("untouched")
def test_a_launch_that_fails_leaves_the_process_as_it_was() -> None:
    def fail(program: Any) -> None:
        if program == 2:
            raise KeyError("third")

    with pytest.raises(KeyError, match="third") as failure:
        interpreted(failing_kernel)[(4,)](fail)
    if sys.version_info >= (3, 11):
        assert "program (2, 0, 0) of grid (4, 1, 1)" in failure.value.__notes__[0]
    assert cast(torch.ones(1), torch.bfloat16).item() == 1


@pytest.mark.usefixtures("untouched")
def test_a_launch_inside_a_launch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="can't launch another"):
        interpreted(failing_kernel)[(1,)](lambda _: cast(torch.ones(1), torch.bfloat16))


@pytest.mark.usefixtures("untouched", "compiled_only")
def test_a_compiler_in_another_thread_sees_the_real_language() -> None:
    """While a kernel is interpreted, another thread compiles one: each gets its own meaning of tl.sum and tl.range."""
    compiled: list[str] = []

    def compile_elsewhere(_: Any) -> None:
        thread = threading.Thread(target=lambda: compiled.append(compile_for_hopper()))
        thread.start()
        thread.join()

    interpreted(failing_kernel)[(1,)](compile_elsewhere)
    assert "bf16" in compiled[0]


@pytest.mark.usefixtures("untouched")
def test_threads_take_turns() -> None:
    results: dict[int, Tensor] = {}

    def work(seed: int) -> None:
        values = torch.full((256,), 1.0 + seed)
        for _ in range(5):
            results[seed] = cast(values, torch.bfloat16)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[seed] == 1.0 + seed).all() for seed in range(4))


def test_a_global_that_changes_is_seen() -> None:
    """The interpreted function shares its module's globals, so what a test replaces there is what runs."""
    out = torch.zeros(1)
    interpreted(patched_kernel)[(1,)](out)
    assert out.item() == 5
    globals()["OFFSET"] = tl.constexpr(7)
    try:
        interpreted(patched_kernel)[(1,)](out)
    finally:
        globals()["OFFSET"] = tl.constexpr(5)
    assert out.item() == 7


OFFSET = tl.constexpr(5)


@triton.jit
def patched_kernel(out):
    tl.store(out, OFFSET + 0.0)


UNDER_TRITON_INTERPRET = """
import torch, triton, triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

@triton.jit
def kernel(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, N), tl.sum(tl.dot(a, a), 1))

def stock_result():
    out = torch.zeros(16)
    kernel[(1,)](x, out, 16)
    return out

x = torch.eye(16).bfloat16() * 2
assert isinstance(kernel, InterpretedFunction)
before = stock_result()  # leaves triton.language.core patched behind itself
assert not torch.equal(before, torch.full((16,), 4.0)), "the stock interpreter is right about bf16: nothing to correct"

from pagedmla.triton_kernels.interpreter import interpreted
for _ in range(2):
    out = torch.zeros(16)
    interpreted(kernel)[(1,)](x, out, 16)
    assert torch.equal(out, torch.full((16,), 4.0)), out
    assert torch.equal(stock_result(), before), "the stock interpreter changed"
"""


def test_kernels_of_the_stock_interpreter_run_too(tmp_path: Path) -> None:
    """Under TRITON_INTERPRET=1 kernels aren't JITFunctions, and the stock interpreter leaves its patches behind."""
    script = tmp_path / "stock.py"
    script.write_text(UNDER_TRITON_INTERPRET)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_proof_covers_this_triton() -> None:
    assert triton.__version__.split("+")[0] in interpreter.PROVED_VERSIONS
