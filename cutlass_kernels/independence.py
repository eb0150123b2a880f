"""Which agents' next steps are enough to look at: the others can't tell whether they came before or after.

Two steps are independent where either order leads to the same state and neither makes the other wait or fail. A set of
agents is stubborn when nothing that another agent may still do is dependent on the next steps in it, and when, for each
step in it that waits, all that could end the wait are in it. Following one stubborn set in each state instead of every
agent still meets every way to stop, faults included (Valmari's stubborn sets; no step here repeats, so none is put off
for ever). Arrivals on one empty barrier are taken to be alike in number.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from pagedmla.cutlass_kernels.protocol import Action
from pagedmla.cutlass_kernels.stage_rules import Op


class _Touch(IntEnum):
    """What a step does to a stage."""

    ACQUIRE = 0
    ARM = 1
    COPY = 2
    FETCH = 3
    COMMIT = 4
    WAIT = 5
    RELEASE = 6  # of the own CTA
    ARRIVE = 7  # a release of another CTA: its arrival alone
    LAND = 8  # a copy that counts as a transaction
    LAND_AND_ARRIVE = 9
    LEAVE = 10  # the last step of an agent: after all of them the CTA is gone


_T = _Touch
_OPENS = {_T.ACQUIRE, _T.COPY, _T.FETCH, _T.COMMIT}  # they take the stage for their fill
_FILLS = {_T.ARM, _T.COMMIT, _T.LAND, _T.LAND_AND_ARRIVE}  # they change the full barrier
_LANDS = {_T.LAND, _T.LAND_AND_ARRIVE}


def _dependent(a: _Touch, b: _Touch) -> bool:
    """Whether two steps on one stage can tell which came first. Symmetric; more pairs than needed do no harm."""
    for one, other in ((a, b), (b, a)):
        if one is _T.WAIT and other in _FILLS | _OPENS:
            return True
        if one is _T.ACQUIRE and other in (_T.RELEASE, _T.ARRIVE):
            return True
        if one in _OPENS and other in {_T.RELEASE} | _LANDS:
            return True
        if one in _FILLS and other in _FILLS and not (one is _T.LAND and other is _T.LAND):
            return True
        if one is _T.LEAVE and other in (_T.COPY, _T.ARRIVE):
            return True
    return False


_DEPENDENT_ON = [sum(1 << b for b in _Touch if _dependent(a, b)) for a in _Touch]  # bit masks over _Touch
_ENDS_WAIT_OF = {
    Action.ACQUIRE: 1 << _T.RELEASE | 1 << _T.ARRIVE,
    Action.WAIT: sum(1 << touch for touch in _FILLS),
}


class Independence:
    """Chooses agents for states of one protocol. Agents are numbered CTA by CTA, cells likewise."""

    def __init__(self, programs: Sequence[Sequence[Op]], roles: int, cells_of_cta: int) -> None:
        self._party = [[[agent for agent, _ in op.party] for op in program] for program in programs]
        self._conflicts = [[_conflicts(op) for op in program] for program in programs]
        self._enablers = [[_enablers(op) for op in program] for program in programs]
        self._future: list[list[int]] = []  # per agent and position: all that is still to come, as bits
        for agent, program in enumerate(programs):
            first = agent // roles * cells_of_cta
            cells = range(first, first + cells_of_cta)
            future = [0]
            for op in reversed(program):
                future.append(future[-1] | _touches(op) | sum(_bit(cell, _T.LEAVE) for cell in cells))
            self._future.append(future[::-1])
            if program:
                self._conflicts[agent][-1] |= sum(_DEPENDENT_ON[_T.LEAVE] << cell * len(_Touch) for cell in cells)

    def choose(
        self, at: Sequence[int], able: Sequence[bool], flying: Sequence[tuple[int, bool]]
    ) -> tuple[list[int], list[int]]:
        """A stubborn set with few enabled steps: agents that can step and copies that land.

        `at`: next op of each agent; `able`: whether it can be taken. `flying`: each copy's cell, and whether its
        landing arrives.
        """
        agents = [agent for agent, position in enumerate(at) if position < len(self._conflicts[agent])]
        copies = [(cell, _T.LAND_AND_ARRIVE if arrives else _T.LAND) for cell, arrives in flying]
        # Processes: agents, then copies. What each may still do, and what pulls others in, as bits over (cell, touch).
        future = [self._future[a][at[a]] for a in agents] + [_bit(*copy) for copy in copies]
        pulled_by = [(self._conflicts if able[a] else self._enablers)[a][at[a]] for a in agents]
        pulled_by += [_DEPENDENT_ON[touch] << cell * len(_Touch) for cell, touch in copies]
        pulls = [sum(1 << q for q, still in enumerate(future) if mask & still) for mask in pulled_by]
        for p, agent in enumerate(agents):
            if not able[agent]:
                party = self._party[agent][at[agent]]
                pulls[p] |= sum(1 << q for q, other in enumerate(agents) if other in party)
        enabled = sum(1 << p for p, agent in enumerate(agents) if able[agent])
        enabled |= (1 << len(copies)) - 1 << len(agents)
        best = enabled
        for seed in range(len(future)):
            if enabled >> seed & 1:
                closed = _closure(seed, pulls) & enabled
                if closed.bit_count() < best.bit_count():
                    best = closed
        return (
            [agent for p, agent in enumerate(agents) if best >> p & 1],
            [copy for copy in range(len(copies)) if best >> len(agents) + copy & 1],
        )


def _closure(seed: int, pulls: Sequence[int]) -> int:
    """All that a process pulls in, and what those pull in, as bits."""
    closed = todo = 1 << seed
    while todo:
        process = todo.bit_length() - 1
        todo &= ~(1 << process)
        new = pulls[process] & ~closed
        closed |= new
        todo |= new
    return closed


def _bit(cell: int, touch: _Touch) -> int:
    return 1 << (cell * len(_Touch) + touch)


def _reached(op: Op) -> list[tuple[int, _Touch]]:
    """Each stage that an op reaches, and what it does there at once."""
    if not op.cells:
        return []
    touch = _Touch[op.action.name]
    elsewhere = _T.ARRIVE if touch is _T.RELEASE else touch
    return [(cell, elsewhere if index else touch) for index, cell in enumerate(op.cells)]


def _touches(op: Op) -> int:
    """What an op does to each stage, the landing of its copies included."""
    bits = 0
    for cell, touch in _reached(op):
        bits |= _bit(cell, touch)
        if touch is _T.COPY:
            bits |= _bit(cell, _T.LAND)
        if touch is _T.FETCH:
            bits |= _bit(cell, _T.LAND_AND_ARRIVE)
    return bits


def _conflicts(op: Op) -> int:
    """All that is dependent on an op. Its own CTA can't leave before it."""
    bits = sum(_DEPENDENT_ON[touch] << cell * len(_Touch) for cell, touch in _reached(op))
    return bits & ~_bit(op.cells[0], _T.LEAVE) if op.cells else bits


def _enablers(op: Op) -> int:
    return _ENDS_WAIT_OF[op.action] << op.cells[0] * len(_Touch) if op.action in _ENDS_WAIT_OF else 0
