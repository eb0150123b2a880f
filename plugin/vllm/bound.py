"""What a step and a layer bring is bound and checked once each; a call of a layer then only puts the two together.

    BoundLayer   a layer's cache, as long as the engine keeps the tensor
    BoundRows    rows of a step, bound by the first layer that attends them

With PAGEDMLA_CHECK=1 every layer goes through the public calls, which read the cache's values too.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.vllm import LayerPools, Rows, store_values
from pagedmla.kv_cache.checks import DroppedStoreWarning, checks_enabled
from pagedmla.plugin.executors import AttendOptions
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.step import Step, bind_step


class BoundLayer:
    """One layer's pools, and how tokens are stored into them."""

    def __init__(self, name: str, pools: LayerPools, plan: Plan) -> None:
        self.name, self.pools, self.plan = name, pools, plan
        self._store_values = store_values(pools)
        nothing = torch.empty(0, dtype=torch.int32, device=pools.blocks.device)
        starts = torch.zeros(1, dtype=torch.int32, device=pools.blocks.device)
        # A step without requests: slots say where tokens go, and the pools are all that is looked at.
        self.empty_step = bind_step(self._store_values, 0, pools.layout, starts, nothing, "tokens", check=False)

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
        dropped = choice.store_slots(self.empty_step, latent, rope, slots, slots, power_of_two=False)
        if dropped is not None and dropped.device.type == "cpu" and dropped.numel():
            warnings.warn(
                f"{self.name}: {dropped.numel()} of {latent.shape[0]} tokens dropped, first slot "
                f"{int(slots[dropped[0]])}; the cache has {self.pools.blocks.shape[0]} pages of {self.pools.page_size}",
                DroppedStoreWarning,
                stacklevel=2,
            )


class BoundRows:
    """Consecutive requests of a step, for every layer that attends them.

    What depends on the step alone (tables, lengths, starts, the split of long rows) is checked against the pools of
    the first layer, and again only where a layer's pools have another shape.
    """

    def __init__(self, rows: Rows, plan: Plan) -> None:
        self.rows, self.plan = rows, plan
        self._first: Step | None = None
        self._options: AttendOptions | None = None

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
        step, options = self._bind(q, layer)
        out = q.new_empty(q.shape[0], q.shape[1], layout.latent)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        plan.attend_choice.executor.attend(step, q, out, lse, options)
        return out, lse

    def _bind(self, q: Tensor, layer: BoundLayer) -> tuple[Step, AttendOptions]:
        first, options, pools = self._first, self._options, layer.pools
        if first is not None and options is not None and first.cache.blocks.shape == pools.blocks.shape:
            return first.over(layer.empty_step), options
        first = bind_step(self.rows.values(pools), 0, pools.layout, self.rows.query_start_loc, q, "q", check=False)
        first = replace(first, one_token_each=self.rows.one_token_each)
        first.check_reads(check=False)
        self.plan.check(first, q, self.plan.sm_scale, causal=True)
        options = self.plan.options(first)
        self._first, self._options = first, options
        return first, options
