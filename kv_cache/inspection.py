"""Looking at a cache: who owns which page, how healthy its scales are, and what is wrong with it.

A scale page that stayed behind when its value page moved shows in four ways:

    earlier report    a page has the value bytes of before and other scale bytes (`scales_left_behind`)
    bad scales        its new scale page was never written: zero, not finite, or tiny beside values that aren't zero
    pairing           one scale page serves two value pages, or a value page has two scale pages
    size (a warning)  the page's median scale is more than 2^6 away from those of the request's other pages

Nothing here raises for what tables and pages hold: garbage is what it is for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from pagedmla.kv_cache.binding import bind_values
from pagedmla.kv_cache.cache_report import (
    INLINE,
    NO_SCALES,
    PAGED,
    PER_TENSOR,
    CacheReport,
    PageInUse,
    PoolSummary,
    RequestPages,
)
from pagedmla.kv_cache.checks import IndexRefusal, counted, describe, expect_int, expect_memory, refuse
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.page_contents import PageContents, read_pages
from pagedmla.kv_cache.page_findings import (
    Earlier,
    PagePairs,
    check_contents,
    check_scale_sizes,
    check_scales_left_behind,
)
from pagedmla.kv_cache.table_findings import (
    Inspection,
    check_ids,
    check_pairing,
    check_sharing,
    entries_in_use,
    row_lengths,
)
from pagedmla.kv_cache.validation import LivePages
from pagedmla.kv_cache.values import KVCacheInputsPerDevice


def inspect(
    values: KVCacheInputsPerDevice,
    *,
    layout: CacheLayout | str,
    query_start_loc: Tensor | None = None,
    kv_lens: Tensor | Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    request_names: Sequence[str] | None = None,
    before: CacheReport | None = None,
) -> CacheReport:
    """Look at a step's cache; `report.ok` says whether `report.problems` is empty.

    values           the cache, on any device; only live pages are read
    layout           a CacheLayout or its name
    query_start_loc  `[B + 1]`: the step's tokens are stored already, so they count as live
    kv_lens          `[B]`: live tokens of each row instead; by default cache_lengths, and the step's tokens if given
    layers           those to read (None: all)
    request_names    `[B]`, to recognise requests in a later report (None: their row numbers)
    before           an earlier report of the same layers: names pages whose scales didn't follow their values

    Raises ValueError and IndexError for shapes, dtypes and arguments that don't fit, never for what the cache holds.
    """
    values, layout, cache = bind_values(values, layout)
    expect_memory(cache.blocks, "kv_blocks")
    layers = _layers(cache, layers)
    names = _names(cache, request_names)
    storage = _scale_storage(cache, layout)
    if before is not None:
        _check_before(before, layout, cache, layers)

    inspection = Inspection(cache, storage, names, named=request_names is not None)
    wanted = row_lengths(inspection, query_start_loc, kv_lens)
    live = entries_in_use(inspection, wanted)
    inside = check_ids(inspection, live)
    in_pool = LivePages(*(entries[inside] for entries in live))
    check_sharing(inspection, in_pool)
    if storage == PAGED:
        check_pairing(inspection, in_pool)

    pairs = PagePairs.of(live, inside)
    earlier = None if before is None else Earlier(before)
    slots = [pairs.wanted_slots(pair, live, names, earlier) for pair in range(len(pairs.entries))]
    contents = read_pages(cache, layout, layers, pairs.live(live), slots, per_tensor=storage == PER_TENSOR)
    check_contents(inspection, live, pairs, contents, layers)
    if storage != PER_TENSOR:
        check_scale_sizes(inspection, live, pairs, contents, layers)
    requests = _requests(inspection, live, wanted, pairs, contents)
    if earlier is not None:
        check_scales_left_behind(inspection, requests, pairs, contents, earlier)
    return CacheReport(_summary(cache, layout, storage, live), requests, contents.layers, tuple(inspection.findings))


# -- arguments -------------------------------------------------------------------------------------------------------


def _layers(cache: PagedKVCacheCollection, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return list(range(cache.num_layers))
    if not isinstance(layers, Sequence):
        refuse("layers", "a list of ints", layers, error=TypeError)
    chosen = [expect_int(layer, "layers") for layer in layers]
    if not chosen:
        refuse("layers", "at least one layer", chosen)
    if len(set(chosen)) != len(chosen):
        refuse("layers", "each layer once", chosen)
    for layer in chosen:
        if not 0 <= layer < cache.num_layers:
            raise IndexRefusal(f"layers: {layer} is out of range for a cache of {counted(cache.num_layers, 'layer')}")
    return chosen


def _names(cache: PagedKVCacheCollection, request_names: Sequence[str] | None) -> list[str]:
    batch = cache.cache_lengths.shape[0]
    if request_names is None:
        return [str(row) for row in range(batch)]
    if len(request_names) != batch or len(set(request_names)) != batch:
        refuse("request_names", f"{batch} different names, one for each row", list(request_names))
    return [str(name) for name in request_names]


def _scale_storage(cache: PagedKVCacheCollection, layout: CacheLayout) -> str:
    if layout.inline_scales:
        return INLINE
    if cache.scale_pool is None:
        return NO_SCALES
    return PER_TENSOR if cache.scale_pool.repeated else PAGED


def _check_before(before: CacheReport, layout: CacheLayout, cache: PagedKVCacheCollection, layers: list[int]) -> None:
    if not isinstance(before, CacheReport):
        refuse("before", "a CacheReport", describe(before), error=TypeError)
    for what, held, got in (
        ("layout", before.pool.layout, str(layout)),
        ("page size", before.pool.page_size, cache.page_size),
        ("layers", [health.layer for health in before.layers], layers),
    ):
        if held != got:
            refuse("before", f"a report of {what} {got}", f"one of {held}")


# -- the report ------------------------------------------------------------------------------------------------------


def _requests(
    inspection: Inspection, live: LivePages, kv_lens: Tensor, pairs: PagePairs, contents: PageContents
) -> tuple[RequestPages, ...]:
    owners: dict[int, set[int]] = defaultdict(set)
    for row, page in zip(live.row.tolist(), live.value_page.tolist()):
        owners[page].add(row)
    pages: list[list[PageInUse]] = [[] for _ in inspection.names]
    for at, (row, column, fill, value_page, scale_page) in enumerate(zip(*(column.tolist() for column in live))):
        digests = contents.digests[pairs.pair_of[at]][fill] if at in pairs.pair_of else None
        pages[row].append(
            PageInUse(
                row,
                column,
                fill,
                value_page,
                scale_page if inspection.storage == PAGED else None,
                tuple(sorted(owners[value_page] - {row})),
                None if digests is None else digests.values,
                None if digests is None else digests.scales,
            )
        )
    return tuple(
        RequestPages(row, name, int(kv_lens[row]), tuple(pages[row])) for row, name in enumerate(inspection.names)
    )


def _summary(cache: PagedKVCacheCollection, layout: CacheLayout, storage: str, live: LivePages) -> PoolSummary:
    scale_pool = cache.scale_pool if storage == PAGED else None
    return PoolSummary(
        layout=str(layout),
        scales=storage,
        page_size=cache.page_size,
        num_layers=cache.num_layers,
        num_value_pages=cache.value_pool.num_pages,
        num_scale_pages=None if scale_pool is None else scale_pool.num_pages,
        dead_value_pages=_unused(cache.value_pool.num_pages, live.value_page.tolist()),
        dead_scale_pages=None if scale_pool is None else _unused(scale_pool.num_pages, live.scale_page.tolist()),
    )


def _unused(num_pages: int, used: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs of ids below `num_pages` that don't occur in `used`, as (first, last)."""
    inside = sorted({page for page in used if 0 <= page < num_pages})
    edges = [-1, *inside, num_pages]
    return tuple((before + 1, after - 1) for before, after in pairwise(edges) if after - before > 1)
