"""Shared memory as WGMMA's operands: layouts, tensors and instructions for each product."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32

from pagedmla.cutlass_kernels.tiles import KEYS, LATENT, PANEL_BYTES, PROBABILITY_STAGES, ROPE, Shape

_K = cute.nvgpu.OperandMajorMode.K
_SWIZZLES = {128: warpgroup.SmemLayoutAtomKind.K_SW128, 64: warpgroup.SmemLayoutAtomKind.K_SW64}


def content_type(shape: Shape) -> Any:
    """Of Q's latent columns, of P, and of K and V once they are in registers."""
    return cutlass.Float8E4M3FN if shape.precision == "fp8" else cutlass.Float16


def rope_type(shape: Shape) -> Any:
    if shape.rope != "e4m3":
        return cutlass.BFloat16
    return content_type(shape)


class Instruction(NamedTuple):
    """m64 x rows WGMMA of one warpgroup, A from shared memory or from registers, both operands K-major."""

    dtype: Any
    rows: int
    in_registers: bool

    def make(self) -> Any:
        source = warpgroup.OperandSource.RMEM if self.in_registers else warpgroup.OperandSource.SMEM
        if self.dtype is cutlass.Float8E4M3FN:
            op = warpgroup.MmaF8Op(self.dtype, self.dtype, Float32, (64, self.rows, 32), source, _K, _K)
        else:
            op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.rows, 16), source, _K, _K)
        return cute.make_tiled_mma(op)

    def fragments_a(self, tensor: Any, thread: Any) -> Any:
        part = self.make().get_slice(thread)
        return part.make_fragment_A(part.partition_A(tensor))

    def fragments_b(self, tensor: Any, thread: Any) -> Any:
        part = self.make().get_slice(thread)
        return part.make_fragment_B(part.partition_B(tensor))

    def registers_a(self, columns: int, thread: Any) -> tuple[Any, Any]:
        """Registers of A [64, columns]: as fragments, and as 32-bit words [4, steps]."""
        shape = self.make().get_slice(thread).partition_shape_A((64, columns))
        a = cute.make_rmem_tensor(shape, self.dtype)
        steps = columns * self.dtype.width // 256
        return a, cute.make_tensor(cute.recast_tensor(a, cutlass.Int32).iterator, cute.make_layout((4, steps)))


def _panels(base: Any, offset: int, dtype: Any, rows: int, row_bytes: int, panel: int, stages: int) -> Any:
    """[rows, row_bytes as elements, stages] in swizzled panels of `panel` bytes a row."""
    elements = row_bytes * 8 // dtype.width
    atom = warpgroup.make_smem_layout_atom(_SWIZZLES[panel], dtype)
    layout = cute.tile_to_shape(atom, (rows, elements, stages), (0, 1, 2))
    pointer = cute.recast_ptr(base + offset, layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


def query_latent(base: Any, shape: Shape) -> Any:
    """[query_rows, 512 * terms, 1], stacked terms counted among the rows"""
    row_bytes = LATENT * shape.element_bytes * (shape.terms // shape.stacked)
    return _panels(base, 0, content_type(shape), shape.query_rows, row_bytes, PANEL_BYTES, 1)


def query_rope(base: Any, shape: Shape) -> Any:
    """[rows of a product, 64 * terms, parts], stacked terms counted among the rows"""
    width = shape.query_rope_bytes
    row_bytes = width * shape.query_rope_terms * shape.rows // shape.query_rope_rows
    rows = shape.query_rope_rows // shape.rope_parts
    return _panels(base, shape.query_rope_offset, rope_type(shape), rows, row_bytes, width, shape.rope_parts)


def key_latent(base: Any, shape: Shape) -> Any:
    """[64, 512, stages] e4m3"""
    dtype = cutlass.Float8E4M3FN
    return _panels(base, shape.latent_offset, dtype, KEYS, LATENT, PANEL_BYTES, shape.stages)


def key_rope(base: Any, shape: Shape) -> Any:
    """[64, 64, stages] bf16 or e4m3"""
    dtype = cutlass.Float8E4M3FN if shape.rope == "e4m3" else cutlass.BFloat16
    width = ROPE * dtype.width // 8
    return _panels(base, shape.rope_offset, dtype, KEYS, width, width, shape.stages)


def probabilities(base: Any, shape: Shape, rows: int) -> Any:
    """[rows, 64, parts]: P in parts of `rows` query rows, those of the first stage first."""
    row_bytes = KEYS * shape.element_bytes
    parts = PROBABILITY_STAGES * (shape.rows // rows)
    return _panels(base, shape.probability_offset, content_type(shape), rows, row_bytes, row_bytes, parts)
