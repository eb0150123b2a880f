"""The command line: look at caches, see what runs where, build and measure kernels.

`pagedmla/__main__.py` is what the installed command runs. Exit codes:

    0      sound
    1      wrong: problems in a cache, a result that is off, a kernel that a target refused, a build that broke off
    2      misused: a sentence says how
    70     a bug, with its trace
    74     what it printed or wrote couldn't be written: a full disk
    130    interrupted
    141    its reader left early (`pagedmla explain | head -1`)
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from pagedmla.plugin.commands import bench, calibrate, compile, demo, explain, inspect
from pagedmla.plugin.commands.names import with_names
from pagedmla.plugin.terminal import prepare

_BUG, _NOT_WRITTEN, _LEFT = 70, 74, 141  # EX_SOFTWARE, EX_IOERR, 128 and SIGPIPE: none of a command's verdicts


class _Command(TyperCommand):
    """Calls `on_begin`, fills names into the help, and exits with 130 when interrupted, which not every typer does."""

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


class _ReaderLeft(Exception):
    """Nobody reads stdout any more. Typer and Rich would exit with 1."""


class _Commands(TyperGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # prints help
        with _told_by_main():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _told_by_main():
            return super().invoke(ctx)


@contextlib.contextmanager
def _told_by_main() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderLeft from error
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # so Rich ends
            raise _ReaderLeft from end
        raise


app = typer.Typer(
    name="pagedmla",
    cls=_Commands,
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
    prepare()
    try:
        app(prog_name="pagedmla", obj=on_begin)
    except _ReaderLeft:
        _drop_output()
        sys.exit(_LEFT)
    except OSError as error:  # a disk that is full by now: of a file that is named, or of the output
        _drop_output()
        with contextlib.suppress(OSError):  # stderr may be what is full
            print(f"pagedmla: {error}", file=sys.stderr)
        sys.exit(_NOT_WRITTEN)
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(_BUG)


def _drop_output() -> None:
    """What is left in stdout's buffer can't go out."""
    with contextlib.suppress(OSError, AttributeError):  # stdout is None where it was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
