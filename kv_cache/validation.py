"""Checks that need values: table entries in use, and the scales and bytes of live slots.

They run on CPU tensors (ids and table width always, the rest on request) and, with `check=True` or PAGEDMLA_CHECK=1, on
any device. An entry is in use when its page holds a token below kv_len; all others may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import IndexRefusal, Refusal, counted
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout, RowPlanes
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view
from pagedmla.kv_cache.quantise import check_sigma
from pagedmla.kv_cache.tables import ids_at, int64_lengths


class LivePages(NamedTuple):
    """Every page in use, one entry for each (request, column): int64 `[n]` each.

    `fill` is how many of the page's slots hold tokens; `scale_page` equals `value_page` where scales aren't paged.
    """

    row: Tensor
    column: Tensor
    fill: Tensor
    value_page: Tensor
    scale_page: Tensor


def check_table_width(cache: PagedKVCacheCollection, kv_lens: Tensor) -> None:
    """ValueError where a request has more tokens than a table has columns for."""
    for name, table in (("lookup_table", cache.lookup_table), ("scales_lookup_table", cache.scales_lookup_table)):
        needed = -(-kv_lens // cache.page_size)
        if needed.numel() and int(needed.max()) > table.shape[1]:
            row = int(needed.argmax())
            raise Refusal(
                f"{name}: expected at least {counted(int(needed[row]), 'column')} for row {row}, which has "
                f"{counted(int(kv_lens[row]), 'token')} in pages of {cache.page_size}; got {table.shape[1]}."
            )


def check_lengths(cache: PagedKVCacheCollection, query_lens: Tensor) -> None:
    """ValueError where a length is below a padding row's: minus its query tokens, of which it has at least one."""
    lengths = int64_lengths(cache.cache_lengths)
    least = -query_lens.clamp(min=1)
    bad = lengths < least
    if bool(bad.any()):
        row = int(bad.to(torch.uint8).argmax())
        expected = f"at least 0, or {int(least[row])} for padding"
        raise Refusal(f"cache_lengths: expected {expected}; got {int(lengths[row])} in row {row}.")


def check_one_scale(cache: PagedKVCacheCollection, layer: int) -> None:
    """ValueError where the one scale of a layer, which stores read, is one that no row can be divided by."""
    pool = cache.scale_pool
    if pool is not None and pool.repeated and pool.num_pages:
        one = raw_view(pool.tensor)[0, 0, layer, 0, 0].cpu()
        check_sigma(one.view(pool.tensor.dtype), "kv_scales")


def live_pages(cache: PagedKVCacheCollection, kv_lens: Tensor) -> LivePages:
    """The pages in use when request b has `kv_lens[b]` tokens (int64 `[batch]`)."""
    pages = (-(-kv_lens // cache.page_size)).clamp(min=0)
    row = torch.repeat_interleave(torch.arange(pages.numel(), device=pages.device), pages)
    before = pages.cumsum(0) - pages
    column = torch.arange(row.numel(), device=pages.device) - before[row]
    fill = (kv_lens[row] - column * cache.page_size).clamp(max=cache.page_size)
    return LivePages(
        row, column, fill, ids_at(cache.lookup_table, row, column), ids_at(cache.scales_lookup_table, row, column)
    )


def check_ids(cache: PagedKVCacheCollection, live: LivePages) -> None:
    """IndexError that names row, column, id and bound where an entry in use lies outside its pool."""
    _check_ids(live, live.value_page, cache.value_pool, "lookup_table")
    if cache.scale_pool is not None:
        _check_ids(live, live.scale_page, cache.scale_pool, "scales_lookup_table")


def _check_ids(live: LivePages, pages: Tensor, pool: PagedTensor, table_name: str) -> None:
    outside = pool.outside(pages)
    if bool(outside.any()):
        at = int(outside.to(torch.uint8).argmax())
        place = f"row {int(live.row[at])}, column {int(live.column[at])}"
        raise IndexRefusal(pool.names_outside(table_name, place, int(pages[at])))


def live_slots(live: LivePages, page_size: int) -> Tensor:
    """Which slots of each live page hold a token: bool `[n, page_size]`."""
    return torch.arange(page_size, device=live.fill.device) < live.fill.unsqueeze(1)


def live_scales(planes: RowPlanes, live: LivePages) -> Tensor | None:
    """The scales of every live page as float32 `[n, page_size, G]`; slots past `fill` are included."""
    if planes.scales is None:
        return None
    page = live.value_page if planes.scales_in_value_pages else live.scale_page
    return raw_view(planes.scales)[page].view(planes.scales.dtype).to(torch.float32)


def nan_rows(planes: RowPlanes, live: LivePages) -> Tensor:
    """Slots of every live page whose row holds a NaN: bool `[n, page_size]`; slots past `fill` are included."""
    found = torch.zeros(live.row.numel(), planes.latent.shape[1], dtype=torch.bool, device=planes.latent.device)
    for plane in (planes.latent, planes.rope):
        codes = raw_view(plane)[live.value_page]
        if plane.dtype == torch.float8_e4m3fn:
            found |= ((codes & 0x7F) == 0x7F).any(-1)
        else:
            found |= codes.view(plane.dtype).isnan().any(-1)
    return found


def check_live_values(cache: PagedKVCacheCollection, layout: CacheLayout, layer: int, live: LivePages) -> None:
    """ValueError that names row, column, slot and page where a live slot has a bad scale or holds NaN."""
    planes = layout.planes(cache.value_pool, cache.scale_pool, layer)
    used = live_slots(live, cache.page_size)
    sigma = live_scales(planes, live)
    if sigma is not None:
        bad = used & ~(sigma.isfinite() & (sigma > 0)).all(-1)
        if bool(bad.any()):
            at, slot = (int(i) for i in torch.nonzero(bad)[0])
            name, kind, page = "kv_scales", "scale", live.scale_page
            if planes.scales_in_value_pages:
                name, kind, page = "kv_blocks", "value", live.value_page
            raise Refusal(
                f"{name}: expected finite scales > 0; got {sigma[at, slot].tolist()} at row {int(live.row[at])}, "
                f"column {int(live.column[at])}, slot {slot} of {kind} page {int(page[at])}, layer {layer}."
            )
    bad = used & nan_rows(planes, live)
    if bool(bad.any()):
        at, slot = (int(i) for i in torch.nonzero(bad)[0])
        raise Refusal(
            f"kv_blocks: expected no NaN in live slots; got one at row {int(live.row[at])}, column "
            f"{int(live.column[at])}, slot {slot} of value page {int(live.value_page[at])}, layer {layer}."
        )
