"""`pagedmla compile`: kernels built ahead of time, and what each costs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from pagedmla.plugin.commands.misuse import folder, misuse, once
from pagedmla.plugin.terminal import printable

EXAMPLES = """Examples:

* `pagedmla compile --target sm_90` builds every kernel for Hopper and prints what each costs

* `pagedmla compile --only decode --target sm_90 --out build/kernels` keeps the binaries and their disassembly

* `pagedmla compile --json bench/results/compile-triton.json` writes the whole table (an hour on one core)

* `pagedmla compile --executor cutlass --out build/cubins` builds what the executor `cutlass` loads, for machines
  without the CUTLASS DSL: take the folder there and set PAGEDMLA_CUBINS to it. Beside each .cubin and its .json lies
  its .ptx, to read (nothing loads it), and compile-cutlass.json is the table of what lies there
"""


class CompiledExecutor(str, Enum):
    """Executors whose kernels are built ahead of time."""

    triton = "triton"
    cutlass = "cutlass"


def compile_kernels(
    executor: Annotated[CompiledExecutor, typer.Option(help="Whose kernels.")] = CompiledExecutor.triton,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T",
            help="{targets}; again for more. Default: all. CUTLASS: sm_90 alone.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KERNEL",
            help="{kernels}; again for more. Default: all. CUTLASS: {families}, or a variant's name.",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(metavar="LAYOUT", help="Of the cache: {layouts}; again for more. Default: all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep binaries here, with their PTX (AMD's: assembly). Triton's: SASS too. CUTLASS's: the table too.",
            parser=folder,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.", dir_okay=False)
    ] = None,
) -> None:
    """Build kernels ahead of time, without a GPU, and print what each costs: compiled, not run.

    Exit code 1 where a target refused a variant, or where the CUTLASS compiler's process broke off.
    """
    from pagedmla.cutlass_kernels.build import BuildError
    from pagedmla.plugin.compile_report import compile_cutlass, compile_triton

    build = compile_cutlass if executor is CompiledExecutor.cutlass else compile_triton
    try:
        with misuse():
            rows = build(once(target), once(only), once(layout), out, json_file)
    except BuildError as broken_off:  # neither wrong usage nor a bug of ours
        kept = "" if out is None else f". What was built before is kept in {out}"
        typer.echo(f"pagedmla: {printable(str(broken_off) + kept)}", err=True)
        raise typer.Exit(1) from broken_off
    raise typer.Exit(1 if any("refused" in row for row in rows) else 0)
