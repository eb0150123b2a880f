"""Building kernels ahead of time on a terminal: progress while it runs, one table at the end, refusals below it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmla.kv_cache.checks import Refusal, quoted, refuse
from pagedmla.kv_cache.files import expect_file, expect_folder, write_text
from pagedmla.kv_cache.layouts import LAYOUTS

if TYPE_CHECKING:
    from rich.table import Table

_KEYS = (("kernel", "kernel"), ("target", "target"), ("layout", "layout"), ("rows", "rows"))
_CUTLASS_KEYS = (("variant", "kernel"), ("target", "target"))  # a variant's name tells the rest
_COSTS = (
    ("registers", "regs"),
    ("spill_words", "spills"),
    ("spill_words_in_loop", "in\nloop"),
    ("shared_bytes", "shared"),
    ("ctas_per_sm", "CTAs\n/SM"),
    ("warp_instructions_per_token", "instr\n/token"),
    ("bytes_per_token", "bytes\n/token"),
)
CUTLASS_FAMILIES = ("decode", "merge")
_WIDEST = 1000  # columns, of a table in a pipe
_LEAST_NAME = 12  # columns that a row's name is folded into at least, where a terminal is narrow
_TELLING = ("PAGE_SIZE", "GROUP", "SPLIT_QUERIES", "SLOTS")  # of options that tell the same rows apart, these first


OnRow = Callable[[dict[str, Any]], None]


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
    from pagedmla.triton_kernels.compile import compile_all, expect_compiler
    from pagedmla.triton_kernels.variants import variants

    names = list(dict.fromkeys(find_target(name).name for name in targets or TARGETS))
    _check_names("only", kernels, KERNELS)
    _check_names("layout", layouts, tuple(LAYOUTS))
    try:
        expect_compiler()
    except RuntimeError as interpreted:
        raise Refusal(str(interpreted)) from interpreted
    _expect_triton_cache()
    wanted = [
        variant
        for variant in variants()
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
    """The same for the CUTLASS kernels: `out` receives cubins as a CubinCache keeps them, ready to be loaded, their
    PTX, and the table of what lies there (compile-cutlass.json).

    `kernels` may name variants too. ImportError where there is no DSL; BuildError where its process broke off.
    """
    from pagedmla.cutlass_kernels.build import ARCHITECTURE
    from pagedmla.cutlass_kernels.compile import REPORT, add_to_report, compile_all, write_report
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

    table = None if out is None else out / REPORT.name
    if table is not None:
        expect_folder(table.parent)
        expect_file(table)
        if json_file is not None and json_file.resolve() == table.resolve():
            refuse(
                "json", f"another file than {REPORT.name} in the folder of --out, which tells of all there", json_file
            )

    def build(on_row: OnRow) -> list[dict[str, Any]]:
        def keep(row: dict[str, Any]) -> None:
            if table is not None:
                add_to_report([row], table)
            on_row(row)

        return compile_all(wanted, cache=cache, on_row=keep)

    return _build(len(wanted), build, out, json_file, write_report)


def _expect_triton_cache() -> None:
    """Triton keeps there what it builds, and tells of a folder that it can't use as if a target refused the kernel."""
    from triton import knobs

    folder = knobs.cache.dir
    if not folder:
        refuse("TRITON_CACHE_DIR", "a folder, or no such variable", quoted(folder))
    try:
        expect_folder(Path(folder))
    except OSError as error:
        raise OSError(f"Triton's cache, which TRITON_CACHE_DIR moves: {error}") from error


def _check_names(option: str, given: Sequence[str] | None, known: Sequence[str], more: str = "") -> None:
    """A name that selects nothing is a slip, also among others that do."""
    for name in given or ():
        if name not in known:
            refuse(option, f"one of {', '.join(known)}{more}", quoted(name))


def _nothing(kernels: Sequence[str] | None, layouts: Sequence[str] | None) -> Refusal:
    return Refusal(f"nothing to build: no variant of {kernels or 'any kernel'} in {layouts or 'any layout'}")


def _write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    write_text(path, json.dumps(rows, indent=1) + "\n")


def _build(
    total: int,
    build: Callable[[OnRow], list[dict[str, Any]]],
    out: Path | None,
    json_file: Path | None,
    write: Callable[[Sequence[dict[str, Any]], Path], None] = _write_table,
) -> list[dict[str, Any]]:
    """Builds, prints and writes, with progress meanwhile."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    if out is not None:
        expect_folder(out)
    if json_file is not None:
        expect_file(json_file)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console, transient=True, disable=not console.is_terminal) as progress:  # fmt: skip
        task = progress.add_task("compile", total=total)

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=_what(row))

        rows = build(on_row)
    _print(rows)
    if json_file is not None:
        write(rows, json_file)
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    named = all(row["executor"] == "cutlass" for row in rows)
    keys = _CUTLASS_KEYS if named else _KEYS
    built = [row for row in rows if "refused" not in row]
    texts = [
        [_text({**row, **(row["options"] if named else {})}[field]) for field, _ in keys + _COSTS] for row in built
    ]
    names = [[*cells[: len(keys)], where] for cells, where in zip(texts, _differences(built, [key for key, _ in keys]))]
    costs = [cells[len(keys) :] for cells in texts]
    headings = [*(heading for _, heading in keys), "where"]
    if not any(where for *_, where in names):
        headings, names = headings[:-1], [each[:-1] for each in names]
    console = Console()
    table = _table(headings, names, costs)
    wide = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    if not console.is_terminal:
        console.width = wide  # nothing need fit
    elif console.width < wide:  # names in one column, folded as need be, and no number cut
        table = _table(["kernel"], [[_row_name(dict(zip(headings, each)))] for each in names], costs)
        least = _table(["kernel"], [], costs)
        numbers = Measurement.get(console, console.options.update(max_width=_WIDEST), least).maximum
        console.width = max(console.width, numbers + _LEAST_NAME)
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(
                f"{_what(row)}: {row['refused']}", style="yellow", highlight=False, markup=False, soft_wrap=True
            )
    refused = sum("refused" in row for row in rows)
    console.print(f"{len(rows) - refused} built, {refused} refused", highlight=False)


def _table(headings: Sequence[str], names: Sequence[Sequence[str]], costs: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title="compiled, not run", box=None, pad_edge=False)
    for heading in headings:
        right = heading == "rows"
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for _, heading in _COSTS:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, cost in enumerate(costs):
        table.add_row(*(names[number] if names else [""] * len(headings)), *cost)
    return table


def _row_name(cells: dict[str, str]) -> str:
    """A row's cells in one, broken at blanks where it has to be."""
    rows = cells.pop("rows", "-")
    return " ".join([*(text for text in cells.values() if text), *([f"rows={rows}"] if rows != "-" else [])])


def _differences(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """For each row the options that tell it from others with the same keys, as few as do; "" where the keys do."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(tuple({**row, **row["options"]}.get(key) for key in keys), []).append(index)
    told = [""] * len(rows)
    for group in alike.values():
        options = [rows[index]["options"] for index in group]
        every = {name for each in options for name in each}
        names = sorted(every, key=lambda name: (name not in _TELLING, name))
        chosen: list[str] = []
        while len(group) > 1 and names:
            kinds = [len({repr([each.get(name) for name in (*chosen, more)]) for each in options}) for more in names]
            best = names[kinds.index(max(kinds))]  # the first of the best
            if max(kinds) == (len({repr([each.get(name) for name in chosen]) for each in options})):
                break  # nothing tells more
            chosen.append(best)
        for index, each in zip(group, options):
            told[index] = " ".join(f"{name}={each.get(name)}" for name in chosen)
    return told


def _what(row: dict[str, Any]) -> str:
    name = row["options"].get("variant") or f"{row['kernel']} {row['layout']}, {row['rows']} rows"
    return f"{name}, {row['target']}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
