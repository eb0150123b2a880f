"""Building kernels ahead of time on a terminal: progress while it runs, one table at the end, refusals below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLUMNS = (
    ("kernel", "kernel"),
    ("target", "target"),
    ("layout", "layout"),
    ("rows", "rows"),
    ("registers", "regs"),
    ("spill_words", "spills"),
    ("spill_words_in_loop", "in loop"),
    ("shared_bytes", "shared"),
    ("ctas_per_sm", "CTAs/SM"),
    ("warp_instructions_per_token", "instr/token"),
    ("bytes_per_token", "bytes/token"),
)


def compile_and_print(
    targets: Sequence[str] | None,
    kernels: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Build the Triton kernels that are asked for (None or nothing: all); returns the rows that were printed.

    ValueError for a target that isn't known, or where nothing is left to build.
    """
    from pagedmla.hardware.targets import TARGETS, find_target
    from pagedmla.triton_kernels.compile import all_variants, compile_all

    names = [find_target(name).name for name in targets or TARGETS]
    wanted = [
        variant
        for variant in all_variants()
        if (not kernels or variant.kernel in kernels)
        and (not layouts or variant.layout in layouts)
        and any(name in variant.targets for name in names)
    ]
    if not wanted:
        raise ValueError(f"nothing to build: no variant of {kernels or 'any kernel'} in {layouts or 'any layout'}")
    return _with_progress(len(wanted), lambda on_row: compile_all(wanted, names, out, on_row))


def _with_progress(total: int, build: Any) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True), transient=True) as progress:  # fmt: skip
        task = progress.add_task("compile", total=total)

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{row['kernel']} {row['layout']} {row['target']}")

        rows: list[dict[str, Any]] = build(on_row)
    _print(rows)
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="compiled, not run", box=None, pad_edge=False)
    for field, heading in _COLUMNS:
        table.add_column(heading, justify="left" if field in ("kernel", "target", "layout") else "right", no_wrap=True)
    for row in rows:
        if "refused" not in row:
            table.add_row(*(_text(row[field]) for field, _ in _COLUMNS))
    console = Console()
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(
                f"{row['kernel']} {row['layout']}, {row['rows']} rows, {row['target']}: {row['refused']}",
                style="yellow", highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
    refused = sum("refused" in row for row in rows)
    console.print(f"{len(rows) - refused} built, {refused} refused", highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
