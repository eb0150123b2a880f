"""What a cubin spends, read from the file itself: registers, stack, instructions. Needs no GPU.

Registers and stack stand in the ELF section .nv.info, as a list of attributes: format (1 byte), attribute (1), and, for
format 4, size (2) and so many bytes, here a symbol's index (4) and a value (4).
"""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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
