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
from pagedmla.triton_kernels.device.rows import fold_row, load_columns, power_of_two, row_exponent
from pagedmla.triton_kernels.device.scales import fetch_column_sigma, fetch_sigma, largest_sigma
from pagedmla.triton_kernels.device.softmax import advance_peak, decay, finite_or_zero
from pagedmla.triton_kernels.device.splits import split_range
from pagedmla.triton_kernels.device.uniform import make_uniform

FEW_SCALES: tl.constexpr = tl.constexpr(5)  # a token: groups of 128
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_rows(
    out,  # [T, H, LATENT], or the workspace [S, T, H, LATENT] float32
    lse,  # [T, H] or [S, T, H] float32, heads and tokens adjacent
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
    score_scale,  # sm_scale * log2(e)
    stride_q_token,
    stride_q_head,
    stride_latent_page,
    stride_rope_page,
    stride_scales_page,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
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
    PRECISION: tl.constexpr,  # of float32 MMAs
    DEQUANTISE: tl.constexpr,  # multiply elements by their scales, for groups that no chunk fits
    NATIVE_E4M3: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_ROPE: tl.constexpr,
    PARTIAL: tl.constexpr,  # write the state of a split
):
    CHUNKS: tl.constexpr = LATENT // CHUNK
    ROPE_CHUNKS: tl.constexpr = ROPE // ROPE_CHUNK
    FOLDED: tl.constexpr = 0 if DEQUANTISE else GROUPS  # scales that scores and weights take
    HEADROOM: tl.constexpr = 16384.0 if LATENT_MMA == "float16" else 1.0
    # Many rows or many scales leave no registers for the next tile's bytes until the scores are done.
    FETCH_LATE: tl.constexpr = PREFETCH and (ROWS == 64 or FOLDED > FEW_SCALES)
    LATENT_TYPE: tl.constexpr = (
        tl.float16 if LATENT_MMA == "float16" else tl.bfloat16 if LATENT_MMA == "bfloat16" else tl.float32
    )
    ROPE_TYPE: tl.constexpr = (
        tl.float16 if ROPE_MMA == "float16" else tl.bfloat16 if ROPE_MMA == "bfloat16" else tl.float32
    )

    split = tl.program_id(1)
    token, head, valid = fold_row(first_row, row_count, heads, ROWS)
    limits = key_limits(token, valid, cache_length, kv_len, CAUSAL)
    begin, end = split_range(kv_len, split, tl.num_programs(1), TILE)
    end = make_uniform(tl.minimum(end, tl.max(limits, 0)))
    seen_by_all = make_uniform(tl.minimum(end, tl.min(tl.where(valid, limits, end), 0)))
    if PREFETCH:
        begin = make_uniform(begin)

    q_offsets = (first_token + token).to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
    q_latent, q_rope, row_scale = load_queries(
        q, q_offsets, valid, LATENT, ROPE, CHUNK, ROPE_CHUNK, ROWS, LATENT_TYPE, ROPE_TYPE
    )
    row_scale *= score_scale

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

    for start in tl.range(begin, end, TILE, disable_licm=True):
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
            rope_keys = widen_columns(fetched_rope, ROPE_CHUNKS, FP8_ROPE, NATIVE_E4M3, ROPE_TYPE)
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
            keys, rope_keys, q_latent, q_rope, sigma,
            LATENT, CHUNK, CHUNKS, ROPE_CHUNK, ROPE_CHUNKS, ROWS, TILE, GROUP, FOLDED, ROPE_SCALED, PRECISION,
        )  # fmt: skip
        scores *= row_scale[None, :]
        if start + TILE > seen_by_all:
            # Made anew here, where few tiles come, so that the loop holds no register for them.
            token_here, _head, valid_here = fold_row(first_row, row_count, heads, ROWS)
            scores = mask_scores(scores, start, key_limits(token_here, valid_here, cache_length, kv_len, CAUSAL), TILE)

        weighted = scores
        if FOLDED > 0:
            weighted = scores + tl.log2(largest_sigma(sigma, tl.cdiv(LATENT, GROUP)))[:, None]
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
        out_t = add_values(shrunk, keys, p, sigma, CHUNK, CHUNKS, GROUP, FOLDED, HEADROOM, LATENT_TYPE, PRECISION)

        if PREFETCH:
            keys = widen_columns(fetched, CHUNKS, FP8_LATENT, NATIVE_E4M3, LATENT_TYPE)
        if PREFETCH_ROPE:
            rope_keys = widen_columns(fetched_rope, ROPE_CHUNKS, FP8_ROPE, NATIVE_E4M3, ROPE_TYPE)

    total = tl.sum(tl.sum(total, 0), 0)
    unit = tl.where(total == 0.0, 0.0, 1.0 / (total * HEADROOM))
    state = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN2)
    row = (first_token + token).to(tl.int64)
    tl.store(lse + split.to(tl.int64) * stride_lse_split + row * heads + head, state, mask=valid)
    # A split without keys is weightless when states are merged: its out is never read.
    written = valid & (begin < end) if PARTIAL else valid
    out_offsets = split.to(tl.int64) * stride_out_split + row * stride_out_token + head.to(tl.int64) * stride_out_head
    for chunk in tl.static_range(CHUNKS):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        result = (out_t[chunk] * unit[None, :]).to(out.dtype.element_ty)
        tl.store(out + out_offsets[None, :] + column[:, None], result, mask=written[None, :])


@triton.jit
def load_queries(
    q, offsets, valid,
    LATENT: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, ROPE_CHUNK: tl.constexpr, ROWS: tl.constexpr,
    LATENT_TYPE: tl.constexpr, ROPE_TYPE: tl.constexpr,
):  # fmt: skip
    """`(latent chunks [CHUNK, ROWS], rope chunks [ROPE_CHUNK, ROWS], factor [ROWS])`; the query is chunk * factor.

    For float16 MMAs each row is multiplied by the power of two that brings its largest magnitude to 2^13: exact, and
    nothing within 2^-27 of the largest loses a bit to float16's range.
    """
    latent = ()
    rope = ()
    amax = tl.zeros([ROWS], tl.float32)
    for chunk in tl.static_range(LATENT // CHUNK):
        latent = latent + (load_columns(q, offsets, valid, chunk * CHUNK, CHUNK).to(tl.float32),)
        amax = tl.maximum(amax, tl.max(tl.abs(latent[chunk]), 0))
    for chunk in tl.static_range(ROPE // ROPE_CHUNK):
        rope = rope + (load_columns(q, offsets, valid, LATENT + chunk * ROPE_CHUNK, ROPE_CHUNK).to(tl.float32),)
        amax = tl.maximum(amax, tl.max(tl.abs(rope[chunk]), 0))
    factor = tl.full([ROWS], 1.0, tl.float32)
    up = factor
    if LATENT_TYPE == tl.float16:
        shift = row_exponent(amax)
        up = power_of_two(shift)
        factor = power_of_two(-shift)
    scaled_latent = ()
    scaled_rope = ()
    for chunk in tl.static_range(LATENT // CHUNK):
        scaled_latent = scaled_latent + ((latent[chunk] * up[None, :]).to(LATENT_TYPE),)
    for chunk in tl.static_range(ROPE // ROPE_CHUNK):
        scaled_rope = scaled_rope + ((rope[chunk] * up[None, :]).to(ROPE_TYPE),)
    return scaled_latent, scaled_rope, factor


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
    keys, rope_keys, q_latent, q_rope, sigma,
    LATENT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROPE_CHUNK: tl.constexpr,
    ROPE_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr, ROPE_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k, float32 [TILE, ROWS]: one chain of MMAs a scale, and one for columns without a scale."""
    scores = tl.zeros([TILE, ROWS], tl.float32)
    if FOLDED == 0 or not ROPE_SCALED:
        for chunk in tl.static_range(ROPE_CHUNKS):
            scores = tl.dot(rope_keys[chunk], q_rope[chunk], scores, input_precision=PRECISION)
    if FOLDED == 0:
        for chunk in tl.static_range(CHUNKS):
            scores = tl.dot(keys[chunk], q_latent[chunk], scores, input_precision=PRECISION)
    # A scaled rope has the last scale; among few it goes first, since its keys wait in registers.
    FEW: tl.constexpr = ROPE_SCALED and FOLDED <= FEW_SCALES
    for group in tl.static_range(FOLDED - 1 if FEW else 0, -1 if FEW else FOLDED, -1 if FEW else 1):
        part = tl.zeros([TILE, ROWS], tl.float32)
        for chunk in tl.static_range(ROPE_CHUNKS):
            if ROPE_SCALED and (LATENT + chunk * ROPE_CHUNK) // GROUP == group:
                part = tl.dot(rope_keys[chunk], q_rope[chunk], part, input_precision=PRECISION)
        for chunk in tl.static_range(CHUNKS):
            if chunk * CHUNK // GROUP == group:
                part = tl.dot(keys[chunk], q_latent[chunk], part, input_precision=PRECISION)
        scores += part * sigma[group][:, None]
    return scores


@triton.jit
def add_values(
    out_t, keys, p, sigma,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr, HEADROOM: tl.constexpr,
    LATENT_TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out^T + HEADROOM * V^T (P sigma)^T for each chunk; weights are made where a new scale begins, and not before."""
    result = ()
    if FOLDED == 0:
        weight = (p * HEADROOM).to(LATENT_TYPE)
    for chunk in tl.static_range(CHUNKS):
        if FOLDED > 0 and chunk * CHUNK % GROUP == 0:
            weight = (p * (sigma[chunk * CHUNK // GROUP] * HEADROOM)[:, None]).to(LATENT_TYPE)
        result = result + (tl.dot(tl.trans(keys[chunk]), weight, out_t[chunk], input_precision=PRECISION),)
    return result
