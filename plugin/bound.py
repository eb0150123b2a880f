"""What a step and a layer bring is bound and checked once each; a call of a layer then only puts the two together.

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
        self._key: object = None
        self._repeat: Repeat | None = None

    def __call__(self, layer: BoundLayer, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        tokens = {"latent": latent, "rope": rope, "slots": slots}
        tensors, key = {**tokens, **layer.tensors}, (geometry(tokens), layer.geometry)
        if self._repeat is None or self._key != key:
            store, step = layer.plan.store_choice.executor.store_slots, layer.empty_step
            self._repeat = Repeat(lambda: store(step, latent, rope, slots, slots, power_of_two=False), tensors)
            self._key = key
        self._repeat(tensors)


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
    def geometry(self) -> object:
        return geometry(self.tensors)

    def store(self, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        """`latent [T, L]` and `rope [T, R]` to `slots [T]` int64, -1 pads."""
        choice = self.plan.store_choice.executor
        if checks_enabled():
            pagedmla.store(
                latent,
                rope,
                self._store_values,
                0,
                slot_mapping=slots,
                layout=self.pools.layout,
                executor=choice.name,
            )
            return
        if choice.only_launches:
            self._stores(self, latent, rope, slots)
        else:
            choice.store_slots(self.empty_step, latent, rope, slots, slots, power_of_two=False)
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

    What depends on the step alone (tables, lengths, starts, the split of long rows) is checked against the pools of
    the first layer, and again only where a layer's pools or queries have another shape.
    """

    def __init__(self, rows: Rows, plan: Plan) -> None:
        self.rows, self.plan = rows, plan
        self._first: Step | None = None
        self._options: AttendOptions | None = None
        self._repeat: Repeat | None = None
        self._key: object = None
        self._schedule: Schedule | None = None
        self._scheduled_for: object = None  # shape and dtype of the queries
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
        key = (q.shape, q.stride(), q.dtype, layer.geometry)
        known = self._repeat is not None and self._key == key
        if layer in self._passed:
            self._passed.clear()
        # Each pass makes its schedule anew, so that one captured after a warm-up holds it; so do other queries.
        stale = not self._passed or self._scheduled_for != (q.shape, q.dtype)
        if not known or stale:
            step, options = self._bind(q, layer)
        if stale:
            self._schedule, self._scheduled_for = executor.schedule(step, q, options), (q.shape, q.dtype)
        self._passed.add(layer)
        shared = {} if self._schedule is None else self._schedule.tensors
        tensors = {"q": q, "out": out, "lse": lse, **layer.tensors, **shared}
        if not known:
            options = replace(options, schedule=self._schedule)
            self._repeat, self._key = Repeat(lambda: executor.attend(step, q, out, lse, options), tensors), key
        assert self._repeat is not None
        self._repeat(tensors)
        return out, lse

    def _bind(self, q: Tensor, layer: BoundLayer) -> tuple[Step, AttendOptions]:
        first, options, pools = self._first, self._options, layer.pools
        if first is not None and options is not None:
            if first.cache.blocks.shape == pools.blocks.shape and first.num_tokens == q.shape[0]:
                return first.over(layer.empty_step), options
        first = bind_step(self.rows.values(pools), 0, pools.layout, self.rows.query_start_loc, q, "q", check=False)
        first = replace(first, one_token_each=self.rows.one_token_each)
        first.check_reads(check=False)
        self.plan.check(first, q, self.plan.sm_scale, causal=True)
        options = self.plan.options(first)
        self._first, self._options = first, options
        return first, options
