"""What the barriers put before what, and that this is enough: a proof for tables with too many orders to walk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedmla.cutlass_kernels.programs import Programs
from pagedmla.cutlass_kernels.protocol import Action, Protocol
from pagedmla.cutlass_kernels.stage_rules import Op, ProtocolError


def check_order(protocol: Protocol, items: Sequence[int], *, clearing: bool = True) -> int:
    """Prove what `interleavings.check` walks for. Returns the number of steps.

    ProtocolError for a fault, or where it can't tell.

    Barriers are taken at their word first: the wait for a fill comes behind all that arrives for that fill, a meeting
    behind all who meet. Of the order that follows this shows, for each stage, that the counts are met, and that a wait
    can't find its barrier a phase behind or ahead, nor an arrival fall into another phase. Then no run can be the first
    to leave that order: up to where it did, all would have been in order, and so the next step. As each run has that
    order, two uses without one between them could come either way round; none may conflict.
    """
    written = Programs(protocol, items, clearing)
    order = Order(written)
    order.check_barriers()
    order.check_uses()
    return sum(len(program) for program in written.of_agents)


class _At(NamedTuple):
    """An op in a program."""

    agent: int
    place: int


@dataclass
class _Fill:
    """What is done to a cell for one fill: ops by what they do there."""

    fills: list[_At]  # COPY, FETCH, COMMIT
    arms: list[_At]
    arrivals: list[_At]  # on full, those that count none left out
    waits: list[_At]
    acquires: list[_At]
    releases: list[_At]  # of readers of this CTA
    emptying: list[_At]  # arrivals on empty, from everywhere


class Order:
    """What barriers put in order, as a clock of each op: how many ops of each agent are over when it is."""

    def __init__(self, written: Programs) -> None:
        self._written, self._programs = written, written.of_agents
        self._fills: dict[tuple[int, int], _Fill] = defaultdict(lambda: _Fill([], [], [], [], [], [], []))
        for at in self._all():
            self._note(at)
        self._clocks: list[list[list[int]]] = [[] for _ in self._programs]
        self._run()

    def _all(self) -> Iterator[_At]:
        return (_At(agent, place) for agent, program in enumerate(self._programs) for place in range(len(program)))

    def _op(self, at: _At) -> Op:
        return self._programs[at.agent][at.place]

    def _note(self, at: _At) -> None:
        op = self._op(at)
        for index, cell in enumerate(op.cells):
            fill = self._fills[cell, op.fill]
            if op.action in (Action.COPY, Action.FETCH, Action.COMMIT):
                fill.fills.append(at)
            if op.action in (Action.FETCH, Action.COMMIT, Action.ARM) and op.arrivals:
                fill.arrivals.append(at)
            if op.action is Action.ARM:
                fill.arms.append(at)
            if op.action is Action.WAIT:
                fill.waits.append(at)
            if op.action is Action.ACQUIRE:
                fill.acquires.append(at)
            if op.action is Action.RELEASE:
                if index == 0:
                    fill.releases.append(at)
                if op.arrivals:
                    fill.emptying.append(at)

    # The order.

    def _run(self) -> None:
        """Clocks of all ops, in an order that the barriers allow."""
        moved = True
        while moved:
            moved = False
            for agent, program in enumerate(self._programs):
                while len(self._clocks[agent]) < len(program) and self._take(agent):
                    moved = True
        stuck = [agent for agent, program in enumerate(self._programs) if len(self._clocks[agent]) < len(program)]
        if stuck:
            lines = [f"  {self._op(_At(agent, len(self._clocks[agent]))).label} waits" for agent in stuck]
            raise ProtocolError("\n".join(["deadlock", *lines]))

    def _take(self, agent: int) -> bool:
        """An agent's next op, if all that it waits for is over."""
        clocks = self._clocks[agent]
        before = self._before(agent, self._programs[agent][len(clocks)])
        if any(len(self._clocks[other]) <= place for other, place in before):
            return False
        known = [self._clocks[other][place] for other, place in before]
        own = clocks[-1] if clocks else [0] * len(self._programs)
        clock = [max(counts) for counts in zip(own, *known, strict=True)]
        clock[agent] = len(clocks) + 1
        clocks.append(clock)
        return True

    def _before(self, agent: int, op: Op) -> list[_At]:
        """What an op waits for."""
        if op.party:
            return [_At(other, place - 1) for other, place in op.party if other != agent]
        if op.action is Action.WAIT:
            fill = self._fills[op.cells[0], op.fill]
            return [*fill.arrivals, *(at for at in fill.fills if self._op(at).action is Action.COPY)]
        if op.action is Action.ACQUIRE and (emptied := self._earlier(op.cells[0], op, 1)):
            return emptied.emptying
        return []

    def _over(self, at: _At, by: _At) -> bool:
        """Whether one op is over in every order by the time that another is, or is the same."""
        return self._clocks[by.agent][by.place][at.agent] > at.place

    def _over_before(self, at: _At, by: _At) -> bool:
        """Whether it is over when the other's agent comes to it."""
        return by.place > 0 and self._over(at, _At(by.agent, by.place - 1))

    def _earlier(self, cell: int, op: Op, rounds: int) -> _Fill | None:
        """What the cell held so many fills before an op's; None: nothing yet."""
        fill = op.fill - rounds * self._written.protocol.rings[op.ring].stages
        return self._fills[cell, fill] if fill >= 0 else None

    # Statistics.

    def check_uses(self) -> None:
        for (agent, place), needs in self._written.needs.items():
            for label, need in needs:
                behind = _At(need.agent, need.place)  # the op whose turn comes once that use is over
                its_end = need.place >= len(self._programs[need.agent])
                if its_end or place == 0 or not self._over(behind, _At(agent, place - 1)):
                    raise ProtocolError(f"{label} may come before {need.label} is over")

    # Barriers.

    def check_barriers(self) -> None:
        for (cell, _), fill in self._fills.items():
            ring, _ = self._written.cells[cell % len(self._written.cells)]
            for barrier, most, arrivals in (("full", ring.full, fill.arrivals), ("empty", ring.empty, fill.emptying)):
                got = sum(self._op(each).arrivals for each in arrivals)
                if got > most:
                    raise ProtocolError(
                        f"{self._op(arrivals[-1]).label}: {barrier} takes {most} arrivals a fill; got {got}"
                    )
        for at in self._all():
            op = self._op(at)
            if op.action is Action.WAIT:
                self._check_wait(at, op)
            elif op.action is Action.ACQUIRE:
                self._check_acquire(at, op)
            for index, cell in enumerate(op.cells):
                self._check_arrival(at, op, cell, own=index == 0)
                if index:
                    self._check_present(at, op, cell)

    def _check_wait(self, at: _At, op: Op) -> None:
        """Its phase ends with this fill's arrivals, and is the one that the wait can find."""
        cell, ring = op.cells[0], self._written.protocol.rings[op.ring]
        fill = self._fills[cell, op.fill]
        self._expect_sum(op, "full", ring.full, fill.arrivals)
        copied = any(self._op(each).action is Action.COPY for each in fill.fills)
        if len(fill.arms) != int(copied):
            raise ProtocolError(f"{op.label}: its copies are announced {len(fill.arms)} times")
        if op.parity != op.fill // ring.stages & 1:
            raise ProtocolError(f"{op.label} waits for the other phase")
        self._expect(all(self._over(each, at) for each in fill.fills), op, "reads before it is full")
        if (before := self._earlier(cell, op, 1)) is not None:
            self._expect(any(self._over_before(each, at) for each in before.waits), op, "may find the fill before")
        after = self._fills.get((cell, op.fill + ring.stages))
        if after and after.arrivals:
            self._expect(any(self._over(at, each) for each in after.arrivals), op, "may find the fill behind")

    def _check_acquire(self, at: _At, op: Op) -> None:
        """Its phase ends with the release of what the stage held before."""
        cell, ring = op.cells[0], self._written.protocol.rings[op.ring]
        if (before := self._earlier(cell, op, 1)) is not None:
            self._expect_sum(op, "empty", ring.empty, before.emptying)
        if op.parity != (op.fill // ring.stages & 1) ^ 1:
            raise ProtocolError(f"{op.label} waits for the other phase")
        if before is not None and self._earlier(cell, op, 2) is not None:
            self._expect(any(self._over_before(each, at) for each in before.acquires), op, "may find the fill before")
        emptying = self._fills[cell, op.fill].emptying
        if emptying:
            self._expect(any(self._over(at, each) for each in emptying), op, "may find the fill behind")

    def _check_arrival(self, at: _At, op: Op, cell: int, own: bool) -> None:
        """The phase before has ended; who fills finds a stage whose readers are done, who releases has read it."""
        fill = self._fills[cell, op.fill]
        before = self._earlier(cell, op, 1)
        if op.action is Action.RELEASE:
            if own:
                waits = [each for each in fill.waits if each.agent == at.agent and each.place < at.place]
                again = [each for each in fill.releases if each.agent == at.agent and each.place < at.place]
                self._expect(bool(waits) and not again, op, "gives back what it isn't reading")
            if before is not None and op.arrivals:
                self._expect(any(self._over(each, at) for each in fill.acquires), op, "may arrive a phase too early")
        elif op.action in (Action.ARM, Action.COPY, Action.FETCH, Action.COMMIT) and before is not None:
            self._expect(any(self._over(each, at) for each in before.waits), op, "may arrive a phase too early")
        if op.action in (Action.ACQUIRE, Action.COPY, Action.FETCH, Action.COMMIT) and before is not None:
            readers = {each.agent for each in before.waits}
            done = {each.agent for each in before.releases if self._over(each, at)}
            names = " and ".join(
                self._written.protocol.roles[self._role(agent)].name for agent in sorted(readers - done)
            )
            self._expect(not names, op, f"may overwrite what {names} has yet to read")

    def _role(self, agent: int) -> int:
        return agent % len(self._written.protocol.roles)

    def _check_present(self, at: _At, op: Op, cell: int) -> None:
        roles = len(self._written.protocol.roles)
        first = cell // len(self._written.cells) * roles
        last = [_At(agent, len(self._programs[agent]) - 1) for agent in range(first, first + roles)]
        stays = any(each.place >= 0 and self._over(at, each) for each in last)
        self._expect(stays, op, "reaches another CTA, which may have left")

    def _expect_sum(self, op: Op, barrier: str, expected: int, arrivals: Iterable[_At]) -> None:
        got = sum(self._op(each).arrivals for each in arrivals)
        self._expect(got == expected, op, f"waits for {expected} arrivals on {barrier}; got {got}")

    @staticmethod
    def _expect(true: bool, op: Op, fault: str) -> None:
        if not true:
            raise ProtocolError(f"{op.label} {fault}")
