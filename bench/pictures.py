"""The bench as one picture: roofline, share of the floor, and time against context. One source and device a picture.

Markers say the same as colours, again, and both mean the same contender in every panel. A red ring is a case that one
of ours loses to a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pagedmla.bench.rows import Row
from pagedmla.hardware.cost import Roof
from pagedmla.kv_cache.checks import Refusal, ceildiv
from pagedmla.plugin.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW
from pagedmla.plugin.pictures import new_figure, write_picture

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY_BLUE, BLACK, YELLOW)
MARKERS = "osD^vP*X"
_ACROSS = 3  # panels
_DPI = 90
_Style = tuple[str, str]  # colour, marker


def expect_matplotlib() -> None:
    """ImportError names the extra where matplotlib isn't installed."""
    if find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install pagedmla[plots]")


def draw(rows: Sequence[Row], roof: Roof | None, title: str, path: Path) -> Path:
    """Writes `path` and returns it; makes its folder. Without a roof, time against context is all there is.

    ImportError names the extra where matplotlib isn't installed, ValueError where there is nothing to draw.
    """
    if not rows:
        raise Refusal("pictures: expected at least one row to draw; got none")
    if len({(row.source, row.device) for row in rows}) > 1:
        raise Refusal("pictures: expected rows of one source and device; measured and model aren't drawn together")
    expect_matplotlib()
    contexts = list(dict.fromkeys((row.layout, row.heads) for row in rows))
    before = 0 if roof is None else 2
    panels = before + len(contexts)
    across = min(_ACROSS, panels)
    down = ceildiv(panels, across)
    figure = new_figure(4.6 * across, 3.7 * down + 0.6)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.axis("off")
    styles = _styles(rows)
    if roof is not None:
        _roofline(axes[0], rows, roof, styles)
        _floor(axes[1], rows, styles)
    for axis, (layout, heads) in zip(axes[before:], contexts):
        if axis is not axes[before]:
            axis.sharey(axes[before])
        _context(axis, [row for row in rows if (row.layout, row.heads) == (layout, heads)], styles)
        axis.set_title(f"{layout}, {heads} heads", fontsize=9)
    figure.suptitle(f"{title}: {rows[0].source}", fontsize=10)
    named: dict[str, Artist] = {}
    for axis in axes[:panels]:
        axis.grid(alpha=0.3, which="major")
        named |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels()) if label not in named}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2 * across, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(figure, path, _DPI)
    return path


def _roofline(axis: Axes, rows: Sequence[Row], roof: Roof, styles: dict[str, _Style]) -> None:
    """TFLOP/s against FLOPs a byte, under what memory and multipliers allow."""
    intensities = [1e3 * row.tflop_per_s / row.gb_per_s for row in rows]
    ridge = roof.bf16_tflops / roof.terabytes_per_second
    span = [min(*intensities, ridge) / 2, max(*intensities, ridge) * 2]
    for name, line, peak in (("FP8", "k-", roof.fp8_tflops), ("16 bit", "k--", roof.bf16_tflops)):
        if name == "FP8" and roof.fp8_tflops == roof.bf16_tflops:
            continue
        points = [span[0], peak / roof.terabytes_per_second, span[1] * peak / roof.bf16_tflops]
        label = f"roof ({name})" if roof.fp8_tflops != roof.bf16_tflops else "roof"
        axis.plot(points, [min(peak, x * roof.terabytes_per_second) for x in points], line, lw=1, label=label)
    _points(axis, rows, styles, [(1e3 * row.tflop_per_s / row.gb_per_s, row.tflop_per_s) for row in rows])
    axis.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")


def _floor(axis: Axes, rows: Sequence[Row], styles: dict[str, _Style]) -> None:
    """Share of the floor against FLOPs of the step: where time goes to something else than the work."""
    shown = [row for row in rows if row.share_of_floor]
    places = [(row.tflop_per_s * row.microseconds * 1e-3, 100 * (row.share_of_floor or 0)) for row in shown]
    _points(axis, shown, styles, places)
    axis.set(xscale="log", xlabel="GFLOP of the step", ylabel="share of the floor, %", ylim=(0, None))


def _context(axis: Axes, rows: Sequence[Row], styles: dict[str, _Style]) -> None:
    """Microseconds against keys of the step, a line a number of requests, of query tokens and kind of lengths."""
    for name, (colour, _) in styles.items():
        mine = [row for row in rows if row.contender == name]
        for kind in sorted({(row.batch, row.q_len, row.lengths) for row in mine}):
            line = [row for row in mine if (row.batch, row.q_len, row.lengths) == kind]
            line.sort(key=lambda row: row.kv_len)
            keys = [row.batch * row.kv_len for row in line]
            axis.plot(keys, [row.microseconds for row in line], color=colour, lw=0.8)
    _points(axis, rows, styles, [(row.batch * row.kv_len, row.microseconds) for row in rows])
    axis.set(xscale="log", yscale="log", xlabel="keys of all requests", ylabel="microseconds")


def _points(axis: Axes, rows: Sequence[Row], styles: dict[str, _Style], places: Sequence[tuple[float, float]]) -> None:
    """A row a place, and a ring around those that lose."""
    for name, (colour, marker) in styles.items():
        mine = [place for row, place in zip(rows, places, strict=True) if row.contender == name]
        if mine:
            axis.plot(*zip(*mine), marker, color=colour, label=name, alpha=0.8, ls="")
    losing = [place for row, place in zip(rows, places, strict=True) if row.loses]
    if losing:
        axis.plot(*zip(*losing), "o", mfc="none", mec="red", ms=11, ls="", label="loses to a peer")


def _styles(rows: Sequence[Row]) -> dict[str, _Style]:
    """Of each contender; ours come first."""
    found = sorted({(not row.ours, row.contender) for row in rows})
    return {name: (COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]) for at, (_, name) in enumerate(found)}
