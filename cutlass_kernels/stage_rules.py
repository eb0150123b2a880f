"""One stage of a ring and what a step may do to it: the meaning that `interleavings` explores.

Barriers are PTX's mbarriers: a phase ends when its pending arrivals and its transactions are both met, then the parity
bit turns and the arrivals start again; a wait for parity p passes once the current phase has the other parity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedmla.cutlass_kernels.protocol import Action, Protocol


class ProtocolError(Exception):
    """The table allows what it must not. The message names role, step, ring and stage, and the way that leads there."""


@dataclass(frozen=True, eq=False)
class Op:
    """A step with its numbers filled in. `cells`: the stages that it reaches, its own CTA's first."""

    action: Action
    role: int
    label: str
    ring: int = -1
    fill: int = -1
    parity: int = 0
    arrivals: int = 0
    cells: tuple[int, ...] = ()
    meeting: str = ""
    party: tuple[tuple[int, int], ...] = ()  # of a MEET: its agents, and which of each one's ops the same MEET is


class Copy(NamedTuple):
    """A copy in flight. `arrivals` 0: it counts as a transaction."""

    fill: int
    arrivals: int
    label: str


class Stage(NamedTuple):
    """One stage of one CTA: its two barriers and its contents."""

    ring: int
    full_pending: int
    empty_pending: int
    full_parity: int = 0
    empty_parity: int = 0
    transactions: int = 0
    fill: int = -1  # -1: nothing yet
    parts: int = 0  # of the fill that are there
    reading: int = 0  # bit mask of roles
    read: int = 0
    flying: tuple[Copy, ...] = ()


class Rules:
    """Effects of ops and of landing copies. `programs`: those of one CTA, which tell what each fill is made of."""

    def __init__(self, protocol: Protocol, programs: Sequence[Sequence[Op]]) -> None:
        self._rings = protocol.rings
        self._names = [role.name for role in protocol.roles]
        self._parts: Counter[tuple[int, int]] = Counter()  # (ring, fill) -> what must be there before it is read
        self._copies: Counter[tuple[int, int]] = Counter()  # those of them that count as transactions
        self._readers: Counter[tuple[int, int]] = Counter()  # bit mask of roles
        for op in (op for program in programs for op in program):
            key = (op.ring, op.fill)
            if op.action is Action.COPY:
                self._copies[key] += len(op.cells)
            if op.action in (Action.COPY, Action.FETCH, Action.COMMIT):
                self._parts[key] += len(op.cells)
            if op.action is Action.WAIT:
                self._readers[key] |= 1 << op.role

    def fresh(self) -> list[Stage]:
        """Every stage of a CTA before the first step, in the order of rings and stages."""
        return [
            Stage(index, ring.full, ring.empty) for index, ring in enumerate(self._rings) for _ in range(ring.stages)
        ]

    def apply(self, op: Op, own: bool, stage: Stage) -> Stage | None:
        """The stage after `op` of its own CTA or of another one; None where the op has to wait."""
        bit = 1 << op.role
        if op.action is Action.ACQUIRE:
            return None if stage.empty_parity == op.parity else self._open(op, stage)
        if op.action is Action.WAIT:
            if stage.full_parity == op.parity:
                return None
            self._expect_full(op, stage)
            return stage._replace(reading=stage.reading | bit)
        if op.action is Action.RELEASE:
            if own:
                if stage.fill != op.fill or not stage.reading & bit:
                    raise ProtocolError(f"{op.label} gives back what it isn't reading")
                stage = stage._replace(reading=stage.reading & ~bit, read=stage.read | bit)
            return self._arrive_empty(op, stage)
        if op.action is Action.ARM:
            announced = stage._replace(transactions=stage.transactions + self._copies[op.ring, op.fill])
            return self._arrive_full(op.label, op.arrivals, announced)
        stage = self._open(op, stage)
        if op.action is Action.COMMIT:
            return self._arrive_full(op.label, op.arrivals, stage._replace(parts=stage.parts + 1))
        copy = Copy(op.fill, op.arrivals if op.action is Action.FETCH else 0, op.label)
        return stage._replace(flying=tuple(sorted((*stage.flying, copy))))

    def land(self, copy: Copy, stage: Stage) -> Stage:
        flying = list(stage.flying)
        flying.remove(copy)
        if stage.fill != copy.fill:
            raise ProtocolError(f"{copy.label} lands where fill {stage.fill} has taken its place")
        stage = stage._replace(parts=stage.parts + 1, flying=tuple(flying))
        if copy.arrivals:
            return self._arrive_full(copy.label, copy.arrivals, stage)
        return self._end_full_phase(stage._replace(transactions=stage.transactions - 1))

    def lacking(self, op: Op, stage: Stage) -> str:
        """What a blocked op waits for."""
        ring = self._rings[op.ring]
        if op.action is Action.ACQUIRE:
            return f"{stage.empty_pending} of {ring.empty} arrivals on empty"
        return f"{stage.full_pending} of {ring.full} arrivals on full and {stage.transactions} copies"

    def _open(self, op: Op, stage: Stage) -> Stage:
        """The stage as a writer of the op's fill may take it: all readers of what it held are done with it."""
        if stage.fill == op.fill:
            return stage
        stages = self._rings[op.ring].stages
        before = op.fill - stages if op.fill >= stages else -1
        if stage.fill != before:
            raise ProtocolError(f"{op.label} finds fill {stage.fill} in the stage; expected {before}")
        unread = self._readers[op.ring, stage.fill] & ~stage.read
        if unread:
            names = [name for role, name in enumerate(self._names) if unread >> role & 1]
            raise ProtocolError(f"{op.label} overwrites fill {stage.fill}, which {' and '.join(names)} has yet to read")
        return stage._replace(fill=op.fill, parts=0, reading=0, read=0)

    def _expect_full(self, op: Op, stage: Stage) -> None:
        if stage.fill != op.fill:
            raise ProtocolError(f"{op.label} reads before it is full: the stage holds fill {stage.fill}, not {op.fill}")
        missing = self._parts[op.ring, op.fill] - stage.parts
        if missing:
            raise ProtocolError(f"{op.label} reads before it is full: {missing} parts of fill {op.fill} aren't there")

    def _arrive_empty(self, op: Op, stage: Stage) -> Stage:
        pending = stage.empty_pending - op.arrivals
        if pending < 0:
            raise ProtocolError(f"{op.label} arrives {op.arrivals} times on empty, which lacks {stage.empty_pending}")
        if pending:
            return stage._replace(empty_pending=pending)
        return stage._replace(empty_pending=self._rings[op.ring].empty, empty_parity=stage.empty_parity ^ 1)

    def _arrive_full(self, label: str, arrivals: int, stage: Stage) -> Stage:
        pending = stage.full_pending - arrivals
        if pending < 0:
            raise ProtocolError(f"{label} arrives {arrivals} times on full, which lacks {stage.full_pending}")
        return self._end_full_phase(stage._replace(full_pending=pending))

    def _end_full_phase(self, stage: Stage) -> Stage:
        if stage.full_pending or stage.transactions:
            return stage
        return stage._replace(full_pending=self._rings[stage.ring].full, full_parity=stage.full_parity ^ 1)
