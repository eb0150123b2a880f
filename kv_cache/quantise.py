"""From float32 to e4m3 and its scale sigma, exactly as every executor does it.

    amax   largest |x| of the group over its finite values (NaN is left out, infinity clamps)
    sigma  amax / 448 within the limits of the dtype that the pool stores, or that rounded up to a power of two
    code   e4m3 of clamp(x * (1 / sigma), -448, 448), to nearest, ties to even; NaN becomes 0x7F

The two divisions are correctly rounded float32 and the product is float32, so that a kernel can give the same bytes. An
all-zero group gives the floor, which is positive and finite, and zero codes (vllm#49435: 0 / 0 must not enter a cache).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import describe, dtype_name, refuse

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SIGMA_FLOOR = 2.0**-100  # far below any latent, and 1 / sigma, 448 / sigma and sigma * sigma' stay normal float32

# A pool of float16 scales multiplies in float16 (docs/contract.md), so sigma * 448 has to stay below 65504.
_SIGMA_LIMITS = {
    torch.float32: (SIGMA_FLOOR, 2.0**119),
    torch.float16: (2.0**-24, 146.125),
    torch.float8_e8m0fnu: (SIGMA_FLOOR, 2.0**119),
}
SCALE_DTYPES = tuple(_SIGMA_LIMITS)

_E4M3_NUMBERS = {
    dtype: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def sigma_limits(scale_dtype: torch.dtype, *, power_of_two: bool = False) -> tuple[float, float]:
    """Smallest and largest sigma that is made for a pool of `scale_dtype`; powers of two where those are asked for."""
    floor, ceiling = _SIGMA_LIMITS[scale_dtype]
    return floor, 2.0 ** math.floor(math.log2(ceiling)) if power_of_two else ceiling


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal float32, by its bits: exact, unlike exp2(ceil(log2(x)))."""
    bits = x.to(torch.float32).view(torch.int32)
    return ((bits + 0x007FFFFF) & ~0x007FFFFF).view(torch.float32)


def sigma_of(x: Tensor, *, scale_dtype: torch.dtype = torch.float32, power_of_two: bool = False) -> Tensor:
    """The scale of each group: `x [..., columns]` to `[...]` in `scale_dtype` (float32, float16, float8_e8m0fnu)."""
    if scale_dtype not in _SIGMA_LIMITS:
        refuse("scale_dtype", " or ".join(map(dtype_name, SCALE_DTYPES)), dtype_name(scale_dtype))
    power_of_two = power_of_two or scale_dtype == torch.float8_e8m0fnu
    limits = sigma_limits(scale_dtype, power_of_two=power_of_two)
    magnitude = x.to(torch.float32).abs()
    finite = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    # By a tensor: on CUDA, torch divides by a Python number as a product with its rounded inverse.
    largest = torch.full((), E4M3_MAX, dtype=finite.dtype, device=finite.device)
    sigma = (finite.amax(-1) / largest).clamp(*limits)
    if power_of_two:
        sigma = round_up_to_power_of_two(sigma)
    return sigma.to(scale_dtype)


def check_sigma(sigma: object, name: str = "sigma") -> None:
    """Refuse given scales that no row can be divided by; a device's aren't read."""
    if not isinstance(sigma, Tensor) or sigma.dtype not in SCALE_DTYPES:
        refuse(name, f"a tensor of {' or '.join(map(dtype_name, SCALE_DTYPES))}", describe(sigma))
    floor, _ = sigma_limits(sigma.dtype)
    if sigma.device.type == "cpu":
        numbers = sigma.to(torch.float32)
        bad = ~(numbers.isfinite() & (numbers >= floor))
        if bool(bad.any()):
            refuse(name, f"finite numbers of at least {floor:g}", f"{float(numbers[bad][0])}")


def encode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of x, saturating at +-448 (infinity too); every NaN becomes 0x7F."""
    x = x.to(torch.float32)
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(code, E4M3_NAN), code).view(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn as another float dtype: torch's own numbers, on a CPU from a table, a third of its time."""
    if codes.device.type != "cpu" or dtype not in _E4M3_NUMBERS:
        return codes.to(dtype)
    index = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return _E4M3_NUMBERS[dtype].index_select(0, index).view(codes.shape)


def quantise_group(x: Tensor, sigma: Tensor) -> Tensor:
    """e4m3 of `x [..., columns]` at the given `sigma [...]` (float32, float16 or float8_e8m0fnu)."""
    inverse = torch.ones((), dtype=torch.float32, device=x.device) / sigma.to(torch.float32)
    return encode_e4m3(x.to(torch.float32) * inverse.unsqueeze(-1))


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a pool's dtype: clamped at the format's largest number; NaN stays NaN, as the format's quiet one.

    x of that dtype already comes back as it is, infinity too. int8 rounds to nearest, ties to even, and takes NaN as 0.
    """
    if x.dtype == dtype:
        return x
    if dtype == torch.float8_e4m3fn:
        return encode_e4m3(x)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if not x.dtype.is_floating_point:
            return x.to(torch.int64).clamp(info.min, info.max).to(dtype)
        return x.to(torch.float64).nan_to_num(nan=0.0).round().clamp(info.min, info.max).to(dtype)
    if dtype == torch.float8_e8m0fnu:
        return x.to(torch.float32).to(dtype)
    cast = x.to(torch.float64).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    # torch's own bits depend on how wide it vectorised
    return torch.where(x.isnan(), torch.full_like(cast, torch.nan), cast)
