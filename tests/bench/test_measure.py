"""The bench's own code, on a CPU with a clock that says 10 microseconds: its arithmetic and its errors, no speeds."""

from __future__ import annotations

import pytest
import torch

from pagedmla.bench.cases import BATCHES, HEADS, LAYOUTS, Case, build, grid
from pagedmla.bench.measure import gpu_named, measure
from pagedmla.hardware.cost import B200, H100, H200


def ten_microseconds(call) -> float:
    call()
    return 10.0


@pytest.mark.parametrize("layout", ["bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("kv_len", [1, 65])  # 65: the step's own token begins a page
def test_every_contender_is_right_beside_its_speed(layout: str, kv_len: int) -> None:
    rows = measure(Case(layout, 3, 2, kv_len), torch.device("cpu"), ten_microseconds)
    assert [row["contender"] for row in rows] == ["pagedmla torch", "dense bf16 (torch sdpa)"]
    for row in rows:
        assert row["source"] == "measured"
        assert row["relative_l2"] < 1e-2
        assert row["share_of_floor"] is None  # a CPU has no published peaks here
    assert rows[0]["tflop_per_s"] == round(2 * 1088 * 3 * 2 * kv_len / 10 / 1e6, 1)


def test_bytes_are_the_layouts() -> None:
    """FP8 rows are 644 bytes where the dense baseline's are 1152: each is judged by what it must move itself."""
    ours, dense = measure(Case("fp8_rope_bf16", 1, 1, 4096), torch.device("cpu"), ten_microseconds)
    assert dense["gb_per_s"] / ours["gb_per_s"] == pytest.approx(1152 / 644, rel=0.01)


def test_a_wrong_result_shows(monkeypatch) -> None:
    monkeypatch.setattr("pagedmla.bench.measure.SM_SCALE", 0.2)
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda q, k, v, scale: q[..., : v.shape[-1]] * 0
    )
    dense = measure(Case("bf16", 2, 1, 40), torch.device("cpu"), ten_microseconds)[1]
    assert dense["relative_l2"] == 1.0


def test_the_grid() -> None:
    assert len(list(grid())) == len(LAYOUTS) * len(HEADS) * len(BATCHES)
    assert list(grid(["bf16"], [4], [2], 100)) == [Case("bf16", 4, 2, 100)]
    assert 1 in BATCHES  # small batches are where splits matter


def test_the_cache_is_the_same_each_time() -> None:
    first, second = (build(Case("fp8_rope_bf16", 2, 2, 70), "cpu") for _ in range(2))
    assert torch.equal(first.values.kv_blocks.view(torch.uint8), second.values.kv_blocks.view(torch.uint8))
    assert torch.equal(first.q, second.q)
    assert first.values.cache_lengths.view(torch.int32).tolist() == [69, 69]


def test_gpus_by_their_drivers_names() -> None:
    assert gpu_named("NVIDIA H200") is H200
    assert gpu_named("NVIDIA H100 80GB HBM3") is H100
    assert gpu_named("NVIDIA B200") is B200
    assert gpu_named("NVIDIA A100-SXM4-80GB") is None
