"""What is wrong with the pages themselves: flaws, scales of another size, and scales that stayed behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.kv_cache.cache_report import PAGED, PER_TENSOR, WARNING, CacheReport, PageInUse, RequestPages
from pagedmla.kv_cache.page_contents import (
    FLOOR_SCALE,
    NAN_VALUES,
    NEGATIVE_SCALE,
    NON_FINITE_SCALE,
    ZERO_SCALE,
    Flaw,
    PageContents,
)
from pagedmla.kv_cache.table_findings import Inspection
from pagedmla.kv_cache.validation import LivePages

MEDIAN_SCALE_BITS = 6  # a page's median scale may be this far, in powers of two, from the request's other pages

_FLAW_WORDS = {
    ZERO_SCALE: "a scale of 0",
    NEGATIVE_SCALE: "a negative scale",
    NON_FINITE_SCALE: "a NaN or infinite scale",
    FLOOR_SCALE: "the scale of an all-zero row beside values that aren't zero",
    NAN_VALUES: "NaN among its values",
}


@dataclass(frozen=True)
class PagePairs:
    """Value page and scale page as they occur together; every pair is read once, however many rows share it.

    entries  of each pair, as indices into the live entries; pair_of goes the other way
    """

    entries: list[list[int]]
    pair_of: dict[int, int]

    @classmethod
    def of(cls, live: LivePages, inside: Tensor) -> PagePairs:
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for at in torch.nonzero(inside).flatten().tolist():
            found[int(live.value_page[at]), int(live.scale_page[at])].append(at)
        entries = list(found.values())
        return cls(entries, {at: pair for pair, held in enumerate(entries) for at in held})

    def live(self, live: LivePages) -> LivePages:
        """One entry for each pair: that of the row with the most tokens in it."""
        fullest = [max(held, key=lambda at: int(live.fill[at])) for held in self.entries]
        return LivePages(*(column[torch.tensor(fullest, dtype=torch.int64)] for column in live))

    def wanted_slots(self, pair: int, live: LivePages, names: list[str], earlier: Earlier | None) -> set[int]:
        """How many of the pair's first slots to digest: as each row has them, and as each row had them before."""
        wanted = {int(live.fill[at]) for at in self.entries[pair]}
        if earlier is not None:
            for at in self.entries[pair]:
                prior = earlier.at(names[int(live.row[at])], int(live.column[at]))
                if prior is not None and prior.fill <= max(wanted):
                    wanted.add(prior.fill)
        return wanted


def check_contents(
    inspection: Inspection, live: LivePages, pairs: PagePairs, contents: PageContents, layers: list[int]
) -> None:
    """Note what is wrong in live pages: each flaw once, for all of `layers`; and in the one scale of a layer."""
    for pair, flaws in enumerate(contents.flaws):
        at = pairs.entries[pair][0]
        fill = max(int(live.fill[entry]) for entry in pairs.entries[pair])
        for flaw in flaws:
            _describe_flaw(inspection, live, at, flaw, fill * len(layers))
    if inspection.storage != PER_TENSOR:
        return
    for health in contents.layers:
        for kind, count, word in (
            (ZERO_SCALE, health.zero_scales, "0"),
            (NEGATIVE_SCALE, health.negative_scales, "negative"),
            (NON_FINITE_SCALE, health.non_finite_scales, "NaN or infinite"),
        ):
            if count:
                inspection.note(kind, f"kv_scales: the one scale of layer {health.layer} is {word}", layer=health.layer)


def _describe_flaw(inspection: Inspection, live: LivePages, at: int, flaw: Flaw, slots: int) -> None:
    row, column, value_page = int(live.row[at]), int(live.column[at]), int(live.value_page[at])
    scale_page = int(live.scale_page[at]) if inspection.storage == PAGED else None
    if flaw.kind == NAN_VALUES:
        subject = f"kv_blocks: {inspection.row(row)}, column {column}: value page {value_page}"
    elif scale_page is None:
        subject = f"kv_blocks: {inspection.row(row)}, column {column}: value page {value_page} (scales inside it)"
    else:
        subject = (
            f"kv_scales: {inspection.row(row)}, column {column}: scale page {scale_page} (value page {value_page})"
        )
    inspection.note(
        flaw.kind,
        f"{subject} has {_FLAW_WORDS[flaw.kind]} in {flaw.slots} of {slots} live slots, first in layer {flaw.layer}, "
        f"slot {flaw.slot}",
        row=row,
        column=column,
        value_page=value_page,
        scale_page=scale_page,
        layer=flaw.layer,
    )


def check_scale_sizes(
    inspection: Inspection, live: LivePages, pairs: PagePairs, contents: PageContents, layers: list[int]
) -> None:
    """A page whose scales are of another size than those around it may hold another page's scales."""
    rows: dict[int, list[int]] = defaultdict(list)
    for at in pairs.pair_of:
        rows[int(live.row[at])].append(at)
    reported: set[int] = set()
    for row, entries in sorted(rows.items()):
        medians = contents.medians[[pairs.pair_of[at] for at in entries]]  # [pages, layers]
        usual = medians.flip(0) if len(entries) == 2 else medians.nanmedian(0).values  # of two, each is the other's
        distances = (medians - usual).nan_to_num(0.0)
        for at, distance in zip(entries, distances):
            index = int(distance.abs().argmax())
            if abs(float(distance[index])) <= MEDIAN_SCALE_BITS or pairs.pair_of[at] in reported:
                continue
            reported.add(pairs.pair_of[at])
            column, value_page = int(live.column[at]), int(live.value_page[at])
            scale_page = int(live.scale_page[at]) if inspection.storage == PAGED else None
            pages = f"value page {value_page}" + ("" if scale_page is None else f", scale page {scale_page}")
            inspection.note(
                "scale_size",
                f"kv_scales: {inspection.row(row)}, column {column} ({pages}): in layer {layers[index]} its median "
                f"scale is 2^{float(distance[index]):+.1f} times that of the request's other pages",
                WARNING,
                row=row,
                column=column,
                value_page=value_page,
                scale_page=scale_page,
                layer=layers[index],
            )


class Earlier:
    """Pages of an earlier report, by their place in a request and by their value bytes."""

    def __init__(self, report: CacheReport) -> None:
        self._places: dict[tuple[str, int], PageInUse] = {}
        self._by_values: dict[str, list[PageInUse]] = defaultdict(list)
        for request in report.requests:
            for page in request.pages:
                self._places[request.name, page.column] = page
                if page.value_digest is not None:
                    self._by_values[page.value_digest].append(page)

    def at(self, name: str, column: int) -> PageInUse | None:
        return self._places.get((name, column))

    def with_values(self, digest: str | None) -> list[PageInUse]:
        return [] if digest is None else self._by_values.get(digest, [])


def check_scales_left_behind(
    inspection: Inspection, requests: Sequence[RequestPages], pairs: PagePairs, contents: PageContents, earlier: Earlier
) -> None:
    """Pages that have the value bytes of before, and not the scale bytes that went with them.

    The same place of the same request is looked at first, over the slots it had then; after that any page that had the
    same bytes, since an engine may have moved a request to another row.
    """
    reported: set[int] = set()
    entries = (page for request in requests for page in request.pages)
    for at, page in enumerate(entries):
        if page.scale_digest is None or pairs.pair_of[at] in reported:
            continue
        left = _left_behind(inspection.names[page.row], page, contents, pairs.pair_of[at], earlier)
        if left is None:
            continue
        reported.add(pairs.pair_of[at])
        scales = "the ones inside it are others"
        if page.scale_page is not None:
            scales = f"those were in scale page {left.scale_page}, and scale page {page.scale_page} holds others"
        inspection.note(
            "scales_left_behind",
            f"kv_scales: {inspection.row(page.row)}, column {page.column}: value page {page.value_page} holds the "
            f"bytes that value page {left.value_page} held in the earlier report, without their scales: {scales}",
            row=page.row,
            column=page.column,
            value_page=page.value_page,
            scale_page=page.scale_page,
        )


def _left_behind(name: str, page: PageInUse, contents: PageContents, pair: int, earlier: Earlier) -> PageInUse | None:
    """The earlier page whose scales are missing now, if any."""
    prior = earlier.at(name, page.column)
    if prior is not None and prior.value_digest is not None:
        now = contents.digests[pair].get(prior.fill)
        if now is not None and now.values == prior.value_digest:
            return None if now.scales == prior.scale_digest else prior
    same_values = earlier.with_values(page.value_digest)
    if not same_values or any(found.scale_digest == page.scale_digest for found in same_values):
        return None
    return same_values[0]
