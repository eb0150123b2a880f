"""Prefill: ragged multi-head attention on dense keys and values, causal or not, with LSE.

contract   q [T, H, DK], k [K, HK, DK], v [K, HK, DV] of one dtype (bf16/fp16/float32), HK a divisor of H (query head h
           reads key head h // (H // HK)); request b owns tokens query_start_loc[b] .. query_start_loc[b + 1] and keys
           key_start_loc[b] .. key_start_loc[b + 1]. Causal: the last query sees all keys, each before it one less.
           Writes out [T, H, DV] and, if given, lse [T, H] float32 (natural log of the sum of exp(sm_scale * q.k))
meaning    softmax(sm_scale * q k^T) v in float32; p is rounded to v's dtype for the second product
empty      a row that sees no key, and tokens past query_start_loc[B]: out 0, lse -inf
grid       (T // 128 + B + 1, H) tiles of rows, last first: under a causal mask those have the most to do
cost       2 (DK + DV) FLOPs a (query, key, head), half of them masked away: 640 at 192 / 128
limits     DK and DV at most 256; columns adjacent. NaN in a value also reaches rows of its tile that don't see it,
           since 0 * NaN is NaN. No scales: 8-bit caches go through decompress first

A prompt with a cached context is computed in pieces: its own keys causally, then chunks of the context without a mask
(every query sees them whole), each with its LSE, and the pieces go through merge.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedmla.hardware.targets import Target, target_of
from pagedmla.kv_cache.checks import expect_same_device, expect_tensor, refuse
from pagedmla.triton_kernels.device.requests import find_request, first_tile
from pagedmla.triton_kernels.launch import launch
from pagedmla.triton_kernels.planes import WIDE_DTYPES, as_int32
from pagedmla.triton_kernels.tiles import float32_precision

_MAX_COLUMNS = 256


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    sm_scale: float,
    causal: bool = True,
) -> None:
    """Attention of every request's queries to its keys (see the top of this file). T, K and B may be 0."""
    expect_tensor(q, "q", [None, None, None], WIDE_DTYPES)
    tokens, heads, key_columns = q.shape
    expect_tensor(k, "k", [None, None, key_columns], [q.dtype])
    expect_tensor(v, "v", [k.shape[0], k.shape[1], None], [q.dtype])
    value_columns = v.shape[2]
    expect_tensor(out, "out", [tokens, heads, value_columns], WIDE_DTYPES)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            refuse(name, "adjacent columns (stride(2) 1)", tensor.stride())
        if not 1 <= tensor.shape[2] <= _MAX_COLUMNS:
            refuse(name, f"1 to {_MAX_COLUMNS} columns", tensor)
    if lse is not None:
        expect_tensor(lse, "lse", [tokens, heads], [torch.float32])
    if k.shape[1] == 0 or heads % k.shape[1]:
        refuse("k", f"a number of heads that divides q's {heads}", k)
    start_loc = as_int32(query_start_loc, "query_start_loc", [None])
    requests = start_loc.shape[0] - 1
    if requests < 0:
        refuse("query_start_loc", "[B + 1], at least one number", query_start_loc)
    key_loc = as_int32(key_start_loc, "key_start_loc", [requests + 1])
    expect_same_device(q, "q", k=k, v=v, out=out, lse=lse, query_start_loc=start_loc, key_start_loc=key_loc)
    if tokens == 0 or heads == 0:
        return
    known = prefill_options(q.dtype, key_columns, value_columns, causal, target_of(q.device))
    launch(
        prefill_kernel,
        (tokens // known["BLOCK_M"] + requests + 1, heads),
        q,
        k,
        v,
        start_loc,
        key_loc,
        out,
        lse,
        requests,
        tokens,
        heads // k.shape[1],
        sm_scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        **known,
    )


def prefill_options(
    dtype: torch.dtype, key_columns: int, value_columns: int, causal: bool, target: Target
) -> dict[str, Any]:
    """Constants and launch options of the kernel on a GPU.

    Columns go in two parts, powers of two, so that 192 costs 128 + 64, not 256. The tile is the first that fits: q, and
    keys and values once a stage.
    """
    key_parts, value_parts = split_columns(key_columns), split_columns(value_columns)
    block_m, block_n, stages = _choose_tile(dtype.itemsize, sum(key_parts), sum(value_parts), target.shared_per_block)
    return {
        "KEY_COLUMNS": key_columns,
        "KEY_HEAD": key_parts[0],
        "KEY_TAIL": key_parts[1],
        "VALUE_COLUMNS": value_columns,
        "VALUE_HEAD": value_parts[0],
        "VALUE_TAIL": value_parts[1],
        "CAUSAL": causal,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "PRECISION": float32_precision(target),
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": stages,
    }


def _choose_tile(itemsize: int, key_columns: int, value_columns: int, shared_bytes: int) -> tuple[int, int, int]:
    tiles = [(64, 32, 2), (64, 32, 1)]
    if itemsize == 2:
        tiles = [(128, 128, 2), (128, 64, 2), (128, 64, 1), (64, 64, 1), (64, 32, 1)]
    else:
        itemsize *= 2  # a float32 product is three of parts, which are staged too: up to 1.7 times as much was seen
    for rows, keys, stages in tiles:
        if (rows * key_columns + stages * keys * (key_columns + value_columns)) * itemsize <= shared_bytes:
            return rows, keys, stages
    return 32, 32, 1


def split_columns(columns: int) -> tuple[int, int]:
    """Two powers of two of at least 16 (or 0 for the second) that hold `columns`, with the least waste."""
    whole = max(16, triton.next_power_of_2(columns))
    head = whole // 2
    tail = max(16, triton.next_power_of_2(columns - head)) if head >= 16 else 0
    return (head, tail) if tail and head + tail < whole else (whole, 0)


@triton.jit(
    do_not_specialize=[
        "query_start_loc", "key_start_loc", "lse", "requests", "tokens", "heads_per_key_head", "stride_lse_token",
        "stride_lse_head",
    ]
)  # fmt: skip
def prefill_kernel(
    q,  # [T, H, DK]
    k,  # [K, HK, DK]
    v,  # [K, HK, DV]
    query_start_loc,  # [B + 1] int32
    key_start_loc,  # [B + 1] int32
    out,  # [T, H, DV]
    lse,  # [T, H] float32, or None
    requests,
    tokens,
    heads_per_key_head,
    sm_scale,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    KEY_COLUMNS: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_TAIL: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    key_head = head // heads_per_key_head
    request = find_request(query_start_loc, tile, requests, 1, BLOCK_M)
    real_request = request < requests
    first_query = tl.load(query_start_loc + request)
    last_query = tl.load(query_start_loc + request + 1, mask=real_request, other=tokens)
    first_key = tl.load(key_start_loc + request)
    keys = tl.load(key_start_loc + request + 1, mask=real_request, other=first_key) - first_key
    first_row = (tile - first_tile(query_start_loc, request, 1, BLOCK_M)) * BLOCK_M
    if first_query + first_row >= last_query:
        return

    row = first_row + tl.arange(0, BLOCK_M)  # of the request
    real = first_query + row < last_query
    limit = tl.zeros([BLOCK_M], tl.int32) + keys  # a row sees keys [0, limit)
    whole = keys  # keys that all rows of the tile see
    seen = keys  # keys that some row sees
    if CAUSAL:
        offset = keys - (last_query - first_query)
        limit = tl.minimum(offset + row + 1, keys)
        whole = tl.minimum(tl.maximum(offset + first_row + 1, 0), keys)
        seen = tl.minimum(tl.maximum(offset + first_row + BLOCK_M, 0), keys)
    whole = whole // BLOCK_N * BLOCK_N

    token = (first_query + row).to(tl.int64)
    q_rows = q + token * stride_q_token + head * stride_q_head
    q_head = _load_columns(q_rows, real, 0, KEY_HEAD, KEY_COLUMNS)  # [BLOCK_M, KEY_HEAD]
    q_tail = q_head
    if KEY_TAIL:
        q_tail = _load_columns(q_rows, real, KEY_HEAD, KEY_TAIL, KEY_COLUMNS)  # [BLOCK_M, KEY_TAIL]
    k += first_key.to(tl.int64) * stride_k_token + key_head * stride_k_head
    v += first_key.to(tl.int64) * stride_v_token + key_head * stride_v_head

    scale = sm_scale * 1.4426950408889634  # logits in base 2
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc_head = tl.zeros([BLOCK_M, VALUE_HEAD], tl.float32)
    acc_tail = tl.zeros([BLOCK_M, VALUE_TAIL if VALUE_TAIL else 16], tl.float32)
    for first in range(0, whole, BLOCK_N):
        acc_head, acc_tail, largest, weight = _attend(
            q_head, q_tail, acc_head, acc_tail, largest, weight, k, v, first, limit, seen, scale, stride_k_token,
            stride_v_token, KEY_COLUMNS, KEY_HEAD, KEY_TAIL, VALUE_COLUMNS, VALUE_HEAD, VALUE_TAIL, BLOCK_N,
            PRECISION, False,
        )  # fmt: skip
    for first in range(whole, seen, BLOCK_N):
        acc_head, acc_tail, largest, weight = _attend(
            q_head, q_tail, acc_head, acc_tail, largest, weight, k, v, first, limit, seen, scale, stride_k_token,
            stride_v_token, KEY_COLUMNS, KEY_HEAD, KEY_TAIL, VALUE_COLUMNS, VALUE_HEAD, VALUE_TAIL, BLOCK_N,
            PRECISION, True,
        )  # fmt: skip

    empty = weight == 0.0
    divisor = tl.where(empty, 1.0, weight)
    out_rows = out + token * stride_out_token + head * stride_out_head
    _store_columns(out_rows, acc_head / divisor[:, None], real, 0, VALUE_HEAD, VALUE_COLUMNS)
    if VALUE_TAIL:
        _store_columns(out_rows, acc_tail / divisor[:, None], real, VALUE_HEAD, VALUE_TAIL, VALUE_COLUMNS)
    if lse is not None:
        natural = (largest + tl.log2(divisor)) * 0.6931471805599453
        lse_rows = lse + token * stride_lse_token + head * stride_lse_head
        tl.store(lse_rows, tl.where(empty, float("-inf"), natural), mask=real)


@triton.jit
def _attend(
    q_head,
    q_tail,
    acc_head,
    acc_tail,
    largest,
    weight,
    k,
    v,
    first,
    limit,
    seen,
    scale,
    stride_k_token,
    stride_v_token,
    KEY_COLUMNS: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_TAIL: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys: scores, online softmax, values."""
    key = first + tl.arange(0, BLOCK_N)
    readable = key < seen
    if not MASKED:
        readable = key >= 0
    k_rows = k + key.to(tl.int64) * stride_k_token
    v_rows = v + key.to(tl.int64) * stride_v_token
    k_head = _load_columns(k_rows, readable, 0, KEY_HEAD, KEY_COLUMNS)  # [BLOCK_N, KEY_HEAD]
    score = tl.dot(q_head, tl.trans(k_head), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if KEY_TAIL:
        k_tail = _load_columns(k_rows, readable, KEY_HEAD, KEY_TAIL, KEY_COLUMNS)  # [BLOCK_N, KEY_TAIL]
        score = tl.dot(q_tail, tl.trans(k_tail), score, input_precision=PRECISION)
    score *= scale
    if MASKED:
        score = tl.where(key[None, :] < limit[:, None], score, float("-inf"))
    highest = tl.maximum(largest, tl.max(score, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest  # -inf - -inf is NaN
    fade = tl.exp2(largest - shift)
    p = tl.exp2(score - shift[:, None])
    weight = weight * fade + tl.sum(p, 1)
    v_head = _load_columns(v_rows, readable, 0, VALUE_HEAD, VALUE_COLUMNS)  # [BLOCK_N, VALUE_HEAD]
    acc_head = tl.dot(p.to(v_head.dtype), v_head, acc_head * fade[:, None], input_precision=PRECISION)
    if VALUE_TAIL:
        v_tail = _load_columns(v_rows, readable, VALUE_HEAD, VALUE_TAIL, VALUE_COLUMNS)  # [BLOCK_N, VALUE_TAIL]
        acc_tail = tl.dot(p.to(v_tail.dtype), v_tail, acc_tail * fade[:, None], input_precision=PRECISION)
    return acc_head, acc_tail, highest, weight


@triton.jit
def _load_columns(rows, readable, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns [first, first + COUNT) of some rows; 0 past COLUMNS and in rows that mustn't be read."""
    column = first + tl.arange(0, COUNT)
    return tl.load(rows[:, None] + column[None, :], mask=readable[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _store_columns(rows, values, writable, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Write columns [first, first + COUNT) of some rows, as far as there are columns."""
    column = first + tl.arange(0, COUNT)
    mask = writable[:, None] & (column < COLUMNS)[None, :]
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)
