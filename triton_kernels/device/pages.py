"""From token positions to page ids and row offsets.

A tile of keys lies in one page where the page size is a multiple of the tile: its id is then one scalar. A tile that
is made of whole pages looks each of them up once; elsewhere every token looks its page up. Ids stay as the table holds
them, 32 bits, until a stride multiplies them: then they become int64, and uint32 ids keep their value.
"""

import triton
import triton.language as tl


@triton.jit
def find_pages(table_row, begin, end, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Page ids of tokens `begin .. begin + TILE`, as the table holds them: a scalar, [TILE // PAGE_SIZE] or [TILE].
    Columns at or past ceil(end / PAGE_SIZE) aren't read.

    table_row  pointer to this request's row of a lookup table, int32 or uint32
    begin      first token, a multiple of TILE
    """
    if PAGE_SIZE % TILE == 0:
        return tl.load(table_row + begin // PAGE_SIZE, mask=begin < end, other=0)
    elif TILE % PAGE_SIZE == 0:
        column = begin // PAGE_SIZE + tl.arange(0, TILE // PAGE_SIZE)
        return tl.load(table_row + column, mask=column * PAGE_SIZE < end, other=0)
    else:
        token = begin + tl.arange(0, TILE)
        return tl.load(table_row + token // PAGE_SIZE, mask=token < end, other=0)


@triton.jit
def row_offsets(pages, begin, stride_page, STRIDE_SLOT: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """`(base, offsets [TILE])`, int64: the row of token `begin + i` starts at element base + offsets[i].

    In a tile that lies in one page all that changes from tile to tile is the scalar base, and what remains are
    constants that fit the immediate offset of a load instruction.
    """
    token = tl.arange(0, TILE)
    if PAGE_SIZE % TILE == 0:
        return pages.to(tl.int64) * stride_page + (begin % PAGE_SIZE).to(tl.int64) * STRIDE_SLOT, token.to(
            tl.int64
        ) * STRIDE_SLOT
    elif TILE % PAGE_SIZE == 0:
        # Repeated before the product, which leaves Triton to see that rows stay aligned.
        pages = tl.reshape(tl.broadcast_to(pages[:, None], [TILE // PAGE_SIZE, PAGE_SIZE]), [TILE])
        return tl.zeros([], tl.int64), pages.to(tl.int64) * stride_page + (token % PAGE_SIZE).to(tl.int64) * STRIDE_SLOT
    else:
        slot = (begin % PAGE_SIZE + token) % PAGE_SIZE
        return tl.zeros([], tl.int64), pages.to(tl.int64) * stride_page + slot.to(tl.int64) * STRIDE_SLOT
