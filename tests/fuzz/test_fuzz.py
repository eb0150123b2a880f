"""The fuzzer in `make test`: a few of its steps through each executor, and proof that it finds faults.

`make fuzz` runs 10,000 steps, and 300 through what is slow. 200 steps are seven pools of 30 actions, so that pages are
shared, freed and handed out again many times. Each planted fault must be found, its script must fail in a process that
knows nothing of these tests, and must pass there without the fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz.__main__ import main
from fuzz.campaign import run
from fuzz.draw import LIMITS, draw_setting
from fuzz.faults import FAULTS
from fuzz.play import World

from pagedmla import PagePool

ROOT = Path(__file__).parents[2]
FOUND_WITHIN = 200  # steps


def test_the_vectorised_executor() -> None:
    summary = run("torch", 200, seed=0)
    assert not summary.failures, summary
    assert summary.actions["Step"] > 80


@pytest.mark.parametrize(
    ("executor", "steps", "seed"), [("triton", 10, 2), ("triton", 10, 3), ("cutlass-model", 24, 0)]
)
def test_the_slow_executors(executor: str, steps: int, seed: int) -> None:
    if executor == "triton":
        pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    summary = run(executor, steps, seed)
    assert not summary.failures, summary
    assert summary.actions["Step"] >= 3


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first, second = (run("torch", 12, seed=5, scripts=tmp_path) for _ in range(2))
    assert (first.actions, first.worst) == (second.actions, second.worst)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "30", "--slow-steps", "0", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "torch: 30 steps in 1 pools: " in shown
    assert "worst error, as a share of what is allowed" in shown


def test_planted_faults_are_found(tmp_path: Path) -> None:
    scripts = {}
    for name, fault in FAULTS.items():
        with fault():
            summary = run("torch", FOUND_WITHIN, seed=0, scripts=tmp_path / name, seconds=0.3)
        assert summary.failures, f"{name} wasn't found in {FOUND_WITHIN} steps"
        scripts[name] = summary.failures[0][0]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "faults.py")]
    command += [str(part) for pair in scripts.items() for part in pair]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ends = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert set(ends) == set(FAULTS)
    for name, (planted, sound) in ends.items():
        assert planted != "passes", name
        assert planted in ("AssertionError", "IndexError"), (name, planted)
        assert sound == "passes", (name, sound)


def test_a_script_says_no_more_than_it_must(tmp_path: Path) -> None:
    """One request and one step, whose options are all at their simplest."""
    with FAULTS["a_query_sees_the_next_key"]():
        summary = run("torch", FOUND_WITHIN, seed=0, scripts=tmp_path, seconds=10.0)
    ((path, failure),) = summary.failures
    text = path.read_text(encoding="utf-8")
    happened = text.split("# What happened.")[1]
    assert str(failure) in text
    assert (happened.count("pool.allocate"), happened.count("pool.values(")) == (1, 1), happened
    assert "values, starts = step\n" in happened
    assert "def relaid" not in text  # nor the source of what it doesn't call


@pytest.mark.parametrize("executor", LIMITS)
def test_every_setting_can_be(executor: str) -> None:
    """A setting that the pool refuses would end an episode before it began."""
    for seed in range(60):
        setting = draw_setting(Random(seed), executor)
        with World(setting) as world:
            assert world.play(setting.statements()) is None


def test_a_pool_that_cant_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a fault ended the campaign in a bare traceback, without a script and without its other findings."""
    real = PagePool.__init__

    def refusing(self: PagePool, *arguments: Any, page_size: int, **keywords: Any) -> None:
        if page_size < 40:
            raise RuntimeError(f"a planted fault of pages of {page_size} tokens")
        real(self, *arguments, page_size=page_size, **keywords)

    monkeypatch.setattr(PagePool, "__init__", refusing)
    summary = run("torch", 60, seed=0, scripts=tmp_path, most_failures=3, seconds=1.0)
    paths = [path for path, _ in summary.failures]
    assert len(set(paths)) == 3
    for path, failure in summary.failures:
        assert str(failure) in str(summary)
        happened = path.read_text(encoding="utf-8").split("# What happened.")[1]
        assert happened.strip().splitlines()[-1].startswith("pool = pagedmla.PagePool(layout, ")
        assert str(failure).startswith("RuntimeError: a planted fault of pages of ")


@pytest.mark.parametrize("arguments", [
    ["--steps", "-5"], ["--steps", "0"], ["--failures", "0"], ["--slow-steps", "-1"], ["--steps", "many"]
])  # fmt: skip
def test_a_campaign_of_nothing_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each of these passed, with nothing run."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    wanted = f"argument {arguments[0]}: expected a whole number of at least "
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("numbers", [{"steps": 0}, {"steps": 5, "most_failures": 0}])
def test_run_refuses_a_campaign_of_nothing(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{list(numbers)[-1]}: expected at least 1; got 0"):
        run("torch", seed=0, **numbers)
