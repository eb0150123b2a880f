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

Statistics lie in shared memory beside the rings, without barriers: the steps around their uses must keep them apart.

    WRITE     a new version of a statistic, from the one before
    READ      the version of a block: the latest that was written at it or before it

The kernel doesn't announce these two, nor the meetings of one warpgroup: a table has them on request (`statistics`),
for the checkers. `in_parts` makes roles of a warpgroup's warps, which drift apart between its meetings.

In a cluster each CTA has its own barriers. A multicast ring is copied by all CTAs together: a COPY lands in every one,
so a RELEASE arrives in every one. `interleavings.check` walks all orders in which the steps can happen;
`order.check_order` proves the same of tables that have too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    WRITE = "write"
    READ = "read"


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
class Statistic:
    """Numbers of a CTA in shared memory; `ring`: each stage of that ring has its own. `alike`: all who write a version
    write the same into one place, so whoever reads it needs its own role's write alone.
    """

    name: str
    ring: str = ""
    alike: bool = False


@dataclass(frozen=True)
class Meeting:
    """Roles that wait for each other: of their CTA (a named barrier), or of all CTAs of the cluster.

    A meeting of one role is that of its warps.
    """

    name: str
    roles: tuple[str, ...]
    across_cluster: bool = False


@dataclass(frozen=True)
class Step:
    """One action on a ring or a statistic, or at a meeting.

    arrivals   how many it makes on each barrier that it arrives on
    warps      so many of the role's first warps do it, the others not (0: all do)
    clearing   only at an item's last block, where that has keys past the end
    """

    action: Action
    ring: str
    block: int = 0
    arrivals: int = 0
    warps: int = 0
    clearing: bool = False

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

    @property
    def whole(self) -> str:
        """The role that this one is a part of (`in_parts`), or its own name."""
        return self.name.partition(".")[0]

    def trips(self, blocks: int) -> range:
        """Blocks at which a trip starts, those before the first or past the end included where steps reach in."""
        reach = [step.block for step in self.trip]
        ahead, back = max((0, *reach)), -min((0, *reach))
        return range(self.first - -(-ahead // self.stride) * self.stride, blocks + back, self.stride)

    def steps(self, blocks: int) -> Iterator[tuple[Step, int]]:
        """Steps of an item, each with its block (-1 for those that stand once an item)."""
        yield from ((step, -1) for step in self.before)
        yield from self.steps_of_trips(blocks)
        yield from ((step, -1) for step in self.after)

    def steps_of_trips(self, blocks: int, clearing: bool = True) -> Iterator[tuple[Step, int]]:
        """Those between, each with its block. `clearing`: whether the last block has keys past the end."""
        for j in self.trips(blocks):
            for step in self.trip:
                block = j + step.block
                if 0 <= block < blocks and (not step.clearing or (clearing and block == blocks - 1)):
                    yield step, block


@dataclass(frozen=True)
class Protocol:
    """Rings and roles of one CTA; `cluster` CTAs run it side by side on the same blocks.

    Roles take the CTA's warps in the table's order.
    """

    rings: tuple[Ring, ...]
    roles: tuple[Role, ...]
    meetings: tuple[Meeting, ...] = ()
    cluster: int = 1
    statistics: tuple[Statistic, ...] = ()
    _rings: dict[str, Ring] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rings", {ring.name: ring for ring in self.rings})
        for role in self.roles:
            for step in (*role.before, *role.trip, *role.after, *role.finish):
                known = list(self._rings)
                if step.action is Action.MEET:
                    known = [meeting.name for meeting in self.meetings if role.name in meeting.roles]
                elif step.action in (Action.READ, Action.WRITE):
                    known = [statistic.name for statistic in self.statistics]
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
    statistics: bool = False,
) -> Protocol:
    """One producer and two consumer warpgroups, which score alternate blocks and own half of the output columns each.

    Block j is scored by consumer j % 2: it waits for the running maximum of block j - 1, publishes its P, then
    multiplies both blocks' P into its columns. So one's scores of block j run beside the other's of block j - 1.
    `ahead`: the scores of its next own block (j + 2) are started behind the products of block j, and run while those
    are added up; this wants a stage of keys more (4), or the copies come late.

    keys           latent, rope and sigma of a block; sigma comes by the producer warp's own asynchronous copies
    probabilities  P of a block, its rows' maxima and factors; both consumers read it
    queries        quantised by both consumers, half the rows each; read until the item's last scores

    `statistics`: with these, and with the meetings of each consumer's warps (`in_parts`):

    rows           Q and its factors, limits, places in the output    peak        running maximum
    warp_peak*     each warp's maximum in a tile                      own_peak*   that at the consumer's last tile
    weights*       of old and new sums; 1 / sum at the end            sums*       each warp's
    decay          weights of O, of each stage of P                   addresses   of the output, alike from both
    columns*       a consumer's of a tile's latent, where it clears keys past the end

    Each consumer has its own of those with a star: its number stands behind the name.
    """
    both = 2
    rings = (
        Ring("keys", key_stages, full=1 + 32, empty=both * cluster * _WARPGROUP, multicast=cluster > 1),
        Ring("probabilities", probability_stages, full=_WARPGROUP, empty=both * _WARPGROUP),
        Ring("queries", 1, full=both, empty=both, unit=Unit.ITEM),
    )
    names = ("producer", "consumer0", "consumer1")
    meetings: tuple[Meeting, ...] = (Meeting("consumers", names[1:]),)
    if statistics:
        meetings += tuple(Meeting(name, (name,)) for name in names[1:])
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
    consumers = tuple(_consumer(w, consumer_registers, ahead, goodbye) for w in range(both))
    if not statistics:
        consumers = tuple(_announced(role) for role in consumers)
    return Protocol(rings, (producer, *consumers), meetings, cluster, _STATISTICS if statistics else ())


_STATISTICS = (
    Statistic("rows"),
    Statistic("peak"),
    Statistic("decay", "probabilities"),
    Statistic("addresses", alike=True),
    *(Statistic(f"{name}{w}") for name in ("warp_peak", "own_peak", "weights", "sums") for w in range(2)),
    *(Statistic(f"columns{w}", "keys") for w in range(2)),
)
_ROW_WARPS = 2  # whose threads stand for rows: one warp up to 32 rows, two with 64


def _consumer(which: int, registers: int, ahead: bool, goodbye: tuple[Step, ...]) -> Role:
    """Steps of a trip at its own block j. In a trip each warp arrives for itself, so that none waits for the others;
    on "queries" one thread arrives after the warpgroup has met.
    """
    name = f"consumer{which}"
    at_once = () if ahead else (Step(Action.WAIT, "keys"),)
    started = (Step(Action.WAIT, "keys", 2),) if ahead else ()
    meet = Step(Action.MEET, name)
    both = range(2)

    def write(*names: str, warps: int = _ROW_WARPS) -> tuple[Step, ...]:
        return tuple(Step(Action.WRITE, each, warps=warps) for each in names)

    def read(*names: str, block: int = 0, warps: int = 0) -> tuple[Step, ...]:
        return tuple(Step(Action.READ, each, block, warps=warps) for each in names)

    def cleared(block: int, action: Action = Action.READ) -> Step:
        return Step(action, f"columns{which}", block, clearing=True)

    def clear(block: int) -> tuple[Step, ...]:
        return cleared(block, Action.WRITE), replace(meet, block=block, clearing=True), cleared(block)

    of_both = tuple(f"{each}{w}" for each in ("own_peak", "sums") for w in both)
    first = write("peak", *of_both) if which == 0 else ()
    return Role(
        name,
        _WARPGROUP,
        registers,
        before=(
            Step(Action.ACQUIRE, "queries"),
            *write("rows", warps=0),
            *first,
            meet,
            Step(Action.COMMIT, "queries", arrivals=1, warps=1),
            Step(Action.WAIT, "queries"),
        ),
        trip=(
            *at_once,  # scores of j, unless they are under way
            *read("rows"),
            *write(f"warp_peak{which}", warps=0),
            Step(Action.WAIT, "keys", -1),
            *clear(-1),  # in a last trip without a block of its own
            meet,
            Step(Action.WAIT, "probabilities", -1),  # the running maximum
            Step(Action.ACQUIRE, "probabilities"),
            *read(f"warp_peak{which}", warps=_ROW_WARPS),
            *write(f"own_peak{which}", "peak", f"weights{which}", "decay"),
            *clear(0),
            meet,
            *read(f"weights{which}"),
            *write(f"sums{which}", warps=0),
            Step(Action.COMMIT, "probabilities", arrivals=_WARPGROUP),
            *read("decay", block=-1),
            cleared(-1),
            Step(Action.RELEASE, "probabilities", -1, arrivals=_WARPGROUP),  # products of j - 1
            Step(Action.RELEASE, "keys", -1, arrivals=_WARPGROUP),
            *read("decay"),
            Step(Action.WAIT, "probabilities"),  # products of j
            *started,  # scores of j + 2, behind them
            *read("decay"),
            cleared(0),
            Step(Action.RELEASE, "probabilities", arrivals=_WARPGROUP),
            Step(Action.RELEASE, "keys", arrivals=_WARPGROUP),
        ),
        after=(
            *read("rows"),
            Step(Action.MEET, "consumers"),  # each has its sums where the other reads them
            *read("rows", "peak", *of_both, warps=_ROW_WARPS),
            *write(f"weights{which}", "addresses"),
            meet,
            *read(f"weights{which}", "addresses"),
            meet,
            Step(Action.RELEASE, "queries", arrivals=1, warps=1),
        ),
        finish=goodbye,
        first=which,
        stride=2,
    )


def _announced(role: Role) -> Role:
    """The role as the kernel is held to it and as it is timed: without statistics, and without meetings of its own."""

    def told(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        silent = (Action.READ, Action.WRITE)
        return tuple(step for step in steps if step.action not in silent and step.ring != role.name)

    return replace(role, before=told(role.before), trip=told(role.trip), after=told(role.after))


def in_parts(protocol: Protocol, parts: int) -> Protocol:
    """The protocol with each role that has a meeting of its own cut into so many roles of some of its warps each.

    What one warp says for all after they have met, the others are done with before they meet: they take the step there,
    with no arrivals.
    """
    cut = [meeting.name for meeting in protocol.meetings if len(meeting.roles) == 1]
    names = {role.name: [role.name] for role in protocol.roles}
    names |= {name: [f"{name}.{part}" for part in range(parts)] for name in cut}
    roles: list[Role] = []
    for role in protocol.roles:
        if role.name not in cut:
            roles.append(role)
            continue
        if role.warps % parts:
            raise ValueError(f"{role.name}: expected a number of parts that divides {role.warps} warps; got {parts}")
        for part, name in enumerate(names[role.name]):
            roles.append(_part(role, name, part * role.warps // parts, parts))
    meetings = tuple(
        replace(meeting, roles=tuple(name for role in meeting.roles for name in names[role]))
        for meeting in protocol.meetings
    )
    return replace(protocol, roles=tuple(roles), meetings=meetings)


def _part(role: Role, name: str, first_warp: int, parts: int) -> Role:
    def of_part(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return _of_part(steps, role.name, first_warp, parts)

    return replace(
        role,
        name=name,
        warps=role.warps // parts,
        before=of_part(role.before),
        trip=of_part(role.trip),
        after=of_part(role.after),
        finish=of_part(role.finish),
    )


def _of_part(steps: tuple[Step, ...], role: str, first_warp: int, parts: int) -> tuple[Step, ...]:
    kept: list[Step] = []
    for step in steps:
        if step.warps == 0:
            if step.arrivals % parts:
                raise ValueError(f"{role}: {step}: expected arrivals of each of {parts} parts; got {step.arrivals}")
            kept.append(replace(step, arrivals=step.arrivals // parts))
        elif first_warp < step.warps:
            kept.append(step)
        elif step.action in (Action.COMMIT, Action.RELEASE):
            met = [at for at, other in enumerate(kept) if (other.action, other.ring) == (Action.MEET, role)]
            kept.insert(met[-1] if met else len(kept), replace(step, arrivals=0))
    return tuple(kept)
