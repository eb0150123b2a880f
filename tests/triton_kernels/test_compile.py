"""Ahead-of-time builds, judged by listings written by hand, by occupancies from vendors' tables, and by real kernels.

The snippets are as short as a listing can be that still holds the trap it is named after. Real builds are few, since
each takes seconds: one kernel with a matrix loop, one without, one refusal of each kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from pagedmla.hardware import amdgcn, sass
from pagedmla.hardware.footprint import Footprint, report_row
from pagedmla.hardware.loops import natural_loops
from pagedmla.hardware.targets import TARGETS, assumed_target, find_target, target_of
from pagedmla.triton_kernels import compile
from pagedmla.triton_kernels.compile import compile_all, compile_variant
from pagedmla.triton_kernels.merge import merge
from pagedmla.triton_kernels.prefill import prefill
from pagedmla.triton_kernels.recording import record, specialise
from pagedmla.triton_kernels.variants import Variant, step_variants

FIELDS = [
    "kernel", "executor", "target", "layout", "rows", "registers", "spill_words", "spill_words_in_loop", "shared_bytes",
    "ctas_per_sm", "warp_instructions_per_token", "bytes_per_token", "triton", "options",
]  # fmt: skip


def listing(text):
    """A SASS listing from lines of instructions and labels, with the addresses that nvdisasm prints."""
    lines = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        lines.append(line if line.endswith(":") else f"        /*{16 * number:04x}*/                   {line} ;")
    return sass.parse("\n".join(["\t.section\t.text.k", ".text.k:", *lines]))


def opcodes(code, loop):
    return [code[i].opcode for i in loop.body]


# ---- loops in SASS ---------------------------------------------------------------------------------------------------


def test_main_loop_is_what_the_back_edge_encloses():
    code = listing("""
        MOV R1, c[0x0][0x28]
        @!P0 BRA `(.L_x_1)
        .L_x_0:
        LDSM.16.M88.4 R4, [R2]
        HMMA.16816.F32 R8, R4, R6, R8
        IADD3 R0, R0, 0x1, RZ
        @P1 BRA `(.L_x_0)
        .L_x_1:
        STG.E.128 [R2], R8
        EXIT
        .L_x_2:
        BRA `(.L_x_2)
        NOP
    """)
    loop = sass.find_main_loop(code)
    assert opcodes(code, loop) == ["LDSM.16.M88.4", "HMMA.16816.F32", "IADD3", "BRA"]
    assert Counter(sass.classify(code[i]) for i in loop.body) == {"shared": 1, "tensor": 1, "integer": 1, "control": 1}
    assert [instruction.opcode for instruction in sass.straight_line(code)][-1] == "EXIT"
    assert len(sass.straight_line(code)) == 8


def test_retry_stubs_behind_exit_neither_make_a_loop_nor_count():
    """With TMA our first counter reported 87 instructions a token where there were 132: it took for the main loop what
    lies between the middle of the body and a stub behind EXIT that retries an mbarrier wait and jumps back there."""
    code = listing("""
        .L_x_0:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3
        @!P0 BRA `(.L_x_9)
        .L_x_1:
        HGMMA.64x64x16.F32 R24, gdesc[UR4]
        FMUL R5, R5, R6
        HGMMA.64x64x16.F32 R24, gdesc[UR8]
        @P1 BRA `(.L_x_0)
        STG.E [R2], R24
        EXIT
        .L_x_9:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3
        @!P0 BRA `(.L_x_9)
        BRA `(.L_x_1)
    """)
    assert opcodes(code, sass.find_main_loop(code)) == [
        "SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "HGMMA.64x64x16.F32", "FMUL", "HGMMA.64x64x16.F32", "BRA",
    ]  # fmt: skip


def test_a_branch_with_two_operands_is_conditional():
    """`BRA.U !UP0, label` has no guard in front and still falls through."""
    code = listing("""
        .L_x_0:
        HMMA.16816.F32 R8, R4, R6, R8
        BRA.U !UP0, `(.L_x_0)
        STG.E [R2], R8
        EXIT
    """)
    assert code[1].falls_through
    assert opcodes(code, sass.find_main_loop(code)) == ["HMMA.16816.F32", "BRA.U"]


def test_the_innermost_loop_with_the_most_matrix_work_is_the_main_one():
    """A persistent outer loop encloses a tail with one MMA, the hot loop with two, and its longer, masked copy."""
    code = listing("""
        .L_x_0:
        MOV R0, RZ
        .L_x_1:
        HMMA.16816.F32 R8, R4, R6, R8
        @P0 BRA `(.L_x_1)
        .L_x_2:
        HMMA.16816.F32 R8, R4, R6, R8
        HMMA.16816.F32 R8, R4, R6, R8
        @P0 BRA `(.L_x_2)
        .L_x_3:
        HMMA.16816.F32 R8, R4, R6, R8
        HMMA.16816.F32 R8, R4, R6, R8
        FSEL R3, R3, -INF , P1
        @P0 BRA `(.L_x_3)
        @P2 BRA `(.L_x_0)
        EXIT
    """)
    assert len(natural_loops(code)) == 4
    assert opcodes(code, sass.find_main_loop(code)) == ["HMMA.16816.F32", "HMMA.16816.F32", "BRA"]


def test_branches_inside_the_loop_belong_to_it():
    code = listing("""
        .L_x_0:
        HMMA.16816.F32 R8, R4, R6, R8
        @P0 BRA `(.L_x_2)
        FADD R1, R1, R2
        BRA `(.L_x_3)
        .L_x_2:
        FMUL R1, R1, R2
        .L_x_3:
        @P1 BRA `(.L_x_0)
        EXIT
    """)
    assert opcodes(code, sass.find_main_loop(code)) == ["HMMA.16816.F32", "BRA", "FADD", "BRA", "FMUL", "BRA"]


def test_no_matrix_loop_no_main_loop():
    code = listing("""
        .L_x_0:
        LDG.E R1, [R2]
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    assert sass.find_main_loop(code) is None
    assert sass.find_main_loop([]) is None


def test_spills_are_counted_in_words():
    code = listing("""
        STL [R1], R2
        STL.64 [R1+0x8], R2
        @P0 LDL.LU.128 R4, [R1]
        LDL R4, [R1]
        LDS.128 R4, [R1]
        EXIT
    """)
    assert sass.spill_words(code) == 1 + 2 + 4 + 1


@pytest.mark.parametrize(
    ("opcode", "resource"),
    [
        ("HGMMA.64x256x16.F32.BF16", "tensor"), ("QGMMA.64x64x32.F32.E4M3.E4M3", "tensor"), ("UTCHMMA", "tensor"),
        ("WARPGROUP.ARRIVE", "control"), ("LDGSTS.E.BYPASS.128", "global"), ("UTMALDG.2D", "global"),
        ("STS.U8", "shared"), ("F2FP.F16.E4M3.UNPACK_B", "convert"), ("HMUL2", "half"), ("MUFU.EX2", "special"),
        ("FMNMX", "float"), ("SHFL.BFLY", "shuffle"), ("IMAD.WIDE", "integer"), ("LDL.64", "spill"),
    ],
)  # fmt: skip
def test_classes(opcode, resource):
    assert sass.classify(listing(opcode)[0]) == resource


# ---- loops in AMD assembly -------------------------------------------------------------------------------------------

AMD = """
kernel:
.Lfunc_begin0:
	s_load_dwordx2 s[0:1], s[2:3], 0x0
	s_cbranch_scc1 .LBB0_3
.LBB0_1:                                ; %loop
	buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen
	v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], v[8:11]
	scratch_store_dwordx2 off, v[12:13], s32
	s_cbranch_scc0 .LBB0_1
; %bb.2:
	scratch_load_dword v1, off, s32
.LBB0_3:
	s_endpgm
	.section	.rodata
	.p2align	6
"""


def test_amd_loop_and_spills():
    code = amdgcn.parse(AMD)
    loop = amdgcn.find_main_loop(code)
    assert opcodes(code, loop)[1:] == ["v_mfma_f32_16x16x16_f16", "scratch_store_dwordx2", "s_cbranch_scc0"]
    assert amdgcn.spill_words(code[i] for i in loop.body) == 2
    assert amdgcn.spill_words(code) == 3
    assert len(amdgcn.straight_line(code)) == len(code) == 8


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "registers", "warps", "shared", "blocks"),
    [
        ("sm_90", 255, 8, 0, 1),  # 8 warps of 8,192 registers are all 65,536
        ("sm_90", 128, 8, 0, 2),
        ("sm_90", 32, 4, 0, 16),  # 64 warps
        ("sm_90", 32, 4, 100_000, 2),
        ("sm_90", 255, 4, 232_448, 1),
        ("sm_90", 255, 4, 232_449, 0),  # one byte over
        ("sm_80", 32, 1, 0, 32),  # blocks
        ("sm_89", 32, 4, 0, 12),  # 48 warps
        ("sm_89", 32, 4, 51_000, 1),  # with the system's KiB, two don't fit in 102,400
        ("sm_90", 168, 4, 0, 3),  # 5,376 a warp: three warps to each of four partitions
        ("gfx942", 128, 4, 16_384, 4),
        ("gfx942", 512, 4, 0, 1),
        ("gfx942", 128, 4, 65_537, 0),
        ("gfx950", 128, 4, 65_537, 2),
    ],
)
def test_resident_blocks(target, registers, warps, shared, blocks):
    assert find_target(target).blocks_resident(registers, warps, shared) == blocks


def test_targets_by_name():
    assert find_target("sm_90a") is TARGETS["sm_90"]
    with pytest.raises(ValueError, match=r"target: expected one of sm_80, .*, gfx950; got 'sm_75'"):
        find_target("sm_75")


def test_an_assumed_target_ends_with_its_block():
    with assumed_target(TARGETS["gfx942"]):
        assert target_of(torch.device("cpu")).name == "gfx942"
    assert target_of(torch.device("cpu")).name == "sm_90"


# ---- what a launch is compiled for -----------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(source, target, optional, one, sixteen, odd, far, factor, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, (tl.load(source + index) * factor).to(target.dtype.element_ty))


def test_specialisation_is_that_of_the_jit():
    from pagedmla.triton_kernels.launch import launch

    source = torch.empty(65, dtype=torch.float16, device="meta")

    def call():
        launch(_copy_kernel, (1,), source[1:], source, None, 1, 32, 17, 2**31, 0.5, COUNT=64, num_warps=2)

    (launched,) = record(call, TARGETS["sm_90"])
    types = specialise(launched)
    assert launched.grid == (1,)
    assert types.signature == {
        "source": "*fp16", "target": "*fp16", "optional": "constexpr", "one": "constexpr", "sixteen": "i32",
        "odd": "i32", "far": "i64", "factor": "fp32", "COUNT": "constexpr",
    }  # fmt: skip
    assert types.constants == {"optional": None, "one": 1, "COUNT": 64}
    assert types.divisible_by_16 == ("target", "sixteen", "far")
    assert types.options == {"num_warps": 2}


def test_recording_launches_nothing():
    partial, lse = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1)
    out = torch.full((1, 1, 16), float("nan"))
    assert len(record(lambda: merge(partial, lse, out, lse[0]), TARGETS["sm_90"])) == 1
    assert out.isnan().all()
    merge(partial, lse, out, lse[0])
    assert not out.isnan().any()


def test_every_step_has_variants_for_every_target():
    listed = step_variants()
    assert {(variant.kernel, *variant.targets) for variant in listed} == {
        (kernel, target)
        for kernel in ("store", "decompress", "prefill", "merge", "schedule", "records", "merge_cuts")
        for target in TARGETS
    }
    stored = {variant.layout for variant in listed if variant.kernel == "store"}
    assert stored == {"bf16", "fp16", "fp32", "fp8_flat", "fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_ds_mla"}


# ---- builds ----------------------------------------------------------------------------------------------------------


@triton.jit
def _product_kernel(a, b, out, count, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, 64), tl.arange(0, COLUMNS)
    total = tl.zeros((64, 64), tl.float32)
    for first in range(0, count, COLUMNS):
        left = tl.load(a + row[:, None] * count + first + column[None, :])
        right = tl.load(b + (first + column[:, None]) * 64 + row[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * 64 + row[None, :], total)


PRODUCT = Variant(
    kernel="product", layout="fp16", rows=64, function=f"{__name__}:_product_kernel",
    signature={"a": "*fp16", "b": "*fp16", "out": "*fp32", "count": "i32", "COLUMNS": "constexpr"},
    constants={"COLUMNS": 32}, divisible_by_16=("a", "b", "out", "count"), tokens_per_iteration=32,
    bytes_per_token=128.0, num_warps=4, num_stages=2, targets=("sm_80", "sm_90", "gfx942"),
)  # fmt: skip
FP8 = replace(PRODUCT, signature={**PRODUCT.signature, "a": "*fp8e4nv", "b": "*fp8e4nv"})


def test_a_real_loop_on_nvidia(tmp_path):
    row = compile_variant(PRODUCT, "sm_90", tmp_path)
    assert list(row) == FIELDS
    assert (row["kernel"], row["executor"], row["target"], row["layout"], row["rows"]) == (
        "product", "triton", "sm_90", "fp16", 64,
    )  # fmt: skip
    assert row["triton"] == triton.__version__
    assert row["options"] == {"COLUMNS": 32, "num_warps": 4, "num_stages": 2}
    assert (row["spill_words"], row["spill_words_in_loop"]) == (0, 0)
    assert 32 <= row["registers"] <= 128
    assert row["shared_bytes"] == 2 * (64 * 32 + 32 * 64) * 2  # two stages of two fp16 tiles
    assert row["ctas_per_sm"] == TARGETS["sm_90"].blocks_resident(row["registers"], 4, row["shared_bytes"])
    assert sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir()) == [
        "sm_90.cubin",
        "sm_90.ptx",
        "sm_90.sass",
    ]
    code = sass.parse(next(tmp_path.glob("*.sass")).read_text())
    body = opcodes(code, sass.find_main_loop(code))
    # 64 x 64 x 32 by one warpgroup: two HGMMA of K 16, and each thread copies a 16-byte piece of 2 x 4 KiB twice
    assert sum(opcode.startswith("HGMMA") for opcode in body) == 2
    assert sum(opcode.startswith("LDGSTS") for opcode in body) == 4
    assert row["warp_instructions_per_token"] == round(len(body) * 4 / 32, 1)


def test_a_real_loop_on_amd(tmp_path):
    row = compile_variant(PRODUCT, "gfx942", tmp_path)
    assert list(row) == FIELDS
    code = amdgcn.parse(next(tmp_path.glob("*.amdgcn")).read_text())
    assert sum(opcode.startswith("v_mfma") for opcode in opcodes(code, amdgcn.find_main_loop(code))) > 0
    assert row["warp_instructions_per_token"] > 0
    assert row["ctas_per_sm"] > 0
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".amdgcn", ".hsaco"]


def test_a_type_that_the_target_lacks_is_refused():
    """FP8 on sm_80: the row says so instead of an exception that ends the table."""
    (row,) = compile_all([FP8], ["sm_80"])
    assert list(row) == [*FIELDS, "refused"]
    assert "fp8e4nv not supported in this architecture" in row["refused"]
    assert row["registers"] is row["warp_instructions_per_token"] is None


def test_a_tile_that_the_target_cannot_hold_is_refused():
    """Triton itself looks at shared memory only when it launches."""
    row = compile_variant(replace(PRODUCT, constants={"COLUMNS": 512}, num_stages=3), "sm_90")
    assert row["refused"] == "needs 393216 bytes of shared memory a block; sm_90 has 232448"


def test_a_shape_that_the_target_cannot_multiply_is_refused():
    row = compile_variant(replace(FP8, constants={"COLUMNS": 16}), "sm_90")
    assert "K >= 32" in row["refused"]


def test_an_assembler_failure_is_told_and_its_dump_is_not(monkeypatch, capsys):
    """Where ptxas fails, Triton prints the whole PTX to standard output, in the middle of a JSON table."""

    def fail(*_, **__):
        print("// Generated by LLVM NVPTX Back-End", "ret;", sep="\n")
        raise RuntimeError(
            "`ptxas` failed with error code 255\nptxas fatal   : (C7602) Insufficient registers (128)\nRepro"
        )

    monkeypatch.setattr(triton, "compile", fail)
    row = compile_variant(PRODUCT, "sm_90")
    assert row["refused"] == "ptxas fatal   : (C7602) Insufficient registers (128)"
    assert capsys.readouterr().out == ""


def test_targets_and_callback():
    """A variant is built only for targets that it names, and each row is seen as it comes."""
    seen = []
    rows = compile_all([FP8], ["sm_100", "sm_80"], on_row=seen.append)
    assert [row["target"] for row in rows] == ["sm_80"]
    assert rows == seen


def test_other_executors_report_in_the_same_form():
    row = report_row(
        kernel="decode", executor="cutlass", target=TARGETS["sm_90"], layout="fp8_rope_bf16", rows=64,
        footprint=Footprint(168, 12, 200_000, 0, 0, 1000), tokens=64, bytes_per_token=644.0, options={},
        compiler="4.8.0",
    )  # fmt: skip
    assert list(row) == [name if name != "triton" else "cutlass" for name in FIELDS]
    assert row["warp_instructions_per_token"] == 187.5
    assert row["ctas_per_sm"] == 1


def test_kernels_of_the_interpreter_cannot_be_compiled():
    """With TRITON_INTERPRET set, @triton.jit makes functions that no compiler takes; the message must say so."""
    code = (
        "from pagedmla.triton_kernels.compile import compile_variant\n"
        "from types import SimpleNamespace\n"
        "compile_variant(SimpleNamespace(num_warps=4, num_stages=1, options={}), 'sm_90')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(compile.__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "RuntimeError: compile: Triton was imported with TRITON_INTERPRET set" in done.stderr.splitlines()[-1]


# ---- what our kernels become -----------------------------------------------------------------------------------------


def built(kernel, target, folder, **wanted):
    """Row and SASS of the first listed variant of a kernel whose fields or constants are as wanted."""
    variant = next(
        variant
        for variant in step_variants([target])
        if variant.kernel == kernel
        and all(getattr(variant, name, variant.constants.get(name)) == value for name, value in wanted.items())
    )
    row = compile_variant(variant, target, folder)
    return row, next(folder.glob("*.sass")).read_text()


def test_prefill_multiplies_by_warpgroups_on_hopper(tmp_path):
    row, text = built("prefill", "sm_90", tmp_path, KEY_COLUMNS=192)
    code = sass.parse(text)
    body = opcodes(code, sass.find_main_loop(code))
    assert any(opcode.startswith("HGMMA") for opcode in body)
    assert not any(opcode.startswith("HMMA") for opcode in body)
    assert row["spill_words_in_loop"] <= 16
    # An H200 SM does 128 x 640 FLOPs a key in 20 cycles, which is 80 issue slots: below that the tensor cores decide.
    assert row["warp_instructions_per_token"] < 80


@pytest.mark.parametrize(
    ("target", "key_columns", "value_columns"), [("sm_90", 256, 256), ("sm_89", 192, 128), ("sm_80", 256, 64)]
)
def test_prefill_in_float32_fits(target, key_columns, value_columns):
    """On an H200 heads of 256 columns in float32 ended in OutOfResources: the tile was chosen by what its operands
    take, and the parts of a TF32 product take more."""

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = meta(64, 2, key_columns), meta(64, 2, key_columns), meta(64, 2, value_columns)
    starts = meta(2, dtype=torch.int32)
    (launched,) = record(
        lambda: prefill(q, k, v, starts, starts, meta(64, 2, value_columns), sm_scale=1.0), TARGETS[target]
    )
    types = specialise(launched)
    options = dict(types.options)
    variant = replace(
        PRODUCT, kernel="prefill", function="pagedmla.triton_kernels.prefill:prefill_kernel",
        signature=types.signature, constants=types.constants, divisible_by_16=types.divisible_by_16,
        num_warps=options.pop("num_warps"), num_stages=options.pop("num_stages"), options=options,
    )  # fmt: skip
    assert "refused" not in compile_variant(variant, target)


@pytest.mark.parametrize(("kernel", "budget"), [("store", 355), ("decompress", 355)])
def test_flagship_steps_stay_under_the_issue_limit(tmp_path, kernel, budget):
    """At 4.8 TB/s an H200 SM has 0.198 issue slots a byte (4 a cycle, 1.8 GHz, 132 SMs): 355 for 1,796 bytes."""
    row, text = built(kernel, "sm_90", tmp_path, layout="fp8_rope_bf16")
    assert row["spill_words"] == 0
    assert row["bytes_per_token"] == 1796.0
    assert row["warp_instructions_per_token"] < budget
    accesses = [code.opcode for code in sass.parse(text) if code.opcode.startswith(("LDG", "STG"))]
    assert sum(opcode.endswith(".128") for opcode in accesses) >= 10  # rows move in 16-byte pieces


def test_store_has_an_integer_path_on_ampere(tmp_path):
    row, text = built("store", "sm_80", tmp_path, layout="fp8_rope_bf16")
    assert "refused" not in row
    assert "E4M3" not in text
