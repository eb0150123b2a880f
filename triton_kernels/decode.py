"""Decode: absorbed attention of steps in which every request has the same few query tokens.

contract   q [B * q_len, H, L + 64], request by request; otherwise as mixed.py. A request whose kv_len is 0 (a padding
           row of a captured graph: cache_length -1 with one query token) gets out 0 and lse -inf, and its table row
           isn't read
meaning    reference/attention.py
grid       (B * ceildiv(q_len * H, ROWS),): no search for the request, no tile without rows
cost       docs/kernels/decode_triton.md
limits     as mixed.py
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, expect_same_device, refuse
from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.triton_kernels.attending import build_options, check_call, strides
from pagedmla.triton_kernels.device.attention import attend_rows
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import as_bytes, as_int32


def attend_decode(
    q: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    cache_lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    scales_lookup_table: Tensor | None = None,
    *,
    sm_scale: float,
    causal: bool = True,
) -> None:
    """Attend, and write `out` and `lse` (see the top of this file).

    lookup_table, scales_lookup_table [B, W] int32 or uint32; cache_lengths [B] int32 or uint32, without this step's
    tokens. Without a table of their own the scales follow lookup_table.
    """
    lengths = as_int32(cache_lengths, "cache_lengths", [None])
    requests = lengths.shape[0]
    tables = check_call(q, planes, lookup_table, scales_lookup_table, requests, out, lse)
    expect_same_device(q, "q", cache_lengths=lengths)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    if requests == 0:
        refuse("q", "no query tokens, since cache_lengths has no requests", q)
    if tokens % requests:
        refuse(
            "q", f"a multiple of {requests} query tokens, as many for each request", q, "Ragged steps: attend_mixed."
        )
    query_len = tokens // requests
    compiled = build_options(q, planes, causal, query_len * heads)
    launch(
        decode_kernel,
        (requests * ceildiv(query_len * heads, compiled["ROWS"]),),
        out,
        lse,
        q,
        as_bytes(planes.latent),
        as_bytes(planes.rope),
        as_bytes(planes.scales),
        *tables,
        lengths,
        query_len,
        heads,
        sm_scale * math.log2(math.e),
        *strides(q, planes, tables, out),
        **compiled,
    )


@triton.jit(
    do_not_specialize=[
        "lse", "lookup_table", "scales_lookup_table", "cache_lengths", "query_len", "stride_table",
        "stride_scales_table",
    ]
)  # fmt: skip
def decode_kernel(
    out, lse, q, latent, rope, scales, lookup_table, scales_lookup_table, cache_lengths,
    query_len, heads, score_scale,
    stride_table, stride_scales_table, stride_q_token, stride_q_head,
    stride_latent_page, stride_rope_page, stride_scales_page,
    stride_out_token, stride_out_head,
    STRIDE_LATENT_SLOT: tl.constexpr, STRIDE_ROPE_SLOT: tl.constexpr, STRIDE_SCALES_SLOT: tl.constexpr,
    STRIDE_SCALES_GROUP: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROPE_SCALED: tl.constexpr, E8M0: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    ROPE_CHUNK: tl.constexpr, LATENT_MMA: tl.constexpr, ROPE_MMA: tl.constexpr, SPLIT_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, DEQUANTISE: tl.constexpr, NATIVE_E4M3: tl.constexpr, HOIST: tl.constexpr,
    PREFETCH: tl.constexpr, PREFETCH_ROPE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(query_len * heads, ROWS)
    request = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * ROWS
    cache_length = tl.load(cache_lengths + request)
    kv_len = tl.maximum(cache_length + query_len, 0)
    attend_rows(
        out, lse, None, None, q, latent, rope, scales,
        lookup_table + request.to(tl.int64) * stride_table,
        scales_lookup_table + request.to(tl.int64) * stride_scales_table,
        request * query_len, first_row, query_len * heads, heads, cache_length, kv_len,
        tl.zeros([], tl.int32), kv_len, None, score_scale,
        stride_q_token, stride_q_head, stride_latent_page, stride_rope_page, stride_scales_page,
        stride_out_token, stride_out_head,
        STRIDE_LATENT_SLOT, STRIDE_ROPE_SLOT, STRIDE_SCALES_SLOT, STRIDE_SCALES_GROUP, LATENT, ROPE, FP8_LATENT,
        FP8_ROPE, GROUP, GROUPS, ROPE_SCALED, E8M0, PAGE_SIZE, CAUSAL, ROWS, TILE, CHUNK, ROPE_CHUNK, LATENT_MMA,
        ROPE_MMA, SPLIT_QUERIES, PRECISION, DEQUANTISE, NATIVE_E4M3, HOIST, PREFETCH, PREFETCH_ROPE,
    )  # fmt: skip
