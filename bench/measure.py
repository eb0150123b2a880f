"""A case, measured: every contender on the same cache and queries, its error in the same row as its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pagedmla.bench.cases import Case, Inputs, build
from pagedmla.bench.clocks import Clock
from pagedmla.bench.contenders import Contender, contenders
from pagedmla.bench.judge import Judge
from pagedmla.bench.peers import REFUSALS, Absent
from pagedmla.bench.rows import MEASURED, Row, beside_peers, make_row
from pagedmla.hardware.cost import Roof


@dataclass
class Measured:
    """`absent` says for a contender why it has no row."""

    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def measure(
    case: Case, device: torch.device, clock: Clock, roof: Roof | None, executors: tuple[str, ...] | None = None
) -> Measured:
    """A row for each contender that can run the case, in this device's `roof`."""
    inputs = build(case, device)
    judge, found = Judge(inputs), Measured()
    ready: list[tuple[Contender, float]] = []
    for contender in _able(inputs, executors, found):
        try:
            ready.append((contender, judge.error(contender.call())))
            if not clock.together:
                found.rows += _rows(case, ready, clock, device, roof)
                ready = []
        except REFUSALS as refusal:
            if contender.ours and not isinstance(refusal, torch.OutOfMemoryError):
                raise  # ours said that they can run it
            ready = [each for each in ready if each[0] is not contender]
            found.absent[contender.name] = Absent.refused(contender.name, case, refusal).reason
        del contender
    found.rows += _rows(case, ready, clock, device, roof)
    found.rows = beside_peers(found.rows)
    return found


def _able(inputs: Inputs, executors: tuple[str, ...] | None, found: Measured) -> Iterator[Contender]:
    for made in contenders(inputs, executors):
        if isinstance(made, Absent):
            found.absent[made.name] = made.reason
        else:
            yield made


def _rows(
    case: Case, ready: list[tuple[Contender, float]], clock: Clock, device: torch.device, roof: Roof | None
) -> list[Row]:
    if not ready:
        return []
    times = clock([contender.call for contender, _ in ready])
    return [
        make_row(
            case,
            contender.cost,
            microseconds,
            source=MEASURED,
            device=device_name(device),
            contender=contender.name,
            ours=contender.ours,
            oracle=contender.oracle,
            reads=contender.reads,
            roof=roof,
            fp8_mma=contender.fp8_mma,
            relative_l2=error,
            tolerance=contender.tolerance,
        )
        for (contender, error), microseconds in zip(ready, times, strict=True)
    ]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
