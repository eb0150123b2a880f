"""Combine: partial results of cut requests into one. Rows that weren't cut are left alone.

arguments  arguments.py: `COMBINE`
meaning    reference/merge.py: lse = ln(sum exp(lse_p)), out = sum exp(lse_p - lse) out_p, over a row's pieces
order      model.py: up to 16 pieces one after another; more in 16 sums, then those one after another
empty      a piece of weight 0 isn't multiplied, whatever its out is; all of them empty: out 0, lse -inf
grid       CTAs that stay, at most two on a multiprocessor; quarter rows are dealt out to them one by one, so that a cut
           request's rows lie on all of them
work       up to 16 pieces are a warp's, 8 loads of 16 bytes a lane in flight. More are all 16 warps', through shared
           memory, 9 loads each: a request of 16 rows and 132 pieces has all of its 4.3 MB in flight, on 64 CTAs
nothing    cut: a thread reads one word, all threads at once, for up to 33,000 rows

start      decode lets this kernel start at once (launch_dependents); every thread waits for decode's end
           (griddepcontrol.wait) before it reads or leaves.
           - Decode is never held up. None of these CTAs may come before the last of decode's has begun, and decode's
             leave 1,024 registers: these come where one has ended.
           - What is launched behind waits for this kernel, as usual, and so for decode: no CTA here ends before it.
           - Decode writes while this kernel is there, so what it writes isn't read-only memory: no ld.global.nc.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.cute.typing import Pointer

from pagedmla.cutlass_kernels import ptx, schedule
from pagedmla.cutlass_kernels.tiles import LATENT
from pagedmla.cutlass_kernels.variants import CombineVariant

_NO_LSE = -(1 << 23)  # the bits of -inf


class Places(NamedTuple):
    """Where everything lies: addresses (Int64) and strides in elements."""

    partial_out: Any
    partial_lse: Any
    cuts: Any
    out: Any
    lse: Any
    stride_token: Any
    stride_head: Any
    heads: Any
    tile_rows: Any

    def partial_row(self, cut: Any, piece: Any) -> Any:
        return Int64(schedule.partial_row_of(cut, piece, self.tile_rows))


class Combine:
    def __init__(self, variant: CombineVariant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        pointers: tuple[Pointer, ...],
        wide: tuple[Int64, ...],
        rows: Int32,
        heads: Int32,
        tile_rows: Int32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        self.kernel.set_name_prefix(self.variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(*pointers, *wide, rows, heads, tile_rows).launch(
            grid=[ctas, 1, 1],
            block=[self.variant.threads, 1, 1],
            smem=self.variant.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.variant.per_multiprocessor,
            preferred_smem_carveout=100,  # as the launcher sets it; without, the compiler asks the driver
        )

    @cute.kernel
    def kernel(
        self,
        partial_out: Pointer,
        partial_lse: Pointer,
        cuts: Pointer,
        out: Pointer,
        lse: Pointer,
        stride_out_token: Int64,
        stride_out_head: Int64,
        rows: Int32,
        heads: Int32,
        tile_rows: Int32,
    ) -> None:
        variant = self.variant
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        memory = Int32(cute.arch.get_dyn_smem(Uint8, alignment=16).toint())
        places = Places(
            partial_out.toint(),
            partial_lse.toint(),
            cuts.toint(),
            out.toint(),
            lse.toint(),
            stride_out_token,
            stride_out_head,
            heads,
            tile_rows,
        )
        quarters = rows * variant.parts
        cute.arch.griddepcontrol_wait()  # all, those too that will find nothing to do: see `start`
        for first in cutlass.range(block, quarters, ctas * variant.threads, unroll=1):
            own = variant.quarter(first, warp, lane, ctas)
            (cut,) = _load(places.cuts + Int64(variant.row(own)) * 4, 1, Int32(own < quarters))
            cute.arch.sync_threads()  # nobody still reads what follows
            cut_at = self._at(memory, "cuts") + 4 * thread
            ptx.store_shared(cut_at, cut)
            many = cute.arch.vote_ballot_sync(schedule.pieces_of(cut) > variant.alone[-1])
            if lane == 0:
                ptx.store_shared(self._at(memory, "many") + 4 * warp, many)
            cute.arch.sync_threads()
            self._by_all(places, memory, warp, lane, first, ctas)
            for fewer, most in pairwise((1, *variant.alone)):
                self._by_warp(places, cut_at, warp, lane, first, ctas, fewer, most)

    # -- few pieces: a warp ------------------------------------------------------------------------------------------

    @cute.jit
    def _by_warp(
        self,
        places: cutlass.Constexpr,
        cut_at: Int32,
        warp: Int32,
        lane: Int32,
        first: Int32,
        ctas: Int32,
        fewer: cutlass.Constexpr,
        most: cutlass.Constexpr,
    ) -> None:
        """The warp's own quarter rows of more pieces than `fewer` and at most `most` (16)."""
        (own,) = ptx.load_shared(Int32, cut_at, 1)
        count = schedule.pieces_of(own)
        waiting = cute.arch.vote_ballot_sync(count > fewer) & cute.arch.vote_ballot_sync(count <= most)
        while waiting != 0:
            bit = _highest(waiting)
            waiting = waiting ^ (Int32(1) << bit)
            quarter = self.variant.quarter(first, warp, bit, ctas)
            cut = cute.arch.shuffle_sync(own, bit)
            columns = _Columns(self.variant, places, cut, quarter, lane, Int32(0), 1)
            columns.load(min(most, self.variant.first_loads))
            lse = self._load_lse(places, cut, lane & 15)
            peak = _largest(lse, 16)
            sums, total = columns.fold(_weight(lse, peak), most)
            self._store(places, quarter, lane, sums, total, peak)

    def _store(self, places: Places, quarter: Any, lane: Any, sums: list[Any], total: Any, peak: Any) -> None:
        row, column = self.variant.row(quarter), self.variant.column(quarter, lane)
        empty = total == Float32(0.0)  # not by the peak: a maximum passes over NaN
        inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
        start = Int64(row // places.heads) * places.stride_token + Int64(row % places.heads) * places.stride_head
        target = places.out + (start + column) * 2
        values = [each * inverse for each in sums]
        for j in (0, 2):  # rows of out begin at multiples of 4 bytes, no more
            ptx.store_global(target + 2 * j, ptx.pack_half2(values[j], values[j + 1], self.variant.dtype))
        lse = cutlass.select_(empty, Float32(-Float32.inf), _finite(peak) + ptx.log2(total) * math.log(2))
        ptx.store_global_if(places.lse + Int64(row) * 4, lse, Int32(column == 0))

    # -- many: all warps of a CTA ------------------------------------------------------------------------------------

    @cute.jit
    def _by_all(
        self, places: cutlass.Constexpr, memory: Int32, warp: Int32, lane: Int32, first: Int32, ctas: Int32
    ) -> None:
        """Quarter rows that a warp found to have more pieces than it takes alone, one after another."""
        warps, loads = self.variant.warps, self.variant.loads
        finder = lane % warps
        (waiting,) = ptx.load_shared(Int32, self._at(memory, "many") + 4 * finder, 1)
        found = cute.arch.vote_ballot_sync(waiting != 0)
        turn = Int32(0)
        while found != 0:
            found_by = _highest(found) % warps
            bit = _highest(cute.arch.shuffle_sync(waiting, found_by))
            waiting = waiting ^ (Int32(finder == found_by) << bit)
            found = cute.arch.vote_ballot_sync(waiting != 0)
            quarter = self.variant.quarter(first, found_by, bit, ctas)
            (cut,) = ptx.load_shared(Int32, self._at(memory, "cuts") + 4 * (32 * found_by + bit), 1)
            columns = _Columns(self.variant, places, cut, quarter, lane, warp, warps)
            columns.load(loads)
            thread = 32 * warp + lane
            if thread < self.variant.lses:
                lse = self._load_lse(places, cut, thread)
                ptx.store_shared(self._at(memory, "lse") + 4 * thread, lse)
            cute.arch.sync_threads()
            peak, weight = self._weights(memory, warp, lane)
            sums, total = columns.fold(weight, loads)
            ptx.store_shared(self._at(memory, "sums") + 512 * warp + 16 * lane, *sums)
            if lane == 0:
                ptx.store_shared(self._at(memory, "totals") + 4 * warp, total)
            cute.arch.sync_threads()
            if warp == turn % warps:  # the others go on to their next loads
                sums, total = self._add_warps(memory, lane)
                self._store(places, quarter, lane, sums, total, peak)
            turn += 1

    def _weights(self, memory: Any, warp: Any, lane: Any) -> tuple[Any, Any]:
        """The largest LSE of all pieces; in lane i the weight of the warp's i-th piece."""
        at = self._at(memory, "lse")
        largest = Float32(-Float32.inf)
        for start in range(0, self.variant.lses, 32):
            largest = cute.arch.fmax(largest, ptx.load_shared(Float32, at + 4 * lane, 1, 4 * start)[0])
        peak = _largest(largest, 32)
        own = self.variant.piece(warp, self.variant.warps, schedule.smaller(lane, self.variant.loads - 1))
        (lse,) = ptx.load_shared(Float32, at + 4 * own, 1)
        return peak, _weight(lse, peak)

    def _add_warps(self, memory: Any, lane: Any) -> tuple[list[Any], Any]:
        """Sums of all warps, in their order."""
        sums, total = [Float32(0.0)] * 4, Float32(0.0)
        for warp in range(self.variant.warps):
            theirs = ptx.load_shared(Float32, self._at(memory, "sums") + 16 * lane, 4, 512 * warp)
            sums = [mine + its for mine, its in zip(sums, theirs, strict=True)]
        for warp in range(0, self.variant.warps, 4):
            for its in ptx.load_shared(Float32, self._at(memory, "totals"), 4, 4 * warp):
                total = total + its
        return sums, total

    def _load_lse(self, places: Places, cut: Any, piece: Any) -> Any:
        """-inf for a piece that isn't there."""
        address = places.partial_lse + places.partial_row(cut, piece) * 4
        return ptx.as_float(_load(address, 1, Int32(piece < schedule.pieces_of(cut)), _NO_LSE)[0])

    def _at(self, memory: Any, name: str) -> Any:
        """Address of a part of shared memory."""
        return memory + self.variant.place(name)


class _Columns:
    """A lane's four columns of a warp's pieces of a cut row; those behind its last aren't read and weigh nothing."""

    def __init__(
        self, variant: CombineVariant, places: Places, cut: Any, quarter: Any, lane: Any, first: Any, step: int
    ) -> None:
        self._variant, self._places, self._cut = variant, places, cut
        self._first, self._step = first, step
        self._address = places.partial_out + Int64(variant.column(quarter, lane)) * 4
        self._loaded: list[Any] = []

    def load(self, count: int) -> None:
        """The next `count` of them."""
        for number in range(len(self._loaded), len(self._loaded) + count):
            piece = self._variant.piece(self._first, self._step, number)
            address = self._address + self._places.partial_row(self._cut, piece) * (LATENT * 4)
            self._loaded.append(_load(address, 4, Int32(piece < schedule.pieces_of(self._cut))))

    def fold(self, weight: Any, count: int) -> tuple[list[Any], Any]:
        """Weighted sums over `count` of them, and the sum of weights; lane i has the i-th one's weight.

        What wasn't loaded yet is, as soon as there are registers.
        """
        sums, total = [Float32(0.0)] * 4, Float32(0.0)
        for number in range(count):
            its = cute.arch.shuffle_sync(weight, number)
            counts = its != Float32(0.0)  # what doesn't isn't multiplied: 0 times NaN is NaN
            for j, word in enumerate(self._loaded[number]):
                sums[j] = Float32(cutlass.select_(counts, sums[j] + ptx.as_float(word) * its, sums[j]))
            total = total + its
            if len(self._loaded) < count:
                self.load(1)
        return sums, total


def _largest(x: Any, lanes: int) -> Any:
    """The maximum over so many neighbouring lanes."""
    while lanes > 1:
        lanes //= 2
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, lanes))
    return x


def _weight(lse: Any, peak: Any) -> Any:
    return ptx.exp2((lse - _finite(peak)) * math.log2(math.e))


def _finite(peak: Any) -> Any:
    """What to subtract: 0 where all are -inf, for -inf - -inf is NaN."""
    return cutlass.select_(peak == Float32(-Float32.inf), Float32(0.0), peak)


def _highest(bits: Any) -> Any:
    """The highest bit that is set."""
    return 31 - Int32(cute.arch.clz(bits))


def _load(address: Any, count: int, live: Any, fallback: int = 0) -> Any:
    """Of memory that decode wrote while this kernel was there."""
    return ptx.load_global_or(address, count, live, fallback, path="cg")


def compile_combine(variant: CombineVariant) -> Any:
    """The variant compiled for sm_90a. Needs no GPU."""
    pointers = tuple(make_ptr(Uint8, 16, cute.AddressSpace.gmem, assumed_align=16) for _ in range(5))
    return cute.compile(
        Combine(variant),
        pointers,
        (Int64(512), Int64(512)),
        Int32(1),
        Int32(1),
        Int32(16),
        Int32(264),
        make_fake_stream(),
        options="--gpu-arch sm_90a",
    )
