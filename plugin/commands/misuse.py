"""Wrong usage is a sentence and exit code 2, whatever found it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from pagedmla.plugin.terminal import printable

MOST = 2**31 - 1  # of anything that is counted: lengths and ids are int32
_GIVEN_OUT = (
    errno.EPIPE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # of where output goes, however it is used


_Value = TypeVar("_Value", bound=Hashable)


def once(given: Sequence[_Value] | None) -> list[_Value] | None:
    """What an option was given, without repetitions."""
    return None if given is None else list(dict.fromkeys(given))


def folder(given: str) -> Path:
    """An option's folder: "" would be the current one."""
    if not given:
        raise typer.BadParameter("expected a folder; got an empty name")
    return Path(given)


def told_as_misuse(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Refusals, what files and packages raise, and `others`."""
    from pagedmla.kv_cache.checks import Refusal  # with torch: the command line begins without it

    return (Refusal, ImportError, OSError, *others)


@contextlib.contextmanager
def misuse(
    *others: type[Exception], option: str | None = None, options: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Tell these as wrong usage: a sentence, and exit code 2.

    option    whose value it is about; options: by the argument of the API that a sentence begins with

    Any other error is a bug, and shows its trace.
    """
    try:
        yield
    except told_as_misuse(*others) as error:
        if isinstance(error, OSError) and error.errno in _GIVEN_OUT:
            raise
        sentence = str(error).partition("\n")[0]  # torch's have a backtrace behind it
        argument, _, rest = sentence.partition(": ")
        if options is not None and argument in options:
            option, sentence = options[argument], rest
        raise typer.BadParameter(printable(sentence), param_hint=option) from error
