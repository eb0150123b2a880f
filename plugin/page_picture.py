"""The pages of a CacheReport's pools as a picture."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from pagedmla.kv_cache.cache_report import CacheReport
from pagedmla.kv_cache.checks import ceildiv, counted
from pagedmla.plugin.page_maps import MOST_LEGENDS, SHARED, PoolMap, colour, letter, pool_maps
from pagedmla.plugin.palette import BLUE
from pagedmla.plugin.pictures import new_figure, write_picture
from pagedmla.plugin.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DEAD_COLOUR = "#EEEEEE"
_SHARED_COLOUR = "#999999"
_DARK = BLUE  # the one of COLOURS that black letters are hard to read on
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
    state = counted(len(report.problems), "problem") if report.problems else "no problems"
    pages = f"pages of {counted(report.pool.page_size, 'token')}"
    figure.suptitle(f"{report.pool.layout}, {pages}: {state}", fontsize=11)
    legend = figure.legend(
        handles=_legend_handles(report, maps),
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may hold $
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
        Patch(facecolor=colour(request.row), label=f"{letter(request.row)}  {_shorten(printable(request.name))}")
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
