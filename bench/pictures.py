"""The bench as pictures: the roofline, time against context, share of the floor. One source and device a picture.

Markers say the same as colours, again. A red ring is a case that one of ours loses to a peer.
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY_BLUE, BLACK, YELLOW)
MARKERS = "osD^vP*X"
_DPI = 90


def expect_matplotlib() -> None:
    """ImportError names the extra where matplotlib isn't installed."""
    if find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install pagedmla[plots]")


def draw(rows: Sequence[Row], roof: Roof | None, title: str, folder: Path, stem: str) -> list[Path]:
    """Writes STEM-roofline.png (where there is a roof), STEM-context.png and STEM-floor.png; returns their paths.

    ImportError names the extra where matplotlib isn't installed, ValueError where there is nothing to draw.
    """
    if not rows:
        raise Refusal("pictures: expected at least one row to draw; got none")
    if len({(row.source, row.device) for row in rows}) > 1:
        raise Refusal("pictures: expected rows of one source and device; measured and model aren't drawn together")
    expect_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {"context": _context(rows), "floor": _floor(rows)}
    if roof is not None:
        figures["roofline"] = _roofline(rows, roof)
    written = []
    for name, figure in figures.items():
        figure.suptitle(f"{title}: {rows[0].source}", fontsize=10)
        path = folder / f"{stem}-{name}.png"
        write_picture(figure, path, _DPI)
        written.append(path)
    return written


def _roofline(rows: Sequence[Row], roof: Roof) -> Figure:
    """TFLOP/s against FLOPs a byte, under what memory and multipliers allow."""
    figure = new_figure(7, 5)
    axis = figure.subplots()
    intensities = [1e3 * row.tflop_per_s / row.gb_per_s for row in rows]
    ridge = roof.bf16_tflops / roof.terabytes_per_second
    span = [min(*intensities, ridge) / 2, max(*intensities, ridge) * 2]
    for name, peak in {"FP8": roof.fp8_tflops, "16 bit": roof.bf16_tflops}.items():
        if name == "FP8" and roof.fp8_tflops == roof.bf16_tflops:
            continue
        points = [span[0], peak / roof.terabytes_per_second, span[1] * peak / roof.bf16_tflops]
        label = f"roof ({name})" if roof.fp8_tflops != roof.bf16_tflops else "roof"
        axis.plot(points, [min(peak, x * roof.terabytes_per_second) for x in points], "k-", lw=1, label=label)
    for name, colour, marker, mine in _by_contender(rows):
        axis.plot([1e3 * r.tflop_per_s / r.gb_per_s for r in mine], [r.tflop_per_s for r in mine], marker, color=colour,
                  label=name, alpha=0.8, ls="")  # fmt: skip
    _ring(axis, [(1e3 * row.tflop_per_s / row.gb_per_s, row.tflop_per_s) for row in rows if row.loses])
    axis.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    _finish(axis)
    return figure


def _context(rows: Sequence[Row]) -> Figure:
    """Microseconds against keys of the step, a panel a layout and number of heads, a line a number of requests."""
    panels = list(dict.fromkeys((row.layout, row.heads) for row in rows))
    across = min(3, len(panels))
    down = ceildiv(len(panels), across)
    figure = new_figure(4.2 * across, 3.4 * down)
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (layout, heads) in zip(axes.flat, panels):
        shown = [row for row in rows if (row.layout, row.heads) == (layout, heads)]
        for name, colour, marker, mine in _by_contender(shown):
            for at, batch in enumerate(sorted({row.batch for row in mine})):
                line = sorted((row for row in mine if row.batch == batch), key=lambda row: row.kv_len)
                keys = [row.batch * row.kv_len for row in line]
                axis.plot(keys, [row.microseconds for row in line], marker, color=colour, ls="-", lw=0.8,
                          label=None if at else name)  # fmt: skip
        _ring(axis, [(row.batch * row.kv_len, row.microseconds) for row in shown if row.loses])
        axis.set(xscale="log", yscale="log", xlabel="keys of all requests", title=f"{layout}, {heads} heads")
        axis.title.set_fontsize(9)
        _finish(axis, legend=axis is axes.flat[0])
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("microseconds")
    return figure


def _floor(rows: Sequence[Row]) -> Figure:
    """Share of the floor against FLOPs of the step: where time goes to something else than the work."""
    figure = new_figure(7, 5)
    axis = figure.subplots()
    for name, colour, marker, mine in _by_contender(rows):
        points = [(r.tflop_per_s * r.microseconds * 1e-3, 100 * r.share_of_floor) for r in mine if r.share_of_floor]
        if points:
            axis.plot(*zip(*points), marker, color=colour, label=name, alpha=0.8, ls="")
    losing = [row for row in rows if row.loses and row.share_of_floor]
    _ring(axis, [(row.tflop_per_s * row.microseconds * 1e-3, 100 * (row.share_of_floor or 0)) for row in losing])
    axis.set(xscale="log", xlabel="GFLOP of the step", ylabel="share of the floor, %", ylim=(0, None))
    _finish(axis)
    return figure


def _by_contender(rows: Sequence[Row]) -> list[tuple[str, str, str, list[Row]]]:
    """Name, colour, marker and rows of each; ours come first."""
    found = sorted({(not row.ours, row.contender) for row in rows})
    return [
        (name, COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)], [row for row in rows if row.contender == name])
        for at, (_, name) in enumerate(found)
    ]


def _ring(axis: Axes, points: list[tuple[float, float]]) -> None:
    if points:
        axis.plot(*zip(*points), "o", mfc="none", mec="red", ms=11, ls="", label="loses to a peer")


def _finish(axis: Axes, legend: bool = True) -> None:
    axis.grid(alpha=0.3, which="major")
    if legend:
        axis.legend(fontsize=7)
