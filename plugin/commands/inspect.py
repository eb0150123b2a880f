"""`pagedmla inspect`: who owns which page of a saved cache, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.plugin.commands.misuse import misuse

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
            help="An earlier cache of the same requests, or its report as JSON.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Read this layer; give it again for more. Default: all.")
    ] = None,
) -> None:
    """Who owns which page of a saved cache, how healthy its scales are, and what is wrong.

    Exit code 0: no problems (warnings don't count); 1: problems were found; 2: wrong usage.
    """
    if picture is not None:
        from pagedmla.plugin.pictures import expect_picture

        with misuse(ValueError, ImportError, OSError, option="--picture"):
            expect_picture(picture)
    with misuse(ValueError, TypeError, IndexError, OSError):
        earlier = None if before is None else _read_report(before, layer)
        report = _inspect_file(file, layer, earlier)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        from pagedmla.plugin.report import print_report

        print_report(report)
    if picture is not None:
        from pagedmla.plugin.page_picture import to_picture

        to_picture(report, picture)
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
    """The report in a JSON file, or on the cache in any other."""
    from pagedmla.kv_cache.cache_report import CacheReport

    if file.suffix != ".json":
        return _inspect_file(file, layers)
    try:
        return CacheReport.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: expected a report written by `pagedmla inspect --json`.") from error
