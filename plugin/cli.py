"""The command line: look at caches, see what runs where, build and measure kernels.

Exit code 1: wrong; 2: misused; 130: interrupted. `pagedmla/__main__.py` is what the installed command runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from pagedmla.plugin.commands import bench, calibrate, compile, demo, explain, inspect
from pagedmla.plugin.commands.names import with_names


class _Command(TyperCommand):
    """Says when it begins, what its options may name, and by exit code 130 that it was interrupted, which not every
    release of typer does."""

    def invoke(self, ctx: Any) -> Any:
        import torch  # noqa: F401  # every command wants it, and Ctrl-C can end the process until it is there

        if callable(ctx.obj):
            ctx.obj()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.help:
                option.help = with_names(option.help)
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="pagedmla",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`pagedmla COMMAND --help` shows a command's options with examples.",
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        from pagedmla import __version__

        typer.echo(f"pagedmla {__version__}")
        raise typer.Exit


@app.callback()
def pagedmla(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FP8 paged multi-head latent attention: look at caches, see what runs where and why."""


app.command("inspect", cls=_Command, epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("explain", cls=_Command, epilog=explain.EXAMPLES)(explain.explain)
app.command("demo", cls=_Command, epilog=demo.EXAMPLES)(demo.demo)
app.command("calibrate", cls=_Command, epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command("compile", cls=_Command, epilog=compile.EXAMPLES)(compile.compile_kernels)
app.command("bench", cls=_Command, epilog=bench.EXAMPLES)(bench.bench)


def main(on_begin: Callable[[], None] | None = None) -> None:
    """Run the command line that was typed; `on_begin` is called when torch is there and the command begins."""
    try:
        app(prog_name="pagedmla", obj=on_begin)
    except OSError as error:  # a disk that is full by now: of a file that is named, or of the output
        with contextlib.suppress(OSError, AttributeError):  # stdout is None where it was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer can't go out
        sys.exit(f"pagedmla: {error}")
