"""The executable model of the CUTLASS kernel against float64 attention on the quantised cache.

Its grids are the peers' (tests/cases/grids.py) where the kernel takes their page size, all of them poisoned: table
columns that aren't in use hold a wild id, every byte that isn't a live token's is NaN. Bounds on the fp8 forms' errors
hold from 512 keys on; short contexts belong to the fp16 form, which is held to the bf16 output's rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import grids
from cases.steps import LAYOUTS, Step, StepCase, build_step, with_values
from torch import Tensor

from pagedmla.cutlass_kernels import model, schedule
from pagedmla.cutlass_kernels.tiles import Shape
from pagedmla.cutlass_kernels.variants import PAGE_SIZES, CombineVariant, Variant, box_for
from pagedmla.plugin.step import bind_step

ROPE_OF = {"fp8_rope_bf16": "bf16", "fp8_rope_bf16_prescaled": "scaled_bf16", "fp8_flat": "e4m3"}
FORMS = [("fp8", 1), ("fp8", 2), ("fp16", 1)]


def variant_for(
    layout: str, page_size: int, rows: int = 16, form: tuple[str, int] = ("fp16", 1), cluster: int = 1
) -> Variant:
    return Variant(Shape(rows, *form, ROPE_OF[layout]), cluster, box_for(page_size, cluster))


def run(step: Step, variant: Variant, **kwargs: object) -> tuple[Tensor, Tensor]:
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    planes = bound.layout.planes(bound.cache.value_pool, bound.cache.scale_pool, bound.layer)
    return model.attend(
        step.q,
        planes,
        step.values.lookup_table,
        step.values.cache_lengths,
        step.query_start_loc,
        sm_scale=step.sm_scale,
        variant=variant,
        causal=step.case.causal,
        scales_lookup_table=step.values.scales_lookup_table,
        **kwargs,
    )


def errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(relative L2 of out, largest absolute error of lse) over rows that see a key; the others must match exactly."""
    (out, lse), (want_out, want_lse) = got, want
    live = want_lse != -torch.inf
    assert torch.equal(lse == -torch.inf, ~live)
    assert bool((out[~live] == 0).all())
    if not bool(live.any()):
        return 0.0, 0.0
    gap = (out.double() - want_out)[live].norm() / want_out[live].norm()
    return float(gap), float((lse.double() - want_lse)[live].abs().max())


def assert_exact_form(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """fp16: P is rounded to 11 bits, the output to bf16's 8; nothing else is but float32 sums."""
    out_error, lse_error = errors(got, want)
    assert out_error <= 3e-3
    assert lse_error <= 1e-4


PEERS = [case for case in grids.ALL if case.page_size in PAGE_SIZES and case.q_lens]


@pytest.mark.parametrize("case", PEERS, ids=str)
def test_peers_grids(case: StepCase) -> None:
    step = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    assert_exact_form(run(step, variant_for("fp8_rope_bf16", case.page_size)), step.dense_attention())


@pytest.mark.parametrize("layout", ROPE_OF)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}x{form[1]}")
@pytest.mark.parametrize(("rows", "cluster"), [(16, 1), (32, 1), (64, 1), (64, 2)])
def test_every_form_and_width(layout: str, form: tuple[str, int], rows: int, cluster: int) -> None:
    """Rows on both sides of a tile (48 and 12 of them), scales through their own table."""
    case = StepCase((3, 1), (515, 640), page_size=32, heads=16)
    step = build_step(case, LAYOUTS[layout], dtype=torch.bfloat16)
    out_error, lse_error = errors(
        run(step, variant_for(layout, 32, rows, form, cluster=cluster)), step.dense_attention()
    )
    out_bound, lse_bound = {("fp8", 1): (5e-2, 4e-2), ("fp8", 2): (2.5e-2, 1e-2), ("fp16", 1): (3e-3, 1e-4)}[form]
    assert out_error <= out_bound
    assert lse_error <= lse_bound


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 255, 257])
def test_page_sizes(page_size: int, kv_len: int) -> None:
    case = StepCase((1,), (kv_len,), page_size=page_size, heads=3)
    step = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    assert_exact_form(run(step, variant_for("fp8_rope_bf16", page_size)), step.dense_attention())


@pytest.mark.parametrize("heads", [1, 3, 12, 16, 63, 96, 128])
def test_head_counts(heads: int) -> None:
    """Head counts that don't divide a tile: rows of two tokens meet in one."""
    step = build_step(StepCase((2,), (70,), page_size=64, heads=heads), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    variant = variant_for("fp8_rope_bf16", 64, 64, cluster=2 if heads > 64 else 1)
    assert_exact_form(run(step, variant), step.dense_attention())


@pytest.mark.parametrize("partitions", [1, 2, 5, 32])
@pytest.mark.parametrize("workers", [1, 7, 132])
def test_splits_change_nothing(partitions: int, workers: int) -> None:
    """From one worker for all to 132 for a dozen tiles, most of which get nothing."""
    case = StepCase((1, 1, 2, 1), (300, 0, 9, 449), page_size=16, heads=5)
    step = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    got = run(step, variant_for("fp8_rope_bf16", 16), num_partitions=partitions, workers=workers)
    assert_exact_form(got, step.dense_attention())


@pytest.mark.parametrize("deviation", [0.5, 1.7, 3.4, 5.0])
@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1.0, 1e4])
@pytest.mark.parametrize("terms", [1, 2])
def test_fp8_error_at_every_range(deviation: float, magnitude: float, terms: int) -> None:
    case = StepCase((1,), (1024,), page_size=64, heads=16, magnitude=magnitude)
    made = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.float32)
    step = replace(made, q=(made.q * deviation).to(torch.bfloat16))
    variant = variant_for("fp8_rope_bf16", 64, 16, ("fp8", terms))
    out_error, lse_error = errors(run(step, variant), step.dense_attention())
    if terms == 2:
        assert out_error <= 2.5e-2
        assert lse_error <= 1e-2
    elif deviation <= 1.7:
        assert out_error <= 5e-2
        assert lse_error <= 4e-2
    else:  # one term isn't meant for logits this sharp: it must stay sane
        assert out_error <= 0.2


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}x{form[1]}")
def test_one_high_logit_and_many_low_ones(form: tuple[str, int]) -> None:
    """aiter#5535: logits 0 once and -7 x 2047 with V = 1 gave 0.35 where P was cast to e4m3 without a scale a tile."""
    case = StepCase((1,), (2048,), page_size=64, heads=1)
    step = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    rope = torch.full((2048, 64), -7.0)
    rope[0] = 0.0
    made = LAYOUTS["fp8_rope_bf16"].quantize(torch.ones(2048, 512), rope)
    values, scales = step.values.kv_blocks, step.values.kv_scales
    assert scales is not None
    assert made.scales is not None
    table, scales_table = step.values.lookup_table, step.values.scales_lookup_table
    assert scales_table is not None
    for column in range(32):
        part = slice(column * 64, column * 64 + 64)
        values[int(table[0, column]), 0, step.layer, :, 0].view(torch.uint8)[:] = made.values[part].view(torch.uint8)
        scales[int(scales_table[0, column]), 0, step.layer, :, 0] = made.scales[part]
    q = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    q[..., 512:] = 1 / 64
    out, _ = run(replace(step, q=q, sm_scale=1.0), variant_for("fp8_rope_bf16", 64, 16, form))
    assert float((out.float() - 1).abs().max()) <= 0.01


def test_idle_rank() -> None:
    step = build_step(StepCase((), (), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    out, lse = run(step, variant_for("fp8_rope_bf16", 16))
    assert out.shape == (0, 2, 512)
    assert lse.shape == (0, 2)


def test_rows_behind_the_last_request_are_empty() -> None:
    """A captured graph pads q: rows past query_start_loc[-1] get out 0 and lse -inf, whatever they hold."""
    step = build_step(StepCase((1, 1), (70, 3), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    padded = replace(step, q=torch.cat((step.q, torch.full((3, 2, 576), torch.nan, dtype=torch.bfloat16))))
    out, lse = run(padded, variant_for("fp8_rope_bf16", 16))
    assert_exact_form((out[:2], lse[:2]), step.dense_attention())
    assert bool((out[2:] == 0).all())
    assert bool((lse[2:] == -torch.inf).all())


def test_nan_stays_with_its_token() -> None:
    """A live token whose latent is NaN spoils the requests that read it and no other."""
    step = build_step(StepCase((1, 1), (70, 70), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    page = int(step.values.lookup_table[0, 1])
    step.values.kv_blocks.view(torch.uint8)[page, 0, step.layer, 5, 0, :512] = 0x7F
    out, lse = run(step, variant_for("fp8_rope_bf16", 16, 16, ("fp8", 1)))
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}x{form[1]}")
@pytest.mark.parametrize("where", ["query", "only key", "sigma"])
def test_nan_is_not_an_empty_row(where: str, form: tuple[str, int]) -> None:
    """A row all of whose scores are NaN came out as out 0, lse -inf: maxima pass over NaN. A NaN sigma became tiny."""
    kv_len = 1 if where == "only key" else 70
    step = build_step(
        StepCase((1, 1), (kv_len, 70), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16
    )
    page, slot = divmod(0 if where == "only key" else 20, 16)
    assert step.values.kv_scales is not None
    assert step.values.scales_lookup_table is not None
    if where == "query":
        step.q[0] = torch.nan
    elif where == "sigma":
        step.values.kv_scales[int(step.values.scales_lookup_table[0, page]), 0, step.layer, slot] = torch.nan
    else:
        row = step.values.kv_blocks.view(torch.uint8)[int(step.values.lookup_table[0, page]), 0, step.layer, slot, 0]
        row[:512] = 0x7F
    out, lse = run(step, variant_for("fp8_rope_bf16", 16, 16, form))
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all())
    assert bool(lse[1].isfinite().all())


def test_one_scale_for_the_tensor() -> None:
    """fp8_flat with a stride-0 scale plane, and a table entry that must not matter."""
    step = build_step(StepCase((1,), (200,), page_size=64, heads=4), LAYOUTS["fp8_flat"], dtype=torch.bfloat16)
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    planes = bound.layout.planes(bound.cache.value_pool, bound.cache.scale_pool, bound.layer)
    sigma = torch.tensor(0.02)
    planes = replace(planes, scales=sigma.expand(planes.latent.shape[0], 64, 1))
    table = step.values.lookup_table
    codes = torch.cat(
        [
            torch.cat((planes.latent[page], planes.rope[page]), -1)[: min(64, 200 - 64 * column)]
            for column, page in enumerate(table[0, :4].tolist())
        ]
    )
    rows = codes.float().double() * float(sigma)
    logits = step.sm_scale * step.q[0].double() @ rows.T
    got = model.attend(
        step.q,
        planes,
        table,
        step.values.cache_lengths,
        step.query_start_loc,
        sm_scale=step.sm_scale,
        variant=variant_for("fp8_flat", 64),
    )
    assert_exact_form(got, ((logits.softmax(-1) @ rows[:, :512])[None], logits.logsumexp(-1)[None]))


def test_strides_are_read() -> None:
    """A padded pool and a table that is a slice of a wider one give the same bytes."""
    case = StepCase((1, 2), (130, 65), page_size=16, heads=2)
    step = build_step(case, LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    blocks = step.values.kv_blocks
    padded = torch.full((*blocks.shape[:5], blocks.shape[5] + 16), 0xFF, dtype=torch.uint8).view(blocks.dtype)
    padded.view(torch.uint8)[..., : blocks.shape[5]] = blocks.view(torch.uint8)
    wide = torch.full((2, 40), -5, dtype=torch.int32)
    wide[:, : step.values.lookup_table.shape[1]] = step.values.lookup_table
    other = with_values(
        step, kv_blocks=padded[..., : blocks.shape[5]], lookup_table=wide[:, : step.values.lookup_table.shape[1]]
    )
    variant = variant_for("fp8_rope_bf16", 16)
    for ours, theirs in zip(run(other, variant), run(step, variant), strict=True):
        assert torch.equal(ours, theirs)


def test_hoppers_sums_stay_within_the_bound() -> None:
    """14-bit sums inside a WGMMA, promoted for every tile, cost little beside e4m3 itself."""
    step = build_step(StepCase((1,), (640,), page_size=64, heads=16), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    variant = variant_for("fp8_rope_bf16", 64, 16, ("fp8", 2))
    out_error, lse_error = errors(run(step, variant, accumulation_bits=14), step.dense_attention())
    assert out_error <= 2.5e-2
    assert lse_error <= 1e-2


@pytest.mark.parametrize("layout", ROPE_OF)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [16, 64])
def test_hoppers_sums_keep_a_large_rope(rows: int, terms: int, layout: str) -> None:
    """What is added to an fp8 sum first is cut to its 14 bits by every product after it: rope and high term come last.

    With the rope in front LSE moved by 0.03 nats here, with the terms in turns by 0.006.
    """
    step = build_step(StepCase((1,) * 4, (1,) * 4, heads=16, name="one-key"), LAYOUTS[layout], dtype=torch.bfloat16)
    step.q[..., 512:] *= 24
    variant = variant_for(layout, step.case.page_size, rows, ("fp8", terms))
    (_, exact), (_, cut) = run(step, variant), run(step, variant, accumulation_bits=14)
    assert float(exact.abs().max()) > 20
    assert float((exact - cut).abs().max()) < 0.005


def test_refuses_what_the_kernel_doesnt_take() -> None:
    step = build_step(StepCase((1,), (20,), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="planes: expected pages of 64 or 128 or 256"):
        run(step, variant_for("fp8_rope_bf16", 64))
    with pytest.raises(ValueError, match=r"planes\.rope: expected .* e4m3 for mla_decode_fp8_flat"):
        run(step, variant_for("fp8_flat", 16))
    grouped = build_step(StepCase((1,), (20,), page_size=16, heads=2), LAYOUTS["fp8_flat-g128"], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"planes\.scales: expected \[\*, 16, 1\] float32"):
        run(grouped, variant_for("fp8_flat", 16))


@pytest.mark.parametrize("deviation", [3.4, 5.0])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("layout", ROPE_OF)
def test_sharp_logits_in_hopper_sums(layout: str, rows: int, deviation: float) -> None:
    """Two terms in sums of 14 bits: in one sum over all columns LSE was off by 0.013, with an e4m3 rope by 0.018."""
    made = build_step(StepCase((1,), (512,), page_size=64, heads=rows), LAYOUTS[layout], dtype=torch.float32)
    step = replace(made, q=(made.q * deviation).to(torch.bfloat16))
    variant = variant_for(layout, 64, rows, ("fp8", 2))
    out_error, lse_error = errors(run(step, variant, accumulation_bits=14), step.dense_attention())
    assert out_error <= 2.5e-2
    assert lse_error <= 1e-2


def test_q_terms_add_up_to_q() -> None:
    """Two e4m3 terms of one scale hold q to 2^-8 of itself or 2^-10 of the scale."""
    x = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32) * 100
    high, low = (model.emulation.E4M3[code] for code in model._e4m3_terms(x, 2))
    assert np.all(np.abs(high + low - x) <= np.maximum(np.abs(x) * 2.0**-8, 2.0**-10))


# -- merge -------------------------------------------------------------------------------------------------------------


def merged(*pieces: tuple[float, float]) -> tuple[float, float]:
    """(out, lse) of a row, the same in all columns, from (out, lse) of its pieces; all else is NaN, as on a device."""
    results = model._Results(2, workers=len(pieces) + 3, tile_rows=2)
    for number, (out, lse) in enumerate(pieces):
        rows, at = np.array([1]), schedule.partial_row(number + 2, number, 0, 2, 1) + 1
        results.store(rows, at, number, len(pieces), np.full((1, 512), out, np.float32), np.full(1, lse, np.float32))
    out_rows, lse_rows = results.merge()
    assert np.array_equal(out_rows[1], np.full(512, out_rows[1, 0]), equal_nan=True)
    return float(out_rows[1, 0]), float(lse_rows[1])


BIG = 2.0**26  # one more or less is lost beside it


@pytest.mark.parametrize(
    ("outs", "sum_of_outs"),
    [
        ([BIG, -BIG, 1.0], 1.0),  # in order: 1 comes after what would have lost it
        ([BIG, 1.0, -BIG], 0.0),
        ([BIG, -BIG, 1.0, *[0.0] * 13], 1.0),  # 16 pieces: a warp, still in order
        ([BIG, *[0.0] * 8, 1.0, *[0.0] * 5, -BIG], 0.0),
        ([BIG, -BIG, *[0.0] * 14, 1.0], 0.0),  # 17: all warps. Piece 16 is warp 0's second: lost there
        ([BIG, 1.0, *[0.0] * 14, -BIG], 1.0),  # 0 and 16 cancel within warp 0
        ([BIG, -BIG, *[0.0] * 15, 1.0], 0.0),  # piece 17 is warp 1's second
        ([BIG, -BIG, *[0.0] * 16, 1.0], 1.0),  # piece 18 is warp 2's: warps are added in order
        ([BIG, 0.0, 1.0, *[0.0] * 16, -BIG], 0.0),  # piece 19 is warp 3's
        ([0.0] * 131 + [132.0], 132.0),
    ],
)
def test_order_of_the_merge(outs: list[float], sum_of_outs: float) -> None:
    """By hand: pieces of equal weight whose sum depends on its order."""
    out, lse = merged(*((value, 0.0) for value in outs))
    assert out == pytest.approx(sum_of_outs / len(outs), rel=1e-6)
    assert lse == pytest.approx(np.log(len(outs)), rel=1e-6)


@pytest.mark.parametrize("more", [0, 8, 40], ids=lambda more: f"{more} more pieces")
def test_what_a_merge_makes_of_empty_and_nan_pieces(more: int) -> None:
    """The merge took a row for empty by its largest LSE, which passes over NaN: a row whose pieces were all NaN got
    lse -inf. An empty piece may hold anything, NaN too, and counts for nothing."""
    nan, none, tail = np.nan, -np.inf, [(np.nan, -np.inf)] * more
    assert merged((3.0, 1.0), (nan, none), *tail) == pytest.approx((3.0, 1.0))
    assert merged((nan, none), (5.0, -200.0), *tail) == pytest.approx((5.0, -200.0))
    assert merged((2.0, 80.0), (nan, -80.0), *tail) == pytest.approx((2.0, 80.0))  # its weight underflows
    assert merged((nan, none), (nan, none), *tail) == (0.0, none)
    for spoiled in [((nan, nan), (nan, nan)), ((1.0, 0.0), (nan, nan)), ((nan, none), (nan, nan))]:
        assert all(np.isnan(value) for value in merged(*spoiled, *tail))


@pytest.mark.parametrize("rows", [1, 16, 66, 67, 512, 16384, 40001])
def test_every_quarter_row_is_one_lanes_of_one_cta(rows: int) -> None:
    """From fewer quarter rows than CTAs to more than their threads; a request's 64 go to 64 CTAs where there are 64."""
    merge = CombineVariant()
    quarters = rows * merge.parts
    ctas = min(quarters, 264)
    warps, lanes = np.arange(merge.warps)[:, None], np.arange(32)
    seen, held = np.zeros((rows, merge.parts), np.int64), []
    for block in range(ctas):
        looked_at = [merge.quarter(first, warps, lanes, ctas) for first in range(block, quarters, ctas * merge.threads)]
        mine = np.concatenate([each[each < quarters] for each in looked_at])
        np.add.at(seen, (merge.row(mine), merge.column(mine, 0) // 128), 1)
        held.append(len(np.unique(mine)))
    assert np.array_equal(seen, np.ones_like(seen))
    assert max(held) - min(held) <= 1


def test_every_column_and_piece_is_one_lanes() -> None:
    merge = CombineVariant()
    columns = merge.column(np.arange(4)[:, None], np.arange(32)).ravel()
    assert columns.tolist() == list(range(0, 512, 4))
    by_all = merge.piece(np.arange(merge.warps), merge.warps, np.arange(merge.loads)[:, None])
    assert sorted(by_all.ravel().tolist()) == list(range(merge.pieces))
    assert max(merge.alone) <= 16  # lanes that hold the pieces' LSEs
    assert merge.pieces <= merge.lses <= merge.threads


def test_a_merge_reads_no_further_than_a_rows_pieces() -> None:
    """One row of two pieces, one of twelve that begins at the same worker, one uncut: what isn't theirs is NaN."""
    results = model._Results(3, workers=14, tile_rows=1)
    for row, first, pieces in ((0, 0, 2), (1, 1, 12), (2, 12, 1)):
        for piece in range(pieces):
            out, lse = np.full((1, 512), row + 1.0), np.zeros(1, np.float32)
            at = schedule.partial_row(first + piece, piece, 0, 1, 1)
            results.store(np.array([row]), at, piece, pieces, out, lse)
    out, lse = results.merge()
    assert np.allclose(out, np.array([1.0, 2.0, 3.0])[:, None])
    assert np.allclose(lse, np.log([2.0, 12.0, 1.0]))


def test_a_nan_row_that_is_cut_is_nan() -> None:
    """A query of NaN in a step that is cut: its pieces are all NaN, which isn't empty. The other row is whole."""
    step = build_step(
        StepCase((1, 1), (1216, 1200), page_size=16, heads=2), LAYOUTS["fp8_rope_bf16"], dtype=torch.bfloat16
    )
    step.q[0, 1] = torch.nan
    for partitions in (3, 19):  # merged by a warp, by all
        out, lse = run(step, variant_for("fp8_rope_bf16", 16), num_partitions=partitions, workers=132)
        assert bool(out[0, 1].isnan().all())
        assert bool(lse[0, 1].isnan())
        assert bool(out[1].isfinite().all() and lse[1].isfinite().all())
