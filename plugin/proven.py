"""Which compiled kernels are proven: those that passed the correctness tests on a GPU, by what they were built from.

A record is made by a passing run on hardware and kept in bench/results/proven.json, which ships with the package. Its
key is the cubin's address (variant, digest of the kernel's sources, version of the DSL): a kernel whose sources change
loses its record. Without the file nothing is proven.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedmla.kv_cache.checks import refuse

if TYPE_CHECKING:
    from pagedmla.cutlass_kernels.cubin_cache import Cubin

RECORDS = Path(__file__).resolve().parent.parent / "bench" / "results" / "proven.json"


@dataclass(frozen=True)
class Record:
    """A passing run of a variant.

    variant   its name; address: of its cubin (Cubin.address), 64 hexadecimal digits
    sha256    of the cubin's image
    card      the GPU's name; driver: the version of its driver
    date      of the run, YYYY-MM-DD
    cases     how many passed
    """

    variant: str
    address: str
    sha256: str
    card: str
    driver: str
    date: str
    cases: int


def records(path: Path | None = None) -> Mapping[str, Record]:
    """Address to record. ValueError names the file where it isn't a list of records."""
    path = RECORDS if path is None else path
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return MappingProxyType({})
    return _read(path, changed)


def record_of(cubin: Cubin) -> Record | None:
    """The record of this very image, or None."""
    record = records().get(cubin.address)
    return record if record is not None and record.sha256 == cubin.sha256 else None


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Mapping[str, Record]:
    names = [field.name for field in fields(Record)]
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(listed, list):
            raise TypeError(f"a {type(listed).__name__}")
        by_address = {row["address"]: Record(**{name: row[name] for name in names}) for row in listed}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as damage:
        wanted = f"a list of records, each with {', '.join(names)}"
        refuse(str(path), wanted, f"another file ({type(damage).__name__}: {damage})")
    return MappingProxyType(by_address)
