"""Rows: ours beside the peers, where we lose, who is wrong; and nothing measured is ever set against a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedmla.bench.cases import Case
from pagedmla.bench.rows import Row, beside_peers, losing_regions, make_row, wrong_rows
from pagedmla.hardware.cost import StepCost


def row(contender: str, microseconds: float, error: float = 1e-3, **changed: int | str) -> Row:
    made = make_row(
        Case("bf16", 16, 1, 640), StepCost(1000, 1000), microseconds, source="measured", device="CPU",
        contender=contender, ours=contender.startswith("pagedmla"), reads="bf16", roof=None, fp8_mma=False,
        relative_l2=error, tolerance=4e-3,
    )  # fmt: skip
    return replace(made, **changed)


def test_the_fastest_peer_that_is_right() -> None:
    rows = [
        row("pagedmla a", 20.0),
        row("pagedmla b", 5.0),
        row("slow", 40.0),
        row("fast", 10.0),
        row("wrong", 1.0, error=0.1),
        row("nan", 1.0, error=float("nan")),
    ]
    made = beside_peers(rows)
    assert [(each.best_peer, each.speedup) for each in made] == [("fast", 0.5), ("fast", 2.0)] + [(None, None)] * 4
    assert [each.loses for each in made] == [True, False] + [False] * 4
    assert beside_peers(rows[:2]) == rows[:2]


def test_the_losing_region_names_its_bounds_and_its_worst() -> None:
    lost = {"best_peer": "fast"}
    rows = [
        replace(row("pagedmla a", 10.0, batch=1, kv_len=640), speedup=0.25, **lost),
        replace(row("pagedmla a", 10.0, batch=8, kv_len=640), speedup=0.5, **lost),
        replace(row("pagedmla a", 10.0, batch=8, kv_len=4096), speedup=1.0, **lost),
        replace(row("pagedmla b", 10.0), speedup=3.0, **lost),
        replace(row("pagedmla reference", 10.0), speedup=0.01, oracle=True, **lost),
    ]
    assert losing_regions(rows) == [
        "pagedmla a, bf16, 16 heads: loses 2 of 3 cases (requests 1 to 8, keys 640), by most 4.00x to fast at 1 x 640 "
        "keys"
    ]
    assert losing_regions([]) == []


def test_wrong_rows_are_sentences() -> None:
    assert wrong_rows([row("right", 1.0), row("broken", 1.0, error=0.5)]) == [
        "broken is wrong: relative L2 5.0e-01 on bf16, 16 heads, 1 x 640 keys"
    ]


@pytest.mark.parametrize(("error", "correct"), [(4e-3, True), (4.1e-3, False), (float("nan"), False)])
def test_correct_is_within_the_tolerance(error: float, correct: bool) -> None:
    assert row("a", 1.0, error).correct is correct


def test_the_json_row_has_one_format() -> None:
    assert list(row("a", 1.0).to_dict()) == [
        "source", "device", "contender", "ours", "reads", "layout", "heads", "batch", "kv_len", "q_len", "lengths",
        "correct", "relative_l2", "microseconds", "gb_per_s", "tflop_per_s", "share_of_floor", "best_peer",
        "speedup", "bound", "oracle", "floor_us", "published",
    ]  # fmt: skip
