"""Wrong usage is a sentence and exit code 2, whatever found it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import typer

MOST = 2**31 - 1  # of anything that is counted: lengths and ids are int32
_GIVEN_OUT = (
    errno.EPIPE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # of where output goes, however it is used


@contextlib.contextmanager
def misuse(*errors: type[Exception], option: str | None = None) -> Iterator[None]:
    """Errors of these kinds are told as wrong usage: a sentence, and exit code 2."""
    try:
        yield
    except errors as error:
        if isinstance(error, OSError) and error.errno in _GIVEN_OUT:
            raise
        sentence = str(error).partition("\n")[0]  # torch's have a backtrace behind it
        raise typer.BadParameter(sentence, param_hint=option) from error
