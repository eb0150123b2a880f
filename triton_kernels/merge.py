"""Merge: partial attention states over disjoint sets of keys into one.

contract   partial_out [S, T, H, D] bf16/fp16/float32, partial_lse [S, T, H] float32 (natural log of the sum of
           exp(logit)), any strides; writes out [T, H, D] and lse [T, H] float32, any strides. out and lse may be
           split 0 of the partials (the same addresses), so that chunks can be folded into a running state
meaning    lse = log(sum_s exp(lse_s)),  out = sum_s exp(lse_s - lse) * out_s
empty      a split with lse -inf is weightless: its out is not read, so it may hold anything. +inf is read as -inf:
           some attention kernels report a row without keys so. All splits empty: out 0, lse -inf. NaN stays NaN
grid       (T * H,): one row a program, four splits a trip
cost       (S + 1) * D elements a row, read or written once; no shared memory to speak of
limits     D up to 4096; float32 arithmetic
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import expect_same_device, expect_tensor, refuse
from pagedmla.triton_kernels.device.states import merge_states
from pagedmla.triton_kernels.launch import launch

_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LSE_BLOCK = 32  # LSEs looked at together for the maximum
_SPLIT_BLOCK = 4  # partial rows in flight
_MAX_COLUMNS = 4096


def merge(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge S partial states into `out` and `lse` (see the top of this file). S, T and H may be 0."""
    expect_tensor(partial_out, "partial_out", [None, None, None, None], _STATE_DTYPES)
    splits, tokens, heads, columns = partial_out.shape
    expect_tensor(partial_lse, "partial_lse", [splits, tokens, heads], [torch.float32])
    expect_tensor(out, "out", [tokens, heads, columns], _STATE_DTYPES)
    expect_tensor(lse, "lse", [tokens, heads], [torch.float32])
    expect_same_device(partial_out, "partial_out", partial_lse=partial_lse, out=out, lse=lse)
    if columns > _MAX_COLUMNS:
        refuse("partial_out", f"at most {_MAX_COLUMNS} columns", partial_out)
    if tokens * heads == 0 or columns == 0:
        return
    launch(
        merge_kernel,
        (tokens * heads,),
        partial_out,
        partial_lse,
        out,
        lse,
        splits,
        heads,
        *partial_out.stride(),
        *partial_lse.stride(),
        *out.stride(),
        *lse.stride(),
        COLUMNS=columns,
        BLOCK_D=triton.next_power_of_2(columns),
        SPLIT_BLOCK=_SPLIT_BLOCK,
        LSE_BLOCK=_LSE_BLOCK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=[
        "partial_lse", "lse", "splits", "heads", "stride_partial_lse_split", "stride_partial_lse_token",
        "stride_partial_lse_head", "stride_lse_token", "stride_lse_head",
    ]
)  # fmt: skip
def merge_kernel(
    partial_out,  # [S, T, H, D]
    partial_lse,  # [S, T, H] float32
    out,  # [T, H, D]
    lse,  # [T, H] float32
    splits,
    heads,
    stride_partial_split,
    stride_partial_token,
    stride_partial_head,
    stride_partial_column,
    stride_partial_lse_split,
    stride_partial_lse_token,
    stride_partial_lse_head,
    stride_out_token,
    stride_out_head,
    stride_out_column,
    stride_lse_token,
    stride_lse_head,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    LSE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    lse_row = partial_lse + token * stride_partial_lse_token + head * stride_partial_lse_head
    out_row = partial_out + token * stride_partial_token + head * stride_partial_head
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    in_row = column < COLUMNS
    merged, merged_lse = merge_states(
        out_row, lse_row, splits, stride_partial_split, stride_partial_lse_split, stride_partial_column, in_row,
        BLOCK_D, SPLIT_BLOCK, LSE_BLOCK,
    )  # fmt: skip
    tl.store(
        out + token * stride_out_token + head * stride_out_head + column * stride_out_column,
        merged.to(out.dtype.element_ty),
        mask=in_row,
    )
    tl.store(lse + token * stride_lse_token + head * stride_lse_head, merged_lse)
