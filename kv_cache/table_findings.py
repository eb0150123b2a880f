"""What is wrong with lengths and tables: ids, widths, bounds, sharing and pairing. Every check adds findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedmla.kv_cache.cache_report import ERROR, PAGED, WARNING, Finding
from pagedmla.kv_cache.checks import INDEX_DTYPES, ceildiv, expect_int, expect_tensor, quoted, refuse
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.kv_cache.tables import int64_lengths
from pagedmla.kv_cache.validation import LivePages, live_pages, out_of_pool


@dataclass(eq=False)
class Look:
    """What is being looked at, and what was found so far. `names` are shown where the caller gave them (`named`)."""

    cache: PagedKVCacheCollection
    storage: str
    names: list[str]
    named: bool
    findings: list[Finding] = field(default_factory=list)

    def find(self, kind: str, sentence: str, severity: str = ERROR, /, **where: int | None) -> None:
        self.findings.append(Finding(kind, severity, sentence, **where))

    def row(self, row: int) -> str:
        return f"row {row} ({self.names[row]})" if self.named else f"row {row}"


def row_lengths(look: Look, query_start_loc: Tensor | None, kv_lens: Tensor | Sequence[int] | None) -> Tensor:
    """Tokens that each row should have, int64 `[B]` on the host; findings for what can't be meant."""
    cache = look.cache
    batch = cache.cache_lengths.shape[0]
    query_lens = torch.zeros(batch, dtype=torch.int64)
    if query_start_loc is not None:
        expect_tensor(query_start_loc, "query_start_loc", [batch + 1], (*INDEX_DTYPES, torch.int64))
        starts = query_start_loc.cpu().to(torch.int64)
        query_lens = starts.diff()
        if bool((query_lens < 0).any()) or int(starts[0]) != 0:
            look.find(
                "query_start_loc", f"query_start_loc: expected 0 first, then rising or equal; got {starts.tolist()}"
            )
        longest = int(query_lens.max()) if batch else 0
        if longest > cache.max_prompt_length:
            row = int(query_lens.argmax())
            look.find(
                "bound",
                f"max_prompt_length: {look.row(row)} brings {longest} tokens; the bound is {cache.max_prompt_length}",
                row=row,
            )
    if kv_lens is None:
        lengths = int64_lengths(cache.cache_lengths).cpu() + query_lens
    else:
        lengths = _as_lengths(kv_lens)
        expect_tensor(lengths, "kv_lens", [batch], ())
    least = -1 if query_start_loc is None and kv_lens is None else 0  # -1: a padding row, which has one query token
    for row in torch.nonzero(lengths < least).flatten().tolist():
        look.find("negative_length", f"cache_lengths: {look.row(row)} has {int(lengths[row])} tokens", row=row)
    lengths = lengths.clamp(min=0)
    longest = int(lengths.max()) if batch else 0
    if longest > cache.max_cache_length:
        row = int(lengths.argmax())
        look.find(
            "bound",
            f"max_cache_length: {look.row(row)} has {longest} tokens; the bound is {cache.max_cache_length}",
            row=row,
        )
    return lengths


def _as_lengths(kv_lens: object) -> Tensor:
    if isinstance(kv_lens, Tensor):
        if kv_lens.dtype not in (*INDEX_DTYPES, torch.int64):
            refuse("kv_lens", "integers", kv_lens)
        return kv_lens.cpu().to(torch.int64)
    if isinstance(kv_lens, str) or not isinstance(kv_lens, Sequence):
        refuse("kv_lens", "a list of ints or a tensor", quoted(kv_lens), error=TypeError)
    return torch.tensor([expect_int(length, "kv_lens") for length in kv_lens], dtype=torch.int64)


def _tables(look: Look) -> list[tuple[str, Tensor, PagedTensor]]:
    """Each table that counts, by its name, with the pool it points into."""
    tables = [("lookup_table", look.cache.lookup_table, look.cache.value_pool)]
    if look.storage == PAGED and look.cache.scale_pool is not None:
        tables.append(("scales_lookup_table", look.cache.scales_lookup_table, look.cache.scale_pool))
    return tables


def entries_in_use(look: Look, kv_lens: Tensor) -> LivePages:
    """The entries in use, on the host, as far as the tables have columns for them."""
    page_size = look.cache.page_size
    for name, table, _ in _tables(look):
        for row in torch.nonzero(kv_lens > table.shape[1] * page_size).flatten().tolist():
            look.find(
                "table_width",
                f"{name}: {look.row(row)} needs {ceildiv(int(kv_lens[row]), page_size)} columns for "
                f"{int(kv_lens[row])} tokens in pages of {page_size}; the table has {table.shape[1]}",
                row=row,
                column=table.shape[1],
            )
    columns = min(look.cache.lookup_table.shape[1], look.cache.scales_lookup_table.shape[1])
    reachable = kv_lens.clamp(max=columns * page_size)
    live = live_pages(look.cache, reachable.to(look.cache.cache_lengths.device))
    live = LivePages(*(entries.cpu() for entries in live))
    return live if look.storage == PAGED else live._replace(scale_page=torch.zeros_like(live.scale_page))


def check_ids(look: Look, live: LivePages) -> Tensor:
    """Which entries have all their ids inside the pools: bool `[n]`."""
    inside = torch.ones(live.row.numel(), dtype=torch.bool)
    for (name, _, pool), ids in zip(_tables(look), (live.value_page, live.scale_page)):
        outside = out_of_pool(ids, pool)
        inside &= ~outside
        which = "scale_page" if name == "scales_lookup_table" else "value_page"
        for at in torch.nonzero(outside).flatten().tolist():
            row, column, page = int(live.row[at]), int(live.column[at]), int(ids[at])
            look.find(
                "id_out_of_range",
                f"{name}: {look.row(row)}, column {column} holds page id {page}; {pool.name} has "
                f"{pool.num_pages} pages",
                row=row,
                column=column,
                **{which: page},
            )
    return inside


def check_sharing(look: Look, live: LivePages) -> None:
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
                sentence = f"lookup_table: {look.row(row)} has value page {page} in columns {column} and {other_column}"
                look.find("repeated_page", sentence, **where)
            else:
                sentence = (
                    f"lookup_table: value page {page} is column {column} of {look.row(row)} and column {other_column} "
                    f"of {look.row(other_row)}; keys carry their positions"
                )
                look.find("shared_out_of_place", sentence, WARNING, **where)


def check_pairing(look: Look, live: LivePages) -> None:
    """Every value page has one scale page and the reverse, whoever looks."""
    scale_of: dict[int, tuple[int, int]] = {}
    value_of: dict[int, tuple[int, int]] = {}
    for at, (value, scale) in enumerate(zip(live.value_page.tolist(), live.scale_page.tolist())):
        row, column = int(live.row[at]), int(live.column[at])
        place = f"{look.row(row)}, column {column}"
        where = {"row": row, "column": column, "value_page": value, "scale_page": scale}
        for table, key, partner, kind, this, that in (
            (value_of, scale, value, "scale_page_shared", "scale", "value"),
            (scale_of, value, scale, "value_page_torn", "value", "scale"),
        ):
            first, first_at = table.setdefault(key, (partner, at))
            if first != partner:
                first_place = f"{look.row(int(live.row[first_at]))}, column {int(live.column[first_at])}"
                look.find(
                    kind,
                    f"scales_lookup_table: {this} page {key} goes with {that} page {first} at {first_place} and with "
                    f"{that} page {partner} at {place}",
                    **where,
                )
