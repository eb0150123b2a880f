"""Tests that need a Hopper GPU. A kernel that hangs or faults takes its process with it, so `make gpu` runs them under
xdist, where a worker that dies is replaced and its test counted as failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU (compute capability 9.0)")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _context_still_works(gpu: torch.device) -> Iterator[None]:
    """After an illegal access nothing in this process works any more: end it, rather than fail all that follows."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        print(f"CUDA context lost: {broken}", flush=True)
        os._exit(3)
