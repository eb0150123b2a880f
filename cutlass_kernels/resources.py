"""What a cubin spends, read from the file itself: registers, stack, instructions. Needs no GPU.

A usual trip of the decode kernel is one amid an item: there is a tile before its own, every row sees every key, no key
is past the end, and no row's maximum has risen so far that O is scaled anew. It is counted for a warp that settles rows
(the others jump over some 50 instructions), and the producer's with every copy. What it jumps over is found in the
disassembly (`rare_parts`), and everything else is counted, taken or not (`count_trip`).

Registers and stack stand in the ELF section .nv.info, as a list of attributes: format (1 byte), attribute (1), and, for
format 4, size (2) and so many bytes, here a symbol's index (4) and a value (4).
"""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pagedmla.hardware import sass
from pagedmla.hardware.loops import Graph, Instruction, Loop, basic_blocks, natural_loops

_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
_SIZED = 4


@dataclass(frozen=True)
class Resources:
    """`registers` of a thread at launch (setmaxnreg moves them later) and `stack` in bytes, of the largest kernel."""

    registers: int
    stack: int


def read_resources(cubin: bytes) -> Resources:
    """ValueError where the bytes aren't a cubin that says what it uses."""
    found = {_REGISTERS: 0, _FRAME: 0}
    try:
        for attribute, value in _attributes(cubin):
            if attribute in found:
                found[attribute] = max(found[attribute], value)
    except (struct.error, IndexError, OverflowError, ValueError) as damage:
        raise ValueError(
            f"cubin: expected an ELF file of NVIDIA's; got {len(cubin)} other bytes ({damage})"
        ) from damage
    if not found[_REGISTERS]:
        raise ValueError("cubin: expected a register count in .nv.info; got none")
    return Resources(found[_REGISTERS], found[_FRAME])


def _attributes(cubin: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of each entry in .nv.info that speaks of a symbol."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    strings = sections[names][4]
    for name, _, _, _, start, length in sections:
        if cubin[strings + name : cubin.index(b"\0", strings + name)] != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, attribute, entry = struct.unpack_from("<BBH", cubin, at)
            if form == _SIZED:
                if entry >= 8:
                    yield attribute, struct.unpack_from("<I", cubin, at + 8)[0]
                at += entry
            at += 4


@lru_cache(maxsize=2)
def disassemble(cubin: bytes) -> str:
    """SASS, as `nvdisasm -c` prints it; kept for whoever counts and then writes it to a file.

    FileNotFoundError says what to install where there is no nvdisasm.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(_nvdisasm()), "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _nvdisasm() -> Path:
    """NVIDIA's disassembler from its own wheel, or the one that Triton's wheel carries."""
    for package, pattern in (("nvidia", "*/bin/nvdisasm"), ("triton", "backends/nvidia/bin/nvdisasm")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).glob(pattern)):
                return path
    raise FileNotFoundError("nvdisasm: not found; pip install nvidia-cuda-nvdisasm")


# -- what a usual trip issues ------------------------------------------------------------------------------------------


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


def count_trip(
    code: Sequence[Instruction], trip: Loop, inner: Sequence[Loop], inner_trips: int, copy: str
) -> TripCount:
    """Of the consumers' loop `trip`; `inner` are loops in it that run `inner_trips` times. The producer's loop is the
    innermost that holds a `copy`.
    """
    every = len(trip.body) + (inner_trips - 1) * sum(len(loop.body) for loop in inner)
    rare = {index for part in rare_parts(code, trip) for index in part.body}
    copying = [loop for loop in natural_loops(code) if any(copy in code[index].opcode for index in loop.body)]
    producer = min((len(loop.body) for loop in copying), default=0)
    return TripCount(every, every - len(rare), producer)


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
