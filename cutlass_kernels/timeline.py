"""The decode kernel's pipeline played through in time: its protocol's roles, step by step, and what they do in between.

A model of our own schedule, by counts and latencies; nothing that was generated is read or executed. It answers what
sums of work can't: who waits for whom, and how long a tile takes where no resource is full.

    role        its steps in the table's order; in a consumer's trip the work between them that a script names
                (phases.py). The four warps of a warpgroup do the same at the same time, each on a scheduler that it
                shares with a warp of each other consumer
    tensor      WGMMAs in order for each warpgroup, taking turns between warpgroups; each occupies the tensor cores, and
                shared memory's port for its operands, and its result is there a latency later
    memory      tensor copies at the SM's share of the bandwidth, in bursts where it asked for less before; they land
                box by box through shared memory's port
    cluster     each CTA's own; copies land in all, releases arrive in all

Scripts are held to the table, so that this follows the kernel's order or says that it doesn't.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pagedmla.cutlass_kernels.phases import SHARED_BYTES_A_CYCLE, Kind, Op, Phase, Script, trip
from pagedmla.cutlass_kernels.protocol import Action, Protocol, Ring, Role, Step, Unit
from pagedmla.cutlass_kernels.tiles import KEYS, LATENT_PANELS
from pagedmla.cutlass_kernels.variants import Variant


@dataclass(frozen=True)
class Timings:
    """Cycles. `chain`, `wide` and `product` are fitted to an H200's rows (docs/kernels/decode_sm90.md).

    The others are published, or assumed where marked so. Twice or half of an assumed one moves no form by more than
    3 %, of a published one by 10 %.
    """

    chain: float = 3.8  # an instruction of a lone warp that needs the one before
    wide: float = 2.85  # one that doesn't
    product: float = 58.0  # from a WGMMA's last cycle in the tensor cores to its result
    exponential: float = 8.0  # 16 results a cycle and SM
    convert: float = 2.0  # 64 results a cycle and SM
    read: float = 30.0  # a round trip to shared memory
    exchange: float = 25.0  # a shuffle
    matrix_load: float = 33.0
    copy: float = 700.0  # from a tensor copy's start to its landing, in an idle memory
    meet: float = 30.0  # assumed: a named barrier
    wake: float = 40.0  # assumed: from the last arrival to the waiting warp's next instruction
    fence: float = 50.0  # assumed: between stores and asynchronous readers
    remote: float = 200.0  # an arrival in the other CTA


H200_TIMINGS = Timings()

MOST_BYTES_A_CYCLE = 64  # that an SM takes from L2
_SAVED_TILES = 2  # of the share of the bandwidth that an SM didn't use, what it may use later
_MATRIX_LOAD_CYCLES = 4 * 512 / SHARED_BYTES_A_CYCLE  # of the port, for a warpgroup
_BOXES = LATENT_PANELS + 1
_PRODUCER_INSTRUCTIONS = 48  # of what the compile table counts for a consumer warp's trip, about: today's have 38 to 67
_STEADY_BLOCKS = 64  # of a run; the first and the last of them are left out of the pace
_LEFT_OUT = 12


@dataclass(frozen=True)
class Span:
    """`what`: a phase, or the step that was waited for."""

    cta: int
    role: str
    what: str
    block: int
    begin: float
    end: float


@dataclass(frozen=True)
class Pace:
    """Cycles of an item: `fill` once, `tile` for each tile."""

    tile: float
    fill: float


@dataclass(frozen=True)
class Trace:
    """What happened. `tensor`, `shared` and `memory`: shares of the time for which CTA 0's were busy."""

    cycles: float
    committed: tuple[float, ...]  # when P of each block was there, in CTA 0
    spans: tuple[Span, ...]
    tensor: float
    shared: float
    memory: float

    @property
    def cycles_a_block(self) -> float:
        """In the steady part; RuntimeError where there is none."""
        first, last = _LEFT_OUT, len(self.committed) - 1
        last -= (last - first) % 4  # whole trips of two or of four consumers
        if last <= first:
            raise RuntimeError(f"trace: expected more than {_LEFT_OUT + 4} blocks; got {len(self.committed)}")
        return (self.committed[last] - self.committed[first]) / (last - first)

    @property
    def pace(self) -> Pace:
        tile = self.cycles_a_block
        return Pace(tile, max(0.0, self.cycles - len(self.committed) * tile))

    def time_of(self, role: str, cta: int = 0) -> dict[str, float]:
        """Share of the time that a role spends in each phase and in each wait."""
        found: dict[str, float] = {}
        for span in self.spans:
            if (span.role, span.cta) == (role, cta):
                found[span.what] = found.get(span.what, 0.0) + (span.end - span.begin) / self.cycles
        return found


@dataclass(frozen=True)
class Work:
    """What a role does in a trip, and how many instructions of one warp that took when it was compiled."""

    script: Script
    instructions: float

    @property
    def uncounted(self) -> float:
        """Instructions that no phase accounts for, at each of the script's steps."""
        steps = sum(isinstance(each, Step) for each in self.script)
        counted = sum(each.instructions for each in self.script if isinstance(each, Phase))
        return max(0.0, self.instructions - counted) / steps


def simulate(
    protocol: Protocol,
    work: Mapping[str, Work],
    blocks: int,
    *,
    tile_bytes: int,
    bytes_a_cycle: float,
    timings: Timings = H200_TIMINGS,
) -> Trace:
    """An item of so many blocks.

    work            of roles by their names; the others do nothing beside their steps
    tile_bytes      that are copied for a block
    bytes_a_cycle   an SM's share of the memory's bandwidth

    ValueError for a script that isn't the table's; RuntimeError for a protocol that comes to a stop, with what each
    role waits for.
    """
    if blocks < 1 or bytes_a_cycle <= 0:
        raise ValueError(f"simulate: expected at least 1 block and bytes_a_cycle > 0; got {blocks} and {bytes_a_cycle}")
    return _Simulation(protocol, work, blocks, tile_bytes, bytes_a_cycle, timings).run()


def trace_of(variant: Variant, bytes_a_cycle: float, instructions: float, timings: Timings = H200_TIMINGS) -> Trace:
    """An item of a variant. `instructions`: of a consumer warp's usual trip, by the compile table."""
    consumer = Work(trip(variant.shape), instructions - _PRODUCER_INSTRUCTIONS)
    return simulate(
        variant.protocol,
        {role.name: consumer for role in variant.protocol.roles if role.stride > 1},
        _STEADY_BLOCKS,
        tile_bytes=variant.shape.stage_bytes + 4 * KEYS,
        bytes_a_cycle=bytes_a_cycle,
        timings=timings,
    )


@lru_cache(maxsize=256)
def pace_of(variant: Variant, bytes_a_cycle: float, instructions: float, timings: Timings = H200_TIMINGS) -> Pace:
    return trace_of(variant, bytes_a_cycle, instructions, timings).pace


# -- what a role does, in order --------------------------------------------------------------------------------------


def programme(role: Role, blocks: int, script: Script | None = None) -> Iterator[tuple[Step | Phase, int]]:
    """A role's steps and phases in order, each with its block (-1 for those that stand once an item)."""
    held = _held_to(role, script)
    yield from ((step, -1) for step in role.before)
    for j in role.trips(blocks):
        for each in held:
            if 0 <= j + each.block < blocks:
                yield each, j + each.block
    yield from ((step, -1) for step in role.after)


def _held_to(role: Role, script: Script | None) -> Script:
    """The script with the table's own steps."""
    if script is None:
        return role.trip
    table = iter(role.trip)
    held: list[Step | Phase] = []
    for each in script:
        if isinstance(each, Step):
            step = next(table, None)
            if step is None or (step.action, step.ring, step.block) != (each.action, each.ring, each.block):
                wanted = f"{step} of block {step.block:+d}" if step else "no more steps"
                raise ValueError(
                    f"{role.name}: expected {wanted}, by the table; the script has {each} of block {each.block:+d}"
                )
            held.append(step)
        else:
            held.append(each)
    if (step := next(table, None)) is not None:
        raise ValueError(f"{role.name}: expected {step} of block {step.block:+d}, by the table; the script ends before")
    return held


def _is_scored(step: Step) -> bool:
    return step.action is Action.COMMIT and step.ring == "probabilities"


# -- the machine -----------------------------------------------------------------------------------------------------


class _Clock:
    """Calls at their times, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        self._asked += 1
        heapq.heappush(self._calls, (time, self._asked, call))

    def run(self) -> None:
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()


class _Gate:
    """Opens once, when so many arrivals have come."""

    def __init__(self, arrivals: int) -> None:
        self._missing = arrivals
        self._waiting: list[Callable[[], None]] = []

    @property
    def open(self) -> bool:
        return self._missing <= 0

    def arrive(self, arrivals: int = 1) -> None:
        self._missing -= arrivals
        if self.open:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def wait(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)


class _Server:
    """Serves one after the other."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def serve(self, begin: float, cycles: float) -> float:
        """From `begin` on, or later; returns the end."""
        self.free = max(begin, self.free) + cycles
        self.busy += cycles
        return self.free


@dataclass
class _Cta:
    tensor: _Server = field(default_factory=_Server)
    port: _Server = field(default_factory=_Server)
    memory: _Server = field(default_factory=_Server)
    link: _Server = field(default_factory=_Server)


class _Products:
    """A warpgroup's WGMMAs, in order. The next one asks for the tensor cores when the one before has left them."""

    def __init__(self, clock: _Clock, cta: _Cta, timings: Timings) -> None:
        self._clock, self._cta, self._timings = clock, cta, timings
        self._queue: list[tuple[Op, _Gate]] = []
        self._groups: dict[str, _Gate] = {}
        self._left = 0

    def start(self, op: Op) -> None:
        gate = _Gate(1)
        self._groups[op.group] = self._groups[""] = gate
        self._queue.append((op, gate))
        if len(self._queue) == 1:
            self._begin()

    def latest(self, group: str) -> _Gate | None:
        """Of the groups of that name, or with "" of all."""
        return self._groups.get(group)

    def _begin(self) -> None:
        self._left = int(self._queue[0][0].count)
        self._next()

    def _next(self) -> None:
        op, gate = self._queue[0]
        if self._left:
            self._left -= 1
            begin = max(self._clock.now, self._cta.tensor.free, self._cta.port.free)
            self._cta.port.serve(begin, op.shared)
            self._clock.at(self._cta.tensor.serve(begin, max(op.tensor, op.shared)), self._next)
            return
        self._clock.at(self._clock.now + self._timings.product, gate.arrive)
        self._queue.pop(0)
        if self._queue:
            self._begin()


_Wait = Generator["float | _Gate", None, None]  # cycles to pass, or a gate to wait at


class _Simulation:
    def __init__(
        self,
        protocol: Protocol,
        work: Mapping[str, Work],
        blocks: int,
        tile_bytes: int,
        bytes_a_cycle: float,
        timings: Timings,
    ) -> None:
        self._protocol, self._works, self._blocks, self._timings = protocol, work, blocks, timings
        self._copied = tile_bytes / protocol.cluster  # bytes that a CTA copies of a tile
        self._bytes_a_cycle = bytes_a_cycle
        self._clock = _Clock()
        self._ctas = [_Cta() for _ in range(protocol.cluster)]
        self._gates: dict[tuple[str, int, str, int], _Gate] = {}
        self._met: dict[tuple[str, int], int] = {}
        self._spans: list[Span] = []
        self._committed: dict[int, float] = {}
        self._waiting: dict[tuple[int, str], str] = {}

    def run(self) -> Trace:
        for cta in range(len(self._ctas)):
            for role in self._protocol.roles:
                self._start((cta, role.name), self._role(cta, role))
        self._clock.run()
        if self._waiting:
            lines = (f"  {role} of CTA {cta}: {step}" for (cta, role), step in self._waiting.items())
            raise RuntimeError("timeline: the protocol comes to a stop\n" + "\n".join(lines))
        cycles, first = self._clock.now, self._ctas[0]
        committed = tuple(self._committed[block] for block in sorted(self._committed))
        busy = (server.busy / cycles for server in (first.tensor, first.port, first.memory))
        return Trace(cycles, committed, tuple(self._spans), *busy)

    def _start(self, who: tuple[int, str], process: _Wait) -> None:
        self._waiting[who] = "its start"

        def go_on() -> None:
            try:
                waits = next(process)
            except StopIteration:
                del self._waiting[who]
                return
            if isinstance(waits, _Gate):
                waits.wait(lambda: self._clock.at(self._clock.now, go_on))
            else:
                self._clock.at(self._clock.now + waits, go_on)

        self._clock.at(0.0, go_on)

    # What roles do.

    def _role(self, cta: int, role: Role) -> _Wait:
        products = _Products(self._clock, self._ctas[cta], self._timings)
        work = self._works.get(role.name)
        between = work.uncounted * self._pace(self._timings.chain) if work else self._timings.chain
        for what, block in programme(role, self._blocks, work.script if work else None):
            begin = self._clock.now
            if isinstance(what, Phase):
                yield from self._work(self._ctas[cta], products, what.ops)
                self._note(cta, role, what.name, block, begin)
                continue
            yield between if block >= 0 else self._timings.chain
            self._waiting[cta, role.name] = f"{what} of block {block}"
            begin = self._clock.now
            yield from self._step(cta, role, what, block)
            if self._clock.now > begin:
                self._note(cta, role, str(what), block, begin)

    def _note(self, cta: int, role: Role, what: str, block: int, begin: float) -> None:
        self._spans.append(Span(cta, role.name, what, block, begin, self._clock.now))

    def _step(self, cta: int, role: Role, step: Step, block: int) -> _Wait:
        if step.action is Action.MEET:
            yield from self._meet(cta, role, step.ring)
            return
        ring = self._protocol.ring(step.ring)
        fill = 0 if ring.unit is Unit.ITEM else block
        ctas = range(len(self._ctas)) if ring.multicast else (cta,)
        if step.action is Action.WAIT:
            yield from self._pass(self._gate("full", cta, ring, fill))
        elif step.action is Action.ACQUIRE:
            if fill >= ring.stages:
                yield from self._pass(self._gate("empty", cta, ring, fill - ring.stages))
        elif step.action is Action.ARM:
            self._gate("full", cta, ring, fill).arrive(step.arrivals)
        elif step.action is Action.COMMIT:
            if _is_scored(step) and cta == 0:
                self._committed[block] = self._clock.now
            self._gate("full", cta, ring, fill).arrive(step.arrivals)
        elif step.action is Action.RELEASE:
            for each in ctas:
                delay = 0.0 if each == cta else self._timings.remote
                self._arrive_later(delay, "empty", each, ring, fill, step.arrivals)
        elif step.action is Action.FETCH:
            self._arrive_later(self._timings.copy, "full", cta, ring, fill, step.arrivals)
        elif step.action is Action.COPY:
            self._copy(cta, ring, fill, ctas)

    def _pass(self, gate: _Gate) -> _Wait:
        if not gate.open:
            yield gate
            yield self._timings.wake

    def _gate(self, which: str, cta: int, ring: Ring, fill: int) -> _Gate:
        """Of a fill: its full barrier, whose boxes count as arrivals, or its empty one."""
        key = which, cta, ring.name, fill
        if key not in self._gates:
            boxes = 0
            if any(s.action is Action.COPY and s.ring == ring.name for role in self._protocol.roles for s in role.trip):
                boxes = _BOXES * (len(self._ctas) if ring.multicast else 1)
            self._gates[key] = _Gate(ring.full + boxes if which == "full" else ring.empty)
        return self._gates[key]

    def _arrive_later(self, delay: float, which: str, cta: int, ring: Ring, fill: int, arrivals: int) -> None:
        gate = self._gate(which, cta, ring, fill)
        self._clock.at(self._clock.now + delay, lambda: gate.arrive(arrivals))

    def _meet(self, cta: int, role: Role, name: str) -> _Wait:
        """The n-th time that a role comes, it waits for the others' n-th."""
        meeting = next(each for each in self._protocol.meetings if each.name == name)
        ctas = len(self._ctas) if meeting.across_cluster else 1
        came = self._met.get((f"{name} {role.name}", cta), 0)
        self._met[f"{name} {role.name}", cta] = came + 1
        key = "meet", -1 if meeting.across_cluster else cta, name, came
        gate = self._gates.setdefault(key, _Gate(ctas * len(meeting.roles)))
        gate.arrive()
        yield from self._pass(gate)

    def _copy(self, cta: int, ring: Ring, fill: int, targets: Sequence[int]) -> None:
        memory, box = self._ctas[cta].memory, self._copied / _BOXES
        saved = _SAVED_TILES * self._copied / self._bytes_a_cycle
        memory.free = max(memory.free, self._clock.now - saved)
        for _ in range(_BOXES):
            share = memory.serve(0.0, box / self._bytes_a_cycle)
            burst = self._ctas[cta].link.serve(self._clock.now, box / MOST_BYTES_A_CYCLE)
            landing = max(share, burst) + self._timings.copy
            for target in targets:
                self._land(landing, self._ctas[target].port, self._gate("full", target, ring, fill), box)

    def _land(self, time: float, port: _Server, gate: _Gate, box: float) -> None:
        def land() -> None:
            self._clock.at(port.serve(self._clock.now, box / SHARED_BYTES_A_CYCLE), gate.arrive)

        self._clock.at(time, land)

    # What takes a warp's time.

    def _pace(self, cycles: float) -> float:
        """Of an instruction: one in so many cycles finds the scheduler taken by another warp that often."""
        others = max(0, len(self._works) - 1)
        return max(cycles + others / max(cycles, 1.0), 1.0 + others)

    def _work(self, cta: _Cta, products: _Products, ops: Sequence[Op]) -> _Wait:
        t = self._timings
        cycles = {
            Kind.CHAIN: self._pace(t.chain),
            Kind.WIDE: self._pace(t.wide),
            Kind.EXPONENTIAL: max(t.exponential, self._pace(t.wide)),
            Kind.CONVERT: max(t.convert, self._pace(t.wide)),
            Kind.READ: t.read,
            Kind.EXCHANGE: t.exchange,
            Kind.MEET: t.meet,
            Kind.FENCE: t.fence,
        }
        landed = 0.0
        for op in ops:
            if op.kind in cycles:
                yield op.count * cycles[op.kind]
            elif op.kind is Kind.LOAD:
                landed = cta.port.serve(self._clock.now, op.count * _MATRIX_LOAD_CYCLES) + t.matrix_load
                yield op.count * cycles[Kind.WIDE]
            elif op.kind is Kind.LANDED:
                yield max(0.0, landed - self._clock.now)
            elif op.kind is Kind.PRODUCTS:
                products.start(op)
                yield op.instructions * cycles[Kind.WIDE]
            elif op.kind is Kind.DRAIN:
                gate = products.latest(op.group)
                if gate is not None and not gate.open:
                    yield gate
                yield cycles[Kind.CHAIN]
