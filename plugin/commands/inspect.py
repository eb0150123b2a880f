"""`pagedmla inspect`: who owns which page of a saved cache, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.plugin.commands.misuse import misuse, once
from pagedmla.plugin.terminal import printable

if TYPE_CHECKING:
    from pagedmla.kv_cache.cache_report import CacheReport

EXAMPLES = """Examples:

* `pagedmla inspect cache.pt` prints pages, health and problems

* `pagedmla inspect cache.pt --layer 0 --layer 1 --picture cache.png` reads two layers and draws the pools

* `pagedmla inspect before.pt --json > before.json`, and after pages were moved
  `pagedmla inspect after.pt --before before.json` tells whether every scale page followed its value page
"""


def inspect(
    file: Annotated[
        Path, typer.Argument(help="A cache written by `pagedmla.save_cache`.", exists=True, dir_okay=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON, and nothing else.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG", help="Also draw the pages of both pools; the ending sets the format (png, svg, pdf)."
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An earlier cache of the same requests, or its report as JSON: whatever its name. "
            "A pipe may bring a report.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Read this layer; give it again for more. Default: all.")
    ] = None,
) -> None:
    """Who owns which page of a saved cache, how healthy its scales are, and what is wrong.

    Exit code 0: no problems (warnings don't count); 1: problems were found; 2: wrong usage; 74: the report couldn't be
    written; 141: its reader left early.
    """
    layer = once(layer)
    if picture is not None:
        from pagedmla.plugin.pictures import expect_picture

        with misuse(option="--picture"):
            expect_picture(picture)
    with misuse():
        earlier = None if before is None else _read_report(before, layer)
        report = _inspect_file(file, layer, earlier)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        from pagedmla.plugin.report import print_report

        print_report(report)
    if picture is not None:
        from pagedmla.plugin.page_picture import to_picture

        with misuse(ValueError, option="--picture"):  # of a picture that is too large
            to_picture(report, picture)
        if not as_json:
            typer.echo(f"Wrote {printable(str(picture))}")
    raise typer.Exit(0 if report.ok else 1)


def _inspect_file(file: Path, layers: list[int] | None, before: CacheReport | None = None) -> CacheReport:
    from pagedmla.kv_cache.inspection import inspect as inspect_values
    from pagedmla.kv_cache.saving import load_cache

    saved = load_cache(file)
    return inspect_values(
        saved.values,
        layout=saved.layout,
        query_start_loc=saved.query_start_loc,
        layers=layers or None,
        request_names=saved.request_names,
        before=before,
    )


def _read_report(file: Path, layers: list[int] | None) -> CacheReport:
    """The report that a file holds as JSON, whatever its name; or the one on the cache in any other."""
    from pagedmla.kv_cache.cache_report import CacheReport
    from pagedmla.kv_cache.checks import Refusal

    with file.open("rb") as opened:
        content = opened.read(1)
        if content in (b"{", b"[", b" ", b"\n", b"\r", b"\t"):
            content += opened.read()
        elif file.is_fifo():
            raise Refusal(f"{file}: expected a report from a pipe, as `pagedmla inspect --json` prints; got none.")
        else:
            return _inspect_file(file, layers)
    try:
        return CacheReport.from_dict(json.loads(content))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Refusal(f"{file}: expected a report written by `pagedmla inspect --json`.") from error
