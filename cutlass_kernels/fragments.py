"""Who holds what: swizzles, matrix loads, byte permutes and WGMMA fragments as index functions.

Plain arithmetic, so that the kernel (values of the DSL) and the model (arrays) share one definition. Layouts are
those of the PTX ISA: "Register fragments and shared memory matrix layouts" of wgmma, ldmatrix, stmatrix and prmt.
`lane` is a thread's place in its warp, g = lane >> 2, t = lane & 3; `warp` a warp's place in its warpgroup.

Why no transpose of V is needed. A tile of K lies [key, column] in shared memory; O^T = V^T P^T wants V^T [column, key]
with 4 neighbouring keys in a register. One transposed matrix load gives a thread two keys of two neighbouring columns;
two registers of it and two byte permutes give 4 keys of one column each, in the order 2t, 2t + 8, 2t + 1, 2t + 9. That
is the order in which a thread of S^T (rows g and g + 8) stores its P. So P is written by one transposed matrix store,
and the order of keys, the same on both sides, cancels. Rows g and g + 8 of O^T become columns 2g and 2g + 1, neighbours
for the output.
"""

from __future__ import annotations

from typing import Any

from pagedmla.cutlass_kernels.tiles import KEYS, PANEL_BYTES

# What a byte permute takes: nibble i names the byte (0..3 of the first register, 4..7 of the second) for byte i.
EVEN_COLUMN_FP8 = 0x6240  # keys 2t, 2t + 8, 2t + 1, 2t + 9 of column 2g
ODD_COLUMN_FP8 = 0x7351  # the same of column 2g + 1
EVEN_COLUMN_FP16 = 0x6420  # keys 2t, 2t + 1, 2t + 8, 2t + 9 of column 2g, for two conversions
ODD_COLUMN_FP16 = 0x7531


def swizzle(offset: Any, row_bytes: int) -> Any:
    """Where byte `offset` of a panel of 128- or 64-byte rows lies: its 16-byte unit, xored with bits of its row."""
    return offset ^ ((offset >> 3) & (row_bytes - 16))


def panel_byte(row: Any, byte: Any, rows: int, row_bytes: int = PANEL_BYTES) -> Any:
    """Byte `byte` of row `row` in a row of panels, each [rows, row_bytes] and swizzled."""
    panel = byte // row_bytes
    return panel * (rows * row_bytes) + swizzle(row * row_bytes + byte % row_bytes, row_bytes)


def key_byte(key: Any, column: Any) -> Any:
    """Byte of a latent column in a tile of keys."""
    return panel_byte(key, column, KEYS)


# -- matrix loads and stores: the 16-byte row that a lane names, its own part and a part that is known beforehand ----


ODD_TILE = 64  # what tells an odd column tile's `value_source` from an even one's: xored, for it crosses the swizzle


def value_source(lane: Any, warp: Any) -> Any:
    """ldmatrix.x4.trans: 32 keys, the warp's 16 latent columns of an even tile of 64 columns."""
    return lane * PANEL_BYTES + ((16 * warp) ^ ((lane & 7) << 4))


def value_step(tile: Any, key: int) -> Any:
    """What a column tile and a first key (0 or 32) add to `value_source`, beside ODD_TILE."""
    return (tile >> 1) * (KEYS * PANEL_BYTES) + key * PANEL_BYTES


def score_source(lane: Any, warp: Any, column: int, row_bytes: int = PANEL_BYTES) -> Any:
    """ldmatrix.x4: the warp's 16 keys, 32 columns from `column` of a panel on (keys 0..7 and 8..15, then 16 on)."""
    row = 16 * warp + (lane & 15)
    return swizzle(row * row_bytes + (lane & 16), row_bytes) ^ column


def score_step(column: int) -> int:
    """What the panels before a latent column add to `score_source`."""
    return (column // PANEL_BYTES) * (KEYS * PANEL_BYTES)


def probability_target(lane: Any, warp: Any, element_bytes: int) -> Any:
    """stmatrix.trans: where the rows of a warp's P lie, in a tile [rows, 64 keys]: 16 query rows, the warp's 16 keys.

    e4m3: x2, a row is the warp's keys of one query row. fp16: x4, keys 0..7 and 8..15 apart.
    """
    row_bytes = KEYS * element_bytes
    if element_bytes == 1:
        row, unit = lane & 15, warp
    else:
        row, unit = (lane & 7) + ((lane & 16) >> 1), 2 * warp + ((lane & 8) >> 3)
    return swizzle(row * row_bytes + unit * 16, row_bytes)


def probability_step(block: int, element_bytes: int) -> int:
    """What 8 * block query rows before add to `probability_target`; block is even."""
    return 8 * block * KEYS * element_bytes


# -- WGMMA: which element a register holds ---------------------------------------------------------------------------


def accumulator_row(lane: Any, warp: Any, register: Any) -> Any:
    """Row of an m64nN float32 accumulator register: keys of S^T, or (permuted) columns of O^T."""
    return 16 * warp + (lane >> 2) + 8 * ((register >> 1) & 1)


def accumulator_column(lane: Any, register: Any) -> Any:
    """Query row (N) of an accumulator register."""
    return 8 * (register >> 2) + 2 * (lane & 3) + (register & 1)


def column_registers(column: int) -> tuple[int, int]:
    """Accumulator registers of one of a thread's columns (query rows): its upper key, and its lower."""
    upper = 4 * (column >> 1) + (column & 1)
    return upper, upper + 2


def row_place(row: Any, rows: int) -> Any:
    """Where a query row's statistics lie in an array of `rows`: a thread's accumulator columns become neighbours."""
    return ((row >> 1) & 3) * (rows // 4) + 2 * (row >> 3) + (row & 1)


def placed_row(place: Any, rows: int) -> Any:
    """The query row at a place: the inverse of `row_place`."""
    thread, within = place // (rows // 4), place % (rows // 4)
    return 8 * (within >> 1) + 2 * thread + (within & 1)


def folded_row(lane: Any, rows: int) -> Any:
    """First of a thread's `rows` query rows that stays with a lane when the warp's keys are folded.

    Lanes that differ in bits 4, 3 and 2 hold other keys of the same rows. Folding halves what each keeps, in that
    order, until a row is left; then both keep it.
    """
    row, width = 0, rows
    for bit in (4, 3, 2):
        if width > 1:
            width //= 2
            row = row + ((lane >> bit) & 1) * width
    return row


def folded_width(rows: int) -> int:
    """How many rows stay with a lane."""
    return max(rows // 8, 1)


def output_column(row: Any) -> Any:
    """Latent column, within a tile of 64, that row `row` of O^T stands for."""
    return (row & ~15) + 2 * (row & 7) + ((row >> 3) & 1)


def query_slot(column: Any, element_bytes: int) -> Any:
    """Element of Q's row in which a latent column lies.

    fp16: K's registers bring columns 4t .. 4t + 3 of 16; WGMMA takes two of them as 2t, 2t + 1, two as 2t + 8, 2t + 9.
    """
    if element_bytes == 1:
        return column
    within = column & 15
    return (column & ~15) + 2 * (within >> 2) + (within & 1) + 8 * ((within >> 1) & 1)
