"""The schedule: every tile of every segment has exactly one owner, shares are even, and no segment has too many pieces.

Lengths stand on both sides of what the cuts turn on: none, one key, a tile, a tile and a key; one request far longer
than the rest; more segments than workers and fewer.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmla.cutlass_kernels import schedule

KV_LENS = st.lists(st.sampled_from([0, 1, 63, 64, 65, 640, 4096, 33280]), min_size=1, max_size=40)


def assign(units: list[int], workers: int, partitions: int) -> list[list[tuple[int, int, int, int, int]]]:
    """For each worker: (segment, begin, end, piece, pieces)."""
    total, longest = sum(units), max(units)
    share = schedule.share_of(total, longest, workers, partitions)
    whole = schedule.is_whole(total, longest, len(units), workers, partitions)
    starts = np.concatenate(([0], np.cumsum(units)[:-1])).tolist()
    given_out: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(workers)]
    for segment, (start, count) in enumerate(zip(starts, units, strict=True)):
        if whole:
            owner = schedule.owner_of(segment, start, len(units), workers, share)
            given_out[owner].append((segment, 0, count, 0, 1))
            continue
        for worker in range(workers):
            begin, end, piece, pieces = schedule.piece_of(worker, start, count, share)
            if begin < end:
                given_out[worker].append((segment, begin, end, piece, pieces))
    return given_out


@given(KV_LENS, st.integers(1, 132), st.integers(1, 32))
def test_every_unit_has_one_owner(kv_lens: list[int], workers: int, partitions: int) -> None:
    units = [int(schedule.units_of(kv_len)) for kv_len in kv_lens]
    owners = [np.zeros(count, int) for count in units]
    seen: dict[int, list[tuple[int, int]]] = {}
    for pieces in assign(units, workers, partitions):
        for segment, begin, end, piece, count in pieces:
            owners[segment][begin:end] += 1
            seen.setdefault(segment, []).append((piece, count))
    assert all((each == 1).all() for each in owners)
    for numbered in seen.values():
        assert sorted(piece for piece, _ in numbered) == list(range(len(numbered)))
        assert {count for _, count in numbered} == {len(numbered)}
        assert len(numbered) <= partitions


@given(KV_LENS, st.integers(1, 132), st.integers(2, 144), st.sampled_from([(16, 1), (64, 1), (64, 2)]))
def test_pieces_have_rows_of_their_own(
    kv_lens: list[int], workers: int, partitions: int, tile: tuple[int, int]
) -> None:
    """No two pieces share a partial row, and the merge finds each of them from what piece 0 wrote of the row."""
    written: dict[int, tuple[int, int, tuple[int, int]]] = {}
    cuts: dict[tuple[int, tuple[int, int]], int] = {}
    cta_rows, cluster = tile
    tile_rows = cta_rows * cluster
    rows = [(rank, row) for rank in range(cluster) for row in (0, cta_rows - 1)]
    for worker, assigned in enumerate(assign([int(schedule.units_of(n)) for n in kv_lens], workers, partitions)):
        for segment, _, _, piece, pieces in assigned:
            if pieces == 1:
                continue
            for row in rows:
                at = schedule.partial_row(worker, piece, row[0], cta_rows, cluster) + row[1]
                assert 0 <= at < schedule.partial_rows(workers, tile_rows)
                assert at not in written
                written[at] = segment, piece, row
                if piece == 0:
                    cuts[segment, row] = schedule.cut_of(pieces, at)
    assert max(cuts.values(), default=0) < 2**31
    found = {
        schedule.partial_row_of(cut, piece, tile_rows): (segment, piece, row)
        for (segment, row), cut in cuts.items()
        for piece in range(schedule.pieces_of(cut))
    }
    assert found == written


@given(KV_LENS, st.integers(1, 132))
def test_shares_are_even_when_partitions_allow(kv_lens: list[int], workers: int) -> None:
    units = [int(schedule.units_of(kv_len)) for kv_len in kv_lens]
    loads = [sum(end - begin for _, begin, end, _, _ in pieces) for pieces in assign(units, workers, max(units) + 1)]
    even = -(-sum(units) // workers)
    assert max(loads) * 8 <= even * 9 + 8


def test_one_long_request_among_short_ones_doesnt_bind() -> None:
    """128 requests of 640 keys and one of 131072: uncut, the long one alone would take 2048 tiles."""
    units = [int(schedule.units_of(n)) for n in [640] * 128 + [131072]]
    loads = [sum(end - begin for _, begin, end, _, _ in pieces) for pieces in assign(units, 132, 132)]
    assert max(loads) == -(-sum(units) // 132) == 26


def test_equal_requests_that_fill_the_gpu_stay_whole() -> None:
    """128 requests of 4096 keys on 132 workers: cutting would save one tile of 64 and add 126 merges."""
    given_out = assign([64] * 128, 132, 8)
    assert [pieces for pieces in given_out if pieces] == [[(b, 0, 64, 0, 1)] for b in range(128)]


def test_equal_requests_are_dealt_out_whole_to_fewer_workers() -> None:
    """128 heads: 128 requests on 66 clusters are two each, 3 % over an even share; they were cut, and 25 us merged."""
    whole = assign([64] * 128, 66, 8)
    assert max(len(pieces) for pieces in whole) == 2
    assert all(count == 1 for pieces in whole for *_, count in pieces)
    cut = assign([64] * 127 + [63], 66, 8)
    assert any(count > 1 for pieces in cut for *_, count in pieces)


def test_one_partition_never_cuts() -> None:
    given_out = assign([2048, 1, 1, 64], 3, 1)
    assert sorted(piece for pieces in given_out for piece in pieces) == [
        (0, 0, 2048, 0, 1),
        (1, 0, 1, 0, 1),
        (2, 0, 1, 0, 1),
        (3, 0, 64, 0, 1),
    ]


@given(KV_LENS, st.integers(1, 132))
def test_whole_segments_are_spread_evenly(kv_lens: list[int], workers: int) -> None:
    """One partition: a worker has at most an even share and what starts at its end. Shares once were as long as the
    longest request, and of 132 workers 33 had anything to do."""
    units = [int(schedule.units_of(kv_len)) for kv_len in kv_lens]
    loads = [sum(end - begin for _, begin, end, _, _ in pieces) for pieces in assign(units, workers, 1)]
    assert max(loads) <= -(-sum(units) // workers) + max(units)


@pytest.mark.parametrize(
    ("cache_length", "q_len", "kv_len", "units"),
    [
        (-1, 1, 0, 1),
        (0, 0, 0, 1),
        (0, 1, 1, 1),
        (63, 1, 64, 1),
        (64, 1, 65, 2),
        (2**31 - 32769, 1, 2**31 - 32768, 2**25 - 512),
    ],
)
def test_lengths(cache_length: int, q_len: int, kv_len: int, units: int) -> None:
    assert schedule.length_of(cache_length, q_len) == kv_len
    assert schedule.units_of(kv_len) == units


@given(st.integers(-(2**30), 2**30), st.integers(-(2**30), 2**30))
def test_bit_tricks_are_max_and_min(a: int, b: int) -> None:
    """They stand in for functions that ints, int32 arrays and the kernel's values don't have in common."""
    assert schedule.larger(a, b) == max(a, b)
    assert schedule.smaller(a, b) == min(a, b)
    pair = np.array([a, b], np.int32)
    assert schedule.larger(pair, pair[::-1]).tolist() == [max(a, b)] * 2
    assert schedule.at_least_zero(pair).tolist() == [max(a, 0), max(b, 0)]


def test_row_limits() -> None:
    token = np.arange(4)
    assert schedule.keys_seen(5, 9, token, True).tolist() == [6, 7, 8, 9]
    assert schedule.keys_seen(-3, 1, token, True).tolist() == [0, 0, 0, 1]
    assert schedule.keys_seen(5, 9, token, False).tolist() == [9] * 4
