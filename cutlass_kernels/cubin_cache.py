"""Compiled kernels on disk, addressed by what they were made from and checked before they are loaded.

address   sha256 of the sources that take part, the DSL's version and the variant; its first 16 digits name the files
files     NAME.ADDRESS.cubin and NAME.ADDRESS.json, which says what the cubin is and what its sha256 must be. `pagedmla
          compile --out` puts NAME.ADDRESS.ptx beside them; nothing here reads it
folders   PAGEDMLA_CUBINS where set (several with ":", the first one is written to); else a clone's build/cubins, where
          there is one, then the user's cache folder, which is written to
writing   a file appears whole or not at all, the .json last; one process builds an entry while others wait for it
without   the DSL, whatever version built an entry for these sources serves; with it, only its own version

Neither repository nor wheel carries cubins: they are built where they are used, or travel as a folder.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from pagedmla.kv_cache.files import locked, write_bytes, write_text

_DSL = "nvidia-cutlass-dsl"
_PACKAGE = "pagedmla"
_ROOT = Path(__file__).resolve().parent.parent
# They import, at their top or inside functions, all that a kernel and its launch are made of.
_KERNELS = tuple(f"pagedmla.cutlass_kernels.{name}" for name in ("decode_sm90", "combine", "arguments"))
_SET_FOLDERS = "PAGEDMLA_CUBINS"
_TRAVELLING = Path("build", "cubins")
_DIGITS = 16


class CubinError(RuntimeError):
    """A cubin isn't there, or isn't what its record says. The message says what to run or to remove."""


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel and how it wants to be launched.

    entry          the kernel's symbol
    threads        of a CTA
    shared_bytes   dynamic shared memory of a CTA
    cluster        CTAs of a cluster
    rows           query rows of a cluster
    may_start_early   whether the kernel waits by itself for the one before it (programmatic dependent launch)
    source, dsl    what it was built from: digest of the sources, version of the DSL
    """

    variant: str
    entry: str
    threads: int
    shared_bytes: int
    cluster: int
    rows: int
    may_start_early: bool
    source: str
    dsl: str
    sha256: str
    image: bytes = field(repr=False, compare=False, default=b"")

    @property
    def address(self) -> str:
        return address_of(self.variant, self.source, self.dsl)


def address_of(variant: str, source: str, dsl: str) -> str:
    """64 hexadecimal digits."""
    return hashlib.sha256(json.dumps([variant, source, dsl]).encode()).hexdigest()


def dsl_version() -> str | None:
    """Version of the installed DSL, or None. Imports nothing of it."""
    try:
        return importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def source_digest() -> str:
    """sha256 over the modules of this package that the kernels are made of, found by following their imports.

    The same on every machine and Python: it reads the files' bytes, with one kind of line ending.
    """
    digest = hashlib.sha256()
    for name in kernel_modules():
        digest.update(f"{name}\n".encode() + _path_of(name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def kernel_modules(roots: Sequence[str] = _KERNELS) -> tuple[str, ...]:
    """Names of `roots`, of the package's modules that they import, and so on."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(_path_of(name).read_bytes())):
            if isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                candidates = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            todo += [each for each in candidates if each.startswith(f"{_PACKAGE}.") and _path_of(each).is_file()]
    return tuple(sorted(found))


def _path_of(module: str) -> Path:
    """The file of `pagedmla.folder.module`, which lies beside this folder in a clone and in a wheel alike."""
    return _ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")


def folders() -> list[Path]:
    """Where cubins are looked for, in order."""
    asked = os.environ.get(_SET_FOLDERS)
    if asked:
        return [Path(each).expanduser() for each in asked.split(os.pathsep)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _PACKAGE / "cubins"
    travelling = _ROOT / _TRAVELLING
    return [travelling, cache] if travelling.is_dir() else [cache]


class CubinCache:
    """Entries in `folders` (see above where not given). Writes go to the last of the defaults, or the first given."""

    def __init__(self, folders_given: Sequence[str | Path] | None = None) -> None:
        if folders_given is None:
            self.folders = folders()
            self._target = self.folders[0] if os.environ.get(_SET_FOLDERS) else self.folders[-1]
        else:
            self.folders = [Path(each) for each in folders_given]
            self._target = self.folders[0]

    def find(self, variant: str, source: str | None = None, dsl: str | None = None) -> Cubin | None:
        """The entry of a variant for these sources (the present ones by default), with its checked image.

        `dsl` None: the installed DSL's entry, or the newest version's where none is installed. CubinError where a file
        is damaged; records that can't be read, another release's or damaged, hide none that fits.
        """
        found, unread = self._look(variant, source, dsl)
        if found is None and unread:
            raise unread[0]
        return found

    def _look(
        self, variant: str, source: str | None = None, dsl: str | None = None
    ) -> tuple[Cubin | None, list[CubinError]]:
        """(the entry, what is wrong with records that couldn't be read)."""
        source = source_digest() if source is None else source
        dsl = dsl_version() if dsl is None else dsl
        unread: list[CubinError] = []
        for folder in self.folders:
            fitting: list[tuple[Cubin, Path]] = []
            for path in sorted(folder.glob(f"{variant}.*.json")):
                try:
                    entry = _read_record(path)
                except CubinError as damage:
                    unread.append(damage)
                    continue
                if entry.variant == variant and entry.source == source and dsl in (None, entry.dsl):
                    fitting.append((entry, path))
            if fitting:
                return _with_image(*max(fitting, key=lambda pair: _in_order(pair[0].dsl))), unread
        return None, unread

    def get(self, variant: str, build: Callable[[], Cubin] | None = None) -> Cubin:
        """The entry of a variant; where there is none, what `build` makes, kept for the next time.

        Of several processes one builds and the others take its result. CubinError where there is neither.
        """
        found, unread = self._look(variant)
        if found:
            return found
        if build is None:
            raise unread[0] if unread else CubinError(self._missing(variant))
        with self._locked(variant):
            found, _ = self._look(variant)
            return found or self._keep(build())

    def keep(self, cubin: Cubin) -> Path:
        """Write an entry. Returns the path of its image."""
        with self._locked(cubin.variant):
            self._keep(cubin)
        return self._target / f"{_stem(cubin)}.cubin"

    def _keep(self, cubin: Cubin) -> Cubin:
        if hashlib.sha256(cubin.image).hexdigest() != cubin.sha256:
            raise CubinError(f"{cubin.variant}: the image isn't what its sha256 says")
        record = {key: value for key, value in asdict(cubin).items() if key != "image"}
        write_bytes(self._target / f"{_stem(cubin)}.cubin", cubin.image)
        write_text(self._target / f"{_stem(cubin)}.json", json.dumps(record, indent=1) + "\n")
        return cubin

    @contextlib.contextmanager
    def _locked(self, variant: str) -> Iterator[None]:
        """Held by one process for each variant."""
        with locked(self._target / f"{variant}.lock"):
            yield

    def _missing(self, variant: str) -> str:
        looked = ", ".join(str(folder) for folder in self.folders)
        return (
            f"cutlass: {variant} isn't built for the sources of this release (looked in {looked}). Install the DSL "
            "(pip install pagedmla[cutlass]) to build it on demand, or run `pagedmla compile --executor cutlass --out "
            f"DIR` on a machine that has it and set {_SET_FOLDERS} to that folder here."
        )


def _in_order(version: str) -> list[int]:
    """4.10 after 4.9."""
    return [int(part) for part in re.findall(r"\d+", version)]


def _stem(cubin: Cubin) -> str:
    return f"{cubin.variant}.{cubin.address[:_DIGITS]}"


def _read_record(path: Path) -> Cubin:
    try:
        return Cubin(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as damage:
        raise CubinError(f"{path}: not a cubin's record ({damage}). Remove it and build again.") from damage


def _with_image(entry: Cubin, record: Path) -> Cubin:
    path = record.with_suffix(".cubin")
    try:
        image = path.read_bytes()
    except OSError as missing:
        raise CubinError(f"{path}: {missing.strerror}, though {record.name} tells of it. Build again.") from missing
    digest = hashlib.sha256(image).hexdigest()
    if digest != entry.sha256:
        raise CubinError(f"{path}: expected sha256 {entry.sha256}; got {digest}. Remove it and build again.")
    return Cubin(**{**asdict(entry), "image": image})
