"""What `pagedmla bench` does with its options: which cases, which sections, which files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from pagedmla.bench import model
from pagedmla.bench.cases import (
    FLAGSHIP,
    IMBALANCED,
    UNIFORM,
    Case,
    cpu_cases,
    full_gpu_cases,
    gpu_cases,
    grid,
    quick_cases,
)
from pagedmla.bench.measure import device_name
from pagedmla.bench.pictures import draw, expect_matplotlib
from pagedmla.bench.run import Bench, make_console, write_report
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.files import expect_file, expect_folder
from pagedmla.plugin.executors import executors as all_executors

CPU_SECONDS = 30.0


@dataclass(frozen=True)
class Axes:
    """Cases by their axes; an axis that isn't given has one value in the middle."""

    layouts: Sequence[str] | None = None
    heads: Sequence[int] | None = None
    batches: Sequence[int] | None = None
    kv_lens: Sequence[int] | None = None
    q_lens: Sequence[int] | None = None
    imbalanced: bool = False

    def cases(self) -> list[Case] | None:
        """None where no axis was given. ValueError for a layout that isn't one."""
        if not (self.layouts or self.heads or self.batches or self.kv_lens or self.q_lens or self.imbalanced):
            return None
        return list(
            grid(
                self.layouts or [FLAGSHIP],
                self.heads or [16],
                self.batches or [8],
                self.kv_lens or [1024],
                self.q_lens or [1],
                [IMBALANCED if self.imbalanced else UNIFORM],
            )
        )


def bench(
    axes: Axes,
    *,
    quick: bool = False,
    full: bool = False,
    growth: bool = False,
    executors: Sequence[str] | None = None,
    seconds: float | None = None,
    json_file: Path | None = None,
    pictures: Path | None = None,
    device: torch.device | None = None,
    console: Console | None = None,
) -> bool:
    """Run, print and write; whether some of ours ran and all of them were right.

    `device` None: the GPU that there is, else the CPU. The JSON is written after every case and section, so what ends a
    run late takes nothing with it. Before anything is measured: ValueError for options that contradict each other or
    name what isn't there, OSError for files that can't be written or read, ImportError for pictures without matplotlib.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    if quick and full:
        raise Refusal("--quick and --full: expected one of them; got both")
    if full and not on_gpu:
        raise Refusal("--full: expected a GPU, where its thousands of cases take hours; there is none here")
    known = [executor.name for executor in all_executors()]
    for name in executors or ():
        if name not in known:
            raise Refusal(f"--executor: expected one of {', '.join(known)}; got {name!r}")
    chosen = axes.cases()
    if not on_gpu:
        for compiled in (model.TRITON_TABLE, model.CUTLASS_TABLE):
            model.expect_table(compiled)
    if json_file is not None:
        expect_file(json_file)
    if pictures is not None:
        expect_matplotlib()
        expect_folder(pictures)
    default = quick_cases() if quick else full_gpu_cases() if full else gpu_cases() if on_gpu else cpu_cases()
    made = Bench(
        device,
        console or make_console(),
        CPU_SECONDS if seconds is None and not on_gpu else seconds,
        None if executors is None else tuple(executors),
    )

    def keep() -> None:
        """A pipe gets the report once, in the end."""
        if json_file is not None and (json_file.is_file() or not json_file.exists()):
            write_report(made.report(), json_file)

    try:
        made.measure(chosen or default, after_each=keep)
        if not on_gpu:
            made.model(axes.layouts, chosen, quick=quick)
            keep()
        if quick:
            made.host((1, 64), seconds=0.02)
        else:
            made.host()
        if growth:
            keep()
            made.growth()
    finally:
        if json_file is not None:
            write_report(made.report(), json_file)
    if pictures is not None and not made.measured:
        made.say("no pictures: nothing was measured")
    elif pictures is not None:
        stem = json_file.stem if json_file is not None else "bench"
        picture = pictures / f"{stem}.png"
        made.say(str(draw(made.measured, made.roof, f"decode on {device_name(device)}", picture)))
    return made.ours_ran and not any(row.ours and row.correct is False for row in made.measured)
