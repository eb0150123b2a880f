"""What the live slots of pages hold: digests that tell a page's bytes again, and the health of values and scales.

Pages are read in batches and one layer at a time, so that a pool larger than the free memory can be looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.cache_report import FindingKind, LayerHealth
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import E4M3, CacheLayout, RowPlanes
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.quantise import SIGMA_FLOOR
from pagedmla.kv_cache.validation import LivePages, live_scales, live_slots, nan_rows

TOKENS_A_BATCH = 8192  # 18 MiB of float32 rows

ZERO_SCALE: FindingKind = "zero_scale"
NEGATIVE_SCALE: FindingKind = "negative_scale"
NON_FINITE_SCALE: FindingKind = "non_finite_scale"
FLOOR_SCALE: FindingKind = "floor_scale"
NAN_VALUES: FindingKind = "nan_values"

_E4M3_MAGNITUDE = 0x7F
_E4M3_LARGEST = 0x7E


class Digests(NamedTuple):
    """Of a page's first slots in all layers; `scales` None where there are none that belong to the page."""

    values: str
    scales: str | None


class Flaw(NamedTuple):
    """Bad slots of one page, over all layers: how many, and where the first is."""

    kind: FindingKind
    slots: int
    layer: int
    slot: int


@dataclass(eq=False)
class PageContents:
    """Of the pages given to `read_pages`, in their order.

    digests  one for each wanted number of slots
    flaws    bad scales and NaN rows
    medians  log2 of the median scale, float32 [pages, layers]; NaN where a page has no positive finite scale
    """

    digests: list[dict[int, Digests]]
    flaws: list[list[Flaw]]
    medians: Tensor
    layers: tuple[LayerHealth, ...]


def read_pages(
    cache: PagedKVCacheCollection,
    layout: CacheLayout,
    layers: Sequence[int],
    live: LivePages,
    wanted_slots: Sequence[set[int]],
    *,
    per_tensor: bool = False,
) -> PageContents:
    """Look at every page of `live` (ids inside both pools) once; digest its first n slots for n in `wanted_slots`.

    With `per_tensor` every page has the one scale of its layer: it is counted in the layer's health, no digest and no
    flaw comes from it.
    """
    hashes = [{slots: _PageHash() for slots in wanted} for wanted in wanted_slots]
    flaws: list[dict[FindingKind, Flaw]] = [{} for _ in wanted_slots]
    medians = torch.full((live.row.numel(), len(layers)), torch.nan)
    healths = []
    for index, layer in enumerate(layers):
        planes = layout.planes(cache.value_pool, cache.scale_pool, layer)
        tally = _Tally(layer)
        for batch in _batches(live.row.numel(), cache.page_size):
            pages = LivePages(*(column[batch].to(cache.blocks.device) for column in live))
            sigma = live_scales(planes, pages)
            used = live_slots(pages, cache.page_size)
            bad = {NAN_VALUES: used & nan_rows(planes, pages)}
            if sigma is not None:
                bad |= _bad_scales(planes, pages, sigma, used)
                medians[batch, index] = _log2_median(sigma, used)
            tally.add(_rows(cache, layout, layer, pages, sigma), _codes(planes, pages), sigma, used, bad)
            if per_tensor:
                bad = {NAN_VALUES: bad[NAN_VALUES]}
            for kind, slots in bad.items():
                _note(flaws, batch.start, kind, slots, layer)
            own_scales = None if per_tensor else planes.scales
            _update(hashes[batch], planes, own_scales, pages)
        healths.append(tally.health())
    return PageContents(
        [{slots: page_hash.digests() for slots, page_hash in page.items()} for page in hashes],
        [list(found.values()) for found in flaws],
        medians,
        tuple(healths),
    )


def _batches(pages: int, page_size: int) -> Iterator[slice]:
    step = max(1, TOKENS_A_BATCH // page_size)
    return (slice(start, min(start + step, pages)) for start in range(0, pages, step))


# -- scales ----------------------------------------------------------------------------------------------------------


def _bad_scales(planes: RowPlanes, pages: LivePages, sigma: Tensor, used: Tensor) -> dict[FindingKind, Tensor]:
    """Slots of each kind of bad scale: bool `[pages, page_size]` each, from `sigma [pages, page_size, G]`."""
    written = (_magnitudes(planes.latent, pages) != 0).any(-1)
    return {
        ZERO_SCALE: used & (sigma == 0).any(-1),
        NEGATIVE_SCALE: used & (sigma < 0).any(-1),
        NON_FINITE_SCALE: used & ~sigma.isfinite().all(-1),
        # The floor is the scale of an all-zero row: beside other values it was never theirs.
        FLOOR_SCALE: used & ((sigma > 0) & (sigma <= SIGMA_FLOOR)).all(-1) & written,
    }


def _log2_median(sigma: Tensor, used: Tensor) -> Tensor:
    good = used.unsqueeze(-1) & sigma.isfinite() & (sigma > 0)
    return torch.where(good, sigma.log2(), torch.nan).flatten(1).nanmedian(1).values.cpu()


def _magnitudes(plane: Tensor, pages: LivePages) -> Tensor:
    return raw_view(plane)[pages.value_page] & _E4M3_MAGNITUDE


# -- values ----------------------------------------------------------------------------------------------------------


def _rows(
    cache: PagedKVCacheCollection, layout: CacheLayout, layer: int, pages: LivePages, sigma: Tensor | None
) -> Tensor:
    """Dequantised rows, float32 `[pages, page_size, latent + rope]`."""
    plane = cache.value_pool.layer(0, layer).squeeze(2)
    rows = raw_view(plane)[pages.value_page].view(plane.dtype)
    return layout.dequantize(rows, None if layout.inline_scales else sigma)


def _codes(planes: RowPlanes, pages: LivePages) -> list[Tensor]:
    """Magnitudes of the e4m3 codes, `[pages, page_size, columns]` for each plane that holds such."""
    return [_magnitudes(plane, pages) for plane in (planes.latent, planes.rope) if plane.dtype == E4M3]


class _Tally:
    """Running numbers of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.slots = self.codes = self.largest_codes = self.nan_slots = 0
        self.scales = {ZERO_SCALE: 0, NEGATIVE_SCALE: 0, NON_FINITE_SCALE: 0}
        self.amax: float | None = None
        self.sigma: tuple[float, float] | None = None

    def add(
        self, rows: Tensor, codes: list[Tensor], sigma: Tensor | None, used: Tensor, bad: dict[FindingKind, Tensor]
    ) -> None:
        slots = int(used.sum())
        self.slots += slots
        self.nan_slots += int(bad[NAN_VALUES].sum())
        # Copies of the live rows would cost more than all the rest.
        largest = rows.abs().nan_to_num_(-1.0, posinf=-1.0).amax(-1).masked_fill_(~used, -1.0)
        if largest.numel() and float(largest.max()) >= 0:
            self.amax = max(self.amax or 0.0, float(largest.max()))
        for plane in codes:
            self.codes += slots * plane.shape[-1]
            self.largest_codes += int(((plane == _E4M3_LARGEST).sum(-1) * used).sum())
        if sigma is None:
            return
        live = sigma[used]
        self.scales[ZERO_SCALE] += int((live == 0).sum())
        self.scales[NEGATIVE_SCALE] += int((live < 0).sum())
        self.scales[NON_FINITE_SCALE] += int((~live.isfinite()).sum())
        good = live[live.isfinite() & (live > 0)]
        if good.numel():
            low, high = float(good.min()), float(good.max())
            self.sigma = (low, high) if self.sigma is None else (min(low, self.sigma[0]), max(high, self.sigma[1]))

    def health(self) -> LayerHealth:
        low, high = self.sigma or (None, None)
        return LayerHealth(
            self.layer,
            self.slots,
            self.amax,
            self.largest_codes / self.codes if self.codes else None,
            low,
            high,
            self.scales[ZERO_SCALE],
            self.scales[NEGATIVE_SCALE],
            self.scales[NON_FINITE_SCALE],
            self.nan_slots,
        )


def _note(flaws: list[dict[FindingKind, Flaw]], first_page: int, kind: FindingKind, slots: Tensor, layer: int) -> None:
    counts = slots.sum(1).tolist()
    for page in (page for page, count in enumerate(counts) if count):
        earlier = flaws[first_page + page].get(kind)
        if earlier is None:
            slot = int(slots[page].to(torch.uint8).argmax())
            flaws[first_page + page][kind] = Flaw(kind, counts[page], layer, slot)
        else:
            flaws[first_page + page][kind] = earlier._replace(slots=earlier.slots + counts[page])


# -- digests ---------------------------------------------------------------------------------------------------------


@dataclass
class _PageHash:
    values: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    scales: hashlib.blake2b | None = None

    def digests(self) -> Digests:
        return Digests(self.values.hexdigest(), None if self.scales is None else self.scales.hexdigest())


def _update(hashes: Sequence[dict[int, _PageHash]], planes: RowPlanes, scales: Tensor | None, pages: LivePages) -> None:
    scale_page = pages.value_page if planes.scales_in_value_pages else pages.scale_page
    values = [raw_view(plane)[pages.value_page].cpu().numpy() for plane in (planes.latent, planes.rope)]
    sigmas = None if scales is None else raw_view(scales)[scale_page].cpu().numpy()
    for i, page in enumerate(hashes):
        for slots, page_hash in page.items():
            for plane in values:
                page_hash.values.update(plane[i, :slots].tobytes())
            if sigmas is not None:
                page_hash.scales = page_hash.scales or hashlib.blake2b(digest_size=8)
                page_hash.scales.update(sigmas[i, :slots].tobytes())
