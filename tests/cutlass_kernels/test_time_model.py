"""The time model: its counts and shares against sums by hand, and steps of the kernels as they stand."""

from __future__ import annotations

import json

import pytest

from pagedmla.bench.model import CUTLASS_TABLE, usual_trip
from pagedmla.cutlass_kernels import time_model
from pagedmla.cutlass_kernels.tiles import Shape
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.hardware.cost import H200


def test_cycles_of_64_rows_by_hand() -> None:
    """16 + 4 + 16 instructions of 32 cycles; 40 KiB in, 40 of K, 40 of Q, 32 of V, 32 + 4 of P at 128 bytes a cycle."""
    shape = Shape(64)
    assert time_model.tensor_cycles(shape) == (16 + 4 + 16) * 32
    assert time_model.shared_cycles(shape) == (40 + 40 + 40 + 32 + 32 + 4) * 1024 / 128


def test_cycles_of_16_rows_by_hand() -> None:
    """K from shared memory takes 16 cycles an instruction, twice what 16 rows multiply in: two terms of Q fit in."""
    assert time_model.tensor_cycles(Shape(16, "fp8", 2)) == (16 + 4) * 16 + 16 * 8
    assert time_model.tensor_cycles(Shape(16, "fp16")) == 32 * 8 + 4 * 16 + 32 * 8


def test_shared_memory_of_16_rows_by_hand() -> None:
    """40 KiB in; K once for both terms, and its rope; Q stacked, 32 rows of 32 bytes, and its rope; V; P in and out."""
    parts = (40, 32 + 8, 16 + 2, 32 + 8, 1)
    assert time_model.shared_cycles(Shape(16, "fp8", 2)) == sum(parts) * 1024 / 128


@pytest.mark.parametrize(
    ("rows", "form", "measured"),
    [
        (16, ("fp8", 2), 104.7),
        (16, ("fp16", 1), 112.5),
        (32, ("fp8", 2), 122.8),
        (32, ("fp16", 1), 130.6),
        (64, ("fp8", 1), 141.1),
        (64, ("fp8", 2), 166.8),
        (128, ("fp8", 1), 262.3),
    ],
)
def test_batch_of_128_at_4096_keys(rows: int, form: tuple[str, int], measured: float) -> None:
    """The kernels as they stand, uncut on an H200: faster than when they were measured, and above the floor.

    What was measured is held to the model in test_timeline.py.
    """
    cluster = rows // 64 or 1
    variant = Variant(Shape(rows // cluster, *form), cluster, 64 // cluster)
    step = time_model.step_us(
        variant,
        H200,
        kv_lens=[4096] * 128,
        q_len=1,
        heads=rows,
        partitions=1,
        consumer_instructions=instructions_of(variant),
    )
    assert 71 < step < measured


def instructions_of(variant: Variant) -> float:
    table = {row["options"]["variant"]: row for row in json.loads(CUTLASS_TABLE.read_text(encoding="utf-8"))}
    return usual_trip(table[variant.name], variant)


# -- the busiest worker's share, by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_lens", "heads", "partitions", "share"),
    [
        ([4096] * 128, 16, 1, (64, 1, 128, 0)),  # a CTA each
        ([4096] * 32, 16, 8, (16, 1, 128, 128)),  # 2048 tiles over 132 CTAs: 15.5, so 16; four pieces of a request
        ([2048] * 256, 16, 1, (64, 2, 130, 0)),  # 63 tiles a CTA: two starts, or one: 8,160 // 63 is CTA 129
        ([0], 16, 1, (1, 1, 1, 0)),  # an empty request is visited
        (
            [64 * 132, 64],
            16,
            8,
            (19, 2, 7, 8),
        ),  # (132 - 2) // 7 + 1 tiles; the seventh: 18 and the other one
    ],
)
def test_the_busiest_share(kv_lens: list[int], heads: int, partitions: int, share: tuple[int, ...]) -> None:
    variant = Variant(Shape(16, "fp8", 2))
    assert time_model.busiest_share(variant, kv_lens, q_len=1, heads=heads, partitions=partitions) == time_model.Share(
        *share
    )


def test_a_tile_of_rows_reads_the_keys_again() -> None:
    """128 heads in two tiles of 64 rows are two segments of a request."""
    variant = Variant(Shape(64))
    one, two = (
        time_model.busiest_share(variant, [4096] * 32, q_len=1, heads=heads, partitions=1) for heads in (64, 128)
    )
    assert (one.workers, two.workers) == (32, 64)
    assert one.tiles == two.tiles == 64


def test_a_merge_is_paid_where_requests_may_be_cut() -> None:
    """Also where nothing is cut: lengths are unknown to the host. Cut rows are written and read besides."""
    variant = Variant(Shape(16, "fp8", 2))
    given = {"q_len": 1, "heads": 16, "consumer_instructions": 900.0}
    never, launched = (
        time_model.step_us(variant, H200, kv_lens=[4096] * 128, partitions=partitions, **given) for partitions in (1, 8)
    )
    assert launched - never == pytest.approx(time_model.MERGE_US + time_model.MERGE_TRIP_US)
    share = time_model.busiest_share(variant, [4096] * 32, q_len=1, heads=16, partitions=8)
    bytes_a_us = 4.8e6 * time_model.BANDWIDTH
    merged = time_model.merge_us(variant, share, 8, bytes_a_us) - time_model.MERGE_US - time_model.MERGE_TRIP_US
    assert merged == pytest.approx(128 * 16 * 512 * 4 * 2 / bytes_a_us)
