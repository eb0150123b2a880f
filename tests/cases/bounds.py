"""How far a dequantised number may lie from the number that was stored, derived in one place.

e4m3 has 3 bits after the leading one and a smallest step of 2^-9. Rounding moves a number by half a step at most: half
of 2^-3 relative to the power of two below it, half of 2^-9 where codes are subnormal.

    |y - x| <= 2^-4 |x| + 2^-10 sigma          for |x| <= 448 sigma

The midpoint that is worst relative to its number stands at 17/16 of a power of two, where half a step is 0.0588 |x|;
the rest up to 2^-4 = 0.0625 covers the float32 roundings of sigma, of 1 / sigma and of their product with x, 2^-22 in
all.

sigma = max(amax / 448, 2^-100) reaches amax but for its rounding; a scale dtype that rounds further (float16) leaves
numbers above 448 sigma, which clamp to it. bf16 has 7 bits after the leading one: half a step is 2^-8 of the number.
"""

from __future__ import annotations

from torch import Tensor


def e4m3_bound(x: Tensor, sigma: Tensor) -> Tensor:
    """Largest |dequantised - x| in float64, for x and the sigma of its group (broadcast)."""
    x, sigma = x.double(), sigma.double()
    beyond = (x.abs() - 448 * sigma).clamp(min=0)
    return 2.0**-4 * x.abs() + 2.0**-10 * sigma + beyond


def bf16_bound(x: Tensor) -> Tensor:
    """The same for a bf16 number in the format's normal range."""
    return x.double().abs() * 2.0**-8
