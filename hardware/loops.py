"""Loops of a disassembled kernel: which instructions run once per trip of its main loop.

Works on any instruction set: a parser (`sass`, `amdgcn`) turns a listing into `Instruction`s, this module finds
the natural loops (Aho, Lam, Sethi, Ullman, "Compilers", 9.6) and picks the main one.

Counting by address (everything between a label and the branch back to it) goes wrong where a compiler moves cold
code: retry stubs of an mbarrier wait stand behind EXIT and branch back into the middle of the loop. Here a branch
closes a loop only if its target dominates it, so a stub never looks like a loop of its own, and outlined blocks
(past an EXIT that the loop stands in front of) are left out of the count, since they run only when a wait fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `target` is the index that it may jump to, `falls_through` whether the next may run."""

    opcode: str
    text: str
    target: int | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class Loop:
    """A natural loop: index of its first instruction, and the indices of all that run in a usual trip."""

    header: int
    body: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    blocks: list[range]
    successors: list[list[int]]
    predecessors: list[list[int]]


def natural_loops(code: Sequence[Instruction]) -> list[Loop]:
    """All natural loops of `code`; loops that share a header are one loop."""
    if not code:
        return []
    graph = basic_blocks(code)
    dominators = _dominators(graph)
    bodies: dict[int, set[int]] = {}
    for latch, successors in enumerate(graph.successors):
        for header in successors:
            if dominators[latch] >> header & 1:
                bodies.setdefault(header, {header}).update(_reaches(graph, latch, header))
    return [_hot_part(code, graph, header, body) for header, body in sorted(bodies.items())]


def main_loop(code: Sequence[Instruction], weigh: Callable[[Instruction], int]) -> Loop | None:
    """The innermost loop that carries the most weight, among equals the shortest (the unmasked copy)."""
    weighed = [(sum(weigh(code[i]) for i in loop.body), loop) for loop in natural_loops(code)]
    carrying = [(weight, loop) for weight, loop in weighed if weight]
    innermost = [
        (weight, loop)
        for weight, loop in carrying
        if not any(set(other.body) < set(loop.body) for _, other in carrying)
    ]
    if not innermost:
        return None
    return max(innermost, key=lambda pair: (pair[0], -len(pair[1].body)))[1]


def basic_blocks(code: Sequence[Instruction]) -> Graph:
    """The control flow graph; block 0 is the entry."""
    starts = {0}
    for index, instruction in enumerate(code):
        if instruction.target is not None:
            starts.add(instruction.target)
        if instruction.target is not None or not instruction.falls_through:
            starts.add(index + 1)
    edges = [*sorted(start for start in starts if start < len(code)), len(code)]
    blocks = [range(first, last) for first, last in pairwise(edges)]
    number = {block.start: n for n, block in enumerate(blocks)}
    successors: list[list[int]] = [[] for _ in blocks]
    predecessors: list[list[int]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        last = code[block[-1]]
        following = {number[last.target]} if last.target in number else set()
        if last.falls_through and n + 1 < len(blocks):
            following.add(n + 1)
        successors[n] = sorted(following)
        for successor in following:
            predecessors[successor].append(n)
    return Graph(blocks, successors, predecessors)


def _dominators(graph: Graph) -> list[int]:
    """Bit set of the blocks that dominate each block; 0 for a block that the entry can't reach."""
    order, seen, stack = [], {0}, [0]
    while stack:
        block = stack.pop()
        order.append(block)
        for successor in graph.successors[block]:
            if successor not in seen:
                seen.add(successor)
                stack.append(successor)
    everything = (1 << len(graph.blocks)) - 1
    dominators = [everything if block in seen else 0 for block in range(len(graph.blocks))]
    dominators[0] = 1
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = everything
            for predecessor in graph.predecessors[block]:
                if predecessor in seen:
                    common &= dominators[predecessor]
            common |= 1 << block
            if common != dominators[block]:
                dominators[block] = common
                changed = True
    return dominators


def _reaches(graph: Graph, latch: int, header: int) -> set[int]:
    """Blocks from which `latch` can be reached without passing `header`."""
    body, stack = {latch}, [latch]
    while stack:
        block = stack.pop()
        if block == header:
            continue
        for predecessor in graph.predecessors[block]:
            if predecessor not in body:
                body.add(predecessor)
                stack.append(predecessor)
    return body


def _hot_part(code: Sequence[Instruction], graph: Graph, header: int, body: set[int]) -> Loop:
    first = graph.blocks[header].start
    ends = (i for i in range(first, len(code)) if code[i].target is None and not code[i].falls_through)
    behind = next(ends, len(code))
    hot = (i for block in sorted(body) for i in graph.blocks[block] if graph.blocks[block].start <= behind)
    return Loop(first, tuple(hot))
