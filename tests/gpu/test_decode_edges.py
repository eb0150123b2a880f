"""The CUTLASS decode kernels on the GPU where logits are sharp, and over caches that lie as engines lay them.

What tests/cutlass_kernels/test_model.py and test_model_edges.py hold the executable model to: logits of deviation 3.4
and 5 for two terms and fp16, logits 0 once and -7 x 2047 times with V = 1 for every form, gaps behind slots, layers
and pages, and scales in their values' pages. A variant's cases are one test, uncut and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cases.decode_sm90 import assert_within, run_kernel
from cases.padded import GAPS, laid_out
from cases.steps import Step, StepCase, build_step, with_rows

from pagedmla.cutlass_kernels.cubin_cache import CubinCache
from pagedmla.cutlass_kernels.variants import VARIANTS, Variant

Note = Callable[[str, object], None]

PARTITIONS = (1, 8)
EXACT = [variant for variant in VARIANTS if (variant.shape.precision, variant.shape.terms) != ("fp8", 1)]


def name_of(variant: Variant) -> str:
    return variant.name.removeprefix("mla_decode_")


def heads_for(variant: Variant) -> int:
    return min(variant.rows, 128)


def judge(record_property: Note, variant: Variant, run: int, failures: list[str]) -> None:
    """A failure is this kernel's, and leaves the records of others alone (cases/gpu_record.py)."""
    cubin = CubinCache().find(variant.name)
    assert cubin is not None
    proof = {"variant": variant.name, "address": cubin.address, "sha256": cubin.sha256, "cases": run}
    record_property("proves", proof)
    assert run
    assert not failures, "\n".join(failures)


def assert_all_within(
    gpu: torch.device, record_property: Note, variant: Variant, steps: Iterator[tuple[str, Step]]
) -> None:
    failures, run = [], 0
    for name, step in steps:
        for partitions in PARTITIONS:
            run += 1
            try:
                assert_within(variant, step, run_kernel(variant, step, gpu, partitions))
            except AssertionError as failure:
                failures.append(f"{name} S={partitions}: {failure}")
    judge(record_property, variant, run, failures)


@pytest.mark.parametrize("variant", EXACT, ids=name_of)
def test_sharp_logits(gpu, variant, record_property):
    """Deviation 5: 14-bit sums of all columns at once were off by 0.013 in LSE, by the model."""

    def steps() -> Iterator[tuple[str, Step]]:
        case = StepCase((1,), (1024,), page_size=variant.page_sizes[0], heads=heads_for(variant))
        made = build_step(case, variant.layout, dtype=torch.float32)
        for deviation in (3.4, 5.0):
            yield f"deviation {deviation}", replace(made, q=(made.q * deviation).to(torch.bfloat16))

    assert_all_within(gpu, record_property, variant, steps())


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_one_high_logit_and_many_low_ones(gpu, variant, record_property):
    """aiter#5535: 0.35 came out where P was cast to e4m3 without a scale a tile."""
    case = StepCase((1,), (2048,), page_size=variant.page_sizes[0], heads=heads_for(variant))
    rope = torch.full((2048, 64), -7.0)
    rope[0] = 0.0
    step = with_rows(build_step(case, variant.layout, dtype=torch.bfloat16), [torch.ones(2048, 512)], [rope])
    step.q.zero_()
    step.q[..., 512:] = 1 / (64 * step.sm_scale)
    off = {
        partitions: float((run_kernel(variant, step, gpu, partitions)[0].float() - 1).abs().max())
        for partitions in PARTITIONS
    }
    failures = [f"S={partitions}: off by {by}" for partitions, by in off.items() if not by <= 0.01]
    judge(record_property, variant, len(off), failures)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_gaps_and_inline_scales(gpu, variant, record_property):
    def steps() -> Iterator[tuple[str, Step]]:
        for page_size in {variant.page_sizes[0], variant.page_sizes[-1]}:
            case = StepCase((2, 1), (513, 640), page_size=page_size, heads=heads_for(variant))
            for gaps in GAPS:
                step = build_step(case, variant.layout, dtype=torch.bfloat16, shared_tables=gaps.inline)
                yield f"{gaps} P={page_size}", laid_out(step, gaps)

    assert_all_within(gpu, record_property, variant, steps())
