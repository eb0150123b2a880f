"""Merge, judged by float64, by states computed by hand, and by what must hold whatever the numbers are.

Grid: 1, 2, 5 and 33 splits stand on either side of the 4 splits of a trip and the 32 LSEs of a look; 1, 24 and 64
columns are less than, not a multiple of, and exactly a power of two. All buffers lie in poisoned, watched memory
(conftest.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from pagedmla.triton_kernels import merge as module
from pagedmla.triton_kernels.merge import merge

INF = float("inf")
NAN = float("nan")


def meaning(partial_out, partial_lse):
    """The merged state in float64; splits whose LSE is -inf don't enter at all."""
    lse = partial_lse.double()
    live = lse != -INF
    weight = torch.where(live, lse, 0.0).exp() * live
    parts = torch.where(live[..., None], partial_out.double(), 0.0)
    total = weight.sum(0)
    out = (weight[..., None] * parts).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return out, torch.where(total == 0, -INF, total.log())


def merged(guarded, partial_out, partial_lse, out_dtype=torch.float32):
    """Run the kernel between sentinels."""
    _, tokens, heads, columns = partial_out.shape
    out = guarded.empty((tokens, heads, columns), out_dtype)
    lse = guarded.empty((tokens, heads), torch.float32)
    merge(guarded.frozen(partial_out), guarded.frozen(partial_lse), out, lse)
    return out, lse


def states(splits, tokens=2, heads=3, columns=24, spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(splits * 1000 + columns)
    out = torch.randn(splits, tokens, heads, columns, generator=generator).to(dtype)
    return out, torch.randn(splits, tokens, heads, generator=generator) * spread


@pytest.mark.parametrize("columns", [1, 24, 64])
@pytest.mark.parametrize("splits", [1, 2, 5, 33])
def test_agrees_with_float64(guarded, splits, columns):
    partial_out, partial_lse = states(splits, columns=columns)
    out, lse = merged(guarded, partial_out, partial_lse)
    expected_out, expected_lse = meaning(partial_out, partial_lse)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_states_are_summed_in_float32(guarded, dtype):
    partial_out, partial_lse = states(5, dtype=dtype)
    out, _ = merged(guarded, partial_out, partial_lse, dtype)
    expected, _ = meaning(partial_out, partial_lse)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_natural_log_and_not_base_two(guarded):
    """A user saw merged outputs 12 % off (sglang#33064): one side of the merge gave its LSE in base 2.

    Weights 2 and 8 over outputs 0 and 10 give 8; read in base 2 the same LSEs give 7.233.
    """
    partial_lse = torch.tensor([2.0, 8.0]).log().reshape(2, 1, 1)
    out, lse = merged(guarded, torch.tensor([0.0, 10.0]).reshape(2, 1, 1, 1), partial_lse)
    assert out.item() == pytest.approx(8.0, abs=1e-5)
    assert lse.item() == pytest.approx(math.log(10.0), abs=1e-6)


def test_empty_splits_are_never_read(guarded):
    """FlashInfer and vLLM multiplied what an empty split left in its workspace by a weight of 0: NaN (vllm#49294)."""
    partial_out, partial_lse = states(5)
    partial_lse[1] = -INF
    partial_lse[3, 1, 2] = -INF
    expected = meaning(partial_out, partial_lse)
    partial_out[1] = NAN
    partial_out[3, 1, 2] = INF
    out, lse = merged(guarded, partial_out, partial_lse)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-5)


def test_all_splits_empty_gives_the_empty_state(guarded):
    """Merging two states that are both -inf gave NaN (vllm#27491, #15492): -inf - -inf."""
    partial_out, partial_lse = states(2)
    partial_out[:, 0] = NAN
    partial_lse[:, 0] = -INF
    out, lse = merged(guarded, partial_out, partial_lse)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(lse[0], torch.full_like(lse[0], -INF))
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_plus_infinity_counts_as_empty(guarded):
    """FlashAttention-2 reports a row without keys as +inf, FlashAttention-3 as -inf: merging them gave NaN
    (vllm#27491).
    """
    partial_out, partial_lse = states(2)
    partial_lse[0], partial_out[0] = INF, NAN
    out, lse = merged(guarded, partial_out, partial_lse)
    assert torch.equal(out, partial_out[1])
    assert torch.equal(lse, partial_lse[1])


def test_one_live_split_of_many_comes_through_unchanged(guarded):
    """kv_len 1 cut into 32 splits leaves 31 of them empty (vllm#24966); the one that is left is the answer, bit for
    bit.
    """
    partial_out, partial_lse = states(32)
    partial_lse[:17], partial_lse[18:] = -INF, -INF
    out, lse = merged(guarded, partial_out, partial_lse)
    assert torch.equal(out, partial_out[17])
    assert torch.equal(lse, partial_lse[17])


def test_nan_stays_in_its_row(guarded):
    partial_out, partial_lse = states(3)
    partial_lse[1, 0, 0] = NAN
    partial_out[2, 1, 1, 5] = NAN
    out, lse = merged(guarded, partial_out, partial_lse)
    out_nan, lse_nan = torch.zeros_like(out, dtype=torch.bool), torch.zeros_like(lse, dtype=torch.bool)
    out_nan[0, 0], out_nan[1, 1, 5], lse_nan[0, 0] = True, True, True
    assert torch.equal(out.isnan(), out_nan)
    assert torch.equal(lse.isnan(), lse_nan)


def test_all_nan_is_not_empty(guarded):
    partial_out, partial_lse = states(2)
    partial_lse.fill_(NAN)
    out, lse = merged(guarded, partial_out, partial_lse)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("shift", [-1e4, 88.8, 1e4])
def test_lse_may_be_of_any_size(guarded, shift):
    """exp() of these leaves float32 on either side; weights depend on differences only."""
    partial_out, partial_lse = states(4)
    out, lse = merged(guarded, partial_out, partial_lse + shift)
    expected_out, expected_lse = meaning(partial_out, (partial_lse + shift) - shift)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse + shift, rtol=2e-7, atol=1e-5)


def test_merging_in_two_steps_is_merging_in_one(guarded):
    partial_out, partial_lse = states(5)
    once = merged(guarded, partial_out, partial_lse)
    first = merged(guarded, partial_out[:2], partial_lse[:2])
    rest = merged(guarded, partial_out[2:], partial_lse[2:])
    twice = merged(guarded, torch.stack((first[0], rest[0])), torch.stack((first[1], rest[1])))
    torch.testing.assert_close(twice[0], once[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(twice[1], once[1], rtol=1e-6, atol=2e-6)


def test_out_may_be_the_first_partial(guarded):
    """Context chunks are folded into a running state, which is then split 0 and the result at once."""
    partial_out, partial_lse = states(2)
    expected = merged(guarded, partial_out, partial_lse)
    running_out, running_lse = partial_out.clone(), partial_lse.clone()
    merge(running_out, running_lse, running_out[0], running_lse[0])
    assert torch.equal(running_out[0], expected[0])
    assert torch.equal(running_lse[0], expected[1])
    assert torch.equal(running_out[1], partial_out[1])


def test_every_stride_is_read(guarded):
    """Workspaces come as [T, H, S, D], heads first, padded, or with columns apart: addresses follow the tensors."""
    partial_out, partial_lse = states(3, tokens=2, heads=4, columns=8)
    _, tokens, heads, columns = partial_out.shape
    out = guarded.empty((tokens, heads, columns), torch.float32, (3, 1000, 10))  # heads outermost, columns 10 apart
    lse = guarded.empty((tokens, heads), torch.float32, (1, 7))
    merge(
        guarded.frozen(partial_out, (9, 4 * 3 * 9, 3 * 9, 1)),  # split between head and column, rows padded to 9
        guarded.frozen(partial_lse, (1, 40, 5)),
        out,
        lse,
    )
    expected = meaning(partial_out, partial_lse)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-5)


def test_addresses_past_two_to_the_31(guarded):
    """A 32-bit product of index and stride reads another place, or nothing (flashinfer#3130)."""
    stride = 2**30 + 8
    workspace = torch.empty(2 * stride + 8, dtype=torch.float16)  # untouched pages cost nothing
    partial_out = workspace.as_strided((3, 1, 1, 8), (stride, 8, 8, 1))
    partial_out.copy_(torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1, 1).expand(3, 1, 1, 8))
    out, lse = guarded.empty((1, 1, 8), torch.float32), guarded.empty((1, 1), torch.float32)
    merge(partial_out, torch.zeros(3, 1, 1), out, lse)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
    assert lse.item() == pytest.approx(math.log(3.0), abs=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (2, 3, 0, 8)])
def test_no_rows_is_legal(guarded, shape):
    out, lse = merged(guarded, torch.empty(shape), torch.empty(shape[:3]))
    assert out.numel() == lse.numel() == 0


def test_no_splits_gives_the_empty_state(guarded):
    out, lse = merged(guarded, torch.empty(0, 2, 3, 8), torch.empty(0, 2, 3))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


def test_many_rows_stay_on_the_long_grid_axis(monkeypatch):
    """Axes 1 and 2 end at 65,535 and past it a launch does nothing, silently (FlashMLA#182)."""
    grids = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **kwargs: grids.append(grid))
    merge(torch.empty(1, 70_000, 2, 1), torch.empty(1, 70_000, 2), torch.empty(70_000, 2, 1), torch.empty(70_000, 2))
    assert grids == [(140_000,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_lse": torch.zeros(2, 3, 4, dtype=torch.bfloat16)}, r"partial_lse: expected \[2, 3, 4\] float32"),
        ({"partial_lse": torch.zeros(2, 4, 3)}, r"partial_lse: expected \[2, 3, 4\] float32; got \[2, 4, 3\]"),
        ({"out": torch.zeros(3, 4, 9)}, r"out: expected \[3, 4, 8\]"),
        ({"lse": torch.zeros(3, 4, dtype=torch.float16)}, r"lse: expected \[3, 4\] float32; got \[3, 4\] float16"),
        ({"partial_out": torch.zeros(2, 3, 4, 8, dtype=torch.float64)}, r"partial_out: .* got \[2, 3, 4, 8\] float64"),
    ],
    ids=["lse in bf16", "lse transposed", "columns", "merged lse in fp16", "float64"],
)
def test_refuses_by_name(change, message):
    given = {
        "partial_out": torch.zeros(2, 3, 4, 8),
        "partial_lse": torch.zeros(2, 3, 4),
        "out": torch.zeros(3, 4, 8),
        "lse": torch.zeros(3, 4),
    }
    with pytest.raises(ValueError, match=message):
        merge(**{**given, **change})
