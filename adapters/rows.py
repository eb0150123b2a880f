"""What an engine's adapter makes: a layer's cache as pools, and a step's requests as rows, of views alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import INDEX_DTYPES, expect_tensor, refuse
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice


@dataclass(frozen=True, eq=False)
class LayerPools:
    """One layer's cache as pools of one layer: made once, for as long as the engine keeps the tensor.

    blocks  [num_blocks, 1, 1, block_size, 1, row], scales  [num_blocks, 1, 1, block_size, 1, 1] or None
    """

    layout: CacheLayout
    blocks: Tensor
    scales: Tensor | None

    @property
    def page_size(self) -> int:
        return int(self.blocks.shape[3])


def store_values(pools: LayerPools) -> KVCacheInputsPerDevice:
    """What `store` takes beside a slot mapping: the pools, and no request."""
    device = pools.blocks.device
    table = torch.empty((0, 0), dtype=torch.uint32, device=device)
    return KVCacheInputsPerDevice(
        kv_blocks=pools.blocks,
        cache_lengths=torch.empty(0, dtype=torch.int32, device=device),
        lookup_table=table,
        max_prompt_length=0,
        max_cache_length=0,
        page_stride=None,
        kv_scales=pools.scales,
        scales_lookup_table=None if pools.scales is None else table,
    )


class Rows(NamedTuple):
    """Consecutive requests of a step, as every layer sees them: made once a step.

    cache_lengths     [B] int32: tokens in the cache before the step; below 0 for a padding row
    lookup_table      [B, W] uint32, the engine's block table
    query_start_loc   [B + 1] int32, from 0
    num_tokens        query tokens, the padding of a captured graph included
    max_query_length, max_cache_length  upper bounds, of query lengths and kv_lens
    mixed_step_split  [2] int32 on the host: decode requests and their tokens, which stand first
    dispatch          [3] int64 on the host, or None: requests, max_query_length, partitions
    """

    cache_lengths: Tensor
    lookup_table: Tensor
    query_start_loc: Tensor
    num_tokens: int
    max_query_length: int
    max_cache_length: int
    mixed_step_split: Tensor
    dispatch: Tensor | None

    @property
    def one_token_each(self) -> bool:
        """Whether request b has query token b and no other: decode steps, the padding rows of their graphs included."""
        return self.max_query_length == 1 and self.num_tokens == self.cache_lengths.shape[0]

    def values(self, pools: LayerPools) -> KVCacheInputsPerDevice:
        """What `attend` takes for one layer."""
        return KVCacheInputsPerDevice(
            kv_blocks=pools.blocks,
            cache_lengths=self.cache_lengths,
            lookup_table=self.lookup_table,
            max_prompt_length=self.max_query_length,
            max_cache_length=self.max_cache_length,
            page_stride=None,
            kv_scales=pools.scales,
            scales_lookup_table=None if pools.scales is None else self.lookup_table,
            attention_dispatch_metadata=self.dispatch,
            mixed_step_split=self.mixed_step_split,
        )


def step_rows(
    cache_lengths: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    *,
    num_tokens: int,
    max_query_length: int,
    max_seq_len: int,
    num_decodes: int,
    num_decode_tokens: int,
    num_partitions: int | None = None,
) -> Rows:
    """The requests of a step from the engine's tensors, with no copy. `query_start_loc` starts at 0.

    Tables and starts longer than `cache_lengths` are cut to its requests. `attend` checks what this makes of them.
    """
    requests = cache_lengths.shape[0]
    if not 0 <= num_decodes <= requests:
        refuse("num_decodes", f"0 to {requests}, the requests of cache_lengths", num_decodes)
    return Rows(
        cache_lengths,
        first_rows(page_ids(block_table), requests),
        first_rows(query_start_loc, requests + 1),
        num_tokens,
        max_query_length,
        max_seq_len,
        _on_host((num_decodes, num_decode_tokens), torch.int32),
        None if num_partitions is None else _on_host((requests, max_query_length, num_partitions), torch.int64),
    )


def page_ids(block_table: Tensor) -> Tensor:
    """An engine's block table `[B, W]` as uint32, in the same memory. ValueError for wider ids: each would be two."""
    if block_table.dtype is not torch.int32 or block_table.dim() != 2:  # the usual case costs no call
        expect_tensor(block_table, "block_table", [None, None], INDEX_DTYPES)
    return block_table.view(torch.uint32)


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """`tensor[:count]`, or the tensor itself where that is all of it: a slice costs the host a microsecond."""
    return tensor if tensor.shape[0] == count else tensor[:count]


@lru_cache(maxsize=4096)
def _on_host(numbers: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Steps repeat, and nobody writes to these."""
    return torch.tensor(numbers, dtype=dtype)
