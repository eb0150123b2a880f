"""`pagedmla bench`: ours beside the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedmla.plugin.commands.misuse import MOST, folder, misuse, once

EXAMPLES = """Examples:

* `pagedmla bench` takes about a minute on two CPU cores

* `pagedmla bench --quick --json bench.json --pictures build/bench` takes seconds, and draws what it measured

* `pagedmla bench --layout fp8_rope_bf16 --heads 16 --batch 1 --batch 128 --kv-len 4096 --q-len 2` measures that alone

* `pagedmla bench --quick --growth` adds how cost grows with requests, context, pool and addresses: a few minutes
"""


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few cases: seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On a GPU: every combination. Hours.")] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also how cost grows, and how evenly schedules cut.")
    ] = False,
    layout: Annotated[list[str] | None, typer.Option(help="Of the cache: {layouts}; again for more.")] = None,
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
        typer.Option(
            metavar="DIR", help="Draw roofline, share of floor, time against context: a picture.", parser=folder
        ),
    ] = None,
) -> None:
    """Decode, measured: ours beside the peers, right or wrong, fast or slow, in one table. Then models, marked as such.

    Without a GPU it times the executors of the CPU and a step's host cost, and models the compiled kernels. Options of
    the case (layout, heads, ...) replace the default cases. Exit code 1 where a contender of
    ours is wrong, or none of ours ran.
    """
    from pagedmla.bench import command

    axes = command.Axes(once(layout), once(heads), once(batch), once(kv_len), once(q_len), imbalanced)
    with misuse():
        right = command.bench(
            axes, quick=quick, full=full, growth=growth, executors=once(executor), seconds=seconds, json_file=json_file,
            pictures=pictures,
        )  # fmt: skip
    raise typer.Exit(0 if right else 1)
