"""A file is written whole or not at all, whatever ends the writer: an exception, Ctrl-C, a kill, a full disk.

Beside the plain case: links, modes, pipes, devices, folders that take no file, places that can't be renamed over.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedmla.kv_cache import files
from pagedmla.kv_cache.files import expect_file, expect_folder, replacing, write_text

NOBODY = 65534


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("old")
    return tmp_path / "file"


@pytest.fixture
def own() -> Iterator[Path]:
    """A folder for a test that isn't root, who may write whatever the mode says."""
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp())
    if root:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(path: Path, error: type[BaseException]) -> None:
    with replacing(path) as file:
        file.write(b"half of it")
        file.flush()
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("there", [True, False], ids=["over a file", "new"])
def test_an_exception_changes_nothing(old: Path, error: type[BaseException], there: bool) -> None:
    """A run that ended midway left half a report over the good one."""
    path = old if there else old.with_name("new")
    with pytest.raises(error):
        write_half(path, error)
    assert names(old.parent) == ["file"]
    assert old.read_text() == "old"


def test_a_kill_leaves_the_old_file_whole(old: Path) -> None:
    """Nothing of ours runs then: the half file stays, under a name of its own."""
    code = (
        "import os, signal, sys; from pagedmla.kv_cache.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(old)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert old.read_text() == "old"
    left = [name for name in names(old.parent) if name != "file"]
    assert [name.startswith(".pagedmla-") for name in left] == [True]


def test_readers_see_the_old_file_until_the_new_one_is_whole(old: Path) -> None:
    with replacing(old) as file:
        file.write(b"new")
        file.flush()
        assert old.read_text() == "old"
    assert old.read_text() == "new"
    assert names(old.parent) == ["file"]


def test_a_link_stays_one(old: Path) -> None:
    link = old.with_name("link")
    link.symlink_to("file")
    write_text(link, "new")
    assert link.is_symlink()
    assert old.read_text() == "new"


def test_modes_are_kept_and_new_files_have_the_usual_one(old: Path) -> None:
    """`mkstemp` makes files that nobody else can read."""
    old.chmod(0o640)
    write_text(old, "new")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    with old.with_name("usual").open("w"):
        pass
    write_text(old.with_name("new"), "é")
    assert old.with_name("new").stat().st_mode == old.with_name("usual").stat().st_mode
    assert old.with_name("new").read_bytes() == "é".encode()


def test_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    write_text(tmp_path / ("n" * 255), "new")
    assert (tmp_path / ("n" * 255)).read_text() == "new"


def test_pipes_and_devices_are_written_where_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through it")
    reader.join(10)
    assert read == ["through it"]
    assert (tmp_path / "pipe").is_fifo()
    write_text(os.devnull, "nowhere")
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text("/dev/full", "too much")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none/new", "No such file or directory"), ("file/new", "Not a directory"), (".", "Is a directory")],
)
def test_errors_name_the_path(old: Path, name: str, reason: str) -> None:
    """Not the file beside it, which nobody has heard of."""
    path = f"{old.parent}/{name}"
    with pytest.raises(OSError, match=reason) as refusal:
        write_text(path, "new")
    assert refusal.value.filename == path
    assert names(old.parent) == ["file"]


def test_an_error_about_another_file_stays_as_it_is(old: Path) -> None:
    with pytest.raises(FileNotFoundError) as refusal, replacing(old):
        old.with_name("other").read_text()
    assert refusal.value.filename == str(old.with_name("other"))


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_what_cant_be_renamed_over_is_copied_over(old: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file that is mounted into a container, or another user's in /tmp, can be written and not replaced."""

    def refuses(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(files.os, "replace", refuses)
    write_text(old, "new")
    assert old.read_text() == "new"
    assert names(old.parent) == ["file"]
    with pytest.raises(OSError, match=os.strerror(number)) as refusal:
        write_text(old.with_name("new"), "new")
    assert refusal.value.filename == str(old.with_name("new"))
    assert names(old.parent) == ["file"]


def test_a_rename_that_fails_for_want_of_room_keeps_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'$"):
        write_text(old, "new")
    assert old.read_text() == "old"
    assert names(old.parent) == ["file"]


def test_a_file_in_a_folder_that_takes_no_new_one(own: Path) -> None:
    old = own / "file"
    old.write_text("old")
    own.chmod(0o555)
    expect_file(old)
    write_text(old, "new")
    assert old.read_text() == "new"
    with pytest.raises(PermissionError, match="Permission denied: ") as refusal:
        write_text(own / "other", "new")
    assert refusal.value.filename == str(own / "other")


def test_what_is_written_in_place_is_not_what_it_was(own: Path) -> None:
    """The docstring promised the old file whatever happens; where none can stand beside it, half the new one stays."""
    path = own / "file"
    path.write_text("old content")
    own.chmod(0o555)
    with pytest.raises(RuntimeError):
        write_half(path, RuntimeError)
    assert path.read_text() == "half of it"


def test_a_file_that_mustnt_be_written_isnt_replaced(own: Path) -> None:
    """Its folder may be written, and a rename asks no more."""
    old = own / "file"
    old.write_text("old")
    old.chmod(0o444)
    with pytest.raises(OSError, match="file: expected a file that can be written; got Permission denied"):
        expect_file(old)
    with pytest.raises(PermissionError):
        write_text(old, "new")
    assert old.read_text() == "old"
    assert names(own) == ["file"]


def test_a_file_is_tried_and_left_as_it_is(old: Path) -> None:
    new = old.parent / "deep" / "new"
    for path in (old, new, Path(os.devnull)):
        expect_file(path)
    assert old.read_text() == "old"
    assert names(old.parent) == ["deep", "file"]
    assert names(new.parent) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "expected a file; got a folder"),
        ("file/new", "/file: expected a folder that files can be made in; got File exists"),
        ("link", "/link: expected a file, or none; got a link that leads nowhere"),
    ],
)
def test_files_that_cant_be_written_are_told_before(old: Path, name: str, sentence: str) -> None:
    (old.parent / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match=f"{sentence}$"):
        expect_file(old.parent / name)


def test_a_folder_that_takes_no_file() -> None:
    with pytest.raises(OSError, match="/proc: expected a folder that files can be made in; got "):
        expect_folder(Path("/proc"))


# Who may write a file in place, and why nobody can find half of it.
IN_PLACE = {
    "kv_cache/files.py": "this is where it is made whole",
    "cutlass_kernels/build.py": "a folder of its own, which goes",
    "cutlass_kernels/resources.py": "a folder of its own, which goes",
    "hardware/footprint.py": "a folder of its own, which goes",
    "plugin/checkpoint_scales.py": "a folder of its own, which is renamed as a whole",
    "cutlass_kernels/cubin_cache.py": "a lock, which stays empty",
}


def writes(source: str) -> bool:
    """Whether it writes a file by its path, or lets matplotlib or torch do it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        if name.endswith((".write_text", ".write_bytes")):
            return True
        if name.split(".")[-1] == "open" and any(re.fullmatch("[wxa][bt+]*", word) for word in words):
            return True
        if name.endswith((".savefig", "torch.save")) and ast.unparse(node.args[-1]) not in ("file", "io.BytesIO()"):
            return True
    return False


def test_every_writer_of_the_package_writes_whole_files() -> None:
    """JSON, pictures and caches were each written in place, a writer at a time, over the good file of the last run."""
    root = Path(files.__file__).parent.parent
    folders = [path.parent for path in root.glob("*/__init__.py")]
    found = {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in folder.rglob("*.py")
        if writes(path.read_text(encoding="utf-8"))
    }
    assert found - IN_PLACE.keys() == set(), "write through pagedmla.kv_cache.files, or say here why not"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("path.write_text('x')", True),
        ("(folder / 'x').write_bytes(b'x')", True),
        ("path.open('wb')", True),
        ("open(path, 'a')", True),
        ("figure.savefig(path, dpi=9)", True),
        ("torch.save(data, path)", True),
        ("path.open('rb')", False),
        ("figure.savefig(file, format='png')", False),
        ("figure.savefig(io.BytesIO(), format='png')", False),
        ("torch.save(data, file)", False),
        ("write_text(path, 'x')", False),
    ],
)
def test_a_writer_is_found(source: str, found: bool) -> None:
    assert writes(source) is found
