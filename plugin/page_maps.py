"""Who is in which page of a pool, and the letter and colour that every view of it shows.

A page carries the letter and the colour of the request it belongs to. Colours repeat after seven, letters after 62, and
say the same again.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field

from pagedmla.kv_cache.cache_report import CacheReport
from pagedmla.plugin.palette import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
COLOURS = (SKY_BLUE, ORANGE, GREEN, YELLOW, BLUE, VERMILION, PURPLE)
SHARED, DEAD, WRONG = "*", ".", "!"

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
