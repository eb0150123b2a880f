"""What the kernel's instructions do to a warpgroup's registers and shared memory, on numpy arrays.

Written from the PTX ISA's descriptions, for arrays [..., 32 lanes]. Nothing the DSL generates is run here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedmla.cutlass_kernels import fragments
from pagedmla.cutlass_kernels.tiles import KEYS, LATENT, PANEL_BYTES, WARPS, Shape

Array = NDArray[Any]

LANE = np.arange(32)
WARP = np.arange(WARPS)[:, None]  # [4, 1], against LANE


# -- numbers ---------------------------------------------------------------------------------------------------------


def to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """cvt.rn.satfinite.e4m3x2: round to nearest even, clamp to 448, NaN stays NaN."""
    clamped = torch.from_numpy(np.clip(x, -448.0, 448.0))  # clip keeps NaN
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _e4m3_values() -> NDArray[np.float32]:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).numpy()


E4M3 = _e4m3_values()  # [256]: what each code means


def power_of_two_at_least(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round positive float32 up to a power of two, by its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(np.float32)


# -- moves -----------------------------------------------------------------------------------------------------------


def ldmatrix(memory: Array, rows: Array, transpose: bool) -> Array:
    """ldmatrix.x4 of 8x8 16-bit matrices: `rows [..., 32]` byte offsets of 16-byte rows, to registers [..., 4, 32, 4].

    The last axis is a register's bytes, lowest first. Lane i names row i % 8 of matrix i // 8.
    """
    matrices = memory[rows[..., None] + np.arange(16)].reshape(*rows.shape[:-1], 4, 8, 8, 2)  # [m, row, column, byte]
    if transpose:
        matrices = matrices.swapaxes(-3, -2)
    return matrices.reshape(*rows.shape[:-1], 4, 32, 4)  # lane (g, t): row g, columns 2t and 2t + 1


def stmatrix_trans(memory: Array, rows: Array, registers: Array) -> None:
    """stmatrix.trans: `registers [..., m, 32, 4]` bytes to the 16-byte rows at `rows [..., 32]`, m matrices of them."""
    count = registers.shape[-3]
    matrices = registers.reshape(*registers.shape[:-2], 8, 8, 2).swapaxes(-3, -2)  # [.., m, row, column, byte]
    target = rows[..., : 8 * count].reshape(*rows.shape[:-1], count, 8)
    memory[target[..., None] + np.arange(16)] = matrices.reshape(*target.shape, 16)


def prmt(a: Array, b: Array, selector: int) -> Array:
    """Byte permute of two registers given as bytes on the last axis."""
    return np.concatenate((a, b), -1)[..., [(selector >> 4 * i) & 7 for i in range(4)]]


# -- fragments of a tile: computed once, on the offsets of bytes instead of bytes ------------------------------------


def value_fragments(precision: str) -> NDArray[np.int64]:
    """Offsets in a stage of what WGMMA sees as A of the value product: [512 rows, 64 key slots].

    Row r of a tile of 64 stands for column `output_column(r)`. A code is a byte; fp16 widens it after the permute.
    """
    offsets = np.arange(KEYS * LATENT)
    a = np.full((LATENT, KEYS), -1)
    g, t = LANE >> 2, LANE & 3
    for tile in range(LATENT // 64):
        row = 64 * tile + 16 * WARP + g  # [4, 32]
        for key in range(0, KEYS, 32):
            source = fragments.value_source(LANE, WARP) ^ (fragments.ODD_TILE * (tile & 1))
            source = source + fragments.value_step(tile, key)
            r = ldmatrix(offsets, source, transpose=True)  # [4, 4, 32, 4]
            for half in range(2):
                pair = r[:, 2 * half], r[:, 2 * half + 1]
                first = key + 16 * half
                if precision == "fp8":
                    low = prmt(*pair, fragments.EVEN_COLUMN_FP8)
                    high = prmt(*pair, fragments.ODD_COLUMN_FP8)
                    slots = [first + 4 * t + j for j in range(4)]  # k of an 8-bit A register
                else:
                    low = prmt(*pair, fragments.EVEN_COLUMN_FP16)
                    high = prmt(*pair, fragments.ODD_COLUMN_FP16)
                    slots = [first + 2 * t, first + 2 * t + 1, first + 2 * t + 8, first + 2 * t + 9]
                for j, slot in enumerate(slots):
                    a[row, slot] = low[..., j]
                    a[row + 8, slot] = high[..., j]
    return a


def score_fragments(precision: str, columns: int = LATENT, row_bytes: int = PANEL_BYTES) -> NDArray[np.int64]:
    """Offsets in a stage of A of the score product, e4m3 codes: [64 keys, columns in the order of Q's slots]."""
    if precision == "fp8":  # WGMMA reads shared memory, column by column
        offsets: NDArray[np.int64] = fragments.panel_byte(np.arange(KEYS)[:, None], np.arange(columns), KEYS, row_bytes)
        return offsets
    offsets = np.arange(KEYS * columns)
    a = np.full((KEYS, columns), -1)
    g, t = LANE >> 2, LANE & 3
    row = 16 * WARP + g
    for column in range(0, columns, 32):
        source = fragments.score_source(LANE, WARP, column % row_bytes, row_bytes) + fragments.score_step(column)
        r = ldmatrix(offsets, source, transpose=False)
        for half in range(2):
            first = column + 16 * half
            for j in range(4):  # bytes 0, 1 become one f16x2 register, bytes 2, 3 another
                slot = first + 2 * t + (j & 1) + 8 * (j >> 1)
                a[row, slot] = r[:, 2 * half, :, j]
                a[row + 8, slot] = r[:, 2 * half + 1, :, j]
    return a


def store_probabilities(shape: Shape, p: Array) -> NDArray[np.uint8]:
    """P [64 keys, rows], as codes of `element_bytes`, the way threads hold and store it: to shared memory's bytes."""
    memory = np.zeros(shape.probability_bytes, np.uint8)
    size = shape.element_bytes
    held = p.view(np.uint8).reshape(*p.shape, size)
    g, t = LANE >> 2, LANE & 3
    upper = 16 * WARP + g  # [4, 32]
    for block in range(0, shape.rows // 8, 2):
        registers = []
        for each in (block, block + 1):
            first, second = 8 * each + 2 * t, 8 * each + 2 * t + 1
            if size == 1:  # a row's keys g and g + 8 become neighbours
                parts = [held[upper, first], held[upper + 8, first], held[upper, second], held[upper + 8, second]]
                registers.append(np.concatenate(parts, -1))
            else:
                registers += [np.concatenate((held[k, first], held[k, second]), -1) for k in (upper, upper + 8)]
        rows = fragments.probability_target(LANE, WARP, size) + fragments.probability_step(block, size)
        stmatrix_trans(memory, rows, np.stack(registers, -3))
    return memory


def read_operand(memory: NDArray[np.uint8], rows: int, row_bytes: int, panel: int) -> NDArray[np.uint8]:
    """What WGMMA sees as a K-major operand [rows, row_bytes] in swizzled panels of `panel` bytes a row."""
    byte = np.arange(row_bytes)
    seen: NDArray[np.uint8] = memory[fragments.panel_byte(np.arange(rows)[:, None], byte, rows, panel)]
    return seen


# -- WGMMA -----------------------------------------------------------------------------------------------------------


def wgmma(
    a: Array, b: Array, bits: int | None = None, step: int = 32, total: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """A [M, K] times B [N, K] transposed, added to `total [M, N]` (None: zeros), in float32.

    `bits`: keep so many significant bits of each product and of the running sum, relative to the largest of a step of
    `step` columns, and drop the rest, as public measurements of Hopper's fp8 sums suggest (about 14).
    """
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    if bits is None:
        product: NDArray[np.float32] = a @ b.T if total is None else total + a @ b.T
        return product
    running = np.zeros((a.shape[0], b.shape[0])) if total is None else total.astype(np.float64)
    for k in range(0, a.shape[1], step):
        terms = a[:, None, k : k + step].astype(np.float64) * b[None, :, k : k + step]
        terms = np.concatenate((terms, running[..., None]), -1)
        largest = np.abs(terms).max(-1, keepdims=True)
        quantum = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - (bits - 1))
        running = (np.trunc(terms / quantum) * quantum).sum(-1)
    return running.astype(np.float32)
