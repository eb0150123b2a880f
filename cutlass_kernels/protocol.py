"""Who waits where: the decode kernel's barriers as a table.

The kernel initialises its barriers from it, and is held to its steps while it is traced.

ring      buffers (`stages`) in shared memory, used in turn. Each stage has a full barrier, on which writers arrive,
          and an empty barrier, on which readers arrive. Fill f of a ring lies in stage f % stages.
role      warps that do the same steps. For each work item: `before`, a trip for every `stride`-th block, `after`;
          once, behind the last item: `finish`.
step      an action on the fill of a block: a trip at block j names block j, j - 1 by `block=-1`, j + 2 by `block=2`.
          Where an item has no such block the step is left out; so a trip at j = blocks, if a role has one, only looks
          back, and one before the role's first block only looks ahead.
parity    mbarriers tell phases apart by one bit: a wait for parity p passes once the current phase has the other one.

Actions, in the order that a fill lives through:

    ACQUIRE   wait until the stage is empty                       RELEASE   arrive on empty: the stage was read
    ARM       arrive on full and announce the bytes of the copies WAIT      wait until the stage is full
    COPY      start tensor copies; their bytes count when they land
    FETCH     start a thread's own asynchronous copies; they arrive on full when they land
    COMMIT    arrive on full: what the threads wrote is there
    MEET      wait until all roles of a meeting have come this far

In a cluster each CTA has its own barriers. A multicast ring is copied by all CTAs together: a COPY lands in every one,
so a RELEASE arrives in every one. `interleavings.check` walks all orders in which the steps can happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagedmla.cutlass_kernels.tiles import PROBABILITY_STAGES

REGISTERS_PER_SM = 65536
BARRIER_BYTES = 8
_WARPGROUP = 4  # warps


class Action(Enum):
    ACQUIRE = "acquire"
    ARM = "arm"
    COPY = "copy"
    FETCH = "fetch"
    COMMIT = "commit"
    WAIT = "wait"
    RELEASE = "release"
    MEET = "meet"


class Unit(Enum):
    """How often a ring is filled."""

    BLOCK = "block"
    ITEM = "item"


@dataclass(frozen=True)
class Ring:
    """Buffers used in turn. `full` and `empty` are what their barriers are initialised with."""

    name: str
    stages: int
    full: int  # arrivals that fill a stage, transactions aside
    empty: int  # arrivals that empty one, those of other CTAs included
    unit: Unit = Unit.BLOCK
    multicast: bool = False
    first_wait: int = 0  # parity for which a reader of fill 0 waits
    first_acquire: int = 1  # that for which its writer waits: passes on a fresh barrier

    def __post_init__(self) -> None:
        if self.stages < 1 or self.full < 1 or self.empty < 1:
            raise ValueError(
                f"ring {self.name}: expected at least 1 stage, 1 arrival on full and 1 on empty; "
                f"got {self.stages}, {self.full} and {self.empty}"
            )

    # `fill` may be an int, an array or a value of the kernel's language.

    def stage(self, fill: Any) -> Any:
        return fill % self.stages

    def wait_parity(self, fill: Any) -> Any:
        return ((fill // self.stages) ^ self.first_wait) & 1

    def acquire_parity(self, fill: Any) -> Any:
        return ((fill // self.stages) ^ self.first_acquire) & 1


@dataclass(frozen=True)
class Meeting:
    """Roles that wait for each other: of their CTA (a named barrier), or of all CTAs of the cluster."""

    name: str
    roles: tuple[str, ...]
    across_cluster: bool = False


@dataclass(frozen=True)
class Step:
    """One action on a ring, or at a meeting. `arrivals`: how many it makes on each barrier that it arrives on."""

    action: Action
    ring: str
    block: int = 0
    arrivals: int = 0

    def __str__(self) -> str:
        return f"{self.action.value} {self.ring}"


@dataclass(frozen=True)
class Role:
    """Warps that do the same steps. `registers` is what a thread holds after setmaxnreg."""

    name: str
    warps: int
    registers: int
    trip: tuple[Step, ...]
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    finish: tuple[Step, ...] = ()  # once, after the last item
    first: int = 0
    stride: int = 1

    def trips(self, blocks: int) -> range:
        """Blocks at which a trip starts, those before the first or past the end included where steps reach in."""
        reach = [step.block for step in self.trip]
        ahead, back = max((0, *reach)), -min((0, *reach))
        return range(self.first - -(-ahead // self.stride) * self.stride, blocks + back, self.stride)

    def steps(self, blocks: int) -> Iterator[tuple[Step, int]]:
        """Steps of an item, each with its block (-1 for those that stand once an item)."""
        yield from ((step, -1) for step in self.before)
        for j in self.trips(blocks):
            yield from ((step, j + step.block) for step in self.trip if 0 <= j + step.block < blocks)
        yield from ((step, -1) for step in self.after)


@dataclass(frozen=True)
class Protocol:
    """Rings and roles of one CTA; `cluster` CTAs run it side by side on the same blocks.

    Roles take the CTA's warps in the table's order.
    """

    rings: tuple[Ring, ...]
    roles: tuple[Role, ...]
    meetings: tuple[Meeting, ...] = ()
    cluster: int = 1
    _rings: dict[str, Ring] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rings", {ring.name: ring for ring in self.rings})
        for role in self.roles:
            for step in (*role.before, *role.trip, *role.after, *role.finish):
                meets = step.action is Action.MEET
                meetings = [meeting.name for meeting in self.meetings if role.name in meeting.roles]
                known = meetings if meets else list(self._rings)
                if step.ring not in known:
                    raise ValueError(f"{role.name}: {step}: expected one of {', '.join(known)}; got {step.ring}")
            if role.warps % _WARPGROUP == 0 and role.registers % 8:
                raise ValueError(f"{role.name}: setmaxnreg takes multiples of 8; got {role.registers}")
        # Growing warps wait for registers that others gave back; what the launch rounded away never comes.
        registers = sum(32 * role.warps * role.registers for role in self.roles)
        launched = self.threads * self.launch_registers
        if registers > launched:
            raise ValueError(f"roles hold {registers} registers; the CTA is launched with {launched}")

    @property
    def launch_registers(self) -> int:
        """Of each thread, before roles give some back and take others."""
        return REGISTERS_PER_SM // self.threads // 8 * 8

    @property
    def threads(self) -> int:
        return 32 * sum(role.warps for role in self.roles)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of all barriers."""
        return 2 * BARRIER_BYTES * sum(ring.stages for ring in self.rings)

    def ring(self, name: str) -> Ring:
        return self._rings[name]

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def full_offset(self, ring: str, stage: Any) -> Any:
        """Byte of a full barrier; per ring all full ones stand first, then all empty ones."""
        names = [each.name for each in self.rings]
        before = sum(2 * each.stages for each in self.rings[: names.index(ring)])
        return BARRIER_BYTES * (before + stage)

    def empty_offset(self, ring: str, stage: Any) -> Any:
        return self.full_offset(ring, stage) + BARRIER_BYTES * self._rings[ring].stages

    def following(self, role: str, section: str, blocks: tuple[int, ...] | None = None) -> Following:
        """Hold the code of a section ("before", "trip", "after", "finish") to the table.

        `blocks` are the relative blocks that this copy of the trip has (None: all): (2,) before the first, (-1,) past
        the end.
        """
        steps: tuple[Step, ...] = getattr(self.role(role), section)
        if section == "trip" and blocks is not None:
            steps = tuple(step for step in steps if step.block in blocks)
        return Following(f"{role}, {section}", steps)


class Following:
    """A section of a role's steps, compared one by one with those that code emits."""

    def __init__(self, name: str, steps: tuple[Step, ...]) -> None:
        self._name, self._steps, self._position = name, steps, 0

    def step(self, action: Action, ring: str, block: int = 0) -> None:
        """The code's next step. RuntimeError where the table has another."""
        left = self._steps[self._position :]
        if not left or (left[0].action, left[0].ring, left[0].block) != (action, ring, block):
            wanted = f"{left[0]} of block {left[0].block:+d}" if left else "no more steps"
            raise RuntimeError(
                f"{self._name}, step {self._position}: the table has {wanted}; "
                f"the kernel does {action.value} {ring} of block {block:+d}"
            )
        self._position += 1

    def end(self) -> None:
        """RuntimeError for a step that the code has left out."""
        if self._position < len(self._steps):
            raise RuntimeError(
                f"{self._name}: the kernel leaves out step {self._position}, {self._steps[self._position]}"
            )


def decode_protocol(
    key_stages: int,
    *,
    probability_stages: int = PROBABILITY_STAGES,
    ahead: bool = False,
    cluster: int = 1,
    producer_warps: int = 4,
    producer_registers: int = 24,
    consumer_registers: int = 240,
) -> Protocol:
    """One producer and two consumer warpgroups, which score alternate blocks and own half of the output columns each.

    Block j is scored by consumer j % 2: it waits for the running maximum of block j - 1, publishes its P, then
    multiplies both blocks' P into its columns. So one's scores of block j run beside the other's of block j - 1.
    `ahead`: the scores of its next own block (j + 2) are started behind the products of block j, and run while those
    are added up; this wants a stage of keys more (4), or the copies come late.

    keys           latent, rope and sigma of a block; sigma comes by the producer warp's own asynchronous copies
    probabilities  P of a block, its rows' maxima and factors; both consumers read it
    queries        quantised by both consumers, half the rows each; read until the item's last scores
    """
    both = 2
    rings = (
        Ring("keys", key_stages, full=1 + 32, empty=both * cluster * _WARPGROUP, multicast=cluster > 1),
        Ring("probabilities", probability_stages, full=_WARPGROUP, empty=both * _WARPGROUP),
        Ring("queries", 1, full=both, empty=both, unit=Unit.ITEM),
    )
    names = ("producer", "consumer0", "consumer1")
    meetings: tuple[Meeting, ...] = (Meeting("consumers", names[1:]),)
    goodbye: tuple[Step, ...] = ()
    if cluster > 1:  # nobody may arrive at a CTA that has left
        meetings += (Meeting("cluster", names, across_cluster=True),)
        goodbye = (Step(Action.MEET, "cluster"),)
    producer = Role(
        names[0],
        producer_warps,
        producer_registers,
        trip=(
            Step(Action.ACQUIRE, "keys"),
            Step(Action.ARM, "keys", arrivals=1),
            Step(Action.COPY, "keys"),
            Step(Action.FETCH, "keys", arrivals=32),
        ),
        finish=goodbye,
    )
    return Protocol(
        rings,
        (producer, *(_consumer(w, consumer_registers, ahead, goodbye) for w in range(both))),
        meetings,
        cluster,
    )


def _consumer(which: int, registers: int, ahead: bool, goodbye: tuple[Step, ...]) -> Role:
    """Steps of a trip at its own block j. In a trip each warp arrives for itself, so that none waits for the others;
    on "queries" one thread arrives after the warpgroup has met.
    """
    at_once = () if ahead else (Step(Action.WAIT, "keys"),)
    started = (Step(Action.WAIT, "keys", 2),) if ahead else ()
    return Role(
        f"consumer{which}",
        _WARPGROUP,
        registers,
        before=(
            Step(Action.ACQUIRE, "queries"),
            Step(Action.COMMIT, "queries", arrivals=1),
            Step(Action.WAIT, "queries"),
        ),
        trip=(
            *at_once,  # scores of j, unless they are under way
            Step(Action.WAIT, "keys", -1),
            Step(Action.WAIT, "probabilities", -1),  # the running maximum
            Step(Action.ACQUIRE, "probabilities"),
            Step(Action.COMMIT, "probabilities", arrivals=_WARPGROUP),
            Step(Action.RELEASE, "probabilities", -1, arrivals=_WARPGROUP),  # products of j - 1
            Step(Action.RELEASE, "keys", -1, arrivals=_WARPGROUP),
            Step(Action.WAIT, "probabilities"),  # products of j
            *started,  # scores of j + 2, behind them
            Step(Action.RELEASE, "probabilities", arrivals=_WARPGROUP),
            Step(Action.RELEASE, "keys", arrivals=_WARPGROUP),
        ),
        after=(
            Step(Action.MEET, "consumers"),  # each has its sums where the other reads them
            Step(Action.RELEASE, "queries", arrivals=1),
        ),
        finish=goodbye,
        first=which,
        stride=2,
    )
