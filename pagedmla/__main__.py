"""The command `pagedmla`, and `python -m pagedmla`: Ctrl-C is one line and exit code 130 from when `main` begins.

Until then, some milliseconds, it is Python's own: little is imported here and in pagedmla/__init__.py.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # as type checkers read it, without `typing`
if TYPE_CHECKING:
    from types import FrameType

_SENTENCE = "pagedmla: interrupted"
_CODE = 130  # as shells have it: 128, and the number of the signal


def main() -> None:
    """Entry point of the `pagedmla` command."""
    begin = None
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody's
        signal.signal(signal.SIGINT, _leave)
        begin = _raise_again
    from pagedmla.plugin.cli import main as command_line

    try:
        command_line(begin)
    except SystemExit as end:
        if end.code == _CODE:
            print(_SENTENCE, file=sys.stderr)
        raise


def _leave(number: int, frame: "FrameType | None") -> None:
    """Until a command begins: nothing is open yet, and torch, being imported, would swallow a KeyboardInterrupt."""
    os.write(2, f"{_SENTENCE}\n".encode())
    os._exit(_CODE)


def _raise_again() -> None:
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
