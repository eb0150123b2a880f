"""The public calls: attend, store, merge_states. Each checks, chooses an executor, and runs it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import (
    DroppedStoreWarning,
    checks_enabled,
    dtype_name,
    expect_same_device,
    expect_tensor,
    refuse,
)
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice
from pagedmla.plugin.executors import AUTO, AttendOptions, Configuration, choose
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.step import Step, bind_step

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attend(
    q: Tensor,
    values: KVCacheInputsPerDevice,
    layer: int,
    *,
    sm_scale: float,
    query_start_loc: Tensor | None = None,
    causal: bool = True,
    layout: CacheLayout | str,
    plan: Plan | None = None,
    executor: str = AUTO,
    out: Tensor | None = None,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over the paged cache: (out `[T, H, latent]` in q's dtype, lse `[T, H]` float32, natural log).

    q                `[T, H, latent + rope]` bf16, fp16, fp32 or fp64, W_UK folded in
    values           this step's cache, its tokens already stored; see `KVCacheInputsPerDevice`
    query_start_loc  `[B + 1]` int32: request b owns tokens query_start_loc[b] .. query_start_loc[b + 1] - 1; None:
                     one token each. Rows of q behind its last entry are padding: out 0, lse -inf
    causal           token i of a request sees keys up to cache_lengths[b] + i, else all of its kv_len keys
    layout           a CacheLayout or its name
    plan             capacities, executor and workspace, made beforehand; it refuses what it wasn't made for
    executor         "auto" or a name; with a plan the plan's
    out              `[T, H, latent]` in q's dtype, written in place
    check            also check values that would cost a device sync (None: PAGEDMLA_CHECK=1)

    The dispatch metadata of `values` sets the number of partitions, `mixed_step_split` which requests are split.
    Raises ValueError, TypeError and IndexError that name the tensor, before anything runs.
    """
    expect_tensor(q, "q", [None, None, None], FLOATS, "It is [T, H, latent + rope].")
    step = bind_step(values, layer, layout, query_start_loc, q, "q")
    if q.shape[2] != step.layout.width:
        refuse("q", f"[*, *, {step.layout.width}] for layout {step.layout}", q, "Fold W_UK in first (absorbed query).")
    if out is not None:
        expect_tensor(out, "out", [*q.shape[:2], step.layout.latent], (q.dtype,))
        if out.device != q.device:
            refuse("out", f"a tensor on {q.device}", f"one on {out.device}")
    step.check_reads(check)
    decode_requests = step.decode_requests()
    if plan is None:
        page_size, heads = step.cache.page_size, int(q.shape[1])
        chosen = choose(Configuration("attend", q.device, step.layout, heads, page_size, q.dtype), executor).executor
        partitions = step.values.dispatch(step.max_query_length()).num_partitions or 1
        workspace = None
    else:
        if executor not in (AUTO, plan.attend_choice.executor.name):
            refuse("executor", f"{plan.attend_choice.executor.name!r}, as in the plan", executor)
        plan.check(step, q, sm_scale, causal)
        chosen, partitions, workspace = plan.attend_choice.executor, plan.partitions(step), plan.workspace
    if out is None:
        out = q.new_empty(*q.shape[:2], step.layout.latent)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    chosen.attend(step, q, out, lse, AttendOptions(sm_scale, causal, partitions, decode_requests, workspace))
    return out, lse


def store(
    latent: Tensor,
    rope: Tensor,
    values: KVCacheInputsPerDevice,
    layer: int,
    *,
    query_start_loc: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    scales_slot_mapping: Tensor | None = None,
    layout: CacheLayout | str,
    executor: str = AUTO,
    power_of_two: bool = False,
    check: bool | None = None,
) -> None:
    """Quantise this step's tokens and write rows and scales into the cache, in place.

    latent, rope         `[T, latent]` after RMS norm and `[T, rope]` after rotary, any float dtype
    query_start_loc      as in `attend`: token i of request b goes to position cache_lengths[b] + i through the tables
    slot_mapping         `[T]` int64 instead of the tables, as engines give it: page id * page_size + slot, -1 pads
    scales_slot_mapping  the same for the scale pool; absent, slot_mapping serves both pools
    power_of_two         round measured scales up to powers of two

    A token whose slot lies outside either pool is dropped whole, with a DroppedStoreWarning on the CPU; with `check`
    (or PAGEDMLA_CHECK=1) it raises IndexError before anything is written. A per-tensor scale is read, never written.
    """
    expect_tensor(latent, "latent", [None, None], FLOATS)
    expect_tensor(rope, "rope", [latent.shape[0], None], FLOATS, "It has a row for each row of latent.")
    if slot_mapping is not None:
        if query_start_loc is not None:
            refuse("query_start_loc", "None, since slot_mapping says where tokens go", query_start_loc)
        tokens = int(latent.shape[0])
        expect_tensor(slot_mapping, "slot_mapping", [tokens], (torch.int64,))
        if scales_slot_mapping is not None:
            expect_tensor(scales_slot_mapping, "scales_slot_mapping", [tokens], (torch.int64,))
    elif scales_slot_mapping is not None:
        refuse("slot_mapping", "[T] int64 beside scales_slot_mapping", None)
    starts = query_start_loc if slot_mapping is None else _no_requests(values)
    step = bind_step(values, layer, layout, starts, latent, "latent")
    for name, tensor, width in (("latent", latent, step.layout.latent), ("rope", rope, step.layout.rope)):
        if tensor.shape[1] != width:
            refuse(name, f"[*, {width}] for layout {step.layout}", tensor)
    expect_same_device(
        step.cache.blocks,
        "kv_blocks",
        rope=rope,
        slot_mapping=slot_mapping,
        scales_slot_mapping=scales_slot_mapping,
    )
    chosen = choose(Configuration("store", latent.device, step.layout, None, step.cache.page_size), executor).executor
    if slot_mapping is None:
        step.check_writes(check)
        dropped = chosen.store(step, latent, rope, power_of_two=power_of_two)
    else:
        scale_slots = slot_mapping if scales_slot_mapping is None else scales_slot_mapping
        if checks_enabled(check):
            _check_slots(step, slot_mapping, scale_slots)
        dropped = chosen.store_slots(step, latent, rope, slot_mapping, scale_slots, power_of_two=power_of_two)
    if dropped is not None and dropped.device.type == "cpu" and dropped.numel():
        t, where = int(dropped[0]), ""
        if slot_mapping is not None:
            where = f" (value slot {int(slot_mapping[t])}, scale slot {int(scale_slots[t])})"
        message = f"store: {dropped.numel()} of {latent.shape[0]} tokens dropped, first token {t}{where}, outside "
        warnings.warn(message + _pools(step), DroppedStoreWarning, stacklevel=2)


def merge_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, executor: str = AUTO
) -> tuple[Tensor, Tensor]:
    """States over disjoint keys to one: `outs [S, T, H, D]`, `lses [S, T, H]` to (out `[T, H, D]`, lse `[T, H]`).

    Sequences of S tensors serve as well. LSE is natural log; an empty state has lse -inf and weighs nothing, whatever
    its out holds. out comes back in its own dtype, lse in float32. Raises ValueError where an LSE is +inf (some kernels
    mark empty states so; checked on CPU tensors) or NaN.
    """
    outs = outs if isinstance(outs, Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, Tensor) else torch.stack(list(lses))
    expect_tensor(outs, "outs", [None] * 4, FLOATS, "It is [S, T, H, D].")
    hint = "LSE is kept in float32: bf16 is 3 % off in a weight already at lse 10."
    expect_tensor(lses, "lses", list(outs.shape[:3]), (torch.float32, torch.float64), hint)
    if lses.device != outs.device:
        refuse("lses", f"a tensor on {outs.device}, as outs", f"one on {lses.device}")
    if lses.device.type == "cpu":
        bad = (lses == torch.inf) | lses.isnan()
        if bool(bad.any()):
            at = torch.nonzero(bad)[0].tolist()
            refuse("lses", "finite numbers, or -inf for an empty state", f"{float(lses[tuple(at)])} at {at}")
    out = torch.empty_like(outs[0]) if outs.shape[0] else outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:], dtype=torch.float32)
    choose(Configuration("merge", outs.device, dtype=outs.dtype), executor).executor.merge(outs, lses, out, lse)
    return out, lse


def _no_requests(values: KVCacheInputsPerDevice) -> Tensor:
    """Query starts of a step whose tokens find their place by slot mapping: every request empty."""
    lengths = expect_tensor(values.cache_lengths, "cache_lengths", [None], ())
    return torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)


def _check_slots(step: Step, slots: Tensor, scale_slots: Tensor) -> None:
    pools = [("slot_mapping", slots, step.cache.value_pool)]
    if step.cache.scale_pool is not None:
        pools.append(("scales_slot_mapping", scale_slots, step.cache.scale_pool))
    for name, mapping, pool in pools:
        bound = pool.num_pages * pool.page_size
        outside = (mapping < -1) | (mapping >= bound)
        if bool(outside.any()):
            t = int(outside.to(torch.uint8).argmax())
            raise IndexError(
                f"{name}: token {t} has slot {int(mapping[t])}; kv_{pool.name} has {pool.num_pages} pages of "
                f"{pool.page_size} ({bound} slots)"
            )


def _pools(step: Step) -> str:
    pools = [step.cache.value_pool] + ([step.cache.scale_pool] if step.cache.scale_pool is not None else [])
    return " or ".join(
        f"kv_{pool.name} ({pool.num_pages * pool.page_size} slots of {dtype_name(pool.tensor.dtype)})" for pool in pools
    )
