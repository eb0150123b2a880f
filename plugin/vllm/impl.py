"""Once a layer: store this step's tokens, then attend.

`forward_mqa` is handed absorbed queries and returns the latent output; the layer projects it up. `forward_mha` is
handed long prompts, un-absorbed, and writes the projected output in place. LSE is float32, natural log.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

from pagedmla.adapters.vllm import layer_pools
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import Fp8Flat
from pagedmla.plugin.bound import BoundLayer, Stores
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.vllm import recorder
from pagedmla.plugin.vllm.builder import PagedMLAMetadata
from pagedmla.plugin.vllm.counters import count, describe_layer


class PagedMLAImpl(MLACommonImpl[PagedMLAMetadata]):  # type: ignore[misc] # vllm is not there for a plain type check
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    # The builder's, by `bind`, before the first step.
    _name: str
    _layer: Any
    _plan: Plan
    _stores: Stores

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # queries stay in the model's dtype
        # Made for this memory; one attribute, written once, since micro-batches run in threads of their own.
        self._bound: tuple[tuple[Any, ...], BoundLayer] | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # outputs are written in the model's dtype

    def bind(self, name: str, layer: Any, plan: Plan, stores: Stores) -> None:
        """From the builder, once weights are loaded: the layer, its name, and what it shares with its kind."""
        for projection in ("W_UK_T", "W_UV"):
            if getattr(layer, projection, None) is None:
                raise Refusal(
                    f"{name}: expected {projection} of an MLA layer in the model's dtype; got none (the engine keeps "
                    f"quantised projections for kernels of its own here: turn those off)"
                )
        scale = layer._k_scale_float
        if not 0.0 < scale < float("inf"):
            raise Refusal(f"{name}: expected a finite k_scale > 0; got {scale}")
        self._name, self._layer, self._plan, self._stores = name, layer, plan, stores

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,  # [T, latent]
        k_pe: Tensor,  # [T, 1, rope]
        kv_cache: Tensor,  # [num_blocks, block_size, row]
        slot_mapping: Tensor,  # [<= T] int64, -1 pads
        kv_cache_dtype: str,
        k_scale: Tensor,
        *rest: Any,
    ) -> None:
        if kv_cache.numel() == 0:  # the engine measures memory before it has a cache
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        latent, rope = kv_c_normed[:tokens], k_pe[:tokens].flatten(1)
        if recorder.active is not None:
            recorder.active.add(self._name, latent, rope, slots)
        self._layer_of(kv_cache, k_scale).store(latent, rope, slots)
        count(self._name, "store", self._plan.store_choice.executor.name)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],  # [B, H, latent + rope], or its two parts
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PagedMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """(out `[B, H, latent]`, lse `[B, H]` float32, natural log)."""
        absorbed = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert attn_metadata.absorbed is not None
        state = attn_metadata.absorbed.attend(absorbed, self._layer_of(kv_c_and_k_pe_cache, layer._k_scale))
        count(self._name, attn_metadata.kind, self._plan.attend_choice.executor.name)
        return state

    def forward_mha(
        self,
        q: Tensor,  # [T, H, nope + rope]
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PagedMLAMetadata,
        k_scale: Tensor,
        output: Tensor,  # [T, H * value], written in place
        output_scale: Tensor | None = None,
        *rest: Any,
        **more: Any,
    ) -> None:
        if self.dcp_world_size > 1:  # the engine's own, which gathers the shards of a context
            super().forward_mha(
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale, *rest, **more
            )
            return
        assert attn_metadata.dense is not None
        attn_metadata.dense.attend(
            q,
            self._layer_of(kv_c_and_k_pe_cache, k_scale),
            self._layer.W_UK_T,
            self._layer.W_UV,
            output.view(-1, self.num_heads, self.v_head_dim),
        )
        count(self._name, "dense", attn_metadata.dense.executor)

    def _layer_of(self, cache: Tensor, k_scale: Tensor) -> BoundLayer:
        """The layer's cache, bound anew only where the engine hands over other memory."""
        key = (cache.data_ptr(), cache.shape, cache.stride(), k_scale.data_ptr())
        bound = self._bound
        if bound is None or bound[0] != key:
            pools = layer_pools(cache, self._plan.layout, k_scale)
            self._bound = bound = key, BoundLayer(self._name, pools, self._plan, self._stores)
            scale = f", k_scale {self._layer._k_scale_float:.9g}" if isinstance(self._plan.layout, Fp8Flat) else ""
            describe_layer(self._name, f"{self._plan}{scale}", cache)
        return bound[1]
