"""What `pagedmla bench` prints: measurements where there is a GPU, a model of compiled kernels where there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedmla.kv_cache.layouts import get_layout

TABLE = Path(__file__).parent / "results" / "compile-triton.json"


def bench_and_print(
    layouts: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    kv_len: int = 4096,
) -> list[dict[str, Any]]:
    """Measure and print as it goes, or model and print; returns the rows. The model knows rows of a tile, not heads,
    batches and lengths.

    ValueError for a layout that isn't one, FileNotFoundError where there is neither a GPU nor a compile table to model
    from.
    """
    from rich.console import Console

    for layout in layouts or ():
        get_layout(layout)  # refuses unknown names
    console = Console()
    if torch.cuda.is_available():
        from pagedmla.bench.cases import grid
        from pagedmla.bench.measure import cuda_clock, measure

        device = torch.device("cuda", torch.cuda.current_device())
        clock = cuda_clock(device)
        rows = [row for case in grid(layouts, heads, batches, kv_len) for row in measure(case, device, clock)]
        _print(console, f"measured on {torch.cuda.get_device_name(device)}", rows)
        return rows
    from pagedmla.bench.model import model_rows

    if not TABLE.exists():
        raise FileNotFoundError(f"no GPU to measure on, and no {TABLE.name}: run `pagedmla compile --json {TABLE}`")
    rows = model_rows(json.loads(TABLE.read_text(encoding="utf-8")), layouts or None)
    _print(console, "no GPU here: a model of compiled kernels, nothing was run", rows)
    console.print(
        "Nanoseconds of a multiprocessor for a key token, at published peaks and perfect overlap; share: of the memory "
        "bandwidth, at most.",
        highlight=False,
    )
    return rows


def _print(console: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, box=None, pad_edge=False)
    columns = [name for name in (rows[0] if rows else {}) if name != "source"]
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(row[name]) for name in columns))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:,.3g}" if abs(value) < 1 else f"{value:,.1f}"
    return str(value)
