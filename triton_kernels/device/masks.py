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
def mask_scores(scores, begin, limits, TILE: tl.constexpr):
    """Scores [TILE, ROWS] with -inf where key `begin + i` isn't below the row's limit [ROWS]."""
    position = begin + tl.arange(0, TILE)
    return tl.where(position[:, None] < limits[None, :], scores, float("-inf"))
