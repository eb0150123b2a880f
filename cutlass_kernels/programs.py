"""Programs of a protocol's agents: each role's steps for given items, written out, with their numbers filled in.

An agent is a role of one CTA, or with `protocol.in_parts` some of its warps. A statistic's uses lie between an agent's
steps: it may still be at one as long as it hasn't taken the step behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pagedmla.cutlass_kernels.protocol import Action, Protocol, Step, Unit
from pagedmla.cutlass_kernels.stage_rules import Op, ProtocolError


class Use(NamedTuple):
    """Of a statistic: by an agent between its op `place - 1` and its op `place`."""

    agent: int
    place: int
    version: tuple[int, int]  # item and block; -1: before the trips; that behind the last: after them
    writes: bool
    whole: str  # the role that the agent is, or is a part of
    label: str


class Need(NamedTuple):
    """An earlier use that must be over."""

    agent: int
    place: int
    label: str


class Programs:
    """Programs of all agents, CTA by CTA; `needs`: what must be over where an agent comes to a place."""

    def __init__(self, protocol: Protocol, items: Sequence[int], clearing: bool) -> None:
        self.protocol = protocol
        self.cells = [(ring, stage) for ring in protocol.rings for stage in range(ring.stages)]  # of one CTA
        self._clearing = clearing
        self._uses: dict[tuple[int, str, int], list[Use]] = defaultdict(list)
        roles = len(protocol.roles)
        self.of_agents = self._with_parties(
            [self._program(cta, role, items) for cta in range(protocol.cluster) for role in range(roles)]
        )
        self.needs: dict[tuple[int, int], list[tuple[str, Need]]] = defaultdict(list)
        for statistic, uses in self._uses.items():
            alike = next(each.alike for each in protocol.statistics if each.name == statistic[1])
            for use, need in _needs(uses, alike):
                if need.agent != use.agent:  # its own uses come in the order of its program
                    self.needs[use.agent, use.place].append((use.label, need))

    def _program(self, cta: int, role: int, items: Sequence[int]) -> list[Op]:
        ops: list[Op] = []
        blocks_before = 0
        its = self.protocol.roles[role]
        for item, blocks in enumerate(items):
            for steps, name in (
                (((step, -1) for step in its.before), f"item {item}"),
                (its.steps_of_trips(blocks, self._clearing), f"item {item}, block "),
                (((step, blocks) for step in its.after), f"item {item}"),
            ):
                for step, block in steps:
                    where = f"{name}{block}" if name.endswith(" ") else name
                    self._add(ops, cta, role, step, (item, block), blocks_before + block, where)
            blocks_before += blocks
        for step in its.finish:
            self._add(ops, cta, role, step, (len(items), 0), -1, "at the end")
        return ops

    def _add(
        self, ops: list[Op], cta: int, role: int, step: Step, version: tuple[int, int], fill: int, where: str
    ) -> None:
        """A step with its numbers filled in. `fill`: of rings that are filled once a block."""
        its = self.protocol.roles[role]
        if step.action is Action.MEET:
            ops.append(Op(step.action, role, f"{its.name}: arrives at {step.ring} ({where})"))
            ops.append(Op(step.action, role, f"{its.name}: {step} ({where})", meeting=step.ring))
            return
        if step.action in (Action.READ, Action.WRITE):
            statistic = next(each for each in self.protocol.statistics if each.name == step.ring)
            stage = self.protocol.ring(statistic.ring).stage(fill) if statistic.ring else 0
            agent = cta * len(self.protocol.roles) + role
            label = f"{its.name}: {step} ({where})"
            self._uses[cta, step.ring, stage].append(
                Use(agent, len(ops), version, step.action is Action.WRITE, its.whole, label)
            )
            return
        ring = self.protocol.ring(step.ring)
        if ring.unit is Unit.ITEM:
            fill = version[0]
        ctas = [cta]
        if ring.multicast and step.action in (Action.COPY, Action.RELEASE):
            ctas += [other for other in range(self.protocol.cluster) if other != cta]
        inside = self.cells.index((ring, ring.stage(fill)))
        ops.append(
            Op(
                step.action,
                role,
                f"{its.name}: {step} ({where}, stage {ring.stage(fill)})",
                self.protocol.rings.index(ring),
                fill,
                ring.acquire_parity(fill) if step.action is Action.ACQUIRE else ring.wait_parity(fill),
                step.arrivals,
                tuple(each * len(self.cells) + inside for each in ctas),
            )
        )

    def _with_parties(self, programs: list[list[Op]]) -> list[list[Op]]:
        """Each MEET told who else takes part: an agent's n-th at a meeting is the others' n-th there."""
        roles = [role.name for role in self.protocol.roles]
        for meeting in self.protocol.meetings:
            for cta in range(self.protocol.cluster):
                ctas = range(self.protocol.cluster) if meeting.across_cluster else (cta,)
                agents = [each * len(roles) + roles.index(role) for each in ctas for role in meeting.roles]
                at = {a: [i for i, op in enumerate(programs[a]) if op.meeting == meeting.name] for a in agents}
                for agent in agents:
                    for n, place in enumerate(at[agent]):
                        # One that another never comes to is waited for beyond that agent's end.
                        party = [(a, at[a][n] if n < len(at[a]) else len(programs[a]) + 1) for a in agents]
                        programs[agent][place] = replace(programs[agent][place], party=tuple(party))
        return programs


def _needs(uses: Sequence[Use], alike: bool) -> Iterator[tuple[Use, Need]]:
    """Each use of a statistic with each that must be over before: a read needs the writes of its version, a write all
    uses of the version before.
    """
    written = sorted({use.version for use in uses if use.writes})
    of_version: dict[tuple[int, int], list[Use]] = defaultdict(list)
    for use in uses:
        seen = [version for version in written if version <= use.version]
        if not seen:
            raise ProtocolError(f"{use.label} finds what nobody has written")
        of_version[seen[-1]].append(use)
    for before, version in zip([None, *written], written, strict=False):
        writes = [use for use in of_version[version] if use.writes]
        for use in of_version[version]:
            earlier = writes if not use.writes else of_version[before] if before else []
            if alike and not use.writes:
                earlier = [write for write in writes if write.whole == use.whole]
            if not use.writes and not earlier:
                raise ProtocolError(f"{use.label} finds what its role hasn't written")
            for other in earlier:
                if other.agent == use.agent and uses.index(other) > uses.index(use):
                    raise ProtocolError(f"{use.label} comes before {other.label}")
                yield use, Need(other.agent, other.place, other.label)
