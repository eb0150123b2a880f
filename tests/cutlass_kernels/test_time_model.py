"""The time model: its counts against sums by hand, and the steps that the kernel was designed for."""

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
    """K from shared memory takes 16 cycles an instruction, twice what 16 rows multiply in."""
    assert time_model.tensor_cycles(Shape(16, "fp8", 2)) == (32 + 4) * 16 + 16 * 8
    assert time_model.tensor_cycles(Shape(16, "fp16")) == 32 * 8 + 4 * 16 + 32 * 8


@pytest.mark.parametrize(
    ("rows", "form", "bound"), [(16, ("fp8", 2), 85), (16, ("fp16", 1), 85), (128, ("fp8", 1), 140)]
)
def test_batch_of_128_at_4096_keys(rows: int, form: tuple[str, int], bound: float) -> None:
    """Microseconds on an H200, by the model; instructions as the table of compiled kernels has them."""
    cluster = rows // 64 or 1
    variant = Variant(Shape(rows // cluster, *form), cluster, 64 // cluster)
    table = {row["options"]["variant"]: row for row in json.loads(CUTLASS_TABLE.read_text(encoding="utf-8"))}
    instructions = usual_trip(table[variant.name], variant)
    step = time_model.step_us(
        variant, H200, kv_lens=[4096] * 128, q_len=1, heads=rows, partitions=8, consumer_instructions=instructions
    )
    assert 70 < step <= bound
