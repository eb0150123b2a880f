"""`make gpu` where it can't run: what it would run, and one line for each thing that is missing.

Whether it passes on a GPU is for a GPU to say.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cases import gpu_ready

ROOT = Path(__file__).parent.parent
# They build, record or interpret kernels, and launch none.
ELSEWHERE = {"test_budgets.py", "test_compile.py", "test_interpreter.py", "test_one_build.py", "test_tiles.py"}


@pytest.fixture(scope="module")
def commands() -> str:
    make = shutil.which("make")
    if make is None:
        pytest.skip("GNU make isn't installed")
    done = subprocess.run([make, "-n", "gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_is_run(commands: str) -> None:
    """The kernels of pieces, which run most decode steps, stood in no list."""
    run = set(re.findall(r"tests/triton_kernels/(\w+\.py)", commands))
    assert run == {path.name for path in (ROOT / "tests" / "triton_kernels").glob("test_*.py")} - ELSEWHERE


def test_what_is_run_exists(commands: str) -> None:
    paths = re.findall(r"tests/[\w/]+(?:\.py)?", commands)
    assert "tests/gpu" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    plugins = re.findall(r"-p (cases\.\w+)", commands)
    assert plugins == ["cases.gpu_record", "cases.on_gpu"]


def test_what_a_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without pytest-timeout it was pytest's usage, twice; without a GPU a thousand tests were skipped one by one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (packages, gpu) = gpu_ready.missing(lambda name: None if name in ("xdist", "pytest_timeout") else object())
    assert packages.startswith("pytest-xdist pytest-timeout: not installed for ")
    assert gpu.startswith("no GPU: ")
    assert [line.split(":")[0] for line in gpu_ready.missing(lambda name: None)] == [
        " ".join(gpu_ready.PACKAGES.values())
    ]
    assert gpu_ready.main() == 1
    assert all(line.startswith("make gpu: ") for line in capsys.readouterr().err.splitlines())


def test_what_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert gpu_ready.missing(lambda name: object()) == []
    (sentence,) = gpu_ready.left_out()
    assert sentence == "CUTLASS kernels are for compute capability 9.0 (Hopper); A100 has 8.0: skipped"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (sentence,) = gpu_ready.left_out(lambda name: None)
    assert sentence.startswith("cuda-python isn't installed")
    monkeypatch.setattr("pagedmla.cutlass_kernels.cubin_cache.dsl_version", lambda: None)
    monkeypatch.setattr("pagedmla.cutlass_kernels.cubin_cache.CubinCache.find", lambda *_: None)
    (sentence,) = gpu_ready.left_out(lambda name: object())
    assert re.match(r"0 of \d+ CUTLASS kernels are built and the DSL isn't installed: run `pagedmla compile", sentence)
    monkeypatch.setattr("pagedmla.cutlass_kernels.cubin_cache.CubinCache.find", lambda *_: object())
    assert gpu_ready.left_out(lambda name: object()) == []
