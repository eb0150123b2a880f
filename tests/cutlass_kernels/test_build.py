"""Builds: the compiler's process, what is kept of it, and the rows of the compile table.

Without the DSL, a stand-in for our own child process writes the files that it would leave; with it, two real kernels
are built, and their parameters must lie where the launcher puts them. Nothing built here is ever run.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from hashlib import sha256

import pytest

from pagedmla.cutlass_kernels import build, cubin_cache
from pagedmla.cutlass_kernels import compile as table
from pagedmla.cutlass_kernels.arguments import COMBINE, DECODE, offsets
from pagedmla.cutlass_kernels.build import Built, make_cubin, on_demand
from pagedmla.cutlass_kernels.cubin_cache import CubinCache, CubinError, dsl_version
from pagedmla.cutlass_kernels.protocol import Action, decode_protocol
from pagedmla.cutlass_kernels.resources import disassemble, read_resources
from pagedmla.cutlass_kernels.tiles import COLUMN_TILES
from pagedmla.cutlass_kernels.usual_trip import count_trip, find_trip, rare_parts
from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS
from pagedmla.hardware import sass

DECODE_VARIANT = next(v for v in VARIANTS if v.shape.rows == 16 and v.box == 64)
needs_dsl = pytest.mark.skipif(dsl_version() is None, reason="needs the DSL: pip install pagedmla[cutlass]")

_CHILD = """
import sys, pathlib
folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
print("the compiler says hello")
for name in names:
    if "combine" in name:
        (folder / f"{name}.error").write_text("DSLError: no such instruction")
    else:
        (folder / f"{name}.ptx").write_text(f".visible .entry {name}_0(\\n)\\n.reqntid 384, 1, 1\\n")
        (folder / f"{name}.cubin").write_bytes(name.encode())
    print(name, flush=True)
"""


@pytest.fixture
def stand_in_child(tmp_path, monkeypatch):
    """Our child process replaced; call with its source. No DSL is needed, and none is imitated."""

    def use(source=_CHILD):
        (tmp_path / "stand_in_child.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(build, "_MODULE", "stand_in_child")
        for module in (build, cubin_cache):
            monkeypatch.setattr(module, "dsl_version", lambda: "4.8.1")

    return use


def without_dsl(monkeypatch):
    for module in (build, cubin_cache):
        monkeypatch.setattr(module, "dsl_version", lambda: None)


def test_each_variant_comes_as_soon_as_it_is_built_or_has_failed(stand_in_child):
    stand_in_child()
    results = list(build.build([DECODE_VARIANT, COMBINES[0]]))
    assert [variant for variant, _ in results] == [DECODE_VARIANT, COMBINES[0]]
    assert results[0][1].cubin == DECODE_VARIANT.name.encode()
    assert results[1][1] == "DSLError: no such instruction"


def test_the_child_keeps_ptx_and_cubin_for_hopper(stand_in_child):
    stand_in_child(
        "import os, sys, pathlib\n"
        "assert os.environ['CUTE_DSL_ARCH'] == 'sm_90a' and os.environ['CUTE_DSL_KEEP'] == 'ptx,cubin'\n"
        "assert os.environ['CUTE_DSL_DUMP_DIR'] == sys.argv[1] == os.getcwd()\n"
        "import pagedmla.cutlass_kernels.variants\n"
    )
    assert list(build.build([DECODE_VARIANT])) == []


def test_a_compiler_that_breaks_off_is_reported_with_its_last_words(stand_in_child):
    stand_in_child("import sys; print('first', file=sys.stderr); sys.exit('out of memory')")
    with pytest.raises(RuntimeError, match="the compiler's process ended with 1: out of memory"):
        list(build.build([DECODE_VARIANT]))


def test_without_the_dsl_a_build_says_what_to_install(monkeypatch):
    without_dsl(monkeypatch)
    with pytest.raises(ImportError, match=r"CUTLASS Python DSL isn't installed; pip install pagedmla\[cutlass\]"):
        next(build.build([DECODE_VARIANT]))


def test_without_the_dsl_a_missing_cubin_says_what_to_run(monkeypatch, tmp_path):
    without_dsl(monkeypatch)
    with pytest.raises(CubinError, match="pagedmla compile --executor cutlass"):
        on_demand(DECODE_VARIANT, CubinCache([tmp_path]))


def test_with_the_dsl_a_missing_cubin_is_built_once(stand_in_child, tmp_path):
    stand_in_child()
    cache = CubinCache([tmp_path / "cubins"])
    first = on_demand(DECODE_VARIANT, cache)
    stand_in_child("raise SystemExit('built again')")
    assert on_demand(DECODE_VARIANT, cache) == first
    assert first.image == DECODE_VARIANT.name.encode()


def test_a_build_on_demand_that_fails_says_why(stand_in_child, tmp_path):
    stand_in_child()
    with pytest.raises(CubinError, match="mla_combine_bf16: DSLError: no such instruction"):
        on_demand(COMBINES[0], CubinCache([tmp_path / "cubins"]))


def test_a_record_of_another_kernel_is_refused(stand_in_child, tmp_path):
    """No hash covers a record: 128 threads and 1000 bytes of shared memory were launched without a word."""
    stand_in_child()
    cache = CubinCache([tmp_path / "cubins"])
    on_demand(DECODE_VARIANT, cache)
    (path,) = (tmp_path / "cubins").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "threads": 128}))
    with pytest.raises(CubinError, match="expected a record with threads 384; got 128"):
        on_demand(DECODE_VARIANT, cache)


def test_a_folder_that_can_not_be_written_passes_the_executor_over(stand_in_child, tmp_path):
    """A plan goes on to Triton for a CubinError; a NotADirectoryError stopped it."""
    stand_in_child()
    (tmp_path / "file").write_text("")
    with pytest.raises(CubinError, match="Not a directory"):
        on_demand(DECODE_VARIANT, CubinCache([tmp_path / "file" / "cubins"]))


def test_what_is_kept_of_a_build(stand_in_child):
    stand_in_child()
    ptx = ".visible .entry name_0(\n)\n.reqntid 384, 1, 1\n"
    cubin = make_cubin(DECODE_VARIANT, Built(ptx, b"image"))
    assert (cubin.variant, cubin.entry, cubin.threads, cubin.cluster) == (DECODE_VARIANT.name, "name_0", 384, 1)
    assert (cubin.shared_bytes, cubin.rows, cubin.dsl) == (DECODE_VARIANT.shape.shared_bytes, 16, "4.8.1")
    assert (cubin.sha256, cubin.may_start_early) == (sha256(b"image").hexdigest(), False)
    assert make_cubin(DECODE_VARIANT, Built(ptx + "griddepcontrol.wait;", b"image")).may_start_early


@pytest.mark.parametrize(
    "ptx",
    [
        "",
        ".visible .entry a(\n)\n.reqntid 384, 1, 1\n.visible .entry b(\n)\n.reqntid 384, 1, 1\n",
        ".visible .entry a(\n)\n.reqntid 256, 1, 1\n",
    ],
)
def test_a_build_that_is_not_one_kernel_of_the_right_size_is_refused(stand_in_child, ptx):
    stand_in_child()
    with pytest.raises(CubinError, match="expected one kernel of 384 threads"):
        make_cubin(DECODE_VARIANT, Built(ptx, b"image"))


# -- resources -------------------------------------------------------------------------------------------------------


def elf(attributes):
    """A 64-bit ELF file with nothing but names and .nv.info; each attribute: (format, attribute, payload)."""
    info = b"".join(struct.pack("<BBH", form, attribute, len(data)) + data for form, attribute, data in attributes)
    names = b"\0.shstrtab\0.nv.info\0"
    header, table_at = 64, 64 + len(names) + len(info)
    sections = [(0, 0, 0, 0), (1, 3, header, len(names)), (11, 1, header + len(names), len(info))]
    packed = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, 0, 0, 0, 0) for name, kind, at, size in sections
    )
    head = b"\x7fELF\x02" + bytes(0x28 - 5) + struct.pack("<Q", table_at) + bytes(10) + struct.pack("<HHH", 64, 3, 1)
    return head + names + info + packed


def sized(attribute, symbol, value):
    return 4, attribute, struct.pack("<II", symbol, value)


def test_registers_and_stack_are_those_of_the_largest_kernel():
    skipped = [(4, 0x2F, b"\xff\xff\xff\xff"), (4, 0x30, struct.pack("<II", 1, 999))]
    file = elf([sized(0x2F, 1, 40), sized(0x11, 1, 0), *skipped, sized(0x2F, 2, 168), sized(0x11, 2, 48)])
    assert (read_resources(file).registers, read_resources(file).stack) == (168, 48)


@pytest.mark.parametrize("file", [b"", b"\x7fELF\x01" + bytes(80), b"\x7fELF\x02" + b"\xff" * 80, elf([])])
def test_what_is_not_a_cubin_is_refused(file):
    with pytest.raises(ValueError, match="cubin: expected"):
        read_resources(file)


def test_registers_agree_with_another_reader(tmp_path):
    """cuobjdump, by way of Triton's report, of a kernel that Triton built."""
    pytest.importorskip("triton", reason="needs Triton: pip install pagedmla[triton]")
    from pagedmla.triton_kernels import compile as triton_table
    from pagedmla.triton_kernels.variants import step_variants

    merge = next(v for v in step_variants(["sm_90"]) if v.kernel == "merge")
    row = triton_table.compile_variant(merge, "sm_90", tmp_path)
    (path,) = tmp_path.glob("*.cubin")
    assert read_resources(path.read_bytes()).registers == row["registers"]


def test_the_report_is_json_with_a_row_a_line(tmp_path):
    rows = [{"kernel": "decode", "rows": 16}, {"kernel": "merge", "rows": 4}]
    path = tmp_path / "bench" / "results" / "compile-cutlass.json"
    table.write_report(rows, path)
    assert json.loads(path.read_text()) == rows
    assert len(path.read_text().splitlines()) == 2 + len(rows)


# -- with the DSL ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A decode and a combine kernel, their rows, and the folder that their files are in."""
    folder = tmp_path_factory.mktemp("built")
    rows = table.compile_all([DECODE_VARIANT, COMBINES[0]], cache=CubinCache([folder / "cubins"]), out_dir=folder)
    return rows, folder


@needs_dsl
def test_rows_have_the_form_of_tritons(built):
    rows, _ = built
    decode, merge = rows
    assert list(decode) == list(merge)
    assert (decode["kernel"], decode["executor"], decode["target"]) == ("decode", "cutlass", "sm_90")
    assert (decode["layout"], decode["rows"], decode["ctas_per_sm"]) == (DECODE_VARIANT.layout, 16, 1)
    assert decode["cutlass"] == dsl_version()
    assert 0 < decode["registers"] <= 168
    assert 0 < decode["warp_instructions_per_token"]
    assert merge["warp_instructions_per_token"] is None


@needs_dsl
@pytest.mark.parametrize(("variant", "arguments"), [(DECODE_VARIANT, DECODE), (COMBINES[0], COMBINE)])
def test_parameters_lie_where_the_launcher_puts_them(built, variant, arguments):
    """By PTX's rules: each parameter follows the one before, at the next multiple of its alignment."""
    _, folder = built
    ptx = (folder / f"{variant.name}.sm_90a.ptx").read_text()
    entry = ptx[ptx.index(".entry") : ptx.index(".reqntid")]
    places, end = [], 0
    for size, bytes_, align in re.findall(r"\.param (?:\.[busf](\d+)|\.align (\d+) \.b8 \w+\[(\d+)\])", entry):
        width, alignment = (int(size) // 8, int(size) // 8) if size else (int(align), int(bytes_))
        places.append(-(-end // alignment) * alignment)
        end = places[-1] + width
    assert places == offsets(arguments)


@needs_dsl
def test_a_built_kernel_is_kept_and_found(built):
    _, folder = built
    found = CubinCache([folder / "cubins"]).find(DECODE_VARIANT.name)
    assert found.image == (folder / f"{DECODE_VARIANT.name}.sm_90a.cubin").read_bytes()
    assert f".text.{found.entry}" in disassemble(found.image)


@pytest.fixture(scope="module")
def decode_code(built):
    """The decode kernel's instructions, and the loop of its consumers with those inside."""
    _, folder = built
    code = sass.parse(disassemble((folder / f"{DECODE_VARIANT.name}.sm_90a.cubin").read_bytes()))
    return code, *find_trip(code)


@needs_dsl
def test_a_usual_trip_jumps_over_rescales_mask_and_clearing(decode_code):
    """A formula took a rescale of O before each tile off the count, and would have taken off one that had become
    unconditional."""
    code, trip, inner = decode_code
    parts = rare_parts(code, trip)
    assert sorted(part.kind for part in parts) == ["clear", "mask", "rescale", "rescale"]

    def multiplications(indices):
        return sum(code[i].opcode.startswith("FMUL") for i in indices)

    of_all_outputs = COLUMN_TILES * DECODE_VARIANT.shape.rows // 2  # a thread's share of O: a multiplication each
    assert [multiplications(part.body) for part in parts if part.kind == "rescale"] == [of_all_outputs] * 2
    rare = {i for part in parts for i in part.body}
    assert multiplications(set(trip.body) - rare) < of_all_outputs
    counted = count_trip(code, trip, inner)
    assert counted.every - counted.usual == len(rare)
    assert 0 < counted.producer < counted.usual


@needs_dsl
def test_the_kernel_meets_as_often_as_the_checked_table(decode_code):
    """The kernel doesn't announce the meetings of a warpgroup, and the checker's table must not have more than there
    are: named barriers of 128 threads are a warpgroup's own, one of 256 is both consumers'."""
    code, trip, _ = decode_code

    def barriers(instructions, threads):
        return sum(each.opcode.startswith("BAR.SYNC") and each.text.endswith(threads) for each in instructions)

    role = decode_protocol(DECODE_VARIANT.shape.stages, ahead=True, statistics=True).role("consumer0")
    steps = [step for step in (*role.before, *role.trip, *role.after) if step.action is Action.MEET]
    assert barriers(code, ", 0x80") == sum(step.ring == role.name for step in steps)
    assert barriers(code, ", 0x100") == sum(step.ring == "consumers" for step in steps)
    in_trip = [step for step in role.trip if step.action is Action.MEET and step.block == 0]  # others: past the end
    assert barriers([code[i] for i in trip.body], ", 0x80") == len(in_trip)


@needs_dsl
def test_a_variant_that_the_compiler_refuses_is_a_row_with_the_reason():
    unknown = replace(DECODE_VARIANT, dtype="fp16")
    assert unknown not in VARIANTS
    (row,) = table.compile_all([unknown])
    assert row["refused"].startswith("KeyError")
    assert row["registers"] is None
