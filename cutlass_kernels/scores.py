"""Scores of a tile: S^T = K Q^T, the tile's maximum of each row, P into shared memory, and the row's sums.

u = logit + log2(sigma), so that P stored relative to the maximum of u carries sigma for the value product and fills
e4m3's range in every tile; the denominator takes the same numbers, unrounded, times 1 / sigma. The maths: model.py.

`begin` begins a tile's products and returns at once; `finish` waits for them. What stands between the two runs beside
them, up to the first wait for a product begun later: products end in order.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32, Int32

from pagedmla.cutlass_kernels import fragments, operands, ptx
from pagedmla.cutlass_kernels.consumer import Begin, Consumer, count, issue
from pagedmla.cutlass_kernels.operands import Instruction
from pagedmla.cutlass_kernels.tiles import (
    KEYS,
    LATENT,
    LEAST_SIGMA,
    PANEL_BYTES,
    PEAK_LAG,
    ROPE,
    SCORE_CHUNK,
    SCORE_TRIPS,
    THREADS,
)
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.work import Keys


class Scores(Traced):
    """The score product's operands, and a thread's share of the softmax: products in `total`, which become u, then P.

    The rope has accumulators of its own at 16 and 32 rows where it is bf16, scaled or not. At 64 rows none are left: an
    unscaled rope is added once the latent's sum is scaled, a scaled one ends that sum, as an e4m3 rope always does.
    """

    def __init__(self, consumer: Consumer) -> None:
        shape, base = consumer.shape, consumer.smem
        self.consumer, self.shape = consumer, shape
        self.widened = shape.precision == "fp16"
        self.rope_widened = self.widened and shape.rope == "e4m3"
        self.latent_mma = Instruction(operands.content_type(shape), shape.query_rows, self.widened)
        rope_rows = shape.query_rope_rows // shape.rope_parts
        self.rope_mma = Instruction(operands.rope_type(shape), rope_rows, self.rope_widened)
        place, thread = consumer.place, consumer.place.thread
        self.target = fragments.probability_target(place.lane, place.warp, shape.element_bytes)
        if shape.keeps_targets:
            self.target_at = consumer.smem_address + shape.place("target") + 4 * (place.which * THREADS + thread)
            ptx.store_shared(self.target_at, self.target)
        self.q_latent = self.latent_mma.fragments_b(operands.query_latent(base, shape), thread)
        self.q_rope = self.rope_mma.fragments_b(operands.query_rope(base, shape), thread)
        if not self.widened:
            self.k_latent = self.latent_mma.fragments_a(operands.key_latent(base, shape), thread)
        if not self.rope_widened:
            self.k_rope = self.rope_mma.fragments_a(operands.key_rope(base, shape), thread)
        self.total = consumer.accumulator(shape.query_rows * shape.column_parts)
        self.sums = [
            _accumulators(self.total, part * shape.query_rows // 2, shape.query_rows)
            for part in range(shape.column_parts)
        ]
        self.rope = consumer.accumulator(shape.query_rope_rows) if shape.rope_apart else None

    # -- products

    def parts_of(self, fill: Any) -> list[Begin]:
        """What begins the products of a tile that is in shared memory, in order.

        With 64 rows in several parts, so that each may stand between value products.
        """
        stage = self.consumer.barriers.stage("keys", fill)
        if self.widened:
            return [Begin(lambda: self._begin_widened(fill, stage), 1 if self.rope_widened else 2)]
        if self.shape.terms > self.shape.stacked:
            parts = [Begin(lambda: self._begin_terms(stage))]
        else:
            columns = LATENT // self.shape.column_parts if self.shape.rows <= 32 else SCORE_CHUNK
            parts = [Begin(partial(self._begin_chunk, stage, chunk, columns)) for chunk in range(LATENT // columns)]
        if self.rope is not None:
            parts.append(Begin(lambda: issue(self.rope_mma, self.rope, self._rope_term(stage))))
        elif self.shape.rope_joined and self.shape.terms == self.shape.stacked:
            parts.append(Begin(lambda: issue(self.rope_mma, self.sums[-1], self._rope_term(stage), fresh=False)))
        return parts

    def begin(self, fill: Any) -> None:
        for part in self.parts_of(fill):
            part.call()

    def _begin_chunk(self, stage: Any, chunk: int, columns: int) -> None:
        part, before = divmod(chunk * columns, LATENT // self.shape.column_parts)
        issue(self.latent_mma, self.sums[part], self._latent_chunk(stage, chunk, columns), fresh=before == 0)

    @cute.jit
    def _begin_terms(self, stage: Int32) -> None:
        """Terms one after another: loops, since the operands of all at once would be registers too many.

        The low terms come first, a joined rope's with the last part's: added to a sum that holds the high ones, they
        would be cut to that sum's 14 bits.
        """
        for part in cutlass.range_constexpr(self.shape.column_parts):
            for before in cutlass.range_constexpr(self.shape.terms):
                term, first = self.shape.terms - 1 - before, part * SCORE_TRIPS
                # A sum isn't begun with zeros: the second one's would wait for the first one's products.
                if cutlass.const_expr(before == 0):
                    issue(self.latent_mma, self.sums[part], self._latent_chunk(stage, first, SCORE_CHUNK, term))
                    first += 1
                for chunk in cutlass.range(first, (part + 1) * SCORE_TRIPS, unroll=1):
                    pairs = self._latent_chunk(stage, chunk, SCORE_CHUNK, term)
                    issue(self.latent_mma, self.sums[part], pairs, fresh=False)
                if cutlass.const_expr(self.shape.rope_joined and part + 1 == self.shape.column_parts):
                    if cutlass.const_expr(term < self.shape.query_rope_terms):
                        issue(self.rope_mma, self.sums[part], self._rope_term(stage, term), fresh=False)

    def _latent_chunk(self, stage: Any, chunk: Any, columns: int, term: int = 0) -> list[tuple[Any, Any]]:
        """Pairs of fragments of so many columns of the latent and of a term of Q (or of all that are stacked)."""
        steps, whole = columns // 32, LATENT // 32
        return [
            (
                self.k_latent[None, None, chunk * steps + k, stage],
                self.q_latent[None, None, term * whole + chunk * steps + k, 0],
            )
            for k in range(steps)
        ]

    def _rope_term(self, stage: Any, term: int = 0, part: int = 0) -> list[tuple[Any, Any]]:
        """Pairs of fragments of the rope's columns and of a term of Q (or of all that are stacked)."""
        steps = self.shape.rope_bytes // 32
        return [
            (self.k_rope[None, None, k, stage], self.q_rope[None, None, term * steps + k, part]) for k in range(steps)
        ]

    def _begin_widened(self, fill: Any, stage: Any) -> None:
        """fp16: K's codes become fp16 on their way into registers, some columns at a time, two sets in turn."""
        base = self.consumer.latent(fill)
        self._begin_columns(self.latent_mma, base, self.q_latent, LATENT, PANEL_BYTES, fresh=True)
        if self.rope_widened:
            rope_base = self.consumer.smem_address + self.shape.rope_offset + stage * (KEYS * ROPE)
            self._begin_columns(self.rope_mma, rope_base, self.q_rope, ROPE, ROPE, fresh=False)
        else:
            issue(self.rope_mma, self.rope, self._rope_term(stage))

    def _begin_columns(self, mma: Instruction, base: Any, q: Any, columns: int, row_bytes: int, fresh: bool) -> None:
        """Codes of the next columns are on their way while these are widened."""
        wide = self.shape.widened_columns
        codes = self._codes(base, 0, wide, row_bytes)
        for column in range(0, columns, wide):
            coming = self._codes(base, column + wide, wide, row_bytes) if column + wide < columns else []
            a = self._widen(mma, codes, wide)
            pairs = [(a[None, None, k], q[None, None, column // 16 + k, 0]) for k in range(wide // 16)]
            issue(mma, self.total, pairs, fresh and column == 0)
            warpgroup.wait_group(1)
            codes = coming

    def _codes(self, base: Any, column: int, wide: int, row_bytes: int) -> list[Any]:
        """e4m3 codes of `wide` columns from `column` on; the order of columns is fragments.query_slot's."""
        place, codes = self.consumer.place, list[Any]()
        for first in range(column, column + wide, 32):
            source = fragments.score_source(place.lane, place.warp, first % row_bytes, row_bytes)
            codes += ptx.ldmatrix_x4(base + source, fragments.score_step(first))
        return codes

    def _widen(self, mma: Instruction, codes: list[Any], wide: int) -> Any:
        """A fragments of them."""
        a, words = mma.registers_a(wide, self.consumer.place.thread)
        for k in range(wide // 16):
            upper, lower = (ptx.unpack_e4m3x4(codes[2 * k + i]) for i in range(2))
            words[0, k], words[2, k] = upper
            words[1, k], words[3, k] = lower
        return a

    @cute.jit
    def finish(self, keys: Keys, tile: Int32) -> None:
        """Wait for a tile's products; `total` becomes u, each warp's maxima of it stand in shared memory."""
        fill, first_key = keys.fill + tile, keys.first + tile * KEYS
        stage = self.consumer.barriers.stage("keys", fill)
        sigmas = self._sigmas(stage)
        logs = [ptx.log2(sigma) for sigma in sigmas]
        warpgroup.wait_group(0)
        self._to_logits(stage, sigmas, logs)
        if first_key + KEYS > keys.kept:
            self._mask(first_key + self._key())
        self._find_peaks()

    def _key(self) -> Any:
        """The first of the thread's keys in a tile; the other is 8 behind."""
        return fragments.accumulator_row(self.consumer.place.lane, self.consumer.place.warp, 0)

    def _sigmas(self, stage: Any) -> list[Any]:
        """Those of the thread's two keys."""
        consumer = self.consumer
        address = consumer.smem_address + self.shape.place("sigma") + stage * (4 * KEYS) + self._key() * 4
        sigmas = [ptx.load_shared(Float32, address, 1, 32 * half)[0] for half in range(2)]
        least = Float32(LEAST_SIGMA)
        return [cutlass.select_(sigma < least, least, sigma) for sigma in sigmas]  # a maximum would lose NaN

    def _to_logits(self, stage: Any, sigmas: list[Any], logs: list[Any]) -> None:
        """x = sigma * (q8 . k8) + q_rope . k_rope (the rope times sigma too, where the layout has it so), then u."""
        parts = self.shape.rope_parts
        rows = self.consumer.own_rows // parts
        for part in range(parts):
            self._scale(part * rows, rows, sigmas)
            if parts > 1:
                issue(self.rope_mma, self._rope_rows(part), self._rope_term(stage, part=part), fresh=False)
        for part in range(parts):
            if parts > 1:
                warpgroup.wait_group(parts - 1 - part)
            self._to_base_2(part * rows, rows, logs)

    def _scale(self, first: int, rows: int, sigmas: list[Any]) -> None:
        """The latent's part of some rows, and the rope's where its products are there already."""
        total, rope = self.total, self.rope
        registers = 2 * self.consumer.own_rows
        for i in range(2 * first, 2 * (first + rows)):
            sigma = sigmas[(i >> 1) & 1]
            x = _unstacked(total, i, registers)
            if rope is None:
                total[i] = x * sigma
            elif self.shape.rope == "bf16":
                total[i] = x * sigma + rope[i]
            else:
                total[i] = (x + _unstacked(rope, i, registers)) * sigma

    def _rope_rows(self, part: int) -> Any:
        """Accumulators of the logits that one of the rope's products adds to."""
        return _accumulators(self.total, part * 2 * self.consumer.own_rows // self.shape.rope_parts, self.rope_mma.rows)

    # -- softmax

    # Statistics are read four rows at a time, where they are used: 64 rows leave few registers.

    def _to_base_2(self, first: int, rows: int, logs: list[Any]) -> None:
        """x becomes u: base-2 logits plus log2(sigma)."""
        x = self.total
        for start in range(first, first + rows, 4):
            factors = self.consumer.own(Float32, "factor", first=start, number=4)
            for row, factor in enumerate(factors, start):
                for half, i in enumerate(fragments.column_registers(row)):
                    x[i] = x[i] * factor + logs[half]

    def _mask(self, key: Any) -> None:
        u = self.total
        for first in range(0, self.consumer.own_rows, 4):
            limits = self.consumer.own(Int32, "limit", first=first, number=4)
            for row, limit in enumerate(limits, first):
                for half, i in enumerate(fragments.column_registers(row)):
                    u[i] = cutlass.select_(key + 8 * half < limit, u[i], Float32(-Float32.inf))

    def _find_peaks(self) -> None:
        """Each warp's maximum of each row over its 16 keys, to shared memory."""
        u = self.total
        rows = range(self.consumer.own_rows)
        peaks = [cute.arch.fmax(*(u[i] for i in fragments.column_registers(row))) for row in rows]
        ptx.store_shared(self.consumer.own_warp("warp_peak"), *self.consumer.fold(peaks, cute.arch.fmax))

    @cute.jit
    def settle(self, fill: Int32) -> None:
        """One thread a row: the tile's maximum, the running one, and the weights of old and new sums."""
        consumer, shape = self.consumer, self.shape
        which, row = consumer.place.which, consumer.place.thread
        slot = consumer.barriers.stage("probabilities", fill)
        if row < shape.rows:
            tile_peak = Float32(-Float32.inf)
            for peak in consumer.warp_statistics("warp_peak", row, which):
                tile_peak = cute.arch.fmax(tile_peak, peak)
            (own_peak,) = ptx.load_shared(Float32, consumer.at("own_peak", which) + 4 * row, 1)
            (old_peak,) = ptx.load_shared(Float32, consumer.at("peak") + 4 * row, 1)
            new_peak = cutlass.select_(tile_peak > old_peak + PEAK_LAG, tile_peak, old_peak)
            none = Float32(-Float32.inf)
            anchor = cutlass.select_(new_peak == none, Float32(0.0), new_peak)
            reference = cutlass.select_(tile_peak == none, anchor, tile_peak) - math.log2(shape.top)
            gain = ptx.exp2(reference - anchor)
            decay = ptx.exp2(old_peak - anchor)
            ptx.store_shared(consumer.at("peak") + 4 * row, new_peak)
            ptx.store_shared(consumer.at("reference", which) + 4 * row, reference)
            ptx.store_shared(consumer.at("gain", which) + 4 * row, gain)
            ptx.store_shared(consumer.at("keep", which) + 4 * row, ptx.exp2(own_peak - anchor))
            ptx.store_shared(consumer.at("decay", slot) + 4 * row, decay)
            ptx.store_shared(consumer.at("rise", slot) + 4 * row, gain)
            ptx.store_shared(consumer.at("own_peak", which) + 4 * row, new_peak)
            moved = cute.arch.vote_any_sync(decay != Float32(1.0), _row_lanes(shape.rows))
            if consumer.place.lane == 0:
                flag = consumer.smem_address + shape.place("rescale") + 16 * slot + 4 * consumer.place.warp
                ptx.store_shared(flag, Int32(moved))

    def store(self, fill: Any) -> None:
        """P of the thread's two keys to shared memory, and the sums brought up to this tile."""
        consumer, shape, place, u = self.consumer, self.shape, self.consumer.place, self.total
        sigmas = self._sigmas(consumer.barriers.stage("keys", fill))  # read anew: two registers less
        inverses = [cute.arch.rcp_approx(sigma) for sigma in sigmas]
        tile_sums = []
        for first in range(0, consumer.own_rows, 4):
            references = consumer.own(Float32, "reference", place.which, first=first, number=4)
            for row, reference in enumerate(references, first):
                upper, lower = fragments.column_registers(row)
                for i in (upper, lower):
                    u[i] = ptx.exp2(u[i] - reference)
                tile_sums.append(u[upper] * inverses[0] + u[lower] * inverses[1])
        width = fragments.folded_width(consumer.own_rows)
        gains = ptx.load_shared(Float32, consumer.folded("gain", place.which), width)
        keeps = ptx.load_shared(Float32, consumer.folded("keep", place.which), width)
        sums = ptx.load_shared(Float32, consumer.own_warp("warp_sum"), width)
        folded = zip(sums, keeps, consumer.fold(tile_sums, operator.add), gains, strict=True)
        ptx.store_shared(consumer.own_warp("warp_sum"), *(s * keep + new * gain for s, keep, new, gain in folded))
        slot = consumer.barriers.stage("probabilities", fill)
        base = consumer.smem_address + shape.probability_offset + slot * shape.probability_bytes
        target = ptx.load_shared(Int32, self.target_at, 1)[0] if shape.keeps_targets else self.target
        for block in range(0, shape.rows // 8, 2):
            registers: list[Any] = []
            for i in (4 * block, 4 * block + 4):
                if shape.precision == "fp8":  # keys g and g + 8 of one row, then of the next
                    registers.append(ptx.pack_e4m3x4(u[i], u[i + 2], u[i + 1], u[i + 3]))
                else:
                    registers += [ptx.pack_half2(u[i], u[i + 1], "fp16"), ptx.pack_half2(u[i + 2], u[i + 3], "fp16")]
            step = fragments.probability_step(block, shape.element_bytes)
            ptx.stmatrix_trans(base + target, *registers, offset=step)


def _accumulators(registers: Any, first: int, rows: int) -> Any:
    """Those of a product of so many rows, from a register on: half a register a row."""
    return cute.make_tensor(registers.iterator + first, cute.make_layout(((2, 2, rows // 8), 1, 1)))


def _unstacked(accumulator: Any, register: int, registers: int) -> Any:
    """The sum of an accumulator's parts and terms, which lie `registers` apart."""
    value = accumulator[register]
    for i in range(register + registers, count(accumulator), registers):
        value = value + accumulator[i]
    return value


def _row_lanes(rows: int) -> int:
    """Lanes of a warp that stand for rows."""
    return (1 << min(rows, 32)) - 1
