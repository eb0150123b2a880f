"""Every variant that may be chosen compiles for sm_90a, and its instructions are the ones it was designed to spend.

Needs the DSL and no GPU: what it generates is compiled and disassembled here, never run. Counts of instructions are of
one trip of a consumer, which covers two tiles of keys; a loop inside it runs SCORE_TRIPS times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pytest

from pagedmla.cutlass_kernels import arguments, build, resources, time_model
from pagedmla.cutlass_kernels.protocol import Action, decode_protocol
from pagedmla.cutlass_kernels.tiles import COLUMN_TILES, KEYS, SCORE_TRIPS, SHARED_BYTES, WARPS, Shape
from pagedmla.cutlass_kernels.usual_trip import count_trip, find_trip, rare_parts
from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS, CombineVariant, Variant
from pagedmla.hardware import sass
from pagedmla.hardware.cost import H200
from pagedmla.hardware.loops import Instruction, Loop, natural_loops

pytest.importorskip("cutlass", reason="the CUTLASS Python DSL isn't installed; pip install nvidia-cutlass-dsl[cu13]")

BUDGET_AT_16_ROWS = {"fp8_rope_bf16": 127, "fp8_rope_bf16_prescaled": 127, "fp8_flat": 115}  # warp instructions a key


def compiled(variant: Variant | CombineVariant) -> build.Built:
    ((_, built),) = build.build([variant])
    assert not isinstance(built, str), built
    return built


def tensor_instructions(code: Sequence[Instruction], loop: Loop) -> list[str]:
    return [code[i].opcode for i in loop.body if sass.classify(code[i]) == "tensor"]


def assert_rare_parts(code: Sequence[Instruction], trip: Loop, shape: Shape) -> None:
    """What a usual trip skips (resources.py) is what it was designed to skip: O's rescales stand behind branches."""
    parts = rare_parts(code, trip)
    assert sorted(part.kind for part in parts) == ["clear", "mask", "rescale", "rescale"]

    def multiplications(indices: Iterable[int]) -> int:
        return sum(code[i].opcode.startswith("FMUL") for i in indices)

    of_all_outputs = COLUMN_TILES * shape.rows // 2  # a thread's share of O: a multiplication each
    assert [multiplications(part.body) for part in parts if part.kind == "rescale"] == [of_all_outputs] * 2
    rare = {i for part in parts for i in part.body}
    assert multiplications(set(trip.body) - rare) < of_all_outputs


def assert_meetings(code: Sequence[Instruction], variant: Variant) -> None:
    """Named barriers are those of the checked table: 128 threads are a warpgroup's own, 256 both consumers'."""
    role = decode_protocol(variant.shape.stages, ahead=variant.shape.ahead, statistics=True).role("consumer0")
    met = [step.ring for step in (*role.before, *role.trip, *role.after) if step.action is Action.MEET]
    found = [each.text.rpartition(", ")[2] for each in code if each.opcode.startswith("BAR.SYNC")]
    assert (found.count("0x80"), found.count("0x100")) == (met.count(role.name), met.count("consumers"))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_decode(variant: Variant) -> None:
    built = compiled(variant)
    shape = variant.shape

    entries = re.findall(r"\.entry\s+(\w+)", built.ptx)
    assert len(entries) == 1
    assert "cutlass" not in entries[0]  # ptxas treats names with that word differently
    assert f".reqntid {variant.threads}, 1, 1" in built.ptx
    assert parameter_sizes(built.ptx) == [arguments.SIZES[each.kind] for each in arguments.DECODE]
    assert "griddepcontrol.launch_dependents" in built.ptx  # for the merge, which waits for the end of this one
    assert "griddepcontrol.wait" not in built.ptx  # its own launch waits for all before it

    used = resources.read_resources(built.cubin)
    assert used.registers <= variant.protocol.launch_registers
    assert variant.shared_bytes <= SHARED_BYTES
    for role in variant.protocol.roles:
        assert re.search(rf"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+{role.registers};", built.ptx)

    code = sass.parse(resources.disassemble(built.cubin))
    found = find_trip(code)
    assert found is not None
    trip, inner = found
    opcodes = tensor_instructions(code, trip)
    for loop in inner:
        opcodes += (SCORE_TRIPS - 1) * tensor_instructions(code, loop)
    fp8 = sum(opcode.startswith("QGMMA") for opcode in opcodes)
    half = sum(opcode.startswith("HGMMA") for opcode in opcodes)
    if shape.precision == "fp8":
        products = shape.terms // shape.stacked  # of K with Q: stacked terms take one
        rope = 0 if shape.rope != "e4m3" else 2 * products
        parts = max(shape.rows // 32, 1)
        assert fp8 == 16 * products + rope + 2 * COLUMN_TILES * (KEYS // 32) * parts
        assert half == (0 if shape.rope == "e4m3" else 4 * shape.rope_parts)
    else:
        assert fp8 == 0
        assert half == 32 + 4 + 2 * COLUMN_TILES * (KEYS // 16)

    assert sass.spill_words([code[i] for i in trip.body]) == 0
    assert used.stack <= 16  # between items, where 64 rows leave a register or two too few
    bodies = [[code[i] for i in loop.body] for loop in natural_loops(code)]
    copying = min((body for body in bodies if any("UTMALDG" in each.opcode for each in body)), key=len)
    few = variant.cluster == 2 and variant.box == 16  # two boxes for two CTAs in the producer's 24 registers
    assert sass.spill_words(copying) <= (12 if few else 0)
    # ptxas adds a wait where an accumulator is touched that is under way: sums that began with zeros had one.
    assert built.ptx.count("wgmma.wait_group") == sum(each.opcode.startswith("WARPGROUP.DEPBAR") for each in code)
    stores = [each.opcode for each in code if each.opcode.startswith("STS")]
    assert not [opcode for opcode in stores if re.search(r"\.[US](8|16)$", opcode)]
    copies = [each.opcode for each in code if each.opcode.startswith("UTMALDG")]
    assert len(copies) == 5 * variant.copies
    assert all(("MULTICAST" in opcode) == (variant.cluster > 1) for opcode in copies)

    assert_rare_parts(code, trip, shape)
    assert_meetings(code, variant)
    counted = count_trip(code, trip, inner)
    if variant.rows == 16:
        assert (counted.every * WARPS + counted.producer) / KEYS <= BUDGET_AT_16_ROWS[variant.layout]  # all warps
    if variant.rows >= 64:
        cycles = time_model.tile_cycles(variant, H200, counted.usual_with_producer)
        assert cycles.issue <= max(cycles.tensor, cycles.shared)


@pytest.mark.parametrize("variant", COMBINES, ids=lambda variant: variant.name)
def test_combine(variant: CombineVariant) -> None:
    built = compiled(variant)
    assert f".reqntid {variant.threads}, 1, 1" in built.ptx
    assert parameter_sizes(built.ptx) == [arguments.SIZES[each.kind] for each in arguments.COMBINE]
    used = resources.read_resources(built.cubin)
    code = sass.parse(resources.disassemble(built.cubin))
    assert used.stack == sass.spill_words(code) == 0
    # Two CTAs a multiprocessor, never three: those that start early would crowd where decode ends first.
    assert 65536 // (variant.threads * -(-used.registers // 8) * 8) == variant.per_multiprocessor
    # Each wait is a way to L2 and back: 16-byte loads before it. The path for up to 16 pieces waits twice.
    assert sorted(loads_in_flight(code)) == [4, 8, 8, 8, 9]
    assert (variant.alone, variant.first_loads, variant.loads) == ((4, 8, 16), 8, 9)
    assert variant.warps * variant.loads >= time_model.SMS  # a row in 132 pieces: one way


@pytest.mark.parametrize("variant", COMBINES, ids=lambda variant: variant.name)
def test_the_merge_reads_nothing_and_ends_nowhere_before_decode_has_ended(variant: CombineVariant) -> None:
    """Kernels behind the merge wait for the merge alone. It may run while decode writes, so nothing that decode writes
    is read-only memory to it: ld.global.nc may give what L1 held before."""
    built = compiled(variant)
    assert ".nc" not in built.ptx
    opcodes = [each.opcode for each in sass.parse(resources.disassemble(built.cubin))]
    waits = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK")]
    others = [i for i, opcode in enumerate(opcodes) if re.match("LDG|STG|EXIT|BRA|BAR", opcode)]
    assert len(waits) == 1
    assert waits[0] < others[0]  # no branch goes round it
    loads = [opcode for opcode in opcodes if opcode.startswith("LDG")]
    assert loads
    assert all("STRONG.GPU" in opcode and "CONSTANT" not in opcode for opcode in loads)  # past L1


def loads_in_flight(code: Sequence[Instruction]) -> list[int]:
    """Of each run of 16-byte loads from global memory: how many are on their way when one is first waited for."""
    runs, pending, wide = [], set[int](), 0
    for each in code:
        operands = each.text.partition(each.opcode)[2]
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        if each.opcode.startswith("LDG"):
            pending.update(range(registers[0], registers[0] + (4 if ".128" in each.opcode else 1)))
            wide += ".128" in each.opcode
            continue
        reads = registers if re.match("ST|[FI]SETP", each.opcode) else registers[1:]  # the first is what it writes
        if pending.intersection(reads):
            runs += [wide] if wide else []
            pending, wide = set(), 0
    return runs


def test_loads_in_flight_are_counted_up_to_the_first_wait() -> None:
    listing = """
        /*0000*/                   LDG.E.STRONG.GPU R3, desc[UR8][R8.64] ;
        /*0010*/                   LDG.E.128.STRONG.GPU R12, desc[UR8][R10.64] ;
        /*0020*/               @P0 LDG.E.128.STRONG.GPU R16, desc[UR8][R10.64+0x10] ;
        /*0030*/                   IADD3 R10, R10, R9, RZ ;
        /*0040*/                   SHFL.BFLY PT, R4, R3, 0x8, 0x1f ;
        /*0050*/                   LDG.E.128.STRONG.GPU R20, desc[UR8][R10.64] ;
        /*0060*/                   FFMA R0, R4, R23, R0 ;
        /*0070*/                   EXIT ;
    """
    assert loads_in_flight(sass.parse(listing)) == [2, 1]


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel."""
    block = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    sizes = []
    for kind, array in re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\n]*?(?:\[(\d+)\])?,?\n", block):
        sizes.append(int(array) if array else int(kind[1:]) // 8)
    return sizes


def test_variants_have_names_and_reasons_of_their_own() -> None:
    names = [variant.name for variant in (*VARIANTS, *COMBINES)]
    assert len(set(names)) == len(names)
    assert all(variant.reason for variant in (*VARIANTS, *COMBINES))


def test_parameters_lie_where_the_launcher_packs_them() -> None:
    """Both maps first, at multiples of 64; then 8-byte, then 4-byte arguments without a gap."""
    places = arguments.offsets(arguments.DECODE)
    assert places[:3] == [0, 128, 256]
    assert all(
        place % min(arguments.SIZES[each.kind], 64) == 0 for place, each in zip(places, arguments.DECODE, strict=True)
    )
    assert places == sorted(places)
