"""Uniform registers that a kernel reads before it has written them: a compiler's fault, never a source's.

ptxas 12.8 (Triton 3.6 and 3.7 bring it) loses the first copy of a WGMMA descriptor where a loop reuses the shared
memory of one operand for another: the first trip multiplies by whatever the register holds. The source is right and so
is the PTX; only the machine code shows it, and on an H200 the wrong result does.

A forward analysis over the control flow graph (Aho, Lam, Sethi, Ullman, "Compilers", 9.2.4, from the other side): a
register is safe where every path from the entry wrote it. Guarded writes count as writes. Of a descriptor in brackets
as many registers count as its instruction takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagedmla.hardware.loops import Instruction, basic_blocks

_UNIFORM = re.compile(r"UR(\d+)")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_NO_RESULT = re.compile(r"UTMA|UBLK|UCGABAR|UR2UP|USETMAXREG|USETP|UISETP|UBMSK\.SET|UPLOP3|SYNCS|UTCBAR")
_WIDE = re.compile(r"\.(?:64|WIDE)\b")


def unwritten_reads(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(index of the instruction, number of the uniform register) of each read that some path reaches unwritten."""
    if not code:
        return []
    graph = basic_blocks(code)
    touched = [_touched(instruction) for instruction in code]
    everything = (1 << 256) - 1
    written_before = [everything] * len(graph.blocks)
    written_before[0] = 0
    todo = [0]
    seen = {0}
    while todo:
        number = todo.pop()
        written = written_before[number]
        for index in graph.blocks[number]:
            written |= touched[index][0]
        for successor in graph.successors[number]:
            common = written_before[successor] & written
            if common != written_before[successor] or successor not in seen:
                written_before[successor] = common
                seen.add(successor)
                todo.append(successor)
    faults = []
    for number in sorted(seen):
        written = written_before[number]
        for index in graph.blocks[number]:
            writes, reads = touched[index]
            missing = reads & ~written
            faults += [(index, register) for register in range(256) if missing >> register & 1]
            written |= writes
    return faults


def _touched(instruction: Instruction) -> tuple[int, int]:
    """Bit sets of the uniform registers that an instruction writes and reads."""
    text = _GUARD.sub("", instruction.text)
    opcode, _, rest = text.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    wide = 2 if _WIDE.search(opcode) else 1
    writes = reads = 0
    for position, operand in enumerate(operands):
        found = _UNIFORM.search(operand)
        if found is None:
            continue
        first = int(found[1])
        if position == 0 and operand == found[0] and not _NO_RESULT.match(opcode):
            writes |= _bits(first, 4 if ".128" in opcode else wide)
        elif "gdesc[" in operand:
            reads |= _bits(first, 4 if position == 1 else 2)
        elif "desc[" in operand:
            reads |= _bits(first, 2)
        elif opcode.startswith("UIADD3.64"):
            reads |= _bits(first, 2)
        else:
            reads |= _bits(first, 1)
    return writes, reads


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first
