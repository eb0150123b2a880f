"""The CUTLASS decode kernels on the GPU, against float64 on the quantised cache: every variant on every grid.

Their bounds are those of the executable model (tests/cutlass_kernels/test_model.py). The fp8 forms owe theirs from 512
keys on; on shorter contexts few keys share the noise of e4m3, and the bounds are wider. Each step runs uncut, in at
most 4 pieces and in at most 32. Everything not alive is NaN, results and scratch included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.decode_sm90 import PEERS, assert_within, run_kernel
from cases.steps import LAYOUTS, Step, StepCase, build_step

from pagedmla.cutlass_kernels.cubin_cache import CubinCache
from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS, Variant

LONG = [
    StepCase((1,) * 3, (1024, 515, 2049), heads=16, name="long"),
    StepCase((2, 1, 4), (700, 4096, 513), heads=24, name="long-ragged"),
    StepCase((1, 2), (900, 640), heads=128, name="long-128-heads"),
    StepCase((1,) * 300, tuple(range(0, 600, 2)), heads=16, name="more-requests-than-multiprocessors"),
    StepCase((1,) * 12, tuple(64 * tiles - 1 for tiles in range(1, 13)), heads=16, name="every-number-of-tiles"),
    StepCase((1,) * 264, (128,) * 264, heads=16, name="equal-requests-that-stay-whole"),  # two or four a worker
]
MAGNITUDES = [
    StepCase((1,), (1024,), heads=16, magnitude=magnitude, name=f"magnitude-{magnitude}")
    for magnitude in (1e-6, 1e-2, 1e4)
]
PARTITIONS = (1, 4, 32)


def steps_for(variant: Variant) -> Iterator[Step]:
    for page_size in variant.page_sizes:
        peers = [case for case in PEERS if case.page_size == page_size]
        for case in (*peers, *LONG, *MAGNITUDES):
            yield build_step(replace(case, page_size=page_size), LAYOUTS[variant.layout], dtype=torch.bfloat16)


def proof(name: str, cases: int) -> dict[str, Any]:
    cubin = CubinCache().find(name)
    assert cubin is not None
    return {"variant": name, "address": cubin.address, "sha256": cubin.sha256, "cases": cases}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.removeprefix("mla_decode_"))
def test_grids(gpu, variant, record_property):
    failures, run, worst = [], 0, (0.0, 0.0)
    for step in steps_for(variant):
        for partitions in PARTITIONS:
            run += 1
            try:
                errors = assert_within(variant, step, run_kernel(variant, step, gpu, partitions))
                worst = max(worst[0], errors[0]), max(worst[1], errors[1])
            except AssertionError as failure:
                failures.append(f"{step.case} P={step.case.page_size} S={partitions}: {failure}")
    record_property("worst", worst)
    record_property("proves", proof(variant.name, run))
    assert not failures, "\n".join(failures)


def test_what_was_cut_is_merged(gpu, record_property):
    """The combine kernel: from two pieces to 32, rows that weren't cut beside rows that were; and one row in many."""
    variant = next(each for each in VARIANTS if each.shape.precision == "fp16" and each.box == 64)
    case = StepCase((1, 2, 1, 1), (4096, 700, 0, 64), page_size=64, heads=16)
    step = build_step(case, LAYOUTS[variant.layout], dtype=torch.bfloat16)
    for partitions in range(2, 33):
        assert_within(variant, step, run_kernel(variant, step, gpu, partitions))
    long = build_step(StepCase((1,), (8448,), page_size=64, heads=16), LAYOUTS[variant.layout], dtype=torch.bfloat16)
    for partitions in (17, 48, 132):
        assert_within(variant, long, run_kernel(variant, long, gpu, partitions))
    record_property("proves", proof(next(each.name for each in COMBINES if each.dtype == variant.dtype), 34))


def test_a_query_of_nan_spoils_its_own_rows_alone(gpu):
    """Cut and uncut: a merge goes by sums of weights, for a maximum passes over NaN and would call the row empty."""
    variant = next(each for each in VARIANTS if each.shape.precision == "fp16" and each.box == 64)
    case = StepCase((1, 1, 1), (4096, 640, 64), page_size=64, heads=16)
    step = build_step(case, LAYOUTS[variant.layout], dtype=torch.bfloat16)
    step.q[0, 3] = torch.nan
    for partitions in (1, 8):
        out, lse = run_kernel(variant, step, gpu, partitions)
        spoilt = out.isnan().all(-1)
        assert spoilt.nonzero().tolist() == [[0, 3]]
        assert torch.equal(lse.isnan(), spoilt)
        assert not bool(out[~spoilt].isnan().any())


def test_runs_agree_to_the_bit(gpu):
    """A result that changes from run to run is a race: ten runs of a cut step are one result."""
    variant = VARIANTS[0]
    case = StepCase((1,) * 8, (513,) * 8, page_size=variant.page_sizes[0], heads=16)
    step = build_step(case, LAYOUTS[variant.layout], dtype=torch.bfloat16)
    first = run_kernel(variant, step, gpu, 4)
    for _ in range(10):
        again = run_kernel(variant, step, gpu, 4)
        assert all(torch.equal(one, other) for one, other in zip(first, again))
