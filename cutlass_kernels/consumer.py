"""A consumer warpgroup: scores every other tile of keys, and multiplies every tile into its half of the output columns.

The trip at its own tile j, in the order of the protocol: scores and P of j, products of j - 1, products of j and behind
them, where there are stages enough, the scores of j + 2, which run while the products are added up. The other consumer
is half a trip away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32

from pagedmla.cutlass_kernels import fragments, ptx
from pagedmla.cutlass_kernels.barriers import Barriers
from pagedmla.cutlass_kernels.operands import Instruction
from pagedmla.cutlass_kernels.tiles import LATENT_BYTES, THREADS, WARPGROUPS, WARPS
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.variants import Variant

_MEET_ALL = 1 + WARPGROUPS  # named barriers: 1 and 2 are a warpgroup's own, 3 is both consumers'


class Place(NamedTuple):
    """Where a thread stands."""

    which: Any  # consumer: 0 or 1
    thread: Any  # in it
    warp: Any
    lane: Any


class Consumer(Traced):
    """What all steps of a consumer share: the variant, its memory, its barriers.

    smem, smem_address   the CTA's shared memory, as a pointer and as an Int32
    own_rows             query rows that a thread holds: its columns of an accumulator
    """

    def __init__(self, variant: Variant, barriers: Barriers, smem: Any, smem_address: Any, place: Place) -> None:
        self.variant, self.shape, self.barriers = variant, variant.shape, barriers
        self.smem, self.smem_address, self.place = smem, smem_address, place
        self.own_rows = self.shape.rows // 4

    def at(self, name: str, array: Any = 0) -> Any:
        """Address of a statistic: the `array`-th [rows] of that name."""
        return self.smem_address + self.shape.place(name) + array * (4 * self.shape.rows)

    def latent(self, fill: Any) -> Any:
        """Address of a stage's latent panels."""
        return self.smem_address + self.shape.latent_offset + self.barriers.stage("keys", fill) * LATENT_BYTES

    def own(self, dtype: Any, name: str, array: Any = 0, *, first: int = 0, number: int | None = None) -> list[Any]:
        """A statistic of `number` of the thread's rows, from `first` on (multiples of 4; None: all)."""
        address = self.at(name, array) + (self.place.lane & 3) * (4 * self.own_rows)
        values: list[Any] = []
        for start in range(first, first + (number or self.own_rows), 4):
            values += ptx.load_shared(dtype, address, 4, 4 * start)
        return values

    def fold(self, values: list[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """A value for each of the thread's rows, combined over the warp's keys: those of `fragments.folded_row`."""
        for bit in (4, 3, 2):
            distance = 1 << bit
            if len(values) == 1:
                values = [combine(values[0], cute.arch.shuffle_sync_bfly(values[0], distance))]
                continue
            half = len(values) // 2
            upper = (self.place.lane & distance) != 0
            kept = [cutlass.select_(upper, high, low) for low, high in zip(values[:half], values[half:], strict=True)]
            sent = [cutlass.select_(upper, low, high) for low, high in zip(values[:half], values[half:], strict=True)]
            received = [cute.arch.shuffle_sync_bfly(Float32(value), distance) for value in sent]
            values = [combine(Float32(mine), other) for mine, other in zip(kept, received, strict=True)]
        return values

    def folded(self, name: str, array: Any) -> Any:
        """Address of the statistics that stay with the lane."""
        row = (self.place.lane & 3) * self.own_rows + fragments.folded_row(self.place.lane, self.own_rows)
        return self.at(name, array) + 4 * row

    def own_warp(self, name: str) -> Any:
        """Address of those of the lane's warp, in "warp_peak" or "warp_sum"."""
        return self.folded(name, self.place.which * WARPS + self.place.warp)

    def warp_statistics(self, name: str, row: Any, which: Any) -> list[Any]:
        """One row's statistic of each warp of a warpgroup."""
        address = self.at(name, which * WARPS) + 4 * row
        return [ptx.load_shared(Float32, address, 1, 4 * self.shape.rows * warp)[0] for warp in range(WARPS)]

    def meet(self) -> None:
        """The warpgroup's own barrier."""
        cute.arch.barrier(barrier_id=1 + self.place.which, number_of_threads=THREADS)

    def is_first(self) -> Any:
        """Whether this is the warpgroup's elected thread."""
        return self.place.thread == 0

    def is_first_of_warp(self) -> Any:
        """Whether this is the warp's elected thread. It speaks for a warp that has met (sync_warp)."""
        return self.place.lane == 0

    def meet_all(self) -> None:
        cute.arch.barrier(barrier_id=_MEET_ALL, number_of_threads=WARPGROUPS * THREADS)

    def accumulator(self, rows: int | None = None) -> Any:
        """Registers of one accumulator [64, rows], in the order of fragments.accumulator_row and _column."""
        return cute.make_rmem_tensor(((2, 2, (rows or self.shape.rows) // 8), 1, 1), Float32)


class Begin(NamedTuple):
    """Products that can be begun later: a call, and how many groups it leaves that are under way."""

    call: Callable[[], None]
    groups: int = 1


def issue(instruction: Instruction, accumulator: Any, pairs: list[tuple[Any, Any]], fresh: bool = True) -> None:
    """accumulator (+)= the sum of products of (A, B) fragments: started and committed, not waited for."""
    mma = instruction.make()  # whether it accumulates is a value of the place where it is set: not to be kept
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, not fresh)
    for a, b in pairs:
        cute.gemm(mma, accumulator, a, b, accumulator)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def count(tensor: Any) -> int:
    return int(cute.size(tensor))
