"""NVIDIA disassembly (`nvdisasm -c`) read as instructions: the main loop, what it spends, what it spills.

An address line looks like

    /*0a10*/              @!P0 BRA `(.L_x_1) ;

and a label stands alone on its line (`.L_x_1:`). A branch is unconditional only without a predicate in front and
without a second operand (`BRA.U !UP0, ...`, `BRA.DIV ...` are conditional without an `@`). Instructions of a
subroutine behind `CALL` aren't added to the loop that calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pagedmla.hardware.loops import Instruction, Loop, main_loop

_LABEL = re.compile(r"^(\.L_x_\w+|\$?[\w.$]+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")

_CLASSES = {
    "tensor": r"(?:H|I|Q|B|D|O)MMA|(?:H|I|Q|B)GMMA|UTC\w*MMA",
    "spill": r"LDL|STL",
    "global": r"LDG|STG|LDGSTS|LD|ST|UTMA\w+|UBLKCP|RED|REDG|ATOM|ATOMG",
    "shared": r"LDS|STS|LDSM|STSM|MOVM|LDTM|STTM|ATOMS",
    "convert": r"F2F|F2FP|I2F|I2FP|F2I|PRMT",
    "half": r"HADD2|HMUL2|HFMA2|HMNMX2|HSETP2",
    "float": r"FFMA2?|FMUL2?|FADD2?|FMNMX3?|FSETP|FSEL|FCHK",
    "special": r"MUFU",
    "shuffle": r"SHFL|REDUX|VOTEU?|MATCH",
    "control": r"BRA|BSSY|BSYNC|BREAK|BAR|EXIT|RET|CALL|NOP|WARPSYNC|WARPGROUP|DEPBAR|LDGDEPBAR|SYNCS|MEMBAR|FENCE"
    r"|ERRBAR|CCTL|ELECT|NANOSLEEP|YIELD|ARRIVES|ENDCOLLECTIVE|UCGABAR_\w+",
}
_CLASS_OF = {name: re.compile(pattern) for name, pattern in _CLASSES.items()}


def parse(listing: str) -> list[Instruction]:
    """Instructions of a listing in address order, jump targets resolved to indices. Padding after the last is kept."""
    rows: list[tuple[str, str, bool, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label.group(1)] = len(rows)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            opcode, operands = found["opcode"], found["operands"].strip()
            rows.append((opcode, f"{found['guard'] or ''}{opcode} {operands}".strip(), bool(found["guard"]), operands))
    return [_instruction(opcode, text, guarded, operands, labels) for opcode, text, guarded, operands in rows]


def classify(instruction: Instruction) -> str:
    """Which resource an instruction spends: a key of the table above, else "integer" (addresses, moves, logic)."""
    base = instruction.opcode.split(".")[0]
    return next((name for name, pattern in _CLASS_OF.items() if pattern.fullmatch(base)), "integer")


def find_main_loop(code: Sequence[Instruction]) -> Loop | None:
    """The loop with the most tensor instructions; None in a kernel without any."""
    return main_loop(code, lambda instruction: classify(instruction) == "tensor")


def straight_line(code: Sequence[Instruction]) -> list[Instruction]:
    """The whole program: all up to its last EXIT (behind it stand a self-branch and padding)."""
    last = max((i for i, instruction in enumerate(code) if instruction.opcode.split(".")[0] == "EXIT"), default=-1)
    return list(code[: last + 1])


def spill_words(code: Iterable[Instruction]) -> int:
    """32-bit words a thread moves to and from local memory, each instruction counted once."""
    return sum(_words(instruction.opcode) for instruction in code if classify(instruction) == "spill")


def _words(opcode: str) -> int:
    return {"64": 2, "128": 4, "256": 8}.get(next((part for part in opcode.split(".")[1:] if part.isdigit()), ""), 1)


def _instruction(opcode: str, text: str, guarded: bool, operands: str, labels: dict[str, int]) -> Instruction:
    base = opcode.split(".")[0]
    if base in ("BRA", "JMP"):
        jump = _TARGET.search(operands)
        conditional = guarded or "," in operands
        return Instruction(opcode, text, labels.get(jump.group(1)) if jump else None, conditional)
    if base in ("EXIT", "RET", "BRX", "JMX", "BPT"):
        return Instruction(opcode, text, None, guarded)
    return Instruction(opcode, text)
