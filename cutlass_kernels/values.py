"""Values of a tile: O^T += V^T P^T for a consumer's 256 columns, V^T made in registers from the tile of keys.

A column tile of 64 is summed over the tile's 64 keys in WGMMA and added to O in float32, with the tile's own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32, Int32

from pagedmla.cutlass_kernels import fragments, operands, ptx
from pagedmla.cutlass_kernels.consumer import Begin, Consumer, count, issue
from pagedmla.cutlass_kernels.operands import Instruction
from pagedmla.cutlass_kernels.tiles import COLUMN_TILES, COLUMNS, KEYS, PANEL_BYTES, THREADS, turns
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.work import Keys

Matrices = list[tuple[Any, Any]]  # each a fragment, and its registers as words [4, steps]


class Values(Traced):
    """The value product's operands; `outputs`: O, accumulators [64 columns, part_rows] by column tile and part.

    More than 32 rows are multiplied in two parts: their sums beside O take half the registers.
    """

    def __init__(self, consumer: Consumer) -> None:
        self.consumer, self.shape = consumer, consumer.shape
        self.part_rows = self.shape.part_rows
        self.parts = self.shape.rows // self.part_rows
        self.mma = Instruction(operands.content_type(self.shape), self.part_rows, True)
        p = operands.probabilities(consumer.smem, self.shape, self.part_rows)
        self.p = self.mma.fragments_b(p, consumer.place.thread)
        self.outputs = [[consumer.accumulator(self.part_rows) for _ in range(self.parts)] for _ in range(COLUMN_TILES)]
        self.steps = KEYS * self.shape.element_bytes // 32
        self.loads_all = self.shape.matrices_ahead > 0
        self.matrices_before = self._matrices()  # of the tile before the consumer's own
        self.matrices_own = self._matrices() if self.shape.matrices_ahead > 1 else self.matrices_before

    def _matrices(self) -> Matrices:
        """Registers of V^T of a tile: all column tiles, or two that are used in turn."""
        return [
            self.mma.registers_a(KEYS, self.consumer.place.thread) for _ in range(COLUMN_TILES if self.loads_all else 2)
        ]

    def clear(self) -> None:
        for output in self.outputs:
            for part in output:
                part.fill(0.0)

    def pair(self, tile: int, row: int) -> tuple[Any, Any]:
        """O of one of the thread's query rows at two neighbouring latent columns (see fragments.output_column)."""
        part, within = divmod(row, self.part_rows // 4)
        upper, lower = fragments.column_registers(within)
        return self.outputs[tile][part][upper], self.outputs[tile][part][lower]

    @cute.jit
    def prepare(self, keys: Keys, tile: Int32) -> None:
        """Clear keys past the end: their scores, which may be under way, are masked whatever they are."""
        live = keys.kv_len - keys.first - tile * KEYS
        if live < KEYS:
            self._zero(keys.fill + tile, live)

    def load(self, fill: Any, matrices: Matrices) -> None:
        """V^T of a tile into registers, all of the consumer's columns; at 64 rows `multiply` loads it."""
        if self.loads_all:
            for tile in range(COLUMN_TILES):
                self._transpose(self.consumer.latent(fill), tile, matrices[tile])

    @cute.jit
    def rescale(self, fill: Int32) -> None:
        """Scale O where a row's maximum rose. The tile's `settle` must be seen: of the consumer's own tile behind the
        warpgroup's meeting, of the other's behind its P.
        """
        slot = self.consumer.barriers.stage("probabilities", fill)
        flags = self.consumer.smem_address + self.shape.place("rescale") + 16 * slot
        moved = ptx.load_shared(Int32, flags, 2)
        any_moved = moved[0] | moved[1] if self.shape.rows > 32 else moved[0]
        if any_moved != 0:
            self._decay(self.consumer.own(Float32, "decay", slot))

    @cute.jit
    def multiply(
        self,
        fill: Int32,
        matrices: cutlass.Constexpr,
        block: cutlass.Constexpr,
        beside: cutlass.Constexpr = (),
    ) -> None:
        """Add a tile whose P is there, and give it back; `block`: see Barriers. `beside`: products of another kind to
        be begun with these, to run while these are added up.
        """
        consumer, barriers = self.consumer, self.consumer.barriers
        slot = barriers.stage("probabilities", fill)
        self._multiply(fill, slot, consumer.own(Float32, "rise", slot), matrices, beside)
        cute.arch.sync_warp()
        if consumer.is_first_of_warp():
            barriers.release("probabilities", fill, block)
            barriers.release("keys", fill, block)

    def _decay(self, decays: list[Any]) -> None:
        for output in self.outputs:
            for part, values in enumerate(output):
                for i in range(count(values)):
                    values[i] = values[i] * decays[self._row(part, i)]

    def _multiply(self, fill: Any, slot: Any, rises: list[Any], matrices: Matrices, beside: Sequence[Begin]) -> None:
        base = self.consumer.latent(fill)
        products = [(tile, part) for tile in range(COLUMN_TILES) for part in range(self.parts)]
        totals: dict[int, Any] = {}
        groups: list[int | None] = []  # in the order in which they are started
        if not self.loads_all:
            self._transpose(base, 0, matrices[0])
        for start, finish in turns(len(products), self.shape.in_flight, self.shape.values_overlapped):
            if start is not None:
                tile, part = products[start]
                a, _ = matrices[tile % len(matrices)]
                totals[start] = self.consumer.accumulator(self.part_rows)
                where = slot * self.parts + part
                pairs = [(a[None, None, k], self.p[None, None, k, where]) for k in range(self.steps)]
                issue(self.mma, totals[start], pairs)
                groups.append(start)
                if part + 1 == self.parts:
                    if not self.loads_all and tile + 1 < COLUMN_TILES:
                        self._transpose(base, tile + 1, matrices[(tile + 1) % len(matrices)])
                    for each in self._behind(tile, beside):
                        each.call()
                        groups += [None] * each.groups
            if finish is not None:
                warpgroup.wait_group(len(groups) - 1 - groups.index(finish))
                tile, part = products[finish]
                values = self.outputs[tile][part]
                for j in range(count(values)):
                    values[j] = values[j] + totals[finish][j] * rises[self._row(part, j)]

    def _behind(self, tile: int, beside: Sequence[Begin]) -> Sequence[Begin]:
        """Which of the other products are begun behind a column tile's: one each and the rest at the end, or all."""
        last = tile + 1 == COLUMN_TILES
        if self.loads_all:
            return beside if last else ()
        return beside[tile:] if last else beside[tile : tile + 1]

    def _row(self, part: int, register: int) -> int:
        """Which of the thread's query rows an accumulator register of a part is."""
        return part * (self.part_rows // 4) + 2 * (register >> 2) + (register & 1)

    def _transpose(self, base: Any, tile: int, registers: tuple[Any, Any]) -> None:
        """V^T [64 columns, 64 keys] of a column tile into the registers of an A fragment."""
        place = self.consumer.place
        own = base + place.which * fragments.value_step(COLUMN_TILES, 0)
        source = own + fragments.value_source(place.lane, place.warp)  # own: a multiple of 1024
        if tile & 1:
            source = source ^ fragments.ODD_TILE
        _, words = registers
        for key in range(0, KEYS, 32):
            got = ptx.ldmatrix_x4_trans(source, fragments.value_step(tile, key))
            for half in range(2):
                pair = got[2 * half], got[2 * half + 1]
                if self.shape.precision == "fp8":
                    k = key // 32
                    words[2 * half, k] = Int32(cute.arch.prmt(*pair, fragments.EVEN_COLUMN_FP8))
                    words[2 * half + 1, k] = Int32(cute.arch.prmt(*pair, fragments.ODD_COLUMN_FP8))
                else:
                    k = key // 16 + half
                    even = Int32(cute.arch.prmt(*pair, fragments.EVEN_COLUMN_FP16))
                    odd = Int32(cute.arch.prmt(*pair, fragments.ODD_COLUMN_FP16))
                    words[0, k], words[2, k] = ptx.unpack_e4m3x4(even)
                    words[1, k], words[3, k] = ptx.unpack_e4m3x4(odd)

    @cute.jit
    def _zero(self, fill: Int32, live: Int32) -> None:
        """Clear the consumer's columns of keys that don't exist: whatever they hold, 0 times it must be 0."""
        place = self.consumer.place
        base = self.consumer.latent(fill) + place.which * (COLUMNS // PANEL_BYTES) * (KEYS * PANEL_BYTES)
        units = COLUMNS // 16
        for unit in cutlass.range(place.thread, (KEYS - live) * units, THREADS, unroll=1):
            row = live + unit // units
            byte = (unit % units) * 16
            zero = Int32(0)
            ptx.store_shared(base + fragments.panel_byte(row, byte, KEYS), zero, zero, zero, zero)
        cute.arch.fence_proxy("async.shared", space="cta")  # a later copy into this stage comes after
        self.consumer.meet()
