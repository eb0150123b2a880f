"""Budgets of the compiled kernels: the stored table whole, and its attention on Hopper built again.

The table (bench/results/compile-triton.json, written by `pagedmla compile --json`) is what Triton 3.7.1 makes of every
variant on every target. Figures are exact on one release of the compiler, so any other skips the comparison with them;
what its machine code may not hold, it may not hold in any release.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagedmla.hardware import sass
from pagedmla.hardware.loops import Instruction
from pagedmla.hardware.targets import TARGETS
from pagedmla.hardware.unwritten import unwritten_reads
from pagedmla.triton_kernels.variants import BUDGETED, Variant, variants

TABLE = Path(__file__).parents[2] / "bench/results/compile-triton.json"
RELEASE = "3.7.1"
FIELDS = [
    "kernel", "executor", "target", "layout", "rows", "registers", "spill_words", "spill_words_in_loop", "shared_bytes",
    "ctas_per_sm", "warp_instructions_per_token", "bytes_per_token", "triton", "options",
]  # fmt: skip

# Issue slots of an H200 SM for a key token at full bandwidth: 580, 644 and 656 bytes (bench/model.py).
ISSUE_SLOTS = {"fp8_flat": 115, "fp8_rope_bf16": 127, "fp8_ds_mla": 130}
ATTENTION = ("pieces", "decode", "mixed")
SPILLS = {"pieces": 8, "decode": 0, "mixed": 16}  # words a thread and tile of 64 keys
WARPGROUP_MMA = ("HGMMA", "QGMMA")


@pytest.fixture(scope="module")
def table() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows


def key_of(row: dict[str, Any]) -> str:
    """What tells rows apart: all that was fixed before the compiler ran."""
    return json.dumps([row[name] for name in ("kernel", "target", "layout", "rows", "options")], sort_keys=True)


def options_of(variant: Variant) -> dict[str, Any]:
    return {
        **variant.constants,
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        **variant.options,
    }


def named(variant: Variant) -> str:
    """An id for a variant in a list of tests."""
    telling = {"GROUP": "g", "PAGE_SIZE": "P", "KEY_COLUMNS": "k", "VALUE_COLUMNS": "v"}
    parts = [f"{short}{variant.constants[name]}" for name, short in telling.items() if name in variant.constants]
    flags = ["split"] * bool(variant.constants.get("SPLIT_QUERIES")) + ["full"] * (not variant.constants["CAUSAL"])
    return "-".join([variant.kernel, variant.layout, *parts, str(variant.rows), *flags])


def float32(row: dict[str, Any]) -> bool:
    """Tiles for what no 16-bit MMA holds exactly: right and slow. They multiply three times for one, spill hundreds of
    words for it, and no budget is theirs."""
    return bool(row["options"]["LATENT_MMA"] == "float32")


def narrow(row: dict[str, Any]) -> bool:
    """Groups of 64 columns, whose scores Hopper leaves to the warps' own MMA in tiles of 32 keys, since ptxas 12.8 gets
    their WGMMA wrong. Right before fast: they have figures, no budget."""
    return bool(row["options"]["CHUNK"] < 128)


def attention(table: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    return [row for row in table if row["target"] == target and row["kernel"] in ATTENTION and not float32(row)]


def test_the_table_holds_every_variant_and_no_other(table):
    """Rows differ where variants do; a changed tile or constant makes the table stale, whatever the compiler."""
    foreseen = {
        key_of(
            {
                "kernel": variant.kernel, "target": variant.targets[0], "layout": variant.layout, "rows": variant.rows,
                "options": options_of(variant),
            }
        )
        for variant in variants()
    }  # fmt: skip
    assert {key_of(row) for row in table} == foreseen


def test_the_tables_form(table):
    for row in table:
        assert [name for name in row if name != "refused"] == FIELDS
        assert (row["executor"], row["triton"]) == ("triton", RELEASE)


def test_what_is_listed_fits_its_target(table):
    """Each listed build, that is. A call whose strides, pages or granularity aren't listed differs in addresses and
    numbers of chains; nothing here shows what it needs."""
    for row in table:
        assert "refused" not in row, row
        assert row["shared_bytes"] <= TARGETS[row["target"]].shared_per_block
        assert row["ctas_per_sm"] >= 1


def test_who_is_exempt(table):
    """float32 caches, and groups of columns that no chunk of 64 fits; float16 queries aren't."""
    exempt = {(row["layout"], row["options"]["GROUP"]) for row in table if row["kernel"] in ATTENTION and float32(row)}
    assert exempt == {("fp32", 576), ("fp8_flat", 40)}
    assert any(row["options"]["SPLIT_QUERIES"] for row in attention(table, "sm_90"))


def test_tiles_of_hopper(table):
    """17 to 32 rows are two tiles of 16: ptxas 12.8 gets tiles of 32 wrong."""
    assert {row["rows"] for row in table if row["target"] == "sm_90" and row["kernel"] in ATTENTION} == {16, 64}


def test_sixteen_rows_hardly_spill(table):
    """In the main loop, on Hopper: every layout, pages of 64 and 16, bf16 and float16 queries. A word is 512 bytes a
    block, beside the 250 KB that a tile moves through shared memory."""
    rows = [row for row in attention(table, "sm_90") if row["rows"] == 16 and not narrow(row)]
    kinds = {(row["kernel"], row["layout"], row["options"]["PAGE_SIZE"]) for row in rows}
    assert {*product(("pieces", "mixed"), ISSUE_SLOTS, (64, 16)), *product(ATTENTION, ISSUE_SLOTS, (64,))} <= kinds
    for row in rows:
        assert row["spill_words_in_loop"] <= SPILLS[row["kernel"]], row


def test_sixteen_rows_stay_under_the_issue_limit(table):
    rows = [
        row
        for row in attention(table, "sm_90")
        if row["rows"] == 16 and row["layout"] in ISSUE_SLOTS and not narrow(row)
    ]
    assert {row["layout"] for row in rows} == set(ISSUE_SLOTS)
    for row in rows:
        assert row["warp_instructions_per_token"] < ISSUE_SLOTS[row["layout"]], row


def test_sixty_four_rows_hardly_spill(table):
    rows = [row for row in attention(table, "sm_90") if row["rows"] == 64 and not narrow(row)]
    assert {row["layout"] for row in rows} >= {*ISSUE_SLOTS, "bf16", "fp16", "fp8_rope_bf16_prescaled"}
    for row in rows:
        assert row["spill_words_in_loop"] <= 16, row


def test_what_groups_of_sixty_four_cost(table):
    """Over the limits at both sizes of a tile (612 bytes are 121 issue slots), and one of 64 rows still costs less than
    four of 16."""
    rows = [row for row in attention(table, "sm_90") if narrow(row)]
    assert {(row["kernel"], row["layout"], row["options"]["GROUP"], row["options"]["TILE"]) for row in rows} == {
        ("pieces", "fp8_flat", 64, 32)
    }
    cost = {row["rows"]: (row["spill_words_in_loop"], row["warp_instructions_per_token"]) for row in rows}
    assert cost == {16: (13, 142.6), 64: (36, 321.5)}
    assert cost[64][1] < 4 * cost[16][1]


# ---- built anew ------------------------------------------------------------------------------------------------------


class Built(NamedTuple):
    variant: Variant
    row: dict[str, Any]
    code: Sequence[Instruction]


@pytest.fixture(
    scope="module", params=[v for v in variants([BUDGETED]) if v.kernel in (*ATTENTION, "prefill")], ids=named
)
def built(request, tmp_path_factory) -> Built:
    """Each variant with a loop of MMAs on Hopper, compiled once for all tests that take it."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    from pagedmla.triton_kernels.compile import compile_variant

    folder = tmp_path_factory.mktemp("built")
    row = compile_variant(request.param, BUDGETED, folder)
    assert "refused" not in row
    return Built(request.param, row, sass.parse(next(folder.glob("*.sass")).read_text()))


def test_no_descriptor_is_read_before_it_is_written(built):
    """On an H200 tiles of 16 and 32 rows gave wrong outputs, and sometimes illegal addresses: ptxas 12.8 had lost the
    first copy of a WGMMA descriptor where the loop reuses one operand's shared memory for another."""
    assert unwritten_reads(built.code) == []


def test_a_build_of_today_costs_what_the_table_says(built, table):
    if built.row["triton"] != RELEASE:
        pytest.skip(f"the table is of Triton {RELEASE}, this is {built.row['triton']}")
    (stored,) = (old for old in table if key_of(old) == key_of(built.row))
    assert built.row == stored


def test_which_mma_the_loop_runs_on(built):
    """Warpgroups' MMA alone where a tile has 64 keys; where it has 32, that is fewer than its M, and the scores are the
    warps'. Values, whose M is columns, are the warpgroups' in both."""
    loop = sass.find_main_loop(built.code)
    assert loop is not None
    opcodes = [built.code[index].opcode for index in loop.body]
    assert any(opcode.startswith(WARPGROUP_MMA) for opcode in opcodes)
    assert any(opcode.startswith("HMMA") for opcode in opcodes) == (built.variant.tokens_per_iteration == 32)
    assert not any(opcode.startswith("F2F.BF16") for opcode in opcodes)  # e4m3 to bf16, the slow conversion
