"""Which keys a row sees."""

import triton
import triton.language as tl


@triton.jit
def key_limits(token, rows_valid, cache_length, kv_len, CAUSAL: tl.constexpr):
    """Keys that each row sees: positions below the limit, int32 of token's shape. A row that doesn't exist sees none.

    token  index of the row's query token within its request; causal means keys at or before cache_length + token
    """
    if CAUSAL:
        limit = tl.minimum(cache_length + token + 1, kv_len)
    else:
        limit = token * 0 + kv_len
    return tl.where(rows_valid, limit, 0)


@triton.jit
def mask_scores(
    scores, begin, first_row, heads, cache_length, kv_len, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Scores [TILE, ROWS] with -inf where row `first_row + j` doesn't see key `begin + i`.

    Row r sees position p if p - cache_length <= r // heads, its token; asked without a division, which would cost the
    loop 20 instructions a key or as many registers.
    """
    position = begin + tl.arange(0, TILE)
    if CAUSAL:
        row = first_row + tl.arange(0, ROWS)
        first_that_sees = tl.maximum(position - cache_length, 0) * heads
        return tl.where(first_that_sees[:, None] <= row[None, :], scores, float("-inf"))
    else:
        return tl.where((position < kv_len)[:, None], scores, float("-inf"))
