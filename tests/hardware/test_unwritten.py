"""Reads of uniform registers that nothing wrote, in listings as short as the trap they hold.

A WGMMA takes its descriptors from uniform registers: a quad for both operands in shared memory (`gdesc[UR4]` means UR4
to UR7), a pair where the first operand is in registers.
"""

from __future__ import annotations

import pytest

from pagedmla.hardware import sass
from pagedmla.hardware.unwritten import unwritten_reads


def faults(text: str) -> list[tuple[str, int]]:
    """(opcode, register) of each fault in lines of instructions and labels."""
    lines = [
        line if line.endswith(":") else f"        /*{16 * number:04x}*/                   {line} ;"
        for number, line in enumerate(filter(None, map(str.strip, text.splitlines())))
    ]
    code = sass.parse("\n".join(lines))
    return [(code[index].opcode, register) for index, register in unwritten_reads(code)]


def test_a_copy_that_only_later_trips_make():
    """The outputs of an H200 were wrong and its LSE right: ptxas 12.8 makes a descriptor at the end of the loop for the
    next trip, and had lost the copy in front of the loop that serves the first."""
    loop = """
        .L_x_0:
        HGMMA.64x16x16.F32 R24, gdesc[UR4], R24, gsb0
        UMOV UR4, UR8
        @P0 BRA `(.L_x_0)
        EXIT
    """
    before = "ULDC.64 UR6, c[0x0][0x210]\nUMOV UR5, 0x40000040\nUMOV UR8, 0x10\n"
    assert faults(before + loop) == [("HGMMA.64x16x16.F32", 4)]
    assert faults(before + "UMOV UR4, UR8\n" + loop) == []


@pytest.mark.parametrize(("other_arm", "found"), [("UMOV UR4, 0x2", []), ("MOV R4, 0x2", [("IADD3", 4)])])
def test_a_register_is_safe_where_every_path_wrote_it(other_arm, found):
    assert found == faults(f"""
        @P0 BRA `(.L_x_0)
        UMOV UR4, 0x1
        BRA `(.L_x_1)
        .L_x_0:
        {other_arm}
        .L_x_1:
        IADD3 R2, R2, UR4, RZ
        EXIT
    """)


def test_a_write_in_the_loop_is_lost_to_no_later_trip():
    """The back edge meets a path that wrote more than the entry did; what the entry lacks stays a fault, no more."""
    assert faults("""
        UMOV UR4, 0x1
        .L_x_0:
        UIADD3 UR5, UR4, 0x1, URZ
        IADD3 R2, R2, UR5, RZ
        IADD3 R3, R3, UR6, RZ
        UMOV UR6, UR5
        @P0 BRA `(.L_x_0)
        EXIT
    """) == [("IADD3", 6)]


@pytest.mark.parametrize("missing", [4, 5, 6, 7])
def test_two_descriptors_are_a_quad(missing):
    written = "\n".join(f"UMOV UR{register}, 0x1" for register in range(4, 8) if register != missing)
    assert faults(f"{written}\nHGMMA.64x16x16.F32 R24, gdesc[UR4], R24\nEXIT") == [("HGMMA.64x16x16.F32", missing)]


def test_one_descriptor_is_a_pair():
    """Behind a first operand in registers; the transposed form names it alike."""
    product = "HGMMA.64x128x16.F32 R24, R4, gdesc[UR4].tnspB, R24, gsb0\nEXIT"
    assert faults(f"UMOV UR4, 0x1\nUMOV UR5, 0x1\n{product}") == []
    assert faults(f"UMOV UR4, 0x1\n{product}") == [("HGMMA.64x128x16.F32", 5)]


def test_what_a_write_covers():
    """64 bits are a pair. A guarded write counts, since ptxas guards what it reads under the same predicate."""
    assert faults("ULDC.64 UR4, c[0x0][0x208]\nLDG.E R2, desc[UR4][R2.64]\nEXIT") == []
    assert faults("ULDC UR4, c[0x0][0x208]\nLDG.E R2, desc[UR4][R2.64]\nEXIT") == [("LDG.E", 5)]
    assert faults("@UP0 UMOV UR4, 0x1\n@UP0 UIADD3 UR5, UR4, 0x1, URZ\nEXIT") == []


def test_code_that_nothing_reaches_has_no_faults():
    assert faults("EXIT\nIADD3 R2, R2, UR4, RZ") == []


def test_an_empty_listing():
    assert unwritten_reads([]) == []
    assert unwritten_reads(sass.parse("")) == []
