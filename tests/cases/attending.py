"""Calls of the attention kernels on steps of cases/steps.py, between sentinels."""

from __future__ import annotations

import torch
from cases.bounds import OUT_RELATIVE, assert_kernel_agrees
from cases.steps import Step
from torch import Tensor

from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels.decode import attend_decode
from pagedmla.triton_kernels.mixed import attend_mixed

INF = float("inf")


def planes_of(guarded, step: Step) -> RowPlanes:
    """The step's pools, copied between sentinels, as one layer's planes."""
    values, scales = step.values.kv_blocks, step.values.kv_scales
    bound = PagedTensor.bind(guarded.frozen(values), "kv_blocks")
    return step.layout.planes(
        bound, None if scales is None else PagedTensor.bind(guarded.frozen(scales), "kv_scales"), step.layer
    )


def results(guarded, step: Step, splits: int | None, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Poisoned `out` and `lse` for a step, or for its splits."""
    tokens, heads, _ = step.q.shape
    shape = (tokens + padding, heads) if splits is None else (splits, tokens + padding, heads)
    return guarded.empty((*shape, step.layout.latent), dtype), guarded.empty(shape, torch.float32)


def run_mixed(guarded, step: Step, splits: int | None = None, dtype: torch.dtype = torch.float32, padding: int = 0):
    """(out, lse) of `attend_mixed`; `padding` query tokens past the last request hold NaN."""
    out, lse = results(guarded, step, splits, dtype, padding)
    q = torch.cat((step.q, step.q.new_full((padding, *step.q.shape[1:]), float("nan"))))
    scale_table = step.values.scales_lookup_table
    attend_mixed(
        guarded.frozen(q), planes_of(guarded, step), guarded.frozen(step.values.lookup_table),
        guarded.frozen(step.values.cache_lengths), guarded.frozen(step.query_start_loc), out, lse,
        None if scale_table is None else guarded.frozen(scale_table),
        sm_scale=step.sm_scale, max_query_len=step.values.max_prompt_length, causal=step.case.causal,
    )  # fmt: skip
    return out, lse


def run_decode(guarded, step: Step, splits: int | None = None, dtype: torch.dtype = torch.float32):
    """(out, lse) of `attend_decode`."""
    out, lse = results(guarded, step, splits, dtype)
    scale_table = step.values.scales_lookup_table
    attend_decode(
        guarded.frozen(step.q), planes_of(guarded, step), guarded.frozen(step.values.lookup_table),
        guarded.frozen(step.values.cache_lengths), out, lse,
        None if scale_table is None else guarded.frozen(scale_table),
        sm_scale=step.sm_scale, causal=step.case.causal,
    )  # fmt: skip
    return out, lse


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """One state of split states, in float64. What an empty split holds is dropped before it meets any arithmetic."""
    empty = lse == -INF
    total = lse.double().logsumexp(0)
    weight = torch.where(empty, 0.0, (lse.double() - torch.where(total == -INF, 0.0, total)).exp())
    return (torch.where(empty[..., None], 0.0, out.double()) * weight[..., None]).sum(0), total


def assert_agrees(step: Step, got: tuple[Tensor, Tensor], out_bound: float = OUT_RELATIVE) -> None:
    """Against one dense float64 softmax a request, on the values as the cache holds them."""
    assert_kernel_agrees(got, step.dense_attention(), out_bound)
