"""Rows of the cache, byte by byte, and what each layout refuses.

Byte maps are judged by rows put together here with struct, from numbers whose codes are known; errors by the
bounds of tests/cases/bounds.py, over widths and granularities that divide a row, straddle latent and rope, and leave a
ragged last group.
"""

from __future__ import annotations

import re
import struct

import pytest
import torch
from cases.bounds import bf16_bound, e4m3_bound
from cases.steps import LAYOUTS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla import CacheLayout, QuantizedRows, convert_rows, get_layout, per_tensor_scale
from pagedmla.kv_cache.layouts import LAYOUTS as BY_NAME
from pagedmla.kv_cache.layouts import resolve_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view

E4M3 = torch.float8_e4m3fn
ONE, TWO, MAX = 0x38, 0x40, 0x7E  # e4m3 codes of 1, 2 and 448


def row_bytes(rows: QuantizedRows) -> list[int]:
    return rows.values.contiguous().view(torch.uint8).tolist()


# -- byte maps ---------------------------------------------------------------------------------------------------------

LATENT = torch.tensor([448.0, 1.0, 2.0, -2.0])  # sigma 1
ROPE = torch.tensor([1.0, -0.5])


def test_bytes_of_bf16() -> None:
    rows = get_layout("bf16", latent=4, rope=2).quantize(LATENT, ROPE)
    assert row_bytes(rows) == list(struct.pack("<6H", 0x43E0, 0x3F80, 0x4000, 0xC000, 0x3F80, 0xBF00))
    assert rows.scales is None


def test_bytes_of_fp8_flat() -> None:
    rows = get_layout("fp8_flat", latent=4, rope=2).quantize(LATENT, ROPE)
    assert row_bytes(rows) == [MAX, ONE, TWO, TWO | 0x80, ONE, 0x30 | 0x80]
    assert rows.scales is not None
    assert rows.scales.tolist() == [1.0]
    grouped = get_layout("fp8_flat", latent=4, rope=2, granularity=3).quantize(LATENT, ROPE)
    assert grouped.scales is not None
    assert grouped.scales.tolist() == [
        1.0,
        float(torch.tensor(2.0) / 448),
    ]  # the second group straddles latent and rope
    assert row_bytes(grouped) == [MAX, ONE, TWO, MAX | 0x80, 0x76, 0x6E | 0x80]


def test_bytes_of_fp8_rope_bf16() -> None:
    rows = get_layout("fp8_rope_bf16", latent=4, rope=2).quantize(2 * LATENT, ROPE)
    assert row_bytes(rows) == [MAX, ONE, TWO, TWO | 0x80, *struct.pack("<2H", 0x3F80, 0xBF00)]
    assert rows.scales is not None
    assert rows.scales.tolist() == [2.0]
    assert rows.values.dtype == E4M3


def test_bytes_of_fp8_rope_bf16_prescaled() -> None:
    """The rope is divided by sigma: 1 and -0.5 at sigma 2 are kept as 0.5 and -0.25."""
    rows = get_layout("fp8_rope_bf16_prescaled", latent=4, rope=2).quantize(2 * LATENT, ROPE)
    assert row_bytes(rows) == [MAX, ONE, TWO, TWO | 0x80, *struct.pack("<2H", 0x3F00, 0xBE80)]
    assert rows.scales is not None
    assert rows.scales.tolist() == [2.0]


def test_bytes_of_fp8_ds_mla() -> None:
    """vLLM's row of 656: four groups of 128 at sigma 1, 2, 4 and 8, their float32, then 64 bf16."""
    latent = torch.cat([torch.tensor([448.0, 1.0, *[0.0] * 126]) * 2**g for g in range(4)])
    rows = get_layout("fp8_ds_mla").quantize(latent, torch.arange(64.0))
    want = [MAX, ONE, *[0] * 126] * 4 + list(struct.pack("<4f", 1.0, 2.0, 4.0, 8.0))
    want += [byte for n in range(64) for byte in struct.pack("<f", float(n))[2:]]
    assert row_bytes(rows) == want
    assert len(want) == 656
    assert rows.scales is None
    assert rows.values.dtype == torch.uint8


@pytest.mark.parametrize(
    ("layout", "row", "scales", "total"),
    [
        ("bf16", 1152, 0, 1152),
        ("fp16", 1152, 0, 1152),
        ("fp32", 2304, 0, 2304),
        ("fp8_flat", 576, 1, 580),
        ("fp8_flat-g64", 576, 9, 612),
        ("fp8_flat-g128", 576, 5, 596),
        ("fp8_rope_bf16", 640, 1, 644),
        ("fp8_rope_bf16_prescaled", 640, 1, 644),
        ("fp8_ds_mla", 656, 0, 656),
    ],
)
def test_bytes_a_token(layout: str, row: int, scales: int, total: int) -> None:
    made = LAYOUTS[layout]
    assert (made.row_bytes, made.scales_per_token, made.bytes_per_token) == (row, scales, total)
    assert made.quantised == (made.row_bytes < 1152)
    rows = made.quantize(torch.zeros(3, 512), torch.zeros(3, 64))
    assert rows.values.shape == (3, made.row_elements)
    assert (0 if rows.scales is None else rows.scales.shape[-1]) == scales


def test_every_layout_draws_its_bytes() -> None:
    for cls in BY_NAME.values():
        drawn = cls.__doc__ or next(base.__doc__ for base in cls.__mro__ if base.__doc__)
        assert "| 0 .. 511 | latent" in drawn, cls.name


# -- error bounds ------------------------------------------------------------------------------------------------------


def check_bounds(layout: CacheLayout, latent: Tensor, rope: Tensor, **options: object) -> None:
    rows = layout.quantize(latent, rope, **options)  # type: ignore[arg-type]
    back = layout.dequantize(rows.values, rows.scales, torch.float64)
    exact = torch.cat((latent, rope), -1).double()
    groups = torch.arange(layout.width) // layout.scale_group
    if layout.name == "fp8_flat":
        assert rows.scales is not None
        bound = e4m3_bound(exact, rows.scales.to(torch.float32)[..., groups])
    elif layout.name == "fp8_ds_mla":
        plane = rows.values[..., layout.latent : layout.latent + 4 * -(-layout.latent // 128)].contiguous()
        sigma = plane.view(torch.float32)[..., torch.arange(layout.latent) // 128]
        bound = torch.cat((e4m3_bound(latent, sigma), bf16_bound(rope)), -1)
    elif layout.quantised:
        assert rows.scales is not None
        bound = torch.cat((e4m3_bound(latent, rows.scales), bf16_bound(rope)), -1)
    else:
        bound = {"bf16": bf16_bound(exact), "fp16": exact.abs() * 2.0**-11 + 2.0**-25, "fp32": exact * 0}[layout.name]
    assert bool(((back - exact).abs() <= bound).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1.0, 1e4])
def test_error_bounds(layout: str, magnitude: float) -> None:
    g = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(16, 512, generator=g) * magnitude, torch.randn(16, 64, generator=g)
    latent[0] = 0.0
    latent[1, 1:] *= 1e-4  # one outlier
    check_bounds(LAYOUTS[layout], latent, rope)


@given(
    latent=st.sampled_from([2, 4, 10, 16, 130, 256]),
    rope=st.sampled_from([2, 6, 64]),
    granularity=st.integers(1, 300),
    name=st.sampled_from(["fp8_flat", "fp8_rope_bf16", "fp8_rope_bf16_prescaled", "bf16"]),
    seed=st.integers(0, 2**16),
    power=st.integers(-60, 60),
    options=st.sampled_from([{}, {"power_of_two": True}]),
)
def test_error_bounds_over_widths(
    latent: int, rope: int, granularity: int, name: str, seed: int, power: int, options: dict[str, bool]
) -> None:
    layout = get_layout(name, latent=latent, rope=rope, granularity=granularity if name == "fp8_flat" else None)
    g = torch.Generator().manual_seed(seed)
    scale = 2.0**power
    check_bounds(
        layout, torch.randn(3, latent, generator=g) * scale, torch.randn(3, rope, generator=g) * scale, **options
    )


@given(st.integers(1, 600), st.sampled_from([256, 512]))
def test_groups_cover_the_row(granularity: int, latent: int) -> None:
    """Column d takes scale d // granularity; the last group may be short, and one wider than the row is the row."""
    layout = get_layout("fp8_flat", latent=latent, granularity=granularity)
    assert layout.scales_per_token == len({d // min(granularity, latent + 64) for d in range(latent + 64)})
    sigma = torch.arange(1.0, layout.scales_per_token + 1)
    ones = torch.full((latent + 64,), ONE, dtype=torch.uint8).view(E4M3)
    assert layout.dequantize(ones, sigma).tolist() == [
        d // min(granularity, latent + 64) + 1.0 for d in range(latent + 64)
    ]


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_flat-g64", "fp8_flat-g128"])
def test_scale_dtypes(layout: str, scale_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    check_bounds(
        LAYOUTS[layout], torch.randn(8, 512, generator=g), torch.randn(8, 64, generator=g), scale_dtype=scale_dtype
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name].quantised])
def test_zero_tokens_come_back_as_zeros(layout: str) -> None:
    made = LAYOUTS[layout]
    rows = made.quantize(torch.zeros(2, 512), torch.zeros(2, 64))
    assert bool((made.dequantize(rows.values, rows.scales) == 0).all())
    if rows.scales is not None:
        assert bool((rows.scales > 0).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_token(layout: str) -> None:
    made = LAYOUTS[layout]
    latent, rope = torch.ones(3, 512), torch.ones(3, 64)
    latent[1, 7], rope[1, 3] = torch.nan, torch.nan
    rows = made.quantize(latent, rope)
    nan = made.dequantize(rows.values, rows.scales).isnan()
    assert nan.nonzero().tolist() == [[1, 7], [1, 512 + 3]]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name].quantised])
def test_infinity_clamps(layout: str) -> None:
    made = LAYOUTS[layout]
    latent = torch.ones(1, 512)
    latent[0, 5] = torch.inf
    rows = made.quantize(latent, torch.full((1, 64), -1.0))
    back = made.dequantize(rows.values, rows.scales)
    assert bool(back.isfinite().all())
    assert back[0, 5].item() == pytest.approx(1.0)
    torch.testing.assert_close(back[0, 512:], torch.full((64,), -1.0))


def test_the_rope_doesn_t_suffer_from_small_latents() -> None:
    """vllm#42956: one scale calibrated on latents of 0.05 makes a rope of 1 saturate. Here it is kept in bf16."""
    layout = get_layout("fp8_rope_bf16")
    rope = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 10
    rows = layout.quantize(torch.full((4, 512), 0.05), rope)
    assert torch.equal(layout.dequantize(rows.values, rows.scales)[:, 512:], rope.bfloat16().float())


@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_flat-g64", "fp8_rope_bf16", "fp8_rope_bf16_prescaled"])
def test_a_given_sigma_is_used(layout: str) -> None:
    made = LAYOUTS[layout]
    sigma = torch.full((2, made.scales_per_token), 0.5)
    rows = made.quantize(torch.ones(2, 512), torch.ones(2, 64), sigma=sigma)
    assert rows.scales is sigma
    assert set(row_bytes(rows)[0][:512]) == {TWO}
    assert bool((made.dequantize(rows.values, sigma) == 1).all())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name].quantised])
def test_power_of_two_scales(layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(4, 512, generator=g), torch.randn(4, 64, generator=g)
    rows = LAYOUTS[layout].quantize(latent, rope, power_of_two=True)
    sigma = rows.values[:, 512:528].contiguous().view(torch.float32) if rows.scales is None else rows.scales
    assert bool((sigma.log2() == sigma.log2().round()).all())
    check_bounds(LAYOUTS[layout], latent, rope, power_of_two=True)


# -- planes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_are_views_that_mean_the_row(layout: str) -> None:
    """What kernels are handed, multiplied out, is what dequantize says; and it is memory of the pool, not a copy."""
    made = LAYOUTS[layout]
    g = torch.Generator().manual_seed(0)
    rows = made.quantize(torch.randn(2, 2, 4, 512, generator=g), torch.randn(2, 2, 4, 64, generator=g))
    blocks = rows.values.view(2, 1, 2, 4, 1, made.row_elements)
    scales = None if rows.scales is None else rows.scales.view(2, 1, 2, 4, 1, -1)
    bound = PagedTensor.bind(blocks, "blocks"), None if scales is None else PagedTensor.bind(scales, "scales")
    planes = made.planes(*bound, layer=1)
    assert planes.latent.shape == (2, 4, 512)
    assert planes.rope.shape == (2, 4, 64)
    latent, rope = planes.latent.float(), planes.rope.float()
    if planes.scales is not None:
        latent = latent * planes.scales[..., torch.arange(512) // planes.scale_group]
        if planes.rope_scaled:
            rope = rope * planes.scales[..., torch.arange(512, 576) // planes.scale_group]
    want = made.dequantize(rows.values, rows.scales)[:, 1]
    assert torch.equal(torch.cat((latent, rope), -1), want)
    assert planes.latent.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
    assert planes.scales_in_value_pages == (layout == "fp8_ds_mla")


# -- conversions -------------------------------------------------------------------------------------------------------


def made_rows(layout: CacheLayout) -> QuantizedRows:
    g = torch.Generator().manual_seed(3)
    return layout.quantize(torch.randn(5, 512, generator=g) * 10, torch.randn(5, 64, generator=g))


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_conversions(source: str, target: str) -> None:
    """Every pair: no further from the source's numbers than the target's own quantisation takes them."""
    rows = made_rows(LAYOUTS[source])
    converted = convert_rows(rows, LAYOUTS[source], LAYOUTS[target])
    LAYOUTS[target].check_pool(
        converted.values.view(5, 1, 1, 1, 1, -1),
        None if converted.scales is None else converted.scales.view(5, 1, 1, 1, 1, -1),
    )
    was = LAYOUTS[source].dequantize(rows.values, rows.scales)
    again = LAYOUTS[target].quantize(was[:, :512], was[:, 512:])
    if source == target:
        assert converted is rows
    elif {source, target} != {"fp8_rope_bf16", "fp8_rope_bf16_prescaled"}:
        assert torch.equal(raw_view(converted.values), raw_view(again.values))


@pytest.mark.parametrize("direction", [1, -1], ids=["to-prescaled", "from-prescaled"])
def test_prescaling_keeps_the_latent_bytes(direction: int) -> None:
    """Both ways: 512 bytes and sigma as they were, the rope divided or multiplied by sigma and rounded to bf16."""
    source, target = [LAYOUTS["fp8_rope_bf16"], LAYOUTS["fp8_rope_bf16_prescaled"]][::direction]
    rows = made_rows(source)
    converted = convert_rows(rows, source, target)
    assert converted.scales is not None
    assert rows.scales is not None
    assert torch.equal(converted.scales, rows.scales)
    assert torch.equal(raw_view(converted.values)[:, :512], raw_view(rows.values)[:, :512])
    stored, was = (each.values[:, 512:].contiguous().view(torch.bfloat16).float() for each in (converted, rows))
    factor = rows.scales**-direction
    torch.testing.assert_close(stored, was * factor, rtol=2.0**-8 * 1.001, atol=0)
    back = convert_rows(converted, target, source)
    assert torch.equal(raw_view(back.values)[:, :512], raw_view(rows.values)[:, :512])


def test_a_power_of_two_sigma_prescales_without_loss() -> None:
    plain, prescaled = LAYOUTS["fp8_rope_bf16"], LAYOUTS["fp8_rope_bf16_prescaled"]
    g = torch.Generator().manual_seed(3)
    rows = plain.quantize(torch.randn(5, 512, generator=g), torch.randn(5, 64, generator=g), power_of_two=True)
    back = convert_rows(convert_rows(rows, plain, prescaled), prescaled, plain)
    assert torch.equal(raw_view(back.values), raw_view(rows.values))


def test_the_source_rows_of_a_conversion_stay() -> None:
    rows = made_rows(LAYOUTS["fp8_rope_bf16"])
    before = raw_view(rows.values).clone()
    convert_rows(rows, LAYOUTS["fp8_rope_bf16"], LAYOUTS["fp8_rope_bf16_prescaled"])
    assert torch.equal(raw_view(rows.values), before)


# -- names and per-tensor scales ---------------------------------------------------------------------------------------


def pool(row: int, dtype: torch.dtype = E4M3, page_size: int = 4) -> Tensor:
    return torch.zeros(2, 1, 3, page_size, 1, row, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


@pytest.mark.parametrize(
    ("name", "row", "groups", "expected"),
    [
        ("bf16", 576, 0, get_layout("bf16")),
        ("bf16", 320, 0, get_layout("bf16", latent=256)),
        ("fp8_flat", 576, 1, get_layout("fp8_flat")),
        ("fp8_flat", 576, 9, get_layout("fp8_flat", granularity=64)),
        ("fp8_flat", 320, 5, get_layout("fp8_flat", latent=256, granularity=64)),
        ("fp8_rope_bf16", 640, 1, get_layout("fp8_rope_bf16")),
        ("fp8_rope_bf16", 384, 1, get_layout("fp8_rope_bf16", latent=256)),
        ("fp8_ds_mla", 656, 0, get_layout("fp8_ds_mla")),
    ],
)
def test_a_name_takes_its_widths_from_the_pool(name: str, row: int, groups: int, expected: CacheLayout) -> None:
    blocks = pool(row, torch.bfloat16 if name == "bf16" else E4M3)
    scales = torch.ones(5, 1, 3, 4, 1, groups) if groups else None
    assert resolve_layout(name, blocks, scales) == expected
    assert resolve_layout(expected, blocks, scales) is expected


def test_a_layout_object_and_uint8_pools() -> None:
    assert str(get_layout("fp8_flat", latent=256, granularity=64)) == "fp8_flat (latent 256, granularity 64)"
    assert str(get_layout("fp8_rope_bf16")) == "fp8_rope_bf16"
    resolve_layout("fp8_flat", pool(576, torch.uint8), torch.ones(2, 1, 3, 4, 1, 1))
    resolve_layout("fp8_ds_mla", pool(656, torch.uint8), None)
    memory = pool(656, torch.uint8)
    resolve_layout("fp8_ds_mla", memory, memory[..., 512:528].view(torch.float32))


def test_a_scale_for_the_whole_pool_or_a_layer() -> None:
    blocks = pool(576)
    one = per_tensor_scale(torch.tensor([0.5]), blocks)
    assert one.shape == (2, 1, 3, 4, 1, 1)
    assert one.untyped_storage().nbytes() == 4
    assert bool((one == 0.5).all())
    a_layer = per_tensor_scale(torch.tensor([1.0, 2.0, 3.0]), blocks)
    assert [a_layer[1, 0, layer, 3, 0, 0].item() for layer in range(3)] == [1.0, 2.0, 3.0]
    repeated = [one, a_layer, torch.ones(1).as_strided((1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 0))]
    own = [torch.ones(2, 1, 3, 4, 1, 1), torch.ones(2, 1, 3, 1, 1, 1), torch.ones(1, 1, 3, 1, 1, 1)]
    assert [PagedTensor.bind(scales, "kv_scales").repeated for scales in repeated + own] == [True] * 3 + [False] * 3


# -- refusals ----------------------------------------------------------------------------------------------------------

SCALES = torch.ones(2, 1, 3, 4, 1, 1)


def inline(blocks: Tensor, start: int) -> Tensor:
    return blocks.view(torch.uint8)[..., start : start + 16].view(torch.float32)


REFUSALS = [
    (lambda: get_layout("fp8"), r"layout: expected one of bf16, fp16, fp32, fp8_flat, fp8_rope_bf16, "
     r"fp8_rope_bf16_prescaled, fp8_ds_mla; got 'fp8'\."),
    (lambda: get_layout("bf16", granularity=64),
     r"granularity: expected None for layout bf16; only fp8_flat has one; got 64\."),
    (lambda: get_layout("fp8_flat", granularity=0), r"granularity: expected at least 1 column; got 0\."),
    (lambda: get_layout("bf16", latent=0), r"layout: expected latent and rope of at least 1 column; got latent=0, "
                                           r"rope=64\."),
    (lambda: get_layout("fp8_rope_bf16", latent=5),
     r"layout: expected an even latent for fp8_rope_bf16, since bf16 numbers follow it; got latent=5\."),
    (lambda: get_layout("fp8_ds_mla", latent=130),
     r"layout: expected a latent of whole float32 and an even rope for fp8_ds_mla; got latent=130, rope=64\."),
    (lambda: LAYOUTS["bf16"].quantize(torch.zeros(512), torch.zeros(64), sigma=torch.ones(1)),
     r"sigma: expected None, since layout bf16 has no scales; got \[1\] float32\."),
    (lambda: LAYOUTS["fp8_flat"].dequantize(torch.zeros(576).to(E4M3)),
     r"scales: expected \[\.\.\., 1\] for layout fp8_flat; got None\."),
    (lambda: resolve_layout("fp8_flat", pool(640), SCALES),
     r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] float8_e4m3fn or uint8 for layout fp8_flat; got "
     r"\[2, 1, 3, 4, 1, 640\] float8_e4m3fn\. A pool of such rows is fp8_rope_bf16 or fp8_rope_bf16_prescaled\."),
    (lambda: resolve_layout("bf16", pool(576, torch.float16), None),
     r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] bfloat16 for layout bf16; got \[2, 1, 3, 4, 1, 576\] float16\. "
     r"A pool of such rows is fp16\."),
    (lambda: resolve_layout("bf16", torch.zeros(3, 576), None),
     r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] bfloat16 for layout bf16; got \[3, 576\] float32\."),
    (lambda: resolve_layout("bf16", torch.zeros(2, 2, 3, 4, 8, 576).bfloat16(), None),
     r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] bfloat16 for layout bf16; got \[2, 2, 3, 4, 8, 576\] bfloat16\."),
    (lambda: resolve_layout("bf16", torch.zeros(2, 1, 3, 4, 1, 1152).bfloat16()[..., ::2], None),
     r"kv_blocks: expected rows whose elements are adjacent \(stride\(5\) 1\) for layout bf16; got "),
    (lambda: resolve_layout("bf16", pool(576, torch.bfloat16), SCALES),
     r"kv_scales: expected None, since layout bf16 keeps no scale pool; got \[2, 1, 3, 4, 1, 1\] float32\."),
    (lambda: resolve_layout("fp8_rope_bf16", pool(640), None),
     r"kv_scales: expected \[\*, 1, 3, 4, 1, 1\] float32 to go with kv_blocks \[2, 1, 3, 4, 1, 640\] float8_e4m3fn in "
     r"layout fp8_rope_bf16; got None\."),
    (lambda: resolve_layout("fp8_rope_bf16", pool(640), torch.ones(2, 1, 3, 4, 1, 5)),
     r"kv_scales: expected \[\*, 1, 3, 4, 1, 1\] float32 to go with kv_blocks \[2, 1, 3, 4, 1, 640\] float8_e4m3fn in "
     r"layout "
     r'fp8_rope_bf16; got \[2, 1, 3, 4, 1, 5\] float32\. For grouped scales use layout "fp8_flat" with its '
     r'granularity\.'),
    (lambda: resolve_layout("fp8_rope_bf16", pool(640), SCALES.half()), r"kv_scales: expected .* float32 to go with"),
    (lambda: resolve_layout("fp8_rope_bf16", pool(640), torch.ones(2, 1, 2, 4, 1, 1)), r"kv_scales: expected \[\*, 1, "
                                                                                       r"3, 4"),
    (lambda: resolve_layout("fp8_flat", pool(576), torch.ones(2, 1, 3, 4, 1, 5)),
     r"layout: expected an Fp8Flat with its granularity, since 5 scales don't divide a row of 576 evenly; got "
     r"'fp8_flat'\. "
     r'For example get_layout\("fp8_flat", granularity=128\)\.'),
    (lambda: resolve_layout("fp8_ds_mla", pool(656), inline(pool(656), 512)),
     r"kv_scales: expected None, or the float32 view of the scales inside the rows, since layout fp8_ds_mla keeps them "
     r"there; got \[2, 1, 3, 4, 1, 4\] float32\."),
    (lambda: per_tensor_scale(torch.ones(2), pool(576)), r"sigma: expected \[1\] or \[3\] float32 or .*; got \[2\] "
                                                         r"float32\."),
    (lambda: convert_rows(made_rows(LAYOUTS["bf16"]), LAYOUTS["bf16"], get_layout("bf16", latent=256)),
     r"target: expected a layout of latent 512 and rope 64; got latent 256 and rope 64\."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("fp8")])
def test_rows_are_read_wherever_they_lie(name: str) -> None:
    """Transposed rows, and rows at odd bytes, ended in torch's own words about views."""
    layout = LAYOUTS[name]
    rows = layout.quantize(torch.randn(6, 512), torch.randn(6, 64))
    want, raw = layout.dequantize(*rows), rows.values.view(torch.uint8)
    odd, wide = torch.zeros(raw.numel() + 1, dtype=torch.uint8), torch.zeros(6, raw.shape[1] + 3, dtype=torch.uint8)
    for place in (raw.T.contiguous().T, odd[1:].view(raw.shape), wide[:, 1:-2]):
        place.copy_(raw)
        assert torch.equal(layout.dequantize(place.view(rows.values.dtype), rows.scales), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LAYOUTS["bf16"].quantize([1.0], ROPE), "latent: expected a tensor; got list"),
        (lambda: LAYOUTS["fp8_ds_mla"].dequantize([1]), "values: expected a tensor; got list"),
        (
            lambda: convert_rows(made_rows(LAYOUTS["bf16"]), LAYOUTS["bf16"], "fp16"),
            "target: expected a CacheLayout; got 'fp16'",
        ),
        (
            lambda: convert_rows((ROPE, None), LAYOUTS["bf16"], LAYOUTS["fp16"]),
            r"rows: expected QuantizedRows\(values, scales\); got tuple",
        ),
    ],
    ids=range(4),
)
def test_what_is_no_row_or_layout_is_refused_by_name(call, message: str) -> None:
    """They were AttributeErrors: no 'shape', no 'latent'."""
    with pytest.raises(TypeError, match=message):
        call()


def test_a_layout_is_an_object_or_a_name() -> None:
    with pytest.raises(TypeError, match=r"layout: expected a CacheLayout or its name; got 3\."):
        resolve_layout(3, pool(576), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shift", "strides", "what"),
    [
        (1, (1920 * 4, 1920 * 4, 2560, 640, 640, 1), "first byte"),
        (0, (1920 * 4 + 1, 1920 * 4, 2560, 640, 640, 1), "page stride"),
        (0, (7728, 7728, 2576, 641, 640, 1), "slot stride"),
        (0, (7728, 7728, 2567, 640, 640, 1), "layer stride"),
    ],
)
def test_wide_numbers_in_byte_rows_need_alignment(shift: int, strides: tuple[int, ...], what: str) -> None:
    """The bf16 rope of a byte row is read as bf16: odd addresses are refused by name before torch or a GPU faults."""
    blocks = torch.zeros(40000, dtype=torch.uint8).view(E4M3).as_strided((2, 1, 3, 4, 1, 640), strides, shift)
    layout = LAYOUTS["fp8_rope_bf16"]
    with pytest.raises(
        ValueError,
        match=rf"kv_blocks: expected a {what} that is a multiple of 2 bytes for layout fp8_rope_bf16; got \d+",
    ):
        layout.planes(PagedTensor.bind(blocks, "blocks"), PagedTensor.bind(SCALES, "scales"), 0)


def test_a_store_wants_alignment_too() -> None:
    """store took rows that attend and inspect refused: only the kernels' view looked at strides."""
    blocks = (
        torch.zeros(40000, dtype=torch.uint8).view(E4M3).as_strided((2, 1, 3, 4, 1, 640), (7728, 1, 2576, 641, 1, 1))
    )
    with pytest.raises(ValueError, match="kv_blocks: expected a slot stride that is a multiple of 2 bytes"):
        LAYOUTS["fp8_rope_bf16"].check_pool(blocks, SCALES)


MISFITS = {
    "sigma": (lambda layout: layout.quantize(torch.ones(3, 512), torch.ones(3, 64), sigma=torch.ones(3)),
              r"sigma: expected \[3, 1\] .*; got \[3\] float32"),
    "latent": (lambda layout: layout.quantize(torch.ones(3, 100), torch.ones(3, 64)),
               r"latent: expected \[3, 512\]; got \[3, 100\] float32"),
    "rope": (lambda layout: layout.quantize(torch.ones(3, 512), torch.ones(64)),
             r"rope: expected \[3, 64\]; got \[64\] float32"),
    "values": (lambda layout: layout.dequantize(torch.zeros(3, 100, dtype=torch.uint8), torch.ones(3, 1)),
               r"values: expected \[3, \d+\] .*; got \[3, 100\] uint8"),
    "scales": (lambda layout: layout.dequantize(torch.zeros(3, layout.row_elements, dtype=torch.uint8), torch.ones(3)),
               r"scales: expected \[3, 1\] .*; got \[3\] float32"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", ["fp8_flat", "fp8_rope_bf16", "fp8_rope_bf16_prescaled"])
def test_arguments_of_quantize_fit_each_other(name: str, misfit: str) -> None:
    """sigma [3] for three tokens gave all of them the first one's: its last dimension was taken for groups."""
    call, message = MISFITS[misfit]
    with pytest.raises(ValueError, match=message):
        call(LAYOUTS[name])


def test_scales_that_a_layout_keeps_elsewhere() -> None:
    for name in ("bf16", "fp8_ds_mla"):
        layout = LAYOUTS[name]
        rows = torch.zeros(2, layout.row_elements, dtype=layout.value_dtypes[0])
        with pytest.raises(ValueError, match=f"scales: expected None, since layout {name} has none beside its rows"):
            layout.dequantize(rows, torch.ones(2, 1))


@pytest.mark.parametrize(
    ("name", "scale_dtype", "expected"),
    [
        ("bf16", torch.float32, "None, since layout bf16 keeps no scale pool; got float32"),
        ("bf16", "x", "None, since layout bf16 keeps no scale pool; got 'x'"),
        ("fp8_ds_mla", torch.int8, "None, since layout fp8_ds_mla keeps no scale pool; got int8"),
        ("fp8_rope_bf16", torch.float16, "float32 for layout fp8_rope_bf16; got float16"),
        (
            "fp8_rope_bf16_prescaled",
            torch.float8_e8m0fnu,
            "float32 for layout fp8_rope_bf16_prescaled; got float8_e8m0fnu",
        ),
        ("fp8_flat", torch.bfloat16, "float32 or float16 or float8_e8m0fnu for layout fp8_flat; got bfloat16"),
    ],
)
def test_scales_are_of_a_dtype_that_the_pool_takes(name: str, scale_dtype: torch.dtype, expected: str) -> None:
    """fp8_rope_bf16 made float16 scales that its own pool refuses, and layouts without a scale pool took any dtype."""
    with pytest.raises(ValueError, match=re.escape(f"scale_dtype: expected {expected}.")):
        LAYOUTS[name].quantize(torch.ones(1, 512), torch.ones(1, 64), scale_dtype=scale_dtype)


@pytest.mark.parametrize("name", ["fp8_rope_bf16", "fp8_rope_bf16_prescaled"])
def test_given_scales_are_of_a_dtype_that_the_pool_takes(name: str) -> None:
    with pytest.raises(ValueError, match=r"sigma: expected \[1, 1\] float32; got \[1, 1\] float16"):
        LAYOUTS[name].quantize(torch.ones(1, 512), torch.ones(1, 64), sigma=torch.ones(1, 1).half())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_quantize_makes_fits_its_pool(layout: str) -> None:
    made = LAYOUTS[layout]
    for scale_dtype in made.scale_dtypes or (None,):
        rows = made.quantize(torch.ones(2, 1, 1, 4, 1, 512), torch.ones(2, 1, 1, 4, 1, 64), scale_dtype=scale_dtype)
        made.check_pool(rows.values, rows.scales)


def test_one_layout_has_one_form() -> None:
    """A granularity of the whole row meant the same as None and compared unequal; 2.5 was taken."""
    assert get_layout("fp8_flat", granularity=576) == get_layout("fp8_flat", granularity=9999) == get_layout("fp8_flat")
    for arguments, message in (
        ({"granularity": 2.5}, r"granularity: expected an int; got 2\.5"),
        ({"latent": 512.0}, r"latent: expected an int; got 512\.0"),
        ({"rope": True}, "rope: expected an int; got True"),
    ):
        with pytest.raises(TypeError, match=message):
            get_layout("fp8_flat", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e-38])
def test_a_scale_for_the_whole_pool_can_be_divided_by(sigma: float) -> None:
    """Any number was taken for a tensor's scale: 0 made every code NaN or 448."""
    with pytest.raises(ValueError, match=r"sigma: expected finite numbers of at least 7\.88861e-31; got"):
        per_tensor_scale(torch.tensor([sigma]), pool(576))
    with pytest.raises(ValueError, match=r"sigma: expected finite numbers of at least 5\.96046e-08; got"):
        per_tensor_scale(torch.tensor([min(sigma, 1e-9)], dtype=torch.float16), pool(576))


def test_scales_must_be_tensors_of_a_scale_dtype() -> None:
    with pytest.raises(ValueError, match=r"sigma: expected a tensor of float32 or .*; got float"):
        per_tensor_scale(0.5, pool(576))  # type: ignore[arg-type]
