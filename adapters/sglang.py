"""SGLang: a layer's pool and a step's `ForwardBatch` as `KVCacheInputsPerDevice`.

SGLang hands a backend one buffer a layer, `[slots, 1, row]`, and for each step

    req_to_token      [reqs + 1, max_context] int32   the slot of every token of a request, at every page size
    req_pool_indices  [B] int64                       a request's row in it; row 0 is padding, and leads to slot 0
    seq_lens          [B] int64                       which tokens it counts depends on the mode, see `Lengths`
    out_cache_loc     [T] int64                       the slots of the step's tokens; 0 pads

Page p of a request is `req_to_token[row, p * page_size] // page_size`, since slots of a page are adjacent and a page
begins at a multiple of its size. Page 0 belongs to padding. Pools are views of the engine's memory; lengths and tables
are written into buffers of the caller's, so that a captured graph finds them at the same address in every step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.adapters.rows import LayerPools, Rows, first_rows, step_rows
from pagedmla.kv_cache.checks import ceildiv, counted, dtype_name, expect_same_device, expect_tensor, host_int, refuse
from pagedmla.kv_cache.layouts import LATENTS, ROPE, CacheLayout, Fp8Flat, Fp8RopeBf16, get_layout, per_tensor_scale

KNOWN_VERSION = (0, 5, 23)

LAYOUTS: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: Fp8Flat.name,
}
"""The layout of the engine's own pools, by their dtype."""

_SIGMA_BYTES = 16  # behind a row: a float32, and padding that keeps rows at multiples of 16 bytes


def check_version(version: str) -> None:
    """ImportError where this isn't the SGLang that the adapter knows.

    Its post releases are: they mend packaging. Pre-releases aren't, since interfaces still change between them.
    """
    number = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+.*)?", version)
    if number is None or tuple(map(int, number.groups())) != KNOWN_VERSION:
        known = ".".join(map(str, KNOWN_VERSION))
        raise ImportError(
            f"sglang: expected {known}, whose attention interface pagedmla knows; got {version}. "
            f"Install that one, or a pagedmla that knows this one."
        )


def layout_of(dtype: torch.dtype, *, latent: int = LATENTS[0], rope: int = ROPE) -> CacheLayout:
    """The layout of the engine's own pool of a dtype. ValueError names those that there are."""
    if dtype not in LAYOUTS:
        refuse("kv_cache_dtype", f"one of {', '.join(map(dtype_name, LAYOUTS))}", dtype_name(dtype))
    return get_layout(LAYOUTS[dtype], latent=latent, rope=rope)


def slot_bytes(layout: CacheLayout) -> int:
    """Bytes of a token's slot in a pool that keeps `fp8_rope_bf16`: its row, its sigma, and padding."""
    return layout.row_bytes + _SIGMA_BYTES


def split_slots(buffer: Tensor, layout: CacheLayout) -> tuple[Tensor, Tensor]:
    """Rows `[slots, row]` and sigmas `[slots, 1]` float32 of an `fp8_rope_bf16` buffer `[slots, 1, slot_bytes]`.

        byte   0 .. 639   the row
        byte 640 .. 643   sigma, float32, little endian
        byte 644 .. 655   unused

    Both lie in one slot, so that whoever moves a slot moves both.
    """
    size = slot_bytes(layout)
    expect_tensor(buffer, "kv_buffer", [None, 1, size], (torch.uint8,), f"It keeps layout {layout}.")
    slots = buffer.squeeze(1)
    row = layout.row_bytes
    return slots[:, :row].view(layout.value_dtypes[0]), slots[:, row : row + 4].view(torch.float32)


def layer_pools(buffer: Tensor, page_size: int, layout: CacheLayout, k_scale: Tensor | None = None) -> LayerPools:
    """View a layer's buffer `[slots, 1, row]` as pools, with the strides that it has.

    `k_scale` is the layer's scale, one float32 on the buffer's device: what `fp8_flat` multiplies with when it reads,
    and divides by when it writes. None means 1. Slots behind the last whole page are left out. Raises ValueError where
    the tensor isn't such a buffer.
    """
    page_size = host_int(page_size, "page_size", minimum=1)
    expect_tensor(buffer, "kv_buffer", [None, 1, None], (), "It is [slots, 1, row].")
    scales = None
    if isinstance(layout, Fp8RopeBf16):
        rows, sigmas = split_slots(buffer, layout)
        scales = _paged(sigmas, page_size)
    elif layout.quantised:
        if buffer.dtype not in (torch.uint8, torch.float8_e4m3fn):  # e5m2 and fnuz bytes mean other numbers
            refuse("kv_buffer", "float8_e4m3fn or its bytes", buffer)
        rows = buffer.squeeze(1).view(layout.value_dtypes[0])
    else:
        rows = buffer.squeeze(1)
    blocks = _paged(rows, page_size)
    if isinstance(layout, Fp8Flat):
        sigma = torch.ones(1, device=buffer.device) if k_scale is None else k_scale.reshape(-1)
        expect_tensor(sigma, "k_scale", [1], (torch.float32,))
        expect_same_device(buffer, "kv_buffer", k_scale=sigma)
        scales = per_tensor_scale(sigma, blocks)
    layout.check_pool(blocks, scales)
    return LayerPools(layout, blocks, scales)


def _paged(rows: Tensor, page_size: int) -> Tensor:
    """`[slots, width]` as `[pages, 1, 1, page_size, 1, width]`."""
    slots, width = rows.shape
    pages = slots // page_size
    slot, column = rows.stride()
    # By strides and not by view, which gives pages of one slot another slot stride.
    return rows.as_strided(
        (pages, 1, 1, page_size, 1, width), (slot * page_size, slot * page_size, slot * page_size, slot, slot, column)
    )


class Lengths(NamedTuple):
    """How many query tokens the requests of a step have, and how many tokens they had before.

        mode            query tokens      cache_length
        decode          1                 seq_lens - 1
        draft step i    1                 seq_lens + i
        verify          draft_token_num   seq_lens
        draft extend    extend_seq_lens   seq_lens - query tokens
        extend, mixed   extend_seq_lens   seq_lens - query tokens

    width    query tokens of every request, or None where `queries` says them one by one, on the host
    ahead    cache_length - seq_lens of every request; of requests by themselves it is minus their query tokens
    """

    width: int | None
    ahead: int = 0
    queries: Sequence[int] = ()

    @classmethod
    def each(cls, queries: Sequence[int]) -> Lengths:
        return cls(None, queries=queries)

    def tokens(self, requests: int) -> int:
        return sum(self.queries) if self.width is None else requests * self.width

    def longest(self) -> int:
        return max(self.queries, default=0) if self.width is None else self.width


class StepBuffers:
    """Lengths, tables and query starts of steps of up to `requests` requests with up to `max_keys` keys.

    One set for the steps of captured graphs, written anew before each replay; a step outside of graphs has its own.
    """

    def __init__(self, req_to_token: Tensor, page_size: int, requests: int, max_keys: int) -> None:
        expect_tensor(req_to_token, "req_to_token", [None, None], (torch.int32,))
        page_size = host_int(page_size, "page_size", minimum=1)
        device = req_to_token.device
        # The slot of the first token of every page: all that a table is made of.
        self._firsts = req_to_token[:, ::page_size][:, : ceildiv(max_keys, page_size)]
        self._page_size = page_size
        self.cache_lengths = torch.empty(requests, dtype=torch.int32, device=device)
        self.table = torch.empty(requests, self._firsts.shape[1], dtype=torch.int32, device=device)
        self._starts: dict[int, Tensor] = {}

    @property
    def requests(self) -> int:
        return int(self.table.shape[0])

    def write(self, req_pool_indices: Tensor, seq_lens: Tensor, lengths: Lengths, max_keys: int) -> Rows:
        """Write the lengths and tables of a step's requests, and return them as every layer sees them.

        Reads no device value. Columns behind a request's last page hold what its row of `req_to_token` holds there,
        which nobody reads. Requests with the same number of query tokens are decode rows, all others prompts.
        ValueError where the requests and `lengths` don't go together.
        """
        requests = int(seq_lens.shape[0])
        if requests > self.requests:
            refuse("seq_lens", f"at most {self.requests} requests", seq_lens)
        if req_pool_indices.shape != seq_lens.shape:
            refuse("req_pool_indices", f"{list(seq_lens.shape)}, as seq_lens", req_pool_indices)
        if lengths.width is None and (len(lengths.queries) != requests or min(lengths.queries, default=0) < 0):
            wanted = f"{counted(requests, 'number')} of at least 0, one a request"
            refuse("lengths.queries", wanted, list(lengths.queries))
        starts = self._query_starts(lengths, requests)
        cached = first_rows(self.cache_lengths, requests)
        cached.copy_(seq_lens)
        if lengths.width is None:
            cached.sub_(starts[1:]).add_(starts[:-1])
        elif lengths.ahead:
            cached.add_(lengths.ahead)
        table = first_rows(self.table, requests)
        torch.index_select(self._firsts, 0, req_pool_indices, out=table)
        if self._page_size > 1:
            table.floor_divide_(self._page_size)
        decodes, tokens = requests if lengths.width else 0, lengths.tokens(requests)
        return step_rows(
            cached,
            table,
            starts,
            num_tokens=tokens,
            max_query_length=lengths.longest(),
            max_seq_len=max_keys,
            num_decodes=decodes,
            num_decode_tokens=tokens if decodes else 0,
        )

    def _query_starts(self, lengths: Lengths, requests: int) -> Tensor:
        """`[requests + 1]` int32. Those of a width are made once, and never change."""
        device = self.table.device
        if lengths.width is None:
            host = torch.tensor([0, *accumulate(lengths.queries)], dtype=torch.int32, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)
        if lengths.width not in self._starts:
            made = torch.arange(self.requests + 1, dtype=torch.int32, device=device)
            self._starts[lengths.width] = made.mul_(lengths.width)
        return first_rows(self._starts[lengths.width], requests + 1)
