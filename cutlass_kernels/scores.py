"""Scores of a tile: S^T = K Q^T, the tile's maximum of each row, P into shared memory, and the row's sums.

u = logit + log2(sigma), so that P stored relative to the maximum of u carries sigma for the value product and fills
e4m3's range in every tile; the denominator takes the same numbers, unrounded, times 1 / sigma. The maths: model.py.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32, Int32

from pagedmla.cutlass_kernels import fragments, operands, ptx
from pagedmla.cutlass_kernels.consumer import Consumer, count, issue
from pagedmla.cutlass_kernels.operands import Instruction
from pagedmla.cutlass_kernels.tiles import (
    KEYS,
    LATENT,
    LEAST_SIGMA,
    PANEL_BYTES,
    PEAK_LAG,
    PROBABILITY_STAGES,
    ROPE,
    SCORE_CHUNK,
    THREADS,
)
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.work import Keys

_WIDE = 64  # fp16: columns of K that are widened at a time


class Scores(Traced):
    """The score product's operands and a thread's share of the softmax."""

    def __init__(self, consumer: Consumer) -> None:
        shape, base = consumer.shape, consumer.smem
        self.consumer, self.shape = consumer, shape
        widened = shape.precision == "fp16"
        self.rope_widened = widened and shape.rope == "e4m3"
        self.latent_mma = Instruction(operands.content_type(shape), shape.rows, widened)
        self.rope_mma = Instruction(operands.rope_type(shape), shape.rows, self.rope_widened)
        place, thread = consumer.place, consumer.place.thread
        # Where the thread stores P is kept in shared memory: with 64 rows it would be a register too many.
        self.target_at = consumer.smem_address + shape.place("target") + 4 * (place.which * THREADS + thread)
        target = fragments.probability_target(place.lane, place.warp, shape.element_bytes)
        ptx.store_shared(self.target_at, target)
        self.q_latent = self.latent_mma.fragments_b(operands.query_latent(base, shape), thread)
        self.q_rope = self.rope_mma.fragments_b(operands.query_rope(base, shape), thread)
        if not widened:
            self.k_latent = self.latent_mma.fragments_a(operands.key_latent(base, shape), thread)
        if not self.rope_widened:
            self.k_rope = self.rope_mma.fragments_a(operands.key_rope(base, shape), thread)

    @cute.jit
    def __call__(self, keys: Keys, tile: Int32) -> None:
        """Score a tile of the item's keys."""
        fill, first_key, kept = keys.fill + tile, keys.first + tile * KEYS, keys.kept
        consumer, shape, barriers = self.consumer, self.shape, self.consumer.barriers
        place = consumer.place
        barriers.wait("keys", fill)
        stage = barriers.protocol.ring("keys").stage(fill)
        key = first_key + fragments.accumulator_row(place.lane, place.warp, 0)  # the thread's keys: key and key + 8
        sigma_at = consumer.smem_address + shape.place("sigma") + stage * (4 * KEYS) + (key - first_key) * 4
        sigmas = [ptx.load_shared(Float32, sigma_at, 1, 32 * half)[0] for half in range(2)]
        least = Float32(LEAST_SIGMA)
        sigmas = [cutlass.select_(sigma < least, least, sigma) for sigma in sigmas]  # a maximum would lose NaN
        u = self._products(fill, stage, sigmas)
        self._to_logits(u, sigmas)
        if first_key + KEYS > kept:
            self._mask(u, key)
        self._find_peaks(u)
        consumer.meet()
        if tile > 0:
            barriers.wait("probabilities", fill - 1, -1)
        barriers.acquire("probabilities", fill)
        self._settle_peaks(fill)
        consumer.meet()
        self._store(fill, u, sigmas)
        cute.arch.fence_proxy("async.shared", space="cta")
        if consumer.speaks_for_warp():
            barriers.commit("probabilities", fill)

    # -- products

    def _products(self, fill: Any, stage: Any, sigmas: list[Any]) -> Any:
        """sigma * (q8 . k8) + q_rope . k_rope (the rope times sigma too, where the layout has it so)."""
        total, rope = (self._widened_products if self.shape.precision == "fp16" else self._summed_products)(fill, stage)
        for i in range(count(total)):
            sigma = sigmas[(i >> 1) & 1]
            if rope is None:
                total[i] = total[i] * sigma
            elif self.shape.rope == "bf16":
                total[i] = total[i] * sigma + rope[i]
            else:
                total[i] = (total[i] + rope[i]) * sigma
        if rope is None and self.shape.rope == "bf16":
            issue(self.rope_mma, total, self._rope_chunk(stage), fresh=False)
            warpgroup.wait_group(0)
        return total

    def _summed_products(self, fill: Any, stage: Any) -> tuple[Any, Any]:
        """fp8: (latent, rope) accumulators, waited for.

        64 rows leave registers for one: there the rope is None. The sum starts with it, or where sigma isn't for it the
        caller adds it.
        """
        total = self.consumer.accumulator()
        if self.shape.rows > 32:
            scaled = self.shape.rope != "bf16"
            if scaled:
                issue(self.rope_mma, total, self._rope_chunk(stage))
            if self.shape.terms == 1:
                issue(self.latent_mma, total, self._latent_chunk(stage, 0, LATENT), fresh=not scaled)
                warpgroup.wait_group(0)
            else:
                if scaled:
                    warpgroup.wait_group(0)
                else:
                    total.fill(0.0)
                self._sum_chunks(stage, total)
            return total, None
        rope = self.consumer.accumulator()
        issue(self.latent_mma, total, self._latent_chunk(stage, 0, LATENT))
        issue(self.rope_mma, rope, self._rope_chunk(stage))
        warpgroup.wait_group(0)
        return total, rope

    @cute.jit
    def _sum_chunks(self, stage: Int32, total: cute.Tensor) -> None:
        """A loop, since the operands of two terms of all columns at once would be registers too many."""
        for chunk in cutlass.range(LATENT // SCORE_CHUNK, unroll=1):
            part = self.consumer.accumulator()
            issue(self.latent_mma, part, self._latent_chunk(stage, chunk, SCORE_CHUNK))
            warpgroup.wait_group(0)
            for i in range(count(total)):
                total[i] = total[i] + part[i]

    def _latent_chunk(self, stage: Any, chunk: Any, columns: int) -> list[tuple[Any, Any]]:
        """Pairs of fragments of so many columns of the latent, all terms of Q: one accumulation."""
        steps, whole = columns // 32, LATENT // 32
        return [
            (
                self.k_latent[None, None, chunk * steps + k, stage],
                self.q_latent[None, None, term * whole + chunk * steps + k, 0],
            )
            for term in range(self.shape.terms)
            for k in range(steps)
        ]

    def _rope_chunk(self, stage: Any) -> list[tuple[Any, Any]]:
        steps = self.shape.rope_bytes // 32
        return [
            (self.k_rope[None, None, k, stage], self.q_rope[None, None, term * steps + k, 0])
            for term in range(self.shape.query_rope_terms)
            for k in range(steps)
        ]

    def _widened_products(self, fill: Any, stage: Any) -> tuple[Any, Any]:
        """fp16: K's codes become fp16 on their way into registers, `_WIDE` columns at a time, two sets in turn."""
        latent, rope = self.consumer.accumulator(), self.consumer.accumulator()
        base = self.consumer.latent(fill)
        for column in range(0, LATENT, _WIDE):
            a = self._widen(self.latent_mma, base, column, PANEL_BYTES)
            issue(self.latent_mma, latent, self._pairs(a, self.q_latent, column), fresh=column == 0)
            warpgroup.wait_group(1)
        if self.rope_widened:
            rope_base = self.consumer.smem_address + self.shape.rope_offset + stage * (KEYS * ROPE)
            a = self._widen(self.rope_mma, rope_base, 0, ROPE)
            issue(self.rope_mma, rope, self._pairs(a, self.q_rope, 0))
        else:
            issue(self.rope_mma, rope, self._rope_chunk(stage))
        warpgroup.wait_group(0)
        return latent, rope

    def _pairs(self, a: Any, q: Any, column: int) -> list[tuple[Any, Any]]:
        return [(a[None, None, k], q[None, None, column // 16 + k, 0]) for k in range(_WIDE // 16)]

    def _widen(self, mma: Instruction, base: Any, column: int, row_bytes: int) -> Any:
        """A fragments of 64 columns from `column` on; the order of columns is fragments.query_slot's."""
        place = self.consumer.place
        a, words = mma.registers_a(_WIDE, place.thread)
        for pair in range(_WIDE // 32):
            first = column + 32 * pair
            source = fragments.score_source(place.lane, place.warp, first % row_bytes, row_bytes)
            got = ptx.ldmatrix_x4(base + source, fragments.score_step(first))
            for half in range(2):
                upper, lower = (ptx.unpack_e4m3x4(got[2 * half + i]) for i in range(2))
                k = 2 * pair + half
                words[0, k], words[2, k] = upper
                words[1, k], words[3, k] = lower
        return a

    # -- softmax

    # Statistics are read four columns at a time, where they are used: 64 rows leave few registers.

    def _to_logits(self, x: Any, sigmas: list[Any]) -> None:
        """x becomes u: base-2 logits plus log2(sigma)."""
        logs = [ptx.log2(sigma) for sigma in sigmas]
        for first in range(0, self.consumer.columns, 4):
            factors = self.consumer.own(Float32, "factor", 0, first, 4)
            for column, factor in enumerate(factors, first):
                for half, i in enumerate(_registers(column)):
                    x[i] = x[i] * factor + logs[half]

    def _mask(self, u: Any, key: Any) -> None:
        for first in range(0, self.consumer.columns, 4):
            limits = self.consumer.own(Int32, "limit", 0, first, 4)
            for column, limit in enumerate(limits, first):
                for half, i in enumerate(_registers(column)):
                    u[i] = cutlass.select_(key + 8 * half < limit, u[i], Float32(-Float32.inf))

    def _find_peaks(self, u: Any) -> None:
        """Each warp's maximum of each row over its 16 keys, to shared memory."""
        peaks = [cute.arch.fmax(*(u[i] for i in _registers(column))) for column in range(self.consumer.columns)]
        ptx.store_shared(self.consumer.own_warp("warp_peak"), *self.consumer.fold(peaks, cute.arch.fmax))

    @cute.jit
    def _settle_peaks(self, fill: Int32) -> None:
        """A thread a row: the tile's maximum, the running one, and the weights of what was and what comes."""
        consumer, shape = self.consumer, self.shape
        which, row = consumer.place.which, consumer.place.thread
        slot = fill % PROBABILITY_STAGES
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
            moved = cute.arch.vote_any_sync(decay != Float32(1.0), _mask_of(shape.rows))
            if consumer.place.lane == 0:
                flag = consumer.smem_address + shape.place("rescale") + 16 * slot + 4 * consumer.place.warp
                ptx.store_shared(flag, Int32(moved))

    def _store(self, fill: Any, u: Any, sigmas: list[Any]) -> None:
        """P of the thread's two keys to shared memory, and the sums brought up to this tile."""
        consumer, shape, place = self.consumer, self.shape, self.consumer.place
        inverses = [cute.arch.rcp_approx(sigma) for sigma in sigmas]
        tile_sums = []
        for first in range(0, consumer.columns, 4):
            references = consumer.own(Float32, "reference", place.which, first, 4)
            for column, reference in enumerate(references, first):
                upper, lower = _registers(column)
                for i in (upper, lower):
                    u[i] = ptx.exp2(u[i] - reference)
                tile_sums.append(u[upper] * inverses[0] + u[lower] * inverses[1])
        width = fragments.folded_width(consumer.columns)
        gains = ptx.load_shared(Float32, consumer.folded("gain", place.which), width)
        keeps = ptx.load_shared(Float32, consumer.folded("keep", place.which), width)
        sums = ptx.load_shared(Float32, consumer.own_warp("warp_sum"), width)
        folded = zip(sums, keeps, consumer.fold(tile_sums, operator.add), gains, strict=True)
        ptx.store_shared(consumer.own_warp("warp_sum"), *(s * keep + new * gain for s, keep, new, gain in folded))
        base = consumer.smem_address + shape.probability_offset + (fill % PROBABILITY_STAGES) * shape.probability_bytes
        (target,) = ptx.load_shared(Int32, self.target_at, 1)
        for block in range(0, shape.rows // 8, 2):
            registers: list[Any] = []
            for i in (4 * block, 4 * block + 4):
                if shape.precision == "fp8":  # keys g and g + 8 of one row, then of the next
                    registers.append(ptx.pack_e4m3x4(u[i], u[i + 2], u[i + 1], u[i + 3]))
                else:
                    registers += [ptx.pack_half2(u[i], u[i + 1], "fp16"), ptx.pack_half2(u[i + 2], u[i + 3], "fp16")]
            step = fragments.probability_step(block, shape.element_bytes)
            ptx.stmatrix_trans(base + target, *registers, offset=step)


def _registers(column: int) -> tuple[int, int]:
    """Accumulator registers of one of a thread's columns: its upper and its lower key."""
    upper = 4 * (column >> 1) + (column & 1)
    return upper, upper + 2


def _mask_of(rows: int) -> int:
    """Lanes of a warp that stand for rows."""
    return (1 << min(rows, 32)) - 1
