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
from pagedmla.triton_kernels.pieces import attend_pieces, tile_of
from pagedmla.triton_kernels.schedule import Schedule, make_schedule

INF = float("inf")


def planes_of(guarded, step: Step) -> RowPlanes:
    """The step's pools, copied between sentinels, as one layer's planes."""
    values, scales = step.values.kv_blocks, step.values.kv_scales
    bound = PagedTensor.bind(guarded.frozen(values), "kv_blocks")
    return step.layout.planes(
        bound, None if scales is None else PagedTensor.bind(guarded.frozen(scales), "kv_scales"), step.layer
    )


def results(guarded, step: Step, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Poisoned `out` and `lse` for a step."""
    tokens, heads, _ = step.q.shape
    shape = (tokens + padding, heads)
    return guarded.empty((*shape, step.layout.latent), dtype), guarded.empty(shape, torch.float32)


def padded_queries(step: Step, padding: int) -> Tensor:
    """The step's queries and `padding` more, which hold NaN and belong to nobody."""
    return torch.cat((step.q, step.q.new_full((padding, *step.q.shape[1:]), float("nan"))))


def run_mixed(guarded, step: Step, dtype: torch.dtype = torch.float32, padding: int = 0):
    """(out, lse) of `attend_mixed`; `padding` query tokens past the last request hold NaN."""
    out, lse = results(guarded, step, dtype, padding)
    scale_table = step.values.scales_lookup_table
    attend_mixed(
        guarded.frozen(padded_queries(step, padding)), planes_of(guarded, step),
        guarded.frozen(step.values.lookup_table), guarded.frozen(step.values.cache_lengths),
        guarded.frozen(step.query_start_loc), out, lse, None if scale_table is None else guarded.frozen(scale_table),
        sm_scale=step.sm_scale, max_query_len=step.values.max_prompt_length, causal=step.case.causal,
    )  # fmt: skip
    return out, lse


def run_decode(guarded, step: Step, dtype: torch.dtype = torch.float32):
    """(out, lse) of `attend_decode`."""
    out, lse = results(guarded, step, dtype)
    scale_table = step.values.scales_lookup_table
    attend_decode(
        guarded.frozen(step.q), planes_of(guarded, step), guarded.frozen(step.values.lookup_table),
        guarded.frozen(step.values.cache_lengths), out, lse,
        None if scale_table is None else guarded.frozen(scale_table),
        sm_scale=step.sm_scale, causal=step.case.causal,
    )  # fmt: skip
    return out, lse


def scheduled(
    step: Step, tile: tuple[int, int], *, places: int = 264, slots: int = 264, most_pieces: int = 264, padding: int = 0
) -> Schedule:
    """The step's schedule for tiles of so many rows and keys."""
    tokens, heads = step.q.shape[0] + padding, step.q.shape[1]
    requests = len(step.case.q_lens)
    return make_schedule(
        step.values.cache_lengths, step.query_start_loc, tokens=tokens, heads=heads, rows=tile[0], keys=tile[1],
        row_tiles=tokens * heads // tile[0] + requests + 1, places=places, slots=slots, most_pieces=most_pieces,
    )  # fmt: skip


def run_pieces(guarded, step: Step, dtype: torch.dtype = torch.float32, padding: int = 0, **how: int):
    """(out, lse, states, state_lse) of `attend_pieces` by a schedule of its own; `how` is `scheduled`'s."""
    out, lse = results(guarded, step, dtype, padding)
    q, planes = guarded.frozen(padded_queries(step, padding)), planes_of(guarded, step)
    longest = step.values.max_prompt_length
    schedule = scheduled(step, tile_of(q, planes, longest), padding=padding, **how)
    states = guarded.empty((schedule.slots, schedule.rows, step.layout.latent), torch.float32)
    state_lse = guarded.empty((schedule.slots, schedule.rows), torch.float32)
    scale_table = step.values.scales_lookup_table
    attend_pieces(
        q, planes, guarded.frozen(step.values.lookup_table), schedule, out, lse, states, state_lse,
        None if scale_table is None else guarded.frozen(scale_table),
        sm_scale=step.sm_scale, max_query_len=longest, causal=step.case.causal,
    )  # fmt: skip
    return out, lse, states, state_lse


def assert_agrees(step: Step, got: tuple[Tensor, Tensor], out_bound: float = OUT_RELATIVE) -> None:
    """Against one dense float64 softmax a request, on the values as the cache holds them."""
    assert_kernel_agrees(got, step.dense_attention(), out_bound)
