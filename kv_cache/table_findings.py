"""What is wrong with lengths and tables: ids, widths, bounds, sharing and pairing. Every check adds findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedmla.kv_cache.cache_report import ERROR, PAGED, WARNING, Finding, FindingKind
from pagedmla.kv_cache.checks import INDEX_DTYPES, ceildiv, counted, expect_int, expect_tensor, quoted, refuse
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.kv_cache.tables import int64_lengths
from pagedmla.kv_cache.validation import LivePages, live_pages


@dataclass(eq=False)
class Inspection:
    """What is inspected, and what was found so far. `names` are shown where the caller gave them (`named`)."""

    cache: PagedKVCacheCollection
    storage: str
    names: list[str]
    named: bool
    findings: list[Finding] = field(default_factory=list)

    def note(self, kind: FindingKind, sentence: str, severity: str = ERROR, /, **where: int | None) -> None:
        self.findings.append(Finding(kind, severity, sentence, **where))

    def row(self, row: int) -> str:
        return f"row {row} ({self.names[row]})" if self.named else f"row {row}"


def row_lengths(
    inspection: Inspection, query_start_loc: Tensor | None, kv_lens: Tensor | Sequence[int] | None
) -> Tensor:
    """Tokens that each row should have, int64 `[B]` on the host; findings for what can't be meant."""
    cache = inspection.cache
    batch = cache.cache_lengths.shape[0]
    query_lens = torch.zeros(batch, dtype=torch.int64)
    if query_start_loc is not None:
        expect_tensor(query_start_loc, "query_start_loc", [batch + 1], (*INDEX_DTYPES, torch.int64))
        starts = query_start_loc.cpu().to(torch.int64)
        query_lens = starts.diff()
        if bool((query_lens < 0).any()) or int(starts[0]) != 0:
            inspection.note(
                "query_start_loc", f"query_start_loc: expected 0 first, then rising or equal; got {starts.tolist()}"
            )
        _check_bound(inspection, query_lens, "max_prompt_length", cache.max_prompt_length, "brings")
    name = "cache_lengths" if kv_lens is None else "kv_lens"
    if kv_lens is None:
        lengths = int64_lengths(cache.cache_lengths).cpu() + query_lens
    else:
        lengths = _as_lengths(kv_lens)
        expect_tensor(lengths, "kv_lens", [batch], ())
    least = -1 if query_start_loc is None and kv_lens is None else 0  # -1: a padding row, which has one query token
    for row in torch.nonzero(lengths < least).flatten().tolist():
        inspection.note(
            "negative_length", f"{name}: {inspection.row(row)} has {counted(int(lengths[row]), 'token')}", row=row
        )
    lengths = lengths.clamp(min=0)
    _check_bound(inspection, lengths, "max_cache_length", cache.max_cache_length, "has")
    return lengths


def _check_bound(inspection: Inspection, lengths: Tensor, name: str, bound: int, verb: str) -> None:
    """A step's own upper bound on some lengths, which sizes what is launched."""
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > bound:
        row = int(lengths.argmax())
        inspection.note(
            "bound",
            f"{name}: {inspection.row(row)} {verb} {counted(longest, 'token')}; the bound is {bound:,}",
            row=row,
        )


def _as_lengths(kv_lens: object) -> Tensor:
    if isinstance(kv_lens, Tensor):
        if kv_lens.dtype not in (*INDEX_DTYPES, torch.int64):
            refuse("kv_lens", "integers", kv_lens)
        return kv_lens.cpu().to(torch.int64)
    if isinstance(kv_lens, str) or not isinstance(kv_lens, Sequence):
        refuse("kv_lens", "a list of ints or a tensor", quoted(kv_lens), error=TypeError)
    return torch.tensor([expect_int(length, "kv_lens") for length in kv_lens], dtype=torch.int64)


def _tables(inspection: Inspection) -> list[tuple[str, Tensor, PagedTensor]]:
    """Each table that counts, by its name, with the pool it points into."""
    tables = [("lookup_table", inspection.cache.lookup_table, inspection.cache.value_pool)]
    if inspection.storage == PAGED and inspection.cache.scale_pool is not None:
        tables.append(("scales_lookup_table", inspection.cache.scales_lookup_table, inspection.cache.scale_pool))
    return tables


def entries_in_use(inspection: Inspection, kv_lens: Tensor) -> LivePages:
    """The entries in use, on the host, as far as the tables have columns for them."""
    page_size = inspection.cache.page_size
    for name, table, _ in _tables(inspection):
        for row in torch.nonzero(kv_lens > table.shape[1] * page_size).flatten().tolist():
            inspection.note(
                "table_width",
                f"{name}: {inspection.row(row)} needs {ceildiv(int(kv_lens[row]), page_size)} columns for "
                f"{counted(int(kv_lens[row]), 'token')} in pages of {page_size}; the table has {table.shape[1]}",
                row=row,
                column=table.shape[1],
            )
    columns = min(inspection.cache.lookup_table.shape[1], inspection.cache.scales_lookup_table.shape[1])
    reachable = kv_lens.clamp(max=columns * page_size)
    live = live_pages(inspection.cache, reachable.to(inspection.cache.cache_lengths.device))
    live = LivePages(*(entries.cpu() for entries in live))
    return live if inspection.storage == PAGED else live._replace(scale_page=torch.zeros_like(live.scale_page))


def check_ids(inspection: Inspection, live: LivePages) -> Tensor:
    """Which entries have all their ids inside the pools: bool `[n]`."""
    inside = torch.ones(live.row.numel(), dtype=torch.bool)
    for (name, _, pool), ids in zip(_tables(inspection), (live.value_page, live.scale_page)):
        outside = pool.outside(ids)
        inside &= ~outside
        which = "scale_page" if name == "scales_lookup_table" else "value_page"
        for at in torch.nonzero(outside).flatten().tolist():
            row, column, page = int(live.row[at]), int(live.column[at]), int(ids[at])
            inspection.note(
                "id_out_of_range",
                pool.names_outside(name, f"{inspection.row(row)}, column {column}", page),
                row=row,
                column=column,
                **{which: page},
            )
    return inside


def check_sharing(inspection: Inspection, live: LivePages) -> None:
    """A page serves one place of a sequence: its keys carry their positions."""
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, column, page in zip(live.row.tolist(), live.column.tolist(), live.value_page.tolist()):
        places[page].append((row, column))
    for page, held in places.items():
        row, column = held[0]
        for other_row, other_column in held[1:]:
            if other_column == column:
                continue
            where = {"row": other_row, "column": other_column, "value_page": page}
            if other_row == row:
                columns = f"columns {column} and {other_column}"
                sentence = f"lookup_table: {inspection.row(row)} has value page {page} in {columns}"
                inspection.note("repeated_page", sentence, **where)
            else:
                sentence = (
                    f"lookup_table: value page {page} is column {column} of {inspection.row(row)} and column "
                    f"{other_column} of {inspection.row(other_row)}; keys carry their positions"
                )
                inspection.note("shared_out_of_place", sentence, WARNING, **where)


def check_pairing(inspection: Inspection, live: LivePages) -> None:
    """Every value page has one scale page and the reverse, whoever looks."""
    scale_of: dict[int, tuple[int, int]] = {}
    value_of: dict[int, tuple[int, int]] = {}
    for at, (value, scale) in enumerate(zip(live.value_page.tolist(), live.scale_page.tolist())):
        row, column = int(live.row[at]), int(live.column[at])
        place = f"{inspection.row(row)}, column {column}"
        where = {"row": row, "column": column, "value_page": value, "scale_page": scale}
        for table, key, partner, this, that in (
            (value_of, scale, value, "scale", "value"),
            (scale_of, value, scale, "value", "scale"),
        ):
            first, first_at = table.setdefault(key, (partner, at))
            if first != partner:
                first_place = f"{inspection.row(int(live.row[first_at]))}, column {int(live.column[first_at])}"
                inspection.note(
                    "scale_page_shared" if this == "scale" else "value_page_torn",
                    f"scales_lookup_table: {this} page {key} goes with {that} page {first} at {first_place} and with "
                    f"{that} page {partner} at {place}",
                    **where,
                )
