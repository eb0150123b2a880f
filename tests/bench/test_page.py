"""docs/benchmark.md says what the record says: its tables are made again from bench/results/ and must be on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedmla.bench.rows import Row, losing_regions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
RECORD: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "cpu-2026-11-30.json").read_text(encoding="utf-8"))
CONTENDERS = ("pagedmla torch", "vllm cpu_mla", "dense bf16 (sdpa)", "dense fp32 (sdpa)")


def measured() -> list[Row]:
    return [Row(**row) for row in RECORD["rows"] if row["source"] == "measured"]


def case_lines() -> list[str]:
    """Milliseconds of each contender, and the best peer's time over ours."""
    lines = []
    for case in dict.fromkeys(row.case for row in measured()):
        rows = {row.contender: row for row in measured() if row.case == case}
        times = " | ".join(f"{rows[name].microseconds / 1e3:.1f}" for name in CONTENDERS)
        lines.append(f"| {case} | {times} | {rows['pagedmla torch'].speedup:.2f} |")
    return lines


def host_lines() -> list[str]:
    """Microseconds for each number of requests, and the engine's own where it has the same part."""
    lines = []
    for what in dict.fromkeys(row["what"] for row in RECORD["host"]):
        rows = [row for row in RECORD["host"] if row["what"] == what]
        theirs = ["" if row["beside"] is None else f" (vLLM's {row['beside']:.1f})" for row in rows]
        cells = (f"{row['microseconds']:,.1f}{beside}" for row, beside in zip(rows, theirs, strict=True))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def growth_lines() -> list[str]:
    lines = []
    for what in dict.fromkeys(row["what"] for row in RECORD["growth"]):
        rows = [row for row in RECORD["growth"] if row["what"] == what]
        first, last = rows[0], rows[-1]
        same = {None: "", True: "yes", False: "no"}[last["same"]]
        ends = (f"{row['size']:,} {row['unit']}, {_time(row['microseconds'])}" for row in (first, last))
        lines.append(f"| {what} | {' | '.join(ends)} | {last['ratio']:.2f} | {same} |")
    return lines


def balance_lines() -> list[str]:
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in RECORD["balance"]):
        rows = [row for row in RECORD["balance"] if row["batch"] == batch]
        lines.append(f"| {batch} | {rows[0]['kind']} | {' | '.join(format(row['share'], '.2f') for row in rows)} |")
    return lines


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


@pytest.mark.parametrize("lines", [case_lines, host_lines, growth_lines, balance_lines], ids=lambda made: made.__name__)
def test_the_tables_are_the_record(lines) -> None:
    made = lines()
    assert len(made) > 5
    for line in made:
        assert line in PAGE


def test_the_record_is_whole() -> None:
    """Nobody was left out or wrong, what had to be the same was, and the losing region is what its rows say."""
    assert RECORD["absent"] == {}
    assert RECORD["unmeasured"] == RECORD["wrong"] == []
    assert all(row.correct for row in measured())
    assert all(row["same"] is not False for row in RECORD["growth"])
    assert RECORD["losing"] == losing_regions(measured())
    for sentence in RECORD["losing"]:
        assert sentence in PAGE
