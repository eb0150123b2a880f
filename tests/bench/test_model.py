"""The model of compiled kernels: limits by hand from published peaks; it can't be taken for a measurement."""

from __future__ import annotations

import io
import re
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
    step_cases,
    step_rows,
)
from pagedmla.bench.published import published, shapes
from pagedmla.bench.rows import Row
from pagedmla.bench.table import model_table
from pagedmla.cutlass_kernels import time_model
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


@pytest.mark.parametrize(("rope", "first", "second"), [("bf16", 512 + 128 + 512, 512), ("e4m3", 512 + 64 + 512, 576)])
def test_two_terms_meet_only_the_keys_twice(rope: str, first: int, second: int) -> None:
    """The whole of the FP8 rate was halved for two terms, P V too: 64 rows were said to be bound by the tensor cores.

    By hand, in columns at e4m3's rate: a term of the latent, the rope (twice where it is bf16), the values; the other.
    """
    fp8 = {"precision": "fp8", "cluster": 1, "box": 64, "rope": rope}
    one, two = (floor_of(row(options={**fp8, "terms": terms}), H200).tensor for terms in (1, 2))
    assert one == pytest.approx(2 * first * 16 * 132 / 1979e3, rel=1e-3)  # 16 rows at 1979 / 132 TFLOP/s
    assert two == pytest.approx(one * (first + second) / first, rel=1e-6)


def test_no_two_rows_look_alike() -> None:
    """`pagedmla bench` printed rows twice with different figures: the second were those of float16 queries, which the
    row didn't name."""
    rows = kernel_rows([*compile_table(TRITON_TABLE), *compile_table(CUTLASS_TABLE)])
    names = ("gpu", "executor", "kernel", "layout", "rows", "form", "group", "page_size", "split_queries")
    labels = [tuple(made[name] for name in names) for made in rows]
    assert len(set(labels)) == len(labels)
    assert {made["split_queries"] for made in rows} == {False, True}
    assert {made["executor"] for made in rows} == {"triton", "cutlass"}


def page_microseconds() -> dict[str, float]:
    """docs/kernels/decode_sm90.md, the table of today's kernels: B=128, kv 4096 on an H200, by rows and form."""
    page = (Path(__file__).parents[2] / "docs" / "kernels" / "decode_sm90.md").read_text(encoding="utf-8")
    (body,) = re.findall(
        r"^\| rows, form \| cycles a tile \| B=128 x 4096, us \|.*\n\|[-:|]*\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]
    return {form: float(microseconds) for form, _, microseconds, *_ in cells}


@pytest.mark.parametrize(
    ("heads", "contender", "form"),
    [
        (16, "fp8x2", "16, fp8, two terms"),
        (16, "fp16", "16, fp16"),
        (32, "fp8x2", "32, fp8, two terms"),
        (32, "fp16", "32, fp16"),
        (64, "fp8x1", "64, fp8, one term"),
        (64, "fp8x2", "64, fp8, two terms"),
        (128, "fp8x1", "128 (two CTAs), one term"),
        (128, "fp8x2", "64 twice, two terms"),
    ],
)
def test_steps_are_those_that_the_kernels_page_states(heads: int, contender: str, form: str) -> None:
    """Here with the launch of a merge that finds nothing. Where the kernels have changed, the page is to be."""
    rows = step_rows(Case(FLAGSHIP, heads, 128, 4096), H200, compile_table(TRITON_TABLE), compile_table(CUTLASS_TABLE))
    found = {made.contender: made for made in rows}
    stated = page_microseconds()[form] + time_model.MERGE_US + time_model.MERGE_TRIP_US
    assert found[f"pagedmla cutlass {contender}"].microseconds == pytest.approx(stated, abs=0.1)
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
    console.print(model_table(rows, "model", console.width))
    (line,) = [line for line in console.file.getvalue().splitlines() if "at least" in line]
    assert line.split()[-3:] == [f"~{bound.microseconds:.3g}", f"{bound.floor_us:.3g}", "-"]


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


# -- both Hoppers, and what others published ---------------------------------------------------------------------------


def steps(case: Case) -> dict[tuple[str, str], Row]:
    tables = compile_table(TRITON_TABLE), compile_table(CUTLASS_TABLE)
    return {(row.device, row.contender): row for gpu in (H200, H100) for row in step_rows(case, gpu, *tables)}


@pytest.mark.parametrize(
    "case", [Case(FLAGSHIP, 16, 128, 4096), Case(FLAGSHIP, 128, 128, 4096), Case(FLAGSHIP, 16, 1, 640)], ids=str
)
def test_an_h100_is_an_h200_with_less_bandwidth(case: Case) -> None:
    """Only H200 had rows. The same multiprocessors: slower by at most the bandwidths' ratio, nearer to its floor."""
    found = steps(case)
    assert {device for device, _ in found} == {"H200", "H100 SXM"}
    contenders = {contender for _, contender in found}
    assert len(found) == 2 * len(contenders)
    for contender in contenders:
        h200, h100 = found["H200", contender], found["H100 SXM", contender]
        assert 1 <= h100.microseconds / h200.microseconds <= 1.002 * 4.8 / 3.35  # times have four digits
        assert h200.floor_us is not None
        assert h100.floor_us == pytest.approx(h200.floor_us * 4.8 / 3.35, rel=1e-3)  # memory binds it in all of these
        assert h100.bound or h100.share_of_floor >= h200.share_of_floor


def test_memory_binds_an_h100_at_16_heads() -> None:
    """644 bytes of each of 524,288 keys at 0.9 of 3.35 TB/s are 112 us, of which a model can't take less."""
    for contender in ("pagedmla cutlass fp16", "pagedmla cutlass fp8x2"):
        assert steps(Case(FLAGSHIP, 16, 128, 4096))["H100 SXM", contender].microseconds > 524288 * 644 / 3.35e6 / 0.9


def test_published_figures_by_hand() -> None:
    (best,) = published(Case(FLAGSHIP, 128, 128, 4096))
    assert (best.who, best.card, best.tflop_per_s) == ("FlashMLA", "H800", 660.0)
    assert best.microseconds == pytest.approx(2176 * 128 * 128 * 4096 / 660e6, abs=0.05)  # 221 us
    found = published(Case("bf16", 64, 16, 8192))  # whatever the layout of ours
    assert [(each.who, each.microseconds) for each in found] == [
        ("SnapMLA", 57.548), ("FlagGems", 69.096), ("vLLM", 79.126)
    ]  # fmt: skip
    assert published(Case(FLAGSHIP, 16, 128, 4096, 1, IMBALANCED)) == published(Case(FLAGSHIP, 16, 128, 4097)) == ()


def test_no_published_figure_beats_its_card() -> None:
    """A slip of a digit would: the figures are set against bytes and FLOPs at an H100's peaks, which an H800 shares."""
    bytes_per_token = {"bf16": 1152, "FP8": 644}
    for shape in shapes():
        heads, batch, kv_len, q_len = shape
        for figure in published(Case(FLAGSHIP, *shape)):
            keys = batch * kv_len
            memory = keys * bytes_per_token[figure.reads] / 3.35e6
            tensor = 2176 * heads * q_len * keys / (990e6 if figure.reads == "bf16" else 1979e6)
            assert max(memory, tensor) < figure.microseconds < 4 * max(memory, tensor) + 40, (shape, figure)
            assert figure.source.startswith("https://github.com/")


def test_every_published_shape_is_modelled_once() -> None:
    """And stays what it is where somebody asks for another layout."""
    cases = step_cases([FLAGSHIP, "bf16"])
    assert len(set(cases)) == len(cases)
    for layout in (FLAGSHIP, "bf16"):
        mine = [case for case in cases if case.layout == layout]
        assert {(case.heads, case.batch, case.kv_len, case.q_len) for case in mine} > set(shapes())
        assert Case(layout, 128, 8, 4096) in mine  # of the grid, published by nobody
    few = step_cases([FLAGSHIP], few=True)  # `--quick` is to take seconds
    assert {case.kv_len for case in few} == {4096}
    assert len(few) == 8


def test_losses_are_printed_like_wins() -> None:
    """One request of 640 keys, where 13.9 us were published and a model of ours says more; 128 of 4096, where it says
    less; and a case that nobody published. All have the same cells, and a row in the JSON for each GPU."""
    cases = [Case(FLAGSHIP, 128, 1, 640), Case(FLAGSHIP, 16, 128, 4096), Case(FLAGSHIP, 16, 8, 4096)]
    rows = [row for case in cases for row in steps(case).values()]
    console = Console(file=io.StringIO(), width=160)
    console.print(model_table(rows, "model", console.width))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    labels = [line.split("    ")[0].strip() for line in lines if "H=" in line]
    assert labels == [f"{FLAGSHIP} H={case.heads} {case.batch} x {case.kv_len}" for case in cases]
    told = ("13.9 vLLM bf16, H800; 16.7 FlagGems", "215.0 FlashMLA bf16, H100", "")
    for case, others in zip(cases, told, strict=True):
        found = steps(case)
        ours = min(row.microseconds for row in found.values() if not row.bound)
        figures = published(case)
        assert [ours > each.microseconds for each in figures[:1]] == ([case.batch == 1] if figures else [])
        (label,) = [line for line in lines if f"H={case.heads} {case.batch} x {case.kv_len}" in line]
        assert others in label
        assert not label.endswith("4096") == bool(figures)
        for row in found.values():
            assert row.published == figures
            made = row.to_dict()
            assert made["floor_us"] == row.floor_us
            assert [each["microseconds"] for each in made["published"]] == [each.microseconds for each in figures]
    for line in lines:
        if "pagedmla" in line:
            cells = line.split("  ")
            assert sum(cell.strip().startswith("~") for cell in cells) == 2, line  # a GPU each, marked


def test_a_narrow_terminal_keeps_times_and_figures() -> None:
    rows = list(steps(Case(FLAGSHIP, 128, 128, 640)).values())
    console = Console(file=io.StringIO(), width=80)
    console.print(model_table(rows, "model", console.width))
    text = " ".join(console.file.getvalue().split())
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    for phrase in (f"~{rows[0].microseconds:.1f}", "56.5", "63.5", "65.3"):
        assert phrase in text


def test_without_a_compile_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pagedmla compile --json"):
        compile_table(tmp_path / "compile-triton.json")
