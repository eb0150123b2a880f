"""Absorbed attention of one tile of query rows over the pages of one request.

meaning   reference/attention.py: scores = sm_scale * q . k, online softmax, out = p . v, where the value is the key's
          latent part

The MMAs run transposed, scores^T [TILE, ROWS] = K Q^T and out^T [LATENT, ROWS] = V^T P^T: keys and columns, of which
there are many, are the M of the instruction and rows its N. Sixteen rows then use Hopper's warpgroup MMA without
padding, and everything that is done once a score is done on TILE * ROWS elements and not on a tile padded to 64 rows.

Scales never touch elements. Column chunks that share a sigma are one MMA chain; its scores are multiplied by that
sigma [TILE], and its values by a P that carries it (softmax.py).

With PREFETCH the loop fetches the next tile's bytes before it works on this one and widens them to float16 last. The
widened tile crosses the back edge in registers, which is what lets Triton stage it once in shared memory for both
MMAs: an operand that is computed inside the loop body would be loaded back into registers for each.
"""
# ruff: noqa: RUF005  Triton knows no starred expressions.

import triton
import triton.language as tl

from pagedmla.triton_kernels.device.cache_rows import fetch_columns, widen_columns
from pagedmla.triton_kernels.device.masks import key_limits, mask_scores
from pagedmla.triton_kernels.device.pages import find_pages, row_offsets
from pagedmla.triton_kernels.device.pieces import (
    CACHE_LENGTH,
    FIRST_ROW,
    FIRST_TOKEN,
    ROW_COUNT,
    SLOT,
    read_again,
)
from pagedmla.triton_kernels.device.rows import fold_row, load_columns, power_of_two, row_exponent
from pagedmla.triton_kernels.device.scales import fetch_column_sigma, fetch_sigma, largest_sigma
from pagedmla.triton_kernels.device.softmax import advance_peak, decay, finite_or_zero
from pagedmla.triton_kernels.device.uniform import make_uniform

FEW_SCALES: tl.constexpr = tl.constexpr(5)  # a token: groups of 128
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_rows(
    out,  # [T, H, LATENT]
    lse,  # [T, H] float32, heads and tokens adjacent
    states,  # [slots, ROWS, LATENT] float32, or None
    state_lse,  # [slots, ROWS] float32, or None
    q,  # [T, H, LATENT + ROPE]
    latent,  # [pages, PAGE_SIZE, LATENT]
    rope,  # [pages, PAGE_SIZE, ROPE]
    scales,  # [scale_pages, PAGE_SIZE, groups], or None
    table_row,  # [W] of this request
    scales_table_row,  # [W]
    first_token,  # the request's first query token, an index of T
    first_row,  # this tile's first row within the request
    row_count,  # the request's query tokens * heads
    heads,
    cache_length,
    kv_len,
    begin,  # the keys of this program, a multiple of TILE ..
    end,  # .. and the first that isn't one of them
    piece,  # pointer to the record (pieces.py) that all of this comes from, or None: then the result is whole
    score_scale,  # sm_scale * log2(e)
    stride_q_token,
    stride_q_head,
    stride_latent_page,
    stride_rope_page,
    stride_scales_page,
    stride_out_token,
    stride_out_head,
    STRIDE_LATENT_SLOT: tl.constexpr,
    STRIDE_ROPE_SLOT: tl.constexpr,
    STRIDE_SCALES_SLOT: tl.constexpr,
    STRIDE_SCALES_GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FP8_LATENT: tl.constexpr,
    FP8_ROPE: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    GROUPS: tl.constexpr,  # scales a row; 0: none
    ROPE_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # keys
    CHUNK: tl.constexpr,  # latent columns of one MMA chain; divides LATENT, and GROUP unless that spans the row
    ROPE_CHUNK: tl.constexpr,
    LATENT_MMA: tl.constexpr,  # element type of the MMAs over latent columns: "float16", "bfloat16" or "float32"
    ROPE_MMA: tl.constexpr,
    SPLIT_QUERIES: tl.constexpr,  # float16 ones in two parts for bfloat16 MMAs
    PRECISION: tl.constexpr,  # of float32 MMAs
    DEQUANTISE: tl.constexpr,  # multiply elements by their scales, for groups that no chunk fits
    NATIVE_E4M3: tl.constexpr,
    HOIST: tl.constexpr,  # the loop's invariants
    PREFETCH: tl.constexpr,
    PREFETCH_ROPE: tl.constexpr,
):
    CHUNKS: tl.constexpr = LATENT // CHUNK
    ROPE_CHUNKS: tl.constexpr = ROPE // ROPE_CHUNK
    FOLDED: tl.constexpr = 0 if DEQUANTISE else GROUPS  # scales that scores and weights take
    LATENT_SCALES: tl.constexpr = (LATENT + GROUP - 1) // GROUP
    HEADROOM: tl.constexpr = 16384.0 if LATENT_MMA == "float16" else 1.0
    # Many rows or many scales leave no registers for the next tile's bytes until the scores are done.
    FETCH_LATE: tl.constexpr = PREFETCH and (ROWS == 64 or FOLDED > FEW_SCALES)
    # ptxas 12.8 loses WGMMA descriptors where the loop reuses one operand's shared memory for another
    # (hardware/unwritten.py finds it). Three forms keep it from that: a rope that passes through registers, weights
    # that are all made before the value MMAs, and, in float32, hoisted invariants. What they don't
    # cure, tiles.py keeps out of its tiles.
    WARPGROUPS: tl.constexpr = TILE == 64
    ROPE_BITS: tl.constexpr = WARPGROUPS and ROWS == 16 and FOLDED > 0 and not FP8_ROPE
    WEIGHTS_FIRST: tl.constexpr = WARPGROUPS and ROWS == 16 and FOLDED <= FEW_SCALES
    LATENT_TYPE: tl.constexpr = (
        tl.float16 if LATENT_MMA == "float16" else tl.bfloat16 if LATENT_MMA == "bfloat16" else tl.float32
    )
    ROPE_TYPE: tl.constexpr = (
        tl.float16 if ROPE_MMA == "float16" else tl.bfloat16 if ROPE_MMA == "bfloat16" else tl.float32
    )

    if ROPE_BITS:
        rope = rope.to(tl.pointer_type(tl.int16), bitcast=True)
    token, head, valid = fold_row(first_row, row_count, heads, ROWS)
    limits = key_limits(token, valid, cache_length, kv_len, CAUSAL)
    end = make_uniform(tl.minimum(end, tl.max(limits, 0)))
    seen_by_all = make_uniform(tl.minimum(end, tl.min(tl.where(valid, limits, end), 0)))
    if PREFETCH:
        begin = make_uniform(begin)

    q_offsets = (first_token + token).to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
    q_latent, q_rope, row_scale, rope_ratio = load_queries(
        q, q_offsets, valid, LATENT, ROPE, CHUNK, ROPE_CHUNK, ROWS, LATENT_TYPE, ROPE_TYPE, SPLIT_QUERIES
    )
    row_scale *= score_scale
    uneven = make_uniform(tl.max((rope_ratio != 1.0).to(tl.int32), 0)) != 0  # in a row, latent and rope

    out_t = ()
    for _ in tl.static_range(CHUNKS):
        out_t = out_t + (tl.zeros([CHUNK, ROWS], tl.float32),)
    total = tl.zeros([TILE // 16, 8, ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)

    pages = find_pages(table_row, begin, end, TILE, PAGE_SIZE)
    if GROUPS > 0:
        scale_pages = find_pages(scales_table_row, begin, end, TILE, PAGE_SIZE)
    if PREFETCH:
        fetched = fetch_rows(
            latent, pages, begin, end, stride_latent_page, STRIDE_LATENT_SLOT, TILE, PAGE_SIZE, LATENT, CHUNK
        )
        keys = widen_columns(fetched, CHUNKS, FP8_LATENT, NATIVE_E4M3, LATENT_TYPE)
        if PREFETCH_ROPE:
            fetched_rope = fetch_rows(
                rope, pages, begin, end, stride_rope_page, STRIDE_ROPE_SLOT, TILE, PAGE_SIZE, ROPE, ROPE_CHUNK
            )
            rope_keys = widen_columns(fetched_rope, ROPE_CHUNKS, FP8_ROPE, NATIVE_E4M3, ROPE_TYPE)
        next_pages = find_pages(table_row, begin + TILE, end, TILE, PAGE_SIZE)

    # Hoisted invariants spill, and in float32 descriptors are lost without (see above).
    for start in tl.range(begin, end, TILE, disable_licm=not HOIST):
        if PREFETCH and not FETCH_LATE:
            fetched = fetch_rows(
                latent,
                next_pages,
                start + TILE,
                end,
                stride_latent_page,
                STRIDE_LATENT_SLOT,
                TILE,
                PAGE_SIZE,
                LATENT,
                CHUNK,
            )
        if not PREFETCH:
            fetched = fetch_rows(
                latent, pages, start, end, stride_latent_page, STRIDE_LATENT_SLOT, TILE, PAGE_SIZE, LATENT, CHUNK
            )
            keys = widen_columns(fetched, CHUNKS, FP8_LATENT, NATIVE_E4M3, LATENT_TYPE)
        if PREFETCH_ROPE:
            fetched_rope = fetch_rows(
                rope,
                next_pages,
                start + TILE,
                end,
                stride_rope_page,
                STRIDE_ROPE_SLOT,
                TILE,
                PAGE_SIZE,
                ROPE,
                ROPE_CHUNK,
            )
        else:
            fetched_rope = fetch_rows(
                rope, pages, start, end, stride_rope_page, STRIDE_ROPE_SLOT, TILE, PAGE_SIZE, ROPE, ROPE_CHUNK
            )
            rope_keys = widen_columns(fetched_rope, ROPE_CHUNKS, FP8_ROPE, NATIVE_E4M3, ROPE_TYPE, ROPE_BITS)
        if DEQUANTISE:
            keys, rope_keys = dequantise_tile(
                keys, rope_keys, scales, scale_pages, start, end, stride_scales_page, STRIDE_SCALES_SLOT,
                STRIDE_SCALES_GROUP, TILE, PAGE_SIZE, LATENT, CHUNK, CHUNKS, ROPE_CHUNK, ROPE_CHUNKS, ROPE_SCALED,
                GROUP, E8M0,
            )  # fmt: skip
        sigma = ()
        if FOLDED > 0:
            base, offsets = row_offsets(scale_pages, start, stride_scales_page, STRIDE_SCALES_SLOT, TILE, PAGE_SIZE)
            live = start + tl.arange(0, TILE) < end
            sigma = fetch_sigma(scales + base, offsets, live, STRIDE_SCALES_GROUP, FOLDED, E8M0)
        if PREFETCH:
            pages = next_pages
            next_pages = find_pages(table_row, start + 2 * TILE, end, TILE, PAGE_SIZE)
        else:
            pages = find_pages(table_row, start + TILE, end, TILE, PAGE_SIZE)
        if GROUPS > 0:
            scale_pages = find_pages(scales_table_row, start + TILE, end, TILE, PAGE_SIZE)

        scores = score_tile(
            keys, rope_keys, q_latent, q_rope, rope_ratio, uneven, sigma,
            LATENT, CHUNK, CHUNKS, ROPE_CHUNK, ROPE_CHUNKS, ROWS, TILE, GROUP, FOLDED, ROPE_SCALED, PRECISION,
        )  # fmt: skip
        scores *= row_scale[None, :]
        if start + TILE > seen_by_all:
            scores = mask_scores(
                scores, start, read_again(piece, FIRST_ROW, first_row), heads,
                read_again(piece, CACHE_LENGTH, cache_length), kv_len, CAUSAL, ROWS, TILE,
            )  # fmt: skip

        weighted = scores
        if FOLDED > 0:
            weighted = scores + tl.log2(largest_sigma(sigma, LATENT_SCALES))[:, None]
        new_peak = advance_peak(weighted, peak)
        shrink = decay(peak, new_peak)[None, :]
        peak = new_peak
        shrunk = ()
        for chunk in tl.static_range(CHUNKS):
            shrunk = shrunk + (out_t[chunk] * shrink,)
        p = tl.exp2(scores - finite_or_zero(peak)[None, :])
        total = total * shrink[None, :, :] + tl.sum(tl.reshape(p, [TILE // 16, 2, 8, ROWS]), 1)
        if FETCH_LATE:
            fetched = fetch_rows(
                latent, pages, start + TILE, end, stride_latent_page, STRIDE_LATENT_SLOT, TILE, PAGE_SIZE, LATENT, CHUNK
            )
        out_t = add_values(
            shrunk, keys, p, sigma, CHUNK, CHUNKS, GROUP, FOLDED, HEADROOM, LATENT_TYPE, PRECISION, WEIGHTS_FIRST
        )

        if PREFETCH:
            keys = widen_columns(fetched, CHUNKS, FP8_LATENT, NATIVE_E4M3, LATENT_TYPE)
        if PREFETCH_ROPE:
            rope_keys = widen_columns(fetched_rope, ROPE_CHUNKS, FP8_ROPE, NATIVE_E4M3, ROPE_TYPE)

    total = tl.sum(tl.sum(total, 0), 0)
    unit = tl.where(total == 0.0, 0.0, 1.0 / (total * HEADROOM))
    state = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN2)
    token, head, valid = fold_row(
        read_again(piece, FIRST_ROW, first_row), read_again(piece, ROW_COUNT, row_count), heads, ROWS
    )
    first_token = read_again(piece, FIRST_TOKEN, first_token)
    if piece is not None:
        slot = tl.load(piece + SLOT)
        if slot >= 0:
            place = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            tl.store(state_lse + place, state, mask=valid)
            store_columns(states, place * LATENT, out_t, unit, valid, CHUNK, CHUNKS)
        else:
            store_rows(
                out, lse, state, out_t, unit, first_token + token, head, valid, heads, stride_out_token,
                stride_out_head, CHUNK, CHUNKS,
            )  # fmt: skip
    else:
        store_rows(
            out, lse, state, out_t, unit, first_token + token, head, valid, heads, stride_out_token, stride_out_head,
            CHUNK, CHUNKS,
        )  # fmt: skip


@triton.jit
def store_rows(
    out, lse, state, out_t, unit, token, head, valid, heads, stride_token, stride_head,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The rows' results to their tokens and heads."""
    row = token.to(tl.int64)
    tl.store(lse + row * heads + head, state, mask=valid)
    store_columns(out, row * stride_token + head.to(tl.int64) * stride_head, out_t, unit, valid, CHUNK, CHUNKS)


@triton.jit
def store_columns(out, offsets, out_t, unit, valid, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """out_t [CHUNK, ROWS] * unit [ROWS], chunk by chunk, to the rows that start at `offsets`."""
    for chunk in tl.static_range(CHUNKS):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        result = (out_t[chunk] * unit[None, :]).to(out.dtype.element_ty)
        tl.store(out + offsets[None, :] + column[:, None], result, mask=valid[None, :])


@triton.jit
def load_queries(
    q, offsets, valid,
    LATENT: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, ROPE_CHUNK: tl.constexpr, ROWS: tl.constexpr,
    LATENT_TYPE: tl.constexpr, ROPE_TYPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`(latent chunks [CHUNK, ROWS], rope chunks [ROPE_CHUNK, ROWS], scale [ROWS], rope's ratio [ROWS])`; a query's
    latent is chunk * scale, its rope chunk * scale * ratio.

    For float16 MMAs the latent and the rope of a row are each multiplied by the power of two that brings their largest
    magnitude to 2^13: exact, and nothing within 2^-27 of the largest loses a bit to float16's range. A bfloat16 rope
    has float32's range and takes the latent's power. Float16 queries for bfloat16 MMAs are the sum of two chunks, which
    hold their 11 bits as 8 and 3.
    """
    latent = ()
    rope = ()
    latent_amax = tl.zeros([ROWS], tl.float32)
    rope_amax = tl.zeros([ROWS], tl.float32)
    for chunk in tl.static_range(LATENT // CHUNK):
        latent = latent + (load_columns(q, offsets, valid, chunk * CHUNK, CHUNK).to(tl.float32),)
        latent_amax = tl.maximum(latent_amax, tl.max(tl.abs(latent[chunk]), 0))
    for chunk in tl.static_range(ROPE // ROPE_CHUNK):
        rope = rope + (load_columns(q, offsets, valid, LATENT + chunk * ROPE_CHUNK, ROPE_CHUNK).to(tl.float32),)
        rope_amax = tl.maximum(rope_amax, tl.max(tl.abs(rope[chunk]), 0))
    scale = tl.full([ROWS], 1.0, tl.float32)
    ratio = scale
    latent_up = scale
    rope_up = scale
    if LATENT_TYPE == tl.float16:
        # Kept within 2^64 of each other, so that neither's scores overflow.
        rope_shift = row_exponent(rope_amax)
        shift = tl.minimum(row_exponent(latent_amax), rope_shift + 64)
        latent_up = power_of_two(shift)
        scale = power_of_two(-shift)
        rope_up = latent_up
        if ROPE_TYPE == tl.float16:
            rope_shift = tl.minimum(rope_shift, shift + 64)
            rope_up = power_of_two(rope_shift)
            ratio = power_of_two(shift - rope_shift)
    scaled_latent = ()
    scaled_rope = ()
    for chunk in tl.static_range(LATENT // CHUNK):
        scaled_latent = scaled_latent + narrow(latent[chunk] * latent_up[None, :], LATENT_TYPE, SPLIT)
    for chunk in tl.static_range(ROPE // ROPE_CHUNK):
        scaled_rope = scaled_rope + narrow(rope[chunk] * rope_up[None, :], ROPE_TYPE, SPLIT)
    return scaled_latent, scaled_rope, scale, ratio


@triton.jit
def narrow(x, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """A tuple of tensors in `dtype` whose sum is x: one, or for bfloat16 with SPLIT the two that hold 16 bits of it."""
    high = x.to(dtype)
    if SPLIT and dtype == tl.bfloat16:
        return high, (x - high.to(tl.float32)).to(dtype)
    else:
        return (high,)


@triton.jit
def fetch_rows(
    plane, pages, start, end, stride_page,
    STRIDE_SLOT: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rows of tokens `start .. start + TILE`, those before `end`, as chunks of columns; see cache_rows.py."""
    base, offsets = row_offsets(pages, start, stride_page, STRIDE_SLOT, TILE, PAGE_SIZE)
    return fetch_columns(plane + base, offsets, start + tl.arange(0, TILE) < end, COLUMNS, CHUNK)


@triton.jit
def dequantise_tile(
    keys, rope_keys, scales, scale_pages, start, end, stride_page, STRIDE_SLOT: tl.constexpr,
    STRIDE_GROUP: tl.constexpr,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ROPE_CHUNK: tl.constexpr, ROPE_CHUNKS: tl.constexpr, ROPE_SCALED: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr,
):  # fmt: skip
    """Float32 chunks multiplied by the scale of each element: the way out for groups that no MMA chunk fits."""
    live = start + tl.arange(0, TILE) < end
    base, offsets = row_offsets(scale_pages, start, stride_page, STRIDE_SLOT, TILE, PAGE_SIZE)
    latent_values = ()
    rope_values = ()
    for chunk in tl.static_range(CHUNKS):
        sigma = fetch_column_sigma(scales + base, offsets, live, STRIDE_GROUP, chunk * CHUNK, CHUNK, GROUP, E8M0)
        latent_values = latent_values + (keys[chunk] * sigma,)
    for chunk in tl.static_range(ROPE_CHUNKS):
        value = rope_keys[chunk]
        if ROPE_SCALED:
            value *= fetch_column_sigma(
                scales + base, offsets, live, STRIDE_GROUP, LATENT + chunk * ROPE_CHUNK, ROPE_CHUNK, GROUP, E8M0
            )
        rope_values = rope_values + (value,)
    return latent_values, rope_values


@triton.jit
def score_tile(
    keys, rope_keys, q_latent, q_rope, rope_ratio, uneven, sigma,
    LATENT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROPE_CHUNK: tl.constexpr,
    ROPE_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr, ROPE_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k, float32 [TILE, ROWS], up to the rows' scale: columns that share a sigma together, the rest apart."""
    WIDTH: tl.constexpr = LATENT + ROPE_CHUNK * ROPE_CHUNKS
    BRANCH: tl.constexpr = ROWS == 64 and FOLDED != 1
    scores = tl.zeros([TILE, ROWS], tl.float32)
    if FOLDED == 0 or not ROPE_SCALED:
        scores = score_columns(
            keys, rope_keys, q_latent, q_rope, rope_ratio, uneven, LATENT, CHUNK, CHUNKS, ROPE_CHUNK, ROPE_CHUNKS,
            ROWS, TILE, 0 if FOLDED == 0 else LATENT, WIDTH, BRANCH, PRECISION,
        )  # fmt: skip
    # A scaled rope has the last sigma; among few it goes first, since its keys wait in registers.
    FEW: tl.constexpr = ROPE_SCALED and FOLDED <= FEW_SCALES
    for group in tl.static_range(FOLDED - 1 if FEW else 0, -1 if FEW else FOLDED, -1 if FEW else 1):
        part = score_columns(
            keys, rope_keys, q_latent, q_rope, rope_ratio, uneven, LATENT, CHUNK, CHUNKS, ROPE_CHUNK, ROPE_CHUNKS,
            ROWS, TILE, group * GROUP, min((group + 1) * GROUP, WIDTH if ROPE_SCALED else LATENT), BRANCH, PRECISION,
        )  # fmt: skip
        scores += part * sigma[group][:, None]
    return scores


@triton.jit
def score_columns(
    keys, rope_keys, q_latent, q_rope, rope_ratio, uneven,
    LATENT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROPE_CHUNK: tl.constexpr,
    ROPE_CHUNKS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr,
    BRANCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of columns FIRST .. END of the row, whole chunks: one chain of MMAs, or one for the rope and one for the
    latent where their queries differ in scale.

    BRANCH  no registers for the ratio: leave it to the steps that need it
    """
    APART: tl.constexpr = END > LATENT and rope_keys[0].dtype == tl.float16
    scores = tl.zeros([TILE, ROWS], tl.float32)
    for chunk in tl.static_range(ROPE_CHUNKS):
        if LATENT + chunk * ROPE_CHUNK >= FIRST and LATENT + chunk * ROPE_CHUNK < END:
            scores = multiply(rope_keys[chunk], q_rope, chunk, ROPE_CHUNKS, scores, PRECISION)
    if APART and not BRANCH:
        scores *= rope_ratio[None, :]
    if APART and BRANCH:
        if uneven:
            scores *= rope_ratio[None, :]
    if FIRST < LATENT:
        rope_scores = scores
        if APART:
            scores = tl.zeros([TILE, ROWS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if chunk * CHUNK >= FIRST and chunk * CHUNK < END:
                scores = multiply(keys[chunk], q_latent, chunk, CHUNKS, scores, PRECISION)
        if APART:
            scores += rope_scores
    return scores


@triton.jit
def multiply(keys, queries, chunk: tl.constexpr, CHUNKS: tl.constexpr, scores, PRECISION: tl.constexpr):
    """scores + keys . each part of the chunk's queries (see load_queries)."""
    PARTS: tl.constexpr = len(queries) // CHUNKS
    for part in tl.static_range(PARTS):
        scores = tl.dot(keys, queries[chunk * PARTS + part], scores, input_precision=PRECISION)
    return scores


@triton.jit
def add_values(
    out_t, keys, p, sigma,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr, HEADROOM: tl.constexpr,
    LATENT_TYPE: tl.constexpr, PRECISION: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """out^T + HEADROOM * V^T (P sigma)^T for each chunk; weights are made where a new scale begins, and not before,
    unless all are wanted first."""
    result = ()
    weights = ()
    if WEIGHTS_FIRST:
        for chunk in tl.static_range(CHUNKS):
            weights = weights + (weigh(p, sigma, chunk * CHUNK // GROUP, FOLDED, HEADROOM, LATENT_TYPE),)
    for chunk in tl.static_range(CHUNKS):
        if WEIGHTS_FIRST:
            weight = weights[chunk]
        elif chunk * CHUNK % GROUP == 0:
            weight = weigh(p, sigma, chunk * CHUNK // GROUP, FOLDED, HEADROOM, LATENT_TYPE)
        result = result + (tl.dot(tl.trans(keys[chunk]), weight, out_t[chunk], input_precision=PRECISION),)
    return result


@triton.jit
def weigh(
    p, sigma, group: tl.constexpr, FOLDED: tl.constexpr, HEADROOM: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """HEADROOM * P sigma of a group in `dtype`; without scales, HEADROOM * P."""
    if FOLDED == 0:
        return (p * HEADROOM).to(dtype)
    else:
        return (p * (sigma[group] * HEADROOM)[:, None]).to(dtype)
