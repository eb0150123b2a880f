"""The command line: `pagedmla inspect`, `explain` and `demo`. Exit code 1: something is wrong; 2: wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pagedmla.kv_cache.cache_report import CacheReport

app = typer.Typer(
    name="pagedmla",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`pagedmla COMMAND --help` shows a command's options with examples.",
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        from pagedmla import __version__

        typer.echo(f"pagedmla {__version__}")
        raise typer.Exit


@app.callback()
def pagedmla(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FP8 paged multi-head latent attention: look at caches, see what runs where and why."""


@app.command(
    epilog="""Examples:

* `pagedmla inspect cache.pt` prints pages, health and problems

* `pagedmla inspect cache.pt --layer 0 --layer 1 --picture cache.png` reads two layers and draws the pools

* `pagedmla inspect before.pt --json > before.json`, and after pages were moved
  `pagedmla inspect after.pt --before before.json` tells whether every scale page followed its value page
"""
)
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
    try:
        earlier = None if before is None else _read_report(before, layer)
        report = _inspect_file(file, layer, earlier)
    except (ValueError, IndexError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        from pagedmla.plugin.report import print_report

        print_report(report)
    if picture is not None:
        from pagedmla.plugin.report import to_picture

        try:
            to_picture(report, picture)
        except (ValueError, ImportError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="--picture") from error
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


@app.command(
    epilog="""Examples:

* `pagedmla explain --layout fp8_rope_bf16 --heads 128 --page-size 64 --batch 128 --max-length 4096`

* `pagedmla explain --layout fp8_flat --granularity 64 --heads 16 --batch 8 --tokens 2048 --max-length 32768`
"""
)
def explain(
    layout: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, fp8_flat, fp8_rope_bf16, fp8_rope_bf16_prescaled or fp8_ds_mla.")
    ] = "fp8_rope_bf16",
    granularity: Annotated[int | None, typer.Option(help="fp8_flat: columns that share a scale.")] = None,
    latent: Annotated[int, typer.Option(help="Latent columns (kv_lora_rank).")] = 512,
    rope: Annotated[int, typer.Option(help="Rotary columns (qk_rope_head_dim).")] = 64,
    heads: Annotated[int, typer.Option(help="Query heads on one device.")] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    batch: Annotated[int, typer.Option(help="Most requests in a step.")] = 128,
    tokens: Annotated[int | None, typer.Option(help="Most query tokens in a step. Default: one a request.")] = None,
    max_length: Annotated[int, typer.Option(help="Most keys of a request, after the step.")] = 4096,
    partitions: Annotated[int | None, typer.Option(help="Parts that a decode row's keys are cut into.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the queries: bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    executor: Annotated[str, typer.Option(help="auto, or an executor by name.")] = "auto",
) -> None:
    """Which executor a configuration gets, why, why not the others, and the least time a step could take (a model)."""
    import torch

    from pagedmla.kv_cache.layouts import get_layout
    from pagedmla.plugin.plan import plan

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"expected one of {', '.join(dtypes)}; got {dtype}", param_hint="--dtype")
    try:
        made = plan(
            layout=get_layout(layout, latent=latent, rope=rope, granularity=granularity),
            num_heads=heads,
            page_size=page_size,
            max_batch=batch,
            max_tokens=batch if tokens is None else tokens,
            max_cache_length=max_length,
            dtype=dtypes[dtype],
            device=device,
            sm_scale=1.0,  # it changes no choice and no cost
            num_partitions=partitions,
            executor=executor,
        )
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(made.explain())


@app.command(
    epilog="""Examples:

* `pagedmla demo`

* `pagedmla demo --layout bf16 --save cache.pt`, then `pagedmla inspect cache.pt`
"""
)
def demo(
    layout: Annotated[str, typer.Option(help="Of the cache; `pagedmla explain --help` lists them.")] = "fp8_rope_bf16",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the cache of the last step, for `pagedmla inspect`.")
    ] = None,
) -> None:
    """Prefill and decode over a small FP8 cache, checked against float64. Exit code 1 where a result is off."""
    from pagedmla.kv_cache.layouts import LAYOUTS
    from pagedmla.plugin.demo import main as run_demo

    if layout not in LAYOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(LAYOUTS)}; got {layout}", param_hint="--layout")
    raise typer.Exit(run_demo(layout, save))


def main() -> None:
    """Entry point of the `pagedmla` command."""
    app(prog_name="pagedmla")
