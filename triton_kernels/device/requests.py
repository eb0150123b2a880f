"""Which request of a ragged batch, given by `start_loc [B + 1]`, a tile of rows or a token belongs to.

A request's rows are its query tokens times its heads, token-major. Request `b` owns the tiles from
`(query_start_loc[b] - query_start_loc[0]) * heads // ROWS + b` on: consecutive starts are at least as far apart as the
request has tiles, so the grid size `tokens * heads // ROWS + requests + 1` follows from capacities alone and no prefix
sum over tiles is needed. Tokens before query_start_loc[0] belong to nobody, so that the last requests can run alone.

Programs that take any tokens, whosever they are, look up each of theirs instead.
"""

import triton
import triton.language as tl


@triton.jit
def first_tile(query_start_loc, request, heads, ROWS: tl.constexpr):
    """The tile of the grid at which the rows of `request` start."""
    before = tl.load(query_start_loc + request) - tl.load(query_start_loc)
    return before * heads // ROWS + request


@triton.jit
def find_request(query_start_loc, tile, requests, heads, ROWS: tl.constexpr):
    """The last request whose first tile is at or before `tile`, by bisection; `requests` stands for the padding rows.

    query_start_loc  pointer to int32 [requests + 1], ascending
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high + 1) // 2
        if first_tile(query_start_loc, middle, heads, ROWS) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def find_token_requests(start_loc, requests, token):
    """For each token the last b in [0, B] with start_loc[b] <= token, by bisection; B stands for padding tokens.

    start_loc  pointer to int32 [B + 1], ascending from 0
    token      int32, a block of any shape
    """
    low = tl.zeros_like(token)
    high = low + requests
    span = requests
    while span > 0:
        middle = (low + high + 1) // 2
        before = tl.load(start_loc + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
        span = span // 2
    return low


@triton.jit
def find_scheduled(ends, requests, piece):
    """For each piece the first request in [0, requests] whose end is above it, by bisection; requests + 1: none.

    ends   pointer to int32 [requests + 1], ascending: pieces of all requests up to and with this one
    piece  int32, a block of any shape
    """
    low = tl.zeros_like(piece)
    high = low + requests + 1
    span = requests + 1
    while span > 0:
        unsure = low < high
        middle = (low + high) // 2
        above = tl.load(ends + middle, mask=unsure, other=0) > piece
        high = tl.where(unsure & above, middle, high)
        low = tl.where(unsure & (above == 0), middle + 1, low)
        span = span // 2
    return low
