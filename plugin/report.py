"""A CacheReport for people: tables and a map of the pages for a terminal, and a picture.

A page carries the letter and the colour of the request it belongs to. Colours repeat after seven, letters after 62; the
palette is Okabe and Ito's, which colour-blind readers can tell apart, and letters say the same again.
"""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from os import PathLike
from typing import TYPE_CHECKING, Any

from pagedmla.kv_cache.cache_report import ERROR, NO_SCALES, CacheReport, Finding, PageInUse
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.plugin.pictures import new_figure, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
SHARED, DEAD, WRONG = "*", ".", "!"

MOST_ROWS = 200  # of the table of pages
MOST_FINDINGS = 50
MOST_LEGENDS = 14


@dataclass
class PoolMap:
    """Who is in which page of one pool: rows of the table by page id, live slots, and pages with a problem."""

    name: str
    num_pages: int
    owners: dict[int, list[int]] = field(default_factory=dict)
    fill: dict[int, int] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)

    def add(self, page: int | None, row: int, fill: int) -> None:
        if page is None or not 0 <= page < self.num_pages:
            return
        owners = self.owners.setdefault(page, [])
        if row not in owners:
            owners.append(row)
        self.fill[page] = max(fill, self.fill.get(page, 0))


def pool_maps(report: CacheReport) -> list[PoolMap]:
    """The value pool, and the scale pool where scales have pages of their own."""
    maps = [PoolMap("value", report.pool.num_value_pages)]
    if report.pool.num_scale_pages is not None:
        maps.append(PoolMap("scale", report.pool.num_scale_pages))
    for page in report.pages():
        for pool, number in zip(maps, (page.value_page, page.scale_page)):
            pool.add(number, page.row, page.fill)
    for problem in report.problems:
        for pool, number in zip(maps, (problem.value_page, problem.scale_page)):
            if number is not None:
                pool.wrong.add(number)
    return maps


def letter(row: int) -> str:
    return LETTERS[row % len(LETTERS)]


def colour(row: int) -> str:
    return COLOURS[row % len(COLOURS)]


def print_report(report: CacheReport) -> None:
    """Everything, on the terminal: the pools, the page map, the tables, what is wrong."""
    from rich.console import Console

    console = Console()
    headline, *tables, findings = to_table(report)
    for part in (headline, "", page_map(report, console.width), "", *tables, findings):
        console.print(part)


# -- tables ----------------------------------------------------------------------------------------------------------


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
    return Text(
        f"{pool.layout}: {_count(pool.num_layers, 'layer')}, pages of {pool.page_size} tokens; {used} live{scales}"
    )


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
    names = [request.name for request in report.requests]
    rows = 0
    for request in report.requests:
        # A name as a plain str would be read as markup.
        first: list[RenderableType] = [Text(f"{letter(request.row)} {request.name}"), f"{request.kv_len:,}"]
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
    table = _table("Values", ("layer",), ("live slots", "amax", "saturated", "NaN slots"))
    for layer in report.layers:
        saturated = "-" if layer.saturated is None else f"{layer.saturated:.2%}"
        table.add_row(str(layer.layer), f"{layer.live_slots:,}", _number(layer.amax), saturated, f"{layer.nan_slots:,}")
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
    text = Text(f"{_count(len(report.problems), 'problem')}, {_count(len(report.warnings), 'warning')}")
    for finding in shown[:MOST_FINDINGS]:
        text.append("\n")
        text.append_text(_line(finding))
    if len(shown) > MOST_FINDINGS:
        text.append(f"\n{len(shown) - MOST_FINDINGS:,} more; the JSON form has them all")
    return text


def _line(finding: Finding) -> Text:
    from rich.text import Text

    label = ("problem", "bold red") if finding.severity == ERROR else ("warning", "yellow")
    return Text.assemble(label, f" {finding.sentence}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# -- the map ---------------------------------------------------------------------------------------------------------


def page_map(report: CacheReport, width: int | None = None) -> Text:
    """The pages of both pools as a grid of letters, side by side where `width` columns (None: the terminal's) allow.

    Plain in a pipe, in colour on a terminal.
    """
    from rich.text import Text

    width = shutil.get_terminal_size().columns if width is None else width
    maps = pool_maps(report)
    across, beside = _grid_width(maps, width)
    blocks = [_grid_lines(pool, across) for pool in maps]
    lines: list[Text] = []
    if beside:
        left_width = max(line.cell_len for line in blocks[0]) + 3
        for left, right in zip_longest(blocks[0], blocks[1], fillvalue=Text()):
            left = left.copy()
            left.pad_right(left_width - left.cell_len)
            lines.append(left + right)
    else:
        lines = [line for block in blocks for line in block]
    return Text("\n").join([*lines, *_legend(report, maps)])


def _grid_width(maps: list[PoolMap], width: int) -> tuple[int, bool]:
    """Pages a line, and whether two pools fit side by side."""
    label = max(len(str(pool.num_pages)) for pool in maps) + 1
    for across in (32, 16, 8):
        if len(maps) == 2 and 2 * (label + 2 * across) + 3 <= width:
            return across, True
    for across in (32, 16, 8):
        if label + 2 * across <= width:
            return across, False
    return 4, False


def _grid_lines(pool: PoolMap, across: int) -> list[Text]:
    from rich.text import Text

    label = len(str(max(pool.num_pages - 1, 0)))
    lines = [Text(f"{pool.name} pages", style="bold")]
    starts = range(0, pool.num_pages, across)
    for empty, group in groupby(starts, lambda start: pool.owners.keys().isdisjoint(range(start, start + across))):
        run = list(group)
        if empty and len(run) > 2:
            end = min(run[-1] + across, pool.num_pages)
            lines.append(Text(f"{run[0]:>{label}} {DEAD} to {end - 1}", style="dim"))
            continue
        for start in run:
            line = Text(f"{start:>{label}} ")
            for page in range(start, min(start + across, pool.num_pages)):
                line.append_text(_cell(pool, page))
            lines.append(line)
    return lines


def _cell(pool: PoolMap, page: int) -> Text:
    from rich.text import Text

    owners = pool.owners.get(page, [])
    mark = (WRONG, "bold red") if page in pool.wrong else " "
    if not owners:
        return Text.assemble((DEAD, "dim"), mark)
    if len(owners) > 1:
        return Text.assemble((SHARED, "bold"), mark)
    return Text.assemble((letter(owners[0]), f"bold {colour(owners[0])}"), mark)


def _legend(report: CacheReport, maps: list[PoolMap]) -> list[Text]:
    from rich.text import Text

    lines = []
    for request in report.requests[:MOST_LEGENDS]:
        line = Text.assemble((letter(request.row), f"bold {colour(request.row)}"), f" {request.name}: ")
        lines.append(line.append(f"{_count(request.kv_len, 'token')} in {_count(len(request.pages), 'page')}"))
    if len(report.requests) > MOST_LEGENDS:
        lines.append(Text(f"and {len(report.requests) - MOST_LEGENDS:,} more requests"))
    marks = [f"{DEAD} no live tokens"]
    if any(len(owners) > 1 for pool in maps for owners in pool.owners.values()):
        marks.append(f"{SHARED} several requests")
    if any(pool.wrong for pool in maps):
        marks.append(f"{WRONG} problem")
    return [*lines, Text("   ".join(marks))]


# -- the picture -----------------------------------------------------------------------------------------------------

_DEAD_COLOUR = "#EEEEEE"
_SHARED_COLOUR = "#999999"
_DARK = "#0072B2"  # the one of COLOURS that black letters are hard to read on
_INCHES_A_CELL = 0.34
_LEGEND_COLUMNS = 3
_WIDEST = 20  # cells of a pool from left to right, before they shrink


def to_picture(report: CacheReport, path: str | PathLike[str]) -> None:
    """Draw the pools beside each other and write them to `path`, in the format that its ending names.

    A page is filled from below as far as its slots hold tokens; problems have a thick outline. Raises ImportError that
    names the extra where matplotlib is missing, ValueError for a format that it doesn't know.
    """
    maps = pool_maps(report)
    across = [_cells_across(pool.num_pages) for pool in maps]
    down = [max(1, ceildiv(pool.num_pages, cells)) for pool, cells in zip(maps, across)]
    cell = _INCHES_A_CELL * min(1.0, 2 * _WIDEST / max(*across, *down))
    legend_rows = ceildiv(min(len(report.requests), MOST_LEGENDS) + 4, _LEGEND_COLUMNS)
    width = max(7.0, sum(across) * cell + 0.9 * len(maps) + 0.6)
    height = max(down) * cell + 1.5 + 0.24 * legend_rows
    figure = new_figure(width, height)
    axes = figure.subplots(1, len(maps), squeeze=False, width_ratios=across)[0]
    for each, pool, cells in zip(axes, maps, across):
        _draw_pool(each, pool, cells, report.pool.page_size, letters=cell > 0.15)
    state = _count(len(report.problems), "problem") if report.problems else "no problems"
    figure.suptitle(f"{report.pool.layout}, pages of {report.pool.page_size} tokens: {state}", fontsize=11)
    figure.legend(
        handles=_legend_handles(report, maps),
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
    )
    write_picture(figure, path)


def _cells_across(num_pages: int) -> int:
    """About as many cells across as down, in whole groups of four."""
    if num_pages <= 8:
        return max(1, num_pages)
    return ceildiv(round(num_pages**0.5), 4) * 4


def _draw_pool(axes: Axes, pool: PoolMap, across: int, page_size: int, *, letters: bool) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    down = max(1, ceildiv(pool.num_pages, across))
    patches, colours = [], []
    for page in range(pool.num_pages):
        y, x = divmod(page, across)
        patches.append(Rectangle((x, y), 1, 1))
        colours.append(_DEAD_COLOUR)
        if page in pool.owners:
            part = pool.fill[page] / page_size
            patches.append(Rectangle((x, y + 1 - part), 1, part))
            colours.append(_page_colour(pool, page))
    axes.add_collection(PatchCollection(patches, facecolors=colours, edgecolors="white", linewidths=0.6))
    for page in sorted(pool.wrong):
        if 0 <= page < pool.num_pages:
            y, x = divmod(page, across)
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor="black", linewidth=2.2, zorder=3))
    if letters:
        for page, owners in pool.owners.items():
            y, x = divmod(page, across)
            mark = SHARED if len(owners) > 1 else letter(owners[0])
            on_dark = _page_colour(pool, page) == _DARK and pool.fill[page] > 0.6 * page_size
            ink = "white" if on_dark else "black"
            axes.text(x + 0.5, y + 0.52, mark, ha="center", va="center", fontsize=8.5, color=ink, zorder=4)
    axes.set(xlim=(-0.1, across + 0.1), ylim=(down + 0.1, -0.1), aspect="equal", anchor="N")
    axes.set_title(f"{pool.name} pool: {len(pool.owners):,} of {pool.num_pages:,} pages live", fontsize=9.5)
    axes.set_xticks([])
    step = max(1, ceildiv(down, 12))
    axes.set_yticks([row + 0.5 for row in range(0, down, step)], [str(row * across) for row in range(0, down, step)])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _page_colour(pool: PoolMap, page: int) -> str:
    owners = pool.owners[page]
    return _SHARED_COLOUR if len(owners) > 1 else colour(owners[0])


def _legend_handles(report: CacheReport, maps: list[PoolMap]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour(request.row), label=f"{letter(request.row)}  {_shorten(request.name)}")
        for request in report.requests[:MOST_LEGENDS]
    ]
    if len(report.requests) > MOST_LEGENDS:
        more = len(report.requests) - MOST_LEGENDS
        handles.append(Patch(facecolor="white", label=f"and {more:,} more requests"))
    if any(len(owners) > 1 for pool in maps for owners in pool.owners.values()):
        handles.append(Patch(facecolor=_SHARED_COLOUR, label=f"{SHARED}  several requests"))
    handles.append(Patch(facecolor=_DEAD_COLOUR, label="no live tokens"))
    if any(pool.wrong for pool in maps):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=2.2, label="problem"))
    return handles


def _shorten(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
