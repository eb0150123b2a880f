"""Decode, judged by float64 and by agreement with mixed; what both share is tested in test_mixed.py.

Grid: one query token and several; 16, 17 and 80 rows fill a tile of rows, overflow the smallest, and need two; 63,
64, 65 keys.
"""

from __future__ import annotations

import pytest
import torch
from cases.attending import INF, assert_agrees, run_decode, run_mixed
from cases.steps import StepCase, build_step, with_values

from pagedmla.hardware.targets import TARGETS
from pagedmla.triton_kernels.variants import BUDGETED, KINDS, LAYOUTS, SERVED, attention_variants


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


def test_padding_rows(guarded):
    """vllm#35969: captured graphs replay rows of length 0, whose table rows hold -1."""
    step = build_step(StepCase((1, 1, 1), (130, 0, 5)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_decode(guarded, step)
    assert bool((lse[1] == -INF).all())
    assert_agrees(step, (out, lse))


def test_ragged_steps_are_refused(guarded):
    step = build_step(StepCase((2, 1), (5, 5)), "fp8_rope_bf16", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected a multiple of 2 query tokens"):
        run_decode(guarded, step)


def test_a_step_without_requests(guarded):
    """sglang#39899: an idle data-parallel rank."""
    step = build_step(StepCase((), ()), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = run_decode(guarded, step)
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))


def test_tokens_without_requests_are_refused(guarded):
    """Query tokens beside an empty cache_lengths were divided among no requests: ZeroDivisionError."""
    step = build_step(StepCase((1,), (5,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    nobody = with_values(
        step,
        cache_lengths=step.values.cache_lengths[:0],
        lookup_table=step.values.lookup_table[:0],
        scales_lookup_table=step.values.scales_lookup_table[:0],
    )
    with pytest.raises(
        ValueError, match=r"q: expected no query tokens, since cache_lengths has no requests; got \[1, 2"
    ):
        run_decode(guarded, nobody)


@pytest.mark.parametrize("run", [run_decode, run_mixed])
@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_lengths_that_are_no_vector(guarded, run, shape):
    """Lengths of another rank were refused for not being `[-1]`, a shape that nothing has."""
    step = build_step(StepCase((1,), (5,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    lengths = step.values.cache_lengths.view(shape)
    got = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=rf"cache_lengths: expected \[\*\] int32 or uint32; got {got} int32"):
        run(guarded, with_values(step, cache_lengths=lengths))


def test_every_kind_of_layout_has_variants_for_every_target():
    foreseen = {(variant.targets[0], variant.layout, variant.kernel) for variant in attention_variants()}
    assert foreseen == {
        *((target, layout, "pieces") for target in TARGETS for layout, _ in KINDS),
        *((BUDGETED, layout, "pieces") for layout, _ in LAYOUTS),
        *((target, layout, kernel) for target in TARGETS for layout, _ in SERVED for kernel in ("decode", "mixed")),
    }
