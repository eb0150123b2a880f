"""Attention and store without a Python loop over tokens or heads: the CPU executor ("torch").

Attention is the online softmax over chunks of keys (arXiv 2205.14135), in float32, one request at a time: a chunk of
cached rows is gathered and dequantised, never the pool. Store is one gather-quantise-scatter for all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view
from pagedmla.kv_cache.splits import split_bounds, used_partitions
from pagedmla.kv_cache.tables import ids_at, int64_lengths
from pagedmla.reference.cache import read_rows
from pagedmla.reference.merge import merge_states
from pagedmla.reference.store import OUT_OF_POOL, PADDING

KEY_CHUNK = 1024  # keys dequantised at once: 2.3 MB of float32 rows
ROW_CHUNK = 2048  # query rows against them: 8 MB of logits


def attend(
    q: Tensor,
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    query_start_loc: Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
    num_partitions: int = 1,
    decode_requests: int | None = None,
    partial_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.attention.attend`, in float32: (out `[T, H, latent]`, lse `[T, H]`).

    The keys of the first `decode_requests` requests (None: all) are cut into `num_partitions` ranges of whole pages
    whose states are merged; the others' stay whole. `partial_lse [num_partitions, >= T, H]` receives the LSE of each
    part.
    """
    tokens, heads, _ = q.shape
    out = q.new_zeros(tokens, heads, layout.latent, dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    if partial_lse is not None:
        partial_lse[:num_partitions, :tokens] = -torch.inf
    bounds = query_start_loc.tolist()
    for b, cache_length in enumerate(int64_lengths(cache.cache_lengths).tolist()):
        first, end = bounds[b], bounds[b + 1]
        kv_len = max(0, cache_length + end - first)
        if first == end or kv_len == 0:
            continue
        asked = num_partitions if decode_requests is None or b < decode_requests else 1
        parts = used_partitions(kv_len, asked, cache.page_size)
        ranges = [split_bounds(kv_len, part, asked, cache.page_size) for part in range(parts)]
        block = max(1, ROW_CHUNK // heads)
        for t in range(first, end, block):
            rows = slice(t, min(t + block, end))
            last_seen = torch.arange(rows.start, rows.stop, device=q.device) - first + cache_length
            if not causal:
                last_seen = torch.full_like(last_seen, kv_len - 1)
            scaled = q[rows].float() * sm_scale
            states = [_attend_range(scaled, cache, layout, layer, b, last_seen, *keys) for keys in ranges]
            outs, lses = (torch.stack(each) for each in zip(*states))
            if partial_lse is not None:
                partial_lse[:parts, rows] = lses
            out[rows], lse[rows] = merge_states(outs, lses) if parts > 1 else (outs[0], lses[0])
    return out, lse


def _attend_range(
    q: Tensor,
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    request: int,
    last_seen: Tensor,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """State of `q [n, H, width]` (scaled) over keys start .. stop - 1; row i sees keys up to last_seen[i]."""
    n, heads, _ = q.shape
    flat = q.reshape(n * heads, -1)
    last = last_seen.repeat_interleave(heads).unsqueeze(1)  # [rows, 1]
    peak = flat.new_full((n * heads, 1), -torch.inf)
    total = flat.new_zeros(n * heads, 1)
    acc = flat.new_zeros(n * heads, layout.latent)
    first_seen, last_key = int(last_seen.min()), int(last_seen.max())
    for chunk in range(start, min(stop, last_key + 1), KEY_CHUNK):
        chunk_end = min(chunk + KEY_CHUNK, stop, last_key + 1)
        keys = read_rows(cache, layout, layer, request, chunk, chunk_end, torch.float32)
        logits = flat @ keys.T  # [rows, keys]
        values = keys[:, : layout.latent]
        if chunk_end - 1 > first_seen:  # some rows don't see some keys: mask the values too, 0 * NaN is NaN
            unseen = torch.arange(chunk, chunk_end, device=q.device) > last
            logits.masked_fill_(unseen, -torch.inf)
            values = values.nan_to_num()
        new_peak = torch.maximum(peak, logits.amax(1, keepdim=True))
        anchor = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weights = logits.sub_(anchor).exp_()
        decay = torch.exp(peak - anchor)
        total = total * decay + weights.sum(1, keepdim=True)
        acc = acc.mul_(decay).addmm_(weights, values)
        peak = new_peak
    empty = peak == -torch.inf
    lse = (peak + total.log()).masked_fill(empty, -torch.inf)
    out = (acc / total).masked_fill(empty, 0.0)
    return out.view(n, heads, -1), lse.view(n, heads)


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
    """As `reference.attention.prefill`, in float32."""
    tokens, heads, _ = q.shape
    out = q.new_zeros(tokens, heads, v.shape[-1], dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    queries, keys = query_start_loc.tolist(), key_start_loc.tolist()
    for b in range(len(queries) - 1):
        q_len, k_len = queries[b + 1] - queries[b], keys[b + 1] - keys[b]
        if q_len == 0 or k_len == 0:
            continue
        own = slice(keys[b], keys[b + 1])
        k_heads, v_heads = (
            x[own].float().transpose(0, 1).repeat_interleave(heads // x.shape[1], 0) for x in (k, v)
        )  # [H, keys, D]
        all_finite = bool(v_heads.isfinite().all())
        block = max(1, ROW_CHUNK * KEY_CHUNK // (heads * k_len))
        for t in range(queries[b], queries[b + 1], block):
            rows = slice(t, min(t + block, queries[b + 1]))
            seen = k_len - (queries[b + 1] - rows.stop) if causal else k_len  # by the block's last row
            if seen <= 0:
                continue
            logits = (q[rows].float() * sm_scale).transpose(0, 1) @ k_heads[:, :seen].transpose(1, 2)  # [H, rows, keys]
            if causal:
                last = torch.arange(rows.start - rows.stop, 0, device=q.device) + seen
                logits.masked_fill_(torch.arange(seen, device=q.device) > last.unsqueeze(1), -torch.inf)
            state = torch.logsumexp(logits, -1)
            weights = torch.exp(logits - state.masked_fill(state == -torch.inf, 0.0).unsqueeze(-1))
            values = v_heads[:, :seen]
            weighted = weights @ values if all_finite else _weigh(weights, values)
            out[rows], lse[rows] = weighted.transpose(0, 1), state.T
    return out, lse


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """`weights @ values`, where a weight of zero takes nothing, not even of a value that isn't finite."""
    strange = weights @ (~values.isfinite()).float() > 0
    return torch.where(strange, weights @ values, weights @ values.nan_to_num(0.0, 0.0, 0.0))


def slots_of_step(cache: PagedKVCacheCollection, query_start_loc: Tensor, table: Tensor) -> Tensor:
    """As `reference.store.slots_of_step`."""
    starts = query_start_loc.to(torch.int64)
    lengths = starts.diff()
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=starts.device), lengths)
    token = torch.arange(row.numel(), device=starts.device)
    position = int64_lengths(cache.cache_lengths)[row] + token - starts[row]
    real = position.clamp(min=0)
    if table.shape[1] == 0:
        return torch.full_like(position, PADDING)
    page = ids_at(table, row, real // cache.page_size)
    slot = page * cache.page_size + real % cache.page_size
    slot = torch.where(page < 0, OUT_OF_POOL, slot)
    return torch.where(position < 0, PADDING, slot)


def store(
    latent: Tensor,
    rope: Tensor,
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layer: int,
    slots: Tensor,
    scale_slots: Tensor,
    *,
    power_of_two: bool = False,
) -> Tensor:
    """As `reference.store.store`; returns the dropped tokens, int64 `[dropped]`."""
    page_size = cache.page_size
    stored, in_pools = slots != PADDING, _in_pools(cache, layout, slots, scale_slots)
    keep = stored & in_pools
    page, slot = slots[keep] // page_size, slots[keep] % page_size
    sigma, scale_dtype, scales = None, None, None
    if cache.scale_pool is not None and not layout.inline_scales:
        scales = cache.scale_pool.layer(0, layer).squeeze(2)
        scale_page, scale_slot = scale_slots[keep] // page_size, scale_slots[keep] % page_size
        scale_dtype = scales.dtype
        if cache.scale_pool.repeated:
            sigma = raw_view(scales)[scale_page, scale_slot].view(scale_dtype)
    made = layout.quantize(latent[keep], rope[keep], sigma=sigma, power_of_two=power_of_two, scale_dtype=scale_dtype)
    raw_view(cache.value_pool.layer(0, layer).squeeze(2))[page, slot] = raw_view(made.values)
    if scales is not None and sigma is None and made.scales is not None:
        raw_view(scales)[scale_page, scale_slot] = raw_view(made.scales)
    return torch.nonzero(stored & ~in_pools).flatten()


def dropped_tokens(cache: PagedKVCacheCollection, layout: CacheLayout, slots: Tensor, scale_slots: Tensor) -> Tensor:
    """Which tokens `store` drops: those whose slot lies outside either pool, int64 `[dropped]`; padding isn't one."""
    return torch.nonzero((slots != PADDING) & ~_in_pools(cache, layout, slots, scale_slots)).flatten()


def dropped_from_step(cache: PagedKVCacheCollection, layout: CacheLayout, query_start_loc: Tensor) -> Tensor:
    """The same for a store through the tables."""
    slots = slots_of_step(cache, query_start_loc, cache.lookup_table)
    return dropped_tokens(cache, layout, slots, slots_of_step(cache, query_start_loc, cache.scales_lookup_table))


def _in_pools(cache: PagedKVCacheCollection, layout: CacheLayout, slots: Tensor, scale_slots: Tensor) -> Tensor:
    in_pools = _in_pool(slots, cache.value_pool)
    if cache.scale_pool is not None and not layout.inline_scales:
        in_pools = in_pools & _in_pool(scale_slots, cache.scale_pool)
    return in_pools


def _in_pool(slots: Tensor, pool: PagedTensor) -> Tensor:
    return (slots >= 0) & (slots < pool.num_pages * pool.page_size)
