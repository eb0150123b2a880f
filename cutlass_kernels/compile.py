"""Rows of the compile table: what each variant costs, read from its cubin. Needs the DSL, no GPU.

contract   `compile_variant` builds one variant and returns its row, `compile_all` a list of rows, in the form that
           hardware/footprint.py gives Triton's, with the digest of the sources that were compiled
refusal    a variant that can't be built, or that an SM can't hold, gives a row with the reason, not an exception
files      with `cache` the cubins are kept there, each one's PTX beside it under its stem, which the cache never reads;
           with `out_dir`: NAME.TARGET.cubin, .ptx and .sass
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedmla.cutlass_kernels import resources
from pagedmla.cutlass_kernels.build import ALL, ARCHITECTURE, Built, build, installed_dsl, make_cubin
from pagedmla.cutlass_kernels.cubin_cache import CubinCache, source_digest
from pagedmla.cutlass_kernels.tiles import KEYS, WARPS
from pagedmla.cutlass_kernels.usual_trip import copying_loop, count_trip, find_trip
from pagedmla.cutlass_kernels.variants import CombineVariant, Variant
from pagedmla.hardware import footprint, sass
from pagedmla.hardware.loops import Instruction
from pagedmla.hardware.targets import find_target
from pagedmla.kv_cache.files import locked, write_bytes, write_text
from pagedmla.kv_cache.layouts import get_layout

REPORT = Path("bench", "results", "compile-cutlass.json")
COMMAND = f"pagedmla compile --executor cutlass --json {REPORT}"
DIGEST = "source_digest"


def compile_all(
    variants: Iterable[Variant | CombineVariant] = ALL,
    *,
    cache: CubinCache | None = None,
    out_dir: str | Path | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Build variants, some seconds each. `on_row` sees each row as soon as it is there.

    BuildError where the compiler's process breaks off; what was built until then is kept.
    """
    digest = source_digest()  # before anything is built: of what the compiler reads, not of what is edited meanwhile
    rows = []
    for variant, built in build(list(variants)):
        if isinstance(built, str):
            row = _refusal(variant, built)
        else:
            row = _row(variant, built)
            if cache is not None:
                kept = cache.keep(make_cubin(variant, built))
                write_text(kept.with_suffix(".ptx"), built.ptx)
            if out_dir is not None:
                _write(Path(out_dir), variant, built)
        rows.append({**row, DIGEST: digest})
        if on_row:
            on_row(rows[-1])
    return rows


def compile_variant(variant: Variant | CombineVariant, out_dir: str | Path | None = None) -> dict[str, Any]:
    """Build one variant; its row."""
    return compile_all([variant], out_dir=out_dir)[0]


def write_report(rows: Sequence[Mapping[str, Any]], path: str | Path = REPORT) -> None:
    """Rows as JSON, one a line. Makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def add_to_report(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The same, keeping what `path` tells of other variants where the same compiler made them of the same sources.

    Safely among processes.
    """
    names = {row["options"]["variant"] for row in rows}
    made_of = {(row[DIGEST], row["cutlass"]) for row in rows}
    with locked(path.with_suffix(".lock")):
        try:
            others = [
                row
                for row in json.loads(path.read_bytes())
                if row["options"]["variant"] not in names and (row[DIGEST], row["cutlass"]) in made_of
            ]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # there is none, or none of this form
            others = []
        write_report([*others, *rows], path)


def stale(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Of the committed table: a sentence where it wasn't compiled from the present sources, with the command to run.

    None where it was, and where it doesn't say what it was compiled from.
    """
    digests = [row.get(DIGEST) for row in rows]
    others = sum(digest != source_digest() for digest in digests)
    if not others or not any(digests):
        return None
    return f"{REPORT}: {others} of {len(rows)} kernels were compiled from other sources than these; run `{COMMAND}`"


def warp_instructions_per_token(code: Sequence[Instruction]) -> float | None:
    """Instructions of all warps of a CTA for one token of the cache, rare branches included; None without a main loop.

    A trip of the consumers' loop covers a tile for each consumer, so a tile costs one trip of one warpgroup; one
    producer warp runs a trip of its own for each tile.
    """
    found = find_trip(code)
    if found is None:
        return None
    counted = count_trip(code, *found)
    return (counted.every * WARPS + counted.producer) / KEYS


def _about(variant: Variant | CombineVariant) -> dict[str, Any]:
    about = {
        "executor": "cutlass",
        "target": find_target(ARCHITECTURE),
        "rows": variant.rows,
        "compiler": installed_dsl(),
    }
    options: dict[str, Any] = {"variant": variant.name, "dtype": variant.dtype}
    if isinstance(variant, CombineVariant):
        return {**about, "kernel": "merge", "layout": "", "options": options}
    shape = variant.shape
    options |= {"precision": shape.precision, "terms": shape.terms, "rope": shape.rope, "stages": shape.stages}
    options |= {"cluster": variant.cluster, "box": variant.box}
    return {**about, "kernel": "decode", "layout": variant.layout, "options": options}


def _row(variant: Variant | CombineVariant, built: Built) -> dict[str, Any]:
    about, shared = _about(variant), variant.shared_bytes
    if shared > about["target"].shared_per_block:
        reason = f"needs {shared} bytes of shared memory a CTA; {ARCHITECTURE} has {about['target'].shared_per_block}"
        return footprint.refusal_row(**about, reason=reason)
    code = sass.parse(resources.disassemble(built.cubin))
    found = find_trip(code)
    body = [code[i] for i in found[0].body] if found else []
    cost = footprint.Footprint(
        registers=resources.read_resources(built.cubin).registers,
        warps=variant.threads // 32,
        shared_bytes=shared,
        spill_words=sass.spill_words(code),
        spill_words_in_loop=sass.spill_words([*body, *copying_loop(code)]),
        instructions=len(body),
    )
    bytes_per_token = get_layout(variant.layout).bytes_per_token if isinstance(variant, Variant) else None
    row = footprint.report_row(**about, footprint=cost, tokens=None, bytes_per_token=bytes_per_token)
    per_token = warp_instructions_per_token(code)  # two loops, of different roles: not the form's own arithmetic
    return {**row, "warp_instructions_per_token": None if per_token is None else round(per_token, 1)}


def _refusal(variant: Variant | CombineVariant, reason: str) -> dict[str, Any]:
    return footprint.refusal_row(**_about(variant), reason=reason)


def _write(folder: Path, variant: Variant | CombineVariant, built: Built) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{variant.name}.{ARCHITECTURE}"
    write_text(folder / f"{stem}.ptx", built.ptx)
    write_bytes(folder / f"{stem}.cubin", built.cubin)
    write_text(folder / f"{stem}.sass", resources.disassemble(built.cubin))
