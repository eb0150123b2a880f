"""tests/cases/gpu_record.py: which kernels a run on a GPU proves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases.gpu_record import _Recorder


def report(outcome: str, variant: str | None, when: str = "call") -> SimpleNamespace:
    kernel = {"variant": variant, "address": "a", "sha256": "b", "cases": 3}
    properties = [] if variant is None else [("proves", kernel)]
    return SimpleNamespace(
        nodeid=f"{variant}",
        user_properties=properties,
        when=when,
        passed=outcome == "passed",
        failed=outcome == "failed",
    )


def recorded(path: Path, *reports: SimpleNamespace) -> list[str] | None:
    recorder = _Recorder(path)
    for each in reports:
        recorder.pytest_runtest_logreport(each)
    recorder.pytest_sessionfinish()
    return [row["variant"] for row in json.loads(path.read_text())] if path.exists() else None


def test_a_kernel_is_proven_by_all_that_name_it(tmp_path: Path) -> None:
    reports = [report("passed", "one"), report("passed", "two"), report("failed", "two"), report("passed", None)]
    assert recorded(tmp_path / "proven.json", *reports) == ["one"]


@pytest.mark.parametrize("when", ["setup", "call"])
def test_a_failure_that_names_no_kernel_proves_none(when: str, tmp_path: Path) -> None:
    """A race, a graph that replayed wrongly or a worker that was lost left a record of all kernels."""
    reports = [report("passed", "one"), report("failed", None, when)]
    assert recorded(tmp_path / "proven.json", *reports) is None
