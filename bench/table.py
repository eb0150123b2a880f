"""The bench on a terminal: one table of cases, and a small one for each of the other sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from pagedmla.bench.balance import Balance
from pagedmla.bench.cases import UNIFORM
from pagedmla.bench.growth import Growth
from pagedmla.bench.host_cost import HostCost
from pagedmla.bench.rows import Row

LOSES, WRONG = "red", "bold red"
WIDE = 120
UNEVEN = 1.25  # of a schedule: from here on it is shown in red
_Column = tuple[str, str, Callable[[Row], str | Text]]  # heading, justification, content


def case_table(rows: Sequence[Row], title: str, width: int = WIDE) -> Table:
    """Measured rows, a contender each under its case.

    Less than WIDE columns of a terminal don't hold it all: what follows from the time is then left to the JSON.
    """
    columns: list[_Column] = [
        ("contender", "left", lambda row: row.contender),
        ("reads", "left", lambda row: row.reads),
        ("source", "left", lambda row: row.source),
        ("right", "left", _verdict),
        ("error", "right", lambda row: _number(row.relative_l2)),
        ("us", "right", lambda row: _time(row.microseconds)),
        ("GB/s", "right", lambda row: _number(row.gb_per_s)),
        ("TFLOP/s", "right", lambda row: _number(row.tflop_per_s)),
        ("of floor", "right", _share),
        ("beside the best peer", "left", _beside),
    ]
    if width < WIDE:
        columns = [column for column in columns if column[0] not in ("reads", "source", "GB/s", "TFLOP/s")]
    table = _titled(title)
    for heading, justify, _ in columns:
        table.add_column(
            heading,
            justify=_justified(justify),
            no_wrap=heading != "beside the best peer" and (heading != "contender" or width >= WIDE),
        )
    previous: Row | None = None
    for row in rows:
        if previous is None or previous.case != row.case:
            if previous is not None:
                table.add_section()
            table.add_row(Text(_label(row), "bold"))
        table.add_row(*(content(row) for _, _, content in columns))
        previous = row
    return table


def model_table(rows: Sequence[Row], title: str, width: int = WIDE) -> Table:
    """A model's rows, which carry a ~: a contender each under its case, GPUs side by side.

    A case's first line has what others published for it, won or lost: measured by them, on the cards named. Less than
    WIDE columns leave the floors, but not the shares of them, to the JSON.
    """
    gpus = list(dict.fromkeys(row.device for row in rows))
    by_gpu: list[_Column] = [
        ("us", "right", lambda row: "~" + _time(row.microseconds)),
        ("floor", "right", lambda row: "-" if row.floor_us is None else _time(row.floor_us)),
        ("of it", "right", _share),
    ]
    if width < WIDE:
        by_gpu = [column for column in by_gpu if column[0] != "floor"]
    table = _titled(title)
    table.add_column("contender", no_wrap=width >= WIDE)
    for gpu in gpus:
        for heading, justify, _ in by_gpu:
            table.add_column(f"{gpu}\n{heading}", justify=_justified(justify), no_wrap=True)
    table.add_column("published, measured by others: us")
    for at, case in enumerate(dict.fromkeys(row.case for row in rows)):
        if at:
            table.add_section()
        of_case = [row for row in rows if row.case == case]
        others = "; ".join(str(figure) for figure in of_case[0].published)
        table.add_row(Text(_label(of_case[0]), "bold"), *[""] * (len(gpus) * len(by_gpu)), others)
        for contender in dict.fromkeys(row.contender for row in of_case):
            at_gpu = {row.device: row for row in of_case if row.contender == contender}
            cells = [content(at_gpu[gpu]) if gpu in at_gpu else "-" for gpu in gpus for _, _, content in by_gpu]
            table.add_row(contender, *cells, "")
    return table


def kernel_table(rows: Sequence[dict[str, Any]], gpu: str) -> Table:
    """The compiled kernels' budgets on a GPU, as `pagedmla.bench.model.kernel_rows` makes them."""
    table = _titled(f"compiled kernels on {gpu} (model): what a key costs a multiprocessor, all overlapping perfectly")
    for heading in ("kernel", "layout", "rows", "registers", "spills", "instructions of", "ns memory, issue, tensor",
                    "binds", "of bandwidth"):  # fmt: skip
        table.add_column(heading, justify=_justified("left" if heading in ("kernel", "layout", "binds") else "right"))
    for row in rows:
        form = f" {row['form']}" if row["form"] else ""
        scales = f", {row['group']} a scale" if row["group"] and row["group"] < 512 else ""
        table.add_row(
            f"{row['executor']} {row['kernel']}{form}",
            row["layout"] + scales,
            *(str(row[name]) for name in ("rows", "registers", "spills_in_loop")),
            f"{row['instructions']:.0f} of {row['issue_slots']:.0f}",
            f"{row['memory_ns']:.1f}, {row['issue_ns']:.1f}, {row['tensor_ns']:.1f}",
            row["bound"],
            f"{row['share_of_bandwidth']:.0%}",
        )
    return table


def host_table(costs: Sequence[HostCost]) -> Table:
    """Parts of a step on the host; requests stand side by side."""
    counts = list(dict.fromkeys(cost.requests for cost in costs))
    kinds = list(dict.fromkeys(cost.what for cost in costs))
    at = {(cost.what, cost.requests): cost for cost in costs}
    table = _titled("host time of a step's parts (measured), us of CPU time: the least of many runs")
    table.add_column("part")
    for count in counts:
        table.add_column(f"{count} request" + "s" * (count > 1), justify="right")
    for kind in kinds:
        table.add_row(kind, *(_host(at.get((kind, count))) for count in counts))
    return table


def growth_table(rows: Sequence[Growth]) -> Table:
    table = _titled("how cost grows (measured)")
    for heading in ("what", "size", "us", "times the first", "same bits"):
        table.add_column(heading, justify=_justified("left" if heading == "what" else "right"))
    previous = None
    for row in rows:
        if previous is not None and previous != row.what:
            table.add_section()
        same = "" if row.same is None else "yes" if row.same else Text("no", WRONG)
        table.add_row(row.what, f"{row.size:,} {row.unit}", _number(row.microseconds), f"{row.ratio:.2f}", same)
        previous = row.what
    return table


def balance_table(rows: Sequence[Balance]) -> Table:
    table = _titled("balance of the schedules on ragged batches (model): the busiest worker's keys over an even share")
    for heading in ("batch", "lengths are", "heads", "executor", "pieces", "busiest", "even", "share"):
        left = heading in ("batch", "lengths are", "executor")
        table.add_column(heading, justify=_justified("left" if left else "right"))
    for row in rows:
        share = Text(f"{row.share:.2f}", LOSES if row.share > UNEVEN else "")
        table.add_row(
            row.batch,
            row.kind,
            str(row.heads),
            row.executor,
            str(row.pieces),
            f"{row.busiest:,}",
            f"{row.even:,.0f}",
            share,
        )
    return table


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _justified(side: str) -> JustifyMethod:
    return "left" if side == "left" else "right"


def _label(row: Row) -> str:
    queries = f" q={row.q_len}" if row.q_len > 1 else ""
    ragged = "" if row.lengths == UNIFORM else f" {row.lengths}"
    return f"{row.layout} H={row.heads} {row.batch} x {row.kv_len}{queries}{ragged}"


def _share(row: Row) -> str:
    return "-" if row.share_of_floor is None else f"{row.share_of_floor:.1%}"


def _verdict(row: Row) -> str | Text:
    if row.correct is None:
        return "-"
    return "yes" if row.correct else Text("WRONG", WRONG)


def _beside(row: Row) -> str | Text:
    if row.speedup is None:
        return ""
    if row.speedup >= 1:
        return Text(f"{row.speedup:.2f}x faster than {row.best_peer}", "green")
    return Text(f"{1 / row.speedup:.2f}x slower than {row.best_peer}", LOSES if row.loses else "dim")


def _host(cost: HostCost | None) -> str:
    if cost is None:
        return "-"
    return _number(cost.microseconds) + ("" if cost.beside is None else f" (vLLM {_number(cost.beside)})")


def _time(microseconds: float) -> str:
    """A model's smallest are nanoseconds."""
    return f"{microseconds:,.1f}" if microseconds >= 1 else f"{microseconds:.3g}"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:,.3g}" if abs(value) < 1 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
