"""Decode, judged by float64 and by agreement with mixed; what both share is tested in test_mixed.py.

Grid: one query token and several; 16, 17 and 80 rows fill a tile of rows, overflow the smallest, and need two; 63,
64, 65 keys.
"""

from __future__ import annotations

import pytest
import torch
from cases.attending import INF, assert_agrees, merged, run_decode, run_mixed
from cases.steps import StepCase, build_step

from pagedmla.triton_kernels.targets import TARGETS
from pagedmla.triton_kernels.variants import variants


@pytest.mark.parametrize("layout", ["bf16", "fp8_flat", "fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla"])
def test_layouts(guarded, layout):
    step = build_step(StepCase((1, 1, 1), (63, 64, 65), heads=16), layout, dtype=torch.bfloat16)
    assert_agrees(step, run_decode(guarded, step))


@pytest.mark.parametrize(("q_len", "heads"), [(1, 17), (3, 5), (2, 40)])
def test_rows_fold(guarded, q_len, heads):
    """vllm#51848: three query tokens read other requests' table rows. A request's tokens share its tile and its row."""
    step = build_step(StepCase((q_len,) * 2, (q_len + 1, 70), heads=heads), "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_agrees(step, run_decode(guarded, step))


def test_agrees_with_mixed_bit_for_bit(guarded):
    step = build_step(StepCase((2, 2), (70, 3)), "fp8_ds_mla", dtype=torch.bfloat16)
    for decoded, mixed in zip(run_decode(guarded, step), run_mixed(guarded, step)):
        assert torch.equal(decoded, mixed)


def test_splits_and_padding_rows(guarded):
    """vllm#35969: captured graphs replay rows of length 0, whose table rows hold -1."""
    step = build_step(StepCase((1, 1, 1), (130, 0, 5)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_decode(guarded, step, splits=2)
    assert bool((lse[:, 1] == -INF).all())
    assert_agrees(step, merged(out, lse))


def test_ragged_steps_are_refused(guarded):
    step = build_step(StepCase((2, 1), (5, 5)), "fp8_rope_bf16", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected a multiple of 2 query tokens"):
        run_decode(guarded, step)


def test_a_step_without_requests(guarded):
    """sglang#39899: an idle data-parallel rank."""
    step = build_step(StepCase((), ()), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_decode(guarded, step)
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))


def test_every_layout_has_variants_for_every_target():
    foreseen = {(variant.targets[0], variant.layout, variant.kernel) for variant in variants()}
    layouts = {layout for _, layout, _ in foreseen}
    assert foreseen == {
        (target, layout, kernel) for target in TARGETS for layout in layouts for kernel in ("decode", "mixed")
    }


BUDGETS = {"fp8_flat": 115, "fp8_rope_bf16": 127, "fp8_ds_mla": 130}


@pytest.mark.parametrize("layout", BUDGETS)
def test_sixteen_rows_stay_under_the_issue_limit(layout):
    """H200 at full bandwidth leaves so many issue slots a key token; vLLM's kernel needs 172 to 175 (docs/kernels)."""
    triton = pytest.importorskip("triton", reason="Triton isn't installed")
    if not triton.__version__.startswith("3.7.1"):
        pytest.skip("the figures are those of Triton 3.7.1")
    from pagedmla.triton_kernels.compile import compile_variant

    (variant,) = (
        variant
        for variant in variants(["sm_90"])
        if (variant.kernel, variant.layout, variant.rows) == ("decode", layout, 16)
        and variant.constants["PAGE_SIZE"] == 64
        and variant.constants["GROUP"] == (128 if layout == "fp8_ds_mla" else 576)
    )
    row = compile_variant(variant, "sm_90")
    assert row["warp_instructions_per_token"] < BUDGETS[layout]
    assert row["spill_words_in_loop"] == 0
