"""`pagedmla calibrate`: a model's latents, read in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedmla.plugin.commands.misuse import misuse, told_as_misuse

EXAMPLES = """Examples:

* `pagedmla calibrate MODEL --text sample.txt` prints what each layer caches and what each layout makes of it

* `pagedmla calibrate MODEL --text sample.txt --write-scales scaled/`, then
  `vllm serve scaled/ --attention-backend CUSTOM --kv-cache-dtype fp8`
"""


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

    with misuse(calibration.EngineFailure):
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
        except told_as_misuse() as error:  # the others are written all the same
            failed.append(str(error))
    if failed:
        raise typer.BadParameter("; ".join(failed))
    if scales is not None:
        console.print(f"k_scale of {len(found.layers)} layers: {scales}, to be served with --kv-cache-dtype fp8")
