"""How keys are cut: every token in exactly one part, whole tiles, an independent count of how many parts hold any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmla.kv_cache.splits import split_bounds


@given(kv_len=st.integers(0, 5000), partitions=st.integers(1, 70), tile=st.integers(1, 130))
def test_parts_cover_the_range_once(kv_len: int, partitions: int, tile: int) -> None:
    parts = [split_bounds(kv_len, part, partitions, tile) for part in range(partitions)]
    assert [token for start, end in parts for token in range(start, end)] == list(range(kv_len))
    held = [(start, end) for start, end in parts if end > start]
    assert all(start % tile == 0 for start, _ in held)
    assert all(end % tile == 0 for _, end in held[:-1])
    assert len({end - start for start, end in held[:-1]}) <= 1
    assert all(start == end for start, end in parts[len(held) :])  # the empty ones stand last


@pytest.mark.parametrize(
    ("kv_len", "partitions", "tile", "parts"),
    [
        (0, 3, 16, [(0, 0), (0, 0), (0, 0)]),
        (1, 3, 16, [(0, 1), (1, 1), (1, 1)]),
        (16, 2, 16, [(0, 16), (16, 16)]),
        (17, 2, 16, [(0, 16), (16, 17)]),
        (100, 3, 16, [(0, 48), (48, 96), (96, 100)]),
        (100, 4, 16, [(0, 32), (32, 64), (64, 96), (96, 100)]),
        (64, 3, 16, [(0, 32), (32, 64), (64, 64)]),  # four tiles in threes: two, two, none
    ],
)
def test_by_hand(kv_len: int, partitions: int, tile: int, parts: list[tuple[int, int]]) -> None:
    assert [split_bounds(kv_len, part, partitions, tile) for part in range(partitions)] == parts
