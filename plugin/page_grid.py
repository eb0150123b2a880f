"""The pages of a CacheReport's pools as a grid of letters, for a terminal or a pipe."""

from __future__ import annotations

import shutil
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from pagedmla.kv_cache.cache_report import CacheReport
from pagedmla.kv_cache.checks import counted
from pagedmla.plugin.page_maps import (
    DEAD,
    MOST_LEGENDS,
    SHARED,
    WRONG,
    PoolMap,
    colour,
    letter,
    pool_maps,
)
from pagedmla.plugin.terminal import printable

if TYPE_CHECKING:
    from rich.text import Text


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
        line = Text.assemble((letter(request.row), f"bold {colour(request.row)}"), f" {printable(request.name)}: ")
        lines.append(line.append(f"{counted(request.kv_len, 'token')} in {counted(len(request.pages), 'page')}"))
    if len(report.requests) > MOST_LEGENDS:
        lines.append(Text(f"and {len(report.requests) - MOST_LEGENDS:,} more requests"))
    marks = [f"{DEAD} no live tokens"]
    if any(len(owners) > 1 for pool in maps for owners in pool.owners.values()):
        marks.append(f"{SHARED} several requests")
    if any(pool.wrong for pool in maps):
        marks.append(f"{WRONG} problem")
    return [*lines, Text("   ".join(marks))]
