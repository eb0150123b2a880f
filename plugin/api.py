"""The public calls: attend, store, prefill, decompress, merge_states. Each checks, chooses an executor, and runs it.

They are for inference: what they give carries no gradient, on any executor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import (
    DroppedStoreWarning,
    IndexRefusal,
    checks_enabled,
    describe,
    dtype_name,
    expect_bool,
    expect_memory,
    expect_same_device,
    expect_tensor,
    refuse,
)
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.splits import useful_partitions
from pagedmla.kv_cache.tables import int64_lengths
from pagedmla.kv_cache.validation import check_one_scale
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, single_device
from pagedmla.plugin.executors import AUTO, AttendOptions, Configuration, choose, chosen_precision
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.step import (
    FLOATS,
    START_DTYPES,
    Step,
    bind_step,
    check_out,
    check_starts,
    decode_requests_of,
    expect_scale,
    int32_starts,
)
from pagedmla.reference.store import PADDING


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
    layer            index into the pool's layers (dimension 2); IndexError outside it
    sm_scale         factor of q . k before the softmax, finite: (nope + rope)**-0.5 of the heads before absorption
    query_start_loc  `[B + 1]` int32, uint32 or int64: request b owns tokens query_start_loc[b] ..
                     query_start_loc[b + 1] - 1; None: one token each. Rows of q behind its last entry are padding:
                     out 0, lse -inf
    causal           token i of a request sees keys up to cache_lengths[b] + i, else all of its kv_len keys
    layout           a CacheLayout or its name
    plan             capacities, executor and workspace, made beforehand; it refuses what it wasn't made for
    executor         "auto" or a name; with a plan the plan's. PAGEDMLA_PRECISION is as in `plan`
    out              `[T, H, latent]` in q's dtype, written in place
    check            also check values that would cost a device sync (None: PAGEDMLA_CHECK=1)

    The dispatch metadata of `values` sets the number of partitions, `mixed_step_split` which requests are split.
    Raises ValueError, TypeError and IndexError that name the tensor, before anything runs.
    """
    q = _without_grad(expect_tensor(q, "q", [None, None, None], FLOATS, "It is [T, H, latent + rope]."))
    sm_scale, causal = expect_scale(sm_scale), expect_bool(causal, "causal")
    step = bind_step(values, layer, layout, query_start_loc, q, "q", check)
    if q.shape[2] != step.layout.width:
        refuse("q", f"[*, *, {step.layout.width}] for layout {step.layout}", q, "Fold W_UK in first (absorbed query).")
    if q.shape[1] == 0:
        refuse("q", "at least 1 head", q)
    if out is not None:
        expect_tensor(out, "out", [*q.shape[:2], step.layout.latent], (q.dtype,))
        check_out(out, q)
    if plan is not None and not isinstance(plan, Plan):
        refuse("plan", "a Plan, made by plan(...)", describe(plan), error=TypeError)
    if plan is None or not plan.attend_choice.executor.only_launches:  # launches may be recorded, on any device
        expect_memory(step.cache.blocks, "kv_blocks")
    step.check_reads(check)
    if plan is None:
        page_size, heads, precision = step.cache.page_size, int(q.shape[1]), chosen_precision()
        wanted = Configuration("attend", q.device, step.layout, heads, page_size, q.dtype, precision)
        choice = choose(wanted, executor)
        asked = step.values.dispatch(step.max_query_length).num_partitions or 1
        partitions = useful_partitions(asked, step.cache.max_cache_length, page_size)
        step.decode_requests()  # refuses a split that isn't the step's
        options = AttendOptions(sm_scale, causal, partitions, None, precision, asked_for=choice.asked_for)
    else:
        choice = plan.attend_choice
        if executor not in (AUTO, choice.executor.name):
            refuse("executor", f"{choice.executor.name!r}, as in the plan", repr(executor))
        plan.check(step, q, sm_scale, causal)
        options = plan.options(step)
    if out is None:
        out = q.new_empty(*q.shape[:2], step.layout.latent)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    choice.executor.attend(step, q, out, lse, options)
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
    values, layer        the cache that is written, and as in `attend`
    query_start_loc      as in `attend`: token i of request b goes to position cache_lengths[b] + i through the tables
    slot_mapping         `[T]` int64 instead of the tables, as engines give it: page id * page_size + slot, -1 pads
    scales_slot_mapping  the same for the scale pool; absent, slot_mapping serves both pools
    layout, executor     as in `attend`
    power_of_two         round measured scales up to powers of two; no effect in unquantised layouts
    check                as in `attend`: ids and lengths, before anything is written

    A token whose slot lies outside either pool is dropped whole, with a DroppedStoreWarning on the CPU; with `check`
    (or PAGEDMLA_CHECK=1) it raises IndexError before anything is written. A per-tensor scale is read, never written;
    with `check` it must be one that values can be divided by.
    """
    expect_bool(power_of_two, "power_of_two")
    latent = _without_grad(expect_tensor(latent, "latent", [None, None], FLOATS))
    hint = "It has a row for each row of latent."
    rope = _without_grad(expect_tensor(rope, "rope", [latent.shape[0], None], FLOATS, hint))
    _check_mappings(slot_mapping, scales_slot_mapping, query_start_loc, int(latent.shape[0]))
    starts = query_start_loc if slot_mapping is None else _no_requests(values)
    step = bind_step(values, layer, layout, starts, latent, "latent", check)
    expect_memory(step.cache.blocks, "kv_blocks")
    if scales_slot_mapping is not None and not step.layout.scales_per_token:
        refuse("scales_slot_mapping", f"None, since layout {step.layout} keeps no scale pool", scales_slot_mapping)
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
    dtype = torch.promote_types(latent.dtype, rope.dtype)
    wanted = Configuration("store", latent.device, step.layout, None, step.cache.page_size, dtype)
    chosen = choose(wanted, executor).executor
    scale_slots = scales_slot_mapping
    if slot_mapping is None:
        step.decode_requests()  # refuses a split that isn't the step's
        step.check_writes(check)
        dropped = chosen.store(step, latent, rope, power_of_two=power_of_two)
    else:
        scale_slots = slot_mapping if scale_slots is None else scale_slots
        decode_requests_of(step.values, step.batch, None)
        if checks_enabled(check):
            _check_slots(step, slot_mapping, scale_slots)
        dropped = chosen.store_slots(step, latent, rope, slot_mapping, scale_slots, power_of_two=power_of_two)
    if dropped is not None and dropped.device.type == "cpu" and dropped.numel():
        warnings.warn(_dropped_sentence(step, dropped, slot_mapping, scale_slots), DroppedStoreWarning, stacklevel=2)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    causal: bool = True,
    executor: str = AUTO,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head attention on dense keys and values, the cheap form for long prompts: (out `[T, H, Dv]`, lse `[T, H]`).

    q, k, v          `[T, H, D]`, `[K, Hk, D]`, `[K, Hk, Dv]` of one dtype; Hk divides H (DeepSeek-V3: D 192, Dv 128)
    query_start_loc  `[B + 1]` int32, uint32 or int64; rows of q behind its last entry give out 0, lse -inf
    key_start_loc    `[B + 1]`, the same: request b owns keys key_start_loc[b] ..; None: one key a query token
    sm_scale         factor of q . k before the softmax, finite: D**-0.5 as a rule
    causal           a request's last query sees all of its keys, each one before it one fewer; else all see all
    executor, out    as in `attend`: "auto" or a name; `[T, H, Dv]` in q's dtype, written in place

    A prompt with a cached context: its own tokens causally, chunks of the context (`decompress`, projected up) not
    causally, and `merge_states`. Raises ValueError and TypeError that name the tensor, before anything runs.
    """
    q = _without_grad(expect_tensor(q, "q", [None, None, None], FLOATS, "It is [T, H, D]."))
    sm_scale, causal = expect_scale(sm_scale), expect_bool(causal, "causal")
    if q.shape[1] == 0:
        refuse("q", "at least 1 head", q)
    hint = "It is [K, Hk, D], D and dtype as in q."
    k = _without_grad(expect_tensor(k, "k", [None, None, q.shape[2]], (q.dtype,), hint))
    hint = "It is [K, Hk, Dv], K, Hk and dtype as in k."
    v = _without_grad(expect_tensor(v, "v", [*k.shape[:2], None], (q.dtype,), hint))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        refuse("k", f"a number of heads that divides q's {q.shape[1]}", k)
    expect_tensor(query_start_loc, "query_start_loc", [None], START_DTYPES)
    check_starts(query_start_loc, "query_start_loc", int(q.shape[0]), "q")
    if key_start_loc is not None:
        expect_tensor(key_start_loc, "key_start_loc", [query_start_loc.shape[0]], START_DTYPES)
        check_starts(key_start_loc, "key_start_loc", int(k.shape[0]), "k")
    expect_same_device(q, "q", k=k, v=v, query_start_loc=query_start_loc, key_start_loc=key_start_loc)
    expect_memory(q, "q")
    if key_start_loc is None:
        check_starts(query_start_loc, "query_start_loc", int(k.shape[0]), "k")
    queries = int32_starts(query_start_loc)
    keys = queries if key_start_loc is None else int32_starts(key_start_loc)
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    else:
        expect_tensor(out, "out", [*q.shape[:2], v.shape[2]], (q.dtype,))
        check_out(out, q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    chosen = choose(Configuration("prefill", q.device, num_heads=int(q.shape[1]), dtype=q.dtype), executor).executor
    chosen.prefill(q, k, v, queries, keys, out, lse, sm_scale=sm_scale, causal=causal)
    return out, lse


def decompress(
    values: KVCacheInputsPerDevice,
    layer: int,
    *,
    starts: Tensor,
    key_start_loc: Tensor,
    layout: CacheLayout | str,
    out: Tensor | None = None,
    executor: str = AUTO,
    check: bool | None = None,
) -> Tensor:
    """Cached tokens of every request, dequantised, one request after the other: `[K, latent + rope]`.

    values, layer  the cache that is read, and as in `attend`
    starts         `[B]` int32, uint32 or int64: the first token that request b wants
    key_start_loc  `[B + 1]`, the same: its tokens become rows key_start_loc[b] .. key_start_loc[b + 1] - 1
    out            `[K, latent + rope]` bf16, fp16 or fp32, at least key_start_loc[-1] rows; rows behind them keep their
                   bytes. None, on the CPU alone: a new float32 tensor of just the size
    layout, executor, check  as in `attend`

    The tokens must be in the cache: starts[b] + its number at most cache_lengths[b]. Raises as `attend` does.
    """
    values = single_device(values)
    lengths = expect_tensor(values.cache_lengths, "cache_lengths", [None], ())
    step = bind_step(values, layer, layout, _no_requests(values), lengths, "cache_lengths")
    expect_memory(step.cache.blocks, "kv_blocks")
    expect_tensor(starts, "starts", [step.batch], START_DTYPES)
    expect_tensor(key_start_loc, "key_start_loc", [step.batch + 1], START_DTYPES)
    expect_same_device(step.cache.blocks, "kv_blocks", starts=starts, key_start_loc=key_start_loc)
    if out is not None:
        expect_tensor(out, "out", [None, step.layout.width], (torch.bfloat16, torch.float16, torch.float32))
        check_out(out, lengths)
        check_starts(key_start_loc, "key_start_loc", int(out.shape[0]), "out", check)
    elif step.on_host:
        check_starts(key_start_loc, "key_start_loc", int(int64_lengths(lengths).clamp(min=0).sum()), "the cache")
    else:
        refuse("out", f"[K, {step.layout.width}], since its size isn't known without a sync", None)
    step.check_span(starts, key_start_loc, check)
    if out is None:
        out = torch.empty(int(key_start_loc[-1]), step.layout.width, device=lengths.device)
    chosen = choose(Configuration("decompress", out.device, step.layout, dtype=out.dtype), executor).executor
    chosen.decompress(step, int32_starts(starts), int32_starts(key_start_loc), out)
    return out


def merge_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, executor: str = AUTO
) -> tuple[Tensor, Tensor]:
    """States over disjoint keys to one: `outs [S, T, H, D]`, `lses [S, T, H]` to (out `[T, H, D]`, lse `[T, H]`).

    Sequences of S tensors serve as well. LSE is natural log; an empty state has lse -inf and weighs nothing, whatever
    its out holds. out comes back in its own dtype, lse in float32. Raises ValueError where an LSE is +inf (some kernels
    mark empty states so; checked on CPU tensors) or NaN.
    """
    outs, lses = _without_grad(stacked(outs, "outs")), _without_grad(stacked(lses, "lses"))
    expect_tensor(outs, "outs", [None] * 4, FLOATS, "It is [S, T, H, D].")
    hint = "LSE is kept in float32: bf16 is 3 % off in a weight already at lse 10."
    expect_tensor(lses, "lses", list(outs.shape[:3]), (torch.float32, torch.float64), hint)
    if lses.device != outs.device:
        refuse("lses", f"a tensor on {outs.device}, as outs", f"one on {lses.device}")
    expect_memory(outs, "outs")
    if lses.device.type == "cpu":
        bad = (lses == torch.inf) | lses.isnan()
        if bool(bad.any()):
            at = torch.nonzero(bad)[0].tolist()
            refuse("lses", "finite numbers, or -inf for an empty state", f"{float(lses[tuple(at)])} at {at}")
    out = torch.empty_like(outs[0]) if outs.shape[0] else outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:], dtype=torch.float32)
    choose(Configuration("merge", outs.device, dtype=outs.dtype), executor).executor.merge(outs, lses, out, lse)
    return out, lse


def stacked(states: Tensor | Sequence[Tensor], name: str) -> Tensor:
    """One tensor of states that come as a tensor, or as tensors all alike: ValueError and TypeError for others."""
    if isinstance(states, Tensor):
        return states
    if not isinstance(states, Iterable):
        refuse(name, "a tensor, or a sequence of them", describe(states), error=TypeError)
    parts: list[Any] = list(states)
    if not parts:
        refuse(name, "a tensor, or at least one", "none")
    for part in parts:
        if not isinstance(part, Tensor) or (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            refuse(name, f"tensors all alike, {describe(parts[0])} as the first", describe(part))
    expect_same_device(parts[0], f"{name}[0]", **{f"{name}[{i}]": part for i, part in enumerate(parts)})
    return torch.stack(parts)


def _without_grad(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _no_requests(values: KVCacheInputsPerDevice) -> Tensor:
    """Query starts of a step whose tokens find their place by slot mapping: every request empty."""
    lengths = expect_tensor(single_device(values).cache_lengths, "cache_lengths", [None], ())
    return torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)


def _check_mappings(slots: Tensor | None, scale_slots: Tensor | None, starts: Tensor | None, tokens: int) -> None:
    """Refuse slot mappings that aren't one for each of so many tokens, or that stand beside query starts."""
    if slots is None:
        if scale_slots is not None:
            refuse("slot_mapping", "[T] int64 beside scales_slot_mapping", None)
        return
    if starts is not None:
        refuse("query_start_loc", "None, since slot_mapping says where tokens go", starts)
    expect_tensor(slots, "slot_mapping", [tokens], (torch.int64,))
    if scale_slots is not None:
        expect_tensor(scale_slots, "scales_slot_mapping", [tokens], (torch.int64,))


def _check_slots(step: Step, slots: Tensor, scale_slots: Tensor) -> None:
    check_one_scale(step.cache, step.layer)
    pools = [("slot_mapping", slots, step.cache.value_pool)]
    if step.cache.scale_pool is not None and not step.layout.inline_scales:
        pools.append(("scales_slot_mapping", scale_slots, step.cache.scale_pool))
    stored = slots != PADDING
    for name, mapping, pool in pools:
        bound = pool.num_pages * pool.page_size
        outside = stored & ((mapping < 0) | (mapping >= bound))
        if bool(outside.any()):
            t = int(outside.to(torch.uint8).argmax())
            raise IndexRefusal(
                f"{name}: token {t} has slot {int(mapping[t])}; {pool.name} has {pool.num_pages} pages of "
                f"{pool.page_size} ({bound} slots)"
            )


def _dropped_sentence(step: Step, dropped: Tensor, slots: Tensor | None, scale_slots: Tensor | None) -> str:
    t, where = int(dropped[0]), ""
    if slots is not None and scale_slots is not None:
        where = f" (value slot {int(slots[t])}, scale slot {int(scale_slots[t])})"
    pools = [step.cache.value_pool] + ([step.cache.scale_pool] if step.cache.scale_pool is not None else [])
    outside = " or ".join(
        f"{pool.name} ({pool.num_pages * pool.page_size} slots of {dtype_name(pool.tensor.dtype)})" for pool in pools
    )
    return f"store: {dropped.numel()} of {step.num_tokens} tokens dropped, first token {t}{where}, outside {outside}"
