"""Long prompts the dense way: keys and values projected up from the cache, as `plugin.dense` says and does.

SGLang asks for one form of attention a step and layer, for all requests alike, so the step is weighed as a whole. With
q query tokens behind c cached ones, a request's queries see c + q / 2 keys in the mean:

    a step goes the dense way where  sum (q - least) (c + q / 2) >= 0

A request alone goes from `least` query tokens on. In company each counts by its keys: a long prompt carries short ones
along, and many decode rows over long contexts, whose keys would be projected up for one query each, hold it back.

Steps that SGLang would replay from a captured graph are absorbed in there; leaving the graph costs the host the
launches of a whole forward, and has to pay for them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from pagedmla.plugin.dense import SWITCH, least_queries

WORTH_LEAVING_A_GRAPH = 10**11
"""Multiply-adds of a layer: half a millisecond at 400 TFLOP/s, taken for what the host needs to launch a layer's
kernels one by one. A model, not measured."""

PROJECTED_BYTES = 2 << 30
"""Keys and values that a pass projects up take at most this."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class DenseRule:
    """Which steps go the dense way; `rule_of` makes it.

    least     query tokens from which on a prompt alone does; None: no step does
    per_pair  multiply-adds that a head saves for a query and a key, per_key what it spends on a key of the context
    heads     of this rank
    asked     whether the user named `least`, and leaves graphs for it
    """

    least: int | None
    per_pair: int = 0
    per_key: int = 0
    heads: int = 0
    asked: bool = False

    def pays(self, contexts: Sequence[int], queries: Sequence[int]) -> bool:
        """For requests of so many cached and so many new tokens."""
        least = self.least
        if least is None or max(queries, default=0) < least:
            return False
        return sum((q - least) * (2 * c + q) for c, q in zip(contexts, queries, strict=True)) >= 0

    def leaves_graph(self, contexts: Sequence[int], queries: Sequence[int]) -> bool:
        """Whether such a step is better launched anew than replayed, absorbed, from a graph."""
        if not self.pays(contexts, queries):
            return False
        pairs = sum(q * (2 * c + q) for c, q in zip(contexts, queries, strict=True)) // 2
        saved = self.heads * (pairs * self.per_pair - sum(contexts) * self.per_key)
        return self.asked or saved >= WORTH_LEAVING_A_GRAPH


def rule_of(config: Any, heads: int) -> DenseRule:
    """The rule for a model (SGLang's `ModelConfig`). ValueError for a PAGEDMLA_DENSE_PREFILL that isn't known."""
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = getattr(config, "qk_nope_head_dim", None), getattr(config, "v_head_dim", None)
    least = least_queries(latent, rope, nope or 0, value or 0)
    if nope is None or value is None or least is None:
        return DenseRule(None)
    if _scales_queries(config) or get_exec().deterministic.enable_deterministic_inference:
        return DenseRule(None)  # deterministic: rounding mustn't depend on a request's company
    asked = (os.environ.get(SWITCH) or "auto") != "auto"
    return DenseRule(least, 2 * latent - nope - value, latent * (nope + value), heads, asked)


def _scales_queries(config: Any) -> bool:
    """Mistral Large 3 scales queries by their position; SGLang does so in the absorbed form alone."""
    parts = (getattr(config, name, None) for name in ("hf_config", "hf_text_config"))
    return any(getattr(part, "llama_4_scaling", None) is not None for part in parts)


def room(columns: int, dtype: torch.dtype, heads: int, engines: int) -> int:
    """Keys that a pass projects up, of so many columns a head; at most `engines`, SGLANG_MAX_KV_CHUNK_CAPACITY."""
    return max(1, min(engines, PROJECTED_BYTES // (columns * dtype.itemsize * heads)))


def has_projections(attention: Any) -> bool:
    """Whether `projections` can be had of a DeepSeek attention.

    Not where they are in a form of somebody else's kernels (blocks of DeepGEMM, FP4), nor where a LoRA adapter adds to
    them.
    """
    if attention.use_deep_gemm_bmm or getattr(getattr(attention, "kv_b_proj", None), "set_lora", False):
        return False
    heads, latent = attention.num_local_heads, attention.kv_lora_rank
    shapes = (heads, attention.qk_nope_head_dim, latent), (heads, latent, attention.v_head_dim)
    for weight, shape in zip((attention.w_kc, attention.w_vc), shapes):
        if weight is None or weight.shape != shape or weight.dtype not in (*_FLOATS, *_SCALED):
            return False
        if weight.dtype in _SCALED and isinstance(attention.w_scale, Tensor) and attention.w_scale.numel() != 1:
            return False
    return True


def projections(attention: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`W_UK [H, P, L]` and `W_UV [H, L, V]` of a DeepSeek attention, those of its absorbed form, in a dtype.

    FP8 is multiplied by its one scale anew in each step: little beside the work of a step that goes the dense way.
    """
    w_uk, w_uv = (
        weight.to(dtype) * attention.w_scale if weight.dtype in _SCALED else weight
        for weight in (attention.w_kc, attention.w_vc)
    )
    return w_uk.to(dtype), w_uv.to(dtype)
