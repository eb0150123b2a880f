"""The executable model over caches that lie as engines lay them, and the launcher over the same.

Grid: gaps behind slots, layers and pages (each alone in one case, all in another), scales in pools of their own under
ids of their own, and scales in the pages of their values; the smallest page, one that a tile takes whole, one that
two share; every layout, and a form of each precision. Requests end inside a page and at the end of one. Gaps are NaN.
"""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest
import torch
from cases.padded import GAPS, Gaps, laid_out
from cases.steps import Step, StepCase, build_step, with_rows
from torch import Tensor

import pagedmla
from pagedmla.cutlass_kernels.arguments import DECODE, FLOAT32, INT32, INT64, MAP, POINTER, offsets
from pagedmla.cutlass_kernels.cubin_cache import Cubin
from pagedmla.cutlass_kernels.launch import DecodeLauncher, Workspace
from pagedmla.cutlass_kernels.variants import VARIANTS
from pagedmla.plugin.step import bind_step
from pagedmla.reference import attention

BOUNDS = {"fp8": (5e-2, 4e-2), "fp8x2": (2.5e-2, 1e-2), "fp16": (3e-3, 1e-4)}  # relative L2 of out, error of lse
SCALED_LAYOUTS = ("fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_flat")


def made(layout: str, page_size: int, gaps: Gaps, heads: int = 16) -> Step:
    case = StepCase((2, 1), (513, 640), page_size=page_size, heads=heads)
    return laid_out(build_step(case, layout, dtype=torch.bfloat16, shared_tables=gaps.inline), gaps)


def attend(step: Step, precision: str) -> tuple[Tensor, Tensor]:
    plan = pagedmla.plan(
        layout=step.layout, num_heads=step.case.heads, page_size=step.case.page_size, max_batch=4, max_tokens=8,
        max_cache_length=2048, dtype=torch.bfloat16, device="cpu", sm_scale=step.sm_scale, executor="cutlass-model",
        precision=precision,
    )  # fmt: skip
    return pagedmla.attend(step.q, step.values, step.layer, plan=plan, **step.call())  # type: ignore[arg-type]


def meant(step: Step) -> tuple[Tensor, Tensor]:
    """float64, through the same tables and strides."""
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    return attention.attend(
        step.q, bound.cache, step.layout, step.layer, step.query_start_loc,
        sm_scale=step.sm_scale, causal=step.case.causal,
    )  # fmt: skip


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
@pytest.mark.parametrize(("page_size", "precision"), [(16, "fp16"), (64, "fp8x2"), (128, "fp8")])
@pytest.mark.parametrize("gaps", GAPS, ids=str)
def test_gaps_and_inline_scales(gaps: Gaps, page_size: int, precision: str, layout: str) -> None:
    step = made(layout, page_size, gaps, heads=64 if precision == "fp8" else 16)
    own_table = step.values.scales_lookup_table
    assert (own_table is None) == gaps.inline
    if own_table is not None:
        assert not torch.equal(own_table, step.values.lookup_table)
    out, lse = attend(step, precision)
    want_out, want_lse = meant(step)
    assert float((want_lse - step.dense_attention()[1]).abs().max()) < 1e-9  # the truth found its way too
    assert float((out.double() - want_out).norm() / want_out.norm()) <= BOUNDS[precision][0]
    assert float((lse.double() - want_lse).abs().max()) <= BOUNDS[precision][1]


def test_gaps_change_no_bit() -> None:
    """Where bytes lie is nothing to the numbers."""
    plain = build_step(StepCase((2, 1), (513, 640), page_size=64, heads=16), "fp8_flat", dtype=torch.bfloat16)
    shared = build_step(plain.case, "fp8_flat", dtype=torch.bfloat16, shared_tables=True)
    expected = attend(plain, "fp8x2")
    for gaps in GAPS:
        got = attend(laid_out(shared if gaps.inline else plain, gaps), "fp8x2")
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


# -- the launcher ------------------------------------------------------------------------------------------------------

_FORMATS = {MAP: "128s", POINTER: "Q", INT32: "i", INT64: "q", FLOAT32: "f"}


def cubin(name: str, rows: int, threads: int) -> Cubin:
    """One that no driver will see: the double takes its name alone."""
    return Cubin(
        variant=name, entry=name, threads=threads, shared_bytes=1, cluster=1, rows=rows, may_start_early=False,
        source="", dsl="", sha256=sha256(b"").hexdigest(), image=b"",
    )  # fmt: skip


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("gaps", GAPS, ids=str)
def test_maps_and_strides_are_those_of_the_padded_pages(recorder, gaps: Gaps, page_size: int, layout: str) -> None:  # type: ignore[no-untyped-def]
    """By hand from the gaps: a row's stride, a page's, and where a layer begins."""
    step = made(layout, page_size, gaps)
    variant = next(v for v in VARIANTS if (v.layout, v.rows) == (layout, 16) and page_size in v.page_sizes)
    launch = DecodeLauncher(variant, recorder, 0, cubin("decode", 16, 384), cubin("combine", 4, 512), lambda: 0)
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    tokens, heads, _ = step.q.shape
    launch(
        step.q, bound.planes, step.values.lookup_table, step.values.cache_lengths, step.query_start_loc,
        torch.zeros(tokens, heads, 512, dtype=torch.bfloat16), torch.zeros(tokens, heads),
        Workspace.empty(1, tokens * heads, "cpu"), sm_scale=1.0, num_partitions=1,
        scales_lookup_table=step.values.scales_lookup_table,
    )  # fmt: skip

    row = {"fp8_flat": 576}.get(layout, 640)
    layer = page_size * (row + gaps.slot) + (4 * page_size if gaps.inline else 0) + gaps.layer
    page = 2 * layer + gaps.page
    latent, rope = recorder.encoded
    first = step.values.kv_blocks.data_ptr() + step.layer * layer
    pages = step.values.kv_blocks.shape[0]
    assert (latent.address, rope.address) == (first, first + 512)
    assert latent.strides == rope.strides == (row + gaps.slot, page)
    assert latent.dims == (512, page_size, pages)
    assert rope.dims == (row - 512, page_size, pages)

    got = {
        argument.name: struct.unpack_from("<" + _FORMATS[argument.kind], recorder.launches[0].parameters, place)[0]
        for argument, place in zip(DECODE, offsets(DECODE), strict=True)
    }
    apart = 2 * (page_size + gaps.layer // 16) + gaps.page // 16
    assert (got["stride_scale_page"], got["stride_scale_slot"]) == (page // 4 if gaps.inline else apart, 1)
    inside = first + page_size * (row + gaps.slot)
    scales = step.values.kv_scales
    assert got["scales"] == (inside if gaps.inline else scales[0, 0, step.layer].data_ptr())
    tables = step.values.lookup_table, step.values.scales_lookup_table
    assert got["lookup_table"] == tables[0].data_ptr()
    assert got["scales_lookup_table"] == (tables[0] if gaps.inline else tables[1]).data_ptr()


@pytest.mark.parametrize(("gaps", "stride"), [(Gaps(page=8), "page"), (Gaps(slot=8), "slot")], ids=str)
def test_strides_that_no_map_takes_are_refused_with_the_way_out(gaps: Gaps, stride: str) -> None:
    """Multiples of 16 bytes alone: others are Triton's, and whoever asked for this executor is told."""
    with pytest.raises(ValueError, match=rf"planes\.\w+: expected a {stride} stride that is a multiple of 16 bytes"):
        attend(made("fp8_rope_bf16", 64, gaps), "fp16")


# -- one high logit, many low ones -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
@pytest.mark.parametrize(
    ("precision", "heads"),
    [("fp8x2", 16), ("fp16", 16), ("fp8x2", 32), ("fp16", 32), ("fp8", 64), ("fp8x2", 64), ("fp8", 128)],
)
def test_one_high_logit_and_many_low_ones(precision: str, heads: int, layout: str) -> None:
    """aiter#5535: logits 0 once and -7 x 2047 with V = 1 gave 0.35 where P was cast to e4m3 without a scale a tile.

    Every form that is built, by heads that take its rows; test_model.py has three of them, at 16 rows.
    """
    case = StepCase((1,), (2048,), page_size=64, heads=heads)
    rope = torch.full((2048, 64), -7.0)
    rope[0] = 0.0
    step = with_rows(build_step(case, layout, dtype=torch.bfloat16), [torch.ones(2048, 512)], [rope])
    step.q.zero_()
    step.q[..., 512:] = 1 / (64 * step.sm_scale)
    out, lse = attend(step, precision)
    assert float((out.float() - 1).abs().max()) <= 0.01
    assert float((lse.double() - meant(step)[1]).abs().max()) <= BOUNDS[precision][1]
