"""What the engine should say: a Hugging Face forward, its latents and rotated keys passed through the cache's layout.

With an unquantised layout it is the plain forward. With an FP8 layout every key and value is what a cache of that
layout gives back, so that the engine is held to the layout's own noise, not to a wide tolerance for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.layouts import CacheLayout

LATENT, ROPE = 512, 64


class Oracle:
    """Log-probabilities of the checkpoint under a cache layout."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, tokens: list[int], layout: CacheLayout | None = None) -> Tensor:
        """`[T, vocabulary]` float32: row t is the distribution of token t + 1."""
        with through_cache(self.model, layout):
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@contextmanager
def through_cache(model: Any, layout: CacheLayout | None) -> Iterator[None]:
    if layout is None:
        yield
        return
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as module

    hooks = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, latent: _latent(layout, latent))
        for layer in model.model.layers
    ]
    names = [name for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave") if hasattr(module, name)]
    stock = {name: getattr(module, name) for name in names}

    def rotated(rotate: Any) -> Any:
        def call(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = rotate(q, k, *args, **kwargs)
            return q, _rope(layout, k)

        return call

    try:
        for name in names:
            setattr(module, name, rotated(stock[name]))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name in names:
            setattr(module, name, stock[name])


def _round_trip(layout: CacheLayout, latent: Tensor, rope: Tensor) -> Tensor:
    # The engine's per-tensor scale is 1 for a checkpoint that brings none.
    sigma = torch.ones(*latent.shape[:-1], 1) if layout.name == "fp8_flat" else None
    made = layout.quantize(latent, rope, sigma=sigma)
    return layout.dequantize(made.values, made.scales)


def _latent(layout: CacheLayout, latent: Tensor) -> Tensor:
    return _round_trip(layout, latent, latent.new_zeros(*latent.shape[:-1], ROPE))[..., :LATENT]


def _rope(layout: CacheLayout, rope: Tensor) -> Tensor:
    return _round_trip(layout, rope.new_zeros(*rope.shape[:-1], LATENT), rope)[..., LATENT:]
