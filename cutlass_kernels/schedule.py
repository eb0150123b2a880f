"""Who works on what: tiles of all requests laid end to end and cut into equal shares, one for each worker.

A segment is a request's tile of query rows over all of its keys; its units are tiles of 64 keys (at least one, so that
an empty request is visited and writes its zeros). Workers are CTAs, or clusters, that stay. Worker w takes units
w * share .. (w + 1) * share - 1 of all segments in order; a segment that is cut has pieces, numbered from 0, at most
`partitions` of them, each with partial rows of its own.

Partial rows are the workers', `tile_rows` twice: a worker has at most two pieces of cut segments, the end of one that
began before its share and the beginning (piece 0) of one that goes on behind it.

Nothing here reads a length on the host: the kernel computes it all from cache_lengths and query_start_loc, so a
captured graph replays with others. Sums are over int32. Each function takes ints, arrays or values of the DSL.
"""

from __future__ import annotations

from typing import Any

from pagedmla.cutlass_kernels.tiles import KEYS

_KEY_SHIFT = KEYS.bit_length() - 1
_PIECE_BITS = 8
_IMBALANCE = 8  # whole segments are taken while the busiest worker has at most 1/8 above an even share


def ceildiv(a: Any, b: Any) -> Any:
    """For a >= 0, b > 0."""
    return (a + b - 1) // b


def at_least_zero(x: Any) -> Any:
    """max(0, x) of an int32."""
    return x & ((x >> 31) ^ -1)


def larger(a: Any, b: Any) -> Any:
    return a + at_least_zero(b - a)


def smaller(a: Any, b: Any) -> Any:
    return a - at_least_zero(a - b)


def length_of(cache_length: Any, q_len: Any) -> Any:
    """kv_len: keys that a request has this step; a padding row (cache_length -1, one token) has none."""
    return at_least_zero(cache_length + q_len)


def tiles_of(kv_len: Any) -> Any:
    return (kv_len + (KEYS - 1)) >> _KEY_SHIFT


def units_of(kv_len: Any) -> Any:
    """Tiles of keys, at least 1."""
    tiles = tiles_of(kv_len)
    return tiles + (((tiles - 1) >> 31) & 1)


def row_tiles_of(q_len: Any, heads: Any, rows: int) -> Any:
    """Segments of a request."""
    return (q_len * heads + (rows - 1)) // rows


def is_whole(total: Any, longest: Any, segments: Any, workers: Any, partitions: Any) -> Any:
    """1 where no segment is cut: one partition only, or whole ones hardly out of balance.

    That is known where each has a worker of its own, or where all are alike and a worker takes several. A cut costs a
    second prologue and epilogue and a merge, about four tiles' worth; 1/8 of a share is more only in long steps.
    """
    even = larger(ceildiv(total, workers), 1)
    one_each, alike = _is_less(workers, segments) ^ 1, _is_less(longest, total // larger(segments, 1) + 1)
    most = longest * (one_each + (one_each ^ 1) * ceildiv(even, longest))  # of a worker
    return _is_less(partitions, 2) | ((one_each | alike) & _is_less(most * _IMBALANCE, even * (_IMBALANCE + 1) + 1))


def share_of(total: Any, longest: Any, workers: Any, partitions: Any) -> Any:
    """Units of a worker, at least 1.

    A segment of n units that starts anywhere is cut into at most (n - 2) // share + 2 pieces: share is raised until
    the longest has no more than `partitions`. With one partition nothing is cut, and the share is an even one: whole
    segments go where they start.
    """
    even = larger(ceildiv(total, workers), 1)
    cut = larger(partitions - 1, 1)
    return larger(even, (_is_less(partitions, 2) ^ 1) * (at_least_zero(longest - 2) // cut + 1))


def first_unit(worker: Any, share: Any) -> Any:
    return worker * share


def piece_of(worker: Any, start: Any, units: Any, share: Any) -> tuple[Any, Any, Any, Any]:
    """What of a segment (its first unit overall, its units) is a worker's: begin, end, piece number, pieces in all.

    begin >= end: nothing. An uncut segment belongs to `owner_of`.
    """
    first = start // share
    last = (start + units - 1) // share
    begin = larger(first_unit(worker, share) - start, 0)
    end = smaller(first_unit(worker, share) + share - start, units)
    return begin, end, worker - first, last - first + 1


def owner_of(segment: Any, start: Any, segments: Any, workers: Any, share: Any) -> Any:
    """The worker of an uncut segment: one each where they suffice, else the one in whose share it starts."""
    enough = _is_less(workers, segments) ^ 1
    return enough * segment + (enough ^ 1) * (start // share)


def partial_rows(workers: Any, tile_rows: Any) -> Any:
    """Of all workers."""
    return 2 * workers * tile_rows


def partial_row(worker: Any, piece: Any, rank: Any, cta_rows: Any, cluster: Any) -> Any:
    """The first of a piece's rows among all workers', for one CTA of a worker's cluster."""
    return ((2 * worker + _is_less(piece, 1)) * cluster + rank) * cta_rows


def cut_of(pieces: Any, partial_row: Any) -> Any:
    """How a row was cut, in one int32: into so many pieces (under 256), the first of them in that partial row."""
    return pieces | (partial_row << _PIECE_BITS)


def pieces_of(cut: Any) -> Any:
    return cut & ((1 << _PIECE_BITS) - 1)


def partial_row_of(cut: Any, piece: Any, tile_rows: Any) -> Any:
    """A cut row's piece: each is the next worker's, and only the first lies behind its worker's other one."""
    return (cut >> _PIECE_BITS) + (2 * piece - _is_less(0, piece)) * tile_rows


def keys_seen(cache_length: Any, kv_len: Any, token: Any, causal: Any) -> Any:
    """Keys that a query token sees: those up to its own position (causal 1), or all (0)."""
    seen = smaller(at_least_zero(cache_length + token + 1), kv_len)
    return causal * seen + (1 - causal) * kv_len


def _is_less(a: Any, b: Any) -> Any:
    """1 where a < b, else 0, of int32 whose difference fits."""
    return ((a - b) >> 31) & 1
