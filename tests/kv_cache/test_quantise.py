"""float32 to e4m3 and sigma, by the number and by the byte.

All 256 codes, every midpoint between neighbours, both sides of saturation, and magnitudes over the whole float32 range.
Codes are judged by a decoder written here from the format's definition (OCP OFP8: 4 exponent bits, bias 7, 3 mantissa
bits, S.1111.111 is NaN, no infinity), bounds by tests/cases/bounds.py.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cases.bounds import e4m3_bound
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.kv_cache.quantise import (
    E4M3_MAX,
    SIGMA_FLOOR,
    decode_e4m3,
    encode_e4m3,
    quantise_group,
    round_up_to_power_of_two,
    saturating_cast,
    sigma_of,
)

INF, NAN = float("inf"), float("nan")


def decode(code: int) -> float:
    """A byte of e4m3 by its definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


FINITE = [code for code in range(128) if code != 0x7F]


def codes(*numbers: float) -> list[int]:
    return encode_e4m3(torch.tensor(numbers, dtype=torch.float32)).view(torch.uint8).tolist()


def test_every_code_is_its_own_encoding() -> None:
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert codes(decode(code)) == [0x7F]
        else:
            assert codes(decode(code)) == [code]
    assert [decode(code) for code in (0x01, 0x08, 0x38, 0x7E, 0x80)] == [2.0**-9, 2.0**-6, 1.0, 448.0, 0.0]


def test_ties_go_to_even_and_their_neighbours_don_t() -> None:
    for low, high in pairwise(FINITE):
        middle = (decode(low) + decode(high)) / 2
        even = low if low % 2 == 0 else high
        above, below = (
            torch.tensor([middle]).nextafter(torch.tensor([INF])),
            torch.tensor([middle]).nextafter(torch.zeros(1)),
        )
        assert codes(middle, below.item(), above.item()) == [even, low, high]
        assert codes(-middle, -below.item(), -above.item()) == [even | 0x80, low | 0x80, high | 0x80]


def test_saturation() -> None:
    assert codes(448.0, 464.0, 480.0, 1e38, INF) == [0x7E] * 5
    assert codes(-448.0, -464.0, -480.0, -1e38, -INF) == [0xFE] * 5


def test_every_nan_becomes_one_code() -> None:
    """vllm#45562: 0xFF and 0x7F are both NaN; we write one, so that stores are the same byte for byte everywhere."""
    payloads = torch.tensor([0x7FC00000, 0x7F800001, -4194304, -1], dtype=torch.int32).view(torch.float32)
    assert bool(payloads.isnan().all())
    assert encode_e4m3(payloads).view(torch.uint8).tolist() == [0x7F] * 4


def test_signed_zero_is_kept() -> None:
    assert codes(0.0, -0.0) == [0x00, 0x80]


# -- sigma -------------------------------------------------------------------------------------------------------------


def sigma(*numbers: float, **options: object) -> float:
    return sigma_of(torch.tensor(numbers), **options).to(torch.float64).item()  # type: ignore[arg-type]


def test_sigma_is_the_largest_finite_magnitude_over_448() -> None:
    assert sigma(1.0, -448.0, 3.0) == 1.0
    assert sigma(-0.5, 0.25) == float(torch.tensor(0.5) / torch.tensor(448.0))
    assert sigma(7.0, INF, -INF, NAN) == 7.0 / 448.0
    assert sigma(1e-30) == SIGMA_FLOOR
    assert sigma(448.0 * 2.0**-100) == SIGMA_FLOOR
    assert sigma(448.0 * 2.0**-99) == 2.0**-99
    assert sigma(3e38) == 2.0**119  # so that sigma * 448 stays finite
    assert sigma(448.0 * 2.0**112) == 2.0**112


@pytest.mark.parametrize("token", [[0.0] * 8, [-0.0] * 8, [NAN] * 8, [INF] * 4 + [NAN] * 4], ids=str)
def test_a_token_without_numbers_keeps_a_positive_sigma(token: list[float]) -> None:
    """vllm#49435: sigma 0 makes 0 / 0 of an all-zero token."""
    assert sigma(*token) == SIGMA_FLOOR
    x = torch.tensor(token)
    stored = quantise_group(x, sigma_of(x)).view(torch.uint8)
    want = [0x7F if n != n else 0x7E if n == INF else 0x80 if str(n) == "-0.0" else 0 for n in token]
    assert stored.tolist() == want


def test_powers_of_two_are_rounded_up() -> None:
    assert sigma(448.0, power_of_two=True) == 1.0
    assert sigma(448.1, power_of_two=True) == 2.0
    assert sigma(447.9, power_of_two=True) == 1.0
    assert sigma(224.5, power_of_two=True) == 1.0
    assert sigma(0.0, power_of_two=True) == SIGMA_FLOOR
    exponents = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(253), exponents)
    assert torch.equal(round_up_to_power_of_two(powers), powers)
    above = powers.nextafter(torch.tensor(INF))
    assert torch.equal(round_up_to_power_of_two(above), 2 * powers)


def test_scale_dtypes() -> None:
    assert sigma_of(torch.tensor([448.1]), scale_dtype=torch.float8_e8m0fnu).view(torch.uint8).item() == 0x80
    assert sigma(0.0, scale_dtype=torch.float8_e8m0fnu) == SIGMA_FLOOR
    assert sigma(100.0, scale_dtype=torch.float16) == float(torch.tensor(100.0 / 448.0).half())
    assert sigma(0.0, scale_dtype=torch.float16) == 2.0**-24  # the smallest positive float16
    assert sigma(1e9, scale_dtype=torch.float16) * 448 < 65504  # the product is made in float16 too
    with pytest.raises(ValueError, match=r"scale_dtype: expected float32 or float16 or float8_e8m0fnu; got bfloat16\."):
        sigma(1.0, scale_dtype=torch.bfloat16)


# -- quantise and dequantise -------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**119), max_value=2.0**119)


def decoded(stored: Tensor) -> Tensor:
    return torch.tensor([decode(code) for code in stored.view(torch.uint8).flatten().tolist()]).double()


@given(st.lists(floats, min_size=1, max_size=16), st.booleans())
def test_error_bound(numbers: list[float], power_of_two: bool) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    scale = sigma_of(x, power_of_two=power_of_two)
    assert float(scale) > 0
    assert bool(((decoded(quantise_group(x, scale)) * scale.double() - x.double()).abs() <= e4m3_bound(x, scale)).all())


@given(st.lists(st.floats(width=32, min_value=-64.0, max_value=64.0), min_size=1, max_size=8), st.integers(-80, 80))
def test_codes_don_t_depend_on_magnitude(numbers: list[float], power: int) -> None:
    """x and 2^n x have the same codes, and sigmas 2^n apart, wherever the floor isn't reached."""
    x = torch.tensor([64.0, *(n if abs(n) > 1e-10 else 0.0 for n in numbers)])
    scaled = x * 2.0**power
    assert torch.equal(sigma_of(scaled), sigma_of(x) * 2.0**power)
    codes_of = [quantise_group(each, sigma_of(each)).view(torch.uint8) for each in (x, scaled)]
    assert torch.equal(*codes_of)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-2, 1.0, 1e4, 1e30])
def test_the_same_relative_error_at_every_magnitude(magnitude: float) -> None:
    """Gaussian latents lose 2.6 % of their norm, whether they are 1e-30 or 1e30."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * magnitude
    scale = sigma_of(x)
    y = decoded(quantise_group(x, scale)).view(64, 512) * scale.double().unsqueeze(1)
    loss = float((y - x.double()).norm() / x.double().norm())
    assert loss == pytest.approx(0.0263, rel=0.03)


def test_a_given_sigma_is_used_and_clamps() -> None:
    x = torch.tensor([[1.0, 448.0, 900.0, -900.0], [1.0, 2.0, 3.0, 4.0]])
    stored = quantise_group(x, torch.tensor([1.0, 2.0]))
    assert decoded(stored).view(2, 4).tolist() == [[1.0, 448.0, 448.0, -448.0], [0.5, 1.0, 1.5, 2.0]]
    for dtype in (torch.float16, torch.float8_e8m0fnu):
        assert torch.equal(
            quantise_group(x, torch.tensor([1.0, 2.0]).to(dtype)).view(torch.uint8), stored.view(torch.uint8)
        )


def test_nan_stays_in_its_token() -> None:
    x = torch.ones(3, 4)
    x[1, 2] = NAN
    stored = quantise_group(x, sigma_of(x))
    assert torch.equal(sigma_of(x), torch.full((3,), 1 / E4M3_MAX))
    nan = stored.float().isnan()
    assert nan.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_input_dtypes(dtype: torch.dtype) -> None:
    """Whatever comes in is taken to float32 first: the codes are those of its float32 value."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = quantise_group(x.float(), sigma_of(x.float())).view(torch.uint8)
    assert torch.equal(quantise_group(x, sigma_of(x)).view(torch.uint8), want)


def test_saturating_cast() -> None:
    x = torch.tensor([1e39, -1e39, NAN, 2.5, -0.7], dtype=torch.float64)
    assert saturating_cast(x, torch.int8).tolist() == [127, -128, 0, 2, -1]
    assert saturating_cast(torch.tensor([300, -300, 5]), torch.int8).tolist() == [127, -128, 5]
    assert saturating_cast(torch.tensor([300, -3]), torch.uint8).tolist() == [255, 0]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        cast = saturating_cast(x, dtype)
        assert cast[:2].tolist() == [torch.finfo(dtype).max, torch.finfo(dtype).min]
        assert cast.isnan().tolist() == [False, False, True, False, False]
    assert saturating_cast(torch.tensor([2.0, 3.0]), torch.float8_e8m0fnu).view(torch.uint8).tolist() == [0x80, 0x81]
    assert saturating_cast(x, torch.float64) is x


def test_powers_of_two_stay_below_the_ceiling() -> None:
    """An fp16 scale of 146 was rounded up to 256, and 448 * 256 is infinite in float16: the ceiling came first."""
    x = torch.tensor([65460.0])
    sigma = sigma_of(x, scale_dtype=torch.float16, power_of_two=True)
    assert sigma.item() == 128.0
    assert bool((quantise_group(x, sigma).to(torch.float16) * sigma).isfinite().all())
    assert sigma_of(x, scale_dtype=torch.float16).item() == 146.125
    assert sigma_of(torch.tensor([torch.finfo(torch.float32).max]), power_of_two=True).item() == 2.0**119


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_code_decodes_as_torch_has_it(dtype: torch.dtype) -> None:
    """On a CPU codes go through a table: each of them, also in a view whose columns aren't adjacent, to the bit."""
    codes = torch.arange(256).repeat_interleave(2).to(torch.uint8).view(128, 4)[:, ::2].view(torch.float8_e4m3fn)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(decode_e4m3(codes, dtype).view(bits), codes.to(dtype).view(bits))
    assert decode_e4m3(codes[:0], dtype).shape == (0, 2)
