"""Building kernels ahead of time on a terminal: progress while it runs, one table at the end, refusals below it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedmla.kv_cache.checks import quoted, refuse
from pagedmla.kv_cache.files import expect_file, expect_folder, write_text
from pagedmla.kv_cache.layouts import LAYOUTS

_KEYS = (("kernel", "kernel"), ("target", "target"), ("layout", "layout"), ("rows", "rows"))
_CUTLASS_KEYS = (("variant", "kernel"), ("target", "target"))  # a variant's name tells the rest
_COSTS = (
    ("registers", "regs"),
    ("spill_words", "spills"),
    ("spill_words_in_loop", "in loop"),
    ("shared_bytes", "shared"),
    ("ctas_per_sm", "CTAs/SM"),
    ("warp_instructions_per_token", "instr/token"),
    ("bytes_per_token", "bytes/token"),
)
CUTLASS_FAMILIES = ("decode", "merge")
_WIDTH = 130  # of the table at least: cut to 80 columns it says nothing


def compile_triton(
    targets: Sequence[str] | None,
    kernels: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    out: Path | None = None,
    json_file: Path | None = None,
) -> list[dict[str, Any]]:
    """Build the Triton kernels that are asked for (None or nothing: all); returns the rows that were printed.

    out, json_file    folder for the binaries and their listings, file for the rows: tried before anything is built

    ValueError for a target that isn't known, or where nothing is left to build; OSError for what can't be written.
    """
    from pagedmla.hardware.targets import TARGETS, find_target
    from pagedmla.triton_kernels import KERNELS
    from pagedmla.triton_kernels.compile import all_variants, compile_all

    names = [find_target(name).name for name in targets or TARGETS]
    _check_names("only", kernels, KERNELS)
    _check_names("layout", layouts, tuple(LAYOUTS))
    variants = all_variants()
    wanted = [
        variant
        for variant in variants
        if (not kernels or variant.kernel in kernels)
        and (not layouts or variant.layout in layouts)
        and any(name in variant.targets for name in names)
    ]
    if not wanted:
        raise _nothing(kernels, layouts)
    return _build(len(wanted), lambda on_row: compile_all(wanted, names, out, on_row), out, json_file)


def compile_cutlass(
    targets: Sequence[str] | None,
    kernels: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    out: Path | None = None,
    json_file: Path | None = None,
) -> list[dict[str, Any]]:
    """The same for the CUTLASS kernels: `out` receives cubins as a CubinCache keeps them, ready to be loaded.

    `kernels` may name variants too. ImportError where there is no DSL; RuntimeError where its process broke off.
    """
    from pagedmla.cutlass_kernels.build import ARCHITECTURE
    from pagedmla.cutlass_kernels.compile import compile_all
    from pagedmla.cutlass_kernels.cubin_cache import CubinCache
    from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS, CombineVariant, Variant
    from pagedmla.hardware.targets import find_target

    only = find_target(ARCHITECTURE).name
    for target in targets or ():
        if find_target(target).name != only:
            refuse("target", f"{only}, which the CUTLASS kernels are for", quoted(target))
    named = {variant.name for variant in VARIANTS} | {variant.name for variant in COMBINES}
    _check_names("only", [name for name in kernels or () if name not in named], CUTLASS_FAMILIES, " or a variant")
    _check_names("layout", layouts, tuple(LAYOUTS))
    decodes = [variant for variant in VARIANTS if not layouts or variant.layout in layouts]
    families: dict[str, Sequence[Variant | CombineVariant]]
    families = dict(zip(CUTLASS_FAMILIES, (decodes, () if layouts else COMBINES), strict=True))
    wanted = [
        variant
        for family, variants in families.items()
        for variant in variants
        if not kernels or family in kernels or variant.name in kernels
    ]
    if not wanted:
        raise _nothing(kernels, layouts)
    cache = None if out is None else CubinCache([out])
    return _build(len(wanted), lambda on_row: compile_all(wanted, cache=cache, on_row=on_row), out, json_file)


def _check_names(option: str, given: Sequence[str] | None, known: Sequence[str], more: str = "") -> None:
    """A name that selects nothing is a slip, also among others that do."""
    for name in given or ():
        if name not in known:
            refuse(option, f"one of {', '.join(known)}{more}", quoted(name))


def _nothing(kernels: Sequence[str] | None, layouts: Sequence[str] | None) -> ValueError:
    return ValueError(f"nothing to build: no variant of {kernels or 'any kernel'} in {layouts or 'any layout'}")


def _build(total: int, build: Any, out: Path | None, json_file: Path | None) -> list[dict[str, Any]]:
    """Builds, prints and writes, with progress meanwhile."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    if out is not None:
        expect_folder(out)
    if json_file is not None:
        expect_file(json_file)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True), transient=True) as progress:  # fmt: skip
        task = progress.add_task("compile", total=total)

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=_what(row))

        rows: list[dict[str, Any]] = build(on_row)
    _print(rows)
    if json_file is not None:
        write_text(json_file, json.dumps(rows, indent=1) + "\n")
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    named = all(row["executor"] == "cutlass" for row in rows)
    keys = _CUTLASS_KEYS if named else _KEYS
    table = Table(title="compiled, not run", box=None, pad_edge=False)
    for field, heading in keys + _COSTS:
        left = field in ("kernel", "variant", "target", "layout")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        if "refused" not in row:
            fields = {**row, **row["options"]} if named else row
            table.add_row(*(_text(fields[field]) for field, _ in keys + _COSTS))
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(
                f"{_what(row)}: {row['refused']}", style="yellow", highlight=False, markup=False, soft_wrap=True
            )
    refused = sum("refused" in row for row in rows)
    console.print(f"{len(rows) - refused} built, {refused} refused", highlight=False)


def _what(row: dict[str, Any]) -> str:
    name = row["options"].get("variant") or f"{row['kernel']} {row['layout']}, {row['rows']} rows"
    return f"{name}, {row['target']}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
