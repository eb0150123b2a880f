"""Combine: partial results of cut requests into one. Rows that weren't cut are left alone.

arguments  arguments.py: `COMBINE`
meaning    reference/merge.py: lse = ln(sum exp(lse_p)), out = sum exp(lse_p - lse) out_p, over a row's `pieces` pieces
empty      a piece with lse -inf is weightless and its out isn't read; all of them empty: out 0, lse -inf
grid       (ceildiv(rows, 4),): a warp a row, a lane 16 of its columns
start      may be launched early: waits for the decode kernel's end before it reads
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.cute.typing import Pointer

from pagedmla.cutlass_kernels import ptx
from pagedmla.cutlass_kernels.tiles import LATENT
from pagedmla.cutlass_kernels.variants import CombineVariant

_LANE_COLUMNS = 4  # neighbours that a lane reads together, of every 128
_LOADS = LATENT // (32 * _LANE_COLUMNS)


class Combine:
    def __init__(self, variant: CombineVariant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self, pointers: tuple[Pointer, ...], wide: tuple[Int64, ...], rows: Int32, heads: Int32, stream: Any
    ) -> None:
        self.kernel.set_name_prefix(self.variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(*pointers, *wide, rows, heads).launch(
            grid=[(rows + self.variant.rows - 1) // self.variant.rows, 1, 1],
            block=[self.variant.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        partial_out: Pointer,
        partial_lse: Pointer,
        pieces: Pointer,
        out: Pointer,
        lse: Pointer,
        stride_out_token: Int64,
        stride_out_head: Int64,
        rows: Int32,
        heads: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        row = block * self.variant.rows + thread // 32
        cute.arch.griddepcontrol_wait()
        (count,) = ptx.load_global_or(pieces.toint() + Int64(row) * 4, 1, row < rows)
        if count > 1:
            lses = partial_lse.toint() + Int64(row) * 4
            stride = Int64(rows) * 4
            largest = Float32(-Float32.inf)
            for piece in cutlass.range(lane, count, 32, unroll=1):
                largest = cute.arch.fmax(largest, _load_lse(lses + piece * stride))
            for step in cutlass.range_constexpr(5):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
            empty = largest == Float32(-Float32.inf)
            shift = cutlass.select_(empty, Float32(0.0), largest)
            total = Float32(0.0)
            sums = cute.make_rmem_tensor((_LOADS * _LANE_COLUMNS,), Float32)
            sums.fill(0.0)
            source = partial_out.toint() + (Int64(row) * LATENT + lane * _LANE_COLUMNS) * 4
            for piece in cutlass.range(0, count, unroll=1):
                weight = ptx.exp2((_load_lse(lses + piece * stride) - shift) * math.log2(math.e))
                if weight != Float32(0.0):
                    self._add(sums, source + piece * stride * LATENT, weight)
                total += weight
            inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            start = Int64(row // heads) * stride_out_token + Int64(row % heads) * stride_out_head
            self._store(sums, out.toint() + (start + lane * _LANE_COLUMNS) * 2, inverse)
            if lane == 0:
                merged = cutlass.select_(empty, largest, shift + ptx.log2(total) * math.log(2))
                ptx.store_global(lse.toint() + Int64(row) * 4, merged)

    def _add(self, sums: Any, source: Any, weight: Any) -> None:
        for i in range(_LOADS):
            for j, word in enumerate(ptx.load_global(source + i * (128 * 4), _LANE_COLUMNS)):
                at = _LANE_COLUMNS * i + j
                sums[at] = sums[at] + ptx.as_float(word) * weight

    def _store(self, sums: Any, target: Any, inverse: Any) -> None:
        for i in range(_LOADS):
            values = [sums[_LANE_COLUMNS * i + j] * inverse for j in range(_LANE_COLUMNS)]
            pairs = [ptx.pack_half2(values[j], values[j + 1], self.variant.dtype) for j in (0, 2)]
            for j, pair in enumerate(pairs):
                ptx.store_global(target + (i * 128 + 2 * j) * 2, pair)


def _load_lse(address: Any) -> Any:
    return ptx.as_float(ptx.load_global(address, 1)[0])


def compile_combine(variant: CombineVariant) -> Any:
    """The variant compiled for sm_90a. Needs no GPU."""
    pointers = tuple(make_ptr(cutlass.Uint8, 16, cute.AddressSpace.gmem, assumed_align=16) for _ in range(5))
    return cute.compile(
        Combine(variant),
        pointers,
        (Int64(512), Int64(512)),
        Int32(1),
        Int32(1),
        make_fake_stream(),
        options="--gpu-arch sm_90a",
    )
