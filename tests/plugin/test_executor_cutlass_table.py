"""The committed table of compiled CUTLASS kernels: every variant that may be chosen, and what each may cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedmla.cutlass_kernels.build import ALL
from pagedmla.cutlass_kernels.compile import DIGEST, stale
from pagedmla.cutlass_kernels.tiles import SHARED_BYTES

TABLE = Path(__file__).parent.parent.parent / "bench" / "results" / "compile-cutlass.json"
BUDGET_AT_16_ROWS = {"fp8_rope_bf16": 127, "fp8_rope_bf16_prescaled": 127, "fp8_flat": 115}  # issue slots of an H200


@pytest.fixture(scope="module")
def table() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return rows


def test_it_holds_every_variant_and_no_other(table: list[dict[str, Any]]) -> None:
    listed = [
        (row["options"]["variant"], row["kernel"], row["layout"], row["rows"], row["options"]["dtype"]) for row in table
    ]
    foreseen = [
        (each.name, "merge" if "combine" in each.name else "decode", getattr(each, "layout", ""), each.rows, each.dtype)
        for each in ALL
    ]
    assert sorted(listed) == sorted(foreseen)


def test_it_was_compiled_from_these_sources(table: list[dict[str, Any]]) -> None:
    """Its figures are what the time model and the pages quote: those of other kernels mislead both."""
    assert all(DIGEST in row for row in table)
    outdated = stale(table)
    if outdated:
        pytest.fail(outdated)


def test_what_may_be_chosen_fits(table: list[dict[str, Any]]) -> None:
    for row in table:
        assert "refused" not in row, row
        assert (row["executor"], row["target"]) == ("cutlass", "sm_90")
        assert row["ctas_per_sm"] >= 1
        assert row["shared_bytes"] <= SHARED_BYTES
        few = row["options"].get("cluster") == 2 and row["options"]["box"] == 16  # the producer's: see test_compile.py
        assert row["spill_words_in_loop"] <= (12 if few else 0)


def test_instructions_a_token(table: list[dict[str, Any]]) -> None:
    """64 rows seemed to spend a tenth of what 32 do: the loop that promotes sums was taken for the main one."""
    spent: dict[tuple[Any, ...], float] = {}
    for row in table:
        if row["kernel"] == "merge":
            assert row["warp_instructions_per_token"] is None
            continue
        options = row["options"]
        spent[row["layout"], options["precision"], options["terms"], row["rows"], options["box"]] = row[
            "warp_instructions_per_token"
        ]
        if row["rows"] == 16:
            assert row["warp_instructions_per_token"] <= BUDGET_AT_16_ROWS[row["layout"]]
    for (layout, precision, terms, rows, box), instructions in spent.items():
        fewer = spent.get((layout, precision, terms, rows // 2, box))
        if fewer is not None and rows <= 64:
            assert fewer < instructions < 2 * fewer, (layout, precision, terms, rows, box)
