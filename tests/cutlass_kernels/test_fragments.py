"""The index functions against the PTX ISA's layouts, element by element.

The claim that the kernel rests on: one transposed matrix load and two byte permutes make V^T as WGMMA wants it, in a
key order that a thread's own P has too. Every byte of a tile is a different number here, so nothing can pass by chance.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedmla.cutlass_kernels import emulation, fragments
from pagedmla.cutlass_kernels.tiles import KEYS, LATENT, PANEL_BYTES, ROPE, THREADS, Shape

PRECISIONS = ("fp8", "fp16")


@pytest.mark.parametrize("row_bytes", [64, 128])
def test_swizzle_is_a_permutation_of_16_byte_units_within_a_row(row_bytes: int) -> None:
    offset = np.arange(64 * row_bytes)
    placed = fragments.swizzle(offset, row_bytes)
    assert np.array_equal(np.sort(placed), offset)
    assert np.array_equal(placed // row_bytes, offset // row_bytes)
    assert np.array_equal(placed % 16, offset % 16)


def test_128_byte_swizzle_matches_the_isa_by_hand() -> None:
    """Row r keeps its eight 16-byte units in the order u ^ (r % 8)."""
    for row, unit in ((0, 5), (1, 0), (3, 6), (9, 7)):
        assert fragments.swizzle(row * 128 + unit * 16, 128) == row * 128 + (unit ^ (row % 8)) * 16


def test_64_byte_swizzle_matches_the_isa_by_hand() -> None:
    """Two rows share 128 bytes: row r keeps its four units in the order u ^ (r // 2 % 4)."""
    for row, unit in ((0, 3), (1, 3), (2, 0), (5, 1), (7, 3)):
        assert fragments.swizzle(row * 64 + unit * 16, 64) == row * 64 + (unit ^ (row // 2 % 4)) * 16


def test_accumulator_places_are_those_of_the_isa() -> None:
    """m64nN: thread 37 (warp 1, g 1, t 1) holds rows 17 and 25, columns 2, 3, 10, 11."""
    places = [(int(fragments.accumulator_row(5, 1, r)), int(fragments.accumulator_column(5, r))) for r in range(8)]
    assert places == [(17, 2), (17, 3), (25, 2), (25, 3), (17, 10), (17, 11), (25, 10), (25, 11)]


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_accumulators_cover_every_element_once(rows: int) -> None:
    register = np.arange(rows // 2)[:, None]
    lane, warp = np.arange(THREADS) % 32, np.arange(THREADS) // 32
    row, column = fragments.accumulator_row(lane, warp, register), fragments.accumulator_column(lane, register)
    assert np.array_equal(np.sort((row * rows + column).ravel()), np.arange(KEYS * rows))


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_row_place_gathers_a_threads_columns(rows: int) -> None:
    columns = rows // 4
    row = np.arange(rows)
    place = fragments.row_place(row, rows)
    assert np.array_equal(np.sort(place), row)
    assert np.array_equal(fragments.placed_row(place, rows), row)
    for t in range(4):
        own = sorted({int(fragments.accumulator_column(t, register)) for register in range(rows // 2)})
        assert sorted(place[own]) == list(range(t * columns, (t + 1) * columns))


@pytest.mark.parametrize("columns", [4, 8, 16])
def test_folding_leaves_each_column_to_lanes_that_have_seen_every_key(columns: int) -> None:
    """Fold by hand: a lane's value of a column is the set of lanes that have contributed."""
    seen = [[{lane} for _ in range(columns)] for lane in range(32)]
    owned = [list(range(columns)) for _ in range(32)]
    for bit in (4, 3, 2):
        after_seen, after_owned = [], []
        for lane in range(32):
            other = lane ^ (1 << bit)
            half = len(owned[lane]) // 2
            if half:
                keep = slice(half, None) if lane >> bit & 1 else slice(0, half)
                after_owned.append(owned[lane][keep])
                after_seen.append([a | b for a, b in zip(seen[lane][keep], seen[other][keep], strict=True)])
            else:
                after_owned.append(owned[lane])
                after_seen.append([a | b for a, b in zip(seen[lane], seen[other], strict=True)])
        seen, owned = after_seen, after_owned
    for lane in range(32):
        first, width = fragments.folded_row(lane, columns), fragments.folded_width(columns)
        assert owned[lane] == list(range(first, first + width))
        assert all(each == {other for other in range(32) if other & 3 == lane & 3} for each in seen[lane])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_value_product_needs_no_shuffle(precision: str) -> None:
    """V^T P^T from a swizzled tile and stored accumulators, in integers, equals the plain product."""
    shape = Shape(32, precision)
    tile = np.random.default_rng(0).integers(0, 256, (KEYS, LATENT)).astype(np.uint8)
    stage = np.zeros(tile.size, np.uint8)
    stage[fragments.key_byte(np.arange(KEYS)[:, None], np.arange(LATENT))] = tile
    codes = np.random.default_rng(1).integers(0, 200, (KEYS, 32)).astype(np.uint8 if precision == "fp8" else np.uint16)
    memory = emulation.store_probabilities(shape, codes)
    width = KEYS * shape.element_bytes
    p = np.ascontiguousarray(emulation.read_operand(memory, 32, width, width)).view(codes.dtype)
    v = stage[emulation.value_fragments(precision)]
    got = v.astype(np.int64) @ p.T.astype(np.int64)
    want = tile.T.astype(np.int64) @ codes.astype(np.int64)
    assert np.array_equal(got, want[fragments.output_column(np.arange(LATENT))])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("columns", "row_bytes"), [(LATENT, PANEL_BYTES), (ROPE, ROPE)])
def test_score_product_reads_every_column_in_qs_order(precision: str, columns: int, row_bytes: int) -> None:
    tile = np.random.default_rng(2).integers(0, 256, (KEYS, columns)).astype(np.uint8)
    stage = np.zeros(tile.size, np.uint8)
    stage[fragments.panel_byte(np.arange(KEYS)[:, None], np.arange(columns), KEYS, row_bytes)] = tile
    q = np.random.default_rng(3).integers(0, 100, (16, columns))
    slots = np.zeros_like(q)
    slots[:, fragments.query_slot(np.arange(columns), 1 if precision == "fp8" else 2)] = q
    k = stage[emulation.score_fragments(precision, columns, row_bytes)].astype(np.int64)
    assert np.array_equal(k @ slots.T, tile.astype(np.int64) @ q.T)


def test_matrix_loads_have_no_bank_conflicts() -> None:
    """Eight lanes' 16-byte rows of one matrix lie in eight different groups of four banks."""
    lane = np.arange(32)
    for warp in range(4):
        sources = [fragments.value_source(lane, warp) ^ odd for odd in (0, fragments.ODD_TILE)]
        panels = ((0, 128), (96, 128), (0, 64))
        sources += [fragments.score_source(lane, warp, column, width) for column, width in panels]
        sources += [fragments.probability_target(lane, warp, 1)[:16], fragments.probability_target(lane, warp, 2)]
        for source in sources:
            for first in range(0, len(source), 8):
                assert len(set(source[first : first + 8] % 128 // 16)) == 8


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0x00),
        (448.0, 0x7E),
        (1e9, 0x7E),
        (-1e9, 0xFE),
        (np.inf, 0x7E),
        (np.nan, 0x7F),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (1.0625, 0x38),
        (1.1875, 0x3A),
    ],
)  # the last three are ties: to even
def test_e4m3_rounding(x: float, code: int) -> None:
    assert emulation.to_e4m3(np.array([x], np.float32))[0] == code


def test_14_bits_drop_what_lies_below_the_largest() -> None:
    """1 and 32 numbers of 2^-14: each is below the 14th bit, so none of them counts; 2^-13 counts."""
    a = np.ones((1, 32))
    small, enough = (np.array([[1.0] + [2.0**-bit] * 31]) for bit in (14, 13))
    assert emulation.wgmma(a, small, bits=14)[0, 0] == 1.0
    assert emulation.wgmma(a, enough, bits=14)[0, 0] == 1.0 + 31 * 2.0**-13
