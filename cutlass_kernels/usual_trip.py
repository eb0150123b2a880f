"""A trip of the decode kernel in its disassembly: where it is, what a usual one jumps over, and what it counts.

A usual trip is one amid an item: there is a tile before its own, every row sees every key, no key is past the end, and
no row's maximum has risen so far that O is scaled anew. It is counted for a warp that settles rows (the others jump
over some 50 instructions), and the producer's with every copy. What it jumps over is found in the disassembly
(`rare_parts`), and everything else is counted, taken or not (`count_trip`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedmla.cutlass_kernels.tiles import SCORE_TRIPS
from pagedmla.hardware import sass
from pagedmla.hardware.loops import Graph, Instruction, Loop, basic_blocks, natural_loops

_TENSOR_COPY = "UTMALDG"


def find_trip(code: Sequence[Instruction]) -> tuple[Loop, list[Loop]] | None:
    """The consumers' loop: the smallest of those with more than half as many tensor instructions as the fullest.

    With it, the loops inside it that hold some: score chunks, SCORE_TRIPS trips each. None where there are none at all.
    """
    held = [(loop, sum(sass.classify(code[i]) == "tensor" for i in loop.body)) for loop in natural_loops(code)]
    all_of_them = max((count for _, count in held), default=0)
    if all_of_them == 0:
        return None
    trip = min((loop for loop, count in held if 2 * count > all_of_them), key=lambda loop: len(loop.body))
    return trip, [loop for loop, count in held if count and set(loop.body) < set(trip.body)]


@dataclass(frozen=True)
class RarePart:
    """Instructions (by index) that a branch of the loop jumps over in a usual trip.

    kind   "rescale": O scaled anew; "mask": keys hidden from rows; "clear": values past the end, the warps' meeting
           behind that included; "other": none of these
    """

    kind: str
    body: tuple[int, ...]


@dataclass(frozen=True)
class TripCount:
    """Instructions of a warp: of a consumer's trip with all of its branches, of its usual one, of the producer's."""

    every: int
    usual: int
    producer: int

    @property
    def usual_with_producer(self) -> float:
        """The producer's one warp shared out over the consumer warps' own tile: four of them are a warpgroup."""
        return self.usual + self.producer / 4


def count_trip(code: Sequence[Instruction], trip: Loop, chunks: Sequence[Loop]) -> TripCount:
    """Of what `find_trip` found."""
    every = len(trip.body) + (SCORE_TRIPS - 1) * sum(len(loop.body) for loop in chunks)
    rare = {index for part in rare_parts(code, trip) for index in part.body}
    return TripCount(every, every - len(rare), len(copying_loop(code)))


def copying_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The producer's loop: the innermost that holds a tensor copy; nothing where none does."""
    bodies = ([code[index] for index in loop.body] for loop in natural_loops(code))
    return min((body for body in bodies if any(_TENSOR_COPY in each.opcode for each in body)), key=len, default=[])


def rare_parts(code: Sequence[Instruction], trip: Loop) -> list[RarePart]:
    """Parts of a loop that a branch jumps over and that have nothing of a usual trip: no product, no wait at an
    mbarrier, no exponential. A part within another is that one's.
    """
    graph, body = basic_blocks(code), set(trip.body)
    found: list[RarePart] = []
    for blocks in _jumped_over(code, graph, trip):
        indices = tuple(index for block in sorted(blocks) for index in graph.blocks[block] if index in body)
        if not any(_is_usual(code[index]) for index in indices):
            found.append(RarePart(_kind([code[index] for index in indices]), indices))
    return [part for part in found if not any(set(part.body) < set(other.body) for other in found)]


def _jumped_over(code: Sequence[Instruction], graph: Graph, trip: Loop) -> Iterator[set[int]]:
    """Blocks between a conditional branch and where it jumps to, for each that jumps ahead within the loop.

    Whatever else leads into them, or out of them without passing that place, makes them none.
    """
    body = set(trip.body)
    inside = {number for number, block in enumerate(graph.blocks) if block.start in body}
    for number in sorted(inside):
        block = graph.blocks[number]
        branch = code[block[-1]]
        if branch.target is None or not branch.falls_through or branch.target not in body:
            continue
        end = next(each for each in inside if graph.blocks[each].start == branch.target)
        if branch.target <= block[-1] or number + 1 == end or number + 1 not in inside:
            continue
        between, todo = {number + 1}, [number + 1]
        while todo:
            # Out of the loop lead only the stubs in which a wait is repeated: they come back to where they left.
            following = (set(graph.successors[todo.pop()]) & inside) - {end} - between
            between |= following
            todo += following
        entered = {each for one in between for each in graph.predecessors[one] if each in inside}
        if graph.blocks[min(between)].start > block[-1] and entered <= between | {number}:
            yield between


def _is_usual(instruction: Instruction) -> bool:
    return sass.classify(instruction) in ("tensor", "special") or instruction.opcode.startswith("SYNCS")


def _kind(part: Sequence[Instruction]) -> str:
    opcodes = [each.opcode.split(".")[0] for each in part]
    if "BAR" in opcodes and "STS" in opcodes:
        return "clear"
    if any(each.opcode.startswith("FSEL") and "-INF" in each.text for each in part):
        return "mask"
    if 2 * opcodes.count("FMUL") > len(opcodes):
        return "rescale"
    return "other"
