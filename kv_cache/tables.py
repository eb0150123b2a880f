"""Lookup tables and lengths: 32-bit on the device, int64 wherever an address is computed.

torch lacks most arithmetic on uint32, so both dtypes are read through an int32 view of the same memory. An id of a
uint32 table is unsigned (0xFFFFFFFF is page 4,294,967,295, never -1); an id of an int32 table keeps its sign. Lengths
are always read as int32: a padding row of a captured graph has kv_len 0 with one query token, so cache_length -1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def int32_view(table: Tensor) -> Tensor:
    """The same memory as int32, whatever the row stride: what kernels are handed."""
    return table.view(torch.int32) if table.dtype == torch.uint32 else table


def int64_ids(entries: Tensor, table_dtype: torch.dtype) -> Tensor:
    """Page ids as int64 from entries taken out of `int32_view(table)`."""
    wide = entries.to(torch.int64)
    return wide & 0xFFFFFFFF if table_dtype == torch.uint32 else wide


def ids_at(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`table[row, column]` as int64, for int64 index tensors that broadcast against each other."""
    return int64_ids(int32_view(table)[row, column], table.dtype)


def row_ids(table: Tensor, row: int, columns: int) -> Tensor:
    """The first `columns` page ids of one row, int64 `[columns]`. What lies behind them isn't read."""
    return int64_ids(int32_view(table)[row, :columns], table.dtype)


def int64_lengths(lengths: Tensor) -> Tensor:
    """Lengths as int64 `[B]`; uint32 bits are read as int32 (module docstring)."""
    return int32_view(lengths).to(torch.int64)
