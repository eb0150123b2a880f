"""Reading a cubin: how often the disassembler runs. What it finds is tested with the kernels' own builds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pagedmla.cutlass_kernels import resources
from pagedmla.hardware import footprint


def test_a_cubin_is_disassembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pagedmla compile --out` took a second a kernel more than it needed: each was disassembled to be counted, and
    again to be written to a file."""
    ran = []

    def tool(name: str, arguments: list[str], cubin: bytes) -> str:
        ran.append((name, cubin))
        return "REG:40" if name == "cuobjdump" else ".text.kernel:\n        /*0000*/                   EXIT ;\n"

    monkeypatch.setattr(footprint, "_tool", tool)
    footprint.disassemble.cache_clear()
    made = footprint.of_cubin(b"one", 4, 0)
    assert made.registers == 40
    footprint.disassemble(b"one")
    footprint.disassemble(b"another")
    footprint.disassemble.cache_clear()  # nobody after this test gets this text
    assert [cubin for name, cubin in ran if name == "nvdisasm"] == [b"one", b"another"]


def test_so_is_one_of_the_cutlass_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(Path(command[-1]).read_bytes())
        return subprocess.CompletedProcess(command, 0, "text", "")

    monkeypatch.setattr(resources, "_nvdisasm", lambda: tmp_path / "nvdisasm")
    monkeypatch.setattr(subprocess, "run", run)
    resources.disassemble.cache_clear()
    assert [resources.disassemble(cubin) for cubin in (b"one", b"one", b"another")] == ["text"] * 3
    resources.disassemble.cache_clear()
    assert ran == [b"one", b"another"]
