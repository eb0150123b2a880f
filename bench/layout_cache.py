"""A Hugging Face cache whose rows went through a cache layout: what a model sees when its cache is of that layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import CacheLayout


class LayoutCache(DynamicCache):  # type: ignore[misc] # transformers is not there for a plain type check
    """`model(tokens, past_key_values=LayoutCache(layout))` is the forward over a cache of that layout.

    Quantises the normalised latent and the rotated rope of each token once, as a store does, and hands their
    dequantised values to attention. `sigmas` is one scale a layer for `fp8_flat`; by default scales are measured.

    Needs a transformers release that caches latents (5.19 does); one that caches expanded keys is refused.
    """

    def __init__(self, layout: CacheLayout, sigmas: Sequence[float] | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.sigmas = sigmas

    def update(self, latent: Tensor, rope: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`latent [requests, 1, tokens, latent]` and `rope [requests, 1, tokens, rope]` of new tokens; returns all."""
        got, wanted = (latent.shape[-1], rope.shape[-1]), (self.layout.latent, self.layout.rope)
        if got != wanted:
            raise Refusal(
                f"past_key_values: expected a latent and a rope of {wanted} columns; got {got}. "
                "This transformers release doesn't cache latents: install transformers>=5.19."
            )
        sigma = None
        if self.sigmas is not None:
            shape = (*latent.shape[:-1], self.layout.scales_per_token)
            sigma = torch.full(shape, self.sigmas[layer_idx], device=latent.device)
        made = self.layout.quantize(latent, rope, sigma=sigma)
        row = self.layout.dequantize(made.values, made.scales, torch.float32).to(latent.dtype)
        all_latents, all_ropes = super().update(*row.split(wanted, -1), layer_idx, *args, **kwargs)
        return all_latents, all_ropes
