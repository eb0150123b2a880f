"""Decode steps to time: a cache in scrambled pages, filled by `store`, and queries, the same for every contender."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import pagedmla
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.kv_cache.page_pool import PagePool
from pagedmla.kv_cache.values import KVCacheInputsPerDevice

LAYOUTS = ("bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla")
HEADS = (16, 128)
BATCHES = (1, 8, 32, 128)
PAGE_SIZE = 64
SM_SCALE = 192**-0.5
_STORED_AT_ONCE = 65536  # tokens


@dataclass(frozen=True)
class Case:
    """One decode step: `batch` requests of `kv_len` keys each, one query token a request."""

    layout: str
    heads: int
    batch: int
    kv_len: int


@dataclass(frozen=True)
class Inputs:
    """A case on a device."""

    case: Case
    layout: CacheLayout
    values: KVCacheInputsPerDevice
    q: Tensor  # [B, H, 576] bf16


def grid(
    layouts: Iterable[str] | None = None,
    heads: Iterable[int] | None = None,
    batches: Iterable[int] | None = None,
    kv_len: int = 4096,
) -> Iterator[Case]:
    """Every combination; None or nothing means the defaults above."""
    for layout in layouts or LAYOUTS:
        for head_count in heads or HEADS:
            for batch in batches or BATCHES:
                yield Case(layout, head_count, batch, kv_len)


def build(case: Case, device: torch.device | str) -> Inputs:
    """The case on a device; the same numbers each time on the same kind of device."""
    layout = get_layout(case.layout)
    pages = case.batch * -(-case.kv_len // PAGE_SIZE)
    sigma = torch.tensor([0.05]) if layout.name == "fp8_flat" else None
    pool = PagePool(
        layout, num_layers=1, page_size=PAGE_SIZE, num_pages=pages, shuffle_seed=0, sigma=sigma, device=device
    )
    generator = torch.Generator(device).manual_seed(0)
    names = list(range(case.batch))
    for name in names:
        pool.allocate(name)
    together = max(1, _STORED_AT_ONCE // case.kv_len)
    for first in range(0, case.batch, together):
        some = names[first : first + together]
        counts = [case.kv_len - 1] * len(some)
        step = pool.values(some, counts)
        pagedmla.store(
            *_rows(layout, sum(counts), generator, device), step.values, 0,
            query_start_loc=step.query_start_loc, layout=layout,
        )  # fmt: skip
        pool.advance(some, counts)
    values, _ = pool.values(names, [1] * case.batch)
    pagedmla.store(*_rows(layout, case.batch, generator, device), values, 0, layout=layout)
    q = torch.randn(case.batch, case.heads, layout.width, generator=generator, device=device).to(torch.bfloat16)
    return Inputs(case, layout, values, q)


def _rows(
    layout: CacheLayout, tokens: int, generator: torch.Generator, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Latent and rope of a step's tokens, bf16."""
    latent = torch.randn(tokens, layout.latent, generator=generator, device=device)
    rope = torch.randn(tokens, layout.rope, generator=generator, device=device)
    return latent.to(torch.bfloat16), rope.to(torch.bfloat16)
