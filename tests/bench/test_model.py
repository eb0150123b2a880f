"""The model of compiled kernels: limits by hand from published peaks; it can't be taken for a measurement."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pagedmla.bench.cases import FLAGSHIP, IMBALANCED, Case
from pagedmla.bench.model import (
    CUTLASS_TABLE,
    TRITON_TABLE,
    compile_table,
    floor_of,
    issue_slots,
    kernel_rows,
    step_rows,
)
from pagedmla.bench.table import case_table
from pagedmla.hardware.cost import B200, H100, H200


def row(**changed):
    made = {
        "kernel": "decode", "executor": "triton", "target": "sm_90", "layout": "fp8_rope_bf16", "rows": 16,
        "registers": 255, "spill_words_in_loop": 0, "shared_bytes": 92160,
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
    rows = kernel_rows(table, ["fp8_rope_bf16"])
    assert [made["gpu"] for made in rows] == ["H100 SXM", "H200", "B200"]
    assert {made["source"] for made in rows} == {"model"}
    assert not {"microseconds", "gb_per_s"} & rows[0].keys()


def test_two_terms_take_twice_the_tensor_time_of_one() -> None:
    fp8 = {"precision": "fp8", "cluster": 1, "box": 64}
    one, two = (floor_of(row(options={**fp8, "terms": terms}), H200).tensor for terms in (1, 2))
    assert two == pytest.approx(2 * one)
    assert two == pytest.approx(floor_of(row(), H200).tensor, rel=1e-3)  # e4m3 is twice as fast as float16


def test_no_two_rows_look_alike() -> None:
    """`pagedmla bench` printed rows twice with different figures: the second were those of float16 queries, which the
    row didn't name."""
    rows = kernel_rows([*compile_table(TRITON_TABLE), *compile_table(CUTLASS_TABLE)])
    names = ("gpu", "executor", "kernel", "layout", "rows", "form", "group", "page_size", "split_queries")
    labels = [tuple(made[name] for name in names) for made in rows]
    assert len(set(labels)) == len(labels)
    assert {made["split_queries"] for made in rows} == {False, True}
    assert {made["executor"] for made in rows} == {"triton", "cutlass"}


@pytest.mark.parametrize(("heads", "contender", "microseconds"), [(16, "fp16", 97.9), (128, "fp8x2", 269.7)])
def test_steps_are_those_that_the_kernels_page_states(heads: int, contender: str, microseconds: float) -> None:
    """docs/kernels/decode_sm90.md: B=128, kv 4096 on an H200; here with the launch of a merge that finds nothing."""
    rows = step_rows(Case(FLAGSHIP, heads, 128, 4096), H200, compile_table(TRITON_TABLE), compile_table(CUTLASS_TABLE))
    found = {made.contender: made for made in rows}
    assert found[f"pagedmla cutlass {contender}"].microseconds == pytest.approx(microseconds, abs=0.1)
    for made in rows:
        assert made.source == "model"
        assert made.device == "H200"
        assert made.correct is made.relative_l2 is made.speedup is None
        assert made.bound == (made.share_of_floor is None)
        assert made.bound or made.share_of_floor <= 1  # a model can't be faster than its own floor
    assert "pagedmla triton (at least)" in found


def test_a_bound_of_nanoseconds_is_no_result() -> None:
    """`pagedmla bench` printed "~0" us at 100 % of the floor for Triton at 64 keys: times were rounded to 0.1 us, and
    a bound was set against the floor that it is."""
    rows = step_rows(Case(FLAGSHIP, 16, 1, 64), H200, compile_table(TRITON_TABLE), compile_table(CUTLASS_TABLE))
    (bound,) = [made for made in rows if made.bound]
    assert bound.contender == "pagedmla triton (at least)"
    assert bound.microseconds == pytest.approx((64 * 644 + 16 * (2 * 1088 + 4)) / 4.8e6, rel=1e-3)  # bytes, 4.8 TB/s
    assert bound.share_of_floor is None
    console = Console(file=io.StringIO(), width=160)
    console.print(case_table(rows, "model", console.width))
    (line,) = [line for line in console.file.getvalue().splitlines() if "at least" in line]
    assert line.split()[-4:] == [f"~{bound.microseconds:.3g}", "-", "-", "-"]


@pytest.mark.parametrize(
    ("case", "executors"),
    [
        (Case("bf16", 16, 8, 640), "triton"),  # CUTLASS has no kernel for it
        (Case("fp8_ds_mla", 16, 8, 640), "triton"),
        (Case("fp8_flat", 16, 8, 640), "triton and cutlass"),
        (Case(FLAGSHIP, 16, 8, 640, 4), "triton and cutlass"),
        (Case(FLAGSHIP, 32, 8, 640, 1, IMBALANCED), "triton and cutlass"),
    ],
    ids=str,
)
def test_only_kernels_that_are_compiled_have_a_step(case: Case, executors: str) -> None:
    tables = compile_table(TRITON_TABLE), compile_table(CUTLASS_TABLE)
    assert {made.contender.split()[1] for made in step_rows(case, H200, *tables)} == set(executors.split(" and "))
    assert {made.contender.split()[1] for made in step_rows(case, B200, *tables)} <= {"triton"}  # CUTLASS is Hopper's
    assert step_rows(case, H200, [], []) == []


def test_without_a_compile_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pagedmla compile --json"):
        compile_table(tmp_path / "compile-triton.json")
