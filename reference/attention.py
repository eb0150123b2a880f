"""Meaning: attention.

    logits = sm_scale * q . k          lse = ln(sum(exp(logits)))          out = sum(exp(logits - lse) * v)

over the keys that a query sees; out = 0 and lse = -inf where it sees none (arXiv 2405.04434 for the absorbed form: the
key is the whole row, the value its latent columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.tables import int64_lengths
from pagedmla.reference.cache import read_rows


def softmax_state(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`logits [..., keys]`, `values [keys, D]` to (out `[..., D]`, lse `[...]`); -inf logits are keys not seen."""
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    weights = torch.where(logits == -torch.inf, torch.zeros_like(weights), weights)
    return weights @ values, lse


def attend(
    q: Tensor,
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    query_start_loc: Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention: `q [T, H, latent + rope]` to (out `[T, H, latent]`, lse `[T, H]`), float64.

    Request b owns query tokens query_start_loc[b] .. query_start_loc[b + 1] - 1. Its token i sits at position
    cache_lengths[b] + i; it sees kv_len = cache_lengths[b] + q_len keys, or those up to its own position if causal.
    """
    out = q.new_zeros(*q.shape[:2], layout.latent, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    lengths = int64_lengths(cache.cache_lengths).tolist()
    bounds = query_start_loc.tolist()
    for b, cache_length in enumerate(lengths):
        q_len = bounds[b + 1] - bounds[b]
        keys = read_rows(cache, layout, layer, b, 0, max(0, cache_length + q_len))
        for i in range(q_len):
            seen = keys[: max(0, cache_length + i + 1)] if causal else keys
            t = bounds[b] + i
            logits = sm_scale * q[t].double() @ seen.T  # [H, keys]
            out[t], lse[t] = softmax_state(logits, seen[:, : layout.latent])
    return out, lse


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multi-head attention on dense rows: `q [T, H, D]`, `k [K, Hk, D]`, `v [K, Hk, Dv]` to (out `[T, H, Dv]`,
    lse `[T, H]`), float64. Query head h reads key head h // (H // Hk). Causal: a request's last query sees all of its
    keys, each one before it one fewer."""
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    queries, keys = query_start_loc.tolist(), key_start_loc.tolist()
    for b in range(len(queries) - 1):
        q_len, k_len = queries[b + 1] - queries[b], keys[b + 1] - keys[b]
        for i in range(q_len):
            seen = max(0, k_len - q_len + i + 1) if causal else k_len
            rows = slice(keys[b], keys[b] + seen)
            t = queries[b] + i
            for h in range(q.shape[1]):
                logits = sm_scale * k[rows, h // group].double() @ q[t, h].double()
                out[t, h], lse[t, h] = softmax_state(logits, v[rows, h // group].double())
    return out, lse
