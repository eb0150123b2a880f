"""Once a layer: store this step's tokens, then attend.

`forward_mqa` is handed absorbed queries and returns the latent output; the layer projects it up. `forward_mha` is
handed the rest of a step, un-absorbed, and writes the projected output in place. LSE is float32, natural log.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

import pagedmla
from pagedmla.adapters.vllm import LayerPools, Rows, layer_pools, store_values
from pagedmla.kv_cache.checks import describe
from pagedmla.kv_cache.values import KVCacheInputsPerDevice
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.vllm.builder import PagedMLAMetadata
from pagedmla.plugin.vllm.counters import count, describe_layer


class PagedMLAImpl(MLACommonImpl[PagedMLAMetadata]):  # type: ignore[misc] # vllm is not there for a plain type check
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # queries stay in the model's dtype
        self._pools: LayerPools | None = None
        self._store_into: KVCacheInputsPerDevice | None = None
        self._cache_key: tuple[Any, ...] | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # outputs are written in the model's dtype

    def bind(self, name: str, layer: Any, plan: Plan) -> None:
        """From the builder, once weights are loaded: the layer, its name, and the plan that it shares with its kind."""
        for projection in ("W_UK_T", "W_UV"):
            if getattr(layer, projection, None) is None:
                raise ValueError(
                    f"{name}: expected {projection} of an MLA layer in the model's dtype; got none (the engine keeps "
                    f"quantised projections for kernels of its own here: turn those off)"
                )
        scale = layer._k_scale_float
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"{name}: expected a finite k_scale > 0; got {scale}")
        self._name, self._layer, self._plan = name, layer, plan

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
        pools = self._bound_pools(kv_cache, k_scale)
        if self._store_into is None:
            self._store_into = store_values(pools)
        slots = slot_mapping.flatten()
        executor = self._plan.store_choice.executor.name
        pagedmla.store(
            kv_c_normed[: slots.shape[0]],
            k_pe[: slots.shape[0]].flatten(1),
            self._store_into,
            0,
            slot_mapping=slots,
            layout=pools.layout,
            executor=executor,
        )
        count(self._name, "store", executor)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],  # [B, H, latent + rope], or its two parts
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PagedMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """(out `[B, H, latent]`, lse `[B, H]` float32, natural log)."""
        absorbed = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert attn_metadata.decode_rows is not None
        return self._attend(absorbed, kv_c_and_k_pe_cache, attn_metadata.decode_rows, layer._k_scale, "decode")

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
        rows = attn_metadata.prefill_rows
        assert rows is not None
        out, _ = self._attend(self._absorb(q), kv_c_and_k_pe_cache, rows, k_scale, attn_metadata.kind)
        projected = output.view(-1, self.num_heads, self.v_head_dim)
        torch.bmm(out.transpose(0, 1), self._layer.W_UV, out=projected.transpose(0, 1))

    def _absorb(self, q: Tensor) -> Tensor:
        """`[T, H, nope + rope]` to `[T, H, latent + rope]`: W_UK folded in."""
        nope, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        absorbed = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank + self.qk_rope_head_dim)
        latent = absorbed[..., : self.kv_lora_rank]
        torch.bmm(nope.transpose(0, 1), self._layer.W_UK_T, out=latent.transpose(0, 1))
        absorbed[..., self.kv_lora_rank :] = rope
        return absorbed

    def _attend(self, q: Tensor, cache: Tensor, rows: Rows, k_scale: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        pools = self._bound_pools(cache, k_scale)
        out, lse = pagedmla.attend(
            q,
            rows.values(pools),
            0,
            sm_scale=self.scale,
            query_start_loc=rows.query_start_loc,
            layout=pools.layout,
            plan=self._plan,
        )
        count(self._name, kind, self._plan.attend_choice.executor.name)
        return out, lse

    def _bound_pools(self, cache: Tensor, k_scale: Tensor) -> LayerPools:
        """Views of the layer's cache, made anew only where the engine hands over other memory."""
        key = (cache.data_ptr(), cache.shape, cache.stride(), k_scale.data_ptr())
        if self._pools is None or self._cache_key != key:
            self._pools = layer_pools(cache, self._plan.layout, k_scale)
            self._store_into, self._cache_key = None, key
            describe_layer(self._name, f"{self._plan}; cache {describe(cache)}, strides {list(cache.stride())}")
        return self._pools
