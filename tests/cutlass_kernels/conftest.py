"""A double for the driver that records what it is asked. It is not a driver: it runs nothing and copies nothing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedmla.cutlass_kernels.driver import LaunchShape
from pagedmla.cutlass_kernels.tensor_maps import TiledMap


@dataclass
class Launch:
    """One launch: which function, how, on which stream, and its parameters as they lay in memory at the call."""

    function: Any
    shape: LaunchShape
    stream: int
    parameters: bytes


@dataclass
class RecordingDriver:
    """Stands at pagedmla's own driver interface (driver.Driver). Handles are strings; a map is a running number."""

    clusters: int = 132
    made_current: list[tuple[int, int]] = field(default_factory=list)  # (thread, device)
    loaded: list[bytes] = field(default_factory=list)
    allowed: dict[str, int] = field(default_factory=dict)
    encoded: list[TiledMap] = field(default_factory=list)
    prepared: list[tuple[Any, LaunchShape]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def make_current(self, device: int) -> None:
        self.made_current.append((threading.get_ident(), device))

    def load(self, cubin: bytes) -> Any:
        self.loaded.append(cubin)
        return f"module {len(self.loaded)}"

    def function(self, module: Any, name: str) -> Any:
        return f"{name} of {module}"

    def allow_shared(self, function: Any, shared_bytes: int) -> None:
        self.allowed[function] = shared_bytes

    def active_clusters(self, function: Any, shape: LaunchShape) -> int:
        return self.clusters // shape.cluster

    def encode(self, tiles: TiledMap) -> bytes:
        self.encoded.append(tiles)
        return len(self.encoded).to_bytes(1, "little") * 128

    def prepare(self, function: Any, shape: LaunchShape, addresses: Sequence[int]) -> Callable[[int], None]:
        self.prepared.append((function, shape))

        def start(stream: int) -> None:
            parameters = ctypes.string_at(addresses[0], addresses[-1] - addresses[0] + 4)
            self.launches.append(Launch(function, shape, stream, parameters))

        return start


@pytest.fixture
def recorder() -> RecordingDriver:
    return RecordingDriver()
