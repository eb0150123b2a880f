"""Every order in which a protocol's steps can happen: no deadlock, nothing overwritten while read, or read too early.

model     an agent is a role of one CTA, or with `protocol.in_parts` some of its warps; a state is where each agent
          stands and, for each stage of each CTA, its barriers' pending arrivals, transactions and parity bits, what it
          holds, who reads it and the copies that fly towards it, which land at any time (stage_rules.py)
walk      `check`: breadth first over the states that can be reached, equal ones once, so that a fault is found by a
          short way to it; of orders that nobody can tell apart one is walked (independence.py), or all of them on
          request. It takes a few stages and blocks
limits    what a table does wrong, it does wrong within two rounds of each ring. Tables that have too many orders to
          walk are proved, in order.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagedmla.cutlass_kernels.independence import Independence
from pagedmla.cutlass_kernels.order import Order
from pagedmla.cutlass_kernels.programs import Programs
from pagedmla.cutlass_kernels.protocol import Protocol
from pagedmla.cutlass_kernels.stage_rules import Op, ProtocolError, Rules, Stage

_MAX_STATES = 1_000_000
_SHOWN_STEPS = 12


def check(
    protocol: Protocol,
    items: Sequence[int],
    *,
    clearing: bool = True,
    every_order: bool = False,
    max_states: int = _MAX_STATES,
) -> int:
    """Walk the interleavings of work items of so many blocks each. Returns the number of states.

    `clearing`: whether items' last blocks have keys past the end. `every_order` walks also those that differ only in
    the order of independent steps: the same answer, more slowly. Statistics are then judged in every state, else by
    what the barriers put in order, once the walk has shown that these do what they are meant to.
    ProtocolError for the first fault; RuntimeError where more than `max_states` states would be needed.
    """
    written = Programs(protocol, items, clearing)
    states = _Walk(written, every_order).run(max_states)
    if protocol.statistics and not every_order:
        Order(written).check_uses()
    return states


_State = tuple[int, ...]  # each agent's next op, then the number of each cell's stage


class _Move(NamedTuple):
    """What can happen next: an agent's op, or the landing of a copy at a cell."""

    state: _State
    label: str


class _Walk:
    """The search. Stages are numbered as they are met, and what an op does to one is worked out once."""

    def __init__(self, written: Programs, every_order: bool) -> None:
        self._protocol = written.protocol
        self._cells, self._programs = written.cells, written.of_agents
        self._needs = written.needs if every_order else {}
        roles = len(self._protocol.roles)
        self._rules = Rules(self._protocol, self._programs[:roles])
        self._independence = None if every_order else Independence(self._programs, roles, len(self._cells))
        self._stages: list[Stage] = []
        self._numbers: dict[Stage, int] = {}
        self._effects: dict[tuple[Op, bool, int], int | None] = {}
        self._landings: dict[int, list[tuple[int, bool, str]]] = {}

    def run(self, max_states: int) -> int:
        fresh = [self._number(stage) for stage in self._rules.fresh()] * self._protocol.cluster
        start: _State = (*(0 for _ in self._programs), *fresh)
        came_from: dict[_State, tuple[_State, str] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            try:
                moves = self._moves(state)
            except ProtocolError as fault:
                raise ProtocolError(f"{fault}\nafter:\n{_way(came_from, state)}") from None
            for move in moves:
                if move.state not in came_from:
                    came_from[move.state] = (state, move.label)
                    queue.append(move.state)
            if len(came_from) > max_states:
                raise RuntimeError(f"interleavings: more than {max_states} states; give fewer stages, items or blocks")
        return len(came_from)

    # One step further.

    def _moves(self, state: _State) -> list[_Move]:
        """What may come next; one of each set of orders that nobody can tell apart. ProtocolError for a fault."""
        agents = len(self._programs)
        steps: list[_Move | None] = [self._step(state, agent) for agent in range(agents)]
        landings: list[_Move] = []
        flying: list[tuple[int, bool]] = []
        for cell, number in enumerate(state[agents:]):
            for landed, arrives, label in self._landed(number):
                at = agents + cell
                landings.append(_Move((*state[:at], landed, *state[at + 1 :]), label))
                flying.append((cell, arrives))
        if not landings and not any(steps):
            if any(at < len(program) for at, program in zip(state, self._programs)):
                raise ProtocolError(self._deadlock(state))
            return []
        if self._independence is None:
            return [step for step in steps if step] + landings
        chosen, copies = self._independence.choose(state[:agents], [step is not None for step in steps], flying)
        return [step for agent in chosen if (step := steps[agent])] + [landings[copy] for copy in copies]

    def _step(self, state: _State, agent: int) -> _Move | None:
        """An agent's next op, or None while it has to wait or after its last."""
        program = self._programs[agent]
        if state[agent] == len(program):
            return None
        op = program[state[agent]]
        if any(state[other] < place for other, place in op.party):
            return None
        after = list(state)
        after[agent] += 1
        for index, cell in enumerate(op.cells):
            if index:
                self._expect_present(state, cell // len(self._cells), op)
            at = len(self._programs) + cell
            number = self._effect(op, index == 0, state[at])
            if number is None:
                return None
            after[at] = number
        for label, need in self._needs.get((agent, after[agent]), ()):
            if state[need.agent] <= need.place:
                raise ProtocolError(f"{label} may come before {need.label} is over")
        return _Move(tuple(after), op.label)

    def _effect(self, op: Op, own: bool, number: int) -> int | None:
        key = (op, own, number)
        if key not in self._effects:
            stage = self._rules.apply(op, own, self._stages[number])
            self._effects[key] = None if stage is None else self._number(stage)
        return self._effects[key]

    def _landed(self, number: int) -> list[tuple[int, bool, str]]:
        """What a stage becomes as each of the copies that fly towards it lands, and whether that one arrives."""
        if number not in self._landings:
            stage = self._stages[number]
            self._landings[number] = [
                (self._number(self._rules.land(copy, stage)), copy.arrivals > 0, f"{copy.label} lands")
                for copy in dict.fromkeys(stage.flying)
            ]
        return self._landings[number]

    def _number(self, stage: Stage) -> int:
        if stage not in self._numbers:
            self._numbers[stage] = len(self._stages)
            self._stages.append(stage)
        return self._numbers[stage]

    # Agents as a whole.

    def _expect_present(self, state: _State, cta: int, op: Op) -> None:
        roles = len(self._protocol.roles)
        agents = range(cta * roles, (cta + 1) * roles)
        if all(state[agent] == len(self._programs[agent]) for agent in agents):
            raise ProtocolError(f"{op.label} reaches another CTA, which has left")

    def _deadlock(self, state: _State) -> str:
        lines = ["deadlock"]
        for at, program in zip(state, self._programs):
            if at < len(program):
                op = program[at]
                lacks = "the others"
                if op.cells:
                    lacks = self._rules.lacking(op, self._stages[state[len(self._programs) + op.cells[0]]])
                lines.append(f"  {op.label} waits for {lacks}")
        return "\n".join(lines)


def _way(came_from: dict[_State, tuple[_State, str] | None], state: _State) -> str:
    """The last steps before a state, oldest first."""
    labels: list[str] = []
    step = came_from[state]
    while step is not None:
        labels.append(step[1])
        step = came_from[step[0]]
    shown = labels[:_SHOWN_STEPS][::-1]
    return "\n".join(f"  {label}" for label in (["..."] if len(labels) > len(shown) else []) + shown)
