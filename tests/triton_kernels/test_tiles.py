"""Tiles of rows: 16, 17, 32 and 33 rows stand on both sides of the bounds of each size; 4,096 is past them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedmla.hardware.targets import TARGETS
from pagedmla.triton_kernels.tiles import choose_tile, rows_for

FACTS = {
    "LATENT": 512,
    "ROPE": 64,
    "FP8_LATENT": True,
    "FP8_ROPE": False,
    "GROUP": 640,
    "GROUPS": 1,
    "ROPE_SCALED": False,
}


@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("sm_80", [16, 32, 32, 64, 64]),
        ("sm_89", [16, 32, 32, 32, 32]),  # 99 KiB of shared memory
        ("sm_90", [16, 16, 16, 64, 64]),  # its tiles of 32 are built wrong
        ("sm_100", [16, 32, 32, 64, 64]),
        ("gfx942", [16, 16, 16, 16, 16]),
        ("gfx950", [16, 16, 16, 16, 16]),
    ],
)
def test_rows(target: str, sizes: list[int]) -> None:
    assert [rows_for(rows, TARGETS[target]) for rows in (16, 17, 32, 33, 4096)] == sizes


@pytest.mark.parametrize(("target", "largest"), [("sm_80", 32), ("sm_89", 16), ("sm_90", 64), ("gfx942", 16)])
def test_queries_in_two_parts_take_twice_the_room(target: str, largest: int) -> None:
    assert rows_for(4096, TARGETS[target], split=True) == largest


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 17, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_tile_has_the_rows_that_are_told(target, rows, dtype) -> None:
    tile = choose_tile(FACTS, rows, dtype, (torch.uint8, torch.bfloat16), target)
    assert tile.ROWS == rows_for(rows, target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_name_decides_nothing(target, dtype) -> None:
    """sm_103, a relative of sm_100, got tiles of 32 keys: what a tile needs was looked up by the target's name."""
    known = FACTS if dtype != torch.float32 else {**FACTS, "FP8_LATENT": False, "GROUPS": 0}
    cache = (torch.uint8, torch.bfloat16) if dtype != torch.float32 else (torch.float32, torch.float32)
    renamed = replace(target, name="another", arch=target.arch)
    for rows in (1, 17, 128):
        assert choose_tile(known, rows, dtype, cache, renamed) == choose_tile(known, rows, dtype, cache, target)
