"""The command line: look at caches, see what runs where, build and measure kernels. Exit code 1: wrong; 2: misused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from pagedmla.kv_cache.cache_report import CacheReport

MOST = 2**31 - 1  # of anything that is counted: lengths and ids are int32
_GIVEN_OUT = (
    errno.EPIPE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # of where output goes, however it is used

app = typer.Typer(
    name="pagedmla",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`pagedmla COMMAND --help` shows a command's options with examples.",
    rich_markup_mode="markdown",
)


@contextlib.contextmanager
def _misuse(*errors: type[Exception], option: str | None = None) -> Iterator[None]:
    """Errors of these kinds are told as wrong usage: a sentence, and exit code 2."""
    try:
        yield
    except errors as error:
        if isinstance(error, OSError) and error.errno in _GIVEN_OUT:
            raise
        sentence = str(error).partition("\n")[0]  # torch's have a backtrace behind it
        raise typer.BadParameter(sentence, param_hint=option) from error


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
    if picture is not None:
        from pagedmla.plugin.pictures import expect_picture

        with _misuse(ValueError, ImportError, OSError, option="--picture"):
            expect_picture(picture)
    with _misuse(ValueError, TypeError, IndexError, OSError):
        earlier = None if before is None else _read_report(before, layer)
        report = _inspect_file(file, layer, earlier)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        from pagedmla.plugin.report import print_report

        print_report(report)
    if picture is not None:
        from pagedmla.plugin.report import to_picture

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
    granularity: Annotated[int | None, typer.Option(max=MOST, help="fp8_flat: columns that share a scale.")] = None,
    latent: Annotated[int, typer.Option(max=MOST, help="Latent columns (kv_lora_rank).")] = 512,
    rope: Annotated[int, typer.Option(max=MOST, help="Rotary columns (qk_rope_head_dim).")] = 64,
    heads: Annotated[int, typer.Option(max=MOST, help="Query heads on one device.")] = 128,
    page_size: Annotated[int, typer.Option(max=MOST, help="Tokens a page.")] = 64,
    batch: Annotated[int, typer.Option(max=MOST, help="Most requests in a step.")] = 128,
    tokens: Annotated[
        int | None, typer.Option(max=MOST, help="Most query tokens in a step. Default: one a request.")
    ] = None,
    max_length: Annotated[int, typer.Option(max=MOST, help="Most keys of a request, after the step.")] = 4096,
    partitions: Annotated[
        int | None, typer.Option(max=MOST, help="Parts that a decode row's keys are cut into.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the queries: bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    executor: Annotated[str, typer.Option(help="auto, or an executor by name.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of the CUTLASS kernels: auto, fp8 (one e4m3 term of Q), fp8x2 (two) or fp16.")
    ] = "auto",
) -> None:
    """Which executor a configuration gets, why, why not the others, and the least time a step could take (a model).

    Without a GPU here `--device cuda` is answered for one that isn't, and the first line says for which.
    """
    import torch

    from pagedmla.kv_cache.layouts import get_layout
    from pagedmla.plugin.plan import outline

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"expected one of {', '.join(dtypes)}; got {dtype}", param_hint="--dtype")
    with _misuse(ValueError, RuntimeError, option="--device"):
        note = _absent_gpu(torch.device(device))
    with _misuse(ValueError, TypeError, RuntimeError):
        made = outline(
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
            precision=precision,
        )
    if note is not None:
        typer.echo(note)
    typer.echo(made.explain())


def _absent_gpu(device: torch.device) -> str | None:
    """What stands for a GPU that isn't here; None for one that is, and for other devices. ValueError for a number that
    none has, where there are some."""
    import torch

    from pagedmla.plugin.executor_triton import multiprocessors

    if device.type != "cuda":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return (
            f"There is no GPU here. Partitions and workspace are those of an H200, with {multiprocessors(device)} "
            "multiprocessors; ask again on a machine with the card that you mean"
        )
    if (device.index or 0) >= count:
        raise ValueError(f"expected a GPU of this machine, cuda:0 to cuda:{count - 1}; got {device}")
    return None


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
    from pagedmla.kv_cache.files import expect_file
    from pagedmla.kv_cache.layouts import LAYOUTS
    from pagedmla.plugin.demo import main as run_demo

    if layout not in LAYOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(LAYOUTS)}; got {layout}", param_hint="--layout")
    if save is not None:
        with _misuse(OSError, option="--save"):
            expect_file(save)
    raise typer.Exit(run_demo(layout, save))


@app.command(
    epilog="""Examples:

* `pagedmla calibrate MODEL --text sample.txt` prints what each layer caches and what each layout makes of it

* `pagedmla calibrate MODEL --text sample.txt --write-scales scaled/`, then
  `vllm serve scaled/ --attention-backend CUSTOM --kv-cache-dtype fp8`
"""
)
def calibrate(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or a name that vLLM knows.")],
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="Text to read, such as the model will.", exists=True, dir_okay=False)
    ],
    tokens: Annotated[int, typer.Option(min=2, help="Read so much of it.")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a request.")] = 1024,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that the model is spread over.")] = 1,
    margin: Annotated[
        float, typer.Option(min=1.0, help="Of the per-tensor scale, over the largest number that was seen.")
    ] = 1.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.", dir_okay=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw them; the ending sets the format (png, svg, pdf).")
    ] = None,
    scales: Annotated[
        Path | None,
        typer.Option(
            "--write-scales",
            metavar="DIR",
            help="A new folder: links to the checkpoint, and a k_scale for each layer, which `fp8` caches take.",
        ),
    ] = None,
) -> None:
    """Read a model's latents in the real vLLM engine: ranges, what FP8 loses, and the layout to take, layer by layer.

    Needs vLLM. Without a GPU it runs on the CPU, which is for small models.
    """
    from rich.console import Console

    from pagedmla.plugin import calibrate as calibration

    with _misuse(ValueError, ImportError, OSError, RuntimeError):
        read = calibration.read_text(text)
        calibration.check_targets(model, scales, json_file, picture)
        found = calibration.calibrate(
            model, read, tokens=tokens, window=window, tensor_parallel=tensor_parallel, margin=margin
        )
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    for table in calibration.tables(found):
        console.print(table)
    console.print(calibration.verdict(found))
    failed = []
    for target, write in (
        (scales, calibration.write_scales),
        (json_file, calibration.write_json),
        (picture, calibration.to_picture),
    ):
        try:
            if target is not None:
                write(found, target)
        except (ValueError, ImportError, OSError, RuntimeError) as error:  # the others are written all the same
            failed.append(str(error))
    if failed:
        raise typer.BadParameter("; ".join(failed))
    if scales is not None:
        console.print(f"k_scale of {len(found.layers)} layers: {scales}, to be served with --kv-cache-dtype fp8")


class CompiledExecutor(str, Enum):
    """Executors whose kernels are built ahead of time."""

    triton = "triton"
    cutlass = "cutlass"


@app.command(
    name="compile",
    epilog="""Examples:

* `pagedmla compile --target sm_90` builds every kernel for Hopper and prints what each costs

* `pagedmla compile --only decode --target sm_90 --out build/kernels` keeps the binaries and their disassembly

* `pagedmla compile --json bench/results/compile-triton.json` writes the whole table (an hour on one core)

* `pagedmla compile --executor cutlass --out build/cubins` builds what the executor `cutlass` loads, for machines
  without the CUTLASS DSL: take the folder there and set PAGEDMLA_CUBINS to it
""",
)
def compile_kernels(
    executor: Annotated[CompiledExecutor, typer.Option(help="Whose kernels.")] = CompiledExecutor.triton,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T",
            help="sm_80, sm_89, sm_90, sm_100, gfx942 or gfx950; again for more. Default: all. CUTLASS: sm_90 alone.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KERNEL",
            help="decode, mixed, prefill, store, decompress or merge; again for more. Default: all. CUTLASS: decode, "
            "merge, or a variant's name.",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(metavar="LAYOUT", help="Of the cache; again for more. Default: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep binaries here, and Triton's listings.", file_okay=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.", dir_okay=False)
    ] = None,
) -> None:
    """Build kernels ahead of time, without a GPU, and print what each costs: compiled, not run.

    Exit code 1 where a target refused a variant.
    """
    from pagedmla.plugin.compile_report import compile_cutlass, compile_triton

    build = compile_cutlass if executor is CompiledExecutor.cutlass else compile_triton
    with _misuse(ValueError, ImportError, OSError, RuntimeError):
        rows = build(target, only, layout, out, json_file)
    raise typer.Exit(1 if any("refused" in row for row in rows) else 0)


@app.command(
    epilog="""Examples:

* `pagedmla bench` takes about a minute on two CPU cores

* `pagedmla bench --quick --json bench.json --pictures build/bench` takes seconds, and draws what it measured

* `pagedmla bench --layout fp8_rope_bf16 --heads 16 --batch 1 --batch 128 --kv-len 4096 --q-len 2` measures that alone

* `pagedmla bench --quick --growth` adds how cost grows with requests, context, pool and addresses: a few minutes
"""
)
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few cases: seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On a GPU: every combination. Hours.")] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also how cost grows, and how evenly schedules cut.")
    ] = False,
    layout: Annotated[list[str] | None, typer.Option(help="Of the cache; again for more.")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, max=MOST, help="Query heads; again for more.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=MOST, help="Requests a step; again for more.")] = None,
    kv_len: Annotated[list[int] | None, typer.Option(min=1, max=MOST, help="Keys a request; again for more.")] = None,
    q_len: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST, help="Query tokens a request; again for more.")
    ] = None,
    imbalanced: Annotated[bool, typer.Option("--imbalanced", help="Draw lengths around --kv-len.")] = False,
    executor: Annotated[list[str] | None, typer.Option(help="Time only these of ours; again for more.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no case after so long. Default: 30 on a CPU, none on a GPU.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.", dir_okay=False)
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw the roofline, time against context, share of floor.", file_okay=False),
    ] = None,
) -> None:
    """Decode, measured: ours beside the peers, right or wrong, fast or slow, in one table. Then models, marked as such.

    Without a GPU it times the executors of the CPU and a step's host cost, and models the compiled kernels. Options of
    the case (layout, heads, ...) replace the default cases. Exit code 1 where a contender of
    ours is wrong, or none of ours ran.
    """
    from pagedmla.bench import command

    axes = command.Axes(layout, heads, batch, kv_len, q_len, imbalanced)
    with _misuse(ValueError, ImportError, OSError):
        right = command.bench(
            axes, quick=quick, full=full, growth=growth, executors=executor, seconds=seconds, json_file=json_file,
            pictures=pictures,
        )  # fmt: skip
    raise typer.Exit(0 if right else 1)


def main() -> None:
    """Entry point of the `pagedmla` command."""
    try:
        app(prog_name="pagedmla")
    except OSError as error:  # a disk that is full by now: of a file that is named, or of the output
        with contextlib.suppress(OSError, AttributeError):  # stdout is None where it was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer can't go out
        sys.exit(f"pagedmla: {error}")
