"""The decode kernel as an executable model: the same algorithm in numpy, tile by tile and fragment by fragment.

contract   as `reference.attention.attend`, for layouts fp8_rope_bf16, fp8_rope_bf16_prescaled and fp8_flat with one
           scale a token or a tensor; latent 512, rope 64, pages of 16 to 256
shares     with the kernel: tiles, fragments, schedule, and with them every index, every constant and every cut
models     shared memory and its swizzles, matrix loads and permutes, the rounding of Q and P, the order of tiles,
           rescaling, partial results and their merge. Sums inside a WGMMA are float32, or, with
           `accumulation_bits`, cut to so many bits
not        timing, and the last bit of exp2, log2 and fused multiply-adds

Notation, all in base 2 (c = log2(e) * sm_scale, s_q a row's power-of-two scale, sigma a key's):

    x[t] = c * s_q * (sigma[t] * (q8 . k8[t]) + q_rope . k_rope[t])        the logit
    u[t] = x[t] + log2(sigma[t])                                            so that exp2(u) = p * sigma
    e[t] = top * exp2(u[t] - max u of the tile)                             P as it is stored, rounded to e4m3 or fp16
    O    = O * exp2(M - M') + (V8^T e) * exp2(max u - M') / top             M: at most PEAK_LAG behind the maximum of u
    l    = the same sum over e[t] / sigma[t], e unrounded                   lse = ln2 * (M + log2(l)), out = O / l
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedmla.cutlass_kernels import emulation, fragments, schedule
from pagedmla.cutlass_kernels.launch_checks import check_pool
from pagedmla.cutlass_kernels.tiles import (
    KEYS,
    LATENT,
    LATENT_BYTES,
    LEAST_QUERY_SCALE,
    LEAST_SIGMA,
    NO_CACHE,
    PANEL_BYTES,
    PEAK_LAG,
    ROPE,
    WARPGROUPS,
    Shape,
)
from pagedmla.cutlass_kernels.variants import CombineVariant, Variant
from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.kv_cache.tables import int64_ids, int64_lengths

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LOG2E = math.log2(math.e)
LN2 = math.log(2)


def attend(
    q: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    cache_lengths: Tensor,
    query_start_loc: Tensor,
    *,
    sm_scale: float,
    variant: Variant,
    causal: bool = True,
    scales_lookup_table: Tensor | None = None,
    num_partitions: int = 1,
    workers: int = 132,
    accumulation_bits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`q [T, H, 576]` on the CPU to (out `[T, H, 512]` in q's dtype, lse `[T, H]` float32, natural log)."""
    check_pool(variant, planes)
    tokens, heads, _ = q.shape
    keys = _Keys(planes, lookup_table, scales_lookup_table, variant)
    starts = int64_lengths(query_start_loc).tolist()
    lengths = int64_lengths(cache_lengths).tolist()
    requests = [_Request(b, starts[b], starts[b + 1] - starts[b], lengths[b]) for b in range(len(lengths))]
    requests.append(_Request(-1, starts[-1], tokens - starts[-1], NO_CACHE))  # padding rows: they see no key
    rows = q.reshape(tokens * heads, LATENT + ROPE).to(torch.float32).numpy()
    results = _Results(tokens * heads, workers if num_partitions > 1 else 0, variant.rows)
    for worker, segment, begin, end, piece, pieces in _work(requests, heads, variant.rows, workers, num_partitions):
        for rank in range(variant.cluster):
            first = segment.row_tile * variant.rows + rank * variant.shape.rows
            mine = np.arange(first, min(first + variant.shape.rows, segment.request.q_len * heads))
            if mine.size == 0:
                continue
            base = segment.request.first_token * heads
            limit = schedule.keys_seen(segment.request.cache_length, segment.request.kv_len, mine // heads, causal)
            state = _piece(
                rows[base + mine], keys, segment.request, limit, begin, end, variant.shape, sm_scale, accumulation_bits
            )
            partial_row = schedule.partial_row(worker, piece, rank, variant.shape.rows, variant.cluster)
            results.store(base + mine, partial_row, piece, pieces, *state)
    out, lse = results.merge()
    return (
        torch.from_numpy(out).view(tokens, heads, LATENT).to(q.dtype),
        torch.from_numpy(lse).view(tokens, heads),
    )


# -- schedule --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    index: int  # row of the tables; -1: rows of q that no request owns
    first_token: int
    q_len: int
    cache_length: int

    @property
    def kv_len(self) -> int:
        return int(schedule.length_of(self.cache_length, self.q_len))


@dataclass(frozen=True)
class _Segment:
    request: _Request
    row_tile: int
    start: int
    units: int


def _work(
    requests: list[_Request], heads: int, rows: int, workers: int, partitions: int
) -> list[tuple[int, _Segment, int, int, int, int]]:
    """(worker, segment, first tile, end, piece, pieces) in the order of workers, as each walks its share."""
    segments: list[_Segment] = []
    total = 0
    for request in requests:
        for row_tile in range(schedule.row_tiles_of(request.q_len, heads, rows)):
            units = int(schedule.units_of(request.kv_len))
            segments.append(_Segment(request, row_tile, total, units))
            total += units
    longest = max((segment.units for segment in segments), default=1)
    share = schedule.share_of(total, longest, workers, partitions)
    whole = schedule.is_whole(total, longest, len(segments), workers, partitions)
    work = []
    for worker in range(workers):
        for index, segment in enumerate(segments):
            if whole:
                begin, end, piece, pieces = 0, segment.units, 0, 1
                if schedule.owner_of(index, segment.start, len(segments), workers, share) != worker:
                    continue
            else:
                begin, end, piece, pieces = schedule.piece_of(worker, segment.start, segment.units, share)
            if begin < end:
                work.append((worker, segment, begin, end, piece, pieces))
    return work


# -- keys ------------------------------------------------------------------------------------------------------------


class _Keys:
    """The producer: one tile of a request's keys into a stage, box by box through the tables."""

    def __init__(self, planes: RowPlanes, table: Tensor, scales_table: Tensor | None, variant: Variant) -> None:
        self.latent = planes.latent.view(torch.uint8)  # [N, P, 512]
        rope = planes.rope.view(torch.uint8) if planes.rope.element_size() == 1 else planes.rope
        self.rope = rope
        self.scales = planes.scales
        self.table = table
        self.scales_table = table if scales_table is None else scales_table
        self.page_size = int(planes.latent.shape[1])
        self.box = variant.box
        self.shape = variant.shape

    def load(self, request: _Request, tile: int) -> tuple[Bytes, Floats]:
        """(bytes of latent, then rope; sigma [64]). What no copy brought stays poison; sigma past the end is 0."""
        stage = np.full(self.shape.stage_bytes, 0xFF, np.uint8)
        sigma = np.zeros(KEYS, np.float32)
        for box in range(0, KEYS, self.box):
            key = tile * KEYS + box
            if key >= request.kv_len:
                break
            page, slot = self._page(self.table, request, key), key % self.page_size
            rows = slice(slot, slot + self.box)
            in_tile = box + np.arange(self.box)[:, None]
            stage[fragments.key_byte(in_tile, np.arange(LATENT))] = self.latent[page, rows].numpy()
            rope = np.ascontiguousarray(self.rope[page, rows].contiguous().view(torch.uint8).numpy())
            width = self.shape.rope_bytes
            stage[LATENT_BYTES + fragments.panel_byte(in_tile, np.arange(width), KEYS, width)] = rope
            live = min(self.box, request.kv_len - key)
            assert self.scales is not None
            scale_page = self._page(self.scales_table, request, key)
            sigma[box : box + live] = self.scales[scale_page, slot : slot + live, 0].to(torch.float32).numpy()
        return stage, sigma

    def _page(self, table: Tensor, request: _Request, key: int) -> int:
        column = key // self.page_size
        entry = table.view(torch.int32)[request.index, column]
        return int(int64_ids(entry, table.dtype))


# -- queries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Queries:
    """Q of a CTA as it lies in shared memory, read back as WGMMA reads it."""

    latent: list[Floats]  # a term each: [rows, 512 slots]
    rope: list[Floats]  # [rows, 64]
    factor: Floats  # [rows]: log2(e) * sm_scale * s_q


def _queries(q: Floats, shape: Shape, sm_scale: float) -> _Queries:
    """Quantise rows of `q [n, 576]`; rows past n are 0. s_q is a power of two, so dividing by it is exact."""
    full = np.zeros((shape.rows, LATENT + ROPE), np.float32)
    full[: len(q)] = q
    measured = full if shape.rope == "e4m3" else full[:, :LATENT]
    largest = np.fmax.reduce(np.abs(measured), 1)
    scale = emulation.power_of_two_at_least(
        np.fmax(largest * np.float32(1 / shape.query_top), np.float32(LEAST_QUERY_SCALE))
    )
    scaled = full * (np.float32(1) / scale)[:, None]
    factor = np.float32(sm_scale * LOG2E) * scale
    latent, rope = scaled[:, :LATENT], scaled[:, LATENT:]
    if shape.precision == "fp16":
        slots = np.empty_like(latent, dtype=np.float16)
        slots[:, fragments.query_slot(np.arange(LATENT), 2)] = latent
        return _Queries([slots.astype(np.float32)], [_rope_for_fp16(rope, shape)], factor)
    terms = [emulation.E4M3[code] for code in _e4m3_terms(latent, shape.terms)]
    if shape.rope == "e4m3":
        return _Queries(terms, [emulation.E4M3[code] for code in _e4m3_terms(rope, shape.terms)], factor)
    return _Queries(terms, [_bf16(rope)], factor)


def _rope_for_fp16(rope: Floats, shape: Shape) -> Floats:
    if shape.rope != "e4m3":
        return _bf16(rope)
    slots = np.empty_like(rope, dtype=np.float16)
    slots[:, fragments.query_slot(np.arange(ROPE), 2)] = rope
    return slots.astype(np.float32)


def _e4m3_terms(x: Floats, terms: int) -> list[Bytes]:
    """x as a sum of e4m3 numbers of one scale: the nearest, then the nearest to what is left."""
    codes = []
    for _ in range(terms):
        codes.append(emulation.to_e4m3(x))
        x = x - emulation.E4M3[codes[-1]]
    return codes


def _bf16(x: Floats) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).to(torch.float32).numpy()


# -- one piece: tiles begin .. end - 1 of a segment ------------------------------------------------------------------


@cache
def _value_fragments(precision: str) -> NDArray[np.int64]:
    return emulation.value_fragments(precision)


@cache
def _score_fragments(precision: str, columns: int, row_bytes: int) -> NDArray[np.int64]:
    return emulation.score_fragments(precision, columns, row_bytes)


def _piece(
    q: Floats,
    keys: _Keys,
    request: _Request,
    limit: NDArray[np.int64],
    begin: int,
    end: int,
    shape: Shape,
    sm_scale: float,
    bits: int | None,
) -> tuple[Floats, Floats]:
    """(out [n, 512], lse [n]) of one CTA's rows over a piece of the keys, both float32."""
    n = len(q)
    limits = np.zeros(shape.rows, np.int64)
    limits[:n] = limit
    peak = np.full(shape.rows, -np.inf, np.float32)
    own_peak = [peak.copy() for _ in range(WARPGROUPS)]
    sums = [np.zeros(shape.rows, np.float32) for _ in range(WARPGROUPS)]  # each consumer's, over its own tiles
    acc = np.zeros((LATENT, shape.rows), np.float32)
    log_top = np.float32(math.log2(shape.top))
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):  # NaN and inf are data here
        queries = _queries(q, shape, sm_scale)
        for tile in range(begin, min(end, -(-request.kv_len // KEYS))):
            owner = (tile - begin) % WARPGROUPS
            stage, sigma = keys.load(request, tile)
            sigma = np.where(sigma < LEAST_SIGMA, np.float32(LEAST_SIGMA), sigma)  # a maximum would lose NaN
            u = _logits(stage, sigma, queries, shape, bits)
            seen = tile * KEYS + np.arange(KEYS)[:, None] < limits
            u = np.where(seen, u, np.float32(-np.inf))
            tile_peak = np.fmax.reduce(u, 0)
            new_peak = np.where(tile_peak > peak + np.float32(PEAK_LAG), tile_peak, peak)
            anchor = _finite(new_peak)
            reference = np.where(tile_peak == -np.inf, anchor, tile_peak) - log_top
            e = np.exp2(u - reference)
            gain = np.exp2(reference - anchor)
            sums[owner] = sums[owner] * np.exp2(own_peak[owner] - anchor) + (e / sigma[:, None]).sum(0) * gain
            decay = np.exp2(peak - anchor)
            acc = acc * decay + _values(stage, e, request.kv_len - tile * KEYS, shape, bits) * gain
            peak = own_peak[owner] = new_peak
        anchor = _finite(peak)
        total = sums[0] * np.exp2(own_peak[0] - anchor) + sums[1] * np.exp2(own_peak[1] - anchor)
        empty = total == 0  # not by the peak: a maximum passes over NaN
        out = np.where(empty, np.float32(0), acc / total).astype(np.float32)
        lse = np.where(empty, np.float32(-np.inf), np.float32(LN2) * (anchor + np.log2(total)))
    columns = np.empty_like(out)
    columns[fragments.output_column(np.arange(LATENT))] = out
    return columns.T[:n], lse[:n]


def _finite(peak: Floats) -> Floats:
    """The maximum to subtract: 0 where there is none yet, for -inf - -inf is NaN."""
    return np.where(peak == -np.inf, np.float32(0), peak)


def _logits(stage: Bytes, sigma: Floats, queries: _Queries, shape: Shape, bits: int | None) -> Floats:
    """u [64 keys, rows]; see the top of this file. Each of `shape.column_parts` is one WGMMA accumulation."""
    codes = stage[_score_fragments(shape.precision, LATENT, PANEL_BYTES)]
    bits = bits if shape.precision == "fp8" else None
    k = emulation.E4M3[codes]
    rope = _Product(_rope_keys(stage, shape), queries.rope, bits if shape.rope == "e4m3" else None)
    columns = LATENT // shape.column_parts
    sums: list[Floats] = []
    for first in range(0, LATENT, columns):
        part = slice(first, first + columns)
        products = [_Product(k[:, part], [term[:, part] for term in queries.latent], bits)]
        if shape.rope_joined and first + columns == LATENT:
            products.append(rope)
        sums += _sums(products, shape)
    per_key = sigma[:, None]
    logits = _in_order(sums)
    if shape.rope_joined:
        return logits * per_key * queries.factor + np.log2(per_key)
    (beside,) = _sums([rope], shape)
    logits = logits * per_key + beside if shape.rope == "bf16" else (logits + beside) * per_key
    return logits * queries.factor + np.log2(per_key)


class _Product(NamedTuple):
    """K [64, columns] times each term of Q [rows, columns]."""

    k: Floats
    terms: list[Floats]
    bits: int | None

    def add(self, term: int, total: Floats | None) -> Floats | None:
        if term >= len(self.terms):
            return total
        return emulation.wgmma(self.k, self.terms[term], self.bits, total=total)


def _sums(products: list[_Product], shape: Shape) -> list[Floats]:
    """Accumulations over all products: one for each term where they are stacked.

    Else one for all, the low term's first: added to the high one's, it would be cut to that sum's bits.
    """
    terms = range(max(len(product.terms) for product in products))
    totals: list[Floats | None] = [None] * shape.stacked
    for term in reversed(terms):
        at = term % shape.stacked
        for product in products:
            totals[at] = product.add(term, totals[at])
    return [total for total in totals if total is not None]


def _rope_keys(stage: Bytes, shape: Shape) -> Floats:
    """[64 keys, 64 columns in the order of Q's slots]."""
    rope = stage[LATENT_BYTES:]
    if shape.rope == "e4m3":
        return emulation.E4M3[rope[_score_fragments(shape.precision, ROPE, ROPE)]]
    k = emulation.read_operand(rope, KEYS, 2 * ROPE, PANEL_BYTES)
    return torch.from_numpy(np.ascontiguousarray(k)).view(torch.bfloat16).to(torch.float32).numpy()


def _values(stage: Bytes, e: Floats, live: int, shape: Shape, bits: int | None) -> Floats:
    """V^T P^T of one tile, [512 rows of WGMMA, rows]. Keys past the end are zeroed first: 0 times NaN is NaN."""
    if live < KEYS:
        stage = stage.copy()
        stage[fragments.key_byte(np.arange(live, KEYS)[:, None], np.arange(LATENT))] = 0
    v = emulation.E4M3[stage[_value_fragments(shape.precision)]]
    if shape.precision == "fp8":
        memory = emulation.store_probabilities(shape, emulation.to_e4m3(e))
        p = emulation.E4M3[emulation.read_operand(memory, shape.rows, KEYS, KEYS)]
        return emulation.wgmma(v, p, bits)
    memory = emulation.store_probabilities(shape, e.astype(np.float16))
    p = np.ascontiguousarray(emulation.read_operand(memory, shape.rows, 2 * KEYS, PANEL_BYTES)).view(np.float16)
    return emulation.wgmma(v, p)


# -- results ---------------------------------------------------------------------------------------------------------


class _Results:
    """Results of rows that weren't cut, workers' partial rows of the others, and the merge of those."""

    def __init__(self, rows: int, workers: int, tile_rows: int) -> None:
        held = schedule.partial_rows(workers, tile_rows)
        self.tile_rows = tile_rows
        self.out, self.lse = _uninitialised(rows, LATENT), _uninitialised(rows)
        self.partial_out, self.partial_lse = _uninitialised(held, LATENT), _uninitialised(held)
        self.cuts = np.zeros(rows, np.int64)

    def store(
        self, rows: NDArray[np.int64], partial_row: int, piece: int, pieces: int, out: Floats, lse: Floats
    ) -> None:
        """A piece of some rows, whose first partial row is `partial_row`."""
        partial = partial_row + np.arange(len(rows))
        if pieces == 1:
            self.out[rows], self.lse[rows] = out, lse
        else:
            self.partial_out[partial], self.partial_lse[partial] = out, lse
        if piece == 0:
            self.cuts[rows] = schedule.cut_of(pieces, partial)

    def merge(self) -> tuple[Floats, Floats]:
        """The same sums as the kernel's merge, in the same order. A row's missing pieces are never read.

        Up to `alone` pieces one after another; more by warps: warp w sums pieces w, w + 16, ..., then warps are added.
        """
        (cut,) = np.nonzero(schedule.pieces_of(self.cuts) > 1)
        if cut.size == 0:
            return self.out, self.lse
        pieces = schedule.pieces_of(self.cuts[cut])
        numbers = np.arange(pieces.max())[:, None]
        there = numbers < pieces
        at = np.where(there, schedule.partial_row_of(self.cuts[cut], numbers, self.tile_rows), 0)
        lse = np.where(there, self.partial_lse[at], np.float32(-np.inf))
        with np.errstate(invalid="ignore", divide="ignore"):
            peak = _finite(np.fmax.reduce(lse, 0, initial=-np.inf).astype(np.float32))
            weight = np.exp2((lse - peak) * np.float32(LOG2E))
            sums, total = self._sum(at, weight, 0, 1)
            warps = [self._sum(at, weight, warp, CombineVariant.warps) for warp in range(CombineVariant.warps)]
            by_all = pieces > CombineVariant.alone[-1]
            sums = np.where(by_all[:, None], _in_order([part for part, _ in warps]), sums)
            total = np.where(by_all, _in_order([part for _, part in warps]), total)
            empty = total == 0  # not by the peak: a maximum passes over NaN
            self.out[cut] = np.where(empty[:, None], np.float32(0), sums / total[:, None])
            self.lse[cut] = np.where(empty, np.float32(-np.inf), peak + np.float32(LN2) * np.log2(total))
        return self.out, self.lse

    def _sum(self, at: NDArray[np.int64], weight: Floats, first: int, step: int) -> tuple[Floats, Floats]:
        """(sums of out, sum of weights) over pieces first, first + step, ... What has no weight isn't multiplied."""
        sums, total = np.zeros((at.shape[1], LATENT), np.float32), np.zeros(at.shape[1], np.float32)
        for piece in range(first, len(weight), step):
            its = weight[piece][:, None]
            sums = np.where(its != 0, sums + self.partial_out[at[piece]] * its, sums)
            total = total + weight[piece]
        return sums, total


def _uninitialised(*shape: int) -> Floats:
    """NaN, as memory of a device may hold."""
    return np.full(shape, np.nan, np.float32)


def _in_order(parts: list[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
