"""Merging partial states: by hand, against one softmax over all keys, and with every kind of empty state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pagedmla
from pagedmla.reference.attention import softmax_state

INF, NAN = float("inf"), float("nan")


def states(outs: list[float], lses: list[float]) -> tuple[Tensor, Tensor]:
    """S states of one token, one head, one column."""
    return torch.tensor(outs).view(-1, 1, 1, 1), torch.tensor(lses).view(-1, 1, 1)


def merged(outs: list[float], lses: list[float]) -> tuple[float, float]:
    out, lse = pagedmla.merge_states(*states(outs, lses))
    return out.item(), lse.item()


def test_lse_is_a_natural_logarithm() -> None:
    """sglang#33064: sums 2 and 8 over outs 0 and 10 are 8.0; read in base 2 they would be 7.23."""
    out, lse = merged([0.0, 10.0], [math.log(2), math.log(8)])
    assert out == pytest.approx(8.0, rel=1e-6)
    assert lse == pytest.approx(math.log(10), rel=1e-6)


def test_one_state_is_itself() -> None:
    assert merged([3.5], [-2.0]) == (3.5, -2.0)
    assert merged([3.5], [-INF]) == (0.0, -INF)


@pytest.mark.parametrize("garbage", [0.0, NAN, INF, 1e38])
def test_empty_states_weigh_nothing(garbage: float) -> None:
    """vllm#27491: an empty split leaves its out uninitialised; 0 * NaN must not reach the sum."""
    assert merged([garbage, 5.0, garbage], [-INF, 1.0, -INF]) == (5.0, 1.0)
    assert merged([garbage, garbage], [-INF, -INF]) == (0.0, -INF)


def test_no_states_at_all() -> None:
    out, lse = pagedmla.merge_states(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3))
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_far_apart_and_large() -> None:
    """At lse -1000 float32 is 6e-5 apart: weights taken from the rounded lse wouldn't sum to 1."""
    assert merged([1.0, 2.0], [1000.0, -1000.0]) == (1.0, 1000.0)
    assert merged([1.0, 3.0], [-1000.0, -1000.0]) == (2.0, pytest.approx(-1000 + math.log(2)))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**16))
def test_parts_of_a_softmax_merge_to_it(sizes: list[int], seed: int) -> None:
    """Cut keys anywhere, empty parts included: the merged state is that over all of them."""
    g = torch.Generator().manual_seed(seed)
    keys = sum(sizes)
    logits = torch.randn(2, 3, keys, generator=g, dtype=torch.float64) * 5  # [T, H, keys]
    values = torch.randn(keys, 4, generator=g, dtype=torch.float64)
    want = softmax_state(logits, values)
    parts = [softmax_state(*pair) for pair in zip(logits.split(sizes, -1), values.split(sizes))]
    out, lse = pagedmla.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=1e-6)


def test_any_strides() -> None:
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(3, 5, 2, 8, generator=g), torch.randn(3, 5, 2, generator=g)
    want = pagedmla.merge_states(outs, lses)
    wide = torch.full((3, 5, 2, 16), NAN)
    wide[..., ::2] = outs
    strided = (
        outs.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lses.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    )
    for each in (strided, (wide[..., ::2], lses), (outs[0].expand(3, 5, 2, 8), lses)):
        out, lse = pagedmla.merge_states(*each)
        assert torch.equal(lse, want[1])
        if each[0].stride(0) != 0:
            assert torch.equal(out, want[0])
        else:
            torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """out comes back in its own dtype, computed at least in float32; lse always in float32."""
    outs, lses = states([1.0, 2.0], [0.0, 0.0])
    out, lse = pagedmla.merge_states(outs.to(dtype), lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.item() == 1.5


REFUSALS = [
    (*states([1.0, 2.0], [0.0, INF]), r"lses: expected finite numbers, or -inf for an empty state; got inf at \[1, 0, "
                                      r"0\]\."),
    (*states([1.0, 2.0], [NAN, 0.0]), r"lses: expected finite numbers, or -inf for an empty state; got nan at \[0, 0, "
                                      r"0\]\."),
    (torch.zeros(2, 3, 4), torch.zeros(2, 3), r"outs: expected \[\*, \*, \*, \*\] bfloat16 or .*; got \[2, 3, 4\] "
                                              r"float32\. "
     r"It is \[S, T, H, D\]\."),
    (torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3), r"lses: expected \[2, 3, 4\] float32 or float64; got \[2, 4, 3\] "
                                                    r"float32\."),
    (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4).bfloat16(), r"lses: expected \[2, 3, 4\] float32 or float64; got "
     r"\[2, 3, 4\] bfloat16\. LSE is kept in float32"),
    (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, device="meta"), r"lses: expected a tensor on cpu, as outs; got one "
                                                                   r"on meta\."),
]  # fmt: skip


@pytest.mark.parametrize(("outs", "lses", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(outs: Tensor, lses: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pagedmla.merge_states(outs, lses)
