"""Merging the attention states of one row: out and LSE over disjoint sets of keys."""

import triton
import triton.language as tl


@triton.jit
def merge_states(
    state_row,  # the row's column of the first state that is wanted
    lse_row,
    states,  # how many
    stride_state,
    stride_lse,
    stride_column,
    in_row,  # [BLOCK_D], columns that exist
    BLOCK_D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,  # states in flight
    LSE_BLOCK: tl.constexpr,  # LSEs looked at together for the maximum
):
    """`(out [BLOCK_D], lse)` float32. A state with lse -inf isn't read; without any other, out is 0 and lse -inf."""
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    largest = float("-inf")
    for first in range(0, states, LSE_BLOCK):
        state = first + tl.arange(0, LSE_BLOCK)
        largest = tl.maximum(largest, tl.max(_read_lse(lse_row, state, states, stride_lse), 0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf is NaN

    weights = tl.zeros([STATE_BLOCK], tl.float32)
    total = tl.zeros([STATE_BLOCK, BLOCK_D], tl.float32)
    for first in range(0, states, STATE_BLOCK):
        state = first + tl.arange(0, STATE_BLOCK)
        lse = _read_lse(lse_row, state, states, stride_lse)
        weight = tl.exp(lse - shift)  # [STATE_BLOCK]
        rows = tl.load(
            state_row + state.to(tl.int64)[:, None] * stride_state + column[None, :] * stride_column,
            mask=(lse != float("-inf"))[:, None] & in_row[None, :],
            other=0.0,
        )  # [STATE_BLOCK, BLOCK_D]
        weights += weight
        total += weight[:, None] * rows.to(tl.float32)

    weight_sum = tl.sum(weights, 0)
    empty = weight_sum == 0.0  # only then: the largest LSE weighs 1, and NaN isn't 0
    merged = tl.sum(total, 0) / tl.where(empty, 1.0, weight_sum)
    return merged, tl.where(empty, float("-inf"), shift + tl.log(tl.where(empty, 1.0, weight_sum)))


@triton.jit
def _read_lse(lse_row, state, states, stride_lse):
    """LSE of some states of one row; -inf for one past the end or one that reports +inf."""
    value = tl.load(lse_row + state.to(tl.int64) * stride_lse, mask=state < states, other=float("-inf"))
    return tl.where(value == float("inf"), float("-inf"), value)
