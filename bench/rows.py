"""One row a contender and case, whoever made it: measured here, or computed by a model. The two are never compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from pagedmla.bench.cases import Case
from pagedmla.bench.published import Published, published
from pagedmla.hardware.cost import Roof, StepCost

MEASURED, MODEL = "measured", "model"


@dataclass(frozen=True)
class Row:
    """Microseconds are measured or a model's, as `source` says; `device` is where, or which GPU the model is of.

    contender, ours, reads    who, whether it is pagedmla's, and the cache format that it reads
    correct, relative_l2      against float64, the largest row (None: a model computes no output)
    share_of_floor            of the least time that the device could need for this contender's bytes and FLOPs; None
                              without a floor, and of a bound, which would be set against itself
    best_peer, speedup        of ours: the fastest correct peer in the same case, and its time over ours (< 1: we lose)
    bound                     its time is only the least that it could be
    oracle                    the float64 meaning: timed, and no party to a race
    floor_us                  the least time itself, of a bound too; None where the device's peaks aren't known
    published                 of a model: what others published for the case, on the cards that they name
    """

    source: str
    device: str
    contender: str
    ours: bool
    reads: str
    layout: str
    heads: int
    batch: int
    kv_len: int
    q_len: int
    lengths: str
    correct: bool | None
    relative_l2: float | None
    microseconds: float
    gb_per_s: float
    tflop_per_s: float
    share_of_floor: float | None
    best_peer: str | None = None
    speedup: float | None = None
    bound: bool = False
    oracle: bool = False
    floor_us: float | None = None
    published: Sequence[Published] = ()

    @property
    def case(self) -> Case:
        return Case(self.layout, self.heads, self.batch, self.kv_len, self.q_len, self.lengths)

    @property
    def loses(self) -> bool:
        """Against a peer; never of the oracle, which isn't meant to be fast."""
        return self.speedup is not None and self.speedup < 1 and not self.oracle

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_row(
    case: Case,
    cost: StepCost,
    microseconds: float,
    *,
    source: str,
    device: str,
    contender: str,
    ours: bool,
    reads: str,
    roof: Roof | None,
    fp8_mma: bool,
    bound: bool = False,
    oracle: bool = False,
    relative_l2: float | None = None,
    tolerance: float | None = None,
) -> Row:
    """A row with what follows from its time; `roof` gives the floor, None leaves it out."""
    floor = None if roof is None else cost.floor_us(roof, fp8_mma=fp8_mma)
    return Row(
        source=source,
        device=device,
        contender=contender,
        ours=ours,
        reads=reads,
        layout=case.layout,
        heads=case.heads,
        batch=case.batch,
        kv_len=case.kv_len,
        q_len=case.q_len,
        lengths=case.lengths,
        correct=None if relative_l2 is None or tolerance is None else relative_l2 <= tolerance,  # NaN is not
        relative_l2=relative_l2,
        microseconds=round(microseconds, 1) if microseconds >= 100 else _significant(microseconds),
        gb_per_s=_significant(cost.bytes / microseconds / 1e3),
        tflop_per_s=_significant(cost.flops / microseconds / 1e6),
        share_of_floor=None if floor is None or bound else round(floor / microseconds, 3),
        bound=bound,
        oracle=oracle,
        floor_us=None if floor is None else _significant(floor),
        published=published(case) if source == MODEL else (),
    )


def beside_peers(rows: Sequence[Row]) -> list[Row]:
    """The rows of one case, ours with the fastest peer that was right."""
    peers = [row for row in rows if not row.ours and row.correct]
    best = min(peers, key=lambda row: row.microseconds, default=None)
    if best is None:
        return list(rows)
    beside = best.contender
    return [
        replace(row, best_peer=beside, speedup=round(best.microseconds / row.microseconds, 3)) if row.ours else row
        for row in rows
    ]


def was_compared(row: Row) -> bool:
    """Whether the row is ours, no oracle, and stands beside a peer that was right."""
    return row.speedup is not None and not row.oracle


def losing_regions(rows: Iterable[Row]) -> list[str]:
    """Where ours lose to a peer, a sentence for each contender, layout and number of heads; what wins isn't in it."""
    compared = [row for row in rows if was_compared(row)]
    key = ("contender", "layout", "heads")
    compared.sort(key=lambda row: tuple(getattr(row, name) for name in key))
    sentences = []
    for (contender, layout, heads), group in groupby(compared, lambda row: tuple(getattr(row, name) for name in key)):
        members = list(group)
        lost = [row for row in members if row.loses]
        if not lost:
            continue
        worst = min(lost, key=lambda row: row.speedup or 0.0)
        assert worst.speedup is not None
        where = ", ".join(
            f"{name} {_span(getattr(row, field) for row in lost)}"
            for name, field in (("requests", "batch"), ("keys", "kv_len"), ("query tokens", "q_len"))
            if field != "q_len" or any(row.q_len > 1 for row in lost)
        )
        sentences.append(
            f"{contender}, {layout}, {heads} heads: loses {len(lost)} of {len(members)} cases ({where}), by most "
            f"{1 / worst.speedup:.2f}x to {worst.best_peer} at {worst.batch} x {worst.kv_len} keys"
        )
    return sentences


def wrong_rows(rows: Iterable[Row]) -> list[str]:
    """Who was wrong, and by how much."""
    return [
        f"{row.contender} is wrong: relative L2 {row.relative_l2:.1e} on {row.case}"
        for row in rows
        if row.correct is False
    ]


def _significant(value: float) -> float:
    """Four digits: rates span six orders of magnitude between a CPU and a GPU."""
    return float(f"{value:.4g}")


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
