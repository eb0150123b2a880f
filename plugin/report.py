"""A CacheReport for people, on a terminal: the pools, the page map, the tables, what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pagedmla.kv_cache.cache_report import ERROR, NO_SCALES, PER_TENSOR, CacheReport, Finding, PageInUse
from pagedmla.kv_cache.checks import counted
from pagedmla.plugin.page_grid import page_map
from pagedmla.plugin.page_maps import letter, pool_maps
from pagedmla.plugin.terminal import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MOST_ROWS = 200  # of the table of pages
MOST_FINDINGS = 50


def print_report(report: CacheReport) -> None:
    """Everything, on the terminal: the pools, the page map, the tables, what is wrong."""
    from rich.console import Console

    console = Console()
    headline, *tables, findings = to_table(report)
    for part in (headline, "", page_map(report, console.width), "", *tables, findings):
        console.print(part)


def to_table(report: CacheReport) -> list[RenderableType]:
    """Rich renderables from top to bottom: the pools, the pages of each request, each layer's health, what is wrong."""
    tables = [_pages_table(report), _values_table(report)]
    if report.pool.scales != NO_SCALES:
        tables.append(_scales_table(report))
    return [_headline(report), *tables, _findings(report)]


def _headline(report: CacheReport) -> Text:
    from rich.text import Text

    pool = report.pool
    used = " and ".join(f"{len(each.owners):,} of {each.num_pages:,} {each.name} pages" for each in pool_maps(report))
    scales = "" if pool.num_scale_pages is not None else f"; scales: {pool.scales}"
    layers, tokens = counted(pool.num_layers, "layer"), counted(pool.page_size, "token")
    return Text(printable(f"{pool.layout}: {layers}, pages of {tokens}; {used} live{scales}"))


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """A table that folds cells where a terminal is narrow, and loses no digit."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _pages_table(report: CacheReport) -> Table:
    from rich.text import Text

    paged = report.pool.num_scale_pages is not None
    shared = any(page.shared_with for page in report.pages())
    headings = ("tokens", "column", "value id", *(("scale id",) if paged else ()), "fill")
    table = _table("Pages", ("request",), headings)
    if shared:
        table.add_column("shared with", overflow="fold")
    names = [printable(request.name) for request in report.requests]
    rows = 0
    for name, request in zip(names, report.requests):
        # A name as a plain str would be read as markup.
        first: list[RenderableType] = [Text(f"{letter(request.row)} {name}"), f"{request.kv_len:,}"]
        runs = [list(run) for run in _runs(request.pages)]
        if not runs:
            table.add_row(*first)
        for run in runs:
            rows += 1
            if rows > MOST_ROWS:
                continue
            cells: list[RenderableType] = [_span(run[0].column, run[-1].column)]
            cells.append(_span(run[0].value_page, run[-1].value_page))
            if run[0].scale_page is not None and run[-1].scale_page is not None:
                cells.append(_span(run[0].scale_page, run[-1].scale_page))
            cells.append(f"{run[0].fill}/{report.pool.page_size}")
            if shared:
                cells.append(Text(", ".join(names[row] for row in run[0].shared_with)))
            table.add_row(*first, *cells)
            first = ["", ""]
    if rows > MOST_ROWS:
        table.caption = f"{rows - MOST_ROWS:,} more rows; the JSON form has them all"
    return table


def _runs(pages: tuple[PageInUse, ...]) -> Iterator[Iterator[PageInUse]]:
    """Neighbours whose ids rise together and that are alike in all else, as one."""

    def key(page: PageInUse) -> tuple[Any, ...]:
        scale = None if page.scale_page is None else page.scale_page - page.column
        return page.value_page - page.column, scale, page.fill, page.shared_with

    return (run for _, run in groupby(pages, key))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _values_table(report: CacheReport) -> Table:
    quantised = any(layer.saturated is not None for layer in report.layers)
    table = _table("Values", ("layer",), ("live slots", "amax", *(["at ±448"] if quantised else []), "NaN slots"))
    if quantised and report.pool.scales != PER_TENSOR:
        table.caption = "at ±448, e4m3's largest: of each scale's numbers the largest is there by design"
        table.caption_justify = "left"
    for layer in report.layers:
        saturated = ["-" if layer.saturated is None else f"{layer.saturated:.2%}"] if quantised else []
        table.add_row(
            str(layer.layer), f"{layer.live_slots:,}", _number(layer.amax), *saturated, f"{layer.nan_slots:,}"
        )
    return table


def _scales_table(report: CacheReport) -> Table:
    table = _table("Scales", ("layer",), ("smallest", "largest", "zero", "negative", "not finite"))
    for layer in report.layers:
        table.add_row(
            str(layer.layer),
            _number(layer.sigma_min),
            _number(layer.sigma_max),
            f"{layer.zero_scales:,}",
            f"{layer.negative_scales:,}",
            f"{layer.non_finite_scales:,}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _findings(report: CacheReport) -> Text:
    from rich.text import Text

    shown = [*report.problems, *report.warnings]
    if not shown:
        return Text("No problems.", style="green")
    text = Text(f"{counted(len(report.problems), 'problem')}, {counted(len(report.warnings), 'warning')}")
    for finding in shown[:MOST_FINDINGS]:
        text.append("\n")
        text.append_text(_line(finding))
    if len(shown) > MOST_FINDINGS:
        text.append(f"\n{len(shown) - MOST_FINDINGS:,} more; the JSON form has them all")
    return text


def _line(finding: Finding) -> Text:
    from rich.text import Text

    label = ("problem", "bold red") if finding.severity == ERROR else ("warning", "yellow")
    return Text.assemble(label, f" {printable(finding.sentence)}")
