"""Builds cubins, ahead of time or on demand. Needs the DSL, no GPU.

child      the DSL runs in a process of its own: it reads its settings when it is first imported, and whoever calls
           this may have imported it with others
on demand  `on_demand` gives a variant's cubin, built once if the DSL is here; else it says what to install or to run

`python -m pagedmla.cutlass_kernels.build FOLDER NAME...` is that child. It leaves NAME.ptx and NAME.cubin, or
NAME.error, in the folder and prints each name as soon as it is done.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pagedmla.cutlass_kernels.cubin_cache import Cubin, CubinCache, CubinError, dsl_version, source_digest
from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS, CombineVariant, Variant

ARCHITECTURE = "sm_90a"
_MODULE = "pagedmla.cutlass_kernels.build"
_SETTINGS = {"CUTE_DSL_ARCH": ARCHITECTURE, "CUTE_DSL_KEEP": "ptx,cubin"}
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_WAITS_FOR_GRID = "griddepcontrol.wait"


ALL: tuple[Variant | CombineVariant, ...] = (*VARIANTS, *COMBINES)
_AnyVariant = TypeVar("_AnyVariant", bound=Variant | CombineVariant)


class BuildError(RuntimeError):
    """The compiler's process broke off: killed, out of memory, or ended by what it met before any variant."""


class Built(NamedTuple):
    ptx: str
    cubin: bytes


def build(variants: Sequence[_AnyVariant]) -> Iterator[tuple[_AnyVariant, Built | str]]:
    """Each of these variants (of `ALL`) with what was built, or the reason why not, as soon as it is there.

    ImportError says what to install where there is no DSL; BuildError that the compiler's process broke off.
    """
    installed_dsl()
    by_name = {variant.name: variant for variant in variants}
    with tempfile.TemporaryDirectory(prefix="pagedmla-build-") as name_of_folder:
        folder = Path(name_of_folder)
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        environment = {**os.environ, **_SETTINGS, "CUTE_DSL_DUMP_DIR": str(folder), "PYTHONPATH": path}
        command = [sys.executable, "-m", _MODULE, str(folder), *by_name]
        with (folder / "messages").open("w+") as messages:
            with subprocess.Popen(
                command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=messages, text=True
            ) as child:
                try:
                    for line in child.stdout or ():
                        name = line.strip()
                        if name in by_name:  # the compiler may print too
                            yield by_name[name], _result(folder, name)
                except BaseException:  # whoever asked has gone: it would build on for nobody
                    child.kill()
                    raise
            messages.seek(0)
            said = messages.read().split("\n")
    if child.returncode:
        last = next((line for line in reversed(said) if line.strip()), "no message")
        raise BuildError(f"build: the compiler's process ended with {child.returncode}: {last}")


def on_demand(variant: Variant | CombineVariant, cache: CubinCache) -> Cubin:
    """A variant's cubin from the cache, built first where it isn't there and the DSL is installed.

    CubinError where there is none and none can be built or kept, or where its record is of a kernel of another size.
    """
    build_one = None if dsl_version() is None else lambda: _build_one(variant)
    try:
        cubin = cache.get(variant.name, build_one)
    except CubinError:
        raise
    except (OSError, RuntimeError) as reason:  # a folder that can't be written; the compiler's process broke off
        raise CubinError(f"{variant.name}: {reason}") from reason
    for name in ("threads", "shared_bytes", "cluster", "rows"):  # no hash covers the record
        expected, told = getattr(variant, name), getattr(cubin, name)
        if told != expected:
            raise CubinError(f"{variant.name}: expected a record with {name} {expected}; got {told}. Build it again.")
    return cubin


def make_cubin(variant: Variant | CombineVariant, built: Built) -> Cubin:
    """What the cache keeps of a build. CubinError where the PTX isn't one kernel of the variant's size."""
    entries, threads = _ENTRY.findall(built.ptx), _THREADS.findall(built.ptx)
    if len(entries) != 1 or threads != [str(variant.threads)]:
        raise CubinError(
            f"{variant.name}: expected one kernel of {variant.threads} threads; got {entries} of {threads}"
        )
    return Cubin(
        variant=variant.name,
        entry=entries[0],
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        cluster=variant.cluster,
        rows=variant.rows,
        may_start_early=_WAITS_FOR_GRID in built.ptx,
        source=source_digest(),
        dsl=installed_dsl(),
        sha256=sha256(built.cubin).hexdigest(),
        image=built.cubin,
    )


def installed_dsl() -> str:
    """Its version. ImportError says what to install."""
    version = dsl_version()
    if version is None:
        raise ImportError("build: the CUTLASS Python DSL isn't installed; pip install pagedmla[cutlass]")
    return version


def _build_one(variant: Variant | CombineVariant) -> Cubin:
    for _, built in build([variant]):
        if isinstance(built, str):
            raise CubinError(f"{variant.name}: {built}")
        return make_cubin(variant, built)
    raise CubinError(f"{variant.name}: the compiler gave no result")


def _result(folder: Path, name: str) -> Built | str:
    error = folder / f"{name}.error"
    if error.exists():
        return error.read_text()
    return Built((folder / f"{name}.ptx").read_text(), (folder / f"{name}.cubin").read_bytes())


def _compiled(variant: Variant | CombineVariant) -> Any:
    """The variant, compiled by the DSL: an object with `__ptx__` (text) and `__cubin__` (bytes). Needs no GPU.

    CUTE_DSL_KEEP must name ptx and cubin before the DSL is first imported.
    """
    if isinstance(variant, CombineVariant):
        from pagedmla.cutlass_kernels.combine import compile_combine

        return compile_combine(variant)
    from pagedmla.cutlass_kernels.decode_sm90 import compile_decode

    return compile_decode(variant)


def _child(folder: Path, names: Sequence[str]) -> None:
    by_name = {variant.name: variant for variant in ALL}
    for name in names:
        try:
            compiled = _compiled(by_name[name])
            (folder / f"{name}.ptx").write_text(compiled.__ptx__)
            (folder / f"{name}.cubin").write_bytes(compiled.__cubin__)
        except Exception as error:  # whatever the compiler has against this variant; the others go on
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {(lines or ['no message'])[0]}")
        print(name, flush=True)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), sys.argv[2:])
