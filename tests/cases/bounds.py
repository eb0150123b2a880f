"""Every tolerance of these tests, derived in one place.

How far a dequantised number may lie from the number that was stored. e4m3 has 3 bits after the leading one and a
smallest step of 2^-9. Rounding moves a number by half a step at most: half of 2^-3 relative to the power of two below
it, half of 2^-9 where codes are subnormal.

    |y - x| <= 2^-4 |x| + 2^-10 sigma          for |x| <= 448 sigma

The midpoint that is worst relative to its number stands at 17/16 of a power of two, where half a step is 0.0588 |x|;
the rest up to 2^-4 = 0.0625 covers the float32 roundings of sigma, of 1 / sigma and of their product with x, 2^-22 in
all.

sigma = max(amax / 448, 2^-100) reaches amax but for its rounding; a scale dtype that rounds further (float16) leaves
numbers above 448 sigma, which clamp to it. bf16 has 7 bits after the leading one: half a step is 2^-8 of the number.

How far attention in float32 may lie from float64. A logit is a dot product of 576 terms of order sm_scale; float32
loses about 2^-24 sqrt(576) of its largest partial sum (below 2^5 here): 5e-5 at worst, typically 1e-6. A weight loses
as much relatively, an output, which is a convex combination of values, no more than that of the largest; lse as much
absolutely: FLOAT32 for both.

How far a kernel may lie from float64 on the values as the cache holds them. Scales and e4m3 codes are exact in float16,
so an lse owes only float32 sums: LSE_ABSOLUTE + LSE_RELATIVE |lse|. An output row owes the rounding of its weights to
the MMA's type, 2^-12 for float16 and 2^-9 for bfloat16, and its own: OUT_RELATIVE of its L2 norm.

Which rows are empty (out 0, lse -inf) and which elements are NaN or infinite must match exactly everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32 = 2e-5
LSE_ABSOLUTE, LSE_RELATIVE = 1e-5, 1e-6
OUT_RELATIVE = 4e-3


def e4m3_bound(x: Tensor, sigma: Tensor) -> Tensor:
    """Largest |dequantised - x| in float64, for x and the sigma of its group (broadcast)."""
    x, sigma = x.double(), sigma.double()
    beyond = (x.abs() - 448 * sigma).clamp(min=0)
    return 2.0**-4 * x.abs() + 2.0**-10 * sigma + beyond


def bf16_bound(x: Tensor) -> Tensor:
    """The same for a bf16 number in the format's normal range."""
    return x.double().abs() * 2.0**-8


def assert_kernel_agrees(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], out_bound: float = OUT_RELATIVE
) -> None:
    """Kernel results (out `[T, H, D]`, lse `[T, H]`) against float64."""
    (out, lse), (want_out, want_lse) = ([each.double() for each in state] for state in (got, want))
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert bool((out[want_lse == -torch.inf] == 0).all())
    for mine, wanted in ((out, want_out), (lse, want_lse)):
        assert torch.equal(mine.isnan(), wanted.isnan())
        assert torch.equal(mine == torch.inf, wanted == torch.inf)
    rows = want_lse.isfinite()
    if not bool(rows.any()):
        return
    off = (lse - want_lse)[rows].abs()
    assert bool((off <= LSE_ABSOLUTE + LSE_RELATIVE * want_lse[rows].abs()).all()), float(off.max())
    error = row_errors(got, want)[0]
    assert error <= out_bound, error


def row_errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """The largest relative L2 error of an output row and the largest error of an lse, over rows that see keys."""
    (out, lse), (want_out, want_lse) = ([each.double() for each in state] for state in (got, want))
    rows = want_lse.isfinite()
    off = (out - want_out)[rows].norm(dim=-1)
    size = want_out[rows].norm(dim=-1)
    relative = torch.where(off == 0, 0.0, off / size)  # rows that are 0 must be 0
    return float(relative.max()), float((lse - want_lse)[rows].abs().max())
