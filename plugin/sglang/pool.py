"""A token pool of `fp8_rope_bf16`: each slot holds a token's row and its scale.

    byte   0 .. 639   row: 512 e4m3, 64 bf16
    byte 640 .. 643   sigma, float32
    byte 644 .. 655   unused: slots begin at multiples of 16 bytes

Whatever moves slots (host cache, transfer to a decode instance, retraction, accepted drafts) moves both, with the code
of the engine. A tensor of scales apart from the rows would be refused by the engine's host cache, and cut with the
wrong layers by its transfer between pipelines of different depth.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from torch import Tensor

import pagedmla
from pagedmla.adapters.rows import store_values
from pagedmla.adapters.sglang import layer_pools, slot_bytes, split_slots
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.plugin.sglang.settings import BACKEND

LAYOUT = "fp8_rope_bf16"


class PagedMLATokenToKVPool(MLATokenToKVPool):  # type: ignore[misc] # sglang is not there for a plain type check
    """Made by the engine with the arguments of its own pool; `kv_buffer[layer]` is `[slots, 1, 656]` uint8."""

    layout: CacheLayout

    def _create_buffers(self) -> None:
        if self.dtype != torch.float8_e4m3fn:
            raise Refusal(f"a pool of {LAYOUT}: expected dtype float8_e4m3fn; got {self.dtype}")
        if self.use_dsa:
            raise Refusal(f"a pool of {LAYOUT}: expected dense MLA; got a model with sparse attention (use_dsa)")
        self.layout = get_layout(LAYOUT, latent=self.kv_lora_rank, rope=self.qk_rope_head_dim)
        self.kv_cache_dim = slot_bytes(self.layout)
        super()._create_buffers()
        for scales in self.scale_buffer:  # page 0 is padding's, which reads slots that nobody writes
            scales[: self.page_size] = 1.0

    @property
    def scale_buffer(self) -> list[Tensor]:
        """The scales of each layer, `[slots, 1]` float32: views of `kv_buffer`."""
        return [split_slots(buffer, self.layout)[1] for buffer in self.kv_buffer]

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: Tensor,
        cache_k_rope: Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Quantise `[T, 1, latent]` and `[T, 1, rope]` into slots `[T]`; -1 pads."""
        slots, _, _ = unwrap_write_loc(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        pools = layer_pools(self.kv_buffer[layer_id - self.start_layer], self.page_size, self.layout)
        latent, rope = (part.flatten(1) for part in (cache_k_nope, cache_k_rope))
        pagedmla.store(latent, rope, store_values(pools), 0, slot_mapping=slots.long(), layout=self.layout)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, layer_id_override: int | None = None
    ) -> None:
        """The same from rows `[T, 1, latent + rope]`; values are part of them."""
        latent, rope = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        self.set_mla_kv_buffer(layer, loc_info, latent, rope, layer_id_override)

    def get_mla_kv_buffer(self, layer: Any, loc: Tensor, dst_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Latents `[T, 1, latent]` and ropes `[T, 1, rope]` of slots, dequantised; bfloat16 where no dtype is asked."""
        wait_for(self, layer.layer_id)
        rows, sigmas = split_slots(self.kv_buffer[layer.layer_id - self.start_layer][loc], self.layout)
        read = self.layout.dequantize(rows, sigmas).to(dst_dtype or torch.bfloat16).unsqueeze(1)
        return read[..., : self.kv_lora_rank].contiguous(), read[..., self.kv_lora_rank :].contiguous()

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        return self.kv_buffer[0].shape, self.kv_buffer[0].shape

    def get_key_buffer(self, layer_id: int) -> NoReturn:
        raise Refusal(
            f"a pool of {LAYOUT}: expected a reader that knows its rows of {self.kv_cache_dim} bytes; got another "
            f"attention backend. Set --attention-backend {BACKEND} for prefill, decode and drafts."
        )

    get_value_buffer = get_key_buffer


def wait_for(pool: Any, layer_id: int) -> None:
    """Until the host cache has brought a layer of a pool, the engine's or ours, back."""
    if pool.layer_transfer_counter is not None:
        pool.layer_transfer_counter.wait_until(layer_id - pool.start_layer)
