"""What README.md tells a newcomer to type must work: its example, and its `pagedmla` commands in their order.

The two `make` commands are what runs this test and, in CI, what runs after it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = "from pagedmla.plugin.cli import main; main()"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_example(tmp_path: Path) -> None:
    (example,) = code_blocks("python")
    done = run(["-c", example], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_the_commands(tmp_path: Path) -> None:
    lines = [line for block in code_blocks("sh") for line in block.splitlines() if line.startswith("pagedmla ")]
    assert [line.split()[1] for line in lines] == ["demo", "demo", "inspect", "explain", "compile", "bench"]
    for line in lines:
        done = run(["-c", COMMAND, *shlex.split(line, comments=True)[1:]], tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "cache.png").stat().st_size > 10_000
