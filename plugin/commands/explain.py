"""`pagedmla explain`: which executor a configuration gets, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.plugin.commands.misuse import MOST, misuse

if TYPE_CHECKING:
    import torch

EXAMPLES = """Examples:

* `pagedmla explain --layout fp8_rope_bf16 --heads 128 --page-size 64 --batch 128 --max-length 4096`

* `pagedmla explain --layout fp8_flat --granularity 64 --heads 16 --batch 8 --tokens 2048 --max-length 32768`
"""


_OPTIONS = {
    "layout": "--layout",
    "granularity": "--granularity",
    "latent": "--latent",
    "rope": "--rope",
    "num_heads": "--heads",
    "page_size": "--page-size",
    "max_batch": "--batch",
    "max_tokens": "--tokens",
    "max_cache_length": "--max-length",
    "num_partitions": "--partitions",
    "executor": "--executor",
    "precision": "--precision",
}  # of the arguments of the API


def explain(
    layout: Annotated[str, typer.Option(help="Of the cache: {layouts}.")] = "fp8_rope_bf16",
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
    executor: Annotated[str, typer.Option(help="auto, or by name {executors}.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of the CUTLASS kernels: {precisions}; fp8 is one e4m3 term of Q, fp8x2 two.")
    ] = "auto",
) -> None:
    """Which executor a configuration gets, why, why not the others, and the least time a step could take (a model).

    Without a GPU here `--device cuda` is answered for one that isn't, and the first line says for which.
    """
    import torch

    from pagedmla.kv_cache.layouts import get_layout
    from pagedmla.plugin.plan import expect_device, plan

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"expected one of {', '.join(dtypes)}; got {dtype}", param_hint="--dtype")
    with misuse(option="--device"):
        note = _absent_gpu(expect_device(device))
    with misuse(options=_OPTIONS):
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
            precision=precision,
            reserve=False,
        )
    if note is not None:
        typer.echo(note)
    typer.echo(made.explain())
    taken = made.attend_choice.executor.name
    if precision != "auto" and not taken.startswith("cutlass"):
        typer.echo(f"  precision {precision} is the CUTLASS kernels' to take: {taken} computes as it always does")


def _absent_gpu(device: torch.device) -> str | None:
    """What stands for a GPU that isn't here; None for one that is, and for other devices. ValueError for a number that
    none has, where there are some."""
    import torch

    from pagedmla.kv_cache.checks import Refusal
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
        raise Refusal(f"expected a GPU of this machine, cuda:0 to cuda:{count - 1}; got {device}")
    return None
