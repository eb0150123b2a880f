"""AMD assembly (LLVM's `amdgcn` text) read as instructions: the main loop, what it spills.

Labels look like `.LBB0_5:`, branches like `s_cbranch_scc1 .LBB0_5` (conditional) and `s_branch .LBB0_6`; comments
start with `;`. Directives start with a dot and aren't instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pagedmla.hardware.loops import Instruction, Loop, main_loop

_LABEL = re.compile(r"^(\.L?BB\w+|\w+):$")
_INSTRUCTION = re.compile(r"^(?P<opcode>[a-z]+_[a-z]\w*)\b(?P<operands>.*)$")
_SCRATCH_WORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}


def parse(assembly: str) -> list[Instruction]:
    """Instructions of an assembly text in address order, jump targets resolved to indices."""
    rows: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for raw in assembly.splitlines():
        line = raw.split(";")[0].strip()
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(rows)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            rows.append((found["opcode"], found["operands"].strip()))
    return [
        Instruction(
            opcode,
            f"{opcode} {operands}".strip(),
            labels.get(operands) if "branch" in opcode else None,
            opcode not in ("s_branch", "s_endpgm", "s_setpc_b64"),
        )
        for opcode, operands in rows
    ]


def find_main_loop(code: Sequence[Instruction]) -> Loop | None:
    """The loop with the most matrix instructions; None in a kernel without any."""
    return main_loop(code, lambda instruction: instruction.opcode.startswith(("v_mfma", "v_smfmac")))


def straight_line(code: Sequence[Instruction]) -> list[Instruction]:
    """The whole program: all up to its last `s_endpgm`."""
    last = max((i for i, instruction in enumerate(code) if instruction.opcode == "s_endpgm"), default=-1)
    return list(code[: last + 1])


def spill_words(code: Iterable[Instruction]) -> int:
    """32-bit words a lane moves to and from scratch memory, each instruction counted once."""
    return sum(
        _SCRATCH_WORDS.get(instruction.opcode.rsplit("_", 1)[1], 1)
        for instruction in code
        if instruction.opcode.startswith(("scratch_load", "scratch_store"))
    )
