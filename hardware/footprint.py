"""What a built kernel spends on its target, read from the binary: registers, spills, shared memory, instructions.

Any executor's binary will do: `of_cubin` wants an NVIDIA cubin (and Triton's disassembler, which its wheel carries),
`of_amdgcn` the assembly that LLVM wrote for an AMD target. Nothing here needs a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedmla.hardware import amdgcn, sass
from pagedmla.hardware.loops import Instruction
from pagedmla.hardware.targets import Target


@dataclass(frozen=True)
class Footprint:
    """Static cost of one kernel.

    `instructions` are those of one warp in one trip of the main loop, the one that multiplies matrices; in a kernel
    that multiplies none, those of the whole program, smaller loops once. Spills are 32-bit words that a thread moves
    to or from local memory, every instruction once.
    """

    registers: int
    warps: int
    shared_bytes: int
    spill_words: int
    spill_words_in_loop: int
    instructions: int


def of_cubin(cubin: bytes, warps: int, shared_bytes: int) -> Footprint:
    """Footprint of a cubin that launches `warps` warps a block with `shared_bytes` of dynamic shared memory."""
    used = re.search(r"\bREG:(\d+)", _tool("cuobjdump", ["--dump-resource-usage"], cubin))
    if used is None:
        raise RuntimeError("cuobjdump: expected a line with REG:<n> for the kernel; got none")
    return _footprint(sass, sass.parse(disassemble(cubin)), int(used.group(1)), warps, shared_bytes)


def of_amdgcn(assembly: str, warps: int, shared_bytes: int) -> Footprint:
    """Footprint of a kernel from its `amdgcn` text; registers are architectural and accumulation registers together."""
    used = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    if used is None:
        raise RuntimeError("amdgcn: expected a .vgpr_count in the kernel's metadata; got none")
    return _footprint(amdgcn, amdgcn.parse(assembly), int(used.group(1)), warps, shared_bytes)


@lru_cache(maxsize=2)
def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin, as `nvdisasm -c` prints it. Kept for whoever counts and then writes it to a file."""
    return _tool("nvdisasm", ["-c"], cubin)


def report_row(
    *, footprint: Footprint, target: Target, tokens: int | None, bytes_per_token: float | None, **about: Any
) -> dict[str, Any]:
    """One row of the compile table; `about` as in `_row`.

    `tokens` is what a block covers with the counted instructions (a trip of its main loop, or the whole program): its
    warps share them, so a token costs `instructions * warps / tokens`. None where a kernel doesn't walk tokens.
    """
    return _row(
        target=target,
        **about,
        registers=footprint.registers,
        spill_words=footprint.spill_words,
        spill_words_in_loop=footprint.spill_words_in_loop,
        shared_bytes=footprint.shared_bytes,
        ctas_per_sm=target.blocks_resident(footprint.registers, footprint.warps, footprint.shared_bytes),
        warp_instructions_per_token=round(footprint.instructions * footprint.warps / tokens, 1) if tokens else None,
        bytes_per_token=bytes_per_token,
    )


def refusal_row(*, reason: str, **about: Any) -> dict[str, Any]:
    """The row of a variant that a target can't take: the figures are None and `refused` says why."""
    nothing: dict[str, Any] = dict.fromkeys(_FIGURES)
    return {**_row(**about, **nothing), "refused": reason}


_FIGURES = (
    "registers",
    "spill_words",
    "spill_words_in_loop",
    "shared_bytes",
    "ctas_per_sm",
    "warp_instructions_per_token",
    "bytes_per_token",
)


def _row(
    *,
    kernel: str,
    executor: str,
    target: Target,
    layout: str,
    rows: int,
    options: dict[str, Any],
    compiler: str,
    **figures: float | None,
) -> dict[str, Any]:
    """What every row says; `compiler` is the version that built it."""
    return {
        "kernel": kernel,
        "executor": executor,
        "target": target.name,
        "layout": layout,
        "rows": rows,
        **figures,
        executor: compiler,
        "options": options,
    }


def _footprint(
    language: ModuleType, code: Sequence[Instruction], registers: int, warps: int, shared_bytes: int
) -> Footprint:
    loop = language.find_main_loop(code)
    program = language.straight_line(code)
    spilled = language.spill_words(code)
    if loop is None:
        return Footprint(registers, warps, shared_bytes, spilled, 0, len(program))
    body = [code[i] for i in loop.body]
    return Footprint(registers, warps, shared_bytes, spilled, language.spill_words(body), len(body))


def _tool(name: str, arguments: list[str], cubin: bytes) -> str:
    from triton.backends import nvidia

    program = Path(next(iter(nvidia.__path__))) / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(program), *arguments, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
