"""The model of compiled kernels: limits by hand from published peaks; it can't be taken for a measurement."""

from __future__ import annotations

import json

import pytest

from pagedmla.bench.model import floor_of, issue_slots, model_rows
from pagedmla.bench.report import TABLE
from pagedmla.hardware.cost import B200, H100, H200


def row(**changed):
    made = {
        "kernel": "decode", "executor": "triton", "target": "sm_90", "layout": "fp8_rope_bf16", "rows": 16,
        "warp_instructions_per_token": 70.0, "bytes_per_token": 644.0,
        "options": {"GROUP": 512, "PAGE_SIZE": 64, "SPLIT_QUERIES": False},
    }  # fmt: skip
    return {**made, **changed}


@pytest.mark.parametrize(("bytes_per_token", "slots"), [(580, 115), (644, 127), (656, 130)])
def test_issue_slots_of_an_h200(bytes_per_token: int, slots: int) -> None:
    """580 bytes at 4.8 TB/s over 132 SMs are 15.95 ns, which is 28.7 cycles at 1.8 GHz, four instructions each."""
    assert issue_slots(bytes_per_token, H200) == pytest.approx(slots, abs=0.6)


def test_what_binds() -> None:
    few = floor_of(row(), H200)
    assert (few.bound, few.share) == ("memory", 1.0)
    assert few.memory == pytest.approx(644 * 132 / 4800)
    many = floor_of(row(warp_instructions_per_token=254.0), H200)
    assert many.bound == "issue"
    assert many.share == pytest.approx(0.5, abs=0.01)
    wide = floor_of(row(rows=64), H200)  # 2176 * 64 FLOPs at 990 / 132 TFLOP/s
    assert wide.bound == "tensor"
    assert wide.tensor == pytest.approx(18.57, abs=0.01)


def test_slower_memory_hides_more_instructions() -> None:
    heavy = row(warp_instructions_per_token=150.0)
    assert floor_of(heavy, B200).share < floor_of(heavy, H200).share < floor_of(heavy, H100).share == 1.0


def test_rows_say_that_they_are_a_model() -> None:
    table = [
        row(),
        row(target="sm_100"),
        row(target="gfx942"),
        row(kernel="store"),
        row(layout="bf16"),
        {**row(), "refused": "too large"},
    ]
    rows = model_rows(table, ["fp8_rope_bf16"])
    assert [made["gpu"] for made in rows] == ["H100 SXM", "H200", "B200"]
    assert {made["source"] for made in rows} == {"model"}
    assert not {"microseconds", "gb_per_s"} & rows[0].keys()


def test_no_two_rows_look_alike() -> None:
    """`pagedmla bench` printed rows twice with different figures: the second were those of float16 queries, which the
    row didn't name."""
    rows = model_rows(json.loads(TABLE.read_text(encoding="utf-8")))
    figures = {"memory_ns", "issue_ns", "tensor_ns", "bound", "share_of_bandwidth"}
    labels = [tuple(value for name, value in made.items() if name not in figures) for made in rows]
    assert len(set(labels)) == len(labels)
    assert {made["split_queries"] for made in rows} == {False, True}
