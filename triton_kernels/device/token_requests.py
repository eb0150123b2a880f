"""Which request each token of a block belongs to, in a ragged batch given by `start_loc [B + 1]`.

For kernels whose programs take any tokens, whosever they are; `requests` serves tiles that stay within a request.
"""

import triton
import triton.language as tl


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
