"""What people see. Reports are written out by hand, so that every letter and number on the screen is known.

Three pages, one more than fits a line, and hundreds; with scale pages and without; more requests than colours (7), than
legend entries (14) and than letters (62).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagedmla.kv_cache.cache_report import (
    CacheReport,
    Finding,
    LayerHealth,
    PageInUse,
    PoolSummary,
    RequestPages,
)
from pagedmla.plugin import page_picture
from pagedmla.plugin.page_grid import page_map
from pagedmla.plugin.page_maps import colour, letter
from pagedmla.plugin.report import to_table

HEALTH = LayerHealth(3, 1234, 4.5, 0.0025, 0.001, 0.01, 5, 6, 7, 8)


def make_report(
    requests: dict[str, list[tuple[int, int | None]]],
    *,
    pages: int = 20,
    scale_pages: int | None = 40,
    findings: tuple[Finding, ...] = (),
    last_fill: int = 3,
) -> CacheReport:
    """Requests as (value page, scale page) lists; pages of 16, the last of each request `last_fill` full."""
    owners: dict[int, list[int]] = {}
    for row, held in enumerate(requests.values()):
        for value, _ in held:
            owners.setdefault(value, []).append(row)
    rows = []
    for row, (name, held) in enumerate(requests.items()):
        used = [
            PageInUse(
                row,
                column,
                last_fill if column == len(held) - 1 else 16,
                value,
                scale,
                tuple(other for other in owners[value] if other != row),
                "00",
                "11",
            )
            for column, (value, scale) in enumerate(held)
        ]
        rows.append(RequestPages(row, name, sum(page.fill for page in used), tuple(used)))
    scales = "none" if scale_pages is None else "paged"
    dead = None if scale_pages is None else ()
    pool = PoolSummary("fp8_rope_bf16", scales, 16, 2, pages, scale_pages, (), dead)
    return CacheReport(pool, tuple(rows), (HEALTH,), findings)


TWO = {"ada": [(0, 30), (1, 31), (7, 2)], "bob": [(0, 30), (19, 39)]}
LOST = Finding("zero_scale", "error", "kv_scales: row 1, column 1 is lost", 1, 1, value_page=19, scale_page=39)
ODD = Finding("scale_size", "warning", "kv_scales: row 0 is odd", 0, 0, value_page=0, scale_page=30)


def printed(renderables: list[object], width: int = 100) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for part in renderables:
            console.print(part)
    return capture.get()


def test_the_map_letter_by_letter() -> None:
    report = make_report(TWO, findings=(LOST, ODD))
    lines = [line.rstrip() for line in page_map(report, width=80).plain.splitlines()]
    assert lines == [
        "value pages                           scale pages",
        " 0 * A . . . . . A . . . . . . . .     0 . . A . . . . . . . . . . . . .",
        "16 . . . B!                           16 . . . . . . . . . . . . . . * A",
        "                                      32 . . . . . . . B!",
        "A ada: 35 tokens in 3 pages",
        "B bob: 19 tokens in 2 pages",
        ". no live tokens   * several requests   ! problem",
    ]


@pytest.mark.parametrize("width", [20, 43, 44, 76, 80, 140])
def test_the_map_fits_its_width(width: int) -> None:
    lines = page_map(make_report(TWO), width=width).plain.splitlines()
    grid = [line.rstrip() for line in lines if line[:1].isspace() or line[:1].isdigit()]
    assert max(map(len, grid)) <= width
    beside = "value pages" in lines[0] and "scale pages" in lines[0]
    assert beside == (width >= 41)


def test_the_map_without_scale_pages_and_without_requests() -> None:
    lone = make_report({"ada": [(2, None)]}, pages=3, scale_pages=None)
    assert page_map(lone, width=80).plain.splitlines()[:2] == ["value pages", "0 . . A "]
    nobody = page_map(make_report({}, pages=0, scale_pages=None), width=80).plain
    assert nobody == "value pages\n. no live tokens"


def test_the_map_skips_long_stretches_of_dead_pages() -> None:
    far = page_map(make_report({"ada": [(0, None), (9999, None)]}, pages=10000, scale_pages=None), width=80)
    lines = far.plain.splitlines()
    assert lines[1].startswith("   0 A . .")
    assert lines[2] == "  32 . to 9983"
    assert lines[3].startswith("9984 .")
    assert lines[3].rstrip().endswith("A")
    assert len(lines) == 6


def test_the_map_survives_wild_ids() -> None:
    wild = replace(LOST, value_page=0xFFFFFFFF, scale_page=-1)
    report = make_report({"ada": [(0xFFFFFFFF, -1), (1, 2)]}, findings=(wild,))
    assert page_map(report, width=80).plain.splitlines()[1].startswith(" 0 . A .")


def test_letters_and_colours_repeat() -> None:
    assert (letter(0), letter(25), letter(26), letter(61), letter(62)) == tuple("AZa9A")
    assert colour(0) == colour(7) != colour(1)


def test_legend_names_the_first_and_counts_the_rest() -> None:
    many = make_report({f"r{i}": [(i, i)] for i in range(16)})
    lines = page_map(many, width=80).plain.splitlines()
    assert "N r13: 3 tokens in 1 page" in lines
    assert "and 2 more requests" in lines
    assert not any("r14" in line for line in lines)


def test_tables_say_everything() -> None:
    text = printed(to_table(make_report(TWO, findings=(ODD, LOST))))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == ("fp8_rope_bf16: 2 layers, pages of 16 tokens; 4 of 20 value pages and 4 of 40 scale pages live")
    assert "A ada 35 0 0 30 16/16 bob" in lines
    assert "1 1 31 16/16" in lines  # the next page of ada isn't shared, so it has a line of its own
    assert "2 7 2 3/16" in lines
    assert "3 1,234 4.5 0.25% 8" in lines
    assert "3 0.001 0.01 5 6 7" in lines
    assert lines[-3:] == [
        "1 problem, 1 warning",
        "problem kv_scales: row 1, column 1 is lost",
        "warning kv_scales: row 0 is odd",
    ]


def test_neighbouring_pages_share_a_line() -> None:
    report = make_report({"ada": [(4, 8), (5, 9), (6, 10), (7, 30)]}, last_fill=16)
    lines = [" ".join(line.split()) for line in printed(to_table(report)).splitlines()]
    assert "A ada 64 0-2 4-6 8-10 16/16" in lines
    assert "3 7 30 16/16" in lines
    assert lines[-1] == "No problems."


def test_tables_without_scales() -> None:
    text = printed(to_table(make_report({"ada": [(2, None)], "eve": []}, scale_pages=None)))
    assert "scale id" not in text
    assert "Scales" not in text
    assert "live; scales: none" in text
    assert "B eve" in text


def test_long_lists_are_cut_and_say_so() -> None:
    scattered = make_report({"ada": [(2 * i, i) for i in range(230)]}, pages=500, scale_pages=500)
    findings = tuple(replace(LOST, sentence=f"number {i}") for i in range(60))
    text = printed(to_table(replace(scattered, findings=findings)))
    assert "30 more rows; the JSON form has them all" in text
    assert "number 49" in text
    assert "number 50" not in text
    assert text.rstrip().endswith("10 more; the JSON form has them all")


def test_a_narrow_terminal_loses_no_digit() -> None:
    report = make_report({"ada": [(1234, 56789)]}, pages=2000, scale_pages=60000)
    wide, narrow = (printed(to_table(report), width) for width in (200, 32))
    assert max(map(len, narrow.splitlines())) <= 32
    assert Counter(filter(str.isdigit, narrow)) == Counter(filter(str.isdigit, wide))


def test_markup_in_a_name_is_text() -> None:
    text = printed(to_table(make_report({"[red]x[/red]": [(0, 0)]})))
    assert "[red]x[/red]" in text


# -- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "pages", "scale_pages"),
    [
        ({"ada": [(0, 2), (2, 0)], "bob": [(1, 1)]}, 3, 3),
        (TWO, 20, 40),
        ({f"request {i}": [(5 * i + j, 399 - 5 * i - j) for j in range(5)] for i in range(80)}, 400, 400),
        ({"ada": [(2, None)]}, 8, None),
        ({}, 1, None),
    ],
    ids=["3 pages", "20 and 40", "400 pages", "no scales", "nobody"],
)
def test_picture(
    requests: dict[str, list[tuple[int, int | None]]], pages: int, scale_pages: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    report = make_report(requests, pages=pages, scale_pages=scale_pages, findings=(LOST,))
    page_picture.to_picture(report, tmp_path / "pages.png")
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")


def test_the_ending_sets_the_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    page_picture.to_picture(make_report(TWO), tmp_path / "pages.svg")
    assert "<svg" in (tmp_path / "pages.svg").read_text()


def drawn(report: CacheReport, monkeypatch: pytest.MonkeyPatch) -> object:
    """The figure that to_picture would save."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    saved = []
    monkeypatch.setattr(page_picture, "write_picture", lambda figure, path: saved.append(figure))
    page_picture.to_picture(report, "pages.png")
    agg.FigureCanvasAgg(saved[0]).draw()
    return saved[0]


def test_picture_shows_owners_fill_and_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(make_report(TWO, findings=(LOST,)), monkeypatch)
    value, scale = figure.axes
    assert [axes.get_title() for axes in (value, scale)] == [
        "value pool: 4 of 20 pages live",
        "scale pool: 4 of 40 pages live",
    ]
    assert sorted(text.get_text() for text in value.texts) == ["*", "A", "A", "B"]
    (patches,) = value.collections
    heights = sorted(path.get_extents().height for path in patches.get_paths())
    assert heights[:2] == pytest.approx([3 / 16, 3 / 16])  # the last pages of ada and bob
    outline = [patch for patch in value.patches if not patch.get_fill()]
    assert [patch.get_xy() for patch in outline] == [(3, 4)]  # page 19, four a line
    assert figure.get_suptitle() == "fp8_rope_bf16, pages of 16 tokens: 1 problem"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["A  ada", "B  bob", "*  several requests", "no live tokens", "problem"]


@pytest.mark.parametrize("pages", [3, 20, 100, 400])
def test_nothing_in_the_picture_overlaps(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {f"a request with a long name {i}": [(i, i)] for i in range(min(pages, 20))}
    figure = drawn(make_report(requests, pages=pages, scale_pages=pages, findings=(LOST,)), monkeypatch)
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [figure.legends[0].get_window_extent(renderer), figure.texts[0].get_window_extent(renderer)]
    for i, box in enumerate(boxes):
        assert figure.bbox.padded(1).x0 <= box.x0
        assert box.x1 <= figure.bbox.padded(1).x1
        for other in boxes[i + 1 :]:
            overlap = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(overlap) <= 1


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"a picture needs matplotlib: pip install pagedmla\[plots\]"):
        page_picture.to_picture(make_report({}), "pages.png")
