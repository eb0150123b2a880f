"""Mixed attention, judged by float64, by cases worked by hand, and by what must hold whatever the numbers are.

Grid: a decode row, a speculative row, a prompt chunk and a request without cache in one step; 70 and 64 and 65 keys
stand on either side of the tile of 64; pages of 1, 16, 48 and 64 tokens are smaller than the tile, no divisor of it,
and the tile itself. H 3 and 5 fold rows of different tokens into one tile; 80 rows need two. Everything not alive is
NaN (cases/steps.py), every buffer stands between sentinels.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases.attending import INF, assert_agrees, planes_of, results, run_mixed
from cases.steps import LAYOUTS, StepCase, as_table, build_step, with_rows, with_values

from pagedmla.kv_cache.layouts import get_layout, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view
from pagedmla.triton_kernels.mixed import attend_mixed

RAGGED = StepCase((1, 3, 5, 1), (70, 3, 40, 1), page_size=16, heads=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(guarded, layout):
    """FlashMLA#28: users wanted as many query tokens as each request has; one number served all, and 1,024 asserted."""
    step = build_step(RAGGED, layout, dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("granularity", [40, 96, 192, 512, 544])
def test_groups_that_straddle(guarded, granularity):
    """Groups that no MMA chunk fits (40, 96), that straddle latent and rope (192, 544), or end between them (512)."""
    layout = get_layout("fp8_flat", granularity=granularity)
    step = build_step(StepCase((2,), (21,), heads=3), layout, dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float8_e8m0fnu], ids=str)
def test_scale_dtypes(guarded, scale_dtype):
    step = build_step(StepCase((2,), (21,)), "fp8_flat", dtype=torch.bfloat16, scale_dtype=scale_dtype)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("layout", ["bf16", "fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla"])
def test_latent_of_256(guarded, layout):
    step = build_step(
        StepCase((2, 1), (21, 64)), dataclasses.replace(LAYOUTS[layout], latent=256), dtype=torch.bfloat16
    )
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 128])
def test_page_sizes_agree(guarded, page_size):
    """flashinfer#810: one process, different page sizes, different answers on the same tokens."""
    step = build_step(StepCase((2, 1), (65, 130), page_size=page_size), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.uint32], ids=str)
@pytest.mark.parametrize("wild", [0, 2147480000, 0xFFFFFFFF])
def test_table_columns_past_the_end_hold_anything(guarded, table_dtype, wild):
    """imp#1678, FlashMLA's tests: -1, one past the pool, or 2147480000 stands in the columns that no token uses."""
    step = build_step(
        StepCase((1, 2), (17, 16)), "fp8_rope_bf16", dtype=torch.bfloat16, table_dtype=table_dtype, wild=wild
    )
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("order", ["interleaved", "reversed"])
def test_page_orders(guarded, order):
    step = build_step(StepCase((3,), (70,), page_order=order), "fp8_flat", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("heads", [1, 5, 16, 40])
def test_heads_that_divide_nothing(guarded, heads):
    """sglang#27954: head counts padded to the wrong tile gave empty or wrong rows."""
    step = build_step(StepCase((2, 1), (9, 3), heads=heads), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


def test_not_causal(guarded):
    step = build_step(dataclasses.replace(RAGGED, causal=False), "fp8_ds_mla", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_queries(guarded, layout):
    """bfloat16 holds a float16 query only in two parts: one alone leaves logits 2^-9 of their terms wrong."""
    step = build_step(StepCase((2,), (21,)), layout, dtype=torch.float16)
    assert_agrees(step, run_mixed(guarded, step))


def test_float32_queries(guarded):
    step = build_step(StepCase((2,), (21,)), "bf16", dtype=torch.float32)
    assert_agrees(step, run_mixed(guarded, step))


def test_bfloat16_queries_over_float16(guarded):
    step = build_step(StepCase((2,), (21,)), "fp16", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes(guarded, dtype):
    step = build_step(StepCase((2,), (21,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step, dtype=dtype))


@pytest.mark.parametrize(
    "layout", ["fp8_flat", "fp8_flat-g128", "fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_ds_mla"]
)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1e4])
def test_magnitudes(guarded, layout, magnitude):
    """aiter#5535, unscaled float16: P * sigma underflowed for small latents. The error may not depend on size."""
    case = StepCase((1,), (70,), magnitude=magnitude, rope_magnitude=magnitude)
    step = build_step(case, layout, dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step), out_bound=1e-3)


FLOAT16_MMA = [name for name in LAYOUTS if name not in ("bf16", "fp32")]


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("layout", FLOAT16_MMA)
@pytest.mark.parametrize(("magnitude", "rope_magnitude"), [(1e4, 1e-6), (1e-6, 1e4)])
def test_latent_and_rope_of_very_different_size(guarded, layout, magnitude, rope_magnitude, heads):
    """One power of two scaled a query's latent and rope to float16 together: at a ratio of 1e8 and more the smaller one
    lost its bits, and lse was off by up to 1e-2. The first head's halves are alike, so that a tile has rows of both
    kinds; 40 heads fill a tile of 64, where the ratio is left to a branch."""
    case = StepCase((1,), (70,), heads=heads, magnitude=magnitude, rope_magnitude=rope_magnitude)
    step = build_step(case, layout, dtype=torch.bfloat16)
    q = step.q.clone()
    if magnitude > rope_magnitude:
        q[:, 0, 512:] = q[:, 0, :64]
    else:
        q[:, 0, :512] = q[:, 0, 512:].repeat(1, 8)
    step = dataclasses.replace(step, q=q)
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("layout", FLOAT16_MMA)
@pytest.mark.parametrize(("latent", "rope"), [(0, 1), (1, 0), (0, 0), (0, 1e-30), (1e-30, 0), (1e30, 1e-30)])
def test_queries_one_half_of_which_is_zero_or_far_away(guarded, layout, latent, rope):
    """The power of two of a half without numbers must not lead the other's out of float32."""
    step = build_step(StepCase((1,), (70,)), layout, dtype=torch.bfloat16)
    q = step.q.clone()
    q[..., :512] *= latent
    q[..., 512:] *= rope
    step = dataclasses.replace(step, q=q, sm_scale=step.sm_scale / max(latent, rope, 1e-30))
    assert_agrees(step, run_mixed(guarded, step))


@pytest.mark.parametrize("ratio", [1e5, 1e10, 1e12])
def test_weights_lose_what_lies_2_to_the_39_below_the_largest(guarded, ratio):
    """An attention sink with a large sigma starves the others' float16 weights. A weight p * sigma is rounded by 2^-11
    of itself or, if that is more, by 2^-39 of the row's largest: docs/limitations.md. Where the sink's own values are
    0, a ratio of 1e5 shows nothing and one of 1e12 leaves little."""
    step = build_step(StepCase((1,), (70,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    latent = torch.randn(70, 512, generator=torch.Generator().manual_seed(3)) * 1e-6
    latent[0] *= ratio
    latent[0, 256:] = 0
    made = step.layout.quantize(latent, torch.zeros(70, 64))
    step = with_rows(step, [latent], [torch.zeros(70, 64)])
    step = dataclasses.replace(step, q=torch.zeros_like(step.q))  # each key has the weight 1 / 70
    out, lse = run_mixed(guarded, step)
    want, want_lse = step.dense_attention()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    weights = made.scales.double()[:, 0] / 70  # [70]
    lost = torch.maximum(2.0**-11 * weights, 2.0**-39 * weights.max())
    codes = (step.rows[0][:, :512] / made.scales.double()).abs()
    assert bool(((out.double() - want).abs() <= 1.01 * (lost @ codes)).all())
    silent = (out.double() - want)[..., 256:].norm() / want[..., 256:].norm()
    assert silent < 4e-3 if ratio == 1e5 else silent > (4e-3 if ratio == 1e10 else 0.5)


def test_tokens_of_very_different_size(guarded):
    """A token of size 1e4 that gets little weight and tokens of size 1e-2 that get most of it, both must count."""
    step = build_step(StepCase((1,), (70,), heads=1), "fp8_rope_bf16", dtype=torch.bfloat16)
    latent = torch.randn(70, 512, generator=torch.Generator().manual_seed(5)) * 1e-2
    latent[3] *= 1e6
    made = step.layout.quantize(latent, torch.zeros(70, 64))
    rows = step.layout.dequantize(made.values, made.scales, torch.float64)
    q = torch.zeros_like(step.q)
    q[..., :512] = (latent[7] * 1e4 - latent[3] * 1e-7).to(q.dtype)
    token = torch.arange(70)
    page = step.values.lookup_table[0, token // 16].long()
    scale_page = step.values.scales_lookup_table[0, token // 16].long()
    raw_view(step.values.kv_blocks)[page, 0, step.layer, token % 16, 0] = raw_view(made.values)
    step.values.kv_scales[scale_page, 0, step.layer, token % 16, 0] = made.scales
    step = dataclasses.replace(step, q=q, rows=[rows])
    assert_agrees(step, run_mixed(guarded, step), out_bound=1e-3)


def test_weights_of_sparse_attention_by_hand(guarded):
    """aiter#5535: logits 0 once and -7 for 2047 keys, V = 1: weights cast without rescaling gave 0.35 instead of 1."""
    step = build_step(StepCase((1,), (2048,), page_size=64, heads=1), "fp8_rope_bf16", dtype=torch.bfloat16)
    rope = torch.zeros(2048, 64)
    rope[1:, 0] = -7.0
    made = step.layout.quantize(torch.ones(2048, 512), rope)
    token = torch.arange(2048)
    page, scale_page = (
        table[0, token // 64].long() for table in (step.values.lookup_table, step.values.scales_lookup_table)
    )
    raw_view(step.values.kv_blocks)[page, 0, step.layer, token % 64, 0] = raw_view(made.values)
    step.values.kv_scales[scale_page, 0, step.layer, token % 64, 0] = made.scales
    q = torch.zeros_like(step.q)
    q[..., 512] = 1.0
    out, lse = run_mixed(guarded, dataclasses.replace(step, q=q, sm_scale=1.0))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-3, atol=0)
    torch.testing.assert_close(lse, torch.tensor(1 + 2047 * torch.e**-7).log().expand_as(lse), rtol=1e-6, atol=1e-5)


def test_requests_without_keys_and_padding_rows(guarded):
    """vllm#35969, FlashMLA#11, and flashinfer#868, which gave garbage: length 0 with a table of -1 between live
    requests, and query tokens nobody owns."""
    step = build_step(StepCase((1, 1, 1), (0, 33, 0)), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert step.values.cache_lengths[0].item() == -1
    out, lse = run_mixed(guarded, step, padding=20)
    assert_agrees(step, (out[:3], lse[:3]))
    assert bool((out[3:] == 0).all())
    assert bool((lse[3:] == -INF).all())


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_flat-g128", "bf16"])
@pytest.mark.parametrize("half", ["latent", "rope"])
def test_where_nan_of_a_live_token_goes(guarded, layout, half):
    """Request 0 has three query tokens in one tile of rows, and its last token, which the third alone sees, holds NaN.
    In the latent it is a value too, and 0 * NaN is NaN: the outputs of the tile's other rows are lost, their lse isn't.
    In the rope it reaches the third alone. Request 1 doesn't change by a bit."""
    step = build_step(StepCase((3, 2), (70, 66), heads=2), layout, dtype=torch.bfloat16)
    want = run_mixed(guarded, step)
    _poison(step, 69, half)
    out, lse = run_mixed(guarded, step)
    assert bool(out[2].isnan().all() if half == "rope" else out[2, :, 7].isnan().all())
    assert bool(lse[2].isnan().all())
    assert torch.equal(lse[:2], want[1][:2])
    if half == "latent":
        assert bool(out[:2, :, 7].isnan().all())
        assert torch.equal(out[:2, :, 8:], want[0][:2, :, 8:])  # columns that hold numbers
    else:
        assert torch.equal(out[:2], want[0][:2])
    for got, expected in zip((out, lse), want):
        assert torch.equal(got[3:], expected[3:])


def test_nan_behind_a_tile_of_keys_stays_there(guarded):
    """80 query tokens of one head are two tiles of rows over 80 keys. The first sees 64 keys and reads one tile of
    them; NaN in the second tile of keys isn't read for it."""
    step = build_step(StepCase((80,), (80,), heads=1), "fp8_rope_bf16", dtype=torch.bfloat16)
    want = run_mixed(guarded, step)
    _poison(step, 64, "latent")
    out, lse = run_mixed(guarded, step)
    assert torch.equal(out[:64], want[0][:64])
    assert torch.equal(lse[:64], want[1][:64])
    assert bool(out[64:, :, 7].isnan().all())


def _poison(step, token, half):
    """NaN into column 7 of one half of a token of request 0."""
    page = int(step.values.lookup_table[0, token // 16])
    row = raw_view(step.values.kv_blocks)[page, 0, step.layer, token % 16, 0]
    bytes_of = row.view(torch.uint8)
    if step.layout.name == "bf16":
        first, size = (7 if half == "latent" else 519) * 2, 2
    elif half == "latent":
        first, size = 7, 1
    else:
        first, size = (519, 1) if step.layout.name == "fp8_flat" else (512 + 14, 2)
    bytes_of[first : first + size] = torch.tensor([0xC1, 0x7F][-size:] if size == 2 else [0x7F], dtype=torch.uint8)


def test_causal_rows_that_see_nothing(guarded):
    """vllm#45227: two query tokens, one key: the first sees nothing."""
    step = build_step(StepCase((2, 2), (1, 2)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_mixed(guarded, step)
    assert bool((lse[0] == -INF).all())
    assert_agrees(step, (out, lse))


def test_a_step_without_requests(guarded):
    """sglang#39899: an idle data-parallel rank."""
    step = build_step(StepCase((), ()), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_mixed(guarded, step, padding=2)
    assert bool((out == 0).all())
    assert bool((lse == -INF).all())


@pytest.mark.parametrize("q_lens", [(0, 0), (0, 2, 0)])
def test_steps_without_tokens(guarded, q_lens):
    step = build_step(StepCase(q_lens, tuple(17 if q else 0 for q in q_lens)), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_agrees(step, run_mixed(guarded, step))


def test_seventy_thousand_rows_stay_on_the_first_axis(guarded, monkeypatch):
    """FlashMLA#182: more than 65,535 blocks on the second axis launch nothing, silently."""
    from pagedmla.triton_kernels import mixed

    grids = []
    monkeypatch.setattr(mixed, "launch", lambda kernel, grid, *args, **kwargs: grids.append(grid))
    step = build_step(StepCase((1,), (1,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    q = torch.empty((70_000, 128, 576), dtype=torch.bfloat16, device="meta")
    requests = torch.empty(70_000, dtype=torch.int32, device="meta")
    starts = torch.empty(70_001, dtype=torch.int32, device="meta")
    table = torch.empty((70_000, 1), dtype=torch.int32, device="meta")
    planes = planes_of(guarded, step)
    planes = dataclasses.replace(
        planes, latent=planes.latent.to("meta"), rope=planes.rope.to("meta"), scales=planes.scales.to("meta")
    )
    out = torch.empty((70_000, 128, 512), device="meta")
    lse = torch.empty((70_000, 128), device="meta")
    attend_mixed(q, planes, table, requests, starts, out, lse, sm_scale=1.0, max_query_len=1)
    ((tiles,),) = grids
    assert tiles >= 70_000 * 128 // 64


def test_offsets_beyond_two_to_the_31(guarded):
    """vllm#47671, flashinfer#3130: page * stride wraps in 32 bits. Pages 2^24 elements apart, number 200 used."""
    step = build_step(StepCase((1,), (16,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    planes = planes_of(guarded, step)
    stride, page = 1 << 24, 200
    memory = torch.empty(stride * page + 16 * 640, dtype=torch.uint8)  # touched only at its end
    live = raw_view(step.values.kv_blocks)[step.values.lookup_table[0, 0].long(), 0, step.layer, :, 0]
    memory[stride * page :].copy_(live.reshape(-1).view(torch.uint8))
    rows = memory.as_strided((page + 1, 16, 640), (stride, 640, 1))
    planes = dataclasses.replace(
        planes,
        latent=rows[..., :512].view(torch.float8_e4m3fn),
        rope=memory.view(torch.bfloat16).as_strided((page + 1, 16, 64), (stride // 2, 320, 1), 256),
    )
    out, lse = results(guarded, step, torch.float32)
    attend_mixed(
        step.q, planes, as_table(torch.tensor([[page]])), step.values.cache_lengths, step.query_start_loc, out, lse,
        step.values.scales_lookup_table, sm_scale=step.sm_scale, max_query_len=1,
    )  # fmt: skip
    assert_agrees(step, (out, lse))


def test_one_scale_for_the_tensor(guarded):
    """A per-tensor sigma is a pool with strides 0: the same address for every token and group."""
    step = build_step(StepCase((2,), (21,)), "fp8_flat", dtype=torch.bfloat16)
    sigma = torch.tensor(0.375)
    scales = per_tensor_scale(sigma, step.values.kv_blocks)
    bound = PagedTensor.bind(step.values.kv_blocks, "kv_blocks")
    planes = step.layout.planes(bound, PagedTensor.bind(scales, "kv_scales"), step.layer)
    page = step.values.lookup_table[0, torch.arange(21) // 16].long()
    codes = step.values.kv_blocks.view(torch.uint8)[page, 0, step.layer, torch.arange(21) % 16, 0]
    rows = codes.view(torch.float8_e4m3fn).double() * 0.375
    out, lse = results(guarded, step, torch.float32)
    attend_mixed(
        step.q, planes, step.values.lookup_table, step.values.cache_lengths, step.query_start_loc, out, lse,
        sm_scale=1e-4, max_query_len=2,
    )  # fmt: skip
    assert_agrees(dataclasses.replace(step, rows=[rows], sm_scale=1e-4), (out, lse))


def test_strided_tables(guarded):
    """flashinfer#3915: tables of odd widths, cut out of wider ones."""
    step = build_step(StepCase((1, 1), (33, 20)), "fp8_rope_bf16", dtype=torch.bfloat16)
    wide = torch.full((2, 9), -1, dtype=torch.int32)
    wide[:, :5] = step.values.lookup_table[:, :5]
    assert_agrees(step, run_mixed(guarded, with_values(step, lookup_table=wide[:, :5])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 129}, "q: expected 1 to 128 heads"),
        ({"page_size": 3}, "planes.latent: expected a page size that is a power of two or a multiple of 16"),
        ({"dtype": torch.float32}, "q: expected bfloat16 or float16 for an FP8 cache; got float32"),
    ],
)
def test_refusals_name_what_they_refuse(guarded, change, message):
    dtype = change.pop("dtype", torch.bfloat16)
    step = build_step(StepCase((1,), (5,), **change), "fp8_rope_bf16", dtype=dtype)
    with pytest.raises(ValueError, match=message):
        run_mixed(guarded, step)
