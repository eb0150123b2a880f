"""Matplotlib's pictures as files: what would keep one from being drawn is said before the work, and each is whole."""

from __future__ import annotations

import io
import warnings
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.files import expect_file, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches. ImportError names the extra where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install pagedmla[plots]") from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def expect_picture(path: Path) -> None:
    """Refuse a picture that couldn't be drawn into `path`; makes its folder.

    ImportError without matplotlib, ValueError for a format that it doesn't know, OSError for a file that can't be
    written.
    """
    figure, wanted = new_figure(1, 1), _format(path)
    try:
        figure.savefig(io.BytesIO(), format=wanted)
    except ValueError as unknown:  # of nothing but the format: there is nothing to draw
        raise Refusal(f"{path}: {unknown}") from unknown
    expect_file(path)


def write_picture(figure: Figure, path: str | PathLike[str], dpi: float | None = None) -> None:
    """Draw into `path`, in the format that its ending names."""
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)  # a name's: drawn as a box
        figure.savefig(file, format=_format(Path(path)), dpi=dpi or "figure")


def _format(path: Path) -> str:
    if not path.suffix:
        raise Refusal(f"{path}: expected an ending that names the format: png, svg or pdf")
    return path.suffix[1:]
