"""What the accuracy of the forms is worked out from: distances by hand, windows, and that the right executor ran.

The engine's part runs in tests/engine/test_forms.py; the figures in bench/results are held to their own order.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from pagedmla.bench.accuracy_forms import (
    BLOCK,
    CONTEXT,
    EXACT_BF16,
    EXACT_FP8,
    SETTINGS,
    _check_calls,
    distance,
    windows_of,
)

RECORD = Path(__file__).parents[2] / "bench" / "results" / "accuracy-forms.json"


def test_distance_by_hand() -> None:
    """Two blocks: in the first both agree, in the second the reference says 1/2, 1/2 and the other 1/4, 3/4."""
    reference = torch.full((1, 2 * BLOCK, 2), math.log(0.5))
    reference[..., 0] += 1e-6  # no tie
    found = reference.clone()
    found[0, BLOCK:] = torch.tensor([0.25, 0.75]).log()
    one = distance(found, reference)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert one.kl == pytest.approx(kl / 2, rel=1e-4)
    assert one.kl_error == pytest.approx(kl / 2**0.5 / 2**0.5, rel=1e-4)
    assert one.same_next_byte == 0.5


def test_windows_are_documents_end_to_end() -> None:
    def encode(text: str) -> list[int]:
        return [256, *text.removeprefix("<|end|>").encode()]

    windows = windows_of("ab\fcdef", encode, 2, 3)
    assert windows == [[256, 97, 98, 256], [256, 99, 100, 101]]
    with pytest.raises(typer.BadParameter, match="expected 1 to 2 windows of 3 bytes; got 3"):
        windows_of("ab\fcdef", encode, 3, 3)


@pytest.mark.parametrize(
    "calls",
    [
        [("0", "store", "torch", 4), ("0", "decode", "torch", 4)],
        [("0", "store", "torch", 4), ("0", "decode", "cutlass-model", 4), ("1", "decode", "cutlass-model", 3)],
        [("0", "store", "torch", 4), ("0", "prefill", "cutlass-model", 4)],
        [],
    ],
)
def test_another_executor_is_noticed(calls: list[tuple[str, str, str, int]]) -> None:
    with pytest.raises(RuntimeError, match="fp8: expected 4 decode calls of cutlass-model a layer"):
        _check_calls(SETTINGS[-1], calls, 4)
    _check_calls(SETTINGS[-1], [("0", "store", "torch", 4), ("0", "decode", "cutlass-model", 4)], 4)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    content = json.loads(RECORD.read_text())
    assert content["scored_bytes"] == content["windows"] * (content["window"] - CONTEXT) >= 1024
    return {row["setting"]["name"]: row for row in content["rows"]}


def test_the_record_orders_the_forms(rows: dict[str, Any]) -> None:
    """By more than their errors: fp16 is nearer to the floor of a bf16 model than to two terms, and those than one."""
    assert list(rows) == [setting.name for setting in SETTINGS]
    floor, fp16, fp8x2, fp8 = (rows[setting.name]["from_torch"] for setting in SETTINGS[2:])
    for finer, coarser in ((floor, fp16), (fp16, fp8x2), (fp8x2, fp8)):
        assert coarser["kl"] - finer["kl"] > 2 * math.hypot(finer["kl_error"], coarser["kl_error"])
    assert fp16["kl"] - floor["kl"] < fp8x2["kl"] - fp16["kl"]
    assert rows[EXACT_FP8.name]["from_torch"]["kl"] == rows[EXACT_BF16.name]["from_bf16_cache"]["kl"] == 0
