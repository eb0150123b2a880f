"""Mixed: absorbed attention of a ragged step over the paged cache; decode, speculative and prompt rows in one launch.

contract   q [T, H, L + 64]; request b owns query tokens query_start_loc[b] .. query_start_loc[b + 1] - 1, of which
           token i stands at cache_lengths[b] + i and, causally, sees the keys at or before itself. The step's own
           tokens are in the cache. out [T, H, L], lse [T, H] (float32, natural). Tokens past query_start_loc[B]: out 0,
           lse -inf; tokens before query_start_loc[0] aren't touched, so that a step's decode rows and its prompts can
           be two launches. Table columns and slots past a request's last key aren't read
meaning    reference/attention.py
grid       (T * H // ROWS + B + 1,): as many tiles of rows as capacities allow, whatever the lengths; see
           device/requests.py. Where lengths differ, or requests are few, pieces.py keeps the machine busy
cost       docs/kernels/decode_triton.md
limits     latent 512 or 256; rope 64; query dtypes bf16 and fp16, and float32 for unquantised caches
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from pagedmla.kv_cache.checks import expect_same_device
from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.triton_kernels.attending import build_options, check_call, strides
from pagedmla.triton_kernels.device.attention import attend_rows
from pagedmla.triton_kernels.device.requests import find_request, first_tile
from pagedmla.triton_kernels.device.uniform import make_uniform
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import as_bytes, as_int32


def attend_mixed(
    q: Tensor,
    planes: RowPlanes,
    lookup_table: Tensor,
    cache_lengths: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor,
    scales_lookup_table: Tensor | None = None,
    *,
    sm_scale: float,
    max_query_len: int,
    causal: bool = True,
) -> None:
    """Attend, and write `out` and `lse` (see the top of this file).

    lookup_table, scales_lookup_table [B, W] int32 or uint32; cache_lengths [B], query_start_loc [B + 1] int32 or
    uint32. `max_query_len` bounds the query tokens of a request; it chooses the tile, any number is right. Without a
    table of their own the scales follow lookup_table.
    """
    lengths = as_int32(cache_lengths, "cache_lengths", [None])
    requests = lengths.shape[0]
    start_loc = as_int32(query_start_loc, "query_start_loc", [requests + 1])
    tables = check_call(q, planes, lookup_table, scales_lookup_table, requests, out, lse)
    expect_same_device(q, "q", cache_lengths=lengths, query_start_loc=start_loc)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    compiled = build_options(q, planes, causal, max_query_len * heads)
    launch(
        mixed_kernel,
        (tokens * heads // compiled["ROWS"] + requests + 1,),
        out,
        lse,
        q,
        as_bytes(planes.latent),
        as_bytes(planes.rope),
        as_bytes(planes.scales),
        *tables,
        lengths,
        start_loc,
        requests,
        tokens,
        heads,
        sm_scale * math.log2(math.e),
        *strides(q, planes, tables, out),
        **compiled,
    )


@triton.jit(
    do_not_specialize=[
        "lse", "lookup_table", "scales_lookup_table", "cache_lengths", "query_start_loc", "requests", "tokens",
        "heads", "stride_table", "stride_scales_table",
    ]
)  # fmt: skip
def mixed_kernel(
    out, lse, q, latent, rope, scales, lookup_table, scales_lookup_table, cache_lengths, query_start_loc,
    requests, tokens, heads, score_scale,
    stride_table, stride_scales_table, stride_q_token, stride_q_head,
    stride_latent_page, stride_rope_page, stride_scales_page,
    stride_out_token, stride_out_head,
    STRIDE_LATENT_SLOT: tl.constexpr, STRIDE_ROPE_SLOT: tl.constexpr, STRIDE_SCALES_SLOT: tl.constexpr,
    STRIDE_SCALES_GROUP: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROPE_SCALED: tl.constexpr, E8M0: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, ROPE_CHUNK: tl.constexpr, LATENT_MMA: tl.constexpr,
    ROPE_MMA: tl.constexpr, SPLIT_QUERIES: tl.constexpr, PRECISION: tl.constexpr, DEQUANTISE: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, HOIST: tl.constexpr, PREFETCH: tl.constexpr, PREFETCH_ROPE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    request = find_request(query_start_loc, tile, requests, heads, ROWS)
    first_row = (tile - first_tile(query_start_loc, request, heads, ROWS)) * ROWS
    first_token = tl.load(query_start_loc + request)
    # The rows past the last request form one more, which has no keys.
    real = request < requests
    last_token = tl.load(query_start_loc + request + 1, mask=real, other=0)
    last_token = tl.where(real, last_token, tokens)
    query_len = last_token - first_token
    cache_length = tl.load(cache_lengths + request, mask=real, other=0)
    kv_len = tl.where(real, tl.maximum(cache_length + query_len, 0), 0)
    if make_uniform(query_len * heads - first_row) > 0:
        attend_rows(
            out, lse, None, None, q, latent, rope, scales,
            lookup_table + request.to(tl.int64) * stride_table,
            scales_lookup_table + request.to(tl.int64) * stride_scales_table,
            first_token, first_row, query_len * heads, heads, cache_length, kv_len,
            tl.zeros([], tl.int32), kv_len, None, score_scale,
            stride_q_token, stride_q_head, stride_latent_page, stride_rope_page, stride_scales_page,
            stride_out_token, stride_out_head,
            STRIDE_LATENT_SLOT, STRIDE_ROPE_SLOT, STRIDE_SCALES_SLOT, STRIDE_SCALES_GROUP, LATENT, ROPE, FP8_LATENT,
            FP8_ROPE, GROUP, GROUPS, ROPE_SCALED, E8M0, PAGE_SIZE, CAUSAL, ROWS, TILE, CHUNK, ROPE_CHUNK, LATENT_MMA,
            ROPE_MMA, SPLIT_QUERIES, PRECISION, DEQUANTISE, NATIVE_E4M3, HOIST, PREFETCH, PREFETCH_ROPE,
        )  # fmt: skip
