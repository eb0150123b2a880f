"""What reaches a terminal: a stranger's text without its control characters, lines as wide as can be read, and
characters that its encoding has."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping

LEAST_WIDTH = 20  # below it COLUMNS isn't meant: 0 is what some containers and editors set


def printable(text: str) -> str:
    """`text` with what isn't printed (control characters, line breaks, halves of surrogate pairs) as escapes: names
    come from files, and a terminal obeys what it reads."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """For the whole process: no COLUMNS that nothing fits into, and escapes where stdout's encoding lacks a letter.

    Rich takes COLUMNS as it is: 0 printed nothing, with exit code 0.
    """
    columns = environment.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < LEAST_WIDTH:
        del environment["COLUMNS"]
    with contextlib.suppress(AttributeError):  # None where it was closed, or somebody's own
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
