"""What a usual trip jumps over, found in listings written by hand: one loop with every kind of block, then with faults.

The loop is the decode kernel's in small: products, a mask, a thread's settling, a clearing loop with its meeting, a
rescale, the other consumer's tile behind a branch of its own, a wait that is repeated behind the kernel's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagedmla.cutlass_kernels.tiles import SCORE_TRIPS
from pagedmla.cutlass_kernels.usual_trip import RarePart, count_trip, rare_parts
from pagedmla.hardware import sass
from pagedmla.hardware.loops import Instruction, Loop, natural_loops

MASK = ["@!P1 BRA `(.L_x_1)", "LDS R1, [R2]", "FSEL R4, R4, -INF , !P5", ".L_x_1:"]
SETTLE = ["@P2 BRA `(.L_x_2)", "MUFU.EX2 R5, R5", "STS [R2], R5", ".L_x_2:"]
CLEAR = [
    "@P1 BRA `(.L_x_4)", "@P2 BRA `(.L_x_5)", "IMAD R6, R6, R7, RZ", ".L_x_3:", "STS.128 [R6], RZ",
    "@!P3 BRA `(.L_x_3)", ".L_x_5:", "FENCE.VIEW.ASYNC.S", "BAR.SYNC.DEFER_BLOCKING R8, 0x80", ".L_x_4:",
]  # fmt: skip
RESCALE = ["@!P4 BRA `(.L_x_6)", "LDS R1, [R2]", "FMUL R9, R9, R1", "FMUL R10, R10, R1", "FMUL R11, R11, R1", ".L_x_6:"]
OTHERS_TILE = ["@!P5 BRA `(.L_x_7)", "QGMMA.64x16x32.F32.E4M3.E4M3 R12, R13, gdesc[UR4], R12", ".L_x_7:"]
WAIT = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R14", "@!P0 BRA `(.L_x_8)", ".L_x_9:"]
STUB = [".L_x_8:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R14", "@P0 BRA `(.L_x_9)", "BRA `(.L_x_8)"]
PRODUCER = [".L_x_10:", "UTMALDG.3D [UR6], [UR7]", "UTMALDG.3D [UR6], [UR7]", "@!P6 BRA `(.L_x_10)"]
TRIP = [*MASK, *WAIT, *SETTLE, *CLEAR, *OTHERS_TILE, *RESCALE]


def parsed(trip: Sequence[str]) -> list[Instruction]:
    product = "QGMMA.64x16x32.F32.E4M3.E4M3 R12, gdesc[UR2], R12"
    lines = [*PRODUCER, ".L_x_0:", product, *trip, "@!P7 BRA `(.L_x_0)", "EXIT", *STUB]
    at, listing = 0, []
    for line in lines:
        if line.endswith(":"):
            listing.append(line)
        else:
            listing.append(f"        /*{at:04x}*/ {line} ;")
            at += 16
    return sass.parse("\n".join(listing))


def trip_of(code: Sequence[Instruction]) -> Loop:
    products = [loop for loop in natural_loops(code) if any("QGMMA" in code[i].opcode for i in loop.body)]
    return max(products, key=lambda loop: len(loop.body))


def parts_of(trip: Sequence[str]) -> tuple[list[Instruction], list[RarePart]]:
    code = parsed(trip)
    return code, rare_parts(code, trip_of(code))


def test_what_a_usual_trip_jumps_over() -> None:
    code, parts = parts_of(TRIP)
    assert [(part.kind, len(part.body)) for part in parts] == [("mask", 2), ("clear", 6), ("rescale", 4)]
    assert code[parts[1].body[0]].opcode == "BRA"  # its own branch round the loop is jumped over with it
    assert [code[i].opcode for i in parts[2].body] == ["LDS", "FMUL", "FMUL", "FMUL"]


def test_counts_of_a_trip_and_of_the_producers() -> None:
    code = parsed(TRIP)
    counted = count_trip(code, trip_of(code), [])
    lines = (
        sum(not line.endswith(":") for line in TRIP) + 2
    )  # the product, and the branch back; the stub isn't a trip's
    assert (counted.every, counted.usual, counted.producer) == (lines, lines - 12, 3)
    assert counted.usual_with_producer == lines - 12 + 0.75


def test_products_in_a_loop_count_once_a_trip_of_it() -> None:
    inner = [".L_x_11:", "QGMMA.64x16x32.F32.E4M3.E4M3 R12, gdesc[UR2], R12", "@P1 BRA `(.L_x_11)"]
    code = parsed([*inner, *TRIP])
    trip = trip_of(code)
    loops = [loop for loop in natural_loops(code) if set(loop.body) < set(trip.body) and len(loop.body) == 2]
    held = [loop for loop in loops if "QGMMA" in code[loop.header].opcode]
    assert len(held) == 1
    counted = count_trip(code, trip, held)
    assert counted.every == len(trip.body) + (SCORE_TRIPS - 1) * 2


def test_a_rescale_that_no_branch_jumps_over_is_usual() -> None:
    """A rescale of every tile cost 13 % of all instructions at 128 heads; taken off by a formula, it was still free."""
    unconditional = [*TRIP[: -len(RESCALE)], *RESCALE[1:-1]]
    code, parts = parts_of(unconditional)
    assert [part.kind for part in parts] == ["mask", "clear"]
    with_branch, without = (count_trip(each, trip_of(each), []) for each in (parsed(TRIP), code))
    assert without.usual == with_branch.usual + 3  # the branch is gone, four instructions came


@pytest.mark.parametrize(
    "work",
    [
        "QGMMA.64x16x32.F32.E4M3.E4M3 R12, R13, gdesc[UR4], R12",
        "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR14], RZ",
        "MUFU.EX2 R5, R5",
    ],
)
def test_a_part_with_usual_work_in_it_is_not_rare(work: str) -> None:
    """The other consumer's tile is jumped over in an item's first trip alone."""
    _, parts = parts_of([*TRIP[: -len(RESCALE)], *RESCALE[:2], work, *RESCALE[2:]])
    assert [part.kind for part in parts] == ["mask", "clear"]


def test_a_part_that_is_entered_from_elsewhere_is_not_rare() -> None:
    """What a second way leads into isn't what the first way's branch jumps over."""
    _, parts = parts_of(["@P3 BRA `(.L_x_12)", *TRIP[: -len(RESCALE)], *RESCALE[:2], ".L_x_12:", *RESCALE[2:]])
    assert "rescale" not in [part.kind for part in parts]


def test_a_part_of_no_known_kind_is_named_so() -> None:
    _, parts = parts_of([*TRIP, "@P3 BRA `(.L_x_12)", "IMAD R6, R6, R7, RZ", "LDS R1, [R2]", ".L_x_12:"])
    assert [part.kind for part in parts] == ["mask", "clear", "rescale", "other"]
