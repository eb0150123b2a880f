"""What MAX answers (tests/cases/max_golden/README.md), as torch tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedmla import PagedKVCacheCollection, generic_get_paged_cache_with_scales

FOLDER = Path(__file__).parent / "max_golden"

_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def arrays(name: str) -> dict[str, Tensor]:
    """Every array of an npz file."""
    with np.load(FOLDER / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def records(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def lines(name: str) -> tuple[str, list[list[float]]]:
    """First line and rows of numbers of a text file."""
    first, *rows = (FOLDER / name).read_text(encoding="utf-8").strip().splitlines()
    return first, [[float(number) for number in row.split()] for row in rows]


@cache
def _addressing() -> dict[str, Tensor]:
    return arrays("kv_addressing.npz")


@dataclass(frozen=True)
class AddressingCase:
    """One cache of kv_addressing.npz."""

    name: str

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads(bytes(self["meta_json"].tolist()))  # type: ignore[no-any-return]

    @property
    def views(self) -> list[tuple[int, int]]:
        """(kv, layer) of every view that MAX was asked about."""
        return [(kv, layer) for kv in range(self.meta["kv_dim"]) for layer in range(self.meta["L"])]

    def __getitem__(self, array: str) -> Tensor:
        return _addressing()[f"{self.name}/{array}"]

    def __contains__(self, array: str) -> bool:
        return f"{self.name}/{array}" in _addressing()

    def elements(self, array: str) -> Tensor:
        """An array of one number an element: `[B, tokens, H, D]`."""
        meta = self.meta
        return self[array].reshape(meta["B"], meta["max_pages"] * meta["page_size"], meta["H"], meta["D"])

    def element_indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(bs, head, tok, dim) that broadcast to `[B, tokens, H, D]`."""
        meta = self.meta
        sizes = (meta["B"], meta["max_pages"] * meta["page_size"], meta["H"], meta["D"])
        bs, tok, head, dim = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return bs, head, tok, dim

    def collection(self, table_dtype: torch.dtype = torch.uint32) -> PagedKVCacheCollection:
        """The cache as MAX had it: padded pools are short tensors inside a longer arena, with the stride given."""
        meta = self.meta
        batch, pages = meta["B"], meta["max_pages"]
        inner = [meta["kv_dim"], meta["L"], meta["page_size"], meta["H"]]
        return generic_get_paged_cache_with_scales(
            _short_view(self["blocks_raw"], _DTYPES[meta["dtype"]], [meta["num_blocks"], *inner, meta["D"]]),
            self["cache_lengths"].view(table_dtype),
            self["lookup_table"].view(table_dtype).reshape(batch, pages),
            meta["max_seq_length"],
            meta["max_cache_length"],
            _short_view(
                self["scales_raw"], _DTYPES[meta["scale_dtype"]], [meta["num_scale_blocks"], *inner, meta["G"]]
            ),
            self["scales_lookup_table"].view(table_dtype).reshape(batch, pages),
            quantization_granularity=meta["granularity"],
            page_stride=meta["page_stride"],
            scales_page_stride=meta["scales_page_stride"],
        )


def _short_view(raw: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A contiguous tensor of `shape` at the start of the arena `raw`, however far the arena reaches."""
    arena = raw.view(dtype)
    return arena.as_strided(shape, torch.empty(shape, device="meta").stride())


ADDRESSING_CASES = [AddressingCase(name) for name in sorted({key.split("/")[0] for key in _addressing()})]
