"""Tests on the real MAX: skipped, by name, where it isn't installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pagedmla.adapters.max import installed_version

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def max_is_here() -> None:
    """Only a MAX that isn't there is skipped: one that doesn't import fails."""
    try:
        installed_version()
    except ImportError:
        pytest.skip("max isn't installed: `make test-max` installs it")


@pytest.fixture
def page_strides(max_is_here: None) -> None:
    if installed_version().startswith("26.6."):
        pytest.skip("max 26.6 has neither page strides nor slots")


@pytest.fixture(scope="session")
def operations(max_is_here: None) -> Any:
    if installed_version().startswith("26.6."):
        pytest.skip("max 26.6 has no operation that reads rows")
    from theirs import compile_operations

    return compile_operations()
