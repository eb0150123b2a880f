"""A pytest plugin (`-p cases.gpu_record --proven FILE`): what passed on a GPU becomes the record that plans look at.

A test says which kernel it proves with `record_property("proves", Cubin fields)`. A kernel is proven when every test
that names it passed; the file then holds those records and no others. Nothing is recorded where a test failed that
names none: whatever it found (a race, a graph that replays wrongly, a fault that took a worker) may be any kernel's.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proven", metavar="FILE", type=Path, help="write the records of what passed here")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--proven")
    if path is not None and not hasattr(config, "workerinput"):  # with xdist, reports reach the controller
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._proved: dict[str, dict[str, Any]] = {}
        self._failed: set[str] = set()
        self._others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        names = any(name == "proves" for name, _ in report.user_properties)
        if report.failed and not (names and report.when == "call"):
            self._others.append(report.nodeid)
        for name, value in report.user_properties:
            if name != "proves" or report.when != "call":
                continue
            if not report.passed:
                self._failed.add(value["variant"])
            kept = self._proved.setdefault(value["variant"], {**value, "cases": 0})
            kept["cases"] += value["cases"]

    def pytest_sessionfinish(self) -> None:
        if not self._proved:  # no GPU, or nothing selected: older records stay
            return
        if self._others:
            print(f"\nnothing recorded, for a test failed that names no kernel: {', '.join(self._others)}")
            return
        made_on = {
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "driver": _driver(),
            "date": datetime.date.today().isoformat(),
        }
        rows = [
            {**{key: value[key] for key in ("variant", "address", "sha256")}, **made_on, "cases": value["cases"]}
            for variant, value in sorted(self._proved.items())
            if variant not in self._failed
        ]
        self._path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
        print(f"\n{len(rows)} kernels proven, {len(self._failed)} failed: {self._path}")


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
