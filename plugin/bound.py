"""Binds a step once and a layer once; a call then only combines the two.

    BoundLayer   a layer's cache, as long as the engine keeps the tensor
    BoundRows    rows of a step, bound by the first layer that attends them

Where the executor only launches kernels, the first layer's launches are recorded and the others repeat them. With
PAGEDMLA_CHECK=1 every layer goes through the public calls, which read the cache's values too.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.rows import LayerPools, Rows, store_values
from pagedmla.kv_cache.checks import DroppedStoreWarning, checks_enabled
from pagedmla.plugin.executors import AttendOptions, Schedule
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.repeat import Repeat, geometry, pool_tensors
from pagedmla.plugin.step import Step, bind_step
from pagedmla.reference.vectorised import dropped_tokens


class Stores:
    """The last store's launches, for all layers of a kind: those of a step bring the same number of tokens."""

    def __init__(self) -> None:
        # One attribute, written once: two micro-batches, each in a thread of its own, share it.
        self._recorded: tuple[object, Repeat] | None = None

    def __call__(self, layer: BoundLayer, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        tokens = {"latent": latent, "rope": rope, "slots": slots}
        tensors, key = {**tokens, **layer.tensors}, (geometry(tokens), layer.kind)
        recorded = self._recorded
        if recorded is None or recorded[0] != key:
            store, step = layer.plan.store_choice.executor.store_slots, layer.empty_step
            repeat = Repeat(lambda: store(step, latent, rope, slots, slots, power_of_two=False), tensors)
            self._recorded = recorded = key, repeat
        recorded[1](tensors)


class BoundLayer:
    """One layer's pools, and how tokens are stored into them. `stores` is shared by layers of a kind."""

    def __init__(self, name: str, pools: LayerPools, plan: Plan, stores: Stores | None = None) -> None:
        self.name, self.pools, self.plan = name, pools, plan
        self._stores = Stores() if stores is None else stores
        self._store_values = store_values(pools)
        nothing = torch.empty(0, dtype=torch.int32, device=pools.blocks.device)
        starts = torch.zeros(1, dtype=torch.int32, device=pools.blocks.device)
        # A step without requests: slots say where tokens go, and the pools are all that is looked at.
        self.empty_step = bind_step(self._store_values, 0, pools.layout, starts, nothing, "tokens", check=False)

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """The pool as kernels are handed it."""
        return pool_tensors(self.empty_step.planes)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What of the layer decides checks and launches, so that layers with the same may share them."""
        return self.pools.layout, geometry({"blocks": self.pools.blocks, "scales": self.pools.scales})

    def store(self, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        """`latent [T, L]` and `rope [T, R]` to `slots [T]` int64, -1 pads."""
        executor = self.plan.store_choice.executor
        if checks_enabled():
            pagedmla.store(
                latent,
                rope,
                self._store_values,
                0,
                slot_mapping=slots,
                layout=self.pools.layout,
                executor=executor.name,
            )
            return
        if executor.only_launches:
            self._stores(self, latent, rope, slots)
        else:
            executor.store_slots(self.empty_step, latent, rope, slots, slots, power_of_two=False)
        if slots.device.type == "cpu":
            self._warn_of_dropped(slots)

    def _warn_of_dropped(self, slots: Tensor) -> None:
        dropped = dropped_tokens(self.empty_step.cache, self.pools.layout, slots, slots)
        if dropped.numel():
            warnings.warn(
                f"{self.name}: {dropped.numel()} of {slots.shape[0]} tokens dropped, first slot "
                f"{int(slots[dropped[0]])}; the cache has {self.pools.blocks.shape[0]} pages of {self.pools.page_size}",
                DroppedStoreWarning,
                stacklevel=3,
            )


class BoundRows:
    """Consecutive requests of a step, for every layer that attends them.

    What depends on the step alone (tables, lengths, starts, the split of long rows) is checked with the first layer,
    and again only where a layer is of another kind or its queries have another shape, dtype or device.
    """

    def __init__(self, rows: Rows, plan: Plan) -> None:
        self.rows, self.plan = rows, plan
        # What was last made, behind what it was made for.
        self._bound: tuple[object, Step, AttendOptions] | None = None
        self._scheduled: tuple[object, Schedule | None] | None = None
        self._recorded: tuple[object, Repeat] | None = None
        self._passed: set[BoundLayer] = set()  # layers that attended in this pass

    def attend(self, q: Tensor, layer: BoundLayer) -> tuple[Tensor, Tensor]:
        """(out `[T, H, latent]`, lse `[T, H]` float32, natural log) of absorbed `q [T, H, latent + rope]`."""
        rows, plan, layout = self.rows, self.plan, layer.pools.layout
        if checks_enabled():
            return pagedmla.attend(
                q,
                rows.values(layer.pools),
                0,
                sm_scale=plan.sm_scale,
                query_start_loc=rows.query_start_loc,
                layout=layout,
                plan=plan,
            )
        out = q.new_empty(q.shape[0], q.shape[1], layout.latent)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        executor = plan.attend_choice.executor
        if not executor.only_launches:
            step, options = self._bind(q, layer)
            executor.attend(step, q, out, lse, options)
            return out, lse
        queries = (q.shape, q.dtype, q.device)
        key = (queries, q.stride(), layer.kind)  # holds what `_bind` goes by: a repeated call was bound for the same
        known, scheduled = self._recorded, self._scheduled
        if known is not None and known[0] != key:
            known = None
        if layer in self._passed:
            self._passed.clear()
        # Each pass makes its schedule anew, so that one captured after a warm-up holds it; so do other queries.
        if not self._passed or (scheduled is not None and scheduled[0] != queries):
            scheduled = None
        if known is None or scheduled is None:
            step, options = self._bind(q, layer)
        if scheduled is None:
            self._scheduled = scheduled = queries, executor.schedule(step, q, options)
        self._passed.add(layer)
        schedule = scheduled[1]
        tensors = {"q": q, "out": out, "lse": lse, **layer.tensors}
        if schedule is not None:
            tensors.update(schedule.tensors)
        if known is None:
            options = replace(options, schedule=schedule)
            self._recorded = known = key, Repeat(lambda: executor.attend(step, q, out, lse, options), tensors)
        known[1](tensors)
        return out, lse

    def _bind(self, q: Tensor, layer: BoundLayer) -> tuple[Step, AttendOptions]:
        pools, key = layer.pools, (q.shape, q.dtype, q.device, layer.kind)
        if self._bound is not None and self._bound[0] == key:
            _, first, options = self._bound
            return first.over(layer.empty_step), options
        first = bind_step(self.rows.values(pools), 0, pools.layout, self.rows.query_start_loc, q, "q", check=False)
        first = replace(first, one_token_each=self.rows.one_token_each)
        first.check_reads(check=False)
        self.plan.check(first, q, self.plan.sm_scale, causal=True)
        options = self.plan.options(first)
        self._bound = key, first, options
        return first, options
