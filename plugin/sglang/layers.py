"""Layers of a model, bound once: the pool's memory, the scale, and the plan that layers of a kind share."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.sglang import layer_pools, layout_of
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import CacheLayout, Fp8Flat
from pagedmla.plugin.bound import BoundLayer, Stores
from pagedmla.plugin.dense import DenseCalls
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool, wait_for
from pagedmla.plugin.sglang.refusals import refuse_layer
from pagedmla.plugin.sglang.settings import CACHE_SWITCH

logger = logging.getLogger("sglang.pagedmla")  # below "sglang", where the engine's log handlers are


class Layers:
    """What the layers of one runner bring, for all of its backends.

    max_requests, max_tokens, max_keys  of a step; plans are made for these
    """

    def __init__(self, pool: Any, dtype: torch.dtype, max_requests: int, max_tokens: int, max_keys: int) -> None:
        self.pool, self.dtype = pool, dtype
        self.max_requests, self.max_tokens, self.max_keys = max_requests, max_tokens, max_keys
        self.layout = _layout(pool)
        self._plans: dict[tuple[int, float], Plan] = {}
        self._dense_calls: dict[tuple[int, float], DenseCalls] = {}
        self._bound: dict[int, tuple[tuple[Any, ...], BoundLayer]] = {}
        self._stores = Stores()
        self._outgrown: list[BoundLayer] = []  # captured graphs read the memory that they were captured with
        self._unscaled = False

    def plan(self, num_heads: int, sm_scale: float) -> Plan:
        """The plan for layers of so many heads. It is made, and its kernels are loaded, when first asked for."""
        key = num_heads, sm_scale
        if key not in self._plans:
            made = pagedmla.plan(
                layout=self.layout,
                num_heads=num_heads,
                page_size=self.pool.page_size,
                max_batch=self.max_requests,
                max_tokens=self.max_tokens,
                max_cache_length=self.max_keys,
                dtype=self.dtype,
                device=self.pool.kv_buffer[0].device,
                sm_scale=sm_scale,
            )
            made.check_engine()
            attend, store = made.attend_choice, made.store_choice
            logger.info(
                "pagedmla %s: %s; attention: %s (%s); store: %s (%s). PAGEDMLA_EXECUTORS chooses otherwise",
                *(pagedmla.__version__, made, attend.executor.name, attend.reason, store.executor.name, store.reason),
            )
            logger.debug(made.explain())
            self._plans[key] = made
        return self._plans[key]

    def dense_calls(self, plan: Plan) -> DenseCalls:
        """Who runs long prompts of layers of this plan."""
        key = plan.num_heads, plan.sm_scale
        if key not in self._dense_calls:
            self._dense_calls[key] = DenseCalls.choose(plan)
        return self._dense_calls[key]

    def grow(self, requests: int, tokens: int) -> None:
        """Make room for a larger step: plans are made anew, and layers bound anew with them."""
        if requests <= self.max_requests and tokens <= self.max_tokens:
            return
        self.max_requests, self.max_tokens = max(requests, self.max_requests), max(tokens, self.max_tokens)
        self._outgrown += [bound for _, bound in self._bound.values()]
        self._plans.clear()
        self._bound.clear()
        logger.info("pagedmla: plans now hold %d requests and %d tokens", self.max_requests, self.max_tokens)

    def of(self, layer: Any) -> BoundLayer:
        """The layer's pool, bound anew only where the engine has other memory for it."""
        buffer = self.pool.kv_buffer[layer.layer_id - self.pool.start_layer]
        key = (buffer.data_ptr(), layer.tp_q_head_num, layer.scaling, id(layer.k_scale))
        known = self._bound.get(layer.layer_id)
        if known is not None and known[0] == key:
            return known[1]
        refuse_layer(layer)
        scale = self._k_scale(layer, buffer.device) if isinstance(self.layout, Fp8Flat) else None
        pools = layer_pools(buffer, self.pool.page_size, self.layout, scale)
        plan = self.plan(layer.tp_q_head_num, layer.scaling)
        bound = BoundLayer(f"layer {layer.layer_id}", pools, plan, self._stores)
        self._bound[layer.layer_id] = key, bound
        return bound

    def wait(self, layer: Any) -> None:
        """Until the host cache has brought the layer's pages back."""
        wait_for(self.pool, layer.layer_id)

    def _k_scale(self, layer: Any, device: torch.device) -> Tensor:
        """The layer's scale, by which rows are divided when they are written and multiplied when they are read."""
        number = layer.k_scale_float
        if number is not None and not 0.0 < number < math.inf:
            raise Refusal(f"layer {layer.layer_id}: expected a finite k_scale > 0; got {number}")
        if layer.k_scale is not None:
            given: Tensor = layer.k_scale
            return given.detach().reshape(-1).to(device, torch.float32)
        if number is not None:
            return torch.full((1,), number, device=device)
        if not self._unscaled:
            self._unscaled = True
            logger.warning(
                "layer %d has no k_scale, so fp8_e4m3 rows are stored with scale 1: what lies beyond 448 is clamped, "
                "what lies below 0.02 loses precision, and the rope is in 8 bits too. Scales from the checkpoint, or "
                "%s=fp8_rope_bf16 (a scale for every token, the rope in bfloat16), cost less accuracy",
                layer.layer_id,
                CACHE_SWITCH,
            )
        return torch.ones(1, device=device)


def _layout(pool: Any) -> CacheLayout:
    if isinstance(pool, PagedMLATokenToKVPool):
        return pool.layout
    return layout_of(pool.dtype, latent=pool.kv_lora_rank, rope=pool.qk_rope_head_dim)
