"""Files that are whole: what ends a writer early (an error, Ctrl-C, a kill, a full disk) leaves the old one as it was.

A file is written beside its place and then renamed into it. What can't be renamed over is written where it is: pipes
and devices, files that are mounted or lie in a folder that takes no new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO

_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


@contextlib.contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which is `path` once the block has ended well. Otherwise `path` is what it was, except where it
    has to be written in place (module docstring).

    An existing file's mode and owner are kept, and a link stays a link. OSError names `path`.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".pagedmla-{secrets.token_hex(8)}")  # however long the target's name
    try:
        with _open(target, beside) as file:
            yield file
        if beside.exists():
            _rename(beside, target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(beside), str(target)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def write_bytes(path: str | PathLike[str], content: bytes) -> None:
    """`content` as the whole of `path`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: str | PathLike[str], text: str) -> None:
    """`text` as the whole of `path`, in UTF-8."""
    write_bytes(path, text.encode())


def expect_file(file: Path) -> None:
    """OSError where `replacing` couldn't write `file`, to be told before the work. Makes its folder."""
    if file.is_dir():
        raise IsADirectoryError(f"{file}: expected a file; got a folder")
    if file.is_file():
        try:
            file.open("ab").close()
        except OSError as error:
            raise OSError(f"{file}: expected a file that can be written; got {error.strerror}") from error
    elif file.exists():  # a pipe, a device: to open one is to use it
        return
    elif file.is_symlink():
        raise FileNotFoundError(f"{file}: expected a file, or none; got a link that leads nowhere")
    else:
        expect_folder(file.parent)


def expect_folder(folder: Path) -> None:
    """Make a folder, if it isn't there. OSError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):  # a mode says too little of root, and of read-only file systems
            pass
    except OSError as error:
        takes_none = error.errno == errno.ENOENT and folder.is_dir()  # as /proc says it
        got = "one that takes none" if takes_none else error.strerror
        raise OSError(f"{folder}: expected a folder that files can be made in; got {got}") from error


def _open(target: Path, beside: Path) -> BinaryIO:
    """`beside`, in the mode and of the owner of `target`; or `target` itself, where it has to be written in place."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return beside.open("xb")
    if not stat.S_ISREG(old.st_mode):
        return target.open("wb")
    target.open("ab").close()  # what mustn't be written mustn't be replaced either
    try:
        file = beside.open("xb")
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        return target.open("wb")
    with contextlib.suppress(PermissionError):
        os.fchown(file.fileno(), old.st_uid, old.st_gid)
    os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
    return file


def _rename(beside: Path, target: Path) -> None:
    try:
        os.replace(beside, target)
    except OSError as error:
        if error.errno not in _IN_PLACE or not target.is_file():
            raise
        shutil.copyfile(beside, target)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process at a time, by a file that stays; makes its folder."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
